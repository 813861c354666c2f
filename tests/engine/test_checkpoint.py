import json
import subprocess
from pathlib import Path

import pytest

from kvlab import environment

pytestmark = pytest.mark.engine


def build(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(environment.engine_python()), "-m", "kvlab.engine.checkpoint"]
    command += ["--out", str(out), "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=out.parent)


def manifest_of(out: Path, *arguments: str) -> dict:
    done = build(out, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("models") / "hybrid"
    return out, manifest_of(out)


def test_the_manifest_states_the_geometry(hybrid):
    out, manifest = hybrid
    assert manifest["built"] is True
    assert manifest["recipe"]["layers"] == 2
    cache = manifest["recipe"]["cache"]
    assert cache["attention_block_tokens"] == 224
    assert cache["page_bytes"] == cache["state_page_bytes"] == 71_680
    assert cache["kv_bytes_per_token"] == 320
    assert json.loads((out / "config.json").read_text())["head_dim"] == 80
    assert len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]) == 4096


def test_the_same_seed_gives_the_same_files(hybrid, tmp_path):
    _, manifest = hybrid
    assert manifest_of(tmp_path / "again")["sha256"] == manifest["sha256"]


def test_another_seed_gives_other_weights(hybrid, tmp_path):
    _, manifest = hybrid
    other = manifest_of(tmp_path / "other", "--seed", "1")["sha256"]
    weights = "model.safetensors"
    assert other.pop(weights) != manifest["sha256"][weights]
    assert other == {name: sha for name, sha in manifest["sha256"].items() if name != weights}


def test_a_complete_model_is_left_alone_and_a_tampered_one_is_built_again(hybrid):
    out, manifest = hybrid
    assert manifest_of(out)["built"] is False
    with (out / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x7f")
    (out / "stray.txt").write_text("not ours")
    repaired = manifest_of(out)
    assert repaired["built"] is True
    assert repaired["sha256"] == manifest["sha256"]
    assert not (out / "stray.txt").exists()
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_the_dense_model_fills_two_mebibytes_with_256_tokens(tmp_path):
    cache = manifest_of(tmp_path / "dense", "--preset", "dense")["recipe"]["cache"]
    assert cache["kv_bytes_per_token"] * 256 == 2 << 20
    assert cache["state_page_bytes"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--preset", "huge"), "there is no preset 'huge'\nhint: use one of hybrid, dense"),
        (("--layers", "3"), "cannot alternate"),
        (("--layers", "0"), "cannot alternate"),
        (("--preset", "dense", "--layers", "0"), "no model"),
        (("--seed", "-1"), "no seed"),
    ],
)
def test_a_wrong_wish_is_refused_in_a_sentence(tmp_path, arguments, says):
    done = build(tmp_path / "model", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_touched(tmp_path):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    done = build(out)
    assert done.returncode == 2
    assert "holds files, but no kvlab-model.json" in done.stderr
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
