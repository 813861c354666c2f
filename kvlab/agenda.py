"""Several runs in a row: which of them is under way, and about how long all still take.

What they will take is estimated from their planned steps, and corrected by every step that was
seen so far, of whichever run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvlab.progress import Forecast, Steps
from kvlab.records import now_ns
from kvlab.units import about, ns_to_s


@dataclass(frozen=True, slots=True)
class Standing:
    """How far all runs are: a share of the time, 0 to 1, and the same in words."""

    share: float
    text: str


class Agenda:
    """The experiments in their order. Each is a notebook, and there are some besides."""

    def __init__(self, forecasts: Mapping[str, Forecast], *, more_notebooks: int = 0):
        self.forecasts = dict(forecasts)
        self.notebooks = Forecast(Counter(notebook=len(self.forecasts) + more_notebooks))
        self.current: str | None = None
        self.began_ns = now_ns()

    def begin(self, experiment: str | None) -> None:
        """A notebook begins: that of an experiment, or another one."""
        self.current = experiment

    def learn(self, steps: Steps) -> None:
        """Take in what the experiment under way has done so far; the others learn from it."""
        here = self.forecasts.get(self.current or "")
        if here is not None:
            here.done = Counter({kind: count for kind, (count, _) in steps.items()})
            here.spent_s = {kind: seconds for kind, (_, seconds) in steps.items()}
        seen: dict[str, tuple[int, float]] = {}
        for forecast in self.forecasts.values():
            for kind, (count, seconds) in forecast.steps.items():
                before, spent_s = seen.get(kind, (0, 0.0))
                seen[kind] = (before + count, spent_s + seconds)
        for forecast in self.forecasts.values():
            forecast.elsewhere = seen

    def end(self, seconds: float) -> None:
        """The notebook that had begun has ended, well or not, after so many seconds."""
        here = self.forecasts.get(self.current or "")
        if here is not None:
            seconds -= sum(here.spent_s.values())
            here.planned = Counter(here.done)  # what was not done will not be done
        self.notebooks.finish("notebook", seconds)
        self.current = None

    @property
    def remaining_s(self) -> float:
        left = (forecast.remaining_s for forecast in self.forecasts.values())
        return self.notebooks.remaining_s + sum(left)

    def standing(self, *, silent_s: float = 0.0) -> Standing:
        """How far all is, ``silent_s`` after the experiment under way was heard of."""
        elapsed_s = ns_to_s(now_ns() - self.began_ns)
        left_s = max(0.0, self.remaining_s - silent_s)
        share = elapsed_s / (elapsed_s + left_s) if left_s else 1.0
        return Standing(share, f"{self.place}, {about(left_s)} left in all")

    @property
    def place(self) -> str:
        """``experiment 3 of 7``; between the experiments, how many of them are over."""
        names = list(self.forecasts)
        if self.current in names:
            return f"experiment {names.index(self.current) + 1} of {len(names)}"
        over = sum(not forecast.remaining_s for forecast in self.forecasts.values())
        return f"{over} of {len(names)} experiments done"
