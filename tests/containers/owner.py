"""A kvlab that launches a dummy in a container and waits; the tests kill it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kvlab.rundir import RunDir
from kvlab.stack import docker
from tests import fake_stack
from tests.containers.conftest import dummy_plan


async def own(folder: Path, *options: str) -> None:
    run = RunDir.create(folder, {"run": f"owned-{os.getpid()}"})
    async with docker.launch(
        fake_stack.profile(),
        "baseline",
        repeat=1,
        run=run,
        plan_for=dummy_plan(*options),
        probe=False,
    ):
        (folder / "ready").touch()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(own(Path(sys.argv[1]), *sys.argv[2:]))
