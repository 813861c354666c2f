"""Running a batch: every cell checked first, then one visit after another, each kept as it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvlab import experiment, notebook_run, preflight, reproduce
from kvlab.agenda import Agenda
from kvlab.batch import precision
from kvlab.batch import sweep as sweeps
from kvlab.batch.ledger import Ledger
from kvlab.batch.sweep import Cell, Sweep, Visit
from kvlab.errors import KvlabError, ProfileError, UsageError
from kvlab.rundir import RunDir, from_home
from kvlab.units import duration

MAX_PASSES = 10
"""Passes at most when more are added until the speedups are known well enough."""


class Measure(Protocol):
    """Measures one visit; the path of its run folder."""

    def __call__(self, sweep: Sweep, visit: Visit, *, folder: Path, runs: Path) -> Path: ...


@dataclass(slots=True)
class Prospect:
    """A cell before anything ran: why it cannot, or what it will take."""

    cell: Cell
    problem: str | None = None
    seconds: float | None = None
    """About how long one visit takes."""
    l2_bytes: int | None = None
    """About what one visit writes to L2; None when nothing tells."""


@dataclass(slots=True)
class Outcome:
    """What a batch came to."""

    ledger: Ledger
    left_out: list[Prospect] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.left_out and not self.ledger.missing()

    def text(self) -> str:
        """The closing lines: visits finished and failed, cells left out."""
        done, failed = self.ledger.finished(), self.ledger.failed()
        total = len(list(self.ledger.order()))
        lines = [f"{len(done)} of {total} visits finished, {len(failed)} failed"]
        lines += [f"  visit {key}: {entry.error}" for key, entry in failed.items()]
        lines += [f"  left out, cell {one.cell.number}: {one.problem}" for one in self.left_out]
        return "\n".join([*lines, f"batch folder: {self.ledger.path}"])


def prospects(sweep: Sweep, *, runs: Path = Path("data/runs")) -> list[Prospect]:
    """Each cell with its profile read and every preflight rule applied; nothing is started."""
    if sweep.experiment not in reproduce.MEASURING:
        raise UsageError(
            f"sweep {sweep.name} is of {sweep.experiment!r}, which is no experiment",
            hint=f"known: {', '.join(reproduce.MEASURING)}",
        )
    return [_prospect(sweep, cell, runs) for cell in sweeps.cells(sweep)]


def _prospect(sweep: Sweep, cell: Cell, runs: Path) -> Prospect:
    try:
        chosen = sweeps.profile_of(sweep, cell)
    except ProfileError as error:
        return Prospect(cell, problem=error.message)
    case = preflight.gather(chosen, experiments=(sweep.experiment,), runs=runs)
    errors = [one for one in preflight.evaluate(case) if one.severity == "error"]
    if errors:
        return Prospect(cell, problem=f"preflight {errors[0].id}: {errors[0].found}")
    seconds = experiment.forecast(sweep.experiment, chosen).remaining_s
    return Prospect(cell, seconds=seconds, l2_bytes=case.fill_bytes)


def describe(sweep: Sweep, found: Sequence[Prospect]) -> dict[str, Any]:
    """What a dry run shows: the cells in order, about how long, about how much disk."""
    able = [one for one in found if one.problem is None]
    written = [one.l2_bytes for one in able]
    return {
        "sweep": sweep.name,
        "title": sweep.title,
        "experiment": sweep.experiment,
        "profile": sweep.profile,
        "passes": sweep.passes,
        "seed": sweep.seed,
        "cells": [
            {
                "number": one.cell.number,
                "settings": dict(one.cell.settings),
                "problem": one.problem,
                "about_s": None if one.seconds is None else round(one.seconds, 1),
                "about_l2_bytes": one.l2_bytes,
            }
            for one in found
        ],
        "order": [
            [visit.turn, visit.cell.number]
            for visit in sweeps.visits(sweep, [one.cell for one in able])
        ],
        "about_s": round(sweep.passes * sum(one.seconds or 0 for one in able), 1),
        "about_l2_bytes": max((b for b in written if b is not None), default=None),
    }


def text(told: dict[str, Any]) -> str:
    """A dry run for a person."""
    lines = [f"{told['sweep']}: {told['title']}"]
    for cell in told["cells"]:
        settings = ", ".join(f"{key}={value}" for key, value in cell["settings"].items())
        state = cell["problem"] or f"about {duration(cell['about_s'])}"
        lines.append(f"  cell {cell['number']}: {settings or 'the profile as it is'}: {state}")
    order = " ".join(f"{turn}/{number}" for turn, number in told["order"])
    lines.append(f"order (pass/cell, seed {told['seed']}): {order}")
    lines.append(f"about {duration(told['about_s'])} in all, of which most is starting servers")
    return "\n".join(lines)


def start(
    sweep: Sweep,
    *,
    batches: Path,
    runs: Path = Path("data/runs"),
    keep_going: bool = False,
    until_ci: float | None = None,
    max_passes: int | None = None,
) -> Outcome:
    """A new batch with its folder, nothing measured yet.

    ProfileError, naming the first, when a cell cannot run; ``keep_going`` leaves such cells out.
    ``until_ci`` asks for further passes, ``max_passes`` in all, over the cells whose speedup is not
    known to that share (0.05: within 5 %).
    """
    if until_ci is not None and (until_ci <= 0 or sweep.experiment != "two-round"):
        raise UsageError(
            f"--until-ci {until_ci} cannot be reached with {sweep.experiment}",
            hint="give a share above 0, such as 0.05, for a sweep of two-round",
        )
    found = prospects(sweep, runs=runs)
    unable = [one for one in found if one.problem is not None]
    able = [one.cell for one in found if one.problem is None]
    if unable and not (keep_going and able):
        raise ProfileError(
            f"{len(unable)} of {len(found)} cells cannot run; cell {unable[0].cell.number} "
            f"({unable[0].cell.label}): {unable[0].problem}",
            hint="see them with --dry-run; --keep-going leaves them out",
        )
    made = Ledger.create(from_home(batches), sweep, able, until_ci=until_ci, max_passes=max_passes)
    return Outcome(made, unable)


def carry_on(
    outcome: Outcome, *, runs: Path = Path("data/runs"), measure: Measure | None = None
) -> Outcome:
    """The outcome after every missing visit was made. A visit that fails is kept as such."""
    return settle(outcome, lambda ledger: _make(ledger, runs, measure))


def settle(outcome: Outcome, make: Callable[[Ledger], None]) -> Outcome:
    """The outcome after ``make`` made the missing visits, pass after pass until no cell asks."""
    make(outcome.ledger)
    while wider := unsettled(outcome.ledger):
        outcome.ledger.add_pass(wider)
        make(outcome.ledger)
    return outcome


def unsettled(ledger: Ledger) -> list[Cell]:
    """The cells that a further pass shall visit: not known well enough, and passes are left.

    A cell with a visit that failed is not among them: another pass would not mend that.
    """
    wanted = ledger.manifest.get("until_ci")
    passes = max(turn for turn, _ in ledger.manifest["order"])
    if wanted is None or passes >= (ledger.manifest.get("max_passes") or MAX_PASSES):
        return []
    failed = {entry.cell for entry in ledger.failed().values()}
    return [
        cell
        for cell in ledger.cells
        if cell.number not in failed and not _is_settled(known(ledger, cell), wanted)
    ]


def known(ledger: Ledger, cell: Cell) -> float | None:
    """The half width of the cell's speedup over all its visits, as a share; None: unknown."""
    done = [entry for entry in ledger.finished().values() if entry.cell == cell.number]
    runs = [RunDir.open(Path(entry.run)) for entry in done if entry.run]
    return precision.half_width(precision.speedup(runs, seed=ledger.sweep.seed))


