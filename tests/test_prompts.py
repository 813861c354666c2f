"""Prompts: lengths, shapes, and what may never be shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlab import profile, prompts

EMBEDDED = profile.load("embedded")
SUFFIXED = profile.load("embedded", {"workload.shape": "prefix_suffix"})


def test_identical_contexts_return_unchanged() -> None:
    fill = list(prompts.questions(EMBEDDED, "n", "fill"))
    assert fill == list(prompts.questions(EMBEDDED, "n", "measure"))
    assert [len(q.token_ids) for q in fill] == [1121] * 16
    assert len({q.context_id for q in fill}) == 16


def test_prefix_suffix_shares_the_prefix_and_the_suffix_but_not_the_breaker() -> None:
    fill = prompts.question(SUFFIXED, "n", "fill", 3).token_ids
    again = prompts.question(SUFFIXED, "n", "measure", 3).token_ids
    other = prompts.question(SUFFIXED, "n", "fill", 4).token_ids
    prefix = SUFFIXED.workload.prefix_tokens
    assert len(fill) == len(again) == 1121
    assert fill[:prefix] == again[:prefix]
    assert fill[prefix : prefix + 32] != again[prefix : prefix + 32]
    assert fill[prefix + 32 :] == again[prefix + 32 :] == other[prefix + 32 :]
    assert fill[:prefix] != other[:prefix]


@given(nonce=st.text(min_size=1, max_size=20), index=st.integers(0, 15))
def test_contexts_warmup_and_probe_share_no_token(nonce: str, index: int) -> None:
    context = set(prompts.question(EMBEDDED, nonce, "fill", index).token_ids)
    warm = {token for q in prompts.warmup(EMBEDDED, nonce) for token in q.token_ids}
    probe = set(prompts.probe(EMBEDDED, nonce).token_ids)
    assert not context & warm
    assert not context & probe
    assert not warm & probe
    low, high = EMBEDDED.model.vocabulary
    assert all(low <= token < high for token in context | warm | probe)


@given(st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9))
def test_another_nonce_changes_the_first_tokens(one: str, other: str) -> None:
    first = prompts.question(EMBEDDED, one, "fill", 0).token_ids
    second = prompts.question(EMBEDDED, other, "fill", 0).token_ids
    assert (first[:4] == second[:4]) == (one == other)


def test_warmup_has_the_measured_length_and_the_probe_four_chunks_and_one() -> None:
    assert {len(q.token_ids) for q in prompts.warmup(EMBEDDED, "n")} == {1121}
    assert len(prompts.probe(EMBEDDED, "n").token_ids) == 4 * 224 + 1


def test_nonces_do_not_repeat() -> None:
    assert prompts.new_nonce() != prompts.new_nonce()
