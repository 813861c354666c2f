"""The stores: every chunk written, nothing under way when round 2 begins, records on the disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.evidence import Account
from kvlab.invariants.facts import Facts, Invariant, weigh
from kvlab.records import Event


@dataclass(frozen=True, slots=True)
class Stored:
    """How many objects a fill should have stored, and did."""

    least: int
    most: int
    stored: float | None
    reason: str | None
    failures: float

    @property
    def missing(self) -> int:
        return 0 if self.stored is None else max(0, self.least - round(self.stored))


def stored(facts: Facts, account: Account) -> Stored:
    """The objects of one fill: contexts x whole chunks x object groups x ranks.

    A version may or may not store the chunk that ends with the very last token, hence two bounds.
    The number of object groups is what LMCache stated at its start, otherwise what the L2 folder
    shows, otherwise what fits the count.
    """
    plan, written = facts.plan, account.written.value
    least = plan.contexts * ((plan.context_tokens - 1) // plan.chunk_tokens)
    most = plan.contexts * (plan.context_tokens // plan.chunk_tokens)
    groups = facts.object_groups(account)
    if groups is None and plan.object_groups is not False:
        drained = _drained(facts, account)
        shown = drained.detail.get("groups") if drained else None
        groups = int(shown or -(-round(written or 0) // max(1, most * plan.kv_ranks)))
    factor = max(1, groups or 1) * plan.kv_ranks
    failed = facts.readings.grown(account.key, "lmcache", "l1_allocation_failures").value
    return Stored(least * factor, most * factor, written, account.written.reason, failed or 0.0)


def chunks_stored(facts: Facts) -> Invariant:
    """Round 1 stored every whole chunk of every context."""
    bad, unknown, counted = [], [], 0.0
    for account in facts.rounds("fill", arm=facts.plan.treated):
        found = stored(facts, account)
        if found.stored is None:
            unknown.append(f"{account.place}: {found.reason}")
            continue
        counted += found.stored
        if found.missing:
            room = f", L1 had no room for {found.failures:,.0f}" if found.failures else ""
            bad.append(
                f"{found.missing:,} chunks never stored ({found.stored:,.0f} of {found.least:,}"
                f"{room}; {account.place})"
            )
        elif found.stored > found.most:
            bad.append(
                f"{found.stored:,.0f} chunks stored, more than the {found.most:,} that the"
                f" prompts hold ({account.place})"
            )
    return weigh("chunks-stored", f"all {counted:,.0f} chunks stored", bad, unknown)


def _drained(facts: Facts, account: Account) -> Event | None:
    """The last wait for the stores of a round."""
    return next(
        (
            event
            for event in reversed(facts.events)
            if event.kind == "drained"
            and (event.scenario, event.repeat, event.round) == account.key
        ),
        None,
    )


def stores_drained(facts: Facts) -> Invariant:
    """Nothing was still being written when round 2 began, and no store failed."""
    bad, unknown, waited = [], [], []
    for account in facts.rounds("fill", arm=facts.plan.treated):
        event = _drained(facts, account)
        if event is None:
            unknown.append(f"{account.place}: nobody waited for the stores")
            continue
        detail = event.detail
        waited.append(float(detail.get("waited_s") or 0.0))
        submitted, completed = detail.get("submitted"), detail.get("completed")
        failed = detail.get("failed")
        if failed is None and submitted is not None and completed is not None:
            failed = submitted - completed
        if failed:
            bad.append(
                f"{completed:,.0f} of {submitted:,.0f} stored, {failed:,.0f} failed"
                f" ({account.place})"
            )
        elif detail.get("stable") is False:
            bad.append(f"stores had not come to rest after {waited[-1]:.0f} s ({account.place})")
        elif facts.plan.has_l2 and failed is None:
            unknown.append(f"{account.place}: LMCache does not count its stores to disk")
    return weigh("stores-drained", f"at rest after {max(waited, default=0):.1f} s", bad, unknown)


def disk_holds_records(facts: Facts) -> Invariant:
    """The disk holds as many records as LMCache says that it stored there."""
    bad, unknown, files = [], [], 0
    for account in facts.rounds("fill", arm=facts.plan.treated):
        event = _drained(facts, account)
        found = event.detail.get("files") if event else None
        completed = event.detail.get("completed") if event else None
        if found is None or completed is None:
            unknown.append(f"{account.place}: records on disk were not counted")
            continue
        files += found
        if completed and not found:
            bad.append(f"disk tier empty: {completed:,.0f} records stored ({account.place})")
        elif found < completed:
            bad.append(f"{found:,} of {completed:,.0f} records are on disk ({account.place})")
    return weigh("disk-holds-records", f"{files:,} records on disk", bad, unknown)
