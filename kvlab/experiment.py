"""Running one experiment on one profile: everything between a profile and a full run folder.

The measuring half ends here. What the records mean is for ``kvlab.summary``.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab import __version__, host, preflight, profile, progress, prompts, rundir, runtime
from kvlab.errors import KvlabError, RunFolderError, UsageError
from kvlab.profile import Profile
from kvlab.records import Event, now_ns
from kvlab.rundir import RunDir
from kvlab.runtime import Launcher
from kvlab.stack import Launch, plan
from kvlab.workloads import (
    acceptance,
    eviction,
    object_groups,
    parallel_read,
    restart,
    shared_cache,
    soak,
    storage_test,
    two_round,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an experiment runs: its workload, its arms, and the steps that its progress counts."""

    workload: Callable[..., Awaitable[None]]
    """See ``workloads.Workload``."""
    arms: tuple[str, ...] | Callable[[Profile], tuple[str, ...]]
    """Their names, or how they follow from the profile."""
    control: tuple[str, ...] | None = None
    """The arms of its A/A control, where it has one."""
    order: Callable[[Profile, Sequence[str]], list[tuple[int, str]]]
    """The (repeat, arm) pairs in the order in which they run."""
    steps: Callable[[Profile, Sequence[str], int | None], Counter[str]]
    """The steps of these arms: of every repeat, or of so many."""
    own_folder: bool = False
    """Whether the workload is also given the run's folder, as ``folder``: it lays files there."""
    servers: bool = True
    """Whether it starts any: only then must the engine and the model be there."""
    pace_s: Callable[[Profile], dict[str, float]] = lambda _: {}
    """Seconds of steps that come at a set rate."""

    def chosen_arms(self, profile: Profile) -> tuple[str, ...]:
        """The arms on this profile."""
        return self.arms(profile) if callable(self.arms) else self.arms

    def forecast(self, profile: Profile, arms: Sequence[str]) -> progress.Forecast:
        """How long these arms will take, before anything was measured."""
        return progress.Forecast(self.steps(profile, arms, None), self.pace_s(profile))


RECIPES: dict[str, Recipe] = {
    "two-round": Recipe(
        workload=two_round.two_round,
        arms=two_round.arms,
        control=("baseline", "control"),
        order=lambda profile, arms: two_round.order(arms, profile.experiments.two_round.repeats),
        steps=two_round.steps,
    ),
    "restart": Recipe(
        workload=restart.restart,
        arms=restart.ARMS,
        order=restart.order,
        steps=restart.steps,
    ),
    "object-groups": Recipe(
        workload=object_groups.object_groups,
        arms=object_groups.ARMS,
        order=object_groups.order,
        steps=object_groups.steps,
    ),
    "acceptance": Recipe(
        workload=acceptance.acceptance,
        arms=acceptance.ARMS,
        order=acceptance.order,
        steps=acceptance.steps,
    ),
    "shared-cache": Recipe(
        workload=shared_cache.shared_cache,
        arms=("shared",),
        order=shared_cache.order,
        steps=shared_cache.steps,
    ),
    "eviction": Recipe(
        workload=eviction.eviction,
        arms=eviction.arms,
        order=eviction.order,
        steps=eviction.steps,
    ),
    "parallel-read": Recipe(
        workload=parallel_read.parallel_read,
        arms=parallel_read.arms,
        order=parallel_read.order,
        steps=parallel_read.steps,
        own_folder=True,
    ),
    "storage": Recipe(
        workload=storage_test.storage_test,
        arms=storage_test.arms,
        order=storage_test.order,
        steps=storage_test.steps,
        own_folder=True,
        servers=False,
    ),
    "soak": Recipe(
        workload=soak.soak,
        arms=("soak",),
        order=soak.order,
        steps=soak.steps,
        pace_s=soak.pace_s,
    ),
}


def run(
    experiment: str,
    profile_name: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    runs: Path = Path("data/runs"),
    resume: Path | None = None,
    control: bool = False,
) -> RunDir:
    """The folder of a complete run; see ``run_async``. SIGINT and SIGTERM stop it in order."""
    return asyncio.run(
        _cancel_on_sigterm(
            run_async(
                experiment,
                profile_name,
                overrides=overrides,
                runs=runs,
                resume=resume,
                control=control,
            )
        )
    )


