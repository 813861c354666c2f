"""Run folders that were edited, cut or made up: one sentence, and never a traceback."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab import compare, report, shapes, summary, verify
from kvlab.errors import KvlabError, RunFolderError
from kvlab.records import Event, RequestRecord, Scrape
from kvlab.rundir import STREAMS, RunDir
from tests.builders import make_run

REQUEST = {
    "scenario": "a",
    "repeat": 1,
    "round": "fill",
    "index": 0,
    "context_id": "c",
    "planned_tokens": 9,
    "asked_tokens": 1,
    "queued_ns": 0,
}
SCRAPE = {"scenario": "a", "repeat": 1, "boundary": "b", "source": "vllm", "at_ns": 1}
EVENT = {"at_ns": 1, "kind": "state"}


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, -2, 1.5e3, true, null, "ü中"]}', {"a": [1, -2, 1500.0, True, None, "ü中"]}),
        (str(2**63 - 1), 2**63 - 1),
        ('"\\ud83c\\udf88"', "🎈"),
        ("1.8446744073709552e+19", float(2**64)),
    ],
)
def test_what_a_run_writes_is_read(text: str, value: Any) -> None:
    assert shapes.loads(text) == shapes.loads(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NaN", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("1e999", "1e999 is too large"),
        (str(2**63), "too large"),
        ("9" * 5000, "too large"),
        ("[" * 100_000, "nested too deeply"),
        (r'{"a": "\ud83d"}', "half a character"),
        ("{", "Expecting"),
        ("", "Expecting"),
    ],
)
def test_what_no_run_writes_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shapes.loads(text)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        shapes.loads(data)


@pytest.mark.parametrize(
    ("kind", "row", "complaint"),
    [
        (RequestRecord, REQUEST, None),
        (RequestRecord, REQUEST | {"sent_ns": None, "top_logprobs": {"a": -1}, "new": []}, None),
        (RequestRecord, [], "is not a JSON object"),
        (RequestRecord, {"scenario": "a"}, "lacks repeat, round, index, context_id, planned"),
        (RequestRecord, REQUEST | {"sent_ns": 1.5}, "sent_ns is not a whole number"),
        (RequestRecord, REQUEST | {"queued_ns": None}, "queued_ns is not a whole number"),
        (RequestRecord, REQUEST | {"repeat": True}, "repeat is not a whole number"),
        (RequestRecord, REQUEST | {"scenario": []}, "scenario is not text"),
        (RequestRecord, REQUEST | {"error": 0}, "error is not text"),
        (RequestRecord, REQUEST | {"top_logprobs": {"a": "b"}}, "top_logprobs is not an object of"),
        (Scrape, SCRAPE | {"samples": {"a": 1, "b": 2.5}}, None),
        (Scrape, SCRAPE | {"samples": {"a": None}}, "samples is not an object of numbers"),
        (Scrape, SCRAPE | {"info": {"a": {"b": 1}}}, "info is not an object of labels"),
        (Event, EVENT | {"detail": {"services": [{"name": "vllm", "pid": None}]}}, None),
        (Event, EVENT | {"kind": "launching", "detail": {"services": ["vllm"]}}, None),
        (Event, EVENT | {"detail": {"services": ["vllm"]}}, "services is not a list of servers"),
        (Event, EVENT | {"detail": []}, "detail is not an object"),
        (Event, EVENT | {"detail": {"waited_s": "1"}}, "waited_s is not a number"),
        (Event, EVENT | {"detail": {"facts": {"kv_cache_tokens": "7"}}}, "facts is not what a log"),
        (Event, EVENT | {"detail": {"log_facts": {"slow_paths": {"count": "x"}}}}, "log_facts is"),
        (Event, EVENT | {"detail": {"facts": {"group_block_tokens": [224, 224]}}}, None),
        (Event, EVENT | {"detail": {"facts": None, "connector": None}}, None),
    ],
)
def test_records(kind: type, row: Any, complaint: str | None) -> None:
    found = shapes.record_complaint(kind, row)
    assert found == complaint or (complaint and str(found).startswith(complaint))


# Folders


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, concluded and sealed; tests copy it."""
    run = make_run(tmp_path_factory.mktemp("sound"), repeats=1, contexts=3)
    summary.conclude(run)
    return run.path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def read(path: Path, other: Path, *, pages: bool = False) -> list[str]:
    """Verify, summarise, render and compare a folder; what each said when it refused."""

    def page() -> None:
        found = report.load(RunDir.open(path))
        report.render(found, genre="technical", lang="tr")

    def two(a: Path, b: Path) -> None:
        runs = RunDir.open(a), RunDir.open(b)
        compare.text(compare.compare(*runs, allow_different_hosts=True))

    attempts: list[Callable[[], Any]] = [
        lambda: verify.verify(RunDir.open(path)),
        lambda: json.dumps(summary.text(summary.summarise(RunDir.open(path)))).encode(),
        lambda: two(path, other),
        lambda: two(other, path),
    ]
    refused = []
    for attempt in [*attempts, page] if pages else attempts:
        try:
            attempt()
        except KvlabError as error:
            refused.append(error)
    assert all(error.hint and "\n" not in error.message for error in refused)
    return [error.message for error in refused]


