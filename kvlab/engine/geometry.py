"""The shapes a model must have for vLLM's CPU build and LMCache to hold its cache without padding.

A hybrid model keeps two kinds of cache in pages of one size: attention layers store K and V of a
block of tokens, gated delta net (GDN) layers store one recurrent state. vLLM makes the attention
block as long as the state needs and pads the state up to it. LMCache's `lmcache_driven` transfer
needs contiguous pages on CPU, and a padded state page is not contiguous: so both pages must be
*equal*. That ties the attention head dimension and the block size N to the GDN dimensions, and both
are computed here from those.

Limits checked here were found on vLLM 0.32 (CPU build) and LMCache 0.5.6.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.errors import KvlabError

BF16_BYTES = 2
KERNEL_BLOCK_TOKENS = 32
"""vLLM's `--block-size`: the CPU attention kernel's unit, of which N is a multiple."""
GDN_HEAD_DIMS = (64, 128)
"""Head dimensions that the CPU kernels of the gated delta net are compiled for."""
ATTENTION_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that the CPU attention kernel is compiled for."""
ROTARY_PAIR_STEP = 8
"""rotary_dim / 2 must be a multiple of this, or the CPU rotary kernel crashes the worker."""


class GeometryError(KvlabError, ValueError):
    """A shape that the CPU engine cannot run, with a hint at one that it can."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The recurrent (GDN) layers' dimensions, from which everything else follows."""

    key_heads: int
    value_heads: int
    head_dim: int
    conv_kernel: int = 4

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution over queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def state_page_bytes(self) -> int:
        """Bytes of one recurrent state: convolution window plus one matrix for each value head."""
        window = (self.conv_kernel - 1) * self.conv_dim
        matrices = self.value_heads * self.head_dim * self.head_dim
        return (window + matrices) * BF16_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention layers' dimensions and the block of tokens that fills one page."""

    kv_heads: int
    head_dim: int
    rotary_dim: int
    block_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V that one token adds in one layer."""
        return 2 * self.kv_heads * self.head_dim * BF16_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_tokens * self.token_bytes

    @property
    def rotary_factor(self) -> float:
        """Share of a head that is rotated, as model configurations state it."""
        return self.rotary_dim / self.head_dim


def check_delta_net(gdn: DeltaNet) -> None:
    """Return nothing when the CPU kernels support these dimensions, else raise GeometryError."""
    if gdn.head_dim not in GDN_HEAD_DIMS:
        known = " or ".join(str(dim) for dim in GDN_HEAD_DIMS)
        raise GeometryError(
            f"the CPU kernels have no gated delta net with head dimension {gdn.head_dim}",
            hint=f"use {known}",
        )
    if min(gdn.key_heads, gdn.value_heads) < 1 or gdn.value_heads % gdn.key_heads:
        raise GeometryError(
            f"{gdn.value_heads} value heads cannot be shared out among {gdn.key_heads} key heads",
            hint="use a positive number of key heads that divides the number of value heads",
        )
    if gdn.conv_kernel < 2:
        raise GeometryError(
            f"a convolution kernel of {gdn.conv_kernel} leaves no window to cache",
            hint="use 4, as the published models do",
        )


def check_attention(attention: Attention) -> None:
    """Return nothing when the CPU kernels support these dimensions, else raise GeometryError."""
    if attention.head_dim not in ATTENTION_HEAD_DIMS:
        raise GeometryError(
            f"the CPU attention kernel has no head dimension {attention.head_dim}",
            hint=f"use one of {', '.join(str(dim) for dim in ATTENTION_HEAD_DIMS)}",
        )
    if not 0 < attention.rotary_dim <= attention.head_dim or (
        attention.rotary_dim % (2 * ROTARY_PAIR_STEP)
    ):
        raise GeometryError(
            f"rotary dimension {attention.rotary_dim} would crash the CPU rotary kernel: "
            f"its half is not a multiple of {ROTARY_PAIR_STEP}",
            hint=f"use a multiple of {2 * ROTARY_PAIR_STEP} up to {attention.head_dim}",
        )
    if int(attention.head_dim * attention.rotary_factor) != attention.rotary_dim:
        raise GeometryError(
            f"the factor {attention.rotary_factor} of {attention.head_dim} does not give back "
            f"rotary dimension {attention.rotary_dim}",
            hint="choose a rotary dimension whose share of the head is exact in floating point",
        )
    if attention.block_tokens < 1 or attention.block_tokens % KERNEL_BLOCK_TOKENS:
        raise GeometryError(
            f"a block of {attention.block_tokens} tokens is not a multiple of "
            f"{KERNEL_BLOCK_TOKENS}",
            hint=f"use a multiple of {KERNEL_BLOCK_TOKENS} tokens",
        )


def check_pages(gdn: DeltaNet, attention: Attention) -> None:
    """Return nothing when both kinds of page are equally large, else raise GeometryError."""
    if gdn.state_page_bytes != attention.page_bytes:
        raise GeometryError(
            f"the recurrent-state page has {gdn.state_page_bytes} bytes and the attention page "
            f"{attention.page_bytes}: vLLM would pad one and LMCache could not move it",
            hint="let geometry.fit_attention choose head dimension and block size",
        )


def fit_attention(gdn: DeltaNet, *, kv_heads: int = 1) -> Attention:
    """Return the attention dimensions whose page equals the recurrent-state page.

    Of all that fit, the head dimension nearest to the GDN's is taken (the longer block on a tie).
    """
    check_delta_net(gdn)
    fits = _fitting_attentions(gdn.state_page_bytes, kv_heads)
    if not fits:
        raise GeometryError(
            f"no attention head fills a recurrent-state page of {gdn.state_page_bytes} bytes with "
            f"{kv_heads} KV heads",
            hint="use one KV head, or other GDN head counts",
        )
    attention = min(fits, key=lambda fit: (abs(fit.head_dim - gdn.head_dim), fit.head_dim))
    check_attention(attention)
    check_pages(gdn, attention)
    return attention


def longest_rotary_dim(head_dim: int) -> int:
    """Return the longest supported rotary dimension in half a head, or the shortest there is."""
    step = 2 * ROTARY_PAIR_STEP
    return max(step, head_dim // 2 // step * step)


def check_layers(layers: int, *, moe_layers: int) -> None:
    """Return nothing when a hybrid model of this depth can be served, else raise GeometryError."""
    if layers < 2 or layers % 2:
        raise GeometryError(
            f"{layers} layers cannot alternate between recurrent and full attention",
            hint="use an even number of layers from 2",
        )
    if moe_layers < 1:
        raise GeometryError(
            "vLLM's Qwen3Next refuses a model without a mixture-of-experts layer",
            hint="keep at least one layer with experts",
        )


def check_dtype(dtype: str) -> None:
    """Return nothing for bfloat16, else raise GeometryError."""
    if dtype != "bfloat16":
        raise GeometryError(
            f"the CPU gated delta net has no {dtype} kernels: the first request would fail",
            hint="use bfloat16",
        )


def _fitting_attentions(page_bytes: int, kv_heads: int) -> list[Attention]:
    if kv_heads < 1 or page_bytes % (2 * kv_heads * BF16_BYTES):
        return []
    elements = page_bytes // (2 * kv_heads * BF16_BYTES)
    return [
        Attention(
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=longest_rotary_dim(head_dim),
            block_tokens=elements // head_dim,
        )
        for head_dim in ATTENTION_HEAD_DIMS
        if elements % head_dim == 0 and elements // head_dim % KERNEL_BLOCK_TOKENS == 0
    ]
