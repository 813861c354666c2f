"""``make reproduce``: every notebook in order, the verdicts, and the reports."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab import notebook, profile, progress
from kvlab.errors import NotebookFailed
from kvlab.rundir import RunDir

MEASURING = {"two-round": "10_two_round"}
"""The notebook of each experiment, in the order in which they run."""
REPORTS = {"tr": "90_report_tr", "zh": "91_report_zh", "en": "92_report_en"}
WATCH_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What a reproduction came to: the verdict of each experiment, the run folders, the pages."""

    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)
    pages: list[Path] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        return all(verdict["status"] == "proven" for verdict in self.verdicts.values())

    def text(self) -> str:
        """The closing lines: per experiment the verdict, its reasons and its folder; the pages."""
        lines = []
        for name, verdict in self.verdicts.items():
            lines.append(f"{name}: {verdict['status']}")
            lines += [f"  - {reason}" for reason in verdict["reasons"]]
            lines.append(f"  run folder: {self.runs[name]}")
        return "\n".join([*lines, *(f"page: {page}" for page in self.pages)])


def reproduce(
    profile_name: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    languages: Sequence[str] = ("tr", "zh", "en"),
    runs: Path = Path("data/runs"),
    reports: Path = Path("reports"),
) -> Outcome:
    """The outcome of preflight, every experiment and the reports on a profile.

    Pages go to a folder of their own below ``reports``. Raises NotebookFailed when a notebook did
    not run to its end; its page is there all the same, with a banner in the place of results.
    """
    chosen = profile.load(profile_name, overrides)
    given = {"profile": str(profile_name), "overrides": dict(overrides or {})}
    folder = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{chosen.name}"
    folder.mkdir(parents=True)
    outcome = Outcome()
    preflight = _execute("00_preflight", folder, given)
    for experiment, name in MEASURING.items():
        measured = _execute(name, folder, {**given, "runs": str(runs.resolve())}, chosen.title)
        run = RunDir.open(_run_of(measured))
        outcome.runs[experiment] = run.path
        outcome.verdicts[experiment] = (run.read_summary() or {})["verdict"]
        outcome.pages.append(notebook.to_html(measured, measured.with_suffix(".html")))
        _move(measured, run)
    first = RunDir.open(outcome.runs["two-round"])
    outcome.pages.insert(0, notebook.to_html(preflight, preflight.with_suffix(".html")))
    _move(preflight, first)
    for language in languages:
        beside = [str(path.resolve()) for name, path in outcome.runs.items() if name != "two-round"]
        given = {"run": str(first.path.resolve()), "others": beside}
        done = _execute(REPORTS[language], folder, given)
        page = folder / f"report-{language}.html"
        outcome.pages.append(notebook.to_html(done, page, lang=language))
        _move(done, first)
    for path in outcome.runs.values():
        RunDir.open(path).seal()
    return outcome


def _execute(
    name: str, folder: Path, parameters: Mapping[str, Any], title: str | None = None
) -> Path:
    """The executed notebook in ``folder``; meanwhile it is shown how far its run is."""
    print(f"{name}: {title}" if title else name, flush=True)
    with _progress(folder / ".progress.json"):
        return notebook.execute(notebook.find(name), folder / f"{name}.ipynb", parameters)


@contextmanager
def _progress(path: Path) -> Iterator[None]:
    """Show what the notebook's kernel writes to ``path`` while the block runs."""
    os.environ[progress.FILE_VARIABLE] = str(path.resolve())
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


@dataclass(frozen=True, slots=True)
class _Told:
    """A forecast as the kernel told it, and time has passed since."""

    share: float
    remaining_s: float


def _watch(path: Path, done: threading.Event) -> None:
    with progress.console() as show:
        while not done.wait(WATCH_S):
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
                age_s = time.time() - path.stat().st_mtime
            except (FileNotFoundError, ValueError):
                continue  # nothing told yet
            left_s = max(0.0, state["remaining_s"] - age_s)
            show(state["text"], _Told(state["share"], left_s))


def _run_of(executed: Path) -> Path:
    """The run folder that a measuring notebook recorded."""
    path = notebook.value(executed, "run_folder")
    if path is None:
        raise NotebookFailed(
            f"{executed.name} names no run folder", hint="see its page for the cell that failed"
        )
    return Path(path)


def _move(executed: Path, run: RunDir) -> None:
    """Keep an executed notebook with its run."""
    shutil.move(executed, run.notebooks / executed.name)
