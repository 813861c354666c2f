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

from kvlab import experiment, notebook, profile, progress, verdict
from kvlab.agenda import Agenda
from kvlab.errors import NotebookFailed, UsageError
from kvlab.records import now_ns
from kvlab.report import index
from kvlab.rundir import RunDir
from kvlab.units import ns_to_s

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
    names = _in_order(experiments)
    agenda = Agenda(
        {name: experiment.forecast(name, chosen) for name in names},
        more_notebooks=1 + len(languages),
    )
    preflight = _execute("00_preflight", folder, given, agenda)
    outcome.pages.append(notebook.to_html(preflight, preflight.with_suffix(".html")))
    given["runs"] = str(runs.resolve())
    for name in names:
        try:
            _measure(name, folder, given, agenda, outcome)
        except NotebookFailed as error:
            if name == "two-round":
                raise
            outcome.failures[name] = str(error)
    main, *others = outcome.runs.values()
    _move(preflight, RunDir.open(main))
    for language in languages:
        shown = {"run": str(main), "others": [str(path) for path in others]}
        done = _execute(REPORTS[language], folder, shown, agenda)
        page = folder / f"report-{language}.html"
        outcome.pages.append(notebook.to_html(done, page, lang=language))
        _move(done, RunDir.open(main))
    for path in outcome.runs.values():
        RunDir.open(path).seal()
    outcome.pages.append(index.write(reports, lang=languages[0]))
    return outcome


def _in_order(experiments: Sequence[str]) -> list[str]:
    for name in experiments:
        if name not in MEASURING:
            raise UsageError(
                f"there is no experiment {name!r}", hint=f"known: {', '.join(MEASURING)}"
            )
    return [name for name in MEASURING if name in ("two-round", *experiments)]


def _measure(
    name: str, folder: Path, given: Mapping[str, Any], agenda: Agenda, outcome: Outcome
) -> None:
    """Run an experiment's notebook and add what came of it to the outcome."""
    measured = _execute(MEASURING[name], folder, given, agenda, name)
    run = RunDir.open(_run_of(measured))
    outcome.runs[name] = run.path.resolve()
    outcome.summaries[name] = run.read_summary() or {}
    outcome.pages.append(notebook.to_html(measured, measured.with_suffix(".html")))
    _move(measured, run)


def _execute(
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
