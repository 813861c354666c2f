"""What is pruned from an L2 folder, and what never is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlab import cli
from kvlab.disk import identity, listing, users
from kvlab.disk.inventory import count, describe, entries
from kvlab.disk.prune import LOG, Rules, choose, remove
from kvlab.errors import HostBusy, UsageError

DAY = 86_400
NOW = time.time()


def record(
    folder: Path, number: int, *, days: float = 1, size: int = 100, model: str = "org/m"
) -> Path:
    """A record that was written and last read so many days ago."""
    path = folder / f"{model.replace('/', '-SEP-')}@0x01000100@0@{number:064x}.data"
    path.write_bytes(b"k" * size)
    os.utime(path, (NOW - days * DAY, NOW - days * DAY))
    return path


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_older_is_chosen(tmp_path: Path) -> None:
    old, young = record(tmp_path, 1, days=10), record(tmp_path, 2, days=8)
    chosen = choose(entries(tmp_path), Rules(older_than_s=9 * DAY), now_s=NOW)
    assert [removal.entry.path for removal in chosen] == [old]
    assert "10.0 days ago" in chosen[0].reason
    assert young.exists()


def test_the_least_recently_used_go_first_until_enough_is_free(tmp_path: Path) -> None:
    read_lately = record(tmp_path, 1, days=9)
    os.utime(read_lately, (NOW - 1 * DAY, NOW - 9 * DAY))
    paths = [record(tmp_path, number, days=number) for number in (5, 3, 2)]
    chosen = choose(entries(tmp_path), Rules(keep_bytes=200), now_s=NOW)
    assert [removal.entry.path for removal in chosen] == paths[:2]
    assert choose(entries(tmp_path), Rules(keep_bytes=400), now_s=NOW) == []


def test_rules_narrow_each_other(tmp_path: Path) -> None:
    record(tmp_path, 1, days=10, model="org/a")
    record(tmp_path, 2, days=1, model="org/b")
    both = record(tmp_path, 3, days=10, model="org/b")
    rules = Rules(older_than_s=5 * DAY, model="org/b")
    assert [r.entry.path for r in choose(entries(tmp_path), rules, now_s=NOW)] == [both]


def test_no_rule_prunes_nothing(tmp_path: Path) -> None:
    record(tmp_path, 1)
    with pytest.raises(UsageError, match="no rule"):
        choose(entries(tmp_path), Rules(), now_s=NOW)


def test_odd_files_are_pruned_only_if_their_names_are_those_of_records(tmp_path: Path) -> None:
    for number in range(3):
        record(tmp_path, number)
    empty, short = record(tmp_path, 10, size=0), record(tmp_path, 11, size=7)
    (tmp_path / ".tmp").mkdir()
    left = record(tmp_path / ".tmp", 12, days=1)
    fresh = record(tmp_path / ".tmp", 13, days=0)
    for foreign in ("notes.txt", ".tmp/other", "README.data"):
        (tmp_path / foreign).write_text("mine")
        os.utime(tmp_path / foreign, (NOW - 90 * DAY, NOW - 90 * DAY))
    chosen = choose(entries(tmp_path), Rules(odd=True), now_s=NOW)
    assert {removal.entry.path for removal in chosen} == {empty, short, left}
    removed = remove(tmp_path, chosen)
    assert removed == chosen
    assert fresh.exists()
    assert {"notes.txt", ".tmp/other", "README.data"} < names(tmp_path)


def test_what_was_removed_is_logged(tmp_path: Path) -> None:
    record(tmp_path, 1, days=20)
    remove(tmp_path, choose(entries(tmp_path), Rules(older_than_s=DAY), now_s=NOW))
    (line,) = (tmp_path / LOG).read_text().splitlines()
    told = json.loads(line)
    assert told["bytes"] == 100
    assert told["file"].startswith("org-SEP-m@")
    assert entries(tmp_path) == []  # the log is kvlab's own, no foreign file


def test_links_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    precious = record(outside, 1, days=99)
    folder = tmp_path / "l2"
    folder.mkdir()
    (folder / precious.name).symlink_to(precious)
    (folder / "below").symlink_to(outside)
    assert entries(folder) == []
    assert choose(entries(folder), Rules(older_than_s=0), now_s=NOW) == []


def test_a_folder_that_became_a_link_meanwhile_leads_nowhere(tmp_path: Path) -> None:
    folder, outside = tmp_path / "l2", tmp_path / "outside"
    (folder / "below").mkdir(parents=True)
    listed = record(folder / "below", 1, days=9)
    chosen = choose(entries(folder), Rules(older_than_s=DAY), now_s=NOW)
    (folder / "below").rename(outside)
    (folder / "below").symlink_to(outside)
    assert remove(folder, chosen) == []
    assert (outside / listed.name).exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"new" * 50),
        lambda path: os.utime(path, (NOW, NOW)),
        lambda path: path.unlink(),
    ],
    ids=["rewritten", "touched", "gone"],
)
def test_a_file_that_changed_since_it_was_listed_is_left_alone(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = record(tmp_path, 1, days=9)
    chosen = choose(entries(tmp_path), Rules(older_than_s=DAY), now_s=NOW)
    change(path)
    assert remove(tmp_path, chosen) == []


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 500)), max_size=30),
    st.integers(0, 5000),
)
@settings(deadline=None, max_examples=60)
def test_what_stays_fits_and_no_more_is_removed_than_needed(
    files: list[tuple[int, int]], keep: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, (days, size) in enumerate(files):
            record(folder, number, days=days, size=size)
        chosen = choose(entries(folder), Rules(keep_bytes=keep), now_s=NOW)
        gone = sum(removal.entry.bytes for removal in chosen)
        total = sum(size for _, size in files)
        assert total - gone <= keep
        if chosen:
            assert total - gone + chosen[-1].entry.bytes > keep
        assert len(remove(folder, chosen)) == len(chosen)
        assert count(entries(folder)).bytes == total - gone


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path, 1, days=9)
    users.refuse_used(tmp_path, entries(tmp_path), now_s=NOW)
    given_to = [sys.executable, "-c", "input()", "lmcache", f'{{"base_path":"{tmp_path}"}}']
    with subprocess.Popen(given_to, stdin=subprocess.PIPE) as server:
        try:
            with pytest.raises(HostBusy, match=f"pid {server.pid}"):
                users.refuse_used(tmp_path, entries(tmp_path), now_s=NOW)
        finally:
            server.kill()
    opened = [sys.executable, "-c", f"f=open({str(path)!r}); print(1, flush=True); input()"]
    with subprocess.Popen(opened, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            with pytest.raises(HostBusy, match="open"):
                users.refuse_used(tmp_path, entries(tmp_path), now_s=NOW)
        finally:
            reader.kill()
    with pytest.raises(HostBusy, match="written 5 s ago"):
        users.refuse_used(tmp_path, entries(tmp_path), now_s=NOW - 9 * DAY + 5)


def test_the_inventory_tells_models_ages_growth_and_whose_records(tmp_path: Path) -> None:
    for number in range(4):
        record(tmp_path, number, days=number + 0.5, size=1000)
    record(tmp_path, 9, days=40, size=10, model="org/other")
    told = describe(tmp_path, entries(tmp_path), now_s=NOW)
    assert (told["records"], told["bytes"]) == (5, 4010)
    assert [held["model"] for held in told["holdings"]] == ["org/m", "org/other"]
    assert [ages["records"] for ages in told["ages"]] == [0, 1, 3, 0, 1]
    assert told["growth_bytes_per_day"] == pytest.approx(4000 / 7)
    assert told["days_until_full"] == pytest.approx(told["free_bytes"] / (4000 / 7))
    assert told["identity"] is None
    assert listing.tell(tmp_path)["usable_by"] is None


def test_records_that_no_profile_can_use_are_named(tmp_path: Path) -> None:
    from kvlab import profile

    record(tmp_path, 1)
    identity.write(tmp_path, identity.of(profile.load("embedded")))
    assert "embedded" in listing.tell(tmp_path)["usable_by"]
    identity.write(tmp_path, {**identity.of(profile.load("embedded")), "chunk_tokens": 7})
    assert listing.tell(tmp_path)["usable_by"] == []
    assert "no profile" in listing.text(listing.tell(tmp_path))


def test_the_command_is_a_dry_run_unless_told(tmp_path: Path) -> None:
    record(tmp_path, 1, days=30)
    record(tmp_path, 2, days=2)
    runner = CliRunner()
    dry = runner.invoke(cli.app, ["disk", "prune", str(tmp_path), "--older-than", "9d"])
    assert dry.exit_code == 0
    assert "1 files, 100 B would be removed" in dry.output
    assert len(names(tmp_path)) == 2
    done = runner.invoke(
        cli.app, ["disk", "prune", str(tmp_path), "--older-than", "9d", "--yes", "--json"]
    )
    assert json.loads(done.output)["files"] == 1
    assert len(names(tmp_path)) == 2  # the younger record, and the log


@pytest.mark.parametrize(
    "wrong",
    [["--older-than", "soon"], ["--keep", "much"], ["--older-than", "-1d"], ["--keep", "1e999GB"]],
)
def test_a_wrong_rule_is_one_sentence(tmp_path: Path, wrong: list[str]) -> None:
    found = CliRunner().invoke(cli.app, ["disk", "prune", str(tmp_path), *wrong])
    assert isinstance(found.exception, UsageError)


def test_a_watch_prints_growth(tmp_path: Path) -> None:
    looks = listing.watch(tmp_path, "0.01s", 2)
    first = next(looks)
    record(tmp_path, 1)
    second = next(looks)
    assert first["growth_bytes_per_day"] is None
    assert second["growth_bytes_per_day"] > 0
    assert second["records"] == 1
    assert "1 records" in listing.look_text(second)
    assert list(looks) == []
