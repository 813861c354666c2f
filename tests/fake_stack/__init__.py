"""A fake vLLM and a fake LMCache server, for fast tests and fault injection only.

NO REPORT MAY COME FROM THIS STACK. It computes nothing: delays are set, answers are hashes of the
prompt. Its versions, its model and its profile all say "fake", so a result made with it shows.

    async with fake_stack.start(Settings()) as stack:          # inside the test's own event loop
        ... stack.vllm_url, stack.lmcache_url
    python -m tests.fake_stack vllm --port 8000 --config '{}'  # as a process
    FakeLaunch(fake_stack.profile(), settings)                 # a kvlab.stack.Launch
    fake_stack.fake_plan(profile, "lmcache", place, settings)  # kvlab's Plan, of fake processes

What can go wrong on request stands in ``settings.FAULTS``, by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tests.fake_stack.servers import Stack, start
from tests.fake_stack.settings import FAULTS, Fault, Settings

if TYPE_CHECKING:
    from tests.fake_stack.launch import FakeLaunch, fake_plan, profile, settings_for

__all__ = [
    "FAULTS",
    "FakeLaunch",
    "Fault",
    "Settings",
    "Stack",
    "fake_plan",
    "profile",
    "settings_for",
    "start",
]


def __getattr__(name: str) -> Any:
    """What needs kvlab is imported when it is asked for: a fake process starts without it."""
    if name in __all__:
        return getattr(importlib.import_module("tests.fake_stack.launch"), name)
    raise AttributeError(name)
