"""How far a run is and how long it will still take, learnt from the run itself.

``Forecast`` is pure: it knows the steps to come and the mean duration of each kind seen so far. A
``Watcher`` feeds one from a run folder's records, and a display draws it: a bar on a terminal, a
widget in Jupyter, plain lines elsewhere. Of several runs in a row ``kvlab.agenda`` knows the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from kvlab.records import Event, Record, RequestRecord, now_ns
from kvlab.units import NS_PER_S, duration, ns_to_s

FILE_VARIABLE = "KVLAB_PROGRESS"
"""Names a file that receives the state as JSON, for a parent that watches a notebook's kernel."""
PRIOR_S = {"launch": 30.0, "request": 0.5, "drain": 1.5, "stop": 4.0, "notebook": 10.0}
"""Seconds a step takes before one of its kind was seen; only the first ETA rests on them."""
LINE_EVERY_S = 10.0
FORM = "{percentage:3.0f}% |{bar:16}| {desc}"
SAME_LINE_EVERY_S = 60.0
"""Nothing new is said less often: only to show that the run is alive."""


Steps = Mapping[str, tuple[int, float]]
"""By kind: how many steps were done, and the seconds that they took together."""


class Forecast:
    """Steps by kind: how many are planned, how many are done, and how long one takes.

    ``pace_s`` states what a step of a kind takes because the plan says so, as visits at a set rate.
    """

    def __init__(self, planned: Counter[str], pace_s: Mapping[str, float] | None = None):
        self.planned = planned
        self.pace_s = dict(pace_s or {})
        self.done: Counter[str] = Counter()
        self.spent_s: dict[str, float] = {}
        self.elsewhere: Steps = {}
        """Steps of other runs, which tell how long those take that were not yet seen here."""

    def finish(self, kind: str, seconds: float) -> None:
        """Count a step that took ``seconds``; one that was not planned enlarges the plan."""
        self.done[kind] += 1
        self.planned[kind] = max(self.planned[kind], self.done[kind])
        self.spent_s[kind] = self.spent_s.get(kind, 0.0) + max(0.0, seconds)

    @property
    def steps(self) -> Steps:
        """What was done here."""
        return {kind: (count, self.spent_s[kind]) for kind, count in self.done.items() if count}

    def step_s(self, kind: str) -> float:
        """Mean seconds of a step: of its own kind, as paced, of its family, else the prior.

        What was seen here counts before what was seen elsewhere.
        """
        for seen in (self.steps, self.elsewhere):
            if kind in seen:
                return seen[kind][1] / seen[kind][0]
        if kind in self.pace_s:
            return self.pace_s[kind]
        family = kind.split(":")[0]
        for seen in (self.steps, self.elsewhere):
            alike = [
                done
                for other, done in seen.items()
                if other.split(":")[0] == family and other not in self.pace_s
            ]
            if alike:
                return sum(seconds for _, seconds in alike) / sum(count for count, _ in alike)
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


class Whole(Protocol):
    """How far all runs in a row are."""

    @property
    def share(self) -> float: ...

    @property
    def text(self) -> str: ...


class Display(Protocol):
    """Shows one state of the forecast, and of the whole that the run is a part of."""

    def __call__(self, text: str, outlook: Outlook, whole: Whole | None = None) -> None: ...


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

    def show(text: str, outlook: Outlook, whole: Whole | None = None) -> None:
        nonlocal last_ns, last_text
        quiet_s = SAME_LINE_EVERY_S if text == last_text else LINE_EVERY_S
        if last_ns and now_ns() - last_ns < quiet_s * NS_PER_S:
            return
        last_ns, last_text = now_ns(), text
        (write or _stderr)(line(text, outlook, whole))

    return show


def line(text: str, outlook: Outlook, whole: Whole | None = None) -> str:
    """``34% · ETA 3 min 10 s · restart: repeat 1, sigkill, fill 5 · experiment 2 of 7, …``."""
    end = f" · {whole.text}" if whole else ""
    return f"{outlook.share:4.0%} · ETA {duration(outlook.remaining_s)} · {text}{end}"


@contextlib.contextmanager
def _bar() -> Iterator[Display]:
    with contextlib.ExitStack() as open_bars:
        bar = open_bars.enter_context(_one_bar(leave=True))
        whole_bar = None

        def show(text: str, outlook: Outlook, whole: Whole | None = None) -> None:
            nonlocal whole_bar
            _draw(bar, f"ETA {duration(outlook.remaining_s)} · {text}", outlook.share)
            if whole:
                whole_bar = whole_bar or open_bars.enter_context(_one_bar(leave=False))
                _draw(whole_bar, whole.text, whole.share)

        yield show


def _one_bar(*, leave: bool) -> Any:
    """A bar below those that are open. Its own width is set, so that the text has room."""
    from tqdm.auto import tqdm

    form = "{percentage:3.0f}% |{bar}| {desc}" if _in_notebook() else FORM
    return tqdm(total=1000, bar_format=form, dynamic_ncols=True, leave=leave)


def _draw(bar: Any, text: str, share: float) -> None:
    bar.set_description_str(text, refresh=False)
    bar.n = round(1000 * share)
    bar.refresh()


def _to_file(path: Path) -> Display:
    def show(text: str, outlook: Outlook, whole: Whole | None = None) -> None:
        state = {
            "text": text,
            "share": outlook.share,
            "remaining_s": outlook.remaining_s,
            "steps": outlook.steps if isinstance(outlook, Forecast) else {},
        }
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(path)

    return show


def _in_notebook() -> bool:
    """Whether this process is a notebook's kernel; others may have loaded the library too."""
    app = sys.modules.get("ipykernel.kernelapp")
    return app is not None and bool(app.IPKernelApp.initialized())


def _stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
