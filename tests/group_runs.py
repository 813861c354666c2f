"""Synthetic runs of object-groups: two settings of LMCache, told by the A/B's own story."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlab import profile
from kvlab.records import Record
from kvlab.rundir import RunDir
from kvlab.workloads import object_groups
from tests.builders import START_NS, Edit, Story, both, manifest_of, write

OFF, ON = object_groups.ARMS
RUN = "20261130T130000Z-object-groups-embedded-0123abcd"


def make_groups_run(
    tmp_path: Path,
    *,
    repeats: int = 3,
    contexts: int = 6,
    restored_ms: Mapping[str, float] | None = None,
    restored_nat: Mapping[str, float] | None = None,
    groups: Mapping[str, int] | None = None,
    noise: float = 0.01,
    overrides: Mapping[str, Any] | None = None,
    edit: Edit | None = None,
) -> RunDir:
    """A run folder as the experiment leaves it; settings that are not named are alike and right."""
    resolved = profile.load(
        "embedded",
        {
            "engine.kv_cache_tokens": None,
            "workload.contexts": contexts,
            "experiments.object_groups.repeats": repeats,
            **(overrides or {}),
        },
    )
    order = object_groups.order(resolved, object_groups.ARMS)
    made = {
        **manifest_of(resolved, RUN),
        "experiment": "object-groups",
        "arms": list(object_groups.ARMS),
        "order": [[repeat, arm] for repeat, arm in order],
    }
    folder = RunDir.create(tmp_path, made)
    told: list[Record] = []
    now = START_NS
    for number, (repeat, arm) in enumerate(order):
        story = Story(
            resolved,
            control=False,
            cold_ms=700.0,
            restored_ms=(restored_ms or {}).get(arm, 100.0),
            noise=noise,
            floor_nat=0.0,
            restored_nat=(restored_nat or {}).get(arm, 0.0),
            object_groups=(groups or {OFF: 1, ON: 2})[arm],
            seed=number,
        )
        story.now, story.pid = now, 100 + 10 * number
        told += _launch(story, repeat, arm)
        now = story.now
    started = dataclasses.replace(story.event("run_started"), at_ns=START_NS)
    every = [started, *told, story.event("run_finished", status="complete")]
    change = both(*([edit] if edit else []))
    write(folder, [kept for record in every if (kept := change(record))])
    folder.update_manifest(status="complete")
    folder.seal()
    return folder


def _launch(story: Story, repeat: int, arm: str) -> Iterator[Record]:
    for record in story.deployment("lmcache", repeat):
        yield dataclasses.replace(record, scenario=arm)
        if getattr(record, "kind", None) == "ready":
            flag = object_groups.FLAGS[object_groups.SETTINGS[arm]]
            yield story.event("ablation", arm, repeat, flag=flag, l2_folder=f"{repeat}-{arm}")
