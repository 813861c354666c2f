"""The emulated mount: passes files through, delays reads, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import slow_mount, storage
from kvlab.errors import HostBusy, UsageError

KIB = 1024
LATENCY_S = 0.01
FOREVER = """
import sys, time
from pathlib import Path
from kvlab import slow_mount
with slow_mount.mounted(Path(sys.argv[1]), Path(sys.argv[2]), latency_s=0):
    print("ready", flush=True)
    time.sleep(600)
"""

needs_fuse = pytest.mark.skipif(slow_mount.missing() is not None, reason=str(slow_mount.missing()))


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slow_mount.SlowMount]:
    folder = tmp_path_factory.mktemp("slow")
    with slow_mount.mounted(folder / "source", folder / "at", latency_s=LATENCY_S) as made:
        yield made


@needs_fuse
def test_what_is_written_on_one_side_is_read_on_the_other(mount: slow_mount.SlowMount) -> None:
    data = os.urandom(300 * KIB + 7)
    (mount.at / "in").mkdir()
    (mount.at / "in" / "new.tmp").write_bytes(data)
    (mount.at / "in" / "new.tmp").rename(mount.at / "in" / "record")
    assert (mount.source / "in" / "record").read_bytes() == data
    assert (mount.at / "in" / "record").read_bytes() == data
    assert (mount.at / "in" / "record").stat().st_size == len(data)
    assert [path.name for path in (mount.at / "in").iterdir()] == ["record"]
    with (mount.at / "in" / "record").open("r+b") as held:
        held.truncate(KIB)
    os.utime(mount.at / "in" / "record", ns=(10**9, 2 * 10**9))
    (mount.at / "in" / "record").chmod(0o600)
    found = (mount.source / "in" / "record").stat()
    assert (found.st_size, found.st_mtime_ns, found.st_mode & 0o777) == (KIB, 2 * 10**9, 0o600)
    (mount.at / "in" / "record").unlink()
    (mount.at / "in").rmdir()
    assert not any(mount.source.iterdir())


@needs_fuse
def test_every_request_of_a_read_waits_each_time(mount: slow_mount.SlowMount) -> None:
    (mount.source / "record").write_bytes(os.urandom(512 * KIB))
    for _ in range(2):  # no page cache answers the second one
        began = time.monotonic()
        (mount.at / "record").read_bytes()
        assert time.monotonic() - began >= 4 * LATENCY_S


SIDE_BY_SIDE = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
fd = os.open(sys.argv[1], os.O_RDONLY)
def read(offset):
    os.pread(fd, 131072, offset)
offsets = [131072 * n for n in range(4)] * 5
began = time.monotonic()
for offset in offsets:
    read(offset)
alone = time.monotonic() - began
with ThreadPoolExecutor(20) as pool:
    began = time.monotonic()
    list(pool.map(read, offsets))
print(alone, time.monotonic() - began)
"""


@needs_fuse
def test_readers_side_by_side_wait_side_by_side(mount: slow_mount.SlowMount) -> None:
    """One after another, 20 requests wait 20 times; the bound below holds on any machine."""
    (mount.source / "record").write_bytes(os.urandom(512 * KIB))
    reader = subprocess.run(
        [sys.executable, "-c", SIDE_BY_SIDE, str(mount.at / "record")],
        capture_output=True,
        text=True,
        check=True,
    )
    alone, together = map(float, reader.stdout.split())
    assert together < alone


@needs_fuse
def test_direct_reads_pass_too(mount: slow_mount.SlowMount) -> None:
    (mount.source / "direct").write_bytes(os.urandom(256 * KIB))
    storage.refuse_unwritable(mount.at, "record.data", 256 * KIB, direct=True)
    assert not (mount.source / ".kvlab-trial").exists()


@needs_fuse
def test_an_open_file_does_not_keep_the_mount(tmp_path: Path) -> None:
    with slow_mount.mounted(tmp_path / "source", tmp_path / "at", latency_s=0) as made:
        held = (made.at / "held").open("wb")
    assert not os.path.ismount(tmp_path / "at")
    with pytest.raises(OSError, match=r"not connected|abort"):
        os.fstat(held.fileno())
    with pytest.raises(OSError, match=r"not connected|abort"):
        held.close()
    assert (tmp_path / "source" / "held").exists()


@needs_fuse
def test_the_mount_goes_when_its_owner_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FOREVER, str(tmp_path / "source"), str(tmp_path / "at")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        assert os.path.ismount(tmp_path / "at")
        owner.kill()
    end = time.monotonic() + 60
    while os.path.ismount(tmp_path / "at") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.ismount(tmp_path / "at")


@needs_fuse
def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    (tmp_path / "at" / "mine").touch()
    with (
        pytest.raises(HostBusy, match="not an empty folder"),
        slow_mount.mounted(tmp_path / "source", tmp_path / "at", latency_s=0),
    ):
        pass


def test_without_fuse_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slow_mount, "missing", lambda: "there is no /dev/fuse")
    with (
        pytest.raises(HostBusy, match="no emulated mount can be made: there is no /dev/fuse"),
        slow_mount.mounted(tmp_path / "source", tmp_path / "at", latency_s=0),
    ):
        pass


@pytest.mark.parametrize(
    "wrong",
    [{"latency_s": -1}, {"bandwidth_bytes_s": 0}, {"read_bytes": 1000}, {"read_bytes": 1 << 21}],
    ids=str,
)
def test_an_impossible_mount_is_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    settings = {"latency_s": 0.0, **wrong}
    with (
        pytest.raises(UsageError, match="emulated mount"),
        slow_mount.mounted(tmp_path / "source", tmp_path / "at", **settings),  # type: ignore[arg-type]
    ):
        pass


def test_the_label_says_that_it_is_emulated(tmp_path: Path) -> None:
    made = slow_mount.SlowMount(source=tmp_path, at=tmp_path, latency_s=0.01, bandwidth_bytes_s=2e8)
    assert made.label == "emulated network mount: 10 ms per read of 128 KiB, 200 MB/s"


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1)), min_size=1, max_size=50),
    st.floats(0, 1),
)
def test_a_link_brings_no_more_than_its_bandwidth(
    reads: list[tuple[int, float]], latency_s: float
) -> None:
    link = slow_mount.Link(latency_s, 1e6)
    now_s, sent, dues = 0.0, 0, []
    for size, later_s in reads:
        now_s, sent = now_s + later_s, sent + size
        dues.append(link.due_s(size, now_s))
        assert dues[-1] >= now_s + size / 1e6 + latency_s - 1e-9
        assert dues[-1] >= sent / 1e6 + latency_s - 1e-6  # all that was asked for has to pass
    assert dues == sorted(dues)
