"""N as runs saw it: a small cache of vLLM's block size by everything that decides it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab import environment
from kvlab import host as hosts
from kvlab.preflight.case import computes_on_cpu
from kvlab.profile import Profile
from kvlab.rundir import sha256_json

FILE = "blocks.json"
"""Its name, beside the folder of runs."""
SCHEMA = 1
TYPE_FLAGS = ("dtype", "kv-cache-dtype", "mamba-ssm-cache-dtype", "quantization")
LAYOUT_FLAGS = ("block-size", "tensor-parallel-size", "attention-backend")


@dataclass(frozen=True, slots=True)
class Seen:
    """N, and the run that saw it."""

    block_tokens: int
    run: str


def key(profile: Profile, host: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides N: image or engine, model, number types, speculation, layout.

    On CPU vLLM chooses number types by the processor, so the host belongs to it there.
    """
    flags = profile.engine.flags
    container = profile.container
    inside = profile.runtime == "docker" and container is not None
    return {
        "image": container.image if container and inside else _engine(),
        "host": hosts.fingerprint(dict(host)) if computes_on_cpu(profile) else None,
        "model": profile.model.name,
        "layers": profile.model.layers,
        "types": {name: flags.get(name, "auto") for name in TYPE_FLAGS},
        "speculative": flags.get("speculative-config"),
        "layout": {name: flags.get(name) for name in LAYOUT_FLAGS},
        "mamba_cache_mode": profile.engine.mamba_cache_mode,
    }


def find(runs: Path, profile: Profile, host: Mapping[str, Any]) -> Seen | None:
    """N as the last run with the same key saw it; None when none did."""
    entry = _read(runs).get(sha256_json(key(profile, host)))
    if not isinstance(entry, dict) or not isinstance(entry.get("block_tokens"), int):
        return None
    return Seen(entry["block_tokens"], str(entry.get("run")))


def keep(runs: Path, profile: Profile, host: Mapping[str, Any], seen: Seen) -> None:
    """Remember N for the next check; a cache that cannot be written is no reason to fail a run."""
    wanted = key(profile, host)
    entry = {"block_tokens": seen.block_tokens, "run": seen.run, "key": wanted}
    held = {"schema": SCHEMA, "blocks": {**_read(runs), sha256_json(wanted): entry}}
    path = runs.parent / FILE
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(held, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(path)


def _read(runs: Path) -> dict[str, Any]:
    try:
        held = json.loads((runs.parent / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    whole = isinstance(held, dict) and held.get("schema") == SCHEMA
    blocks = held.get("blocks") if whole else None
    return blocks if isinstance(blocks, dict) else {}


def _engine() -> str:
    """The engine environment's identity: its lock."""
    return f"lock {hashlib.sha256(environment.LOCK.read_bytes()).hexdigest()[:16]}"
