"""What must hold before a number is published. Pure.

An invariant that cannot be checked is unknown (``holds`` is None) and blocks the verdict just like
one that fails.
"""

from __future__ import annotations

from kvlab.invariants import requests, servers, stores, tokens
from kvlab.invariants.facts import Facts, Invariant

__all__ = ["Facts", "Invariant", "check"]


def check(facts: Facts) -> list[Invariant]:
    """Every invariant that applies to a two-round run, in the order of a reader's interest."""
    found = [
        requests.correctness(facts),
        requests.requests_complete(facts),
        requests.prompt_length(facts),
        tokens.round_1_cold(facts),
        tokens.conservation(facts),
        tokens.local_share(facts),
        *([] if facts.plan.alone else [requests.baseline_steady(facts)]),
        requests.warmed_up(facts),
        servers.servers_up(facts),
        *([] if facts.plan.alone else [servers.kv_equal(facts)]),
    ]
    if facts.plan.control:
        return found
    found += [
        tokens.external_share(facts),
        tokens.retrieves_complete(facts),
        stores.chunks_stored(facts),
        stores.stores_drained(facts),
    ]
    if facts.plan.sees_l2:
        found.append(stores.disk_holds_records(facts))
    return found
