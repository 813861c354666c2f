"""The parallel adapter's parts that need no LMCache: index, files and parameters."""

from __future__ import annotations

import ast
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.engine import parallel_settings, record_files
from kvlab.engine.record_index import NoRoom, RecordIndex

ROOT = Path(__file__).resolve().parents[2]
KEYS = st.integers(0, 7)
SIZES = st.integers(1, 40)


class Index(RuleBasedStateMachine):
    """Against a plain list of (key, size), least recently used first, and a limit of 100."""

    def __init__(self) -> None:
        super().__init__()
        self.index: RecordIndex[int] = RecordIndex(100)
        self.model: dict[int, int] = {}
        self.locks: dict[int, int] = {}

    def bytes(self) -> int:
        return sum(self.model.values())

    @rule(key=KEYS, size=SIZES)
    def store(self, key: int, size: int) -> None:
        excess = self.bytes() + size - 100
        expected = []
        for held, taken in self.model.items():
            if excess > 0 and not self.locks.get(held):
                expected.append((held, taken))
                excess -= taken
        if excess > 0:
            with pytest.raises(NoRoom):
                self.index.reserve(size)
            return
        assert self.index.reserve(size) == expected
        for held, _ in expected:
            del self.model[held]
        assert self.index.put(key, size, reserved=True) == self.model.pop(key, None)
        self.model[key] = size

    @rule(keys=st.lists(KEYS, unique=True))
    def touch(self, keys: list[int]) -> None:
        self.index.touch(keys)
        for key in reversed(keys):
            if key in self.model:
                self.model[key] = self.model.pop(key)

    @rule(keys=st.lists(KEYS, unique=True))
    def lock(self, keys: list[int]) -> None:
        found = self.index.lock(keys)
        assert found == [key in self.model for key in keys]
        for key in keys:
            if key in self.model:
                self.locks[key] = self.locks.get(key, 0) + 1

    @precondition(lambda self: any(self.locks.values()))
    @rule()
    def unlock_all(self) -> None:
        for key, count in self.locks.items():
            self.index.unlock([key] * (count + 1))  # one too many does no harm
        self.locks.clear()

    @rule(key=KEYS)
    def delete(self, key: int) -> None:
        size = self.index.drop_unlocked(key)
        assert size == (None if self.locks.get(key) else self.model.get(key))
        if size is not None:
            del self.model[key]

    @invariant()
    def same(self) -> None:
        assert self.index.snapshot() == list(self.model.items())
        assert self.index.bytes == self.bytes() <= 100
        assert len(self.index) == len(self.model)
        assert self.index.locked() == sum(count > 0 for count in self.locks.values())


TestIndex = Index.TestCase


def test_reservations_of_several_writers_add_up() -> None:
    index: RecordIndex[str] = RecordIndex(10)
    index.put("old", 4)
    assert index.reserve(6) == []
    assert index.reserve(4) == [("old", 4)]
    with pytest.raises(NoRoom):
        index.reserve(1)
    index.release(4)
    assert index.reserve(1) == []


def test_what_is_not_trusted_is_counted_but_not_found() -> None:
    index: RecordIndex[str] = RecordIndex()
    index.put("a", 4)
    assert index.holds("a", 4)
    assert not index.holds("a", 5)
    index.distrust("a")
    assert not index.holds("a", 4)
    assert index.lock(["a"]) == [False]
    assert index.bytes == 4
    assert index.put("a", 4) == 4
    assert index.lock(["a"]) == [True]


@given(st.integers(0, 1 << 27), st.integers(0, 200), st.sampled_from([4096, 1 << 17, 1 << 20]))
def test_pieces_cover_a_record_once_and_are_aligned(size: int, parts: int, smallest: int) -> None:
    pieces = record_files.split(size, parts, smallest)
    assert sum(length for _, length in pieces) == size
    assert len(pieces) <= max(1, parts)
    end = 0
    for offset, length in pieces:
        assert offset == end
        assert offset % smallest == 0
        assert length > 0
        end += length
    assert all(length % smallest == 0 for _, length in pieces[:-1])


