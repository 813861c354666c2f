"""One file per experiment, one function each: ``(profile, launch, record)``.

``launch`` starts a scenario's servers, ``record`` keeps what happens; both are handed in, so a
workload runs the same on processes, on containers and on the tests' fake stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from kvlab.profile import Profile
from kvlab.records import Record
from kvlab.stack import Launch

Recorder = Callable[[Record], None]
"""Keeps one record before it returns."""


class Workload(Protocol):
    """Every missing arm of an experiment, measured and recorded."""

    async def __call__(
        self,
        profile: Profile,
        launch: Launch,
        record: Recorder,
        *,
        nonce: str,
        arms: Sequence[str],
        done: AbstractSet[tuple[int, str]],
    ) -> None:
        """``done`` holds the (repeat, arm) pairs that an interrupted run completed."""
        ...
