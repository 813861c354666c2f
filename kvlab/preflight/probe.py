"""What this machine tells about a profile, gathered for the rules: the impure half of preflight."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab import environment, gpu, rundir, runtime
from kvlab import host as hosts
from kvlab.disk import identity
from kvlab.disk.inventory import survey
from kvlab.errors import KvlabError, UsageError
from kvlab.preflight.case import Case, Probe
from kvlab.preflight.parsers import parse
from kvlab.preflight.seen import find
from kvlab.profile import Profile
from kvlab.stack import leftovers, logs, ports
from kvlab.units import GIB

SHM = Path("/dev/shm")  # noqa: S108 - asked for its size
TRIAL_BYTES = 4096 * 16
"""Of the one file that tries O_DIRECT: whole pages and whole device blocks."""
DOCKER_S = 10.0


def gather(
    profile: Profile,
    *,
    logs: Iterable[Path] = (),
    host: Mapping[str, Any] | None = None,
    experiments: Iterable[str] = ("two-round",),
    runs: Path = Path("data/runs"),
    against_engine: bool = False,
) -> Case:
    """The case of a profile on this machine; with ``host`` on that one, where nothing is tried.

    Servers that only are attached to run elsewhere: then this machine's memory, disk and ports say
    nothing. With ``against_engine`` the engine's own parsers read the planned commands.
    """
    runs = rundir.from_home(runs)
    known = dict(host) if host is not None else hosts.facts(_l2_place(profile, runs))
    here = host is None
    if here and profile.runtime == "attach":
        known, here = {"proxy_variables": known["proxy_variables"]}, False
    probe = Probe(config=_config(profile, runtime.models_folder(runs)))
    if here:
        probe = _try_here(probe, profile, runs)
    if (seen := find(runs, profile, known)) is not None:
        probe = replace(probe, cached_block=seen.block_tokens, cached_run=seen.run)
    if against_engine:
        parsed, parsers = parse(profile)
        probe = replace(probe, parsed=parsed, parsers=parsers)
    return Case(
        profile=profile,
        host=known,
        logs=tuple(map(read_log, logs)),
        probe=probe,
        experiments=tuple(experiments),
    )


def read_log(path: Path) -> dict[str, Any]:
    """The facts of one server's log; UsageError when it cannot be read."""
    try:
        return logs.read_facts(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"cannot read the log {path}: {error.strerror or error}",
            hint="give a file that vLLM's or LMCache's output was written to",
        ) from error


def read_host(path: Path) -> dict[str, Any]:
    """The facts of another machine: a run's manifest.json, or ``kvlab.host.facts`` as JSON."""
    hint = "give the manifest.json of a run on that machine"
    try:
        held = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"cannot read the host facts {path}: {error.strerror or error}", hint=hint
        ) from error
    except ValueError as error:
        raise UsageError(f"the host facts {path} are not JSON", hint=hint) from error
    facts = held.get("host", held) if isinstance(held, dict) else None
    if not isinstance(facts, dict) or "memory_gib" not in facts:
        raise UsageError(f"{path} holds no facts of a machine", hint=hint)
    return facts


def _l2_place(profile: Profile, runs: Path) -> Path:
    """The folder that the profile names for L2, else that of the runs."""
    named = profile.cache.l2.base_path if profile.cache.l2 else None
    return Path(named) if named else runs


def _try_here(probe: Probe, profile: Profile, runs: Path) -> Probe:
    """The probe with everything that this machine answers when it is tried."""
    engine_missing, engine_hint = _engine(profile)
    probe = replace(
        probe,
        engine_missing=engine_missing,
        engine_hint=engine_hint,
        shm_gib=_shm_gib(),
        ports=_ports(profile),
        gpus_now=_gpus_now(profile),
        leftovers=sum(one.orphan for one in leftovers.find()),
        lmcache_versions=_lmcache_versions(profile),
    )
    return _try_l2(probe, profile, _l2_place(profile, runs)) if profile.cache.l2 else probe


