"""GPUs for containers: whether the engine gives any, and who holds their memory already."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import psutil
from docker.errors import APIError

from kvlab.errors import EngineMissing, HostBusy
from kvlab.stack import containers, daemon, refusals
from kvlab.stack.daemon import Daemon
from kvlab.stack.images import Image

LIST_S = 60.0
QUERY_S = 5.0


def listed(engine: Daemon, image: Image, gpus: str) -> list[str] | None:
    """The GPUs that a container of the image sees; None where it holds no nvidia-smi.

    Takes seconds, before a model is loaded for minutes. EngineMissing when there are none.
    """
    try:
        code, said = containers.run_briefly(
            engine,
            image,
            ["nvidia-smi", "-L"],
            {"DeviceRequests": containers.device_requests(gpus)},
            limit_s=LIST_S,
        )
    except APIError as error:
        reason = daemon.said(error)
        if "nvidia-smi" in reason:
            return None
        refusal = refusals.explain(reason, image=image.reference, machine=engine.machine)
        raise EngineMissing(refusal.sentence, hint=refusal.hint) from error
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if code or not lines:
        raise EngineMissing(
            f"a container of {image.reference} sees no GPU: {' '.join(lines) or 'none is listed'}",
            hint=refusals.NO_GPU,
        )
    return lines


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds GPU memory; its size is None where the driver does not tell."""

    pid: int
    mib: int | None


def holders() -> list[Holder]:
    """Every process that holds GPU memory of this machine; none where that cannot be asked."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_holders(done.stdout)


def parse_holders(text: str) -> list[Holder]:
    """The rows of nvidia-smi: ``742, 112252 MiB``."""
    found = []
    for line in text.splitlines():
        pid, _, size = (part.strip() for part in line.partition(","))
        if pid.isdigit():
            mib = size.partition(" ")[0]
            found.append(Holder(int(pid), int(mib) if mib.isdigit() else None))
    return found


def refuse_held(label: str, known: Collection[int], now: Iterable[Holder]) -> None:
    """Raise HostBusy when a process holds GPU memory that did not hold any before the run."""
    for one in now:
        if one.pid not in known:
            raise HostBusy(
                f"{label} not started: {_name(one.pid)} (pid {one.pid}) holds "
                f"{'an unknown amount' if one.mib is None else f'{one.mib} MiB'} of GPU memory",
                hint="an earlier server may have left it: stop that process, or reset the GPU",
            )


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "a process"