HOSTILE = st.sampled_from(
    [
        *(None, True, 0, -1, 1.5, 10**30, -(10**400), float("nan"), float("inf")),
        *("", "x", "\x00", "</script><script>", "\ud800", "../../x", "9" * 50),
        *([], [None], [[]], {}, {"a": None}),
    ]
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*at, key))


@given(
    st.sampled_from(["manifest.json", "summary.json", *STREAMS.values()]),
    st.randoms(use_true_random=False),
    HOSTILE,
    st.booleans(),
)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_in_any_place_is_survived(
    sound: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    source: random.Random,
    value: Any,
    partial: bool,
) -> None:
    folder = Path(shutil.copytree(sound, tmp_path_factory.mktemp("fuzz") / "run"))
    if partial:
        RunDir.open(folder).update_manifest(status="partial")
    path = folder / name
    lines = [path.read_text()] if name.endswith(".json") else path.read_text().splitlines()
    trees = [json.loads(line) for line in lines]
    number = source.randrange(len(trees))
    *parents, last = (number, *source.choice([*places(trees[number])]))
    inside: Any = trees
    for key in parents:
        inside = inside[key]
    if source.random() < 0.25:
        del inside[last]
    else:
        inside[last] = value
    path.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
    read(folder, sound, pages=source.random() < 0.2)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", STREAMS.values())
def test_a_stream_cut_at_any_byte(copy: Path, sound: Path, name: str) -> None:
    run = RunDir.open(copy)
    run.update_manifest(status="partial")
    (copy / "SHA256SUMS").unlink()
    (copy / "summary.json").unlink()
    whole = (copy / name).read_bytes()
    source = random.Random(3)
    ends = [at for at, byte in enumerate(whole) if byte == 10]
    for at in [0, 1, ends[0], ends[0] + 1, ends[-1], *source.sample(range(len(whole)), 25)]:
        (copy / name).write_bytes(whole[:at])
        assert verify.verify(RunDir.open(copy)) == []
        assert read(copy, sound) == []


def test_lines_in_another_order_change_no_figure(copy: Path) -> None:
    run = RunDir.open(copy)
    before = summary.summarise(run)
    for name in ("requests.jsonl", "counters.jsonl"):
        lines = (copy / name).read_text().splitlines(keepends=True)
        random.Random(5).shuffle(lines)
        (copy / name).write_text("".join(lines))
    assert summary.summarise(run) == before