def _try_l2(probe: Probe, profile: Profile, place: Path) -> Probe:
    l2 = profile.cache.l2
    assert l2 is not None
    probe = replace(
        probe,
        l2_path=str(place),
        l2_writable=_writable(place),
        direct_io=try_direct_io(place) if l2.adapter.get("use_odirect") else None,
        name_limit=_name_limit(place),
    )
    if l2.base_path is None:
        return probe  # every launch gets a fresh folder inside its run
    held = survey(place)
    foreign = identity.complaint(identity.read(place), identity.of(profile)) if held.files else None
    return replace(probe, l2_records=held.files, l2_bytes=held.bytes, l2_foreign=foreign)


def _engine(profile: Profile) -> tuple[str | None, str | None]:
    if profile.runtime != "process":
        return None, None
    try:
        environment.engine_python()
    except KvlabError as error:
        return error.message, error.hint
    return None, None


def _config(profile: Profile, models: Path) -> dict[str, Any] | None:
    """The model's config.json: beside its weights, or in the hub's cache."""
    model = profile.model
    folders = [models / model.name, Path(model.name)]
    if model.source == "hub":
        home = profile.engine.env.get("HF_HOME") or os.environ.get("HF_HOME")
        hub = Path(home or Path.home() / ".cache" / "huggingface") / "hub"
        snapshots = hub / f"models--{model.name.replace('/', '--')}" / "snapshots"
        folders += sorted(snapshots.glob("*"))
    for folder in folders:
        try:
            held = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(held, dict):
            return held
    return None


def _existing(place: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    place = place.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def _writable(place: Path) -> bool:
    return os.access(_existing(place), os.W_OK | os.X_OK)


def _name_limit(place: Path) -> int | None:
    try:
        return os.pathconf(_existing(place), "PC_NAME_MAX")
    except (OSError, ValueError):
        return None


def _shm_gib() -> float | None:
    try:
        room = os.statvfs(SHM)
    except OSError:
        return None
    return room.f_frsize * room.f_blocks / GIB


def try_direct_io(place: Path) -> str | None:
    """Why one aligned file cannot be written and read with O_DIRECT in a folder; empty: it can.

    None: the folder is not there or takes no file, so it was not tried.
    """
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return None
    path = place / f".kvlab-direct-{os.getpid()}"
    step = "open"
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, TRIAL_BYTES) as page:  # page-aligned, as the flag asks
                page.write(os.urandom(TRIAL_BYTES))
                step = "write"
                written = os.write(fd, page)
                step = "read"
                back = mmap.mmap(-1, TRIAL_BYTES)
                read = os.preadv(fd, [back], 0)
                whole = written == read == TRIAL_BYTES
                return "" if whole and back[:] == page[:] else "other bytes came back"
        finally:
            os.close(fd)
    except OSError as error:
        return f"{step}: {error.strerror or error}"
    finally:
        path.unlink(missing_ok=True)


def _ports(profile: Profile) -> dict[int, str]:
    wanted = (profile.engine.port, profile.cache.port, profile.cache.http_port)
    found = {port: ports.holder_of(port) for port in wanted if port}
    return {port: str(holder) for port, holder in found.items() if holder}


def _gpus_now(profile: Profile) -> tuple[Mapping[str, Any], ...] | None:
    """What the GPUs do now, where the profile uses them."""
    if profile.container is None or profile.container.gpus is None:
        return None
    now = gpu.now()
    return None if now is None else tuple(now)


def _lmcache_versions(profile: Profile) -> dict[str, str]:
    """LMCache's version in each of the profile's containers that runs now."""
    if profile.runtime != "docker" or profile.container is None:
        return {}
    ask = "import importlib.metadata as m; print(m.version('lmcache'))"
    versions = {}
    names = profile.container.names
    for name in filter(None, (names.get("lmcache_server"), names.get("lmcache"))):
        command = ["docker", "exec", name, "python3", "-c", ask]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOCKER_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue  # no docker here, or no such container now
        versions[name] = done.stdout.strip()
    return versions