async def run_async(
    experiment: str,
    profile_name: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    runs: Path = Path("data/runs"),
    resume: Path | None = None,
    control: bool = False,
    launcher: Launcher | None = None,
) -> RunDir:
    """The folder of a complete run of ``experiment`` (``two-round``) on a profile.

    ``resume`` continues an interrupted run at the first arm that is missing, with its own profile
    and nonce. ``control`` compares the baseline with itself. ``launcher`` replaces the profile's
    runtime; tests hand in theirs. A run that does not finish is kept and marked ``partial``.
    """
    recipe = _recipe(experiment, control=control)
    runs = rundir.from_home(runs)
    if resume is not None:
        manifest = _resumable(resume, experiment).manifest
        chosen = profile.from_dict(manifest["profile"], f"profile of {resume}")
    else:
        chosen = profile.load(profile_name, overrides, experiment=experiment)
    wanted = runtime.of(chosen) if launcher is None and recipe.servers else None
    if wanted:
        wanted.refuse(chosen, experiment, control)
    with host.exclusive():
        prepared = wanted.prepare(chosen, runs) if wanted else {"model": None}
        if wanted:
            preflight.refuse(preflight.check(chosen, experiments=(experiment,), runs=runs))
        _mark_dead(runs)
        if resume is not None:
            folder = _reopen(_resumable(resume, experiment))
        else:
            manifest = _manifest(experiment, recipe, chosen, prepared, runs, control=control)
            folder = RunDir.create(runs, manifest)
        launch = None
        if recipe.servers:
            launch = (launcher or runtime.of(chosen).launcher)(chosen, folder)
        try:
            await _measure(recipe, chosen, folder, launch)
        finally:
            if wanted:
                _remember_block(chosen, folder, runs)
    return folder


def _remember_block(chosen: Profile, folder: RunDir, runs: Path) -> None:
    """Keep N as vLLM's log stated it, for the next preflight of the same configuration."""
    for event in folder.events():
        tokens = (event.detail.get("facts") or {}).get("block_tokens")
        if event.kind == "ready" and isinstance(tokens, int):
            facts = folder.manifest.get("host") or {}
            preflight.keep(runs, chosen, facts, preflight.Seen(tokens, folder.id))
            return


def refuse_unknown(experiment: str) -> None:
    """Raise UsageError when there is no such experiment."""
    if experiment not in RECIPES:
        raise UsageError(
            f"there is no experiment {experiment!r}", hint=f"known: {', '.join(RECIPES)}"
        )


def _recipe(experiment: str, *, control: bool) -> Recipe:
    refuse_unknown(experiment)
    recipe = RECIPES[experiment]
    if control and recipe.control is None:
        raise UsageError(f"{experiment} has no control", hint="leave --control out")
    return recipe


def forecast(experiment: str, chosen: Profile) -> progress.Forecast:
    """How long an experiment will take on a profile, before anything was measured."""
    recipe = _recipe(experiment, control=False)
    return recipe.forecast(chosen, recipe.chosen_arms(chosen))


async def _measure(recipe: Recipe, chosen: Profile, folder: RunDir, launch: Launch | None) -> None:
    arms = tuple(folder.manifest["arms"])
    finished = folder.finished_arms()
    with _kept(folder), _watched(recipe, chosen, folder, finished):
        own = {"folder": folder.path} if recipe.own_folder else {}
        await recipe.workload(
            chosen,
            launch,
            folder.append,
            nonce=prompts.of_part(chosen, folder.manifest),
            arms=arms,
            done=finished,
            **own,
        )


@contextmanager
def _kept(folder: RunDir) -> Iterator[None]:
    """Whatever happens, the folder says how the run ended and its files are closed."""
    status = "partial"
    folder.append(Event(at_ns=now_ns(), kind="run_started"))
    try:
        yield
        folder.make_streams()
        status = "complete"
    except KvlabError as error:
        detail = {"error": error.message, "hint": error.hint}
        folder.append(Event(at_ns=now_ns(), kind="failure", detail=detail))
        raise
    except BaseException as error:
        detail = {"error": type(error).__name__, "hint": "continue with --resume"}
        folder.append(Event(at_ns=now_ns(), kind="failure", detail=detail))
        raise
    finally:
        folder.on_append = None
        folder.append(Event(at_ns=now_ns(), kind="run_finished", detail={"status": status}))
        with suppress(OSError):  # records that a workload keeps are its own to remove
            (folder.path / "l2").rmdir()
        folder.update_manifest(status=status, host_after=host.facts(folder.path))
        folder.seal()


