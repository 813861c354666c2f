"""The accounts: what the client, vLLM and LMCache each counted, and which tier served a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlab import evidence
from kvlab.counters import Change
from kvlab.errors import RunFolderError
from kvlab.evidence import Account, Readings
from kvlab.records import RequestRecord, Scrape
from tests.builders import count, make_run, on_request, on_scrape, replace


@pytest.mark.parametrize(
    ("tokens", "chunk", "prefix", "most"),
    [
        (979, 528, None, 528),
        (500, 528, None, 0),
        (1121, 224, None, 1120),
        (1120, 224, None, 896),
        (8000, 2144, None, 6432),
        (8000, 2144, 6400, 4288),
        (8000, 2144, 8000, 6432),
        (0, 224, None, 0),
    ],
)
def test_ceiling(tokens: int, chunk: int, prefix: int | None, most: int) -> None:
    assert evidence.ceiling(tokens, chunk, prefix_tokens=prefix) == most


def request(index: int = 0, **values: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "scenario": "lmcache",
        "repeat": 1,
        "round": "measure",
        "index": index,
        "context_id": f"c{index}",
        "planned_tokens": 1000,
        "asked_tokens": 1,
        "queued_ns": 0,
        "prompt_tokens": 1000,
        "cached_tokens": 896,
    }
    return RequestRecord(**fields | values)


def account(*requests: RequestRecord, lmcache: bool = True, **values: float | None) -> Account:
    names = ("local", "external", "lookup_hit", "l1", "l2", "written", "loaded", "evicted")
    books = {name: Change(values.get(name, 0.0)) for name in names}
    return Account(
        scenario="lmcache" if lmcache else "baseline",
        repeat=1,
        round="measure",
        requests=requests,
        has_lmcache=lmcache,
        **books,
    )


@pytest.mark.parametrize(
    ("books", "residual"),
    [
        ({"external": 896, "l1": 896}, 0),
        ({"external": 896, "l1": 448, "l2": 448}, 0),
        ({"local": 448, "external": 448, "l2": 448}, 0),
        ({"local": 448, "external": 448, "l2": 896}, 0),  # LMCache looked up what L0 then served
        ({"local": 448, "external": 448, "l2": 897}, 1),
        ({"external": 896, "l1": 672}, 224),
        ({"external": 896, "l1": 1120}, 224),
        ({"external": 672, "l1": 672}, 224),
        ({"local": 1120, "external": 896, "l1": 896}, 1120),
        ({"external": None, "l1": 896}, None),
        ({"local": None, "external": 896, "l1": 896}, None),
        ({"external": 896, "l1": None}, None),
        ({"external": 896, "l2": None}, None),
    ],
)
def test_the_books_agree_or_the_residual_says_by_how_much(
    books: dict[str, float | None], residual: int | None
) -> None:
    assert account(request(), **books).residual == residual


def test_without_lmcache_its_books_are_not_needed() -> None:
    cold = request(cached_tokens=0)
    assert account(cold, lmcache=False, l1=None, l2=None, external=None).residual == 0
    assert account(cold, lmcache=False, local=5.0, external=None).residual == 5


def test_a_server_that_hides_cached_tokens_leaves_the_residual_unknown() -> None:
    hidden = account(request(), request(1, cached_tokens=None), external=1792, l1=1792)
    assert hidden.client is None
    assert hidden.residual is None


def test_tokens_by_tier() -> None:
    both = (request(), request(1))
    assert account(*both, external=1792, l1=896, l2=896).served == {
        "L0": 0,
        "L1": 896,
        "L2": 896,
        "recompute": 208,
    }


def test_an_unknown_tier_is_absent_not_zero() -> None:
    assert account(request(), external=896, l1=None, l2=896).served == {
        "L0": 0,
        "L2": 896,
        "recompute": 104,
    }
    assert account(request(), local=None, external=896, l1=896).served == {
        "L1": 896,
        "L2": 0,
        "recompute": 104,
    }


def test_what_was_computed_follows_from_vllm_when_the_client_does_not_say() -> None:
    hidden = request(cached_tokens=None)
    assert account(hidden, local=100, external=796, l1=796).served["recompute"] == 104
    assert "recompute" not in account(hidden, external=None).served
    assert "recompute" not in account(request(prompt_tokens=None)).served


def test_without_a_connector_no_tier_outside_vllm_serves() -> None:
    cold = request(cached_tokens=0)
    nothing = {"L0": 0, "L1": 0, "L2": 0, "recompute": 1000}
    assert account(cold, lmcache=False, l1=None, l2=None).served == nothing
    assert account(cold, lmcache=False, l1=None, l2=None, external=None).served == nothing
    odd = account(cold, lmcache=False, l1=None, l2=None, external=896).served
    assert set(odd) == {"L0", "recompute"}


def test_failed_requests_are_not_in_the_books() -> None:
    failed = request(1, error="no token", cached_tokens=None)
    found = account(request(), failed, external=896, l1=896)
    assert found.client == 896
    assert found.completed == (request(),)


def scrape(boundary: str, l1: float | None = None, l2: float | None = None) -> Scrape:
    values = {"lmcache_mp_lookup_hit_l1_tokens_total": l1}
    values["lmcache_mp_lookup_hit_l2_tokens_total"] = l2
    return Scrape(
        scenario="lmcache",
        repeat=1,
        boundary=f"measure:{boundary}",
        source="lmcache",
        at_ns=0,
        samples={name: value for name, value in values.items() if value is not None},
    )


def tiers(found: Account, *scrapes: Scrape) -> dict[int, str]:
    return evidence.tiers(found, Readings(scrapes))


def test_each_request_is_labelled_by_what_grew() -> None:
    requests = (
        request(0),
        request(1),
        request(2),
        request(3, cached_tokens=0),
        request(4, local_cached_tokens=224, external_cached_tokens=672),
        request(5, local_cached_tokens=896),
    )
    found = account(*requests, local=1120, external=3360, l1=1568, l2=1792)
    labels = tiers(
        found,
        scrape("start", 0, 0),
        scrape("0", 896, 0),
        scrape("1", 896, 896),
        scrape("2", 1344, 1344),
        scrape("3", 1344, 1344),
        scrape("4", 2016, 1344),
        scrape("5", 2016, 1344),
    )
    assert labels == {0: "L1", 1: "L2", 2: "mixed", 3: "recompute", 4: "mixed", 5: "L0"}


def test_counters_that_lag_are_waited_for() -> None:
    found = account(request(0), request(1), request(2), external=2688, l1=1792, l2=896)
    labels = tiers(
        found,
        scrape("start", 100, 0),
        scrape("0", 100, 0),
        scrape("1", 1892, 0),
        scrape("2", 1892, 0),
        scrape("end", 1892, 896),
    )
    assert labels == {0: "L1", 1: "L1", 2: "L2"}


def test_what_cannot_be_told_apart_is_unknown() -> None:
    requests = (request(0), request(1), request(2, cached_tokens=0))
    found = account(*requests, external=1792, l1=896, l2=896)
    together = (scrape("start", 0, 0), scrape("end", 896, 896))
    assert tiers(found, *together) == {0: "unknown", 1: "unknown", 2: "recompute"}
    assert tiers(found) == {0: "unknown", 1: "unknown", 2: "recompute"}
    assert tiers(found, scrape("start", 0, 0), scrape("end", 0, 0))[0] == "unknown"
    assert tiers(found, scrape("start", 0), scrape("end", 1792, 0))[0] == "unknown"


def test_with_several_in_flight_one_tier_still_names_them_all() -> None:
    found = account(request(0), request(1), external=1792, l2=1792)
    labels = tiers(found, scrape("start", 0, 0), scrape("end", 0, 1792))
    assert labels == {0: "L2", 1: "L2"}


def test_a_server_that_hides_cached_tokens_leaves_labels_unknown() -> None:
    found = account(request(0, cached_tokens=None), external=0)
    assert tiers(found) == {0: "unknown"}
    found = account(request(0, cached_tokens=None), external=None)
    assert tiers(found, scrape("start", 0, 0), scrape("0", 0, 0)) == {0: "unknown"}


def test_without_external_hits_a_hit_is_local() -> None:
    assert tiers(account(request(), local=896)) == {0: "L0"}
    assert tiers(account(request(), lmcache=False, local=896)) == {0: "L0"}
    assert tiers(account(request(), lmcache=False, external=None)) == {0: "unknown"}
    assert tiers(account(request(cached_tokens=0), lmcache=False)) == {0: "recompute"}
    assert tiers(account(request(error="timeout"))) == {}


@pytest.mark.parametrize(
    ("loaded", "device", "resident", "label"),
    [
        (21474836480, (2258291 - 1000000) * 512, 0.97, "page cache"),
        (21474836480, 21474836480, 0.01, "disk"),
        (21474836480, 0.8 * 21474836480, 0.0, "disk"),
        (21474836480, 21474836480, 0.97, "page cache"),
        (21474836480, 21474836480, None, "unknown"),
        (21474836480, None, 0.0, "unknown"),
        (None, 5, 0.0, "unknown"),
        (0, 5, 0.0, "unknown"),
    ],
)
def test_where_bytes_came_from(
    loaded: float | None, device: float | None, resident: float | None, label: str
) -> None:
    assert evidence.read_source(loaded, device, resident) == label


def test_the_plan_of_a_run(tmp_path: Path) -> None:
    plan = evidence.plan(make_run(tmp_path).manifest)
    assert plan.arms == ("baseline", "lmcache")
    assert plan.treated == "lmcache"
    assert not plan.control
    assert plan.restorable_tokens == 1120
    assert plan.has_l2
    assert len(plan.keys) == 3 * 2 * 2


def test_the_plan_of_a_control_with_prefixes(tmp_path: Path) -> None:
    run = make_run(tmp_path, control=True, shape="prefix_suffix", context_tokens=1500)
    plan = evidence.plan(run.manifest)
    assert plan.control
    assert plan.restorable_tokens == 1200 // 224 * 224


@pytest.mark.parametrize(
    "damage", [{"profile": {}}, {"profile": None}, {"arms": ["baseline"]}, {"arms": None}]
)
def test_a_manifest_that_is_not_whole(tmp_path: Path, damage: dict[str, Any]) -> None:
    manifest = {**make_run(tmp_path).manifest, **damage}
    with pytest.raises(RunFolderError, match="is not whole"):
        evidence.plan(manifest)


def test_accounts_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, contexts=4, repeats=1)
    found = evidence.accounts(evidence.plan(run.manifest), run.requests(), run.scrapes())
    assert [a.place for a in found] == [
        "baseline, repeat 1, fill",
        "baseline, repeat 1, measure",
        "lmcache, repeat 1, fill",
        "lmcache, repeat 1, measure",
    ]
    measure = found[-1]
    assert [r.index for r in measure.requests] == [0, 1, 2, 3]
    assert measure.client == measure.external.value == 4 * 1120
    assert measure.residual == 0
    times = evidence.times_ms(found, "lmcache", "measure")
    assert set(times[1]) == {0, 1, 2, 3}
    labels = evidence.tiers(measure, Readings(run.scrapes()))
    assert labels == {0: "L1", 1: "L2", 2: "mixed", 3: "L1"}


def test_failed_requests_have_no_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, fault="failed request")
    found = evidence.accounts(evidence.plan(run.manifest), run.requests(), run.scrapes())
    assert 3 not in evidence.times_ms(found, "lmcache", "measure")[2]


def test_a_first_token_without_a_sent_stamp_has_no_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, repeats=1, edit=on_request(replace(sent_ns=None), index=0))
    found = evidence.accounts(evidence.plan(run.manifest), run.requests(), run.scrapes())
    assert 0 not in evidence.times_ms(found, "lmcache", "measure")[1]


def test_a_round_without_records_has_an_account(tmp_path: Path) -> None:
    run = make_run(tmp_path, repeats=1, edit=on_request(lambda _: None, round="measure"))
    found = evidence.accounts(evidence.plan(run.manifest), run.requests(), run.scrapes())
    assert found[1].requests == ()
    assert found[1].client == 0


def test_a_restarted_server_leaves_the_books_unknown(tmp_path: Path) -> None:
    restart = on_scrape(
        count(external_prefix_cache_hits=-99999), source="vllm", boundary="measure:end"
    )
    run = make_run(tmp_path, repeats=1, edit=restart)
    found = evidence.accounts(evidence.plan(run.manifest), run.requests(), run.scrapes())
    assert found[-1].external.value is None
    assert "started again" in str(found[-1].external.reason)


def test_the_kv_size_in_the_metrics(tmp_path: Path) -> None:
    readings = Readings(make_run(tmp_path, repeats=1).scrapes())
    assert set(readings.kv_tokens("lmcache")) == {10922}
    assert readings.kv_tokens("nobody") == []
    assert Readings([]).most("events_dropped") == 0
