"""Why the DGX Spark report measured 1.95x: derived from its own settings, not measured. Pure.

Given are the report's baseline figure, its settings and its sizes; the figure of the lmcache arm
is only compared with what comes out. Two things are not in the report and are taken as ranges: how
fast its disk is read (between the slowest and the fastest figure of the FX100 article), and how
much dearer late tokens are than early ones (between not at all and what the model's shape says).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.profile import Profile, Workload
from kvlab.report.published import dgx_spark, fx100
from kvlab.sizing import time_model
from kvlab.sizing.case import Case
from kvlab.sizing.time_model import Prefill, certain

GB = 1e9
GIB = 1 << 30
SHAPES = ("prefix_suffix", "identical")
RATIOS = (0.99, 0.2)
"""The published eviction ratio, and LMCache's default."""


def applies_to(profile: Profile) -> bool:
    """Whether a profile is the published experiment, which alone is explained."""
    published = dgx_spark()
    asked = (profile.model.name, profile.workload.context_tokens)
    return asked == (published["model"], published["context_tokens"])


def explain(profile: Profile, *, attention: float, chunk_bytes: int) -> dict[str, Any]:
    """What the profile's settings say about the published figures, all of it derived.

    ``attention`` is b / a of the model's prefill, ``chunk_bytes`` the size of a record by its
    shape, which stands beside the stated one as a check.

    ``shapes`` holds one entry for each shape of the workload: what whole blocks restore, the TTFT
    and the speedup of the lmcache arm as ranges, whether the published figure lies in them, and the
    read rate that the published figure would take.
    """
    published, rates = dgx_spark(), fx100()["read_gb_per_s"]
    baseline_ms = published["ttft_ms"]["baseline"]["median"]
    measured_ms = published["ttft_ms"]["lmcache"]["median"]
    tokens = profile.workload.context_tokens
    prefills = dict(_prefills(baseline_ms, tokens, attention))
    records = published["records"]
    sizes = [records["gb"] * GB / records["count"], records["gb"] * GIB / records["count"]]
    reads = [rates["serial"], rates["rated"][1]]
    chunk = profile.cache.chunk_tokens
    return {
        "derived": True,
        "given": {
            "baseline_ttft_ms": baseline_ms,
            "context_tokens": tokens,
            "chunk_tokens": chunk,
            "record_bytes": sizes,
            "files_per_cold_request": tokens // chunk,
        },
        "by_shape": {
            "record_bytes": chunk_bytes,
            "records_gib": records["count"] * chunk_bytes / GIB,
        },
        "assumed": {
            "read_gb_per_s": reads,
            "attention_per_token": attention,
        },
        "published": {
            "ttft_ms": measured_ms,
            "speedup": baseline_ms / measured_ms,
            "files_per_cold_request": records["files_per_cold_request"],
        },
        "shapes": {
            shape: _shape(
                profile.workload.model_copy(update={"shape": shape}),
                chunk,
                prefills,
                sizes,
                reads,
                baseline_ms,
                measured_ms,
            )
            for shape in SHAPES
        },
    }


def _prefills(baseline_ms: float, tokens: int, attention: float) -> Iterator[tuple[str, Prefill]]:
    """The baseline's one figure as a prefill: every token alike, and with attention's share."""
    for name, ratio in (("alike", 0.0), ("attention", attention)):
        per_token = baseline_ms / (tokens + ratio * tokens**2)
        yield (
            name,
            Prefill(
                constant_ms=certain(0),
                linear_ms=certain(per_token),
                quadratic_ms=certain(per_token * ratio),
            ),
        )


