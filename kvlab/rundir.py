"""The run folder: the measuring half writes it, the reading half reads it; nothing else is shared.

    manifest.json  requests.jsonl  counters.jsonl  events.jsonl
    logs/  notebooks/  summary.json  SHA256SUMS

Every record is written and flushed as it happens, so a run that dies keeps all it measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab import records, shapes
from kvlab.errors import HostBusy, RunFolderError
from kvlab.records import SCHEMA, Event, RequestRecord, Scrape

STREAMS: dict[type, str] = {
    RequestRecord: "requests.jsonl",
    Scrape: "counters.jsonl",
    Event: "events.jsonl",
}
HOME_VARIABLE = "KVLAB_HOME"
UNSEALED = ("SHA256SUMS", "l2", "lock")
"""What the checksums leave out: themselves, the cache's own folder and the lock."""


def run_id(experiment: str, profile_name: str, profile_sha256: str, at: datetime) -> str:
    """``<UTC time>-<experiment>-<profile>-<hash>``: unique by second and profile content."""
    return f"{at:%Y%m%dT%H%M%SZ}-{experiment}-{profile_name}-{profile_sha256[:8]}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a stream: the row that it holds, or why it holds none."""

    number: int
    row: dict[str, Any] | None
    complaint: str | None = None
    torn: bool = False
    """It was cut by the death of its writer."""


def from_home(path: Path | str) -> Path:
    """The path, relative ones from KVLAB_HOME where that is set.

    JupyterLab starts a kernel in the notebook's own folder; ``make lab`` sets KVLAB_HOME, so that
    ``data/runs`` means the same there as on the command line.
    """
    return Path(os.environ.get(HOME_VARIABLE, ".")) / path


