"""``make reproduce``: every notebook in order, the verdict, and the reports."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab import notebook, profile, progress
from kvlab.errors import NotebookFailed
from kvlab.rundir import RunDir

REPORT_NOTEBOOKS = {"tr": "90_report_tr", "zh": "91_report_zh", "en": "92_report_en"}
WATCH_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What a reproduction came to: the verdict, the run folder and the pages."""

    run: Path
    verdict: dict[str, Any]
    pages: list[Path] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        return bool(self.verdict["status"] == "proven")

    def text(self) -> str:
        """The closing lines: verdict, reasons, run folder, pages."""
        lines = [f"verdict: {self.verdict['status']}"]
        lines += [f"  - {reason}" for reason in self.verdict["reasons"]]
        lines.append(f"run folder: {self.run}")
        lines += [f"page: {page}" for page in self.pages]
        return "\n".join(lines)


def reproduce(
    profile_name: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    languages: Sequence[str] = ("tr", "zh", "en"),
    runs: Path = Path("data/runs"),
    reports: Path = Path("reports"),
) -> Outcome:
    """The outcome of preflight, the two-round experiment and its reports on a profile.

    Raises NotebookFailed when a notebook did not run to its end; its page is written all the same.
    """
    chosen = profile.load(profile_name, overrides)
    given = {"profile": str(profile_name), "overrides": dict(overrides or {})}
    with tempfile.TemporaryDirectory(prefix="kvlab-") as scratch:
        preflight = _execute("00_preflight", Path(scratch), given)
        measured = _execute(
            "10_two_round", Path(scratch), {**given, "runs": str(runs.resolve())}, chosen.title
        )
        folder = RunDir.open(_run_of(measured))
        pages_folder = reports / folder.id
        pages_folder.mkdir(parents=True, exist_ok=True)
        kept = [_keep(path, folder) for path in (preflight, measured)]
        pages = [notebook.to_html(path, pages_folder / f"{path.stem}.html") for path in kept]
        for language in languages:
            name = REPORT_NOTEBOOKS[language]
            done = _execute(name, Path(scratch), {"run": str(folder.path.resolve())})
            page = pages_folder / f"report-{language}.html"
            pages.append(notebook.to_html(_keep(done, folder), page, lang=language))
    folder.seal()
    summary = folder.read_summary() or {"verdict": {"status": "invalid", "reasons": []}}
    return Outcome(run=folder.path, verdict=summary["verdict"], pages=pages)


def _execute(
    name: str, scratch: Path, parameters: Mapping[str, Any], title: str | None = None
) -> Path:
    """The executed notebook; a measuring one (with a ``title``) shows how far its run is."""
    print(f"{name}: {title or 'running'}", flush=True)
    output = scratch / f"{name}.ipynb"
    with _progress(scratch / "progress.json"):
        return notebook.execute(notebook.find(name), output, dict(parameters))


@contextmanager
def _progress(path: Path) -> Iterator[None]:
    """Show what the notebook's kernel writes to ``path`` while the block runs."""
    os.environ[progress.FILE_VARIABLE] = str(path)
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(path, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        os.environ.pop(progress.FILE_VARIABLE, None)
        path.unlink(missing_ok=True)


def _watch(path: Path, done: threading.Event) -> None:
    with progress.console() as show:
        while not done.wait(WATCH_S):
            state = _read_state(path)
            if state is not None:
                show(state["text"], _Told(state["share"], state["remaining_s"]))


@dataclass(frozen=True, slots=True)
class _Told:
    """A forecast as the kernel told it."""

    share: float
    remaining_s: float


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def _run_of(executed: Path) -> Path:
    """The run folder that the two-round notebook names in its outputs."""
    path = notebook.value(executed, "run_folder")
    if path is None:
        raise NotebookFailed(
            f"{executed.name} names no run folder", hint="see its page for the cell that failed"
        )
    return Path(path)


def _keep(executed: Path, folder: RunDir) -> Path:
    """The executed notebook, copied into the run folder."""
    kept = folder.notebooks / executed.name
    kept.write_bytes(executed.read_bytes())
    return kept
