"""One file per experiment, one function each: ``(profile, launch, record)``.

``launch`` starts a scenario's servers, ``record`` keeps what happens; both are handed in, so a
workload runs the same on processes, on containers and on the tests' fake stack.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlab.records import Record

Recorder = Callable[[Record], None]
"""Keeps one record before it returns."""
