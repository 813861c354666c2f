"""The model that a profile serves: built once by the engine environment, verified by its hashes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from kvlab import environment
from kvlab.errors import EngineMissing
from kvlab.profile import Profile

BUILD_DEADLINE_S = 600


def ensure(profile: Profile, models: Path) -> dict[str, Any]:
    """What the run's manifest keeps of the model, after building it where that is needed.

    Keys: ``name``, ``source`` and, for a built model, ``block_tokens``, ``chunk_bytes`` (of one
    LMCache chunk over all layers), ``kv_bytes_per_token``, ``parameters``, ``sha256`` by file.
    Raises EngineMissing when the model cannot be built.
    """
    model = profile.model
    if model.source == "hub":
        return {"name": model.name, "source": "hub"}
    command = [
        str(environment.engine_python()),
        "-m",
        "kvlab.engine.checkpoint",
        *("--preset", str(model.preset), "--out", str(models / model.name)),
        *("--seed", str(model.seed), "--json"),
    ]
    if model.layers:
        command += ["--layers", str(model.layers)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=True
        )
        manifest = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise EngineMissing(
            f"the model {model.name} could not be built",
            hint="is the engine environment complete? run `make engine`",
            log_tail="\n".join(error.stderr.splitlines()[-10:]),
        ) from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise EngineMissing(
            f"the model {model.name} could not be built: {type(error).__name__}",
            hint="run `make engine`, then try again",
        ) from error
    return _entry(profile, manifest)


def _entry(profile: Profile, manifest: dict[str, Any]) -> dict[str, Any]:
    cache = manifest["recipe"]["cache"]
    blocks = profile.cache.chunk_tokens // cache["attention_block_tokens"]
    layers = cache["attention_layers"] + cache.get("recurrent_layers", 0)
    return {
        "name": profile.model.name,
        "source": "built",
        "preset": manifest["recipe"]["preset"],
        "seed": manifest["recipe"]["seed"],
        "layers": manifest["recipe"]["layers"],
        "parameters": manifest["parameters"],
        "block_tokens": cache["attention_block_tokens"],
        "kv_bytes_per_token": cache["kv_bytes_per_token"],
        "chunk_bytes": max(1, blocks) * layers * cache["page_bytes"],
        "sha256": manifest["sha256"],
    }
