"""docs/traps-coverage.md names every trap once, with tests that exist, or says why it has none."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.preflight.cases import ROWS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/traps-coverage.md"
IDS = [f"P-{number:02d}" for number in range(1, 52)]
RULES = {(row.trap, row.rule) for row in ROWS if row.fires}
"""The traps that a rule of ``kvlab check`` decides, with a case in which it fires."""


@dataclass(frozen=True)
class Entry:
    id: str
    sentence: str
    tests: tuple[str, ...]
    rules: tuple[str, ...]
    reason: str


def entries(text: str) -> list[Entry]:
    return [
        Entry(
            id=found[1],
            sentence=found[2],
            tests=tuple(re.findall(r"^- `(.+)`$", found[3], re.MULTILINE)),
            rules=tuple(re.findall(r"KV\d{3}", "".join(_said("Rules", found[3])))),
            reason="".join(_said("No test", found[3])),
        )
        for found in re.finditer(r"^### (.+)\n(.*)\n((?:- .*\n?)*)", text, re.MULTILINE)
    ]


def _said(what: str, lines: str) -> list[str]:
    return re.findall(rf"^- {what}: (.+)$", lines, re.MULTILINE)


@cache
def names(path: Path) -> frozenset[str]:
    """Every test function, and every class of them, as pytest names it; none without a file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    found = set(_functions(body))
    for node in body:
        if isinstance(node, ast.ClassDef) and (inner := _functions(node.body)):
            found |= {node.name, *(f"{node.name}::{name}" for name in inner)}
    return frozenset(found)


def _functions(body: list[ast.stmt]) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [n.name for n in body if isinstance(n, kinds) and n.name.startswith("test")]


def faults(text: str) -> list[str]:
    """What is wrong with a page, one sentence each."""
    found = entries(text)
    seen = Counter(entry.id for entry in found)
    wrong = [f"{id} is missing" for id in IDS if not seen[id]]
    wrong += [f"{id} stands there {count} times" for id, count in seen.items() if count > 1]
    wrong += [f"{id} is no trap" for id in seen if id not in IDS]
    for entry in found:
        covered = bool(entry.tests or entry.rules)
        if not entry.sentence.strip() or entry.sentence.startswith("- "):
            wrong.append(f"{entry.id} does not say what goes wrong")
        if not covered and not entry.reason:
            wrong.append(f"{entry.id} has neither tests nor a reason")
        if covered and entry.reason:
            wrong.append(f"{entry.id} has tests and a reason why there are none")
        for test in entry.tests:
            path, _, name = test.partition("::")
            if name not in names(ROOT / path):
                wrong.append(f"{entry.id} names {test}, which does not exist")
        for rule in entry.rules:
            if (entry.id, rule) not in RULES:
                wrong.append(f"{entry.id} names {rule}, of which no case is for this trap")
    return wrong


def test_every_trap_is_covered_or_explained() -> None:
    assert faults(PAGE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("### P-07\n", "### P-08\n", ["P-07 is missing", "P-08 stands there 2 times"]),
        ("### P-07\n", "### P-52\n", ["P-07 is missing", "P-52 is no trap"]),
        ("### P-07\n", "### P-07\n\n", ["P-07 does not say what goes wrong"]),
        (r"(?s)(### P-47\n.*?\n)- .*?\n\n", r"\1\n", ["P-47 has neither tests nor a reason"]),
        (
            r"(### P-47\n.*\n)",
            r"\1- No test: none.\n",
            ["P-47 has tests and a reason why there are none"],
        ),
        (
            "test_notebook.py::test_exactly_one_",
            "test_notebook.py::test_exactly_two_",
            ["exactly_two_parameters_cell`?, which does not exist"],
        ),
        ("TestFraming`", "TestFramed`", ["TestFramed, which does not exist"]),
        ("TestFailed::test_reason`", "TestUsage::test_reason`", ["which does not exist"]),
        ("tests/test_gpu.py::test_amd", "tests/test_gpus.py::test_amd", ["which does not exist"]),
        ("tests/test_sse.py::TestUsage`", "tests/test_sse.py`", ["which does not exist"]),
        ("Rules: KV018", "Rules: KV019", ["P-07 names KV019, of which no case"]),
    ],
)
def test_what_is_wrong_is_found(old: str, new: str, fault: list[str]) -> None:
    text, changes = re.subn(old, new, PAGE.read_text(encoding="utf-8"), count=1)
    assert changes == 1
    said = "\n".join(faults(text))
    for one in fault:
        assert re.search(one, said), said


def test_the_footguns_are_short_and_name_their_traps() -> None:
    text = (ROOT / "docs/footguns.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert 10 <= len(parts) <= 15
    for part in parts:
        title, *lines = [line for line in part.splitlines() if line.strip()]
        assert [line.split(":**")[0] for line in lines] == [
            "- **What happens",
            "- **How you notice",
            "- **What kvlab does",
        ], title
        linked = re.findall(r"\[(P-\d\d)\]\(traps-coverage\.md#(p-\d\d)\)", title)
        assert linked, title
        assert all(id in IDS and anchor == id.lower() for id, anchor in linked), title
