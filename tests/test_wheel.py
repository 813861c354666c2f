"""``pip install .`` gives a kvlab that works outside the checkout, with all its data."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvlab import summary
from tests.builders import make_run

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, as an installation lays them out."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
    )
    (wheel,) = folder.glob("kvlab-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def kvlab(installed: Path, cwd: Path, *words: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); from kvlab.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_profiles_texts_templates_notebooks_and_locks_are_there(installed: Path) -> None:
    package = installed / "kvlab"
    for name in (
        "profiles/embedded.yaml",
        "engine/requirements.lock",
        "report/published.json",
        "sizing/shapes.json",
        "report/templates/page.css",
        "notebooks/10_two_round.ipynb",
    ):
        assert (package / name).is_file(), name
    assert list((package / "i18n").rglob("*.yaml"))
    assert not (installed / "tests").exists()


def test_it_plans_reports_and_verifies_anywhere(installed: Path, tmp_path: Path) -> None:
    assert "embedded" in kvlab(installed, tmp_path, "profiles")
    assert "# scenario lmcache" in kvlab(installed, tmp_path, "plan", "embedded")
    run = make_run(tmp_path)
    summary.conclude(run)
    assert "verified" in kvlab(installed, tmp_path, "verify", str(run.path))
    pages = kvlab(installed, tmp_path, "report", str(run.path), "--out", "pages").split()
    assert [Path(page).name for page in pages] == [
        *("report-tr.html", "report-zh.html", "report-en.html", "index.html")
    ]
    assert all((tmp_path / page).is_file() for page in pages)
