"""The survey of an L2 folder: records, and what is odd among them (P-37)."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvlab.disk.inventory import RECORD_NAME, survey


def record(folder: Path, number: int, group: int = 0, size: int = 100) -> Path:
    path = folder / f"models-SEP-m@0x1@{group}@{number:08x}.data"
    path.write_bytes(b"k" * size)
    return path


def test_a_healthy_folder_has_one_size_per_group(tmp_path: Path) -> None:
    for number in range(4):
        record(tmp_path, number, 0, 100)
        record(tmp_path, number, 1, 60)
    found = survey(tmp_path)
    assert (found.files, found.bytes, found.groups, found.odd) == (8, 640, 2, 0)
    assert found.sizes == {60: 4, 100: 4}


def test_odd_files_are_counted_by_kind(tmp_path: Path) -> None:
    for number in range(4):
        record(tmp_path, number)
    record(tmp_path, 10, size=0)
    record(tmp_path, 11, size=40)
    (tmp_path / ".tmp").mkdir()
    record(tmp_path / ".tmp", 12)
    (tmp_path / "x.data").write_bytes(b"z" * 50)
    (tmp_path / "link.data").symlink_to(tmp_path / "x.data")
    found = survey(tmp_path)
    assert (found.empty, found.short, found.temporary, found.foreign) == (1, 1, 1, 1)
    assert found.odd == 4
    assert found.files == 6


def test_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert survey(tmp_path / "none").files == 0


@given(st.text(max_size=60))
def test_any_name_is_a_record_or_not(name: str) -> None:
    match = RECORD_NAME.fullmatch(name)
    assert match is None or match["hash"]


def test_names_with_at_signs_and_separators_parse() -> None:
    match = RECORD_NAME.fullmatch("a-SEP-b@c@0x0@1@deadbeef.data")
    assert match is not None
    assert match["model"] == "a-SEP-b@c"