def _is_settled(width: float | None, wanted: float) -> bool:
    return width is not None and width <= wanted


def _make(ledger: Ledger, runs: Path, measure: Measure | None) -> None:
    waiting = ledger.missing()
    agenda = _agenda(ledger.sweep, waiting)
    for visit in waiting:
        ledger.append(visit, "started")
        try:
            run = (measure or _in_notebook(agenda))(
                ledger.sweep, visit, folder=ledger.path, runs=from_home(runs)
            )
        except KvlabError as error:
            ledger.append(visit, "failed", error=error.message)
            continue
        ledger.append(visit, "finished", run=str(run.resolve()))


def measure_alone(sweep: Sweep, visit: Visit, *, folder: Path, runs: Path) -> Path:
    """Measure one visit that is part of no agenda here, as a worker of a cluster does."""
    return _in_notebook(_agenda(sweep, [visit]))(sweep, visit, folder=folder, runs=runs)


def _agenda(sweep: Sweep, waiting: Sequence[Visit]) -> Agenda:
    return Agenda(
        {
            visit.key: experiment.forecast(sweep.experiment, sweeps.profile_of(sweep, visit.cell))
            for visit in waiting
        }
    )


def _in_notebook(agenda: Agenda) -> Measure:
    def measure(sweep: Sweep, visit: Visit, *, folder: Path, runs: Path) -> Path:
        given = {
            "profile": sweep.profile,
            "overrides": sweeps.overrides(sweep, visit.cell),
            "runs": str(runs.resolve()),
        }
        print(f"visit {visit.key}: {visit.cell.label}", flush=True)
        name = reproduce.MEASURING[sweep.experiment]
        executed = notebook_run.execute(name, folder, given, agenda, visit.key)
        run = RunDir.open(notebook_run.run_of(executed))
        notebook_run.keep(executed, run)
        run.seal()
        return run.path

    return measure
