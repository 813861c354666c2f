"""The four acceptance gates of a joint test, from run folders alone. Pure.

G1  machine and storage  what fio reads and the snapshot writes, against the profile's expectation
G2  baseline             an A/B whose every condition holds, and an A/A control that shows nothing
G3  gain                 TTFT falls by a quarter or more, throughput rises into the published band
G4  stability            72 hours without an error or a drift

Each is ``pass``, ``fail`` or ``not measured``, with the reason and the runs it rests on. The
thresholds are those of the FX100 article (Mingxin, July 2026), in the profile's ``gates``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab import summary, verdict
from kvlab.errors import UsageError
from kvlab.profile import Gates
from kvlab.rundir import RunDir

SCHEMA = 1
PASS, FAIL, NOT_MEASURED = "pass", "fail", "not measured"
TITLES = {
    "G1": "machine and storage",
    "G2": "single-machine baseline",
    "G3": "TTFT and throughput",
    "G4": "stability",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one run says to one gate; a status of None says nothing about it."""

    status: str | None
    reason: str
    run: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A complete run: its summary, recomputed, and the thresholds of its profile."""

    run: str
    found: Mapping[str, Any]
    demands: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        return str(self.found["experiment"])

    @property
    def status(self) -> str:
        return str(self.found["verdict"]["status"])

    def says(self, status: str | None, reason: str) -> Finding:
        """One finding of this run."""
        return Finding(status, reason, self.run)


def judge(runs: Sequence[RunDir]) -> dict[str, Any]:
    """Every gate's status, reasons and runs: ``{"gates": [{"gate": "G1", "status": …}, …]}``.

    Raises UsageError for runs of different machines: a gate is about one.
    """
    _refuse_mixed(runs)
    partial = [run.id for run in runs if run.manifest.get("status") != "complete"]
    complete = [_measured(run) for run in runs if run.id not in partial]
    return {
        "schema": SCHEMA,
        "gates": [_gate(name, rule(complete)) for name, rule in RULES.items()],
        "left_out": partial,
    }


def text(result: Mapping[str, Any]) -> str:
    """The gates for a terminal."""
    lines = []
    for gate in result["gates"]:
        lines.append(f"{gate['gate']} {gate['title']}: {gate['status']}")
        lines += [f"  - {reason}" for reason in gate["reasons"]]
        lines += [f"  run: {run}" for run in gate["runs"]]
    lines += [f"left out, it is not complete: {run}" for run in result["left_out"]]
    return "\n".join(lines)


def _refuse_mixed(runs: Sequence[RunDir]) -> None:
    hosts = {run.manifest.get("fingerprint") for run in runs}
    if len(hosts) > 1:
        raise UsageError(
            "these runs were measured on different machines, and a gate is about one",
            hint="give the runs of one machine at a time",
        )


def _measured(run: RunDir) -> Measured:
    stated = run.manifest["profile"].get("gates") or {}
    demands = {**Gates().model_dump(mode="json"), **stated}
    return Measured(run.id, summary.summarise(run), demands)


def _gate(name: str, findings: Iterator[Finding]) -> dict[str, Any]:
    """A gate fails with any run that fails it, and passes only when nothing is missing."""
    every = list(findings)
    statuses = [finding.status for finding in every]
    if FAIL in statuses:
        status = FAIL
    else:
        status = NOT_MEASURED if NOT_MEASURED in statuses or PASS not in statuses else PASS
    counted = [finding for finding in every if status != FAIL or finding.status == FAIL]
    return {
        "gate": name,
        "title": TITLES[name],
        "status": status,
        "reasons": [finding.reason for finding in counted],
        "runs": list(dict.fromkeys(finding.run for finding in counted if finding.run)),
    }


def _missing(reason: str) -> Finding:
    return Finding(NOT_MEASURED, reason, "")


def _invalid(one: Measured) -> Finding:
    reasons = "; ".join(one.found["verdict"]["reasons"])
    return one.says(FAIL, f"the {one.experiment} run is invalid: {reasons}")


def storage_gate(runs: Sequence[Measured]) -> Iterator[Finding]:
    """G1: reads and writes of the first place, which must be a real one."""
    reads = [one for one in runs if one.experiment in ("storage", "parallel-read")]
    writes = [one for one in runs if one.experiment == "storage"]
    for name, measured, rate in (
        ("read", reads, _read_rate),
        ("write", writes, _write_rate),
    ):
        if not measured:
            wanted = "storage or parallel-read" if name == "read" else "storage"
            yield _missing(f"no {wanted} run is among the runs")
        for one in measured:
            yield _rate(one, name, rate(one))


def _first_place(one: Measured) -> Mapping[str, Any]:
    paths: Sequence[Mapping[str, Any]] = one.found.get("paths") or []
    return paths[0] if paths else {}


def _read_rate(one: Measured) -> float | None:
    return _first_place(one).get("ceiling_gb_per_s")


def _write_rate(one: Measured) -> float | None:
    place = _first_place(one).get("name")
    rates = [row.get("gb_per_s") for row in one.found["snapshots"] if row["path"] == place]
    return rates[0] if rates else None


def _rate(one: Measured, name: str, rate: float | None) -> Finding:
    place, least = _first_place(one), one.demands[f"{name}_gb_per_s_min"]
    if one.status == verdict.INVALID:
        return _invalid(one)
    if place.get("emulated"):
        return one.says(NOT_MEASURED, f"{place['name']} is emulated, so it accepts no storage")
    if rate is None:
        return one.says(NOT_MEASURED, f"the {name} rate of the first place is unknown")
    if least is None:
        return one.says(
            NOT_MEASURED,
            f"{place['name']} {name}s {rate:.3g} GB/s; the profile sets no gates."
            f"{name}_gb_per_s_min to hold against it",
        )
    status = PASS if rate >= least else FAIL
    return one.says(
        status, f"{place['name']} {name}s {rate:.3g} GB/s, at least {least:g} are demanded"
    )


def baseline_gate(runs: Sequence[Measured]) -> Iterator[Finding]:
    """G2: a valid A/B, and a quiet A/A control."""
    pairs = [one for one in runs if one.experiment == "two-round"]
    for control, name in ((False, "A/B"), (True, "A/A control")):
        chosen = [one for one in pairs if bool(one.found.get("control")) is control]
        if not chosen:
            hint = " --control" if control else ""
            yield _missing(f"no {name} is among the runs: kvlab run two-round{hint}")
        for one in chosen:
            if one.status == verdict.INVALID:
                yield _invalid(one)
            else:
                yield one.says(PASS, f"{name}: {one.status}; {one.found['verdict']['reasons'][0]}")


def gain_gate(runs: Sequence[Measured]) -> Iterator[Finding]:
    """G3: at every concurrency, in the first place, the treated adapter over the reference."""
    chosen = [one for one in runs if one.experiment == "parallel-read"]
    if not chosen:
        yield _missing("no parallel-read run is among the runs")
    for one in chosen:
        place = _first_place(one)
        if one.status == verdict.INVALID:
            yield _invalid(one)
        elif place.get("emulated"):
            yield one.says(
                NOT_MEASURED, f"{place['name']} is emulated: its times are set, not measured"
            )
        else:
            yield from _gains(one, str(place.get("name")))


def _gains(one: Measured, place: str) -> Iterator[Finding]:
    least = one.demands["ttft_reduction_min"]
    low_gain, high_gain = one.demands["throughput_gain"]
    for row in one.found["comparisons"]:
        if (row["kind"], row["path"], row["adapter"]) != (
            *("adapter", place),
            one.found["treated"],
        ):
            continue
        slots = row["concurrency"]
        value, low = row["speedup"]["value"], row["speedup"]["ci95"][0]
        fallen = 1 - 1 / low
        yield one.says(
            PASS if fallen >= least else FAIL,
            f"at {slots} in flight TTFT falls by {1 - 1 / value:.1%}, with 95 % confidence by"
            f" {fallen:.1%} or more; {least:.0%} are demanded",
        )
        gain = row.get("throughput_ratio")
        if gain is None:
            yield one.says(NOT_MEASURED, f"at {slots} in flight the throughput is unknown")
            continue
        above = ", above the published band" if gain - 1 > high_gain else ""
        yield one.says(
            PASS if gain - 1 >= low_gain else FAIL,
            f"at {slots} in flight throughput changes by {gain - 1:+.1%}{above};"
            f" {low_gain:+.0%} to {high_gain:+.0%} was published",
        )


def soak_gate(runs: Sequence[Measured]) -> Iterator[Finding]:
    """G4: a soak of the whole time, without an error and with every drift within its limit."""
    chosen = [one for one in runs if one.experiment == "soak"]
    if not chosen:
        yield _missing("no soak is among the runs")
    for one in chosen:
        lasted, wanted = float(one.found["measured_s"]), float(one.demands["soak_s"])
        if one.status == verdict.INVALID:
            yield _invalid(one)
        elif one.status == verdict.REFUTED:
            yield one.says(FAIL, "; ".join(one.found["verdict"]["reasons"]))
        elif lasted < wanted:
            yield one.says(
                NOT_MEASURED, f"the soak lasted {lasted:,.0f} s of the {wanted:,.0f} s demanded"
            )
        else:
            passed = one.status == verdict.PROVEN
            reasons = "; ".join(one.found["verdict"]["reasons"])
            yield one.says(PASS if passed else NOT_MEASURED, f"{lasted:,.0f} s: {reasons}")


RULES: dict[str, Callable[[Sequence[Measured]], Iterator[Finding]]] = {
    "G1": storage_gate,
    "G2": baseline_gate,
    "G3": gain_gate,
    "G4": soak_gate,
}
