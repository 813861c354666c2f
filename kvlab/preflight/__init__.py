"""What would stop or spoil a run here, found before anything starts.

``check`` is ``gather`` (what this machine tells; see ``kvlab.preflight.probe``) followed by
``evaluate`` (pure: every rule over one case). Importing this package registers every rule.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlab import profile as profiles
from kvlab.errors import PreflightFailed, ProfileError
from kvlab.preflight import (  # registers every rule
    blocks,
    connection,
    disk,
    memory,
    observed,
    servers,
    workload,
)
from kvlab.preflight.case import Case, Probe, summary
from kvlab.preflight.display import html, text
from kvlab.preflight.probe import gather, read_host
from kvlab.preflight.rule import RULES, SEVERITIES, Finding, Found, Rule
from kvlab.preflight.seen import Seen, keep
from kvlab.profile import Profile
from kvlab.stack import plan

__all__ = [
    "RULES",
    "Case",
    "Finding",
    "Probe",
    "Seen",
    "check",
    "evaluate",
    "gather",
    "html",
    "keep",
    "read_host",
    "refuse",
    "summary",
    "text",
]
PARTS = (blocks, connection, memory, disk, workload, servers, observed)
"""The modules of rules, in the order of the documentation."""


def check(
    profile: Profile,
    *,
    logs: Iterable[Path] = (),
    host: Mapping[str, Any] | None = None,
    experiments: Iterable[str] = ("two-round",),
    runs: Path = Path("data/runs"),
) -> list[Finding]:
    """Every finding for the profile on this host, the worst first.

    ``logs`` are servers' logs that say more; ``host`` are another machine's facts, and then
    nothing is tried on this one.
    """
    return evaluate(gather(profile, logs=logs, host=host, experiments=experiments, runs=runs))


def evaluate(case: Case) -> list[Finding]:
    """Every finding in the case, the worst first. Pure."""
    findings = [
        _finding(case.profile, rule, found) for rule in RULES.values() for found in rule.check(case)
    ]
    return sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), one.id))


def refuse(findings: Iterable[Finding]) -> None:
    """Raise PreflightFailed, naming the findings, when one of them is an error."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise PreflightFailed(
            f"preflight {first.id}: {first.found}{more}",
            hint=f"{first.fix}; see `kvlab check`",
        )


def _finding(profile: Profile, rule: Rule, found: Found) -> Finding:
    return Finding(
        id=rule.id,
        severity=rule.severity,
        title=rule.title,
        found=found.text,
        why=rule.why,
        source=rule.source,
        fix=found.fix,
        flags=tuple(_flags(profile, found.settings)),
    )


def corrected(profile: Profile, settings: Mapping[str, Any]) -> Profile | None:
    """The profile with a finding's settings; None where it would be refused with them alone."""
    try:
        return profiles.with_settings(profile, settings)
    except ProfileError:
        return None


def _flags(profile: Profile, settings: Mapping[str, Any]) -> Iterator[str]:
    """The words of the servers' commands that the settings change, each with its program."""
    better = corrected(profile, settings) if settings else None
    if better is None or not (profile.fresh and better.fresh):  # attached: nothing is started
        return
    before, after = (plan.plan(one, "lmcache").services for one in (profile, better))
    for old, new in zip(before, after, strict=True):
        known = list(plan.flag_groups(old.argv))
        for group in plan.flag_groups(new.argv):
            if group not in known:
                yield f"{new.role}: {shlex.join(group)}"
