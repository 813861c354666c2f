"""Who starts a profile's servers: one row for every ``runtime`` that a profile can name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvlab import model
from kvlab.errors import EngineMissing, HostBusy, UsageError
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Launch, attach, credentials, leftovers, process
from kvlab.units import byte_size

Launcher = Callable[[Profile, RunDir], Launch]
DISK_MARGIN = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How the servers of a profile come to be, and what must be there before."""

    prepare: Callable[[Profile, Path], dict[str, Any]]
    """What the manifest keeps – ``model`` and whatever else was looked up – once all is there.

    The path is the folder of runs.
    """
    launcher: Launcher
    """The ``Launch`` of one run folder."""
    refuse: Callable[[Profile, str, bool], None] = lambda profile, experiment, control: None
    """Raise UsageError when this runtime cannot do the experiment, or its control."""


def of(profile: Profile) -> Runtime:
    """The runtime that the profile asks for; UsageError when this version does not have it."""
    runtime = RUNTIMES.get(profile.runtime)
    if runtime is None:
        raise UsageError(
            f"profile {profile.name} asks for runtime {profile.runtime}, which this version does "
            "not have",
            hint=f"see what it would start: kvlab plan {profile.name}",
        )
    return runtime


def can(profile: Profile, experiment: str) -> bool:
    """Whether the profile's runtime can do the experiment."""
    try:
        of(profile).refuse(profile, experiment, False)
    except UsageError:
        return False
    return True


def models_folder(runs: Path) -> Path:
    """Where built models are kept: beside the runs."""
    return Path(os.environ.get("KVLAB_MODELS", runs.parent / "models")).resolve()


def prepare_here(profile: Profile, runs: Path) -> dict[str, Any]:
    """The model, built where that is needed; refuses a disk that is too small for the records."""
    served = model.ensure(profile, models_folder(runs))
    check_disk(profile, served, runs)
    return {"model": served}


def prepare_containers(profile: Profile, runs: Path) -> dict[str, Any]:
    """The container engine, the image by its digest, its GPUs, and then the model."""
    from kvlab.stack import docker

    return {**docker.prepare(profile), **prepare_here(profile, runs)}


def check_disk(profile: Profile, served: dict[str, Any], runs: Path) -> None:
    """Refuse a run whose L2 records would not fit; unknown record sizes are not guessed."""
    chunk_bytes = served.get("chunk_bytes")
    if chunk_bytes is None or profile.cache.l2 is None:
        return
    place = Path(profile.cache.l2.base_path or runs)
    while not place.exists():
        place = place.parent
    chunks = -(-profile.workload.context_tokens // profile.cache.chunk_tokens)
    needed = int(2 * profile.workload.contexts * chunks * chunk_bytes * DISK_MARGIN)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise HostBusy(
            f"the records of one repeat need about {byte_size(needed)} in {place}, "
            f"where {byte_size(free)} are free",
            hint="free some space, set cache.l2.base_path to a larger disk, or ask fewer contexts",
        )


def _processes(profile: Profile, run: RunDir) -> Launch:
    return partial(
        process.launch,
        profile,
        run=run,
        models=models_folder(run.path.parent),
        nonce=run.manifest["nonce"],
    )


def _attached(profile: Profile, runs: Path) -> dict[str, Any]:
    """The model as the profile names it; refuses credentials that are not set."""
    credentials.headers(profile)
    return {"model": {"name": profile.model.name, "source": "attached"}}


def _attach(profile: Profile, run: RunDir) -> Launch:
    return partial(attach.launch, profile, run=run, nonce=run.manifest["nonce"])


def _containers(profile: Profile, run: RunDir) -> Launch:
    from kvlab.stack import docker

    return partial(
        docker.launch,
        profile,
        run=run,
        gpu_holders=[one.pid for one in docker.holders(profile)],
        models=models_folder(run.path.parent),
        nonce=run.manifest["nonce"],
    )


def pull(profile: Profile) -> None:
    """Fetch the image that the profile's containers need; UsageError where it needs none."""
    from kvlab.stack import docker

    if profile.runtime != "docker":
        raise UsageError(
            f"profile {profile.name} starts no containers, so there is nothing to pull",
            hint="leave --pull out",
        )
    docker.pull(profile)


def clean(*, dry_run: bool) -> dict[str, list[Any]]:
    """What killed runs left behind: ``processes`` by pid, ``containers`` by name; all of it gone.

    With ``dry_run`` it is only listed. Without a container engine there are no containers.
    """
    if dry_run:
        processes = sorted(one.pid for one in leftovers.find() if one.orphan)
    else:
        processes = process.sweep()
    return {"processes": processes, "containers": _clean_containers(dry_run=dry_run)}


def _clean_containers(*, dry_run: bool) -> list[str]:
    from kvlab.stack import containers, daemon

    try:
        engine = daemon.connect()
    except EngineMissing:
        return []
    found = containers.orphans(engine) if dry_run else containers.sweep(engine)
    return [one.name for one in found]


RUNTIMES: dict[str, Runtime] = {
    "process": Runtime(prepare=prepare_here, launcher=_processes),
    "attach": Runtime(prepare=_attached, launcher=_attach, refuse=attach.refuse),
    "docker": Runtime(prepare=prepare_containers, launcher=_containers),
}
"""By the name that profiles give in ``runtime``."""
