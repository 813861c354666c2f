"""``make reproduce``: every notebook in order, the verdicts, and the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab import experiment, notebook, notebook_run, profile, runtime, verdict
from kvlab.agenda import Agenda
from kvlab.errors import NotebookFailed, UsageError
from kvlab.report import index
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
SIZING = "70_sizing"
REPORTS = {"tr": "90_report_tr", "zh": "91_report_zh", "en": "92_report_en"}


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
    experiments: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    languages: Sequence[str] = ("tr", "zh", "en"),
    runs: Path = Path("data/runs"),
    reports: Path = Path("reports"),
) -> Outcome:
    """The outcome of preflight, the experiments and the reports on a profile.

    Without ``experiments`` all that the profile's runtime can do are run. ``two-round`` always
    runs, and first: the reports are about it. Pages go to a folder of their own below ``reports``.
    Raises NotebookFailed when the two-round notebook or a report did not run to its end; another
    experiment that fails is kept among the outcome's failures.
    """
    chosen = profile.load(profile_name, overrides)
    given = {"profile": str(profile_name), "overrides": dict(overrides or {})}
    folder = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{chosen.name}"
    folder.mkdir(parents=True)
    outcome = Outcome()
    names = _in_order(experiments or [n for n in MEASURING if runtime.can(chosen, n)])
    agenda = Agenda(
        {
            name: experiment.forecast(name, profile.load(profile_name, overrides, experiment=name))
            for name in names
        },
        more_notebooks=2 + len(languages),
    )
    before = {**given, "experiments": names}
    preflight = notebook_run.execute("00_preflight", folder, before, agenda)
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
    notebook_run.keep(preflight, RunDir.open(main))
    sized = {name: value for name, value in given.items() if name != "runs"}
    _size(folder, {**sized, "run": str(main)}, agenda, outcome)
    for language in languages:
        shown = {"run": str(main), "others": [str(path) for path in others]}
        done = notebook_run.execute(REPORTS[language], folder, shown, agenda)
        page = folder / f"report-{language}.html"
        outcome.pages.append(notebook.to_html(done, page, lang=language))
        notebook_run.keep(done, RunDir.open(main))
    for path in outcome.runs.values():
        RunDir.open(path).seal()
    outcome.pages.append(index.write(reports, lang=languages[0]))
    return outcome


def _size(folder: Path, given: Mapping[str, Any], agenda: Agenda, outcome: Outcome) -> None:
    """Answer the questions of sizing with the A/B's times; a failure is kept among the others."""
    try:
        sized = notebook_run.execute(SIZING, folder, given, agenda)
    except NotebookFailed as error:
        outcome.failures["sizing"] = str(error)
        return
    outcome.pages.append(notebook.to_html(sized, sized.with_suffix(".html")))
    notebook_run.keep(sized, RunDir.open(Path(given["run"])))


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
    measured = notebook_run.execute(MEASURING[name], folder, given, agenda, name)
    run = RunDir.open(notebook_run.run_of(measured))
    outcome.runs[name] = run.path.resolve()
    outcome.summaries[name] = run.read_summary() or {}
    outcome.pages.append(notebook.to_html(measured, measured.with_suffix(".html")))
    notebook_run.keep(measured, run)
