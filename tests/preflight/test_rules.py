"""Every rule: documented, with an example that fires, with tests on both sides, and a fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab import preflight
from kvlab.preflight import page
from kvlab.preflight.rule import RULES, SEVERITIES, Example, Rule, rule
from tests.preflight.cases import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rule_fires_where_it_should_and_nowhere_else(row: Row) -> None:
    found = {one.id for one in preflight.evaluate(page.case(row.example))}
    assert (row.rule in found) == row.fires


def test_every_rule_is_tested_on_both_sides() -> None:
    sides = {(row.rule, row.fires) for row in ROWS}
    assert sides == {(id, side) for id in RULES for side in (True, False)}


@pytest.mark.parametrize("checked", RULES.values(), ids=RULES)
def test_every_rule_is_whole_and_its_example_fires(checked: Rule) -> None:
    assert checked.severity in SEVERITIES
    assert checked.title
    assert checked.why.endswith(".")
    assert checked.source
    found = page.findings(checked)
    assert found
    for one in found:
        assert one.found
        assert one.fix
        json.dumps(one.as_dict())


@pytest.mark.parametrize("row", [r for r in ROWS if r.fires], ids=lambda row: row.name)
def test_a_fix_that_is_a_setting_ends_the_finding(row: Row) -> None:
    case = page.case(row.example)
    for found in RULES[row.rule].check(case):
        if any("<" in str(value) for value in found.settings.values()) or not found.settings:
            continue  # to be filled in, or not a setting's fault
        better = preflight.corrected(case.profile, found.settings)
        assert better is not None, found.settings
        healed = preflight.Case(
            profile=better,
            host=case.host,
            logs=() if row.rule in LOGGED else case.logs,
            probe=case.probe,
            experiments=case.experiments,
        )
        again = [other.text for other in RULES[row.rule].check(healed)]
        assert found.text not in again


LOGGED = ("KV093", "KV094")
"""What is found in a log is still there after the setting was corrected."""


def test_an_id_is_given_once() -> None:
    register = rule("KV001", "note", "again", why="x.", source="y", example=Example())
    with pytest.raises(ValueError, match="KV001 is there already"):
        register(lambda case: iter(()))


def test_the_documentation_is_what_the_rules_say() -> None:
    written = (ROOT / "docs/preflight.md").read_text(encoding="utf-8")
    assert written == page.page(), "run `make docs`"


def test_the_worst_come_first() -> None:
    findings = preflight.evaluate(
        page.case(
            Example(
                profile="dgx-spark",
                host={"gpus": []},
                settings={"container.ipc": "private", "engine.host": "0.0.0.0"},
            )
        )
    )
    ranks = [(SEVERITIES.index(one.severity), one.id) for one in findings]
    assert ranks == sorted(ranks)
    assert findings[0].severity == "error"


def test_a_fix_names_the_servers_own_flag() -> None:
    case = page.case(Example(settings={"engine.max_num_batched_tokens": 2048}))
    found = next(one for one in preflight.evaluate(case) if one.id == "KV002")
    assert found.fix == "--set engine.max_num_batched_tokens=447"
    assert found.flags == ("vllm: --max-num-batched-tokens 447",)


def test_html_shows_findings_and_escapes_what_comes_from_outside() -> None:
    case = page.case(Example(log="ERROR Store task 7 to adapter <script>alert(1)</script> failed"))
    case = preflight.Case(
        profile=case.profile,
        logs=({"failed_stores": {"count": 2, "lines": ["<script>alert(1)</script>"]}},),
    )
    shown = preflight.html(case, preflight.evaluate(case))
    assert "<script>" not in shown
    assert "2 lines, the first: &lt;script&gt;" in shown
    assert "<table>" in shown
    assert "Nothing stands in the way" in preflight.html(case, [])
