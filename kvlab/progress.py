"""How far a run is and how long it will still take, learnt from the run itself.

``Forecast`` is pure: it knows the steps to come and the mean duration of each kind seen so far.
``show`` feeds one from a run folder's records and draws it: a bar on a terminal, a widget in
Jupyter, plain lines elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from kvlab.records import Event, Record, RequestRecord, now_ns
from kvlab.units import NS_PER_S, duration, ns_to_s

FILE_VARIABLE = "KVLAB_PROGRESS"
"""Names a file that receives the state as JSON, for a parent that watches a notebook's kernel."""
PRIOR_S = {"launch": 60.0, "request": 0.5, "drain": 1.5, "stop": 4.0}
"""Seconds a step takes before one of its kind was seen; only the first ETA rests on them."""
LINE_EVERY_S = 10.0
SAME_LINE_EVERY_S = 60.0
"""Nothing new is said less often: only to show that the run is alive."""


class Forecast:
    """Steps by kind: how many are planned, how many are done, and how long one takes."""

    def __init__(self, planned: Counter[str]):
        self.planned = planned
        self.done: Counter[str] = Counter()
        self.spent_s: dict[str, float] = {}

    def finish(self, kind: str, seconds: float) -> None:
        """Count a step that took ``seconds``; one that was not planned enlarges the plan."""
        self.done[kind] += 1
        self.planned[kind] = max(self.planned[kind], self.done[kind])
        self.spent_s[kind] = self.spent_s.get(kind, 0.0) + max(0.0, seconds)

    def step_s(self, kind: str) -> float:
        """Mean seconds of a step: of its own kind, else of its family, else the prior."""
        if self.done[kind]:
            return self.spent_s[kind] / self.done[kind]
        family = kind.split(":")[0]
        alike = [k for k in self.done if k.split(":")[0] == family and self.done[k]]
        if alike:
            return sum(self.spent_s[k] for k in alike) / sum(self.done[k] for k in alike)
        return PRIOR_S.get(family, 1.0)

    @property
    def remaining_s(self) -> float:
        return sum(
            (count - self.done[kind]) * self.step_s(kind) for kind, count in self.planned.items()
        )

    @property
    def share(self) -> float:
        """The share of the work that is done, by time: 0 to 1."""
        spent = sum(self.spent_s.values())
        whole = spent + self.remaining_s
        return spent / whole if whole else 1.0


class Watcher:
    """Turns records into finished steps and tells a display. Give it to ``RunDir.on_append``."""

    def __init__(self, forecast: Forecast, label: str, display: Display):
        self.forecast = forecast
        self.label = label
        self.display = display
        self._last_ns = now_ns()

    def __call__(self, record: Record) -> None:
        step = _step(record)
        at_ns = now_ns()
        if step is None:
            return
        if step in self.forecast.planned:
            self.forecast.finish(step, ns_to_s(at_ns - self._last_ns))
        self._last_ns = at_ns
        self.display(f"{self.label}: {_where(record)}", self.forecast)


def _step(record: Record) -> str | None:
    if isinstance(record, RequestRecord):
        return f"request:{record.scenario}:{record.round}"
    if isinstance(record, Event):
        names = {"ready": "launch", "drained": "drain", "stopped": "stop", "launching": "begin"}
        if record.kind in names:
            return f"{names[record.kind]}:{record.scenario}"
    return None


def _where(record: Record) -> str:
    if isinstance(record, RequestRecord):
        return f"repeat {record.repeat}, {record.scenario}, {record.round} {record.index + 1}"
    assert isinstance(record, Event)
    return f"repeat {record.repeat}, {record.scenario}, {record.kind}"


class Outlook(Protocol):
    """How far, and how long still: what a display needs of a forecast."""

    @property
    def share(self) -> float: ...

    @property
    def remaining_s(self) -> float: ...


class Display(Protocol):
    """Shows one state of the forecast."""

    def __call__(self, text: str, outlook: Outlook) -> None: ...


@contextlib.contextmanager
def display() -> Iterator[Display]:
    """The display that fits where we are: the file of a parent that watches, else the console."""
    path = os.environ.get(FILE_VARIABLE)
    if path:
        yield _to_file(Path(path))
    else:
        with console() as show:
            yield show


@contextlib.contextmanager
def console() -> Iterator[Display]:
    """A bar on a terminal, a widget in Jupyter, plain lines elsewhere."""
    if sys.stderr.isatty() or _in_notebook():
        with _bar() as show:
            yield show
    else:
        yield lines()


def lines(write: Callable[[str], None] | None = None) -> Display:
    """A plain line now and then, for logs and pipes."""
    last_ns, last_text = 0, ""

    def show(text: str, outlook: Outlook) -> None:
        nonlocal last_ns, last_text
        quiet_s = SAME_LINE_EVERY_S if text == last_text else LINE_EVERY_S
        if last_ns and now_ns() - last_ns < quiet_s * NS_PER_S:
            return
        last_ns, last_text = now_ns(), text
        (write or _stderr)(line(text, outlook))

    return show


def line(text: str, outlook: Outlook) -> str:
    """``34 % · ETA 3 min 10 s · two-round: repeat 2, lmcache, fill 5``."""
    return f"{outlook.share:4.0%} · ETA {duration(outlook.remaining_s)} · {text}"


@contextlib.contextmanager
def _bar() -> Iterator[Display]:
    from tqdm.auto import tqdm

    form = "{percentage:3.0f}% |{bar}| {desc}"
    with tqdm(total=1000, bar_format=form, dynamic_ncols=True, leave=True) as bar:

        def show(text: str, outlook: Outlook) -> None:
            bar.set_description_str(f"ETA {duration(outlook.remaining_s)} · {text}", refresh=False)
            bar.n = round(1000 * outlook.share)
            bar.refresh()

        yield show


def _to_file(path: Path) -> Display:
    def show(text: str, outlook: Outlook) -> None:
        state = {"text": text, "share": outlook.share, "remaining_s": outlook.remaining_s}
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(path)

    return show


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
