"""Token ids in the workload's two shapes. Pure: the same profile and nonce give the same prompts.

``identical``      the same contexts return in the measure round
``prefix_suffix``  [own prefix][fresh breaker][shared suffix]: only the prefix returns

Contexts, warm-up and probe draw from disjoint parts of the vocabulary, so none of them can share a
chunk. Every context begins with tokens made from the run's nonce, so nothing left from another run
can answer the fill round.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.client import Question
from kvlab.profile import MIN_CHUNKS, Profile

NONCE_TOKENS = 4
RESERVED_SHARE = 8
"""One part in so many of the vocabulary is kept for warm-up and probe, a half each."""


def new_nonce() -> str:
    """A fresh nonce: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def of_part(profile: Profile, manifest: Mapping[str, Any]) -> str:
    """The nonce of a run, or of the part of it that a resume begins.

    Servers that are not started anew still hold what the interrupted part asked.
    """
    nonce, resumed = str(manifest["nonce"]), manifest.get("resumed")
    return nonce if profile.fresh or not resumed else f"{nonce}+{resumed}"


def of_launch(profile: Profile, nonce: str, launch: object) -> str:
    """The nonce of one launch, or of one repeat: its own where servers are not started anew."""
    return nonce if profile.fresh else f"{nonce}:{launch}"


def questions(profile: Profile, nonce: str, round_name: str) -> Iterator[Question]:
    """The contexts of a round, in order, made one at a time."""
    for index in range(profile.workload.contexts):
        yield question(profile, nonce, round_name, index)


def question(profile: Profile, nonce: str, round_name: str, index: int) -> Question:
    """Context ``index`` as the round asks it."""
    work = profile.workload
    own = random.Random(f"{work.seed}:{nonce}:context:{index}")
    words = _vocabulary(profile, "context")
    head = _nonce_tokens(nonce, words)
    if work.shape == "identical":
        ids = head + own.choices(words, k=work.context_tokens - len(head))
    else:
        prefix = head + own.choices(words, k=work.prefix_tokens - len(head))
        fresh = random.Random(f"{work.seed}:{nonce}:breaker:{round_name}:{index}")
        shared = random.Random(f"{work.seed}:{nonce}:suffix")
        breaker = fresh.choices(words, k=work.breaker_tokens)
        rest = work.context_tokens - len(prefix) - len(breaker)
        ids = prefix + breaker + shared.choices(words, k=rest)
    return Question(f"c{index:04d}", tuple(ids), work.output_tokens)


def warmup(profile: Profile, nonce: str) -> Iterator[Question]:
    """Warm-up prompts of the measured length, from tokens that no context uses."""
    words = _vocabulary(profile, "warmup")
    for index in range(profile.experiments.two_round.warmup_requests):
        rng = random.Random(f"{profile.workload.seed}:{nonce}:warmup:{index}")
        ids = rng.choices(words, k=profile.workload.context_tokens)
        yield Question(f"w{index:04d}", tuple(ids), profile.workload.output_tokens)


def of_length(profile: Profile, nonce: str, context_id: str, tokens: int) -> Question:
    """One more context, of another length than the workload's."""
    words = _vocabulary(profile, "context")
    own = random.Random(f"{profile.workload.seed}:{nonce}:{context_id}")
    head = _nonce_tokens(nonce, words)
    return Question(context_id, tuple(head + own.choices(words, k=tokens - len(head))))


def probe(profile: Profile, nonce: str) -> Question:
    """A prompt of four chunks and one token, from tokens that nothing else uses."""
    rng = random.Random(f"{profile.workload.seed}:{nonce}:probe")
    count = MIN_CHUNKS * profile.cache.chunk_tokens + 1
    return Question("probe", tuple(rng.choices(_vocabulary(profile, "probe"), k=count)), 1)


def _vocabulary(profile: Profile, use: str) -> range:
    """The token ids that a use may draw from; the three uses are disjoint."""
    first, end = profile.model.vocabulary
    reserved = (end - first) // RESERVED_SHARE
    middle = end - reserved // 2
    return {
        "context": range(first, end - reserved),
        "warmup": range(end - reserved, middle),
        "probe": range(middle, end),
    }[use]


def _nonce_tokens(nonce: str, words: range) -> list[int]:
    return random.Random(f"nonce:{nonce}").choices(words, k=NONCE_TOKENS)
