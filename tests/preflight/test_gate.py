"""No server starts while an error stands for what is about to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab import experiment, profile, runtime
from kvlab.errors import PreflightFailed
from kvlab.preflight import gather, seen
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.runtime import Runtime
from kvlab.stack import Launch
from tests import fake_stack

HEALTHY = {
    "engine.connector_config": {"lmcache.mp.mp_transfer_mode": "lmcache_driven"},
    "experiments.two_round.repeats": 1,
    "experiments.bill.decode_requests": 0,
    "workload.contexts": 6,
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the profiles for which servers, fake ones, were started."""
    launched: list[str] = []

    def launcher(chosen: Profile, folder: RunDir) -> Launch:
        launched.append(chosen.name)
        return fake_stack.FakeLaunch(
            chosen,
            fake_stack.settings_for(chosen),
            folder=folder.path / "l2",
            record=folder.append,
            nonce=folder.manifest["nonce"],
        )

    fake = Runtime(
        prepare=lambda chosen, runs: {"model": {"name": chosen.model.name}}, launcher=launcher
    )
    monkeypatch.setitem(runtime.RUNTIMES, "process", fake)
    engine = tmp_path / "engine" / "bin" / "python"
    engine.parent.mkdir(parents=True)
    engine.touch()
    monkeypatch.setenv("KVLAB_ENGINE", str(tmp_path / "engine"))
    return launched


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A healthy profile of the fake stack."""
    file = tmp_path / "fake.yaml"
    file.write_text(yaml.safe_dump(fake_stack.profile(HEALTHY).as_dict()), encoding="utf-8")
    return file


async def run(name: str, path: Path, **overrides: Any) -> RunDir:
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return await experiment.run_async(
        name, path, overrides=settings, runs=path.parent / "data" / "runs"
    )


async def test_an_error_stops_a_run_before_any_server(started: list[str], path: Path) -> None:
    with pytest.raises(PreflightFailed, match=r"preflight KV016: .* \(and 1 more\)") as error:
        await run("two-round", path, engine__mamba_cache_mode=None, cache__flags={"chunk-size": 8})
    assert "--set engine.mamba_cache_mode=align" in str(error.value.hint)
    assert not started
    assert not list(path.parent.glob("data/runs/*"))


async def test_what_is_wrong_for_one_experiment_stops_that_one(
    started: list[str], path: Path
) -> None:
    builtin = {"hash-algorithm": "builtin"}
    with pytest.raises(PreflightFailed, match="preflight KV061"):
        await run("restart", path, cache__flags=builtin)
    assert not started
    await run("two-round", path, cache__flags=builtin)
    assert started == ["fake"]


async def test_a_run_keeps_the_n_that_it_saw(started: list[str], path: Path) -> None:
    folder = await run("two-round", path)
    runs = folder.path.parent
    assert (runs.parent / seen.FILE).is_file()
    block = gather(profile.load(path), runs=runs).block
    assert (block.tokens, block.source, block.detail) == (16, "cache", folder.id)
