"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import fake_stack

if TYPE_CHECKING:
    from kvlab.profile import Profile

# A shell starts what it puts in the background deaf to SIGINT, and every program below inherits
# that: tests that interrupt kvlab would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is timed: on a busy machine Hypothesis's deadline would fail what is right.
settings.register_profile("kvlab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvlab")


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on the fake stack neither wait for a real measurement nor keep one from starting."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def fake_profile() -> Profile:
    """A small valid profile of the fake stack."""
    return fake_stack.profile()


@pytest.fixture
def fake_launch(tmp_path: Path) -> Callable[..., fake_stack.FakeLaunch]:
    """Makes a Launch on the fake stack: ``fake_launch(profile, settings)``; L2 below tmp_path."""

    def make(*args: Any, **options: Any) -> fake_stack.FakeLaunch:
        return fake_stack.FakeLaunch(*args, **{"folder": tmp_path / "fake", **options})

    return make
