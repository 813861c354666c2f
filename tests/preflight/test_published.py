"""The published settings of the DGX Spark report, on a machine like its own."""

from __future__ import annotations

from kvlab import preflight, profile
from kvlab.preflight import Case, Probe
from tests.preflight.cases import SPARK_CONFIG, SPARK_HOST

CAUTIONS = {
    "KV003": "0.0.0.0",
    "KV004": "0.99",
    "KV005": "latest",
    "KV006": "separate-object-groups",
}
"""What the published settings are known to deserve, and the word that shows it."""
LOG = {"attention_block_tokens": 2144}


def findings(*, host: dict = SPARK_HOST, **case: object) -> list[preflight.Finding]:
    published = profile.as_published(profile.load("dgx-spark"))
    return preflight.evaluate(Case(profile=published, host=host, **case))


def test_they_yield_exactly_their_own_cautions() -> None:
    for known in (
        {"probe": Probe(config=SPARK_CONFIG)},
        {"probe": Probe(config=SPARK_CONFIG), "logs": (LOG,)},
    ):
        found = findings(**known)
        assert {one.id for one in found} == set(CAUTIONS)
        for id, word in CAUTIONS.items():
            assert any(word in one.found for one in found if one.id == id), id
        assert not [one for one in found if one.severity == "error"]


def test_n_is_computed_as_the_published_log_states_it() -> None:
    case = Case(profile=profile.load("dgx-spark"), probe=Probe(config=SPARK_CONFIG))
    assert (case.block.tokens, case.block.source) == (2144, "computed")


def test_on_a_small_machine_without_a_gpu_the_host_is_found_as_well() -> None:
    small = {
        "memory_gib": 15.6,
        "gpus": [],
        "limits": {"memory_gib": None},
        "now": {"memory_available_gib": 12.0},
        "disk": {"filesystem": "ext4", "free_gib": 68.0},
        "proxy_variables": [],
    }
    found = findings(host=small, probe=Probe(config=SPARK_CONFIG))
    assert {one.id for one in found} - set(CAUTIONS) == {
        *("KV040", "KV041"),  # 20 GiB of L1
        "KV045",  # no GPU
        *("KV054", "KV057"),  # 170 GB of records and more with every run
    }


def test_with_leftovers_of_earlier_runs_their_records_are_spoken_of() -> None:
    probe = Probe(config=SPARK_CONFIG, l2_records=377, l2_bytes=32_000_000_000)
    extra = [one for one in findings(probe=probe) if one.id not in CAUTIONS]
    assert [one.id for one in extra] == ["KV057"]
    assert "377 records (32 GB)" in extra[0].found
