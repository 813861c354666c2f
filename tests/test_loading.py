"""Models loaded by real processes: all bytes, one clock, and a reader that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab import loading
from kvlab.errors import MeasurementError

SIZE = 5 * (1 << 20) + 3


def test_every_reader_loads_its_own_model_whole(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        loading.write(path, SIZE, number)
    assert paths[0].read_bytes() != paths[1].read_bytes()
    found = loading.load(paths)
    assert (found.readers, found.bytes) == (2, 2 * SIZE)
    assert found.seconds > 0


def test_a_reader_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="ended with exit code 1"):
        loading.load([tmp_path / "absent.safetensors"])
