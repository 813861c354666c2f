"""``make reproduce`` on the real engine: the pages are there, also when the kernel is killed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvlab import verify
from kvlab.rundir import RunDir
from tests.engine.test_two_round import TRIES, is_noise, ours, wait_for

pytestmark = pytest.mark.engine


def command(tmp_path: Path) -> list[str]:
    kvlab = [sys.executable, "-m", "kvlab.cli", "reproduce", "smoke"]
    kvlab += ["--experiment", "two-round"]
    return [*kvlab, "--runs", str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]


def test_it_ends_with_a_verdict_and_three_pages_that_open_offline(tmp_path: Path) -> None:
    for _ in range(TRIES):
        for folder in (tmp_path / "runs", tmp_path / "reports"):
            shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
        (run,) = (tmp_path / "runs").iterdir()
        summary = RunDir.open(run).read_summary()
        if summary and not is_noise(summary["verdict"]):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two-round: proven" in done.stdout
    told = r"\d+% · ETA .*two-round: .* · experiment 1 of 1, (about|less than) .* left in all"
    assert re.search(told, done.stderr)
    pages = [Path(path) for path in re.findall(r"^page: (.*)$", done.stdout, re.MULTILINE)]
    assert [page.stem for page in pages] == [
        *("00_preflight", "10_two_round", "70_sizing"),
        *("report-tr", "report-zh", "report-en", "index"),
    ]
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']https?:", html)
        assert "Traceback" not in html
    assert len(list((run / "notebooks").glob("*.ipynb"))) == 6
    assert not verify.verify(RunDir.open(run))


def test_a_killed_kernel_leaves_no_server_a_partial_run_and_a_page_that_says_so(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        wait_for(lambda: bool(ours()))
        for child in psutil.Process(program.pid).children(recursive=True):
            if "ipykernel_launcher" in " ".join(child.cmdline()):
                child.send_signal(signal.SIGKILL)
        _, said = program.communicate()
    assert program.returncode == 1
    assert "the kernel died" in said
    assert "Traceback" not in said
    wait_for(lambda: not ours())
    (run,) = (tmp_path / "runs").iterdir()
    assert RunDir.open(run).events()
    (page,) = (tmp_path / "reports").glob("*/10_two_round.html")
    assert "banner" in page.read_text(encoding="utf-8")
