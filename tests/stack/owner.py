"""A kvlab that launches a dummy and waits; the tests kill it in every way there is."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from kvlab.rundir import RunDir
from kvlab.stack import process
from tests import fake_stack
from tests.stack.conftest import dummy_plan


async def own(folder: Path, mode: str, options: list[str]) -> None:
    run = RunDir.create(folder, {"run": f"owned-{os.getpid()}"})
    async with process.launch(
        fake_stack.profile(timeouts__stop_s=0.5),
        "baseline",
        repeat=1,
        run=run,
        plan_for=dummy_plan(*options),
        probe=False,
    ):
        if mode == "fork" and os.fork() == 0:
            time.sleep(60)  # holds copies of every pipe
            os._exit(0)
        (folder / "ready").touch()
        await asyncio.sleep(600)


if __name__ == "__main__":
    try:
        asyncio.run(own(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    except KeyboardInterrupt:
        sys.exit(130)
