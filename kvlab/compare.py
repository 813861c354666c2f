"""Two runs side by side, with the statistics of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvlab import evidence, stats, summary, verdict
from kvlab.errors import UsageError
from kvlab.rundir import RunDir

SCHEMA = 1


def compare(
    first: RunDir, second: RunDir, *, allow_different_hosts: bool = False
) -> dict[str, Any]:
    """What changed from the first run to the second: settings, times and speedup.

    Keys: ``runs``, ``same_host``, ``verdicts``, ``settings`` that differ, ``speedup`` of both, and
    ``arms``, in order, with the medians of both runs and ``ratio``: the first's over the second's,
    so that above 1 the second run is faster. The figures of an invalid run are left out. Raises
    UsageError when the runs are of different experiments, or of different hosts unless that is
    allowed: a difference between machines is not one between settings.
    """
    one, other = first.manifest, second.manifest
    if one.get("experiment") != other.get("experiment"):
        raise UsageError(
            f"{first.id} is a run of {one.get('experiment')}, {second.id} of"
            f" {other.get('experiment')}",
            hint="compare two runs of the same experiment",
        )
    same_host = (
        one.get("fingerprint") is not None
        and one.get("fingerprint") == other.get("fingerprint")
        and _attached(one) == _attached(other)
    )
    if not same_host and not allow_different_hosts:
        raise UsageError(
            f"{first.id} and {second.id} were measured on different hosts",
            hint="give --different-hosts to compare them all the same",
        )
    summaries = [summary.summarise(first), summary.summarise(second)]
    valid = [s["verdict"]["status"] != verdict.INVALID for s in summaries]
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": one["experiment"],
        "runs": [first.id, second.id],
        "same_host": same_host,
        "verdicts": [s["verdict"] for s in summaries],
        "settings": {
            key: {"first": a, "second": b}
            for key, a, b in _settings(one["profile"], other["profile"])
        },
    }
    if all(valid) and one["experiment"] != "two-round":
        result["arms"] = [*_named_arms(first, second)]
    elif all(valid):
        if all(s["speedup"] for s in summaries):
            result["speedup"] = [s["speedup"] for s in summaries]
        common = min(len(s["arms"]) for s in summaries)
        result["arms"] = [_arm(first, second, summaries, -place) for place in range(common, 0, -1)]
    return result


def _attached(manifest: Mapping[str, Any]) -> set[str]:
    """The URLs of the deployment that was measured, whose machines the fingerprint does not know.

    None of them where kvlab started the servers on its own machine.
    """
    profile = manifest.get("profile") or {}
    section = profile.get("attach") if profile.get("runtime") == "attach" else None
    places = [*(section or {}).get("vllm", ()), *(section or {}).get("lmcache", ())]
    places += [baseline] if (baseline := (section or {}).get("baseline")) else []
    return {str(place.get("url")) for place in places if isinstance(place, dict)}


def _arm(
    first: RunDir, second: RunDir, summaries: list[dict[str, Any]], place: int
) -> dict[str, Any]:
    """One arm of both runs: medians, and the ratio of the first to the second."""
    names = [s["arms"][place] for s in summaries]
    found: dict[str, Any] = {
        "arms": names,
        "median_ms": [s["ttft_ms"][n]["median"] for s, n in zip(summaries, names, strict=True)],
    }
    ratio = stats.ratio(_times(first, place), _times(second, place), seed=first.bootstrap_seed)
    if ratio is not None:
        found["ratio"] = {"value": ratio.value, "ci95": [ratio.low, ratio.high]}
    return found


def _named_arms(first: RunDir, second: RunDir) -> Iterator[dict[str, Any]]:
    """The arms that both runs of an experiment have, by its own names; none where it has no times.

    The contexts of two runs differ in their tokens; their place pairs them, and their length.
    """
    before, after = summary.times(first), summary.times(second)
    for name in before:
        medians = [stats.arm_median(times[name]) for times in (before, after) if name in times]
        if len(medians) < 2 or None in medians:
            continue
        found: dict[str, Any] = {"arms": [name, name], "median_ms": medians}
        ratio = stats.ratio(before[name], after[name], seed=first.bootstrap_seed)
        if ratio is not None:
            found["ratio"] = {"value": ratio.value, "ci95": [ratio.low, ratio.high]}
        yield found


def _times(run: RunDir, place: int) -> stats.Arm:
    plan = evidence.plan(run.manifest)
    accounts = evidence.accounts(plan, run.requests(), run.scrapes())
    return evidence.times_ms(accounts, plan.arms[place], "measure")


def _settings(
    first: Mapping[str, Any], second: Mapping[str, Any], where: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Settings of two profiles that differ, by dotted key."""
    for key in sorted(first.keys() | second.keys()):
        a, b = first.get(key), second.get(key)
        place = f"{where}.{key}" if where else key
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _settings(a, b, place)
        elif a != b:
            yield place, a, b


def text(result: Mapping[str, Any]) -> str:
    """The comparison for a terminal."""
    first, second = result["runs"]
    lines = [f"first:  {first}: {result['verdicts'][0]['status']}"]
    lines.append(f"second: {second}: {result['verdicts'][1]['status']}")
    if not result["same_host"]:
        lines.append("note: the hosts differ, so times do not compare")
    for key, values in result["settings"].items():
        lines.append(f"setting {key}: {values['first']} -> {values['second']}")
    if "arms" not in result:
        lines.append("no figures: a run is invalid")
        return "\n".join(lines)
    for arm in result["arms"]:
        name, (before, after) = " / ".join(dict.fromkeys(arm["arms"])), arm["median_ms"]
        line = f"{name}: median TTFT {before:.1f} -> {after:.1f} ms"
        if "ratio" in arm:
            line += f", {_interval(arm['ratio'])} times as fast"
        lines.append(line)
    if "speedup" in result:
        values = [_interval(speedup) for speedup in result["speedup"]]
        lines.append(f"speedup: {' -> '.join(values)}")
    return "\n".join(lines)


def _interval(ratio: Mapping[str, Any]) -> str:
    low, high = ratio["ci95"]
    return f"{ratio['value']:.2f} ({low:.2f} to {high:.2f})"
