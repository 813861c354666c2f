"""Servers as containers: the same plan and the same deployment as of processes.

See ``started`` for what is done with them, ``container`` and ``keeper`` for one of them, and
``containers`` for what a killed keeper leaves behind.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from docker.errors import APIError

from kvlab.errors import EngineMissing, UsageError
from kvlab.profile import Container, Profile
from kvlab.rundir import RunDir
from kvlab.stack import containers, daemon, gpus, images, l2, ports, started
from kvlab.stack.container import ContainerServer
from kvlab.stack.daemon import NEAR, Daemon
from kvlab.stack.images import Image
from kvlab.stack.plan import Place, Plan, instances, plan
from kvlab.stack.started import PlanFor, StartedDeployment

PACKAGE = Path(__file__).resolve().parents[1]
FAR_L2 = "/var/tmp/kvlab"  # noqa: S108 - a folder on the engine's machine, named after the run
"""Where L2 lies on the engine's machine when that is not this one and the profile sets nothing."""


def prepare(profile: Profile) -> dict[str, Any]:
    """What a run's manifest keeps of the engine, the image and its GPUs, all of them there."""
    container = _section(profile)
    engine = daemon.connect()
    _refuse_unreachable(profile, engine)
    image = images.resolve(engine, container.image)
    seen = gpus.listed(engine, image, container.gpus) if container.gpus else None
    return {
        "engine": engine.facts,
        "images": {container.image: image.as_dict()},
        "gpus": seen,
    }


def pull(profile: Profile) -> Image:
    """The profile's image, fetched from its registry."""
    return images.pull(daemon.connect(), _section(profile).image)


@asynccontextmanager
async def launch(
    profile: Profile,
    scenario: str,
    repeat: int,
    *,
    run: RunDir,
    models: Path | str | None = None,
    nonce: str = "",
    gpu_holders: Collection[int] = (),
    plan_for: PlanFor | None = None,
    variant: Profile | None = None,
    label: str | None = None,
    l2_path: Path | None = None,
    keep_l2: bool = False,
    probe: bool = True,
    hard_stop: bool = False,
) -> AsyncIterator[StartedDeployment]:
    """The scenario's servers in containers, fresh, ready and proven; none is left afterwards.

    The arguments are those of ``process.launch``. The image is the one that the run's manifest
    holds, so that a tag that moves meanwhile changes nothing. ``gpu_holders`` are the pids that
    held GPU memory before the run; one more keeps the launch from starting.
    """
    profile = variant or profile
    engine = await asyncio.to_thread(daemon.connect)
    _refuse_unreachable(profile, engine, records=l2_path is not None or keep_l2)
    await asyncio.to_thread(containers.sweep, engine)
    name = f"{repeat}-{label or scenario}"
    folder = str(l2_path or _l2_folder(profile, run, name, engine))
    make = plan_for or partial(_plan, profile, scenario)
    steps = make(_place(profile, scenario, engine, models, folder))
    image = await asyncio.to_thread(_image, engine, steps, run)
    if not engine.machine:
        gpus.refuse_held(label or scenario, gpu_holders, holders(profile))
        started.refuse_taken(profile, steps)
    await asyncio.to_thread(
        containers.clear_names, engine, [service.name for service in steps.services]
    )
    with_l2 = started.has_l2(profile, steps)
    here = with_l2 and not engine.machine
    records = l2.prepare(Path(folder), fresh=l2_path is None) if here else None

    def tell(kind: str, **detail: Any) -> None:
        stack.event(kind, **detail)

    servers = [
        ContainerServer(
            service,
            run.id,
            started.log_of(run, repeat, label or steps.scenario, service),
            engine=engine,
            image=image,
            tell=tell,
            made=f"{folder}:{folder}" if engine.machine else None,
        )
        for service in steps.services
    ]
    stack = StartedDeployment(
        profile, steps, servers, repeat=repeat, run=run, label=label, l2_path=records
    )
    try:
        async with started.running(stack, nonce=nonce, probe=probe, hard_stop=hard_stop):
            yield stack
    finally:
        if with_l2 and l2_path is None and not keep_l2:
            await asyncio.to_thread(_remove_l2, engine, image, folder, run, tell)


