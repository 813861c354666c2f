"""A batch's own folder: what was to be measured, in which order, and what became of each visit."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kvlab import __version__
from kvlab.batch import sweep as sweeps
from kvlab.batch.sweep import Cell, Sweep, Visit
from kvlab.errors import RunFolderError

SCHEMA = 1
MANIFEST = "manifest.json"
VISITS = "visits.jsonl"

State = Literal["started", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of ``visits.jsonl``: a visit began, or how it ended."""

    turn: int
    cell: int
    state: State
    at: str
    run: str | None = None
    """The path of its run folder."""
    error: str | None = None
    host: str | None = None
    """The worker that measured it, where a cluster did."""
    attempt: int = 1

    @property
    def key(self) -> str:
        return f"{self.turn}/{self.cell}"


class Ledger:
    """An open batch folder."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path = path
        self.manifest = manifest
        self.sweep = Sweep.model_validate(manifest["sweep"])
        self.cells = [Cell(one["number"], one["settings"]) for one in manifest["cells"]]

    @classmethod
    def create(
        cls,
        parent: Path,
        sweep: Sweep,
        cells: Sequence[Cell],
        *,
        until_ci: float | None = None,
        max_passes: int | None = None,
    ) -> Ledger:
        """A new folder for the sweep's cells; those that cannot run are not among them."""
        digest = sweeps.sha256(sweep)
        path = parent / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{sweep.name}-{digest[:8]}"
        path.mkdir(parents=True)
        order = sweeps.visits(sweep, list(cells))
        manifest = {
            "schema": SCHEMA,
            "batch": path.name,
            "kvlab_version": __version__,
            "sweep": sweep.model_dump(by_alias=True, mode="json"),
            "sweep_sha256": digest,
            "cells": [{"number": cell.number, "settings": dict(cell.settings)} for cell in cells],
            "left_out": [c.number for c in sweeps.cells(sweep) if c not in cells],
            "until_ci": until_ci,
            "max_passes": max_passes,
            "order": [[visit.turn, visit.cell.number] for visit in order],
        }
        (path / VISITS).touch()
        ledger = cls(path, manifest)
        ledger._write_manifest()
        return ledger

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """The batch at ``path``; RunFolderError when it is none or a newer kvlab made it."""
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{path} is no batch: its {MANIFEST} cannot be read",
                hint="give a folder below data/batches",
            ) from error
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
            raise RunFolderError(
                f"{path} was written by another version of kvlab",
                hint="update kvlab, or start the batch anew",
            )
        try:
            return cls(path, manifest)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"the {MANIFEST} of {path} is damaged: {error}",
                hint="restore it from a copy, or start the batch anew",
            ) from error

    def entries(self) -> list[Entry]:
        """Every line in its order; a line that was cut by a kill is left out."""
        found = []
        for line in (self.path / VISITS).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                found.append(Entry(**json.loads(line)))
        return found

    def add_pass(self, cells: Sequence[Cell]) -> list[Visit]:
        """One more pass over these cells, written into the manifest before anything of it runs."""
        turn = 1 + max(number for number, _ in self.manifest["order"])
        added = sweeps.one_pass(self.sweep, cells, turn)
        self.manifest["order"] += [[visit.turn, visit.cell.number] for visit in added]
        self._write_manifest()
        return added

    def _write_manifest(self) -> None:
        text = json.dumps(self.manifest, indent=2, ensure_ascii=False)
        new = self.path / f".{MANIFEST}"
        new.write_text(f"{text}\n", encoding="utf-8")
        new.replace(self.path / MANIFEST)

    def append(self, visit: Visit, state: State, **more: Any) -> None:
        """Write what became of a visit, on the disk before this returns."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = Entry(turn=visit.turn, cell=visit.cell.number, state=state, at=at, **more)
        path = self.path / VISITS
        text = json.dumps(asdict(entry), ensure_ascii=False)
        with path.open("r+b") as log:
            whole = log.read()
            cut = "" if not whole or whole.endswith(b"\n") else "\n"
            log.write(f"{cut}{text}\n".encode())
            log.flush()
            os.fsync(log.fileno())

    def finished(self) -> dict[str, Entry]:
        """The entries of the visits that came to their end, by key."""
        return {entry.key: entry for entry in self.entries() if entry.state == "finished"}

    def failed(self) -> dict[str, Entry]:
        """The last failure of each visit that never came to its end."""
        done = self.finished()
        return {
            entry.key: entry
            for entry in self.entries()
            if entry.state == "failed" and entry.key not in done
        }

    def order(self) -> Iterator[Visit]:
        """Every visit of the manifest, in the order in which they are made."""
        cells = {cell.number: cell for cell in self.cells}
        for turn, number in self.manifest["order"]:
            yield Visit(turn, cells[number])

    def missing(self) -> list[Visit]:
        """The visits that still have to be made, in order. A visit that failed is one of them."""
        done = self.finished()
        return [visit for visit in self.order() if visit.key not in done]

    def runs(self) -> Mapping[str, Path]:
        """The run folders of the finished visits, by key."""
        return {key: Path(entry.run) for key, entry in self.finished().items() if entry.run}
