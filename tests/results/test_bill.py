"""The bill of the A/B: costs where nothing is restored, from synthetic runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlab import summary
from kvlab.records import Event, Record, RequestRecord, Scrape
from kvlab.rundir import RunDir
from tests.builders import MS, make_run

TOKENS = 32


def bill(tmp_path: Path, **options: Any) -> dict[str, Any]:
    found = summary.conclude(make_run(tmp_path, **options))["bill"]
    assert isinstance(found, dict)
    return found


def cold(factor: float) -> Any:
    """Round 1 of the lmcache arm takes so many times as long."""

    def edit(record: Record) -> Record:
        if (
            isinstance(record, RequestRecord)
            and (record.scenario, record.round) == ("lmcache", "fill")
            and record.sent_ns
            and record.first_token_ns
        ):
            span = int((record.first_token_ns - record.sent_ns) * factor)
            return replace(record, first_token_ns=record.sent_ns + span)
        return record

    return edit


def test_round_1_is_compared_and_tested(tmp_path: Path) -> None:
    found = bill(tmp_path, noise=0.005)["cold"]
    assert found["answer"] == "not slower"
    assert found["ci95"][0] <= 1 <= found["ci95"][1]
    assert found["upper95"] < 1 + found["margin"]
    assert set(found["ttft_ms"]) == {"baseline", "lmcache"}


@pytest.mark.parametrize(("factor", "answer"), [(1.3, "slower"), (1.02, "not slower")])
def test_a_slower_first_round_is_said(factor: float, answer: str, tmp_path: Path) -> None:
    found = bill(tmp_path, noise=0.005, edit=cold(factor))
    assert found["cold"]["answer"] == answer
    assert found["break_even"]["cost_ms"] > 0


def test_what_was_written_is_counted_per_context_token_and_read(tmp_path: Path) -> None:
    found = bill(tmp_path)["writes"]
    # 5 chunks of 2 objects of 71,680 bytes each, 1,120 tokens of which come back.
    assert found["bytes_per_context"] == 10 * 71_680
    assert found["bytes_per_prompt_token"] == pytest.approx(10 * 71_680 / 1121)
    assert found["bytes_per_served_token"] == 10 * 71_680 / 1120
    assert found["writes_per_useful_read"] == 1


def test_the_second_visit_pays_when_the_first_costs_little(tmp_path: Path) -> None:
    found = bill(tmp_path)["break_even"]
    assert found["saving_ms"] == pytest.approx(600, rel=0.1)
    assert found["visits"] == 2
    assert found["never"] is False


def test_a_dear_first_visit_takes_more_visits_to_pay(tmp_path: Path) -> None:
    """700 ms more once, 600 ms less each time: the third visit pays."""
    assert bill(tmp_path, edit=cold(2.0), noise=0.001)["break_even"]["visits"] == 3


def test_visits_that_save_nothing_never_pay(tmp_path: Path) -> None:
    found = bill(tmp_path, restored_ms=900.0)["break_even"]
    assert found["never"] is True
    assert "visits" not in found


def test_a_control_has_no_bill(tmp_path: Path) -> None:
    run = make_run(tmp_path, control=True, restored_ms=700.0)
    assert "bill" not in summary.conclude(run)


def test_what_was_not_measured_is_absent(tmp_path: Path) -> None:
    """A run of an earlier kvlab has neither the long answers nor the samples."""
    found = bill(tmp_path)
    assert "time_per_output_token_ms" not in found["decode"]
    assert "memory_bytes" not in found["server"]
    assert "cpu_s" not in found["server"]


def more(run: RunDir, *, short: bool = False, slower: float = 1.0) -> RunDir:
    """The run with long answers after its rounds, and with samples of its servers."""
    for record in [*_decoded(run, short, slower), *_sampled(run)]:
        run.append(record)
    run.seal()
    return run


def _decoded(run: RunDir, short: bool, slower: float) -> Iterator[Record]:
    noise = random.Random(5)
    for scenario in ("baseline", "lmcache"):
        for repeat in (1, 2, 3):
            for index in range(3):
                base = next(
                    r
                    for r in run.requests()
                    if (r.scenario, r.repeat, r.round) == (scenario, repeat, "measure")
                )
                assert base.first_token_ns is not None
                per_token = 10 * MS * (slower if scenario == "lmcache" else 1)
                spent = int((TOKENS - 1) * per_token * noise.uniform(0.99, 1.01))
                end = base.first_token_ns + spent
                yield replace(
                    base,
                    round="decode",
                    index=index,
                    asked_tokens=TOKENS,
                    completion_tokens=TOKENS - (short and index == 1),
                    last_byte_ns=end,
                    done_ns=end,
                )
    for repeat in (1, 2, 3):
        for boundary, count in (("start", 100.0), ("end", 130.0)):
            yield Scrape(
                scenario="lmcache",
                repeat=repeat,
                boundary=f"decode:{boundary}",
                source="lmcache",
                at_ns=1,
                samples={"lmcache_mp_l1_write_chunks_total": count},
            )


def _sampled(run: RunDir) -> Iterator[Record]:
    at_ns = run.events()[-1].at_ns
    for repeat in (1, 2, 3):
        for name in ("fill", "measure"):
            for cpu_s in (1.0, 1.6):
                own = {"service": "lmcache", "name": "lmcache", "pid": 1, "files": 9}
                yield Event(
                    at_ns=at_ns,
                    kind="usage",
                    scenario="lmcache",
                    repeat=repeat,
                    round=name,
                    detail={
                        "processes": [
                            {**own, "rss_bytes": 500_000_000, "cpu_s": cpu_s},
                            {**own, "service": "vllm", "rss_bytes": 1, "cpu_s": 99.0},
                        ]
                    },
                )


def test_time_per_output_token_is_compared_while_stores_run(tmp_path: Path) -> None:
    run = more(make_run(tmp_path, overrides={"cache.separate_object_groups": True}), slower=1.1)
    found = summary.conclude(run)["bill"]["decode"]
    assert found["output_tokens"] == TOKENS
    assert found["requests"] == {"baseline": 9, "lmcache": 9}
    assert found["stored_objects"] == 90
    per_token = found["time_per_output_token_ms"]
    assert per_token["baseline"]["median"] == pytest.approx(10, rel=0.02)
    assert found["ratio"] == pytest.approx(1.1, rel=0.03)
    assert found["ci95"][0] <= found["ratio"] <= found["ci95"][1]


def test_an_answer_that_is_too_short_leaves_the_time_per_token_unknown(tmp_path: Path) -> None:
    found = summary.conclude(more(make_run(tmp_path), short=True))["bill"]["decode"]
    assert "time_per_output_token_ms" not in found
    assert found["requests"]["lmcache"] == 9


@pytest.mark.parametrize("whole", [1, 9])
def test_an_answer_that_came_in_one_piece_shows_no_time_per_token(
    whole: int, tmp_path: Path
) -> None:
    run = more(make_run(tmp_path))
    rows = run.requests()
    at_once = [r for r in rows if (r.scenario, r.round) == ("lmcache", "decode")][:whole]
    path = run.path / "requests.jsonl"
    path.write_text("")
    for row in rows:
        run.append(replace(row, last_byte_ns=row.first_token_ns) if row in at_once else row)
    run.seal()
    found = summary.conclude(run)["bill"]["decode"]
    assert found["requests"]["lmcache"] == 9
    if whole == 9:
        assert "time_per_output_token_ms" not in found
    else:
        per_token = found["time_per_output_token_ms"]["lmcache"]
        assert per_token["n"] == 8
        assert per_token["median"] == pytest.approx(10, rel=0.02)


def test_the_long_answers_leave_the_rounds_accounts_untouched(tmp_path: Path) -> None:
    before = summary.summarise(make_run(tmp_path / "a"))
    after = summary.summarise(more(make_run(tmp_path / "b")))
    for key in ("ttft_ms", "served_tokens", "conservation", "requests", "verdict", "correctness"):
        assert after[key] == before[key]


def test_the_servers_use_is_that_of_lmcaches_processes_alone(tmp_path: Path) -> None:
    found = summary.conclude(more(make_run(tmp_path)))["bill"]["server"]
    assert found["memory_bytes"] == {"min": 500_000_000, "max": 500_000_000}
    assert found["cpu_s"] == pytest.approx(3.6)
    assert found["cpu_ms_per_request"] == pytest.approx(1000 * 3.6 / 36)
