"""Rules about blocks, chunks and batches: what a hybrid model needs so that anything is reused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvlab.preflight.case import Case
from kvlab.preflight.rule import Example, Found, rule
from kvlab.profile import MIN_CHUNKS

RECIPE = "LMCache's Qwen3.5/3.6/3.8 recipe"
REPORT = "the DGX Spark report (Openzeka, October 2026)"
N784 = "Setting attention block size to 784 tokens to ensure that attention page size is >= mamba"
N_KNOWN = ("log", "cache")
HYBRID_CONFIG = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 64,
}
"""The embedded model's dimensions, for the examples."""


def for_block(case: Case, block: int, chunk: int | None = None) -> dict[str, Any]:
    """The settings that fit a block size: N, a chunk of whole blocks, 2N-1 for a hybrid model.

    Where contexts are then too short for a profile, the shortest that it takes stands with them.
    """
    profile, chunk = case.profile, chunk or block
    settings: dict[str, Any] = {"engine.block_tokens": block, "cache.chunk_tokens": chunk}
    if profile.model.hybrid:
        settings["engine.max_num_batched_tokens"] = 2 * block - 1
    shortest = MIN_CHUNKS * chunk + 1
    if profile.workload.shape == "identical" and profile.workload.context_tokens < shortest:
        settings["workload.context_tokens"] = shortest
        longest = shortest + max(
            profile.workload.output_tokens, profile.experiments.bill.decode_tokens
        )
        if longest > profile.engine.max_model_len:
            settings["engine.max_model_len"] = longest
    return settings


def batched(case: Case) -> dict[str, Any]:
    """The settings that make it 2N-1 batched tokens, for the N in use."""
    if case.n != case.profile.engine.block_tokens:
        return for_block(case, case.n)
    return {"engine.max_num_batched_tokens": 2 * case.n - 1}


@rule(
    "KV002",
    "warning",
    "Batched tokens of 2N or more",
    why="A hybrid model keeps recurrent state only at the end of a scheduler step: with 2N or more "
    "per step the states in between are missing, and identical prompts may not hit.",
    source=f"{RECIPE}; vLLM issue 42317",
    example=Example(settings={"engine.max_num_batched_tokens": 2048}),
)
def batched_too_many(case: Case) -> Iterator[Found]:
    tokens = case.profile.engine.max_num_batched_tokens
    if case.profile.model.hybrid and tokens >= 2 * case.n:
        yield Found(
            text=f"max-num-batched-tokens {tokens} is 2N or more (N = {case.n})",
            settings=batched(case),
        )


@rule(
    "KV010",
    "error",
    "A chunk that is no multiple of a block",
    why="LMCache stores whole blocks of every KV group: with another chunk size vLLM stops at its "
    "start, after minutes of loading.",
    source=f"{RECIPE}; LMCache issue 5217",
    example=Example(
        profile="dgx-spark",
        settings={"cache.chunk_tokens": 256, "engine.block_tokens": 256},
        log=N784,
    ),
)
def chunk_of_whole_blocks(case: Case) -> Iterator[Found]:
    chunk = case.profile.cache.chunk_tokens
    unfit = {name: tokens for name, tokens in case.groups.items() if chunk % tokens}
    if not unfit:
        return
    fits = math.lcm(*case.groups.values())
    below, above = chunk // fits * fits, math.ceil(chunk / fits) * fits
    valid = [str(value) for value in (below, above, above + fits) if value]
    named = " and ".join(f"{tokens} ({name})" for name, tokens in unfit.items())
    yield Found(
        text=f"cache.chunk_tokens {chunk} is no multiple of the block of {named} tokens; valid "
        f"here: {', '.join(valid)} or any other multiple of {fits}",
        settings=for_block(case, case.n, below or above),
    )


@rule(
    "KV011",
    "error",
    "Another N than the profile says",
    why="Chunk size, batch limit and every count of tokens rest on N; it changes with model, "
    "number types, speculation and version, and must be read from vLLM's log.",
    source=f"{REPORT}, section 5.2; LMCache pull request 5079",
    example=Example(
        settings={"engine.kv_cache_tokens": None},
        log="Setting attention block size to 112 tokens to ensure that attention page size is >=",
    ),
)
def block_as_known(case: Case) -> Iterator[Found]:
    block, said = case.block, case.profile.engine.block_tokens
    if block.source in N_KNOWN and block.tokens and block.tokens != said:
        yield Found(
            text=f"N is {block.tokens} ({block.text}), the profile says {said}",
            settings=for_block(case, block.tokens),
        )


@rule(
    "KV012",
    "warning",
    "The computed N is another one",
    why="The model's configuration gives another block size than the profile; a log would settle "
    "it, and if the profile is wrong vLLM stops at its start.",
    source="vLLM's hybrid KV cache manager: attention pages are made as large as the state's",
    example=Example(
        settings={"engine.flags.mamba-ssm-cache-dtype": "float32"}, probe={"config": HYBRID_CONFIG}
    ),
)
def block_as_computed(case: Case) -> Iterator[Found]:
    block, said = case.block, case.profile.engine.block_tokens
    if block.source == "computed" and block.tokens and said % block.tokens:
        yield Found(
            text=f"N is {block.tokens} by the model's configuration, the profile says {said}",
            settings=for_block(case, block.tokens),
            do="or give the log of a start with --log",
        )


