"""Model arithmetic against published block sizes, the report's figures and the embedded engine."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import UsageError
from kvlab.sizing import model

UNTIMED = settings(deadline=None)

CONFIGS = Path(__file__).parent / "configs"
GB, MB, MIB, GIB = 10**9, 10**6, 1 << 20, 1 << 30
N = 2144
SPARK = {"cache_dtype": "fp8", "speculative_tokens": 3}
"""The DGX Spark report's flags that change a size."""


def config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def spark() -> model.Arithmetic:
    return model.arithmetic(config("qwen3.6-35b-a3b-like"), **SPARK)


@pytest.mark.parametrize(
    ("name", "flags", "block"),
    [
        ("qwen3.6-35b-a3b-like", SPARK, N),  # the DGX Spark report's log
        ("qwen3.5-27b-like", {}, 784),  # both in the hybrid recipe
        ("qwen3-next-80b-a3b-like", {}, 544),
        ("embedded-hybrid", {"kernel_block_tokens": 32}, 224),
        ("llama-3-8b-like", {}, 16),
    ],
)
def test_n_is_what_vllm_logs(name, flags, block):
    assert model.arithmetic(config(name), **flags).block_tokens == block


def test_the_reports_n_needs_every_one_of_its_flags():
    """Exactly 2,144: fp8 K and V, the wider window of three draft tokens, float32 matrices."""
    assert spark().layer_state_bytes == N * spark().token_bytes
    for fewer in ("cache_dtype", "speculative_tokens"):
        flags = {name: value for name, value in SPARK.items() if name != fewer}
        assert model.arithmetic(config("qwen3.6-35b-a3b-like"), **flags).block_tokens != N
    half = {**SPARK, "state_dtype": "bfloat16"}
    assert model.arithmetic(config("qwen3.6-35b-a3b-like"), **half).block_tokens != N


@pytest.mark.parametrize(
    ("name", "flags", "kv_bytes"),
    [
        ("qwen2.5-32b", {}, 262_144),
        ("llama-3-8b-like", {}, 131_072),
        ("qwen3-coder-480b-like", {}, 253_952),
        ("qwen3-coder-480b-like", {"tensor_parallel": 8}, 31_744),
        ("qwen3-coder-480b-like", {"tensor_parallel": 16}, 31_744),  # heads are doubled up
        ("deepseek-v3-like", {}, 70_272),
        ("deepseek-v3-like", {"tensor_parallel": 8}, 70_272),
        ("deepseek-v3-like", {"cache_dtype": "fp8", "speculative_tokens": 1}, 62 * 576),
        ("qwen3.6-35b-a3b-like", {}, 20_480),
        ("qwen3.6-35b-a3b-like", SPARK, 11_264),
        ("embedded-hybrid", {}, 640),
    ],
)
def test_bytes_of_one_token(name, flags, kv_bytes):
    assert model.arithmetic(config(name), **flags).kv_bytes_per_token == kv_bytes


def test_it_explains_the_reports_records():
    """32 GB in 377 records: 85 MB each, 91 if the report's GB are GiB. One record is 90.0 MB."""
    sizes = spark()
    (record,) = sizes.record_bytes(N)
    assert record == 41 * 2_195_456  # ten attention layers, thirty recurrent, one draft layer
    assert 32 * GB / 377 < record < 32 * GIB / 377
    assert record / MIB == pytest.approx(85.8, abs=0.1)
    assert sizes.records(8000, N) == 3


def test_it_explains_the_reports_working_set_at_l0():
    """About 63 GB for 665 contexts, that is about 95 MB each, against 55.31 GiB."""
    sizes = spark()
    assert sizes.l0_context_bytes(8000) == pytest.approx(95 * MB, rel=0.02)
    assert sizes.l0_working_set(665, 8000) == pytest.approx(63 * GB, rel=0.02)
    assert sizes.l0_working_set(665, 8000) > 55.31 * GIB


def test_states_make_the_reports_contexts_larger_than_their_k_and_v():
    """Four groups share the pool: one state of each of three takes a block beside three of K, V."""
    sizes = spark()
    assert (sizes.group_layers, sizes.attention_groups, sizes.state_groups) == (11, 1, 3)
    assert sizes.l0_blocks(8000) == 6
    assert sizes.l0_blocks(2143) == 0


def test_it_is_the_embedded_engine():
    """The figures of kvlab/engine/geometry.py, and the pool that vLLM's log states."""
    sizes = model.arithmetic(config("embedded-hybrid"), kernel_block_tokens=32)
    assert (sizes.attention_layers, sizes.linear_layers, sizes.is_hybrid) == (2, 2, True)
    assert sizes.page_bytes == sizes.layer_state_bytes == 71_680
    assert sizes.state_bytes == 2 * 71_680
    assert sizes.record_bytes(224, separate_object_groups=True) == (143_360, 143_360)
    assert sizes.records(1121, 224, separate_object_groups=True) == 10
    assert sizes.stated_tokens(64, max_model_len=2048) == 10_922
    assert sizes.stated_pool_blocks(10_922, max_model_len=2048) == 64
    assert sizes.context_bytes(1121, 224) == 5 * 4 * 71_680


def test_mla_is_stored_by_one_worker_and_heads_by_all():
    mla = model.arithmetic(config("deepseek-v3-like"), tensor_parallel=8)
    heads = model.arithmetic(config("llama-3-8b-like"), tensor_parallel=8)
    assert (mla.records(1024, 256), heads.records(1024, 256)) == (4, 32)
    assert heads.context_bytes(1024, 256) == 1024 * 131_072


def test_a_stated_block_is_taken_and_one_that_is_too_small_refused():
    stated = model.arithmetic(config("qwen3.6-35b-a3b-like"), **SPARK, block_tokens=2160)
    assert stated.page_bytes == 2160 * 1024
    with pytest.raises(UsageError, match="does not hold a recurrent state") as caught:
        model.arithmetic(config("qwen3.6-35b-a3b-like"), **SPARK, block_tokens=2128)
    assert "2144" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"layer_types": ["full_attention"]}, "does not name its 32 layers"),
        ({"layer_types": ["mamba"] * 32}, "kind mamba"),
        ({"text_config": "a"}, "not an object"),
        ({"num_attention_heads": 0, "num_key_value_heads": None}, "num_attention_heads"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_sentence(change, says):
    with pytest.raises(UsageError, match=says):
        model.arithmetic({**config("llama-3-8b-like"), **change})


def test_an_unknown_number_is_refused():
    with pytest.raises(UsageError, match="size of a int4 number"):
        model.arithmetic(config("llama-3-8b-like"), cache_dtype="int4")


@UNTIMED
@given(
    name=st.sampled_from(["qwen3.6-35b-a3b-like", "embedded-hybrid", "qwen3.5-27b-like"]),
    cache=st.sampled_from(["fp8", "bfloat16", "auto"]),
    state=st.sampled_from([None, "float32", "bfloat16"]),
    draft=st.integers(0, 5),
    kernel=st.sampled_from([16, 32, 64]),
)
def test_n_is_the_shortest_block_that_holds_a_state(name, cache, state, draft, kernel):
    sizes = model.arithmetic(
        config(name),
        cache_dtype=cache,
        state_dtype=state,
        speculative_tokens=draft,
        kernel_block_tokens=kernel,
    )
    assert sizes.block_tokens % kernel == 0
    assert sizes.page_bytes >= sizes.layer_state_bytes
    assert sizes.page_bytes - kernel * sizes.token_bytes < sizes.layer_state_bytes
