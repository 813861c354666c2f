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

from kvlab import notebook, profile, progress, verdict
from kvlab.errors import NotebookFailed, UsageError
from kvlab.rundir import RunDir

MEASURING = {
    "two-round": "10_two_round",
    "restart": "20_restart",
    "object-groups": "30_object_groups",
    "acceptance": "60_acceptance",
    "shared-cache": "50_shared_cache",
    "eviction": "35_eviction",
    "parallel-read": "40_parallel_read",
    "soak": "65_soak",
}
"""The notebook of each experiment, in the order in which they run."""
REPORTS = {"tr": "90_report_tr", "zh": "91_report_zh", "en": "92_report_en"}
WATCH_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What a reproduction came to: each experiment's summary and folder, what failed, the pages."""

    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    pages: list[Path] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.failures and all(map(verdict.is_healthy, self.summaries.values()))

    def text(self) -> str:
        """The closing lines: per experiment the verdict, its reasons and its folder; the pages."""
        lines = []
        for name, summary in self.summaries.items():
            lines.append(f"{name}: {summary['verdict']['status']}")
            lines += [f"  - {reason}" for reason in summary["verdict"]["reasons"]]
            lines.append(f"  run folder: {self.runs[name]}")
        lines += [f"{name}: failed\n  - {why}" for name, why in self.failures.items()]
        return "\n".join([*lines, *(f"page: {page}" for page in self.pages)])


def reproduce(
    profile_name: str,
    *,
    experiments: Sequence[str] = tuple(MEASURING),
    overrides: Mapping[str, Any] | None = None,
    languages: Sequence[str] = ("tr", "zh", "en"),
    runs: Path = Path("data/runs"),
    reports: Path = Path("reports"),
) -> Outcome:
    """The outcome of preflight, the experiments and the reports on a profile.

    ``two-round`` always runs, and first: the reports are about it. Pages go to a folder of their
    own below ``reports``. Raises NotebookFailed when the two-round notebook or a report did not
    run to its end; another experiment that fails is kept among the outcome's failures.
    """
    chosen = profile.load(profile_name, overrides)
    given = {"profile": str(profile_name), "overrides": dict(overrides or {})}
    folder = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{chosen.name}"
    folder.mkdir(parents=True)
    outcome = Outcome()
    preflight = _execute("00_preflight", folder, given)
    outcome.pages.append(notebook.to_html(preflight, preflight.with_suffix(".html")))
    given["runs"] = str(runs.resolve())
    for experiment in _in_order(experiments):
        try:
            _measure(experiment, folder, given, chosen.title, outcome)
        except NotebookFailed as error:
            if experiment == "two-round":
                raise
            outcome.failures[experiment] = str(error)
    main, *others = outcome.runs.values()
    _move(preflight, RunDir.open(main))
    for language in languages:
        shown = {"run": str(main), "others": [str(path) for path in others]}
        done = _execute(REPORTS[language], folder, shown)
        page = folder / f"report-{language}.html"
        outcome.pages.append(notebook.to_html(done, page, lang=language))
        _move(done, RunDir.open(main))
    for path in outcome.runs.values():
        RunDir.open(path).seal()
    return outcome


def _in_order(experiments: Sequence[str]) -> list[str]:
    for name in experiments:
        if name not in MEASURING:
            raise UsageError(
                f"there is no experiment {name!r}", hint=f"known: {', '.join(MEASURING)}"
            )
    return [name for name in MEASURING if name in ("two-round", *experiments)]


def _measure(
    experiment: str, folder: Path, given: Mapping[str, Any], title: str, outcome: Outcome
) -> None:
    """Run an experiment's notebook and add what came of it to the outcome."""
    measured = _execute(MEASURING[experiment], folder, given, title)
    run = RunDir.open(_run_of(measured))
    outcome.runs[experiment] = run.path.resolve()
    outcome.summaries[experiment] = run.read_summary() or {}
    outcome.pages.append(notebook.to_html(measured, measured.with_suffix(".html")))
    _move(measured, run)


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
