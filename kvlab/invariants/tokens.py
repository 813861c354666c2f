"""The tokens: cold in round 1, from LMCache in round 2, and the same in every party's books."""

from __future__ import annotations

from kvlab.evidence import Account
from kvlab.invariants.facts import Facts, Invariant, weigh

_NO_CACHED_COUNT = "the server hides cached tokens; start vLLM with --enable-prompt-tokens-details"


def round_1_cold(facts: Facts) -> Invariant:
    """No tier served a token in round 1."""
    bad, unknown = [], []
    for account in facts.rounds("fill"):
        books = [account.local, account.external]
        if account.has_lmcache:
            books += [account.lookup_hit, account.l1, account.l2]
        elif account.external.value is None:
            books.remove(account.external)
        counted = [change.value for change in books if change.value is not None]
        hits = max([*counted, account.client or 0], default=0)
        if hits:
            bad.append(
                f"round 1 warm, result invalid: {hits:,.0f} hit tokens"
                f" ({account.scenario}, repeat {account.repeat})"
            )
        unknown += [f"{account.place}: {c.reason}" for c in books if c.reason]
        if account.client is None:
            unknown.append(f"{account.place}: {_NO_CACHED_COUNT}")
    return weigh("round-1-cold", "0 hit tokens in every tier in round 1", bad, unknown)


def conservation(facts: Facts) -> Invariant:
    """Client, vLLM and LMCache agree on how many tokens came from the cache."""
    bad, unknown = [], []
    for account in facts.accounts:
        residual = account.residual
        if residual is None:
            unknown.append(f"{account.place}: {_why_unknown(account)}")
        elif residual > facts.threshold("conservation_share_max") * (account.prompt or 0):
            bad.append(f"{account.place}: {residual:,} tokens unexplained ({_books(account)})")
    return weigh("conservation", "0 tokens unexplained", bad, unknown)


def _books(account: Account) -> str:
    local, external = account.local.value, account.external.value
    text = (
        f"client {account.client:,}, vLLM {local or 0:,.0f} local + {external or 0:,.0f} external"
    )
    if account.has_lmcache:
        text += f", LMCache {account.l1.value or 0:,.0f} L1 + {account.l2.value or 0:,.0f} L2"
    return text


def _why_unknown(account: Account) -> str:
    if account.client is None:
        return _NO_CACHED_COUNT
    books = [account.local, account.external, account.l1, account.l2]
    return next((str(change.reason) for change in books if change.reason), "")


def external_share(facts: Facts) -> Invariant:
    """LMCache served what it could serve: the gain is its own."""
    plan, bad, unknown, seen = facts.plan, [], [], []
    for account in facts.rounds("measure", arm=plan.treated):
        most = plan.restorable_tokens * plan.contexts
        if account.external.value is None:
            unknown.append(f"{account.place}: {account.external.reason}")
            continue
        share = account.external.value / most if most else 0.0
        seen.append(share)
        if share < facts.threshold("external_share_min"):
            bad.append(
                f"gain not from LMCache: external hits {account.external.value:,.0f} of"
                f" {most:,} restorable tokens ({share:.1%}), local hits"
                f" {account.local.value or 0:,.0f} ({account.place})"
            )
    of_prompt = plan.restorable_tokens / plan.context_tokens
    good = f"ceiling {of_prompt:.1%} of the prompt, seen {min(seen, default=0) * of_prompt:.1%}"
    return weigh("external-share", good, bad, unknown)


def local_share(facts: Facts) -> Invariant:
    """vLLM's own cache served next to nothing in round 2, in either arm."""
    most = facts.plan.restorable_tokens * facts.plan.contexts
    bad, unknown, seen = [], [], []
    for account in facts.rounds("measure"):
        if account.local.value is None:
            unknown.append(f"{account.place}: {account.local.reason}")
            continue
        share = account.local.value / most if most else 0.0
        seen.append(share)
        if share > facts.threshold("local_share_max"):
            bad.append(
                f"vLLM's own cache answered round 2: {account.local.value:,.0f} local hit tokens"
                f" ({share:.1%}; {account.place}); ask more contexts or shrink L0"
            )
    good = f"local hits at most {max(seen, default=0):.1%} of the restorable tokens"
    return weigh("local-share", good, bad, unknown)


def retrieves_complete(facts: Facts) -> Invariant:
    """What was counted as a hit was also handed to the engine.

    A failed retrieve can be reported as finished and leave blocks unwritten. One chunk is one
    object or more (per object group and rank), so fewer objects than chunks means a loss.
    """
    bad, unknown = [], []
    for account in facts.rounds("measure", arm=facts.plan.treated):
        if account.loaded.value is None or account.external.value is None:
            unknown.append(f"{account.place}: {account.loaded.reason or account.external.reason}")
            continue
        chunks = account.external.value / facts.plan.chunk_tokens
        if account.loaded.value < chunks:
            bad.append(
                f"{account.place}: {chunks:,.0f} chunks were hits, {account.loaded.value:,.0f}"
                " objects were loaded: a retrieve failed"
            )
    return weigh("retrieves-complete", "every chunk that was a hit was loaded", bad, unknown)