def _shape(
    work: Workload,
    chunk: int,
    prefills: Mapping[str, Prefill],
    sizes: list[float],
    reads: list[float],
    baseline_ms: float,
    measured_ms: float,
) -> dict[str, Any]:
    tokens, restored = work.context_tokens, work.restorable_tokens(chunk)
    blocks = restored // chunk
    computed = sorted(float(prefills[name].ms(tokens, restored)[0]) for name in prefills)
    slowest, fastest = min(reads), max(reads)
    times = [
        computed[0] + _read_ms(blocks * min(sizes), fastest),
        computed[1] + _read_ms(blocks * max(sizes), slowest),
    ]
    spare = [measured_ms - ms for ms in reversed(computed)]
    return {
        "returning_tokens": work.prefix_tokens,
        "whole_blocks": blocks,
        "restored_tokens": restored,
        "computed_tokens": tokens - restored,
        "speedup_bound": tokens / (tokens - restored),
        "computed_ms": computed,
        "restored_bytes": [blocks * size for size in sizes],
        "ttft_ms": times,
        "speedup": [baseline_ms / ms for ms in reversed(times)],
        "holds_published": times[0] <= measured_ms <= times[1],
        "spare_ms": spare,
        "read_gb_per_s_needed": [
            blocks * min(sizes) / GB / (spare[1] / 1000),
            blocks * max(sizes) / GB / (spare[0] / 1000),
        ],
        "constant_ms_at_most": max(
            0.0,
            (measured_ms - computed[0] - _read_ms(blocks * min(sizes), fastest))
            / (restored / tokens),
        ),
    }


def _read_ms(size: float, gb_per_s: float) -> float:
    return 1000 * size / (gb_per_s * GB)


def eviction(case: Case) -> dict[str, Any]:
    """Round 2 of both shapes with the published eviction ratio and with LMCache's default one.

    Simulated: shares of L1 and L2, and the speedup with its interval (``case.published_machine``).
    """
    found: dict[str, Any] = {}
    for shape in SHAPES:
        shaped = case.shaped(shape)
        alone = shaped.forecast_alone()
        found[shape] = {}
        for ratio in RATIOS:
            cached = shaped.forecast(ratio=ratio)
            if alone is None or cached is None:
                continue
            speedup = time_model.estimate(alone.ttft_ms / cached.ttft_ms)
            found[shape][f"{ratio:.2f}"] = {
                "L1": cached.shares["L1"].value,
                "L2": cached.shares["L2"].value,
                "speedup": speedup.value,
                "ci95": [speedup.low, speedup.high],
            }
    return found


