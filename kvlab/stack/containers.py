"""Containers of kvlab: what the engine is asked for, and how ours are told from anybody else's.

Every container carries the run that it belongs to and the keeper that will remove it, so that any
later process can tell what was left behind.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound
from docker.utils import parse_bytes

from kvlab.errors import HostBusy
from kvlab.stack import guard
from kvlab.stack.daemon import Daemon
from kvlab.stack.images import Image
from kvlab.stack.plan import Service, is_cdi

RUN, ROLE, MARK = "kvlab.run", "kvlab.role", "kvlab.service"
HOST, KEEPER = "kvlab.host", "kvlab.keeper"
"""Whose the container is: a machine and its boot, and there a process with its start."""
GONE_S = 30.0
"""How long a removal may take until the name is free again."""
REMOVE_S = 300.0
POLL_S = 0.1


def config(service: Service, image: Image, mark: str, *, made: str | None = None) -> dict[str, Any]:
    """The body of the engine's call that creates the service's container. Pure.

    ``made`` is the one volume whose folder the engine makes where it is missing.
    """
    container = service.container
    assert container is not None
    limits = service.limits
    argv = list(service.argv)
    return {
        "Image": image.id,
        "Entrypoint": argv[:1] if service.entrypoint else None,
        "Cmd": argv[1:] if service.entrypoint else argv,
        "Env": [f"{name}={value}" for name, value in service.env.items()],
        "WorkingDir": service.cwd or "",
        "User": service.user or "",
        "Labels": {MARK: mark, RUN: mark.rpartition(":")[0], ROLE: service.role, HOST: this_host()},
        "HostConfig": {
            "NetworkMode": container.network,
            "IpcMode": container.ipc,
            "PidMode": container.pid or "",
            "ShmSize": _bytes(limits.shm_size),
            "Memory": _bytes(limits.memory),
            "MemorySwap": _bytes(limits.memory_swap),
            "Mounts": [_mount(volume) for volume in service.volumes if volume != made],
            "Binds": [made] if made in service.volumes else [],
            "DeviceRequests": device_requests(container.gpus),
            "RestartPolicy": {"Name": "no"},
        },
    }


def _bytes(size: str | None) -> int:
    """Bytes of a size as docker writes it; 0 is the engine's word for none set."""
    return int(parse_bytes(size)) if size else 0


def _mount(volume: str) -> dict[str, Any]:
    """A bind mount; unlike a volume, it is refused when its source is not there."""
    source, _, rest = volume.partition(":")
    target, _, mode = rest.partition(":")
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": mode == "ro"}


