"""The command line: exit codes, one-sentence errors, JSON where a script wants it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab import summary
from tests.builders import make_run

COMMANDS = (
    *("profiles", "check", "plan", "run", "report", "verify", "compare", "reproduce", "engine"),
    *("clean", "predict", "gates"),
)


def kvlab(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvlab.cli", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = kvlab(command, "--help")
    assert done.returncode == 0
    assert f"Example: kvlab {command}" in " ".join(done.stdout.split())


def test_profiles_are_listed_one_line_each() -> None:
    done = kvlab("profiles")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        *(
            "attach",
            "dgx-spark",
            "embedded",
            "embedded-665",
            "embedded-docker",
            "embedded-read",
            "mi308x",
            "smoke",
        )
    ]
    assert {p["name"] for p in json.loads(kvlab("profiles", "--json").stdout)} >= {"embedded"}
    assert "chunk_tokens: 224" in kvlab("profiles", "--show", "embedded").stdout


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["plan", "embeded"], "there is no profile 'embeded'", "did you mean 'embedded'"),
        (["plan", "--set", "workload.contxts=1"], "unknown key", "did you mean 'contexts'"),
        (["plan", "--set", "oops"], "not of the form key=value", "--set workload.contexts=8"),
        (["plan", "--scenario", "both"], "there is no scenario 'both'", "baseline"),
        (["run", "tworound"], "there is no experiment 'tworound'", "two-round"),
        (["run", "two-round", "smoke", "--pull"], "starts no containers", "leave --pull out"),
        (["run", "two-round", "--resume", "nowhere"], "not a run folder", "data/runs"),
        (["run", "restart", "attach"], "on an attached deployment", "two-round, acceptance"),
        (["verify", "nowhere"], "not a run folder", "data/runs"),
        (["report", "nowhere"], "not a run folder", "data/runs"),
    ],
)
def test_wrong_use_is_one_sentence_a_hint_and_exit_2(
    words: list[str], said: str, hint: str, tmp_path: Path
) -> None:
    done = kvlab(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_reading_a_sound_run(tmp_path: Path) -> None:
    run = _concluded(tmp_path)
    done = kvlab("verify", str(run))
    assert (done.returncode, done.stdout) == (0, f"{run}: verified\n")
    done = kvlab("report", str(run), "--lang", "zh", "--out", str(tmp_path / "pages"))
    assert done.returncode == 0
    page, index = map(Path, done.stdout.split())
    assert page.is_file()
    assert index.is_file()
    done = kvlab("verify", str(page), "--runs", str(run.parent))
    assert (done.returncode, done.stdout) == (0, f"{page}: verified\n")
    assert kvlab("compare", str(run), str(run)).returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "codes"),
    [
        ("manifest.json", "{", (2, 2, 2)),
        ("manifest.json", '{"schema": 1, "run": "../../x"}', (2, 2, 2)),
        ("manifest.json", '{"schema": 1, "run": "x", "status": "partial"}', (2, 2, 2)),
        ("requests.jsonl", '{"queued_ns": NaN}\n{}\n', (1, 2, 2)),
        ("counters.jsonl", "[" * 99_999 + "\n{}\n", (1, 2, 2)),
        ("events.jsonl", '{"at_ns": 1e999, "kind": "x"}\n{}\n', (1, 2, 2)),
        ("requests.jsonl", "", (1, 0, 0)),
        ("summary.json", "[]", (1, 0, 0)),
    ],
)
def test_reading_a_damaged_run_is_one_sentence(
    tmp_path: Path, name: str, content: str, codes: tuple[int, int, int]
) -> None:
    run = _concluded(tmp_path)
    (run / name).write_text(content)
    words = (
        ["verify", str(run)],
        ["report", str(run), "--lang", "en", "--out", str(tmp_path / "pages")],
        ["compare", str(run), str(run), "--different-hosts"],
    )
    for each, code in zip(words, codes, strict=True):
        done = kvlab(*each)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        if code == 2:
            assert done.stderr.startswith("kvlab: ")
            assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
                "kvlab",
                "hint",
            ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--lang", ","], 2, "no language is named"),
        (["--lang", "tr,de"], 2, "no language 'de'"),
        (["--genre", "novel"], 2, "no report genre 'novel'"),
        (["--out", "taken"], 1, "taken"),
    ],
)
def test_a_report_that_cannot_be_written(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    run = _concluded(tmp_path)
    (tmp_path / "taken").write_text("a file")
    done = kvlab("report", str(run), *words, cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def _concluded(tmp_path: Path) -> Path:
    run = make_run(tmp_path, repeats=1, contexts=3)
    summary.conclude(run)
    return run.path


def test_a_missing_engine_is_named_with_the_command_that_builds_it(tmp_path: Path) -> None:
    # A lock of its own: a real measurement may be going on.
    env = {"KVLAB_ENGINE": str(tmp_path / "none"), "TMPDIR": str(tmp_path)}
    done = kvlab("run", "two-round", "smoke", cwd=tmp_path, **env)
    assert done.returncode == 2
    assert "make engine" in done.stderr
    assert "Traceback" not in done.stderr


def test_plans_are_printed_as_text_shell_and_json() -> None:
    assert "# scenario lmcache" in kvlab("plan", "dgx-spark").stdout
    shell = kvlab("plan", "dgx-spark", "--shell", "--as-published").stdout
    assert shell.startswith("docker run -d --name bench-vllm-off")
    assert "#" not in shell
    plans = json.loads(kvlab("plan", "embedded", "--json").stdout)
    assert [p["scenario"] for p in plans] == ["baseline", "lmcache"]


def test_check_finds_the_cautions_of_the_published_settings() -> None:
    found = json.loads(kvlab("check", "dgx-spark", "--json").stdout)
    assert {f["id"] for f in found} >= {"KV004", "KV005", "KV006"}
    done = kvlab("check", "embedded", "--set", "engine.max_num_batched_tokens=2048", "--json")
    assert "KV002" in {f["id"] for f in json.loads(done.stdout)}


def test_check_reads_logs_and_says_what_it_took_as_given(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("Setting attention block size to 448 tokens to ensure that\n")
    done = kvlab("check", "embedded", "--log", str(log), cwd=tmp_path)
    assert done.returncode == 1
    assert "N: 448 (vLLM's log says so)" in done.stdout
    assert "error   KV010  cache.chunk_tokens 224 is no multiple of the block of 448" in done.stdout
    assert "--set cache.chunk_tokens=448" in done.stdout
    assert "vllm: --max-num-batched-tokens 895" in done.stdout
    log.write_text("Setting attention block size to 224 tokens to ensure that\n")
    done = kvlab("check", "embedded", "--log", str(log), "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert not [one for one in json.loads(done.stdout) if one["severity"] == "error"]


def test_check_for_another_machine_reads_its_manifest(tmp_path: Path) -> None:
    run = make_run(tmp_path, repeats=1, contexts=3).path
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["host"] = {**(manifest.get("host") or {}), "memory_gib": 2.0, "limits": {}}
    there = tmp_path / "manifest.json"
    there.write_text(json.dumps(manifest))
    done = kvlab("check", "embedded", "--host", str(there), "--json", cwd=tmp_path)
    assert "KV040" in {one["id"] for one in json.loads(done.stdout)}
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--log", "none.log"], "cannot read the log none.log: No such file"),
        (["--log", "."], "cannot read the log .: Is a directory"),
        (["--host", "none.json"], "cannot read the host facts none.json"),
        (["--host", "text.json"], "are not JSON"),
        (["--host", "empty.json"], "holds no facts of a machine"),
        (["--experiment", "tworound"], "there is no experiment 'tworound'"),
    ],
)
def test_check_refuses_what_it_cannot_read(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    done = kvlab("check", "embedded", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