def test_a_clock_that_jumps_back_is_said_and_survived(copy: Path, sound: Path) -> None:
    rows = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    for row in rows[len(rows) // 2 :]:
        row["at_ns"] -= 10**15
    (copy / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(copy, sound) == []
    found = [str(d) for d in verify.verify(RunDir.open(copy))]
    assert any("events.jsonl" in line and "is before" in line for line in found)


@pytest.mark.parametrize("gone", ["requests.jsonl", "counters.jsonl", "events.jsonl"])
def test_a_stream_that_is_no_file(copy: Path, sound: Path, gone: str) -> None:
    (copy / gone).unlink()
    (copy / gone).mkdir()
    assert all(gone in message for message in read(copy, sound))
    (copy / gone).rmdir()
    (copy / gone).write_bytes(b"\xff\xfe\x00\n" * 3)
    assert all(gone in message for message in read(copy, sound))
    assert any(gone in str(d) for d in verify.verify(RunDir.open(copy)))


@pytest.mark.parametrize("name", ["SHA256SUMS", "summary.json", "manifest.json"])
@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"7", b"[" * 99_999, None])
def test_derived_files_that_are_junk(
    copy: Path, sound: Path, name: str, content: bytes | None
) -> None:
    (copy / name).unlink()
    if content is None:
        (copy / name).mkdir()
    else:
        (copy / name).write_bytes(content)
    refused = read(copy, sound)
    if name == "manifest.json":
        assert len(refused) == 4
    elif not refused:
        assert verify.verify(RunDir.open(copy))


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../../elsewhere"},
        {"run": "/etc/x"},
        {"run": ""},
        {"run": None},
        {"arms": ["baseline", "baseline"]},
        {"arms": ["baseline"]},
        {"arms": [1, 2]},
        {"schema": True},
        {"schema": 0},
        {"profile": []},
        {"seeds": {"bootstrap": "x"}},
        {"host": {"proxy_variables": [None]}},
        {"host": {"memory_gib": "9" * 50}},
        {"commands": "rm"},
    ],
    ids=str,
)
def test_a_manifest_of_another_kind_is_refused(
    copy: Path, sound: Path, change: dict[str, Any]
) -> None:
    path = copy / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert len(read(copy, sound)) == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workload.contexts", 10**9),
        ("workload.contexts", 0),
        ("workload.context_tokens", "1121"),
        ("cache.chunk_tokens", 0),
        ("cache.chunk_tokens", -224),
        ("experiments.two_round.repeats", 10**12),
        ("experiments.two_round", None),
        ("engine.flags", {"tensor-parallel-size": "two"}),
        ("correctness", None),
        ("correctness", {}),
        ("thresholds", {"external_share_min": "high"}),
        ("workload", []),
    ],
)
def test_a_profile_that_was_never_run_is_refused(
    copy: Path, sound: Path, key: str, value: Any
) -> None:
    tree = json.loads((copy / "manifest.json").read_text())
    *parents, last = key.split(".")
    section = tree["profile"]
    for parent in parents:
        section = section[parent]
    section[last] = value
    (copy / "manifest.json").write_text(json.dumps(tree))
    messages = read(copy, sound)
    if key == "correctness":
        assert messages == []
        return
    assert len(messages) == 4
    assert "is not whole" in messages[0]


def test_hostile_names_stay_text(copy: Path) -> None:
    tree = json.loads((copy / "manifest.json").read_text())
    tree["profile"]["name"] = "<script>alert(1)</script>"
    tree["profile"]["title"] = "{{ 7 * 7 }}"
    tree["host"] = {"cpu": {"model": "</style><b>"}, "gpus": ["<i>"]}
    (copy / "manifest.json").write_text(json.dumps(tree))
    found = report.load(RunDir.open(copy))
    for lang in ("tr", "zh", "en"):
        page = report.render(found, genre="technical", lang=lang)
        assert "<script>alert" not in page
        assert "</style><b>" not in page
        assert ">49<" not in page


@pytest.mark.parametrize("left", ["nothing", "fill of baseline", "baseline", "all but one"])
def test_parts_of_a_run(tmp_path: Path, sound: Path, left: str) -> None:
    """An empty run, and runs that died early or late: invalid, and no figure is made up."""

    def keeps(scenario: str | None, round_name: str | None) -> bool:
        if left == "nothing":
            return False
        if left == "fill of baseline":
            return scenario == "baseline" and round_name in ("fill", "warmup")
        return scenario == "baseline" or left != "baseline"

    def edit(record: Any) -> Any:
        scenario, round_name = record.scenario, getattr(record, "round", None)
        if isinstance(record, RequestRecord):
            last = (scenario, round_name, record.index) == ("lmcache", "measure", 2)
            return record if keeps(scenario, round_name) and not last else None
        return record if scenario is None or keeps(scenario, round_name) else None

    run = make_run(tmp_path, repeats=1, contexts=3, edit=edit, seal=False)
    run.update_manifest(status="partial")
    assert read(run.path, sound, pages=True) == []
    result = summary.summarise(run)
    assert result["verdict"]["status"] == "invalid"
    assert result["status"] == "partial"
    assert verify.verify(RunDir.open(run.path)) == []
    if left in ("nothing", "fill of baseline", "baseline"):
        assert result["speedup"] == {}
        assert "median" not in result["ttft_ms"]["lmcache"]


def test_no_run_folder_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": 1}')
    with pytest.raises(RunFolderError, match="names no run"):
        RunDir.open(tmp_path)
