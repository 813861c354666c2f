"""What a rule is: one small pure function over a case, with everything that a reader must know.

Rules register themselves in ``RULES`` when their module is imported; ``kvlab.preflight`` imports
all of them. The documentation page is made from this table.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from kvlab.preflight.case import Case

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rule found in a case, and what to do about it."""

    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the profile and their corrected values."""
    do: str = ""
    """What to do where no setting of the profile is to blame."""

    @property
    def fix(self) -> str:
        """The correction, ready to paste after a kvlab command, or in words."""
        pasted = " ".join(
            f"--set {shlex.quote(f'{key}={_yaml(value)}')}" for key, value in self.settings.items()
        )
        return "; ".join(part for part in (pasted, self.do) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding, complete: a stable id, how bad it is, what was found, why, and the fix."""

    id: str
    severity: Severity
    title: str
    found: str
    why: str
    source: str
    fix: str
    flags: tuple[str, ...] = ()
    """The same correction as flags of vLLM and LMCache, each with its program's name."""

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return dataclasses.asdict(self) | {"flags": list(self.flags)}


Check = Callable[[Case], Iterator[Found]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A case in which the rule fires, small enough to be printed in the documentation."""

    profile: str = "embedded"
    settings: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""
    """Lines of a server's log."""
    host: Mapping[str, Any] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)
    experiments: tuple[str, ...] = ("two-round",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A registered rule."""

    id: str
    severity: Severity
    title: str
    why: str
    """One sentence."""
    source: str
    """Who says so, by name."""
    check: Check
    example: Example


RULES: dict[str, Rule] = {}
"""Every rule by its id."""


def rule(
    id: str, severity: Severity, title: str, *, why: str, source: str, example: Example
) -> Callable[[Check], Check]:
    """The decorator that registers a function as a rule; an id is given once and never reused."""

    def register(check: Check) -> Check:
        if id in RULES:
            raise ValueError(f"rule {id} is there already: {RULES[id].title}")
        RULES[id] = Rule(
            id=id,
            severity=severity,
            title=title,
            why=why,
            source=source,
            check=check,
            example=example,
        )
        return check

    return register


def _yaml(value: Any) -> str:
    """A value as an override takes it: YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()
