import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.engine import geometry
from kvlab.engine.geometry import Attention, DeltaNet, GeometryError

PUBLISHED = DeltaNet(key_heads=4, value_heads=8, head_dim=64)


def test_the_embedded_model_has_blocks_of_224_tokens():
    attention = geometry.fit_attention(PUBLISHED)
    assert (attention.head_dim, attention.block_tokens, attention.rotary_dim) == (80, 224, 32)
    assert attention.page_bytes == PUBLISHED.state_page_bytes == 71_680
    assert attention.token_bytes == 320


@given(
    key_heads=st.integers(1, 16),
    groups=st.integers(1, 8),
    head_dim=st.sampled_from(geometry.GDN_HEAD_DIMS),
    conv_kernel=st.integers(2, 8),
    kv_heads=st.integers(1, 8),
)
def test_what_fits_can_be_served_and_what_does_not_is_refused(
    key_heads, groups, head_dim, conv_kernel, kv_heads
):
    gdn = DeltaNet(
        key_heads=key_heads,
        value_heads=key_heads * groups,
        head_dim=head_dim,
        conv_kernel=conv_kernel,
    )
    try:
        attention = geometry.fit_attention(gdn, kv_heads=kv_heads)
    except GeometryError:
        return
    assert attention.page_bytes == gdn.state_page_bytes
    assert attention.block_tokens % 32 == 0
    assert attention.rotary_dim // 2 % 8 == 0
    assert int(attention.head_dim * attention.rotary_factor) == attention.rotary_dim
    assert attention.kv_heads == kv_heads


@pytest.mark.parametrize("head_dim", geometry.ATTENTION_HEAD_DIMS)
def test_every_head_dimension_has_an_exact_rotary_share(head_dim):
    rotary_dim = geometry.longest_rotary_dim(head_dim)
    geometry.check_attention(
        Attention(kv_heads=1, head_dim=head_dim, rotary_dim=rotary_dim, block_tokens=32)
    )


@pytest.mark.parametrize(
    ("gdn", "says"),
    [
        (DeltaNet(key_heads=4, value_heads=8, head_dim=32), "head dimension 32"),
        (DeltaNet(key_heads=3, value_heads=8, head_dim=64), "shared out"),
        (DeltaNet(key_heads=0, value_heads=8, head_dim=64), "shared out"),
        (DeltaNet(key_heads=4, value_heads=8, head_dim=64, conv_kernel=1), "no window"),
    ],
)
def test_an_unsupported_delta_net_is_refused(gdn, says):
    with pytest.raises(GeometryError, match=says):
        geometry.check_delta_net(gdn)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "block_tokens", "says"),
    [
        (72, 32, 224, "no head dimension 72"),
        (80, 20, 224, "crash the CPU rotary kernel"),
        (80, 96, 224, "crash the CPU rotary kernel"),
        (80, 0, 224, "crash the CPU rotary kernel"),
        (80, 32, 100, "multiple of 32"),
        (80, 32, 0, "multiple of 32"),
    ],
)
def test_an_unsupported_attention_is_refused(head_dim, rotary_dim, block_tokens, says):
    attention = Attention(
        kv_heads=1, head_dim=head_dim, rotary_dim=rotary_dim, block_tokens=block_tokens
    )
    with pytest.raises(GeometryError, match=says) as caught:
        geometry.check_attention(attention)
    assert caught.value.hint


def test_unequal_pages_are_refused():
    attention = Attention(kv_heads=1, head_dim=80, rotary_dim=32, block_tokens=256)
    with pytest.raises(GeometryError, match="71680 bytes and the attention page 81920"):
        geometry.check_pages(PUBLISHED, attention)


@pytest.mark.parametrize("layers", [-2, 0, 1, 3])
def test_layers_that_cannot_alternate_are_refused(layers):
    with pytest.raises(GeometryError, match="alternate"):
        geometry.check_layers(layers, moe_layers=1)


def test_a_model_without_experts_is_refused():
    with pytest.raises(GeometryError, match="mixture-of-experts"):
        geometry.check_layers(2, moe_layers=0)


def test_other_number_types_than_bfloat16_are_refused():
    geometry.check_dtype("bfloat16")
    with pytest.raises(GeometryError, match="float16"):
        geometry.check_dtype("float16")
