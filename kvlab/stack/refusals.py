"""What a container engine refuses, in its words, and what that means in ours. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One sentence without a full stop, and what to do."""

    sentence: str
    hint: str


NO_GPU = (
    "install NVIDIA's container toolkit and run `nvidia-ctk runtime configure --runtime=docker`; "
    "or use CDI: `nvidia-ctk cdi generate`, then container.gpus: nvidia.com/gpu=all"
)

_KNOWN: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"could not select device driver"),
        "the container engine has no runtime that gives GPUs to containers",
        NO_GPU,
    ),
    (
        re.compile(r"invoking the NVIDIA Container Runtime Hook directly"),
        "the container engine gives GPUs by CDI only, not by --gpus",
        "set container.gpus: nvidia.com/gpu=all",
    ),
    (
        re.compile(
            r"CDI device injection failed(?:.*CDI devices (?P<what>\S+))?"
            r"|unresolvable CDI devices (?P<other>\S+)"
        ),
        "the container engine knows no CDI device {what}",
        "run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`, or set container.gpus: all",
    ),
    (
        re.compile(r"bind source path does not exist: (?P<what>\S+)"),
        "there is no {what} {where}",
        "the paths of a profile are those of the machine that the engine runs on; make the "
        "folder, or correct container.volumes",
    ),
    (
        re.compile(
            r'exec: \\*"(?P<what>[^"\\]+)\\*": (?:stat|executable file not found)'
            r"|stat (?P<other>\S+): no such file"
        ),
        "the image {image} has no program {what}",
        "use an image that holds the engine, or set container.python or "
        "container.lmcache_entrypoint to where it is",
    ),
    (
        re.compile(r"Conflict\. The container name"),
        "a container of that name exists already",
        "remove it, or set container.prefix",
    ),
    (
        re.compile(r"[Mm]inimum memory limit|memory limit .* smaller|memoryswap limit"),
        "the engine refuses the memory limits: {said}",
        "raise container.memory; container.memory_swap must not be below it",
    ),
)


def explain(said: str, *, image: str, machine: str | None = None) -> Refusal:
    """The engine's words on a container that it did not create or start, as a sentence and a hint.

    ``machine`` is where the engine runs; None: here.
    """
    for pattern, sentence, hint in _KNOWN:
        if match := pattern.search(said):
            groups = match.groupdict()
            what = groups.get("what") or groups.get("other") or ""
            where = f"on {machine}, where the engine runs" if machine else "on this machine"
            text = sentence.format(what=what, where=where, image=image, said=said)
            return Refusal(" ".join(text.split()), hint)
    return Refusal(said, "this is the container engine's own reason; see its log for more")
