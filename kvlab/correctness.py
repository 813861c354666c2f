"""Whether restored answers equal cold ones, by the log-probability of the first token. Pure.

Two cold answers to the same prompt from two processes differ by the noise floor of the engine. A
restored answer may differ from a cold one by ``max(3 x floor, set tolerance)``: equality of bits
is more than reduced precision promises, and less is a wrong cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.evidence import Account, Plan
from kvlab.records import RequestRecord

FLOOR_FACTOR = 3
ROUNDING = 1e-9
"""Nats by which a difference of two decimal fractions may miss its true value."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far another answer is from a cold one."""

    tokens: int
    nat: float
    flipped: bool
    """The other request preferred another token."""
    exact: bool
    """False: the cold token is not among those that the other answer lists; ``nat`` is least."""


def compare(cold: RequestRecord, other: RequestRecord) -> Difference | None:
    """The difference in the log-probability of the token that the cold request chose.

    When the other answer does not list that token, its log-probability is below the smallest one
    listed: the difference is then at least the cold value minus that one. None: no log-probability.
    """
    listed = other.top_logprobs
    if cold.token is None or not cold.top_logprobs or not listed:
        return None
    chosen = cold.top_logprobs.get(cold.token)
    if chosen is None:
        return None
    found = listed.get(cold.token)
    if found is None:
        least = max(0.0, chosen - min(listed.values()))
        return Difference(cold.planned_tokens, least, flipped=True, exact=False)
    flipped = other.token is not None and other.token != cold.token
    return Difference(cold.planned_tokens, abs(chosen - found), flipped=flipped, exact=True)


def judge(plan: Plan, accounts: Sequence[Account]) -> dict[str, Any]:
    """The summary's ``correctness``: floor, restored differences, tolerance, and a verdict.

    ``unknown`` when nothing restored could be compared, when a comparison only gives a lower bound
    that is within the tolerance, or when every context has the same answer, so that a wrong cache
    would not show.
    """
    books = {account.key: account for account in accounts}
    if plan.alone:
        pairs = _own_pairs(plan, books)
        return weigh((), pairs, plan.tolerance_nat, need_floor=False)
    return weigh(_cold_pairs(plan, books), _restored_pairs(plan, books), plan.tolerance_nat)


def weigh(
    cold: Iterable[tuple[RequestRecord, RequestRecord]],
    again: Iterable[tuple[RequestRecord, RequestRecord]],
    tolerance_nat: float,
    *,
    need_floor: bool = True,
) -> dict[str, Any]:
    """What ``judge`` says of pairs of cold answers, and of pairs of a cold and a restored one.

    Without ``need_floor`` the set tolerance alone decides where no two cold answers can be had.
    """
    pairs = list(again)
    floors = [d for pair in cold if (d := compare(*pair))]
    restored = [d for pair in pairs if (d := compare(*pair))]
    floor = max((d.nat for d in floors), default=None)
    tolerance = max(FLOOR_FACTOR * (floor or 0.0), tolerance_nat)
    result: dict[str, Any] = {
        "pairs": len(restored),
        "tolerance_nat": tolerance,
        "flipped": sum(d.flipped for d in restored),
        "compared": sorted({d.tokens for d in restored}),
    }
    if floor is not None:
        result["floor_nat"] = floor
    if restored:
        nats = [d.nat for d in restored]
        result["restored_nat"] = {"median": statistics.median(nats), "max": max(nats)}
    blind = _blind([first for first, _ in pairs])
    result["verdict"], result["reason"] = _verdict(
        floor if need_floor else floor or 0.0, restored, tolerance, blind
    )
    return result


def _verdict(
    floor: float | None, restored: Sequence[Difference], tolerance: float, blind: bool
) -> tuple[str, str]:
    if not restored:
        return "unknown", "no restored answer could be compared with a cold one"
    worst = max(d.nat for d in restored)
    if worst > tolerance + ROUNDING:
        return "fail", f"restored answers differ by up to {worst:.3g} nat; allowed {tolerance:.3g}"
    if blind:
        return "unknown", "every context has the same answer, so a wrong cache would not show"
    if floor is None:
        return "unknown", "no two cold answers could be compared, so the noise floor is unknown"
    if not all(d.exact for d in restored):
        return "unknown", "an answer does not list the cold token; ask for more log-probabilities"
    flipped = sum(d.flipped for d in restored)
    found = f"{len(restored)} restored answers within {worst:.3g} nat; allowed {tolerance:.3g}"
    if flipped:
        return "pass with ties", f"{found}; {flipped} chose another token, as near ties do"
    return "pass", found


def _cold_pairs(
    plan: Plan, books: dict[tuple[str, int, str], Account]
) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """Round 1 of both arms: the same prompts, cold, in different processes."""
    for repeat in range(1, plan.repeats + 1):
        first = books[plan.arms[0], repeat, "fill"]
        second = books[plan.treated, repeat, "fill"]
        for cold, other in same_prompts(first, second):
            if cold.cached_tokens == 0 and other.cached_tokens == 0:
                yield cold, other


def _restored_pairs(
    plan: Plan, books: dict[tuple[str, int, str], Account]
) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """Round 2 of both arms: cold in the first, restored in the second.

    Where the baseline's own round 2 was not cold, its round 1 stands in if the prompts are the same
    in both rounds. A control arm restores nothing; its answers are compared all the same.
    """
    for repeat in range(1, plan.repeats + 1):
        fill = books[plan.arms[0], repeat, "fill"]
        first = {r.index: r for r in fill.completed} if plan.shape == "identical" else {}
        measured = books[plan.arms[0], repeat, "measure"]
        treated = books[plan.treated, repeat, "measure"]
        for cold, other in same_prompts(measured, treated):
            if cold.cached_tokens != 0:
                cold = first.get(cold.index, cold)
            if cold.cached_tokens == 0 and (other.cached_tokens or plan.control):
                yield cold, other


def _own_pairs(
    plan: Plan, books: dict[tuple[str, int, str], Account]
) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """Both rounds of the only arm: cold in the first, restored in the second, the same prompts."""
    if plan.shape != "identical":
        return
    for repeat in range(1, plan.repeats + 1):
        fill = books[plan.treated, repeat, "fill"]
        measured = books[plan.treated, repeat, "measure"]
        for cold, other in same_prompts(fill, measured):
            if cold.cached_tokens == 0 and other.cached_tokens:
                yield cold, other


def same_prompts(a: Account, b: Account) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """The completed requests of two rounds that asked the same, by their index."""
    others = {record.index: record for record in b.completed}
    for record in a.completed:
        other = others.get(record.index)
        if other is not None and other.context_id == record.context_id:
            yield record, other


def _blind(cold: Sequence[RequestRecord]) -> bool:
    """Whether different contexts all give the very same answer."""
    contexts = {record.context_id for record in cold}
    answers = {(r.token, (r.top_logprobs or {}).get(r.token or "")) for r in cold}
    return len(contexts) > 1 and len(answers) == 1