def buffer(data: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(data)))
    view[:] = data
    return view


@pytest.mark.parametrize("size", [4096, 4097])
def test_a_draft_is_whole_before_it_has_a_name(tmp_path: Path, size: int) -> None:
    direct, data = record_files.DirectIO(wanted=True), os.urandom(size)
    draft = record_files.Drafts(tmp_path / "in").write(buffer(data), direct, sync=True)
    assert Path(draft).parent == tmp_path / "in"
    assert Path(draft).read_bytes() == data
    into = buffer(bytes(size))
    fd = record_files.open_record(draft, into, direct)
    record_files.read_piece(fd, into, 0, direct)
    os.close(fd)
    assert bytes(into) == data


def test_a_draft_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space"):
        record_files.Drafts(tmp_path).write(
            buffer(b"x" * 4096), record_files.DirectIO(wanted=True), sync=False
        )
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    drafts = record_files.Drafts(tmp_path)
    (tmp_path / f"{record_files.TEMPORARY}1-1.tmp").touch()
    (tmp_path / "fs.tmp").touch()  # LMCache's own: not ours to remove
    held = tmp_path / f"{record_files.TEMPORARY}2-2.tmp"
    hold = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, held], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert drafts.remove_abandoned() == 1
        assert {path.name for path in tmp_path.iterdir()} == {"fs.tmp", held.name}
        writer.kill()
    assert drafts.remove_abandoned() == 1


def test_a_file_that_ends_early_is_not_the_record(tmp_path: Path) -> None:
    path, into = tmp_path / "record", buffer(bytes(8192))
    path.write_bytes(b"x" * 4096)
    direct = record_files.DirectIO(wanted=False)
    with pytest.raises(record_files.WrongSize, match="4,096 bytes"):
        record_files.open_record(str(path), into, direct)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(record_files.WrongSize):
        record_files.read_piece(fd, into, 0, direct)
    os.close(fd)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"base_path": ""}, "base_path must name a folder"),
        ({"num_workers": True}, "num_workers must be a whole number above 0, not True"),
        ({"num_workers": 0}, "num_workers must be a whole number above 0, not 0"),
        ({"sub_block_kb": 6}, "sub_block_kb must be a whole number above 0 and a multiple of 4"),
        ({"use_odirect": "yes"}, "use_odirect must be true or false, not 'yes'"),
        ({"fsync": 1}, "fsync must be true or false, not 1"),
        ({"max_capacity_gb": -1}, "max_capacity_gb must be a number, 0 or more, not -1"),
        ({"max_capacity_gb": float("nan")}, "max_capacity_gb must be a number, 0 or more"),
        ({"relative_tmp_dir": "/x"}, "relative_tmp_dir must name a folder below base_path"),
        ({"relative_tmp_dir": "../x"}, "relative_tmp_dir must name a folder below base_path"),
        ({"workers": 3}, "'workers' is no parameter of the parallel fs adapter"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused_with_every_meaning(
    wrong: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError) as caught:
        parallel_settings.check({"base_path": "/l2", **wrong})
    assert str(caught.value).startswith(says)
    assert all(f"- {name}: " in str(caught.value) for name in parallel_settings.HELP)


def test_every_parameter_and_counter_is_documented() -> None:
    page = (ROOT / "docs/parallel-fs.md").read_text(encoding="utf-8")
    tree = ast.parse((ROOT / "kvlab/engine/parallel_fs.py").read_text(encoding="utf-8"))
    (counters,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COUNTERS"
    )
    for name in [*parallel_settings.HELP, *counters]:
        assert f"`{name}`" in page, name


def test_every_parameter_has_a_meaning_and_a_default() -> None:
    made = parallel_settings.check({"base_path": "/l2"})
    assert set(parallel_settings.HELP) == set(parallel_settings.Settings.__dataclass_fields__)
    assert made.capacity_bytes == 0
    assert 1 <= made.writers < made.num_workers