@rule(
    "KV013",
    "note",
    "N is only the profile's word",
    why="N is no universal constant: 784 and 544 are values of other models, and a wrong one is "
    "noticed only when vLLM has loaded the model.",
    source=f"{REPORT}, section 5.2",
    example=Example(profile="dgx-spark"),
)
def block_unknown(case: Case) -> Iterator[Found]:
    if case.profile.model.hybrid and case.block.source == "unknown":
        yield Found(
            text=f"N = {case.profile.engine.block_tokens} is the profile's word; {case.block.text}",
            do=f"start vLLM once and give its log: kvlab check {case.profile.name} --log vllm.log",
        )


@rule(
    "KV014",
    "error",
    "Fewer batched tokens than one block",
    why="In align mode a step advances by whole blocks: a budget below N cannot take one.",
    source=f"{RECIPE}",
    example=Example(
        profile="dgx-spark",
        log="Setting attention block size to 4288 tokens to ensure that attention page size is >=",
        settings={"workload.context_tokens": 30_000},
    ),
)
def batched_too_few(case: Case) -> Iterator[Found]:
    tokens = case.profile.engine.max_num_batched_tokens
    if case.profile.model.hybrid and tokens < case.n:
        yield Found(
            text=f"max-num-batched-tokens {tokens} is less than one block of {case.n} tokens",
            settings=for_block(case, case.n),
        )


@rule(
    "KV015",
    "warning",
    "Batched tokens of exactly N",
    why="One block is then the whole budget of a step, and no prefill starts while anything "
    "decodes: the recipe tells of a test that was about 7 times slower.",
    source=f"{RECIPE}; {REPORT}, section 5.2",
    example=Example(settings={"engine.max_num_batched_tokens": 224}),
)
def batched_one_block(case: Case) -> Iterator[Found]:
    if case.profile.model.hybrid and case.profile.engine.max_num_batched_tokens == case.n:
        yield Found(
            text=f"max-num-batched-tokens is N itself ({case.n})",
            settings=batched(case),
        )


@rule(
    "KV016",
    "error",
    "Recurrent state is not aligned to blocks",
    why="LMCache finds a hybrid model's state only at block borders, where `align` keeps it.",
    source=RECIPE,
    example=Example(settings={"engine.mamba_cache_mode": None}),
)
def mamba_mode(case: Case) -> Iterator[Found]:
    mode = case.profile.engine.mamba_cache_mode
    if case.profile.model.hybrid and mode != "align":
        yield Found(
            text=f"mamba-cache-mode is {mode or 'not set'} for a hybrid model",
            settings={"engine.mamba_cache_mode": "align"},
        )


@rule(
    "KV017",
    "error",
    "Prefix caching is off for a hybrid model",
    why="Without it vLLM keeps no recurrent state that could be stored or restored.",
    source=f"{RECIPE}; LMCache pull request 5079",
    example=Example(settings={"engine.prefix_caching": False}),
)
def prefix_caching(case: Case) -> Iterator[Found]:
    if case.profile.model.hybrid and not case.profile.engine.prefix_caching:
        yield Found(
            text="enable-prefix-caching is off for a hybrid model",
            settings={"engine.prefix_caching": True},
        )


@rule(
    "KV018",
    "error",
    "vLLM does not tell the cached tokens",
    why="Without prompt-token details the client cannot count what was reused, and no verdict is "
    "possible.",
    source="vLLM pull request 18149",
    example=Example(settings={"engine.prompt_tokens_details": False}),
)
def prompt_tokens_details(case: Case) -> Iterator[Found]:
    if not case.profile.engine.prompt_tokens_details:
        yield Found(
            text="enable-prompt-tokens-details is off",
            settings={"engine.prompt_tokens_details": True},
        )


@rule(
    "KV019",
    "error",
    "More sequences than blocks of recurrent state",
    why="Every sequence holds a block of recurrent state: with too few of them vLLM stops at its "
    "start.",
    source=f"{REPORT}, section 5.2",
    example=Example(
        profile="dgx-spark",
        log="ValueError: max_num_seqs (16) exceeds available Mamba cache blocks (12)",
    ),
)
def sequences(case: Case) -> Iterator[Found]:
    if (said := case.fact("mamba_blocks_exceeded")) is not None:
        blocks = int(str(said).rstrip(")").rpartition("(")[2])
        if case.profile.engine.max_num_seqs > blocks:
            yield _too_many_sequences(f"vLLM's log says: {said}", blocks)
        return
    tokens = case.fact("kv_cache_tokens") or case.profile.engine.kv_cache_tokens
    if not case.profile.model.hybrid or tokens is None:
        return
    blocks = tokens // case.n
    if case.profile.engine.max_num_seqs > blocks:
        yield _too_many_sequences(
            f"max-num-seqs {case.profile.engine.max_num_seqs} exceeds the {blocks} blocks that "
            f"L0's {tokens:,} tokens make",
            blocks,
        )


def _too_many_sequences(text: str, blocks: int) -> Found:
    return Found(
        text=text,
        settings={"engine.max_num_seqs": max(1, blocks)},
        do="or give vLLM more memory (gpu-memory-utilization)",
    )
