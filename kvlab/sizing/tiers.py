"""How large the tiers are, and how they let go of what they hold: settings, and a profile's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvlab.profile import Profile
from kvlab.sizing.model import Arithmetic
from kvlab.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """How large the tiers are and how they let go of what they hold."""

    chunk_bytes: int
    """One chunk in LMCache, states included, over all workers."""
    state_bytes: int = 0
    """The part of it that is an object of its own (separate object groups); 0: one object."""
    l0_chunks: int | None
    """Chunks that vLLM's own cache holds; None = no limit, 0 = it reuses nothing."""
    l0_state_chunks: float = 0.0
    """Places of a chunk that one recurrent state takes there; 0: there are none."""
    l1_bytes: float | None = None
    """None: vLLM alone."""
    watermark: float = 0.8
    ratio: float = 0.2
    loop_s: float = 1.0
    """Seconds between two looks of the eviction loop."""
    first_look_s: float = 1.0
    """When it looks first: which chunks are left in L1 depends on it, and no setting decides it."""
    l2: bool = False
    l2_bytes: float | None = None
    """None: it is never emptied."""
    l2_watermark: float = 0.8
    l2_ratio: float = 0.2
    l2_write_bytes_per_s: float | None = None
    """None: a store is on L2 at once."""
    state_every: int = 1
    """Chunks between two kept recurrent states; 1 also where there are none."""


def tiers_of(
    profile: Profile,
    sizes: Arithmetic,
    scenario: Literal["baseline", "lmcache"] = "lmcache",
    *,
    l0_chunks: int | None = None,
    l2_write_bytes_per_s: float | None = None,
) -> Tiers:
    """The tiers that a profile sets up for a model of these sizes.

    L0 is ``l0_chunks`` where that is known from a log; else what the pool holds, by
    ``num-gpu-blocks-override`` or by the tokens that the log states (``engine.kv_cache_tokens``);
    else it has no limit.
    """
    cache = profile.cache
    with_lmcache = scenario == "lmcache"
    apart = bool(cache.separate_object_groups) and sizes.is_hybrid
    records = sizes.record_bytes(cache.chunk_tokens, apart)
    limit = cache.l2.adapter.get("max_capacity_gb") if cache.l2 else None
    return Tiers(
        chunk_bytes=sum(records) * sizes.workers,
        state_bytes=records[1] * sizes.workers if apart else 0,
        l0_chunks=_l0_chunks(profile, sizes) if l0_chunks is None else l0_chunks,
        l0_state_chunks=sizes.state_groups / _chunk_blocks(profile, sizes),
        l1_bytes=cache.l1_size_gb * GIB if with_lmcache else None,
        watermark=cache.eviction_watermark,
        ratio=cache.eviction_ratio,
        l2=with_lmcache and cache.l2 is not None,
        l2_bytes=float(limit) * GIB if limit else None,
        l2_write_bytes_per_s=l2_write_bytes_per_s,
        state_every=_state_every(profile, sizes) if sizes.is_hybrid else 1,
    )


def _state_every(profile: Profile, sizes: Arithmetic) -> int:
    """Chunks between two that end where a scheduler step of whole blocks ends: 1 with 2N-1."""
    step = max(1, profile.engine.max_num_batched_tokens // sizes.block_tokens)
    chunk = max(1, profile.cache.chunk_tokens // sizes.block_tokens)
    return step // math.gcd(step, chunk)


def _chunk_blocks(profile: Profile, sizes: Arithmetic) -> int:
    """Blocks of vLLM's pool that K and V of one chunk take."""
    return sizes.attention_groups * max(1, profile.cache.chunk_tokens // sizes.block_tokens)


def _l0_chunks(profile: Profile, sizes: Arithmetic) -> int | None:
    engine = profile.engine
    if not engine.prefix_caching:
        return 0
    if pool := engine.flags.get("num-gpu-blocks-override"):
        blocks = int(pool)
    elif engine.kv_cache_tokens:
        blocks = sizes.stated_pool_blocks(engine.kv_cache_tokens, engine.max_model_len)
    else:
        return None
    # One block stands for none; a request at work takes a broken block and its running states.
    busy = 1 + sizes.attention_groups + sizes.state_groups * sizes.state_blocks_per_request
    return max(0, blocks - busy) // _chunk_blocks(profile, sizes)
