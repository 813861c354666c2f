"""The planned commands, read by the engine's own parsers in the engine's own environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab import environment
from kvlab.errors import EngineMissing
from kvlab.profile import Profile
from kvlab.stack import plan
from kvlab.stack.plan import Place, Service

PARSE_S = 240.0
"""Importing vLLM takes most of it."""
PLACE = Place(
    engine_python="python",
    models=".",
    l2="/l2",
    vllm_port=8000,
    lmcache_port=5555,
    lmcache_http_port=8080,
)
"""Where a plan only has to be parsed, any port and folder will do."""
PROGRAM = Path(__file__).resolve().parents[1] / "engine" / "flags.py"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def commands(profile: Profile) -> dict[str, list[list[str]]]:
    """The flags of every server that the A/B starts, by program and without the program itself."""
    found: dict[str, list[list[str]]] = {}
    for scenario in ("baseline", "lmcache"):
        for service in plan.plan(profile, scenario, PLACE).services:
            words = _flags(service)
            if words not in found.setdefault(service.role, []):
                found[service.role].append(words)
    return found


def parse(profile: Profile) -> tuple[tuple[dict[str, Any], ...], str]:
    """What the parsers refuse, and whose they were.

    A container's command is parsed in its image where docker has that image, else, like every
    other, in the engine environment. Raises EngineMissing when neither can be asked.
    """
    asked = json.dumps(commands(profile))
    if (image := _local_image(profile)) is not None:
        container = profile.container
        python = (container.python if container else None) or "python3"
        inside = "/kvlab-flags.py"
        command = ["docker", "run", "--rm", "-i", "--network", "none"]
        command += ["-v", f"{PROGRAM}:{inside}:ro", "--entrypoint", python, image, inside]
        answer, where = _ask(command, asked), f"in {image}"
    else:
        python = str(environment.engine_python())
        answer, where = (
            _ask([python, "-m", "kvlab.engine.flags"], asked),
            "in the engine environment",
        )
    named = " and ".join(f"{name} {version}" for name, version in answer["versions"].items())
    return tuple(answer["refused"]), f"{named} {where}"


def _flags(service: Service) -> list[str]:
    """A server's words from the first flag on; the model, which stands before it, is given."""
    words = list(service.argv)
    if service.role == "lmcache":
        return words[words.index("server") + 1 :]
    first = next(place for place, word in enumerate(words) if word.startswith("--"))
    return words[first:]


def _local_image(profile: Profile) -> str | None:
    """The profile's image where docker is here and has it; it is never fetched."""
    if profile.runtime != "docker" or profile.container is None:
        return None
    image = profile.container.image
    try:
        found = subprocess.run(
            ["docker", "image", "inspect", image],  # noqa: S607 - found on the user's own PATH
            capture_output=True,
            timeout=PARSE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return image if found.returncode == 0 else None


def _ask(command: Sequence[str], asked: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            input=asked,
            capture_output=True,
            text=True,
            timeout=PARSE_S,
            check=True,
            env={**os.environ, **QUIET},
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise EngineMissing(
            "the engine's parsers could not be asked",
            hint="is the engine environment complete? run `make engine`",
            log_tail="\n".join(error.stderr.splitlines()[-10:]),
        ) from error
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise EngineMissing(
            f"the engine's parsers could not be asked: {type(error).__name__}",
            hint="run `make engine`, then try again",
        ) from error
    if not isinstance(answer, dict) or not {"versions", "refused"} <= set(answer):
        raise EngineMissing(
            "the engine's parsers answered something else", hint="run `make engine`"
        )
    return answer