def _section(profile: Profile) -> Container:
    assert profile.container is not None  # a profile with this runtime has one
    return profile.container


def _refuse_unreachable(profile: Profile, engine: Daemon, *, records: bool = False) -> None:
    """Raise UsageError for what an engine on another machine cannot do for us."""
    if not engine.machine:
        return
    loopback = [
        setting
        for setting, host in (
            ("engine.host", profile.engine.host),
            ("cache.host", profile.cache.host),
        )
        if host in (*NEAR, "0.0.0.0", "::")  # noqa: S104 - compared, not bound
    ]
    if loopback:
        raise UsageError(
            f"the container engine runs on {engine.machine}, where servers cannot be reached by "
            f"{' and '.join(loopback)} as the profile sets it",
            hint=f"set engine.host, cache.host and cache.flags.http-host to an address of "
            f"{engine.machine}, or run kvlab there",
        )
    if records:
        raise UsageError(
            f"records in L2 on {engine.machine} cannot be kept or counted from here",
            hint="run kvlab there",
        )


def _l2_folder(profile: Profile, run: RunDir, name: str, engine: Daemon) -> Path:
    """The launch's L2 folder on the engine's machine."""
    if not engine.machine:
        return l2.folder(profile, run, name)
    base = profile.cache.l2.base_path if profile.cache.l2 else None
    return Path(base or FAR_L2) / run.id / name


def _place(
    profile: Profile, scenario: str, engine: Daemon, models: Path | str | None, folder: str
) -> Place:
    chosen = ports.free(2 + instances(profile, scenario))
    return Place(
        models=str(models or ""),
        l2=folder,
        lmcache_port=chosen[0],
        lmcache_http_port=chosen[1],
        vllm_port=chosen[2],
        more_vllm_ports=tuple(chosen[3:]),
        package=None if engine.machine else str(PACKAGE),
        user=f"{os.getuid()}:{os.getgid()}",
    )


def _plan(profile: Profile, scenario: str, place: Place) -> Plan:
    return plan(profile, scenario, place)


def _image(engine: Daemon, steps: Plan, run: RunDir) -> Image:
    """The image of the plan's containers: as the run holds it, else as it is now."""
    container = steps.services[0].container
    if container is None:
        raise UsageError(
            "the plan holds no containers", hint="set runtime: docker and a container section"
        )
    kept = (run.manifest.get("images") or {}).get(container.image)
    if kept is None:
        return images.resolve(engine, container.image)
    found = images.resolve(engine, kept["id"])
    return Image(**{**found.as_dict(), "reference": container.image, "digest": kept["digest"]})


def holders(profile: Profile) -> list[gpus.Holder]:
    """Who holds GPU memory now, where the profile's containers need it."""
    return gpus.holders() if profile.container and profile.container.gpus else []


def _remove_l2(engine: Daemon, image: Image, folder: str, run: RunDir, tell: Any) -> None:
    """Remove what the launch wrote; what even root in a container cannot remove is told."""
    path = Path(folder)
    names = [path.name] if engine.machine else [one.name for one in l2.empty(path)]
    if names:  # files of root, or of another machine
        place = str(path.parent) if engine.machine else folder
        error = _empty_through(engine, image, place, names)
        if error or (not engine.machine and l2.empty(path)):
            tell("left_behind", folder=folder, error=error or "its files cannot be removed")
    if not engine.machine:
        l2.remove(path, run)


def _empty_through(engine: Daemon, image: Image, folder: str, names: list[str]) -> str | None:
    try:
        containers.empty_through(engine, image, folder, names)
    except APIError as error:
        return daemon.said(error)
    except (OSError, EngineMissing) as error:
        return str(error)
    return None