def sentences(found: Mapping[str, Any]) -> Iterator[str]:
    """The explanation in sentences, a paragraph each, with its formulas and their sources."""
    given, assumed, published = found["given"], found["assumed"], found["published"]
    first, second = (found["shapes"][shape] for shape in SHAPES)
    tokens, chunk = given["context_tokens"], given["chunk_tokens"]
    low, high = (size / 1e6 for size in given["record_bytes"])
    serial, rated = assumed["read_gb_per_s"]
    yield (
        "Why 1.95x (derived from the settings and the baseline figure of the DGX Spark report, "
        "Openzeka, October 2026; nothing here was measured by kvlab)"
    )
    yield ""
    yield (
        f"Formula: TTFT = prefill of the tokens that no whole block restores + bytes / read rate. "
        f"Only whole blocks of N = {chunk:,} tokens come back, and the last token is always "
        "computed (docs/metrics.md, Bound)."
    )
    yield (
        f"Given by the report: {given['baseline_ttft_ms']:,.1f} ms for {tokens:,} tokens without "
        f"LMCache; 32 GB in 377 records, so {low:.0f} to {high:.0f} MB each (GB or GiB; the "
        f"model's shape gives {found['by_shape']['record_bytes'] / 1e6:.1f} MB and "
        f"{found['by_shape']['records_gib']:.1f} GiB for 377); "
        f"{published['files_per_cold_request']} files for each cold request, as "
        f"floor({tokens:,} / {chunk:,}) = {given['files_per_cold_request']} says."
    )
    yield (
        f"Not given, so taken as ranges: the disk reads {serial} GB/s (LMCache's serial reads) to "
        f"{rated} GB/s (the rating of an NVMe SSD), both figures of the FX100 article (Mingxin, "
        "July 2026); late tokens cost as much as early ones, or more by attention's share in the "
        f"model's shape (b / a = {assumed['attention_per_token']:.2e} per token)."
    )
    yield ""
    yield (
        f"Prefix and suffix (80 % returns): {first['returning_tokens']:,} tokens return, "
        f"{first['whole_blocks']} whole blocks = {first['restored_tokens']:,} tokens; "
        f"{first['computed_tokens']:,} are computed in {_span(first['computed_ms'], 0)} ms. "
        f"Bound {first['speedup_bound']:.2f}x, predicted "
        f"{_span(first['ttft_ms'], 0)} ms or {_span(first['speedup'], 2)}x. "
        f"The published {published['ttft_ms']:.1f} ms ({published['speedup']:.2f}x) "
        f"{_lies(first)} this range: it takes {_span(first['read_gb_per_s_needed'], 1)} GB/s."
    )
    yield (
        f"Identical contexts: {second['returning_tokens']:,} tokens return, "
        f"{second['whole_blocks']} whole blocks = {second['restored_tokens']:,} tokens; "
        f"{second['computed_tokens']:,} are computed in {_span(second['computed_ms'], 0)} ms. "
        f"Bound {second['speedup_bound']:.2f}x, predicted "
        f"{_span(second['ttft_ms'], 0)} ms or {_span(second['speedup'], 2)}x. "
        f"The published figure {_lies(second)} this range: its disk would have to be as slow as "
        f"{_span(second['read_gb_per_s_needed'], 2)} GB/s."
    )
    if first["holds_published"] and not second["holds_published"]:
        yield (
            "So the published figures fit contexts that return as prefixes with another end, as in "
            "LMCache's own benchmark, and not contexts that return whole. The report does not say "
            "which it used."
        )
    yield (
        "A cost that every request has, whatever its length, cannot be told from one length. "
        f"It would slow the lmcache arm by its share of {first['restored_tokens']:,} / {tokens:,}, "
        f"so with {rated} GB/s it is at most {first['constant_ms_at_most']:.0f} ms here; for "
        f"identical contexts to fit it would be {second['constant_ms_at_most']:.0f} ms."
    )
    if "eviction" in found:
        yield from _of_the_eviction(found["eviction"])


def _of_the_eviction(found: Mapping[str, Any]) -> Iterator[str]:
    fits, other = (found[shape] for shape in SHAPES)
    one, default = fits["0.99"], fits["0.20"]
    yield ""
    yield (
        "Eviction ratio 0.20 instead of 0.99 (simulated tiers: LRU, the profile's L1, one look a "
        f"second): with prefix and suffix L1 serves {one['L1']:.1%} of round 2 at 0.99 and "
        f"{default['L1']:.1%} at 0.20, L2 {one['L2']:.1%} and {default['L2']:.1%}; the predicted "
        f"speedup is {one['speedup']:.2f}x ({_span(one['ci95'], 2)}) and {default['speedup']:.2f}x "
        f"({_span(default['ci95'], 2)}). Contexts that return in order come back long after an LRU "
        "of this size has let them go, and every request stores a new record, so the ratio decides "
        "nothing here: L2 answers round 2."
    )
    one, default = other["0.99"], other["0.20"]
    yield (
        f"With identical contexts round 2 stores nothing new, and what round 1 left in L1 is still "
        f"there: {one['L1']:.1%} of round 2 at 0.99 and {default['L1']:.1%} at 0.20. The ratio "
        "moves hits between memory and disk and loses none while L2 holds every record; without "
        "L2 it would decide whether there are any (docs/findings.md)."
    )


def _lies(shape: Mapping[str, Any]) -> str:
    return "lies within" if shape["holds_published"] else "lies outside"


def _span(pair: list[float], digits: int) -> str:
    return f"{pair[0]:,.{digits}f} to {pair[1]:,.{digits}f}"