@contextmanager
def _watched(
    recipe: Recipe, chosen: Profile, folder: RunDir, finished: set[tuple[int, str]]
) -> Iterator[None]:
    forecast = recipe.forecast(chosen, folder.manifest["arms"])
    for _, arm in finished:
        forecast.planned.subtract(recipe.steps(chosen, [arm], 1))
    with progress.display() as display:
        display(folder.id, forecast)
        folder.on_append = progress.Watcher(forecast, folder.manifest["experiment"], display)
        yield


def _resumable(path: Path, experiment: str) -> RunDir:
    """The interrupted run at ``path``; RunFolderError when it cannot be continued here."""
    folder = RunDir.open(path)
    missing = [key for key in ("profile", "arms", "nonce") if folder.manifest.get(key) is None]
    if missing:
        raise RunFolderError(
            f"the manifest of {path} is not whole: it lacks {', '.join(missing)}",
            hint="restore manifest.json from a copy, or measure anew without --resume",
        )
    if folder.manifest.get("status") == "complete":
        raise RunFolderError(
            f"{path} is complete: there is nothing to resume",
            hint="read it with `kvlab report`, or measure anew without --resume",
        )
    if folder.manifest.get("experiment") != experiment:
        raise RunFolderError(
            f"{path} is a run of {folder.manifest.get('experiment')}, not of {experiment}",
            hint=f"kvlab run {folder.manifest.get('experiment')} --resume {path}",
        )
    if folder.manifest.get("fingerprint") not in (None, host.fingerprint(host.facts(path))):
        raise RunFolderError(
            f"{path} was begun on another machine, whose times do not go with those of this one",
            hint="resume it there, or measure anew without --resume",
        )
    return folder


def _mark_dead(runs: Path) -> None:
    """Runs that say they are running while this process holds the machine were killed.

    Those of another machine, on a shared disk, may well be alive.
    """
    here = None
    for path in runs.glob("*/manifest.json"):
        with suppress(KvlabError):  # a damaged folder is not ours to mend
            folder = RunDir.open(path.parent)
            if folder.manifest.get("status") == "running":
                here = here or host.fingerprint(host.facts(runs))
                if folder.manifest.get("fingerprint") == here:
                    folder.update_manifest(status="partial")


def _reopen(folder: RunDir) -> RunDir:
    folder.reopen()
    folder.set_aside_unfinished()
    shutil.rmtree(folder.path / "l2", ignore_errors=True)  # of the arm that was cut short
    clocks = [*folder.manifest.get("clocks", []), rundir.clock_anchor()]
    resumed = int(folder.manifest.get("resumed", 0)) + 1
    folder.update_manifest(status="running", clocks=clocks, resumed=resumed)
    return folder


def _manifest(
    experiment: str,
    recipe: Recipe,
    chosen: Profile,
    prepared: dict[str, Any],
    runs: Path,
    *,
    control: bool,
) -> dict[str, Any]:
    runs.mkdir(parents=True, exist_ok=True)
    arms = (recipe.control or ()) if control else recipe.chosen_arms(chosen)
    l2 = chosen.cache.l2
    facts = host.facts(runs, Path(l2.base_path) if l2 and l2.base_path and chosen.fresh else None)
    return {
        "run": rundir.run_id(experiment, chosen.name, chosen.sha256, datetime.now(UTC)),
        "kvlab_version": __version__,
        "experiment": experiment,
        "profile": chosen.as_dict(),
        "profile_sha256": chosen.sha256,
        "arms": list(arms),
        "control": control,
        "order": [[repeat, arm] for repeat, arm in recipe.order(chosen, arms)],
        "nonce": chosen.workload.nonce or prompts.new_nonce(),
        "seeds": {"prompts": chosen.workload.seed, "bootstrap": 0},
        "clocks": [rundir.clock_anchor()],
        "host": facts,
        "fingerprint": host.fingerprint(facts),
        **prepared,
        "connector": {
            "name": chosen.engine.connector,
            "reason": plan.CONNECTOR_REASONS[chosen.engine.connector],
        }
        if chosen.fresh
        else None,
        "commands": {
            arm: [plan.shell_command(service) for service in plan.plan(chosen, arm).services]
            for arm in arms
            if arm in plan.SCENARIOS and chosen.fresh
        },
    }


async def _cancel_on_sigterm(work: Any) -> RunDir:
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    result: RunDir = await task
    return result
