"""The parallel adapter inside LMCache, scenario by scenario; `probe_parallel_fs` drives it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvlab import environment

pytestmark = pytest.mark.engine

PROBE = Path(__file__).with_name("probe_parallel_fs.py")
ROOT = Path(__file__).resolve().parents[2]
OTHER_LMCACHE = """
import sys, types
sys.modules["lmcache.v1.distributed.l2_adapters.fs_l2_adapter"] = types.ModuleType("other")
import kvlab.engine.parallel_fs
"""


def run_engine_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(environment.engine_python()), "-W", "ignore", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={"PYTHONPATH": str(ROOT)}
    )


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict:
    done = run_engine_python(str(PROBE), str(tmp_path_factory.mktemp("records")))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["direct", "buffered", "odd"])
def test_records_of_any_size_come_back_as_they_were(facts, way):
    seen = facts["round_trip"][way]
    assert seen["stored"]
    assert seen["again"], "what is there is not written again"
    assert seen["found"] == [True] * 6 + [False]
    assert seen["equal"]
    assert seen["found_again"] == [True] * 6, "the index is rebuilt at the start"
    assert seen["equal_again"]
    assert seen["left"] == []
    assert seen["stays_direct"] == (way != "buffered")


def test_lmcache_s_own_adapters_and_ours_read_one_another_s_records(facts):
    seen = facts["exchange"]
    assert seen["same_names"]
    for kind in ("fs", "fs_native"):
        assert seen[f"{kind} stores"]
        assert seen[f"{kind} to plugin"] == [[True, True], True]
        assert seen[f"plugin to {kind}"] == [[True, True], True]


def test_stores_loads_and_deletes_at_once_give_no_wrong_byte(facts):
    seen = facts["storm"]
    assert min(seen["stores"], seen["loads"], seen["deletes"]) > 20, "too little happened"
    assert seen["wrong"] == 0
    assert seen["bytes"] == [0, 0], "what is counted is what is on the disk"
    assert (seen["locked"], seen["reading"], seen["left"]) == (0, 0, [])


def test_a_killed_writer_leaves_no_half_record(facts):
    seen = facts["killed"]
    assert seen["unfinished"], "nothing was being written when the writer was killed"
    assert seen["records"] == seen["found"] == seen["whole"] > 0
    assert seen["left"], "unfinished files go, except of a writer that is alive"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted, as root")
def test_a_full_disk_fails_that_store_and_nothing_else(facts):
    seen = facts["full"]
    assert seen["stored"][0]
    assert not seen["stored"][-1]
    assert seen["stored"] == seen["equal"]
    assert seen["left"] == []
    assert seen["after_a_delete"]
    assert seen["store_errors"] == seen["stored"].count(False)


def test_a_damaged_record_is_a_miss_until_it_is_stored_again(facts):
    seen = facts["damaged"]
    assert seen["arrived"] == ["whole"]
    assert seen["missed"] == ["truncated", "longer", "missing", "empty", "folder", "io_error"]
    assert [name for name, found in seen["found"].items() if found] == ["whole"]
    assert seen["healed"] == [*seen["arrived"], *seen["missed"]]
    assert seen["counted"] == {"missing": 1, "wrong_size": 4, "read_errors": 1}
    assert seen["bytes"] == [0, 0]
    assert seen["descriptors"] == 0


@pytest.mark.parametrize("refusal", ["open", "transfer"])
def test_a_file_system_without_o_direct_is_read_through_the_page_cache(facts, refusal):
    seen = facts["without_direct"]
    assert seen[f"{refusal} write"]
    assert seen[f"{refusal} read"]
    assert seen[f"{refusal} direct"] is False
    assert seen[f"{refusal} left"] == []


def test_the_limit_is_kept_by_evicting_the_least_recently_used(facts):
    seen = facts["limited"]
    assert seen["most"] == 8
    assert seen["kept"] == [0, 5, 6, 7, 8, 9, 10, 11], "0 was read again before 8 came"
    assert seen["locked_kept"]
    assert seen["locked_undeleted"] == [True]
    assert seen["all_locked"] == [False, 0]
    assert seen["too_large"] == [False, 0]
    assert seen["no_room"] == 2
    assert seen["bytes"] == [8 << 20] * 3
    assert seen["evicted"] == [12, 12 << 20]


def test_a_restart_knows_what_is_there_and_how_large_it_is(facts):
    seen = facts["limited"]
    assert seen["same_after_restart"]
    assert seen["usage_after_restart"] == 8 << 20
    assert seen["lower_limit"] == [3, 3 << 20]


def test_lmcache_s_own_eviction_frees_space_of_old_records_too(facts):
    seen = facts["evicted_by_lmcache"]
    assert seen == {"kept": [3, 4, 5, 6, 7, 8, 9], "files": 7, "usage": 7, "deleted": 3}


def test_another_server_s_records_are_found_in_a_shared_folder(facts):
    seen = facts["shared"]
    assert seen["False"] == [[False, False], True]
    assert seen["True"] == [[True, False], True]
    assert (seen["False usage"], seen["True usage"]) == (0, 4096)
    assert seen["False damaged"] == seen["True damaged"] == [[None], [False]]


def test_ten_thousand_operations_leak_neither_threads_nor_descriptors(facts):
    seen = facts["endurance"]
    assert seen["operations"] >= 10_000
    assert seen["right"]
    assert seen["after"] == seen["before"]
    assert seen["open_tasks"] == seen["done_tasks"] == [0, 0, 0]


def test_closing_with_work_in_flight_ends_it(facts):
    seen = facts["closed_in_flight"]
    assert seen["untouched"], "a buffer changed after close"
    assert seen["right"]
    assert seen["missed"], "everything had been read before: nothing was in flight"
    assert seen["stores_ended"] == [False]
    assert (seen["open_tasks"], seen["threads"], seen["descriptors"]) == (0, 0, 0)
    assert seen["left"] == []
    assert seen["refused"] == "the parallel fs adapter is closed"


def test_a_wrong_parameter_is_refused_with_the_help(facts):
    seen = facts["configured"]
    assert seen["unknown"].startswith("'worker' is no parameter of the parallel fs adapter")
    assert "- num_workers: " in seen["unknown"]
    assert seen["no_folder"].startswith("base_path must name a folder")
    assert seen["workers"].startswith("num_workers must be a whole number above 0, not 0")


def test_the_configuration_is_found_by_its_name(facts):
    assert facts["configured"]["by_convention"] is True
    assert facts["configured"]["closed"] is False


def test_the_counters_are_on_lmcache_s_prometheus_page(facts):
    for name, (in_status, in_prometheus) in facts["counted"].items():
        assert in_status == in_prometheus > 0, name


def test_another_lmcache_is_refused_in_a_sentence():
    done = run_engine_python("-c", OTHER_LMCACHE)
    assert done.returncode != 0
    assert "this LMCache does not have what kvlab's parallel adapter builds on" in done.stderr
    assert "hint: it fits LMCache 0.5.6" in done.stderr
