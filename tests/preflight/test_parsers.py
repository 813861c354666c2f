"""What is handed to the engine's parsers, and what becomes of their answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab import preflight, profile
from kvlab.errors import EngineMissing
from kvlab.preflight import parsers

ANSWER = {
    "versions": {"vLLM": "0.32.0", "LMCache": "0.5.6"},
    "refused": [
        {
            "service": "vllm",
            "word": "--max-num-seq",
            "problem": "unknown flag",
            "nearest": "--max-num-seqs",
        }
    ],
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine environment whose Python prints a set answer and keeps what it was asked."""
    home = tmp_path / "engine"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("KVLAB_ENGINE", str(home))
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    _answer(home, json.dumps(ANSWER))
    return home


def _answer(home: Path, text: str, code: int = 0) -> None:
    python = home / "bin" / "python"
    python.write_text(f"#!/bin/sh\ncat > {home}/asked\nprintf '%s\\n' '{text}'\nexit {code}\n")
    python.chmod(0o755)


def test_the_flags_of_both_scenarios_are_asked_about(engine: Path) -> None:
    parsers.parse(profile.load("embedded"))
    asked = json.loads((engine / "asked").read_text())
    baseline, cached = asked["vllm"]
    assert baseline[:2] == ["--model", "hybrid-4l-s0"]
    assert "--kv-transfer-config" not in baseline
    assert "--kv-transfer-config" in cached
    assert asked["lmcache"][0][:2] == ["--host", "127.0.0.1"]
    assert "<free port>" not in str(asked)


def test_a_models_name_before_the_flags_is_left_out() -> None:
    asked = parsers.commands(profile.load("dgx-spark"))
    assert [words[0] for words in asked["vllm"]] == ["--host", "--host"]
    assert asked["lmcache"][0][0] == "--host"


def test_what_they_refuse_is_a_finding(engine: Path, tmp_path: Path) -> None:
    case = preflight.gather(profile.load("embedded"), runs=tmp_path / "runs", against_engine=True)
    found = next(one for one in preflight.evaluate(case) if one.id == "KV083")
    assert "vllm: --max-num-seq: unknown flag (vLLM 0.32.0 and LMCache 0.5.6 in" in found.found
    assert "--max-num-seqs" in found.fix


def test_a_containers_flags_are_parsed_in_its_image(engine: Path, tmp_path: Path) -> None:
    docker = tmp_path / "tools" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        f'#!/bin/sh\n[ "$1" = image ] && exit 0\necho "$@" > {tmp_path}/ran\ncat > /dev/null\n'
        f"""printf '%s\\n' '{json.dumps(ANSWER)}'\n"""
    )
    docker.chmod(0o755)
    _, whose = parsers.parse(profile.load("dgx-spark"))
    assert whose == "vLLM 0.32.0 and LMCache 0.5.6 in vllm/vllm-openai:latest"
    ran = (tmp_path / "ran").read_text()
    assert "--network none" in ran
    assert "--entrypoint python3 vllm/vllm-openai:latest /kvlab-flags.py" in ran
    docker.write_text("#!/bin/sh\nexit 1\n")  # docker has no such image
    assert "engine environment" in parsers.parse(profile.load("dgx-spark"))[1]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, "could not be asked: IndexError"),
        ("no JSON", 0, "could not be asked: JSONDecodeError"),
        ("{}", 0, "answered something else"),
        ("{}", 1, "could not be asked"),
    ],
)
def test_parsers_that_do_not_answer_are_one_sentence(
    engine: Path, text: str, code: int, said: str
) -> None:
    _answer(engine, text, code)
    if not text:
        (engine / "bin" / "python").write_text("#!/bin/sh\ncat > /dev/null\n")
    with pytest.raises(EngineMissing, match=said) as error:
        parsers.parse(profile.load("embedded"))
    assert "make engine" in str(error.value.hint)
