"""How well a cell's speedup is known after all its visits, and when that is enough. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvlab import evidence, stats, summary
from kvlab.report.source import publishable
from kvlab.rundir import RunDir
from kvlab.stats import Ratio


def speedup(runs: Iterable[RunDir], *, seed: int) -> Ratio | None:
    """The speedup over every repeat of these runs of one cell; None without a valid run.

    The repeats of all runs are repeats of one measurement: same settings, same machine. Runs that
    may not be published are left out, and so are those of another machine than the first.
    """
    numerator: dict[int, Mapping[int, float]] = {}
    denominator: dict[int, Mapping[int, float]] = {}
    host: str | None = None
    for run in runs:
        host = host or run.manifest.get("fingerprint")
        if run.manifest.get("fingerprint") != host or not publishable(summary.summarise(run)):
            continue
        plan = evidence.plan(run.manifest)
        accounts = evidence.accounts(plan, run.requests(), run.scrapes())
        first, second = (evidence.times_ms(accounts, arm, "measure") for arm in plan.arms)
        for repeat in sorted(first.keys() & second.keys()):
            place = len(numerator) + 1
            numerator[place], denominator[place] = first[repeat], second[repeat]
    return stats.ratio(numerator, denominator, seed=seed)


def half_width(found: Ratio | None) -> float | None:
    """By how much the value may be off at most, as a share of it; None: no interval."""
    if found is None or found.low <= 0:
        return None
    return max(found.value / found.low, found.high / found.value) - 1
