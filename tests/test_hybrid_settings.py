"""Settings that a hybrid model needs: chunks of whole blocks, and a batch limit below 2N."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import preflight, profile
from kvlab.errors import ProfileError

BATCHED = "KV002"


def hybrid(block: int, *, chunk: int | None = None, batched: int | None = None) -> profile.Profile:
    """A hybrid profile with that N: sequential, 12k prompts."""
    overrides: dict[str, Any] = {
        "engine.block_tokens": block,
        "engine.max_num_batched_tokens": 2 * block - 1 if batched is None else batched,
        "engine.max_model_len": 16384,
        "engine.kv_cache_tokens": None,
        "cache.chunk_tokens": chunk or block,
        "workload.context_tokens": 12_000,
    }
    return profile.load("embedded", overrides)


@pytest.mark.parametrize("block", [784, 816, 544])
@pytest.mark.parametrize("chunk", [256, 512, 1024])
def test_a_chunk_that_is_no_multiple_of_the_block_stops_before_anything_starts(
    block: int, chunk: int
) -> None:
    with pytest.raises(ProfileError, match=f"not a multiple of engine.block_tokens {block}") as e:
        hybrid(block, chunk=chunk)
    assert f"use {block}, or another multiple" in str(e.value.hint)


@given(st.integers(min_value=16, max_value=1200), st.integers(min_value=1, max_value=3000))
def test_only_multiples_of_the_block_are_chunks(block: int, chunk: int) -> None:
    """P-21: N is 784, or 816 with MTP; a chunk must be a multiple of it."""
    if chunk % block:
        with pytest.raises(ProfileError, match="not a multiple"):
            hybrid(block, chunk=chunk)
    elif 4 * chunk < 12_000:
        assert hybrid(block, chunk=chunk).cache.chunk_tokens == chunk


@pytest.mark.parametrize(
    ("batched", "warned"),
    [(784, False), (1567, False), (1568, True), (8192, True)],
)
def test_a_batch_limit_of_2n_or_more_is_warned_of_before_the_start(
    batched: int, warned: bool
) -> None:
    """P-24: 8,192 for N = 784 is warned of, 1,567 is not."""
    found = [one for one in preflight.check(hybrid(784, batched=batched)) if one.id == BATCHED]
    assert bool(found) == warned
    if found:
        assert found[0].severity == "warning"
        assert "1567" in found[0].fix


def test_a_batch_limit_below_one_block_is_refused() -> None:
    with pytest.raises(ProfileError, match="smaller than one block"):
        hybrid(784, batched=783)


def test_a_dense_model_may_have_any_batch_limit() -> None:
    dense = profile.load("embedded", {"model.hybrid": False, "engine.max_num_batched_tokens": 8192})
    assert not [one for one in preflight.check(dense) if one.id == BATCHED]
