"""Rules about the workload: does the test test anything, and what may be restored wrongly."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.preflight.blocks import HYBRID_CONFIG, RECIPE, REPORT
from kvlab.preflight.case import Case, speculative_tokens
from kvlab.preflight.rule import Example, Found, rule
from kvlab.profile import l0_complaints
from kvlab.units import byte_size

CEILING_SHARE_MIN = 0.6
"""Of the tokens that return, whole chunks should restore at least this share."""
OUTPUT_TOKENS_MAX = 16

_CONTENT_BASED = re.compile(r"blend|cachegen|cache_gen", re.IGNORECASE)


@rule(
    "KV006",
    "note",
    "Separate object groups are off for a hybrid model",
    why="The hybrid recipe keeps recurrent state in objects of its own and treats the flag as "
    "required; the published A/B left it off and advises to turn it on in production.",
    source=f"{RECIPE}; {REPORT}, section 5.2",
    example=Example(profile="dgx-spark"),
)
def object_groups(case: Case) -> Iterator[Found]:
    setting = case.profile.cache.separate_object_groups
    if case.profile.model.hybrid and setting is not True:
        state = "not passed: off in some versions" if setting is None else "off"
        yield Found(
            text=f"separate-object-groups is {state}",
            settings={"cache.separate_object_groups": True},
        )


@rule(
    "KV070",
    "error",
    "L0 holds the whole working set",
    why="vLLM's own cache then answers round 2, and whatever is measured is not LMCache's doing.",
    source="LMCache issue 1109",
    example=Example(
        settings={"engine.kv_cache_tokens": None}, log="CPU KV cache size: 65,536 tokens"
    ),
)
def overflow_of_l0(case: Case) -> Iterator[Found]:
    tokens = case.fact("kv_cache_tokens")
    if tokens is None:
        return
    for complaint in l0_complaints(case.profile, tokens):
        text = complaint.partition("; ")[0]
        least = case.profile.thresholds.l0_overflow_min * tokens
        contexts = math.ceil(least / case.profile.workload.context_tokens)
        yield Found(text=text, settings={"workload.contexts": contexts}, do="or use a smaller L0")


@rule(
    "KV071",
    "warning",
    "L1 alone cannot hold what returns",
    why="Without L2 what L1 evicts is lost, and contexts that return in order are evicted just "
    "before they come: round 2 then finds nothing.",
    source="LMCache's MP observability guide",
    example=Example(settings={"cache.l2": None}, probe={"config": HYBRID_CONFIG}),
)
def overflow_of_l1(case: Case) -> Iterator[Found]:
    if case.profile.cache.l2 is not None or case.fill_bytes is None:
        return
    room = case.l1_bytes * case.profile.cache.eviction_watermark
    if case.fill_bytes > room:
        needed = case.fill_bytes / case.profile.cache.eviction_watermark / 2**30
        yield Found(
            text=f"the fill round stores {byte_size(case.fill_bytes)}, L1 keeps "
            f"{byte_size(room)} below its watermark, and there is no L2",
            settings={"cache.l1_size_gb": math.ceil(needed * 1000) / 1000},
            do="or set cache.l2",
        )


@rule(
    "KV072",
    "note",
    "L2 is not tested",
    why="Everything stays in L1, so no token of round 2 comes from disk.",
    source=f"{REPORT}, section 2.1",
    example=Example(settings={"cache.l1_size_gb": 2}, probe={"config": HYBRID_CONFIG}),
)
def l1_holds_all(case: Case) -> Iterator[Found]:
    if case.profile.cache.l2 is None or case.fill_bytes is None:
        return
    room = case.l1_bytes * case.profile.cache.eviction_watermark
    if case.fill_bytes <= room:
        smaller = case.fill_bytes / case.profile.cache.eviction_watermark / 2**31
        yield Found(
            text=f"the fill round stores {byte_size(case.fill_bytes)}, and L1 keeps "
            f"{byte_size(room)} below its watermark",
            settings={"cache.l1_size_gb": round(smaller, 4)},
            do="or take it as a test of L1 alone",
        )


@rule(
    "KV073",
    "warning",
    "Little of a context fills whole chunks",
    why="Only whole chunks are restored: the rest of every context is computed again, whatever "
    "the cache holds.",
    source="LMCache issue 4094; vLLM issue 40696",
    example=Example(
        profile="dgx-spark",
        settings={"workload.context_tokens": 5200},
    ),
)
def ceiling(case: Case) -> Iterator[Found]:
    work, chunk = case.profile.workload, case.profile.cache.chunk_tokens
    returning, restored = work.prefix_tokens, case.ceiling_tokens
    if restored < CEILING_SHARE_MIN * returning:
        ratio = work.prefix_ratio if work.shape == "prefix_suffix" else 1.0
        longer = math.ceil(((returning // chunk + 1) * chunk + 1) / ratio)
        yield Found(
            text=f"of {returning:,} tokens that return, whole chunks of {chunk} restore "
            f"{restored:,} ({restored / returning:.1%}): the ceiling of any gain",
            settings={"workload.context_tokens": longer},
        )


@rule(
    "KV074",
    "error",
    "vLLM accepts shorter contexts only",
    why="vLLM lowered its longest context, by the model's own limit or by its memory: longer "
    "requests fail.",
    source="vLLM pull request 24937",
    example=Example(
        profile="dgx-spark",
        log="Using max model len 4096",
    ),
)
def context_length(case: Case) -> Iterator[Found]:
    longest, work = case.fact("max_model_len"), case.profile.workload
    need = work.context_tokens + work.output_tokens
    if longest is not None and need > longest:
        yield Found(
            text=f"a context of {work.context_tokens} tokens with {work.output_tokens} output "
            f"exceeds the {longest} of vLLM's log",
            do=f"give vLLM room for --max-model-len {need}, or shorten workload.context_tokens",
        )


@rule(
    "KV075",
    "warning",
    "Long answers while contexts are measured",
    why="Generated tokens are stored too and push out what is being measured.",
    source="LMCache issue 5230",
    example=Example(settings={"workload.output_tokens": 128}),
)
def output_tokens(case: Case) -> Iterator[Found]:
    tokens = case.profile.workload.output_tokens
    if tokens > OUTPUT_TOKENS_MAX:
        yield Found(
            text=f"every request generates {tokens} tokens",
            settings={"workload.output_tokens": 1},
        )


@rule(
    "KV076",
    "warning",
    "MTP, and requests resume at a prompt's last whole block",
    why="With MTP vLLM writes no recurrent state at the last whole block of a prompt, and LMCache "
    "stores a scratch block in its place: a prompt that returns whole resumes from it, fast and "
    "wrong. A shorter prefix resumes from an earlier block, which is right.",
    source="LMCache issue 4984 and pull request 5004",
    example=Example(
        profile="dgx-spark",
        settings={"workload.shape": "identical", "workload.context_tokens": 9000},
    ),
)
def speculative_state(case: Case) -> Iterator[Found]:
    profile = case.profile
    if not (profile.model.hybrid and speculative_tokens(profile)):
        return
    last = profile.workload.context_tokens // case.n * case.n
    if case.ceiling_tokens == last:
        yield Found(
            text=f"requests resume at token {last:,}, the end of the prompt's last whole block, "
            f"with {speculative_tokens(profile)} speculative tokens",
            settings={"engine.flags.speculative-config": None},
            do="or prove with `kvlab run acceptance` that your versions have the fix",
        )


@rule(
    "KV077",
    "error",
    "CacheGen or CacheBlend with a hybrid model",
    why="A hybrid's records are opaque bytes: what compresses or blends them by content is not "
    "supported.",
    source=f"{RECIPE}; {REPORT}, section 5.7",
    example=Example(settings={"cache.flags.engine-type": "blend"}),
)
def content_based(case: Case) -> Iterator[Found]:
    if not case.profile.model.hybrid:
        return
    cache, engine = case.profile.cache, case.profile.engine
    places: dict[str, Mapping[str, Any]] = {
        "cache.flags": cache.flags,
        "cache.env": cache.env,
        "engine.env": engine.env,
        "engine.connector_config": engine.connector_config,
        "cache.l2.adapter": cache.l2.adapter if cache.l2 else {},
    }
    for place, settings in places.items():
        for key, value in settings.items():
            off = value is None or str(value).lower() in ("false", "0", "")
            if not off and _CONTENT_BASED.search(f"{key} {value}"):
                rest = {name: kept for name, kept in settings.items() if name != key}
                yield Found(text=f"{place}.{key} is {value}", settings={place: rest})
