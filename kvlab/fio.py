"""What fio measures on a path: the ceiling that no figure of a cache on the same path can exceed.

Reads and writes go past the page cache (O_DIRECT), in blocks of the same size as the records, by
one job or by several at once; each job has a file of its own and one request in flight.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvlab import shapes
from kvlab.errors import HostBusy, MeasurementError

NAME = "kvlab-fio"
"""Of the job, and the beginning of its files' names."""
DEADLINE_S = 600.0
"""fio has ended by then, or something is wrong with the path."""
MS_PER_S = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What fio is asked to do in a folder."""

    kind: Literal["read", "write"]
    block_bytes: int
    """Of one request to the file system; with O_DIRECT a multiple of its block."""
    jobs: int
    """Readers or writers at once."""
    file_bytes: int
    """Of each job's own file."""
    direct: bool = True
    runtime_s: float | None = None
    """Begin again at the start of the file until so much time has passed; None: once through."""
    fsync: bool = False
    """The time ends when the data are on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a job came to, all of its readers or writers together."""

    bytes: int
    seconds: float
    requests: int

    @property
    def gb_per_s(self) -> float:
        """In units of 10^9 bytes."""
        return self.bytes / self.seconds / 1e9


def words(job: Job, folder: Path, output: Path, *, layout: bool = False) -> list[str]:
    """The command; ``layout`` only writes the files that a read needs."""
    command = [
        "fio",
        f"--name={NAME}",
        f"--directory={folder}",
        f"--rw={job.kind}",
        f"--bs={job.block_bytes}",
        f"--size={job.file_bytes}",
        f"--numjobs={job.jobs}",
        "--thread",
        "--ioengine=psync",
        f"--direct={int(job.direct)}",
        "--group_reporting",
        "--output-format=json",
        f"--output={output}",
    ]
    if layout:
        return [*command, "--create_only=1"]
    if job.runtime_s is not None:
        command += ["--time_based", f"--runtime={max(1, round(job.runtime_s * MS_PER_S))}ms"]
    if job.fsync:
        command.append("--end_fsync=1")
    return command


def run(job: Job, folder: Path, source: Path | None = None) -> Rate:
    """What the job came to in that folder; its files stay, see ``clear``.

    A read's files are written before the clock starts, in ``source`` where the folder is a mount of
    another one. Raises HostBusy without fio, and
    MeasurementError when fio fails or says something that is no result.
    """
    refuse_missing()
    with tempfile.TemporaryDirectory(prefix="kvlab-fio-") as scratch:
        output = Path(scratch) / "fio.json"
        if job.kind == "read":
            _call(words(job, source or folder, output, layout=True), folder)
        _call(words(job, folder, output), folder)
        return parse(output.read_bytes(), job.kind)


def clear(folder: Path) -> None:
    """Remove the files that jobs left in the folder."""
    for path in folder.glob(f"{NAME}.*"):
        path.unlink(missing_ok=True)


def refuse_missing() -> None:
    """Raise HostBusy when fio is not installed."""
    if shutil.which("fio") is None:
        raise HostBusy(
            "fio is not installed, so no ceiling can be measured", hint="apt install fio"
        )


def _call(command: Sequence[str], folder: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
            env=environment,
        )
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()
        raise MeasurementError(
            f"fio failed on {folder} with exit code {error.returncode}",
            hint="does the path take O_DIRECT, and has it room?",
            log_tail="\n".join(said[-10:]),
        ) from error
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(
            f"fio did not end on {folder} within {DEADLINE_S:g} s",
            hint="is the path reachable? ask for fewer bytes or readers",
        ) from error


def parse(text: bytes | str, kind: str) -> Rate:
    """The rate that fio's JSON states for reads or writes; MeasurementError for anything else."""
    try:
        tree = shapes.loads(text)
        return _rate(tree, kind)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise MeasurementError(
            f"what fio printed is no result of a {kind}: {type(error).__name__}: {error}",
            hint="kvlab reads fio 3; see `fio --version`",
        ) from error


def _rate(tree: Any, kind: str) -> Rate:
    (job,) = tree["jobs"]
    if job["error"] != 0:
        raise ValueError(f"error {job['error']}")
    found = job[kind]
    moved, requests = found["io_bytes"], found["total_ios"]
    runtime_ms = found["runtime"]
    for name, value in (("io_bytes", moved), ("total_ios", requests), ("runtime", runtime_ms)):
        if type(value) is not int or value <= 0:
            raise ValueError(f"{name} is {value!r}")
    return Rate(bytes=moved, seconds=runtime_ms / MS_PER_S, requests=requests)
