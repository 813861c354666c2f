"""The sizes of a model's cache, from its Hugging Face ``config.json`` alone.

Attention keeps K and V of every token (MLA: one latent vector), a gated delta net keeps one
recurrent state, whatever the length. vLLM puts both into pages of one size: it makes the attention
block as long as the state needs and pads the state up to it. The state's shape and the rule for the
block size are those of vLLM 0.32 (``MambaStateShapeCalculator.gated_delta_net_state_shape``,
``Platform._align_hybrid_block_size``), its groups of layers are those of
``kv_cache_utils``; LMCache's object groups are those of 0.5.6.

All sizes are of one tensor-parallel worker, in bytes, unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.errors import UsageError

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's block of an ordinary model on a GPU, and the unit of a hybrid's block."""
GROUP_STRETCH = 1.5
"""Layer kinds whose counts differ by less share one group size; vLLM then pads the smaller kind."""
ELEMENT_BYTES = {
    **dict.fromkeys(("float32", "fp32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "bf16", "fp16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The sizes of one model's cache as one worker holds it."""

    attention_layers: int
    """Layers with K and V, those of the draft model included."""
    linear_layers: int
    """Layers with a recurrent state."""
    draft_layers: int
    """Attention layers that speculative decoding (MTP) adds."""
    token_bytes: int
    """Bytes that one token adds in one attention layer."""
    layer_state_bytes: int
    """Bytes of one recurrent state of one layer, before padding; 0 without such layers."""
    block_tokens: int
    """N: tokens of one block of vLLM, and of one page of an attention layer."""
    workers: int
    """Workers that store records: each its part of the heads, but one alone for MLA."""
    state_blocks_per_request: int
    """State pages that vLLM reserves for a running request, per group, in ``align`` mode."""

    @property
    def is_hybrid(self) -> bool:
        """True when recurrent states have to be kept besides K and V."""
        return self.linear_layers > 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds over all attention layers."""
        return self.attention_layers * self.token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot of the recurrent state over all its layers, before padding."""
        return self.linear_layers * self.layer_state_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer; a recurrent state is padded to the same size."""
        return self.block_tokens * self.token_bytes

    @property
    def group_layers(self) -> int:
        """Layers of one of vLLM's KV groups, which all take blocks from one pool."""
        kinds = [count for count in (self.attention_layers, self.linear_layers) if count]
        small, large = min(kinds), max(kinds)
        return large if large < GROUP_STRETCH * small else small

    @property
    def state_groups(self) -> int:
        """KV groups that hold recurrent states."""
        return -(-self.linear_layers // self.group_layers)

    @property
    def attention_groups(self) -> int:
        """KV groups that hold K and V."""
        return -(-self.attention_layers // self.group_layers)

    @property
    def pool_block_bytes(self) -> int:
        """Bytes of one block of vLLM's pool: a page for each layer of a group."""
        return self.group_layers * self.page_bytes

    def pool_blocks(self, pool_bytes: float) -> int:
        """Whole blocks in a pool of that many bytes."""
        return int(pool_bytes // self.pool_block_bytes)

    def stated_tokens(self, pool_blocks: int, max_model_len: int) -> int:
        """Tokens that vLLM's log states for its pool (``KV cache size: N tokens``).

        It is the longest request's length times how often that request fits:
        ``max_model_len x pool blocks / blocks of one such request``, the reserved state pages
        included. States kept for later hits are not in it.
        """
        return max_model_len * pool_blocks // self._request_blocks(max_model_len)

    def stated_pool_blocks(self, tokens: int, max_model_len: int) -> int:
        """Blocks of the pool for which vLLM's log states that many tokens."""
        return -(-tokens * self._request_blocks(max_model_len) // max_model_len)

    def _request_blocks(self, tokens: int) -> int:
        """Pool blocks that vLLM reckons with for a running request of that length."""
        states = self.state_groups * self.state_blocks_per_request
        return self.attention_groups * -(-tokens // self.block_tokens) + states

    def l0_blocks(self, context_tokens: int) -> int:
        """Pool blocks that a context leaves cached: its whole blocks, and its last state.

        vLLM 0.32 keeps no other states of it (``prefix_cache_retention_interval`` 0).
        """
        whole = context_tokens // self.block_tokens
        return whole * self.attention_groups + (self.state_groups if whole else 0)

    def l0_context_bytes(self, context_tokens: int) -> int:
        """Bytes of K and V of one context in vLLM's cache, in whole blocks, without snapshots."""
        blocks = -(-context_tokens // self.block_tokens)
        return self.attention_layers * blocks * self.page_bytes

    def record_bytes(
        self, chunk_tokens: int, separate_object_groups: bool = False
    ) -> tuple[int, ...]:
        """Size of each record of one chunk: one, or K and V and the states apart."""
        attention = self.kv_bytes_per_token * chunk_tokens
        states = self.linear_layers * self.page_bytes * max(1, chunk_tokens // self.block_tokens)
        if self.is_hybrid and separate_object_groups:
            return (attention, states)
        return (attention + states,) if self.is_hybrid else (attention,)

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Bytes of one LMCache chunk: K and V of its tokens, and a padded state for each block."""
        return sum(self.record_bytes(chunk_tokens))

    def records(
        self, context_tokens: int, chunk_tokens: int, separate_object_groups: bool = False
    ) -> int:
        """Records (files) that one context leaves, over all workers: whole chunks only."""
        per_chunk = len(self.record_bytes(chunk_tokens, separate_object_groups))
        return context_tokens // chunk_tokens * per_chunk * self.workers

    def context_bytes(self, context_tokens: int, chunk_tokens: int) -> int:
        """Bytes of one context's chunks in L1 or on L2, over all workers."""
        return context_tokens // chunk_tokens * self.chunk_bytes(chunk_tokens) * self.workers

    def l0_working_set(self, contexts: int, context_tokens: int) -> int:
        """Bytes of K and V of that many contexts in the cache of one worker."""
        return contexts * self.l0_context_bytes(context_tokens)

    def l1_working_set(self, contexts: int, context_tokens: int, chunk_tokens: int) -> int:
        """Bytes that L1 needs to hold all chunks of that many contexts, over all workers."""
        return contexts * self.context_bytes(context_tokens, chunk_tokens)

    def l2_working_set(self, contexts: int, context_tokens: int, chunk_tokens: int) -> int:
        """Bytes that L2 needs: the same as L1, since records are chunks without any header."""
        return self.l1_working_set(contexts, context_tokens, chunk_tokens)


def arithmetic(
    config: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    state_dtype: str | None = None,
    cache_dtype: str | None = None,
    tensor_parallel: int = 1,
    block_tokens: int | None = None,
    kernel_block_tokens: int = DEFAULT_BLOCK_TOKENS,
    speculative_tokens: int = 0,
) -> Arithmetic:
    """The cache sizes of the model that a ``config.json`` describes.

    ``dtype`` is the model's, ``cache_dtype`` that of K and V (``--kv-cache-dtype``; None or
    ``auto`` = the model's), ``state_dtype`` that of the recurrent matrices
    (``--mamba-ssm-cache-dtype``; None = what the configuration says, else the model's).
    ``block_tokens`` is N where a log has stated it; None computes it. ``kernel_block_tokens`` is
    the unit of the attention kernel (``--block-size``; 32 in the embedded profile).
    ``speculative_tokens`` widens the convolution's window and adds the draft layers.
    UsageError for a configuration from which no size follows.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UsageError(
            "text_config of the model's config.json is not an object",
            hint="give the config.json that came with the model",
        )
    linear, attention = _layers(text)
    draft = _draft_layers(text) if speculative_tokens else 0
    token_bytes = _token_bytes(text, _element_bytes(cache_dtype, dtype), tensor_parallel)
    state = 0
    if linear:
        matrices = state_dtype or text.get("mamba_ssm_dtype") or dtype
        window = _whole(text, "linear_conv_kernel_dim") - 1 + speculative_tokens
        state = _state_bytes(text, window, dtype, str(matrices), tensor_parallel)
    needed = _block_tokens(state, token_bytes, kernel_block_tokens)
    if block_tokens and block_tokens * token_bytes < state:
        raise UsageError(
            f"a block of {block_tokens} tokens ({block_tokens * token_bytes} bytes per layer) does "
            f"not hold a recurrent state of {state} bytes",
            hint=f"vLLM would take {needed}; read N from the line 'Setting attention block size'",
        )
    return Arithmetic(
        attention_layers=attention + draft,
        linear_layers=linear,
        draft_layers=draft,
        token_bytes=token_bytes,
        layer_state_bytes=state,
        block_tokens=block_tokens or needed,
        workers=1 if _is_mla(text) else tensor_parallel,
        state_blocks_per_request=2 + speculative_tokens if linear else 0,
    )


def _layers(text: Mapping[str, Any]) -> tuple[int, int]:
    """How many layers keep a recurrent state and how many keep K and V."""
    count = _whole(text, "num_hidden_layers")
    kinds = text.get("layer_types")
    if kinds is None:
        every = text.get("full_attention_interval") if "linear_conv_kernel_dim" in text else None
        attention = count // int(every) if every else count
        return count - attention, attention
    if not isinstance(kinds, list) or len(kinds) != count:
        raise UsageError(
            f"layer_types of the model's config.json does not name its {count} layers",
            hint="give the config.json that came with the model",
        )
    unknown = {str(kind) for kind in kinds if not str(kind).endswith("attention")}
    if unknown:
        raise UsageError(
            f"no cache size is known for layers of the kind {', '.join(sorted(unknown))}",
            hint="give N and the sizes from vLLM's log instead",
        )
    linear = kinds.count("linear_attention")
    return linear, count - linear  # a sliding window is counted whole: an upper bound


def _draft_layers(text: Mapping[str, Any]) -> int:
    """Layers of the model's own draft head; 0 when it has none (a separate draft model)."""
    for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if text.get(name):
            return _whole(text, name)
    return 0


def _is_mla(text: Mapping[str, Any]) -> bool:
    return bool(text.get("kv_lora_rank"))


def _token_bytes(text: Mapping[str, Any], element_bytes: int, workers: int) -> int:
    """Bytes of one token in one layer: the latent and its rotary part, or K and V of the heads."""
    if _is_mla(text):  # every worker holds the whole latent
        return (_whole(text, "kv_lora_rank") + _whole(text, "qk_rope_head_dim")) * element_bytes
    heads = _whole(text, "num_attention_heads")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or _whole(text, "hidden_size") // heads)
    return 2 * max(1, kv_heads // workers) * head_dim * element_bytes


def _state_bytes(
    text: Mapping[str, Any], window: int, dtype: str, matrices: str, workers: int
) -> int:
    """Bytes of one layer's state: the convolution's window and one matrix for each value head."""
    keys = _whole(text, "linear_num_key_heads") * _whole(text, "linear_key_head_dim")
    value_heads = _whole(text, "linear_num_value_heads")
    value_dim = _whole(text, "linear_value_head_dim")
    channels = 2 * keys + value_heads * value_dim
    cells = value_heads * value_dim * _whole(text, "linear_key_head_dim")
    return window * (channels // workers) * _element_bytes(
        None, dtype
    ) + cells // workers * _element_bytes(None, matrices)


def _block_tokens(state_bytes: int, token_bytes: int, kernel_block_tokens: int) -> int:
    """N: the fewest kernel blocks whose page holds the state; one of them without a state."""
    return kernel_block_tokens * max(1, -(-state_bytes // (kernel_block_tokens * token_bytes)))


def _element_bytes(name: str | None, otherwise: str) -> int:
    known = otherwise if name in (None, "auto") else str(name)
    try:
        return ELEMENT_BYTES[known.removeprefix("torch.")]
    except KeyError:
        raise UsageError(
            f"the size of a {known} number is not known",
            hint=f"use one of {', '.join(sorted(ELEMENT_BYTES))}",
        ) from None


def _whole(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"{name} of the model's config.json is {value!r}, not a count of 1 or more",
            hint="give the config.json that came with the model",
        )
    return value