def device_requests(gpus: str | None) -> list[dict[str, Any]]:
    """What the engine is asked for in GPUs: CDI devices, a number, some by id, or all."""
    if not gpus:
        return []
    if is_cdi(gpus):
        return [{"Driver": "cdi", "DeviceIDs": gpus.split(",")}]
    request: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]]}
    if gpus.startswith("device="):
        return [{**request, "DeviceIDs": gpus.removeprefix("device=").split(",")}]
    return [{**request, "Count": -1 if gpus == "all" else int(gpus)}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A container that carries kvlab's labels."""

    id: str
    name: str
    run: str
    role: str
    mark: str
    host: str
    keeper: str
    status: str

    @property
    def near(self) -> bool:
        """Whether a process of this machine made it."""
        return self.host.partition(" ")[0] == this_host().partition(" ")[0]

    @property
    def orphan(self) -> bool:
        """Whether its keeper was of this machine and is gone: nobody else will remove it."""
        if not self.near:
            return False
        if self.host != this_host():
            return True  # made before this machine was started again
        pid, _, ticks = self.keeper.partition(":")
        keeper = guard.stat(pid) if pid.isdigit() else None
        return keeper is None or keeper.state in "ZX" or str(keeper.start_ticks) != ticks


def this_host() -> str:
    """This machine and its boot: pids mean something only within both."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else '-'}"


def this_process() -> str:
    """This process as the keeper of a container."""
    own = guard.stat(os.getpid())
    return f"{os.getpid()}:{own.start_ticks if own else 0}"


def find(engine: Daemon, labels: Mapping[str, str] | None = None) -> list[Found]:
    """Every container of kvlab, running or not, or those that carry these labels as well."""
    wanted = [MARK, *(f"{name}={value}" for name, value in (labels or {}).items())]
    listed = engine.api.containers(all=True, filters={"label": wanted})
    return sorted((_found(entry) for entry in listed), key=lambda one: one.name)


def _found(entry: Mapping[str, Any]) -> Found:
    labels = entry.get("Labels") or {}
    return Found(
        id=entry["Id"],
        name=next(iter(entry.get("Names") or ["?"])).lstrip("/"),
        run=labels.get(RUN, ""),
        role=labels.get(ROLE, ""),
        mark=labels.get(MARK, ""),
        host=labels.get(HOST, ""),
        keeper=labels.get(KEEPER, ""),
        status=str(entry.get("State") or ""),
    )


def orphans(engine: Daemon) -> list[Found]:
    """The containers that killed runs of this machine left behind."""
    return [one for one in find(engine) if one.orphan]


def sweep(engine: Daemon) -> list[Found]:
    """What killed runs of this machine had left behind; it is gone now."""
    found = orphans(engine)
    for one in found:
        remove(engine, one.id)
    return found


def sweep_service(engine: Daemon, mark: str) -> None:
    """Remove the container of one service of a run."""
    for one in find(engine, {MARK: mark}):
        remove(engine, one.id)


def remove(engine: Daemon, identity: str) -> None:
    """Return when the container is gone, and its name is free: killed first where it runs."""
    end = time.monotonic() + GONE_S
    while True:
        try:
            engine.api.remove_container(identity, force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            # 409: somebody else is removing it; 500: it has not quite ended.
            if error.status_code not in (409, 500) or time.monotonic() > end:
                raise
        time.sleep(POLL_S)


def clear_names(engine: Daemon, names: Iterable[str]) -> list[str]:
    """The names whose left-over containers of ours had to be removed.

    HostBusy when a container of somebody else has one of the names, or one of ours that still has
    its keeper: neither is touched.
    """
    cleared = []
    for name in names:
        try:
            entry = engine.api.inspect_container(name)
        except NotFound:
            continue
        labels = entry["Config"].get("Labels") or {}
        one = _found({**entry, "Names": [entry["Name"]], "Labels": labels, "State": ""})
        if not one.mark:
            raise HostBusy(
                f"a container named {name} exists that is not kvlab's; it was not touched",
                hint=f"rename or remove it (docker rename {name} …), or set container.prefix",
            )
        if not one.orphan:
            whose = f"run {one.run} of kvlab" + ("" if one.near else f" on {one.host.split()[0]}")
            raise HostBusy(
                f"the container {name} belongs to {whose}, which is still going on",
                hint="wait until it ends, or set container.prefix so that both have their own",
            )
        remove(engine, one.id)
        cleared.append(name)
    return cleared


def run_briefly(
    engine: Daemon,
    image: Image,
    command: list[str],
    host: Mapping[str, Any],
    *,
    limit_s: float,
) -> tuple[int, str]:
    """Exit code and output of a command in a container of the image, as root, without a network.

    Raises docker's own APIError when it cannot be started; the container is gone in any case.
    """
    labels = {MARK: "briefly", ROLE: "briefly", HOST: this_host(), KEEPER: this_process()}
    body = {
        "Image": image.id,
        "Entrypoint": command[:1],
        "Cmd": command[1:],
        "User": "0:0",
        "Labels": labels,
        "HostConfig": {"NetworkMode": "none", **host},
    }
    identity = engine.api.create_container_from_config(body, None)["Id"]
    try:
        engine.api.start(identity)
        code = engine.api.wait(identity, timeout=limit_s)["StatusCode"]
        return int(code), engine.api.logs(identity).decode("utf-8", "replace")
    finally:
        remove(engine, identity)


def empty_through(engine: Daemon, image: Image, folder: str, names: Iterable[str]) -> None:
    """Remove entries of a folder on the engine's machine as root, by a container of the image."""
    mounts = [{"Type": "bind", "Source": folder, "Target": "/emptied", "ReadOnly": False}]
    command = ["rm", "-rf", "--", *(f"/emptied/{name}" for name in names)]
    run_briefly(engine, image, command, {"Mounts": mounts}, limit_s=REMOVE_S)
