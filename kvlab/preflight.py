"""What would stop a run here, found before anything starts: profile and host in, findings out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from kvlab import environment
from kvlab.errors import KvlabError
from kvlab.profile import Profile

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding: a stable id, how bad it is, what was found, and the corrected setting."""

    id: str
    severity: Severity
    found: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        """The finding as JSON values."""
        return dataclasses.asdict(self)


def check(profile: Profile) -> list[Finding]:
    """Every finding for the profile on this host, the worst first."""
    findings = [*_engine(profile), *_settings(profile)]
    rank = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda finding: (rank[finding.severity], finding.id))


def _engine(profile: Profile) -> list[Finding]:
    if profile.runtime != "process":
        return []
    try:
        environment.engine_python()
    except KvlabError as error:
        return [
            Finding(id="KV001", severity="error", found=error.message, fix=error.hint or "make env")
        ]
    return []


def _settings(profile: Profile) -> list[Finding]:
    engine, cache = profile.engine, profile.cache
    findings: list[Finding] = []
    block = engine.block_tokens
    if profile.model.hybrid and engine.max_num_batched_tokens >= 2 * block:
        findings.append(
            Finding(
                id="KV002",
                severity="warning",
                found=f"max-num-batched-tokens {engine.max_num_batched_tokens} is 2N or more "
                f"(N = {block}): a hybrid model then keeps recurrent state too rarely to be "
                "reused, and identical prompts may not hit",
                fix=f"engine.max_num_batched_tokens: {2 * block - 1}",
            )
        )
    if engine.host in ("0.0.0.0", "::"):  # noqa: S104 - this is the rule that finds it
        findings.append(
            Finding(
                id="KV003",
                severity="warning",
                found=f"vLLM binds {engine.host}: its API has no password and is open to the "
                "network",
                fix="engine.host: 127.0.0.1",
            )
        )
    if cache.eviction_ratio >= 0.9:
        findings.append(
            Finding(
                id="KV004",
                severity="note",
                found=f"eviction ratio {cache.eviction_ratio:g} empties L1 at every eviction: an "
                "experiment's setting, not one for production",
                fix="cache.eviction_ratio: 0.2",
            )
        )
    image = profile.container.image if profile.container else ""
    if image and "@sha256:" not in image and image.rpartition(":")[2] in ("latest", image):
        findings.append(
            Finding(
                id="KV005",
                severity="warning",
                found=f"image {image} may change under the same name",
                fix="container.image: <name>@sha256:<digest>",
            )
        )
    if profile.model.hybrid and cache.separate_object_groups is not True:
        findings.append(
            Finding(
                id="KV006",
                severity="note",
                found="separate object groups are off for a hybrid model; the hybrid recipe "
                "requires them in production",
                fix="cache.separate_object_groups: true",
            )
        )
    return findings
