"""The L2 folder of a launch: its own and empty, or one that holds an earlier launch's records."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from kvlab.errors import HostBusy
from kvlab.profile import Profile
from kvlab.rundir import RunDir


def folder(profile: Profile, run: RunDir, name: str) -> Path:
    """The folder that the profile sets, else one inside the run's own."""
    set_path = profile.cache.l2.base_path if profile.cache.l2 else None
    return Path(set_path) if set_path else (run.path / "l2" / name).resolve()


def prepare(path: Path, *, fresh: bool) -> Path:
    """The folder, made where it is missing; refused when it should be empty and is not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        first = next(path.iterdir(), None)
    except OSError as error:
        raise HostBusy(
            f"cannot use the L2 folder {path}: {error.strerror}",
            hint="set cache.l2.base_path to a writable folder",
        ) from error
    if fresh and first is not None:
        raise HostBusy(
            f"the L2 folder {path} is not empty (it holds {first.name}): round 1 would be warm",
            hint="empty it, or set cache.l2.base_path to a new folder",
        )
    return path


def empty(path: Path) -> list[Path]:
    """What could not be removed of that which the launch wrote there."""
    for entry in list(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(PermissionError):
                entry.unlink(missing_ok=True)
    return sorted(path.iterdir())


def remove(path: Path, run: RunDir) -> None:
    """Remove the empty folder; one that the profile names stays."""
    own = (run.path / "l2").resolve()
    if own in path.parents:
        for place in (path, own):  # other launches of the run may keep theirs
            with contextlib.suppress(OSError):
                place.rmdir()
