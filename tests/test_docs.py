"""Documentation is complete: every key, command and invariant can be looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from kvlab import profile
from tests.test_cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))


def keys(kind: type[BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield field.alias or name
        for option in getattr(field.annotation, "__args__", (field.annotation,)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from keys(option)


@pytest.mark.parametrize("key", sorted(set(keys(profile.Profile))))
def test_every_profile_key_is_documented(key: str) -> None:
    text = (ROOT / "docs/profiles.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{key}\b", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"kvlab {command}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md"], ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_make_target_explains_itself() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## .", text, re.MULTILINE), target


def test_every_invariant_is_documented() -> None:
    source = "".join(
        p.read_text(encoding="utf-8") for p in (ROOT / "kvlab/invariants").glob("*.py")
    )
    names = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', source)) | {"correctness"}
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert {name for name in names if f"| {name} |" not in text} == set()