class RunDir:
    """One run's folder. ``append`` writes; ``requests``, ``scrapes`` and ``events`` read."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path = path
        self.manifest = manifest
        self.on_append: Callable[[records.Record], None] | None = None
        """Told of every record once it is written: how progress is drawn."""
        self._whole: set[type] = set()
        """The streams that are known to end with a whole line."""

    @property
    def id(self) -> str:
        return str(self.manifest["run"])

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def notebooks(self) -> Path:
        return self.path / "notebooks"

    @classmethod
    def create(cls, parent: Path, manifest: dict[str, Any]) -> RunDir:
        """A new folder below ``parent`` that holds the manifest; its ``run`` key names it."""
        path = parent / manifest["run"]
        try:
            path.mkdir(parents=True)
            for name in ("logs", "notebooks"):
                (path / name).mkdir()
        except FileExistsError as error:
            raise RunFolderError(
                f"run folder {path} exists already", hint="give --resume to continue it"
            ) from error
        except OSError as error:
            raise RunFolderError(
                f"cannot create the run folder {path}: {error.strerror}",
                hint="choose a writable place with --runs DIR",
            ) from error
        run = cls(path, {"schema": SCHEMA, **manifest, "status": "running"})
        run.write_manifest()
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """The run at ``path``; refuses what is not a run, and runs of a newer schema."""
        path = from_home(path)
        try:
            manifest = shapes.loads((path / "manifest.json").read_bytes())
        except FileNotFoundError as error:
            raise RunFolderError(
                f"{path} is not a run folder: it has no manifest.json",
                hint="runs are listed by `ls data/runs`; give the folder of one",
            ) from error
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"the manifest of {path} cannot be read: {error}",
                hint="restore it from a copy, or measure again",
            ) from error
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        if type(schema) is not int or schema < 1:
            raise RunFolderError(
                f"the manifest of {path} states no schema", hint="is it a kvlab run?"
            )
        if schema > SCHEMA:
            raise RunFolderError(
                f"{path} was written by a newer kvlab (schema {schema}, "
                f"this one reads up to {SCHEMA})",
                hint="update kvlab: pip install --upgrade kvlab",
            )
        complaint = shapes.manifest_complaint(manifest)
        if complaint is None and "run" not in manifest:
            complaint = "it names no run"
        if complaint:
            raise RunFolderError(
                f"the manifest of {path} is not whole: {complaint}",
                hint="restore manifest.json from a copy, or measure again",
            )
        return cls(path, manifest)

    def append(self, record: records.Record) -> None:
        """Write one record and hand it to the operating system before returning."""
        kind = type(record)
        path = self.path / STREAMS[kind]
        try:
            if kind not in self._whole:
                _end_cut_line(path)
                self._whole.add(kind)
            # A server may say half a character; it must not end the run.
            with path.open("a", encoding="utf-8", errors="replace", newline="\n") as stream:
                stream.write(_line(records.to_json(record)))
        except OSError as error:
            raise HostBusy(
                f"cannot write to {path}: {error.strerror}",
                hint="free some disk space, then continue with --resume; what is written is kept",
            ) from error
        if self.on_append is not None:
            self.on_append(record)

    def make_streams(self) -> None:
        """Make the files of kinds of records that did not happen: one that is missing was lost."""
        for name in STREAMS.values():
            (self.path / name).touch()

    def requests(self) -> list[RequestRecord]:
        """Every request record, in the order written."""
        return [records.from_json(RequestRecord, row) for row in self._rows(RequestRecord)]

    def scrapes(self) -> list[Scrape]:
        """Every reading of the counters, in the order written."""
        return [records.from_json(Scrape, row) for row in self._rows(Scrape)]

    @property
    def bootstrap_seed(self) -> int:
        """What the run's intervals are resampled with: the same seed gives the same intervals."""
        return int((self.manifest.get("seeds") or {}).get("bootstrap", 0))

    def events(self) -> list[Event]:
        """Every event, in the order written."""
        return [records.from_json(Event, row) for row in self._rows(Event)]

    def _rows(self, kind: type) -> Iterator[dict[str, Any]]:
        for line in self.lines(kind):
            if line.row is not None:
                yield line.row
            elif not line.torn:
                raise RunFolderError(
                    f"{self.path / STREAMS[kind]}, line {line.number}: {line.complaint}",
                    hint="restore the file from a copy; `kvlab verify` shows what differs",
                )

    def lines(self, kind: type) -> Iterator[Line]:
        """Every line that is not empty, with the row that it holds or what is wrong with it."""
        path = self.path / STREAMS[kind]
        try:
            pieces = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be read: {error.strerror}", hint="check its permissions"
            ) from error
        for number, piece in enumerate(pieces, start=1):
            if piece.strip():
                # The last line without an end, or one that was closed later by an empty line.
                closed = number + 1 < len(pieces) and pieces[number] == b""
                torn = closed or number == len(pieces)
                yield _read_line(kind, number, piece, torn=torn)

    def finished_arms(self) -> set[tuple[int, str]]:
        """The (repeat, scenario) pairs that ran to their end."""
        return {
            (event.repeat, event.scenario)
            for event in self.events()
            if event.kind == "arm_finished" and event.repeat and event.scenario
        }

    def set_aside_unfinished(self) -> int:
        """Move the rows of arms that did not finish to ``aside/``; how many were moved.

        They stay readable and checksummed, but no number is computed from them: a resumed run
        measures such an arm again on fresh servers.
        """
        finished = self.finished_arms()
        moved = 0
        for kind, name in STREAMS.items():
            keep: list[dict[str, Any]] = []
            aside: list[dict[str, Any]] = []
            for row in self._rows(kind):
                arm = (row.get("repeat"), row.get("scenario"))
                (keep if arm == (None, None) or arm in finished else aside).append(row)
            if aside:
                folder = self.path / "aside"
                folder.mkdir(exist_ok=True)
                with (folder / name).open("a", encoding="utf-8", errors="replace") as stream:
                    stream.writelines(map(_line, aside))
                moved += len(aside)
            if aside or any(line.row is None for line in self.lines(kind)):
                _replace(self.path / name, "".join(map(_line, keep)))
        return moved

    def reopen(self) -> None:
        """Take away what was derived from the run when it ended before: it goes on now."""
        for name in ("SHA256SUMS", "summary.json"):
            (self.path / name).unlink(missing_ok=True)

    def write_manifest(self) -> None:
        """Replace manifest.json as a whole: a reader sees the old one or the new one."""
        _replace(self.path / "manifest.json", _pretty(self.manifest))

    def update_manifest(self, **values: Any) -> None:
        """Set keys of the manifest and write it."""
        self.manifest.update(values)
        self.write_manifest()

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace summary.json as a whole."""
        _replace(self.path / "summary.json", _pretty(summary))

    def read_summary(self) -> dict[str, Any] | None:
        """What summary.json holds; None when the run was not summarised yet."""
        try:
            loaded = shapes.loads((self.path / "summary.json").read_bytes())
            if not isinstance(loaded, dict):
                raise ValueError("it is not a JSON object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{self.path / 'summary.json'} is damaged: {error}",
                hint="`kvlab report` needs only the records",
            ) from error
        return loaded

    def seal(self) -> None:
        """Write SHA256SUMS over every file of the run."""
        _replace(
            self.path / "SHA256SUMS",
            "".join(f"{digest}  {name}\n" for name, digest in self.checksums().items()),
        )

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every file of the run by its path in the folder, sorted."""
        names = sorted(
            path.relative_to(self.path).as_posix()
            for path in self.path.rglob("*")
            if path.is_file()
            and not path.is_symlink()
            and path.relative_to(self.path).parts[0] not in UNSEALED
        )
        try:
            return {name: sha256_file(self.path / name) for name in names}
        except OSError as error:
            raise RunFolderError(
                f"{error.filename} cannot be read: {error.strerror}", hint="check its permissions"
            ) from error

    def sealed_checksums(self) -> dict[str, str] | None:
        """What SHA256SUMS states; None when the run was never sealed."""
        try:
            text = (self.path / "SHA256SUMS").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{self.path / 'SHA256SUMS'} is damaged: {error}",
                hint="restore it from a copy",
            ) from error
        pairs = (line.split("  ", 1) for line in text.splitlines() if "  " in line)
        return {name: digest for digest, name in pairs}


def _read_line(kind: type, number: int, text: bytes, *, torn: bool) -> Line:
    try:
        row = shapes.loads(text)
    except ValueError as error:
        why = "is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else ""
        return Line(number, None, why or str(error), torn)
    complaint = shapes.record_complaint(kind, row)
    return Line(number, None, complaint) if complaint else Line(number, row)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file, as lower-case hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """The SHA-256 of a JSON value in its canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def clock_anchor() -> dict[str, Any]:
    """One moment on both clocks: the monotonic one of the records, and UTC."""
    return {"monotonic_ns": records.now_ns(), "utc": datetime.now(UTC).isoformat()}


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _end_cut_line(path: Path) -> None:
    """Close a line that a killed process left half written, and mark it by an empty line."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return
        stream.seek(-1, os.SEEK_END)
        if stream.read(1) != b"\n":
            stream.write(b"\n\n")


def _replace(path: Path, text: str) -> None:
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="replace",
            dir=path.parent,
            prefix=f".{path.name}.",
            delete=False,
        ) as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        fresh = Path(stream.name)
        fresh.chmod(0o644)
        fresh.replace(path)
    except OSError as error:
        raise HostBusy(
            f"cannot write {path}: {error.strerror}", hint="free some disk space and try again"
        ) from error
