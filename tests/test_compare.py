"""Two runs: what changed, and never across machines by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlab import compare
from kvlab.errors import UsageError
from kvlab.rundir import RunDir
from tests.builders import make_run


def two(tmp_path: Path, **second: Any) -> tuple[RunDir, RunDir]:
    return make_run(tmp_path / "a", run="a"), make_run(tmp_path / "b", run="b", seed=9, **second)


def test_a_setting_that_helps(tmp_path: Path) -> None:
    runs = two(tmp_path, restored_ms=50, overrides={"cache.eviction_ratio": 0.11})
    found = compare.compare(*runs)
    assert found["runs"] == ["a", "b"]
    assert found["same_host"] is True
    assert list(found["settings"]) == ["cache.eviction_ratio"]
    baseline, lmcache = found["arms"]
    assert baseline["ratio"]["ci95"][0] < 1 < baseline["ratio"]["ci95"][1]
    assert lmcache["ratio"]["value"] == pytest.approx(2, rel=0.05)
    assert lmcache["ratio"]["ci95"][0] > 1
    assert [s["value"] for s in found["speedup"]] == pytest.approx([7, 14], rel=0.05)
    shown = compare.text(found)
    assert "setting cache.eviction_ratio: " in shown
    assert "lmcache: median TTFT " in shown
    assert "times as fast" in shown
    assert "speedup: " in shown


def test_the_same_settings(tmp_path: Path) -> None:
    found = compare.compare(*two(tmp_path))
    assert found["settings"] == {}
    for arm in found["arms"]:
        assert arm["ratio"]["ci95"][0] < 1 < arm["ratio"]["ci95"][1]


def test_settings_that_only_one_run_has(tmp_path: Path) -> None:
    found = compare.compare(*two(tmp_path, overrides={"engine.flags.new": 1, "cache.l2": None}))
    assert found["settings"]["engine.flags.new"] == {"first": None, "second": 1}
    assert found["settings"]["cache.l2"]["second"] is None


@pytest.mark.parametrize("fingerprint", ["other", None])
def test_different_hosts_are_refused(tmp_path: Path, fingerprint: str | None) -> None:
    runs = two(tmp_path, manifest={"fingerprint": fingerprint})
    with pytest.raises(UsageError, match="different hosts") as refused:
        compare.compare(*runs)
    assert "--different-hosts" in str(refused.value)
    found = compare.compare(*runs, allow_different_hosts=True)
    assert found["same_host"] is False
    assert "the hosts differ" in compare.text(found)


def test_two_attached_deployments_are_two_hosts() -> None:
    def manifest(url: str, runtime: str = "attach") -> dict[str, Any]:
        section = {"vllm": [{"url": url}], "lmcache": [{"url": "http://c"}], "baseline": None}
        return {"profile": {"runtime": runtime, "attach": section}}

    assert compare._attached(manifest("http://a")) == {"http://a", "http://c"}
    assert compare._attached(manifest("http://a")) != compare._attached(manifest("http://b"))
    assert compare._attached(manifest("http://a", "process")) == set()
    assert compare._attached({}) == set()


def test_hosts_that_are_both_unknown_are_not_the_same(tmp_path: Path) -> None:
    unknown = {"fingerprint": None}
    first = make_run(tmp_path / "a", manifest=unknown)
    with pytest.raises(UsageError, match="different hosts"):
        compare.compare(first, make_run(tmp_path / "b", manifest=unknown))


def test_other_experiments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a is a run of two-round, b of soak"):
        compare.compare(*two(tmp_path, manifest={"experiment": "soak"}))


def test_an_invalid_run_gives_no_figures(tmp_path: Path) -> None:
    found = compare.compare(*two(tmp_path, fault="fast but wrong"))
    assert "arms" not in found
    assert "speedup" not in found
    assert compare.text(found).endswith("no figures: a run is invalid")


def test_a_control_beside_an_ab(tmp_path: Path) -> None:
    found = compare.compare(*two(tmp_path, control=True, manifest={"seeds": None}))
    assert found["arms"][1]["arms"] == ["lmcache", "control"]
    assert "lmcache / control: median TTFT" in compare.text(found)


def test_runs_that_share_a_single_request_have_no_ratio(tmp_path: Path) -> None:
    wide = make_run(tmp_path / "a", contexts=6, repeats=1)
    deep = make_run(tmp_path / "b", contexts=1, repeats=6)
    found = compare.compare(wide, deep)
    assert [list(arm) for arm in found["arms"]] == [["arms", "median_ms"]] * 2
    assert "times as fast" not in compare.text(found)
