"""What ``kvlab predict`` says about a profile: each answer as figures, and as sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import UsageError
from kvlab.profile import Profile
from kvlab.sizing import explanation, sizes
from kvlab.units import byte_size

WIDTH = 100


def answer(profile: Profile, *, models: Path) -> dict[str, Any]:
    """Everything that can be said about a profile before it is run; see ``docs/sizing.md``.

    UsageError when the model's shape is not known.
    """
    config = sizes.config_of(profile, models)
    if config is None:
        raise UsageError(
            f"the shape of the model {profile.model.name} is not known",
            hint=f"put its config.json into {models / profile.model.name}"
            if profile.model.source == "hub"
            else "build it first: make engine, then kvlab run two-round smoke",
        )
    sums = sizes.arithmetic_of(profile, config)
    found: dict[str, Any] = {
        "profile": profile.name,
        "sizes": sizes.sizes(profile, sums),
    }
    attention = sizes.attention_of(config, sums)
    if explanation.applies_to(profile) and attention is not None:
        found["published"] = explanation.explain(
            profile, attention=attention, chunk_bytes=sums.chunk_bytes(profile.cache.chunk_tokens)
        )
    return found


def text(found: Mapping[str, Any]) -> str:
    """The answers in sentences, for a terminal."""
    lines = [*_sizes(found["sizes"])]
    if "published" in found:
        lines += ["", *explanation.sentences(found["published"])]
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _sizes(found: Mapping[str, Any]) -> Iterator[str]:
    yield "Sizes (derived from the model's config.json and the profile)"
    yield ""
    yield (
        f"N = {found['block_tokens']:,} tokens by the model's shape, chunks of "
        f"{found['chunk_tokens']:,} tokens hold {byte_size(found['chunk_bytes'])}; a context "
        f"leaves {found['records_per_context']} records of "
        f"{byte_size(found['context_bytes'])} together."
    )
    yield (
        f"The workload is {byte_size(found['working_set_bytes'])} in L1 and L2 "
        f"({byte_size(found['l0_working_set_bytes'])} of K and V alone in vLLM's cache). L1 of "
        f"{byte_size(found['l1_bytes'])} holds {found['l1_share']:.1%} of it; below its watermark "
        f"that is {found['l1_contexts']:,.1f} contexts."
    )
