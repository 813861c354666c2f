"""Findings as people read them on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from kvlab.preflight.case import Case, summary
from kvlab.preflight.rule import SEVERITIES, Finding
from kvlab.units import GIB, byte_size

WIDTH = 100
INDENT = " " * 8


def text(case: Case, findings: Sequence[Finding]) -> str:
    """What was taken as given, every finding with its reason and its fix, and the count."""
    lines = [*known(case), ""]
    for finding in findings:
        lines += _finding(finding)
    counts = (
        _plural(sum(one.severity == severity for one in findings), severity)
        for severity in SEVERITIES
    )
    total = _plural(len(findings), "finding")
    lines.append(f"{total} for profile {case.profile.name}: {', '.join(counts)}")
    return "\n".join(lines) + "\n"


def html(case: Case, findings: Sequence[Finding]) -> str:
    """The same as a fragment of HTML, for a notebook; everything from outside is escaped."""
    given = Markup("").join(Markup("<li>{}</li>").format(line) for line in known(case))
    rows = Markup("").join(map(_row, findings))
    head = Markup("").join(
        Markup("<th>{}</th>").format(title) for title in ("id", "severity", "found", "why", "fix")
    )
    table = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, rows)
    nothing = Markup("<p>{}</p>").format("Nothing stands in the way.")
    return str(Markup("<ul>{}</ul>{}").format(given, table if findings else nothing))


def _row(finding: Finding) -> Markup:
    fixes = (finding.fix, *finding.flags)
    shown = Markup("<br>").join(Markup("<code>{}</code>").format(fix) for fix in fixes)
    why = f"{finding.why} ({finding.source})"
    return Markup("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>").format(
        finding.id, finding.severity, finding.found, why, shown
    )


def known(case: Case) -> Iterator[str]:
    """What the rules took as given, a line each; what is not known is said to be unknown."""
    given = summary(case)
    block = given["block_tokens"] or f"unknown, {case.profile.engine.block_tokens} by the profile"
    yield f"N: {block} ({case.block.text}); chunk {given['chunk_tokens']}"
    context, ceiling = given["context_tokens"], given["ceiling_tokens"]
    yield (
        f"contexts: {case.profile.workload.contexts} of {context:,} tokens, of which whole chunks "
        f"restore at most {ceiling:,} ({ceiling / context:.1%})"
    )
    l0 = given["l0_tokens"]
    over = f"{given['working_set_tokens'] / l0:.2f} x L0 ({l0:,})" if l0 else "L0 unknown"
    yield f"working set: {given['working_set_tokens']:,} tokens, {over}"
    l1 = byte_size(given["l1_bytes"])
    if given["fill_bytes"] is None:
        yield f"records: size unknown without the model's config.json; L1 {l1}"
        return
    share = given["fill_bytes"] / given["l1_bytes"]
    line = (
        f"records: {byte_size(given['chunk_bytes'])} a chunk, {byte_size(given['fill_bytes'])} "
        f"after the fill round, {share:.3g} x L1 ({l1})"
    )
    if given["l2_need_bytes"] is not None:
        free = given["l2_free_gib"]
        room = f"{byte_size(free * GIB)} free" if free is not None else "free space unknown"
        line += f"; L2 needs {byte_size(given['l2_need_bytes'])}, {room}"
    yield line


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{finding.severity:<8}{finding.id}  {finding.found}"
    yield from textwrap.wrap(
        f"{finding.why} ({finding.source})",
        WIDTH,
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield f"{INDENT}fix: {finding.fix}"
    for flag in finding.flags:
        yield f"{INDENT}     {flag}"
    yield ""


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
