"""A notebook run as a part of something longer, with its progress shown meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab import notebook, progress
from kvlab.agenda import Agenda
from kvlab.errors import NotebookFailed
from kvlab.records import now_ns
from kvlab.rundir import RunDir
from kvlab.units import ns_to_s

WATCH_S = 1.0


def execute(
    name: str,
    folder: Path,
    parameters: Mapping[str, Any],
    agenda: Agenda,
    experiment: str | None = None,
) -> Path:
    """The executed notebook in ``folder``; meanwhile it is shown how far its run and all are."""
    agenda.begin(experiment)
    print(f"{name}: {agenda.standing().text}", flush=True)
    began_ns = now_ns()
    try:
        with _progress(folder / ".progress.json", agenda):
            return notebook.execute(notebook.find(name), folder / f"{name}.ipynb", parameters)
    finally:
        agenda.end(ns_to_s(now_ns() - began_ns))


@contextmanager
def _progress(path: Path, agenda: Agenda) -> Iterator[None]:
    """Show what the notebook's kernel writes to ``path`` while the block runs."""
    os.environ[progress.FILE_VARIABLE] = str(path.resolve())
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(path, done, agenda), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        os.environ.pop(progress.FILE_VARIABLE, None)
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Told:
    """A forecast as the kernel told it, and time has passed since."""

    share: float
    remaining_s: float


def _watch(path: Path, done: threading.Event, agenda: Agenda) -> None:
    """Show what is told until the notebook is done, and once more then: its last steps count."""
    with progress.console() as show:
        ended = False
        while not ended:
            ended = done.wait(WATCH_S)
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
                age_s = time.time() - path.stat().st_mtime
            except (FileNotFoundError, ValueError):
                continue  # nothing told yet
            agenda.learn(state["steps"])
            left_s = max(0.0, state["remaining_s"] - age_s)
            told = _Told(state["share"], left_s)
            show(state["text"], told, agenda.standing(silent_s=age_s))


def run_of(executed: Path) -> Path:
    """The run folder that a measuring notebook recorded."""
    path = notebook.value(executed, "run_folder")
    if path is None:
        raise NotebookFailed(
            f"{executed.name} names no run folder", hint="see its page for the cell that failed"
        )
    return Path(path)


def keep(executed: Path, run: RunDir) -> None:
    """Keep an executed notebook with its run."""
    shutil.move(executed, run.notebooks / executed.name)
