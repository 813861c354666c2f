"""Models' weights, loaded by several processes at once: as servers do that start together.

Each process reads one safetensors file as a whole and looks at every tensor in it. The clock starts
when all of them are ready, so that what is measured is the reading, not the start of Python.

    python -m kvlab.loading model.safetensors     # says ready, waits for a line, loads, says what
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvlab import shapes
from kvlab.errors import MeasurementError
from kvlab.records import now_ns
from kvlab.units import MIB, ns_to_s

TENSOR_BYTES = 4 * MIB
READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the processes loaded together."""

    readers: int
    bytes: int
    """Of the tensors."""
    seconds: float
    """From the first that began to the last that ended."""


def write(path: Path, model_bytes: int, seed: int) -> None:
    """Write a safetensors file of that size: random bytes, in tensors of 4 MiB at most."""
    import numpy as np
    from safetensors.numpy import save_file

    random_bytes = random.Random(seed)
    sizes = [TENSOR_BYTES] * (model_bytes // TENSOR_BYTES) + [model_bytes % TENSOR_BYTES]
    tensors = {
        f"layer.{number}": np.frombuffer(random_bytes.randbytes(size), dtype=np.uint8)
        for number, size in enumerate(sizes)
        if size
    }
    save_file(tensors, path)


def load(paths: Sequence[Path]) -> Loaded:
    """What as many processes as there are files loaded at once, each its own file."""
    command = [sys.executable, "-m", "kvlab.loading"]
    with ExitStack() as stack:
        readers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for path in paths
        ]
        for reader in readers:
            stack.callback(reader.kill)  # nothing happens to one that has ended
        for reader in readers:
            _line(reader)
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("\n")
            reader.stdin.flush()
        said = [shapes.loads(_line(reader)) for reader in readers]
    begun, ended = min(one["begun_ns"] for one in said), max(one["ended_ns"] for one in said)
    return Loaded(
        readers=len(said), bytes=sum(one["bytes"] for one in said), seconds=ns_to_s(ended - begun)
    )


def _line(reader: subprocess.Popen[str]) -> str:
    """The next line that a process says; MeasurementError when it has ended instead."""
    assert reader.stdout is not None
    line = reader.stdout.readline()
    if not line:
        raise MeasurementError(
            f"a process that loads a model ended with exit code {reader.wait()}",
            hint="is there memory enough for all readers? ask for smaller models",
        )
    return line


def _read(path: Path) -> dict[str, int]:
    """Load one file as a whole; the bytes of its tensors, and when it began and ended."""
    import numpy as np
    from safetensors.numpy import load as parse

    print(READY, flush=True)
    sys.stdin.readline()
    begun_ns = now_ns()
    tensors = parse(path.read_bytes())
    seen = sum(int(np.count_nonzero(tensor) >= 0) * tensor.nbytes for tensor in tensors.values())
    return {"bytes": seen, "begun_ns": begun_ns, "ended_ns": now_ns()}


if __name__ == "__main__":
    print(json.dumps(_read(Path(sys.argv[1]))), flush=True)
