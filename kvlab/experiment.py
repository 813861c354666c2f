"""Running one experiment on one profile: everything between a profile and a full run folder.

The measuring half ends here. What the records mean is for ``kvlab.summary``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kvlab import __version__, host, model, profile, progress, prompts, rundir
from kvlab.errors import HostBusy, KvlabError, RunFolderError, UsageError
from kvlab.profile import Profile
from kvlab.records import Event, now_ns
from kvlab.rundir import RunDir
from kvlab.stack import Launch, plan, process
from kvlab.units import byte_size
from kvlab.workloads.two_round import order, two_round

Launcher = Callable[[Profile, RunDir], Launch]
EXPERIMENTS = ("two-round",)
ARMS = ("baseline", "lmcache")
CONTROL_ARMS = ("baseline", "control")
DISK_MARGIN = 1.3


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
    if experiment not in EXPERIMENTS:
        raise UsageError(
            f"there is no experiment {experiment!r}", hint=f"known: {', '.join(EXPERIMENTS)}"
        )
    if resume is not None:
        folder = _reopen(resume)
        chosen = profile.from_dict(folder.manifest["profile"], f"profile of {resume}")
    else:
        chosen = profile.load(profile_name, overrides)
        folder = None
    if launcher is None and chosen.runtime != "process":
        raise UsageError(
            f"this version starts processes only; profile {chosen.name} asks for runtime "
            f"{chosen.runtime}",
            hint=f"see what it would start: kvlab plan {chosen.name}",
        )
    with host.exclusive():
        served = None
        if launcher is None:
            served = model.ensure(chosen, _models_folder(runs))
            _check_disk(chosen, served, runs)
        if folder is None:
            arms = CONTROL_ARMS if control else ARMS
            folder = RunDir.create(runs, _manifest(experiment, chosen, arms, served, runs))
        await _measure(chosen, folder, (launcher or _process_launcher)(chosen, folder))
    return folder


async def _measure(chosen: Profile, folder: RunDir, launch: Launch) -> None:
    arms = tuple(folder.manifest["arms"])
    finished = folder.finished_arms()
    with _kept(folder), _watched(chosen, folder, arms, finished):
        await two_round(
            chosen,
            launch,
            folder.append,
            nonce=folder.manifest["nonce"],
            arms=arms,
            done=finished,
        )


@contextmanager
def _kept(folder: RunDir) -> Iterator[None]:
    """Whatever happens, the folder says how the run ended and its files are closed."""
    status = "partial"
    folder.append(Event(at_ns=now_ns(), kind="run_started"))
    try:
        yield
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
        folder.update_manifest(status=status, host_after=host.facts(folder.path))
        folder.seal()


@contextmanager
def _watched(
    chosen: Profile, folder: RunDir, arms: tuple[str, ...], finished: set[tuple[int, str]]
) -> Iterator[None]:
    setup = chosen.experiments.two_round
    steps = progress.two_round_steps(
        arms, setup.repeats, setup.warmup_requests, chosen.workload.contexts
    )
    for _, arm in finished:
        one = progress.two_round_steps((arm,), 1, setup.warmup_requests, chosen.workload.contexts)
        steps.subtract(one)
    with progress.display() as display:
        folder.on_append = progress.Watcher(progress.Forecast(steps), folder.id, display)
        yield


def _reopen(path: Path) -> RunDir:
    folder = RunDir.open(path)
    if folder.manifest.get("status") == "complete":
        raise RunFolderError(
            f"{path} is complete: there is nothing to resume",
            hint="read it with `kvlab report`, or measure anew without --resume",
        )
    folder.set_aside_unfinished()
    shutil.rmtree(folder.path / "l2", ignore_errors=True)  # of the arm that was cut short
    clocks = [*folder.manifest.get("clocks", []), rundir.clock_anchor()]
    resumed = int(folder.manifest.get("resumed", 0)) + 1
    folder.update_manifest(status="running", clocks=clocks, resumed=resumed)
    return folder


def _manifest(
    experiment: str,
    chosen: Profile,
    arms: tuple[str, ...],
    served: dict[str, Any] | None,
    runs: Path,
) -> dict[str, Any]:
    runs.mkdir(parents=True, exist_ok=True)
    setup = chosen.experiments.two_round
    facts = host.facts(runs)
    return {
        "run": rundir.run_id(experiment, chosen.name, chosen.sha256, datetime.now(UTC)),
        "kvlab_version": __version__,
        "experiment": experiment,
        "profile": chosen.as_dict(),
        "profile_sha256": chosen.sha256,
        "arms": list(arms),
        "control": arms == CONTROL_ARMS,
        "order": [[repeat, arm] for repeat, arm in order(arms, setup.repeats)],
        "nonce": chosen.workload.nonce or prompts.new_nonce(),
        "seeds": {"prompts": chosen.workload.seed, "bootstrap": 0},
        "clocks": [rundir.clock_anchor()],
        "host": facts,
        "fingerprint": host.fingerprint(facts),
        "model": served,
        "connector": {
            "name": chosen.engine.connector,
            "reason": plan.CONNECTOR_REASONS[chosen.engine.connector],
        },
        "commands": {
            arm: [plan.shell_command(service) for service in plan.plan(chosen, arm).services]
            for arm in arms
        },
    }


def _process_launcher(chosen: Profile, folder: RunDir) -> Launch:
    return partial(
        process.launch,
        chosen,
        run=folder,
        models=_models_folder(folder.path.parent),
        nonce=folder.manifest["nonce"],
    )


def _models_folder(runs: Path) -> Path:
    """Where built models are kept: beside the runs."""
    return Path(os.environ.get("KVLAB_MODELS", runs.parent / "models")).resolve()


def _check_disk(chosen: Profile, served: dict[str, Any], runs: Path) -> None:
    """Refuse a run whose L2 records would not fit; unknown record sizes are not guessed."""
    chunk_bytes = served.get("chunk_bytes")
    if chunk_bytes is None or chosen.cache.l2 is None:
        return
    place = Path(chosen.cache.l2.base_path or runs)
    while not place.exists():
        place = place.parent
    chunks = -(-chosen.workload.context_tokens // chosen.cache.chunk_tokens)
    needed = int(2 * chosen.workload.contexts * chunks * chunk_bytes * DISK_MARGIN)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise HostBusy(
            f"the records of one repeat need about {byte_size(needed)} in {place}, "
            f"where {byte_size(free)} are free",
            hint="free some space, set cache.l2.base_path to a larger disk, or ask fewer contexts",
        )


async def _cancel_on_sigterm(work: Any) -> RunDir:
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    result: RunDir = await task
    return result
