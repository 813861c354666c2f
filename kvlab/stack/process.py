"""Servers as local processes, each with a guard that outlives kvlab just long enough to stop it.

See ``started`` for what is done with them, ``server`` and ``guard`` for one of them, and
``leftovers`` for what remains when a guard is killed as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kvlab import environment
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import l2, leftovers, ports, started
from kvlab.stack.plan import Place, Plan, instances, plan
from kvlab.stack.server import Server
from kvlab.stack.started import PlanFor, StartedDeployment


@asynccontextmanager
async def launch(
    profile: Profile,
    scenario: str,
    repeat: int,
    *,
    run: RunDir,
    models: Path | str | None = None,
    nonce: str = "",
    engine_python: Path | str | None = None,
    plan_for: PlanFor | None = None,
    variant: Profile | None = None,
    label: str | None = None,
    l2_path: Path | None = None,
    keep_l2: bool = False,
    probe: bool = True,
    hard_stop: bool = False,
) -> AsyncIterator[StartedDeployment]:
    """The scenario's servers, fresh, ready and proven; none of them is left afterwards.

    ``l2_path`` is an L2 folder that may hold records, for a start on an earlier launch's cache;
    otherwise it is the launch's own, empty, and removed at the end unless ``keep_l2``.
    ``hard_stop`` ends the servers by SIGKILL. ``plan_for`` makes another plan than the profile's.
    ``variant`` and ``label`` are those of ``Launch``.
    """
    profile = variant or profile
    await asyncio.to_thread(sweep)
    folder = l2_path or l2.folder(profile, run, f"{repeat}-{label or scenario}")
    make = plan_for or partial(_plan, profile, scenario)
    # Only a plan that runs the engine needs to know where it is.
    python = engine_python or ("" if plan_for else environment.engine_python())
    chosen = ports.free(2 + instances(profile, scenario))
    place = Place(
        engine_python=str(python),
        models=str(models or ""),
        l2=str(folder),
        lmcache_port=chosen[0],
        lmcache_http_port=chosen[1],
        vllm_port=chosen[2],
        more_vllm_ports=tuple(chosen[3:]),
    )
    steps = make(place)
    started.refuse_taken(profile, steps)
    records = l2.prepare(folder, fresh=l2_path is None) if started.has_l2(profile, steps) else None
    servers = [
        Server(service, run.id, started.log_of(run, repeat, label or steps.scenario, service))
        for service in steps.services
    ]
    stack = StartedDeployment(
        profile, steps, servers, repeat=repeat, run=run, label=label, l2_path=records
    )
    try:
        async with started.running(stack, nonce=nonce, probe=probe, hard_stop=hard_stop):
            yield stack
    finally:
        if records and l2_path is None and not keep_l2:
            l2.empty(records)
            l2.remove(records, run)


def sweep() -> list[int]:
    """The pids of servers that killed runs had left behind; they are gone now."""
    return leftovers.sweep_orphans()


def _plan(profile: Profile, scenario: str, place: Place) -> Plan:
    return plan(profile, scenario, place)
