"""What a profile's caches hold, from the shape of its model. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kvlab.errors import UsageError
from kvlab.profile import Profile
from kvlab.sizing import time_model
from kvlab.sizing.model import Arithmetic, arithmetic
from kvlab.units import GIB


def known_config(name: str) -> dict[str, Any] | None:
    """The fields of a model that kvlab's own profiles serve; None for any other."""
    source = (resources.files("kvlab.sizing") / "shapes.json").read_text(encoding="utf-8")
    found = json.loads(source).get(name)
    return dict(found) if isinstance(found, dict) else None


def config_of(profile: Profile, models: Path) -> dict[str, Any] | None:
    """The fields of the model's config.json; None when it is neither here nor known.

    What lies in ``models`` under the model's name comes first.
    """
    path = models / profile.model.name / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return known_config(profile.model.name)
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON: {error}", hint="restore it, or build the model again"
        ) from error
    return dict(found) if isinstance(found, dict) else None


def arithmetic_of(profile: Profile, config: Mapping[str, Any]) -> Arithmetic:
    """The cache arithmetic of a model under the profile's engine settings."""
    flags = profile.engine.flags
    speculative = flags.get("speculative-config")
    drafts = speculative.get("num_speculative_tokens") if isinstance(speculative, dict) else None
    return arithmetic(
        config,
        dtype=str(flags.get("dtype") or "bfloat16"),
        state_dtype=flags.get("mamba-ssm-cache-dtype"),
        cache_dtype=flags.get("kv-cache-dtype"),
        tensor_parallel=int(flags.get("tensor-parallel-size") or 1),
        kernel_block_tokens=int(flags.get("block-size") or 16),
        speculative_tokens=int(drafts or 0),
    )


def attention_of(config: Mapping[str, Any], sums: Arithmetic) -> float | None:
    """b / a of the model's prefill; None where its active parameters are unknown."""
    text = config.get("text_config", config)
    active, heads = config.get("active_parameters"), text.get("num_attention_heads")
    if not active or not heads:
        return None
    return time_model.attention_ratio(
        active_parameters=float(active),
        attention_layers=sums.attention_layers - sums.draft_layers,
        heads=int(heads),
        head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
    )


def sizes(profile: Profile, sums: Arithmetic) -> dict[str, Any]:
    """Bytes of a record, of a context and of the working set, and how many contexts L1 holds."""
    chunk, work = profile.cache.chunk_tokens, profile.workload
    context = sums.context_bytes(work.context_tokens, chunk)
    l1 = profile.cache.l1_size_gb * GIB
    return {
        "block_tokens": sums.block_tokens,
        "chunk_tokens": chunk,
        "chunk_bytes": sums.chunk_bytes(chunk),
        "records_per_context": sums.records(
            work.context_tokens, chunk, bool(profile.cache.separate_object_groups)
        ),
        "context_bytes": context,
        "working_set_bytes": work.contexts * context,
        "l0_working_set_bytes": sums.l0_working_set(work.contexts, work.context_tokens),
        "l1_bytes": l1,
        "l1_contexts": l1 * profile.cache.eviction_watermark / context if context else None,
        "l1_share": min(1.0, l1 / (work.contexts * context)) if context else None,
    }
