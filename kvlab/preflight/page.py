"""docs/preflight.md, made from the rules: what each finds, why it matters, and an example.

python -m kvlab.preflight.page docs/preflight.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvlab import preflight, profile
from kvlab.preflight.case import Case, Probe
from kvlab.preflight.rule import RULES, SEVERITIES, Example, Finding, Rule
from kvlab.stack import logs

HEADINGS = {
    "blocks": "Blocks, chunks and batches",
    "connection": "Connector, network, IPC and transfer",
    "memory": "Memory, eviction and GPUs",
    "disk": "The disk tier",
    "workload": "The workload",
    "servers": "Servers, images and flags",
    "observed": "What a log shows",
}
LOGS_END = "\n---\n"
"""Between the logs of an example."""
INTRODUCTION = """\
# Preflight

<!-- Made from the rules by `make docs`; edit kvlab/preflight instead. -->

`kvlab check PROFILE` finds the wrong setting before an hour of GPU is spent. It looks at the
profile, at this machine, and at whatever else it is given:

    kvlab check my.yaml                                 # the profile, on this machine
    kvlab check my.yaml --log vllm.log --log cache.log  # what servers said
    kvlab check my.yaml --host manifest.json            # on the machine of that run
    kvlab check my.yaml --experiment restart            # what matters for that experiment
    kvlab check my.yaml --against-engine                # the engine's own parsers read every flag
    kvlab check my.yaml --json

Every finding has an id that never changes, a severity, what was found, why it matters, and the
correction to paste: as an override of the profile, and as the server's own flag. An `error` would
stop or spoil the run; a `warning` costs something; a `note` is worth knowing. Exit code: 1 with an
error, else 0. `kvlab run` and `kvlab reproduce` start no server while an error stands.

**N**, vLLM's block size, decides most of the settings of a hybrid model. It is taken from a log
that is given; else from an earlier run with the same image, model, number types and speculation
(`data/blocks.json`); else it is computed from the model's `config.json`, and said to be computed;
else it is unknown, and said to be.

A profile that contradicts itself (for example a chunk that is no multiple of its own
`engine.block_tokens`) is refused before any rule runs.
"""


def case(example: Example) -> Case:
    """The case that an example describes."""
    return Case(
        profile=profile.load(example.profile, example.settings),
        host=example.host,
        logs=tuple(logs.read_facts(text.encode()) for text in example.log.split(LOGS_END) if text),
        probe=Probe(**example.probe),
        experiments=example.experiments,
    )


def findings(rule: Rule) -> list[Finding]:
    """What the rule finds in its own example."""
    return [one for one in preflight.evaluate(case(rule.example)) if one.id == rule.id]


def page() -> str:
    """The whole documentation page, as Markdown."""
    return "\n".join([INTRODUCTION, *_table(), *_parts()]) + "\n"


def _table() -> Iterator[str]:
    yield "| id | severity | finds |"
    yield "|---|---|---|"
    for id, rule in sorted(RULES.items()):
        yield f"| [{id}](#{id.lower()}) | {rule.severity} | {rule.title} |"
    counts = [
        f"{sum(rule.severity == severity for rule in RULES.values())} {severity}s"
        for severity in SEVERITIES
    ]
    yield f"\n{len(RULES)} rules: {', '.join(counts)}."


def _parts() -> Iterator[str]:
    for name, heading in HEADINGS.items():
        yield f"\n## {heading}"
        module = f"{preflight.__name__}.{name}"
        for id, rule in sorted(RULES.items()):
            if rule.check.__module__ == module:
                yield from _section(id, rule)


def _section(id: str, rule: Rule) -> Iterator[str]:
    yield f'\n### <a id="{id.lower()}"></a>{id} {rule.title}'
    yield f"\n*{rule.severity}* – {rule.why} Source: {rule.source}."
    given = list(_given(rule.example))
    yield f"\nExample: {'; '.join(given)}.\n"
    for one in findings(rule):
        yield f"    {one.severity} {one.id}  {one.found}"
        yield f"    fix: {one.fix}"
        for flag in one.flags:
            yield f"         {flag}"


def _given(example: Example) -> Iterator[str]:
    """What the example is made of, in words."""
    yield f"profile `{example.profile}`"
    for key, value in example.settings.items():
        yield f"`{_short(f'{key}: {value}')}`"
    for text in filter(None, example.log.split(LOGS_END)):
        yield f"a log with `{_short(text)}`"
    for key, value in example.host.items():
        yield f"a host with `{_short(f'{key}: {value}')}`"
    for key, value in example.probe.items():
        if key == "config":
            yield "the model's `config.json`"
        else:
            yield f"found there: `{_short(f'{key}: {value}')}`"
    if example.experiments != ("two-round",):
        yield f"for `{', '.join(example.experiments)}`"


def _short(text: str, limit: int = 110) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 once the page is written."""
    words = sys.argv[1:] if arguments is None else arguments
    Path(words[0] if words else "docs/preflight.md").write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
