"""fio as the ceiling of a path: the command, a strict reading of its JSON, one real run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import fio
from kvlab.errors import HostBusy, MeasurementError

JOB = fio.Job(kind="read", block_bytes=4096, jobs=2, file_bytes=1 << 20)
SAID: dict[str, Any] = {
    "fio version": "fio-3.33",
    "jobs": [
        {
            "jobname": "kvlab",
            "error": 0,
            "read": {"io_bytes": 2_000_000_000, "runtime": 500, "total_ios": 1000},
        }
    ],
}


def changed(key: str, value: Any) -> str:
    tree = copy.deepcopy(SAID)
    job = tree["jobs"][0]
    (job["read"] if key in job["read"] else job)[key] = value
    return json.dumps(tree)


def test_the_rate_is_all_bytes_over_the_time_of_the_group() -> None:
    rate = fio.parse(json.dumps(SAID), "read")
    assert (rate.bytes, rate.seconds, rate.requests) == (2_000_000_000, 0.5, 1000)
    assert rate.gb_per_s == pytest.approx(4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fio: engine not found",
        json.dumps({**SAID, "jobs": []}),
        json.dumps({**SAID, "jobs": SAID["jobs"] * 2}),
        changed("error", 5),
        changed("runtime", 0),
        changed("io_bytes", 0),
        changed("io_bytes", 1.5),
        changed("total_ios", True),
        changed("io_bytes", "1"),
    ],
)
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(MeasurementError, match="no result of a read"):
        fio.parse(text, "read")


def test_a_read_says_nothing_of_writes() -> None:
    with pytest.raises(MeasurementError, match="no result of a write"):
        fio.parse(json.dumps(SAID), "write")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["jobs", "error", "read", "io_bytes", "runtime", "total_ios", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON | st.builds(lambda job: {"jobs": [{"error": 0, "read": job}]}, JSON))
def test_any_json_is_a_positive_rate_or_one_sentence(tree: Any) -> None:
    try:
        rate = fio.parse(json.dumps(tree), "read")
    except MeasurementError:
        return
    assert rate.bytes > 0
    assert rate.seconds > 0


def test_the_command_names_what_is_asked(tmp_path: Path) -> None:
    words = fio.words(JOB, tmp_path, tmp_path / "out")
    assert {"--rw=read", "--bs=4096", "--numjobs=2", "--direct=1"} <= set(words)
    assert not any(word.startswith(("--runtime", "--end_fsync")) for word in words)
    timed = fio.Job(kind="write", block_bytes=1, jobs=1, file_bytes=1, runtime_s=0.5, fsync=True)
    words = fio.words(timed, tmp_path, tmp_path / "out")
    assert {"--runtime=500ms", "--time_based", "--end_fsync=1"} <= set(words)


def test_a_real_read_reads_every_file_once(tmp_path: Path) -> None:
    job = fio.Job(kind="read", block_bytes=4096, jobs=2, file_bytes=1 << 16, direct=False)
    rate = fio.run(job, tmp_path)
    assert (rate.bytes, rate.requests) == (2 << 16, 32)
    assert len(list(tmp_path.iterdir())) == 2
    fio.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_path_that_refuses_is_named_with_what_fio_said(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="fio failed on") as failed:
        fio.run(JOB, tmp_path / "nowhere")
    assert failed.value.log_tail


def test_without_fio_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HostBusy, match="fio is not installed"):
        fio.refuse_missing()
