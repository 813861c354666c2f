"""What ``kvlab predict`` says about a profile: each answer as figures, and as sentences.

Times come from a run of the machine where one is given, and for the published profile from the
published baseline figure. Without either, only what needs no times is answered.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import UsageError
from kvlab.profile import Profile
from kvlab.results import predicted
from kvlab.rundir import RunDir
from kvlab.sizing import explanation, questions, sizes, time_model
from kvlab.sizing.case import (
    Case,
    Measured,
    case_of,
    published_l0_bytes,
    published_machine,
)
from kvlab.sizing.prediction import Machine
from kvlab.units import GIB, byte_size

WIDTH = 100


def answer(profile: Profile, *, models: Path, run: Path | None = None) -> dict[str, Any]:
    """Everything that can be said about a profile before it is run; see ``docs/sizing.md``.

    ``run`` is a two-round run of the same machine and model, whose times are then used.
    UsageError when the model's shape is not known, or the run says nothing about its machine.
    """
    config = sizes.config_of(profile, models)
    if config is None:
        raise UsageError(
            f"the shape of the model {profile.model.name} is not known",
            hint=f"put its config.json into {models / profile.model.name}"
            if profile.model.source == "hub"
            else "build it first: make engine, then kvlab run two-round smoke",
        )
    sums = sizes.arithmetic_of(profile, config)
    attention = sizes.attention_of(config, sums)
    published = explanation.applies_to(profile) and attention is not None
    if run is not None:
        case = _measured(profile, sums, RunDir.open(run))
    elif published and attention is not None:
        machine = published_machine(profile.workload.context_tokens, attention)
        case = case_of(
            profile, sums, machine=machine, source="published", l0_bytes=published_l0_bytes()
        )
    else:
        case = case_of(profile, sums)
    found: dict[str, Any] = {
        "profile": profile.name,
        "times_from": case.source,
        "sizes": sizes.sizes(profile, sums),
        "workload": _workload(case),
        "questions": questions.ask(case),
    }
    if published and attention is not None and run is None:
        chunk_bytes = sums.chunk_bytes(case.chunk_tokens)
        found["published"] = {
            **explanation.explain(profile, attention=attention, chunk_bytes=chunk_bytes),
            "eviction": explanation.eviction(case),
        }
    return found


def _measured(profile: Profile, sums: Any, run: RunDir) -> Case:
    """The profile's case with the times of a run."""
    if run.manifest.get("experiment") != "two-round":
        raise UsageError(
            f"{run.path} is not a two-round run", hint="give a run of `kvlab run two-round`"
        )
    known = predicted.machine_of(run)
    if isinstance(known, str):
        raise UsageError(
            f"run {run.id} does not say how fast its machine is: {known.replace('-', ' ')}",
            hint="give a complete two-round run with both arms, one request in flight",
        )
    calibration, setup = known
    ran, asked = setup.profile.model.name, profile.model.name
    if ran != asked:
        raise UsageError(
            f"run {run.id} served {ran}, the profile {asked}: its times are another model's",
            hint="give a run of the same model",
        )
    summary = run.read_summary() or {}
    cost = summary.get("bill") or {}
    host = run.manifest.get("host") or {}
    cores = (host.get("cpu") or {}).get("cores") if isinstance(host.get("cpu"), dict) else None
    free = (host.get("disk") or {}).get("free_gib")
    return case_of(
        profile,
        sums,
        machine=Machine(prefill=calibration.prefill, restores=calibration.restores),
        source=run.id,
        measured=Measured(
            first_visit_ms=(cost.get("break_even") or {}).get("cost_ms"),
            server_cpu_ms=(cost.get("server") or {}).get("cpu_ms_per_request"),
            cores=cores,
            disk_free_bytes=free * GIB if free else None,
        ),
    )


def _workload(case: Case) -> dict[str, Any]:
    """Round 2 of the profile's own workload, as far as it can be predicted."""
    alone, cached = case.forecast_alone(), case.forecast()
    if alone is None or cached is None:
        return {}
    speedup = time_model.estimate(alone.ttft_ms / cached.ttft_ms)
    return {
        "served_share": {
            tier: {"value": share.value, "range": [share.low, share.high]}
            for tier, share in cached.shares.items()
        },
        "ttft_ms": {
            name: _figure(time_model.estimate(one.ttft_ms))
            for name, one in (("baseline", alone), ("lmcache", cached))
        },
        "speedup": _figure(speedup),
    }


def _figure(found: time_model.Estimate) -> dict[str, Any]:
    return {"value": found.value, "ci95": [found.low, found.high]}


def text(found: Mapping[str, Any]) -> str:
    """The answers in sentences, for a terminal."""
    lines = [*_sizes(found["sizes"]), "", *_round(found["workload"], found["times_from"])]
    for name, one in found["questions"].items():
        lines += ["", questions.NAMES[name], one["sentence"]]
    if "published" in found:
        lines += ["", *explanation.sentences(found["published"])]
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _round(found: Mapping[str, Any], source: str | None) -> Iterator[str]:
    yield f"Round 2 of this workload (simulated; times {_told(source)})"
    yield ""
    if not found:
        yield questions.NO_TIMES
        return
    shares = found["served_share"]
    told = ", ".join(f"{tier} {one['value']:.1%}" for tier, one in shares.items())
    yield f"Tokens by tier with LMCache: {told}."
    alone, cached = found["ttft_ms"]["baseline"], found["ttft_ms"]["lmcache"]
    yield (
        f"TTFT {_interval(alone, 1)} ms without and {_interval(cached, 1)} ms with LMCache: "
        f"{_interval(found['speedup'], 2)} times as fast."
    )


def _told(source: str | None) -> str:
    if source == "published":
        return "from the published baseline figure and assumed read rates"
    return f"of run {source}" if source else "not known"


def _interval(one: Mapping[str, Any], digits: int) -> str:
    low, high = one["ci95"]
    return f"{one['value']:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _sizes(found: Mapping[str, Any]) -> Iterator[str]:
    yield "Sizes (derived from the model's config.json and the profile)"
    yield ""
    yield (
        f"N = {found['block_tokens']:,} tokens by the model's shape, chunks of "
        f"{found['chunk_tokens']:,} tokens hold {byte_size(found['chunk_bytes'])}; a context "
        f"leaves {found['records_per_context']} records of "
        f"{byte_size(found['context_bytes'])} together."
    )
    yield (
        f"The workload is {byte_size(found['working_set_bytes'])} in L1 and L2 "
        f"({byte_size(found['l0_working_set_bytes'])} of K and V alone in vLLM's cache). L1 of "
        f"{byte_size(found['l1_bytes'])} holds {found['l1_share']:.1%} of it; below its watermark "
        f"that is {found['l1_contexts']:,.1f} contexts."
    )
