"""Pages, residency and device reads, on the disk that the tests run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvlab import evidence, storage
from kvlab.errors import HostBusy

BYTES = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "deeper"
    inside.mkdir()
    for name in ("a", "deeper/b", "empty"):
        (tmp_path / name).write_bytes(b"" if name == "empty" else os.urandom(BYTES))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    return tmp_path


def test_files_are_found_once_and_links_are_not_followed(folder: Path) -> None:
    assert sorted(path.name for path in storage.files(folder)) == ["a", "b", "empty"]
    assert list(storage.files(folder / "none")) == []


def test_what_was_just_written_is_resident_until_its_pages_are_dropped(folder: Path) -> None:
    before = storage.residency(folder)
    assert (before.files, before.bytes) == (3, 2 * BYTES)
    after = storage.drop_pages(folder)
    assert before.share == 1
    assert after.share is not None
    if storage.device(folder) is not None:  # in memory there is nothing else to read from
        assert after.share < 0.05
    assert (folder / "a").read_bytes()
    assert (storage.residency(folder).resident_bytes or 0) >= BYTES


def test_the_device_counts_what_is_read_from_it(folder: Path) -> None:
    if storage.device(folder) is None:
        pytest.skip("this folder lies on no block device")
    storage.drop_pages(folder)
    before = storage.device_read_bytes(folder)
    (folder / "a").read_bytes()
    after = storage.device_read_bytes(folder)
    assert before is not None
    assert after is not None
    assert after - before >= BYTES


def test_memory_has_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DISKSTATS", "MOUNTS"):
        (tmp_path / name).write_text("", encoding="utf-8")
        monkeypatch.setattr(storage, name, tmp_path / name)
    assert storage.device(tmp_path) is None
    assert storage.device_read_bytes(tmp_path) is None


def test_a_file_system_without_a_device_of_its_own_is_that_of_its_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    number = tmp_path.stat().st_dev
    own = f"{os.major(number)}:{os.minor(number)}"
    node = Path("/dev/null").stat().st_rdev  # any node has numbers
    mounts, stats = tmp_path / "mounts", tmp_path / "stats"
    mounts.write_text(f"36 35 {own} / {tmp_path} rw - btrfs /dev/null rw\n", encoding="utf-8")
    stats.write_text(
        f" {os.major(node)} {os.minor(node)} nvme0n1 1 2 1000000 4\n", encoding="utf-8"
    )
    monkeypatch.setattr(storage, "MOUNTS", mounts)
    monkeypatch.setattr(storage, "DISKSTATS", stats)
    assert storage.device(tmp_path) == "nvme0n1"
    assert storage.device_read_bytes(tmp_path) == 512_000_000


def test_page_cache_is_not_sold_as_disk() -> None:
    """P-16: 3 % came from the device, and 97 % was resident."""
    read = (2_258_291 - 1_000_000) * storage.SECTOR_BYTES
    assert evidence.read_source(21_474_836_480, read, 0.97) == "page cache"
    assert evidence.read_source(21_474_836_480, 21_474_836_480, 0.97) == "page cache"
    assert evidence.read_source(21_474_836_480, 21_474_836_480, 0.01) == "disk"
    assert evidence.read_source(21_474_836_480, None, 0.01) == "unknown"
    assert evidence.read_source(21_474_836_480, 21_474_836_480, None) == "unknown"


def test_a_record_is_tried_before_it_is_relied_on(tmp_path: Path) -> None:
    """P-36: open() says nothing; a write with the same flags and name length does."""
    storage.refuse_unwritable(tmp_path, "a" * 255, BYTES, direct=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(HostBusy, match="names of 256 bytes"):
        storage.refuse_unwritable(tmp_path, "a" * 256, BYTES, direct=False)
    with pytest.raises(HostBusy, match="cannot be written"):
        storage.refuse_unwritable(tmp_path / "none", "a", BYTES, direct=True)
