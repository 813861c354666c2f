"""Whose records an L2 folder holds: a manifest beside them, and a refusal of foreign ones.

LMCache finds a record by model name and tokens. Weights, number types and the layout of a chunk are
not part of that name, so records of another configuration can be found, and loaded as if they fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import MeasurementError
from kvlab.profile import Profile

FILE = "kvlab-l2.json"
"""Its name in the L2 folder; ``inventory`` knows it."""
SCHEMA = 1
SEED = "PYTHONHASHSEED"
PER_PROCESS = ("builtin", "python", "hash")
"""Hash algorithms whose values depend on the seed of the process."""

Identity = Mapping[str, Any]


def of(profile: Profile) -> dict[str, Any]:
    """What the profile decides about its records."""
    engine, cache = profile.engine, profile.cache
    return {
        "model": profile.model.name,
        "dtype": engine.flags.get("dtype", "auto"),
        "kv_dtype": engine.flags.get("kv-cache-dtype", "auto"),
        "state_dtype": engine.flags.get("mamba-ssm-cache-dtype", "auto"),
        "connector": engine.connector,
        "block_tokens": engine.block_tokens,
        "chunk_tokens": cache.chunk_tokens,
        "object_groups": cache.separate_object_groups,
        "hash_seed": cache.env.get(SEED),
    }


def learnt(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the servers say of themselves; what they do not say is None."""
    versions = facts.get("versions") or {}
    return {
        "model_sha256": facts.get("model_sha256"),
        "vllm": versions.get("vllm"),
        "lmcache": versions.get("lmcache"),
        "hash_algorithm": (facts.get("facts") or {}).get("hash_algorithm"),
    }


def write(folder: Path, identity: Identity) -> None:
    """Leave the identity in the L2 folder, for whoever starts on its records."""
    text = json.dumps({"schema": SCHEMA, **identity}, indent=2, sort_keys=True)
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any] | None:
    """The identity that the folder holds; None when it holds none that can be read."""
    try:
        held = json.loads((folder / FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(held, dict):
        return None
    held.pop("schema", None)
    return held


def differences(held: Identity, wanted: Identity) -> dict[str, tuple[Any, Any]]:
    """The fields in which they differ: what the records have, and what is wanted."""
    return {
        name: (held.get(name), value)
        for name, value in sorted(wanted.items())
        if held.get(name) != value
    }


def complaint(held: Identity | None, wanted: Identity) -> str | None:
    """Why the records must not be used, in words; None: nothing speaks against it."""
    if held is None:
        return f"nothing says whose records they are: {FILE} is missing"
    found = differences(held, wanted)
    if not found:
        return None
    fields = ", ".join(
        f"{name} {_shown(had)} there, {_shown(want)} here" for name, (had, want) in found.items()
    )
    return f"they were written with another configuration: {fields}"


def refuse_foreign(folder: Path, wanted: Identity) -> None:
    """Raise MeasurementError when the folder's records are not those of this configuration."""
    reason = complaint(read(folder), wanted)
    if reason is not None:
        raise MeasurementError(
            f"the records in {folder} are foreign: {reason}",
            hint="use another L2 folder, or start from an empty one",
        )


def refuse_unstable(identity: Identity) -> None:
    """Raise MeasurementError when another process would compute other hashes for the same tokens.

    Then nothing is ever found after a restart, and it would look as if the records were lost.
    """
    algorithm, seed = identity.get("hash_algorithm"), identity.get("hash_seed")
    if algorithm in PER_PROCESS and seed in (None, "", "random"):
        raise MeasurementError(
            f"LMCache hashes with {algorithm}, which differs from process to process without a "
            f"fixed {SEED}: no record would be found after a restart",
            hint=f'set cache.env.{SEED} to "0", or a stable algorithm in cache.flags',
        )


def usable_by(held: Identity | None, profiles: Iterable[Profile]) -> list[str] | None:
    """The names of the profiles whose settings are those of the records; None: nothing tells.

    What only running servers tell (versions, weights) is compared when a run starts.
    """
    if held is None:
        return None
    return [profile.name for profile in profiles if not differences(held, of(profile))]


def _shown(value: Any) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
