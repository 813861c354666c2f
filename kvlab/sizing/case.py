"""A profile's workload on a machine: everything that the questions of sizing are asked of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvlab.profile import Profile
from kvlab.report.published import dgx_spark, fx100
from kvlab.sizing import prediction, time_model, trace
from kvlab.sizing.model import Arithmetic
from kvlab.sizing.prediction import Forecast, Machine
from kvlab.sizing.tiers import Tiers, tiers_of
from kvlab.sizing.time_model import RESAMPLES, Draws, Prefill, Restore
from kvlab.units import GIB

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run measured beside its times; None where it did not."""

    first_visit_ms: float | None = None
    """How much longer a first visit takes with LMCache than without."""
    server_cpu_ms: float | None = None
    """Processor time of LMCache's server per request."""
    cores: int | None = None
    disk_free_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload, the tiers that serve it, and the machine's times as far as they are known."""

    profile: Profile
    sums: Arithmetic
    tiers: Tiers
    alone: Tiers
    machine: Machine | None = None
    source: str | None = None
    """Where the machine's times come from: ``published``, or the id of a run."""
    measured: Measured = Measured()

    @property
    def chunk_tokens(self) -> int:
        return self.profile.cache.chunk_tokens

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the records that restore one context of the workload."""
        chunks = self.profile.workload.restorable_tokens(self.chunk_tokens) // self.chunk_tokens
        states = self.tiers.state_bytes
        return chunks * (self.tiers.chunk_bytes - states) + (states if chunks else 0)

    def forecast(self, machine: Machine | None = None, **tiers: float) -> Forecast | None:
        """Round 2 with LMCache, its tiers changed as given; None without a machine."""
        known = machine or self.machine
        if known is None:
            return None
        changed = replace(self.tiers, **tiers)  # type: ignore[arg-type]
        return prediction.forecast(trace.of_profile(self.profile), changed, known)

    def forecast_alone(self) -> Forecast | None:
        """Round 2 of vLLM alone; None without a machine."""
        if self.machine is None:
            return None
        return prediction.forecast(trace.of_profile(self.profile), self.alone, self.machine)

    def shaped(self, shape: str) -> Case:
        """The same with the other shape of the workload."""
        work = self.profile.workload.model_copy(update={"shape": shape})
        return replace(self, profile=self.profile.model_copy(update={"workload": work}))


def case_of(
    profile: Profile,
    sums: Arithmetic,
    *,
    machine: Machine | None = None,
    source: str | None = None,
    measured: Measured = Measured(),
    l0_bytes: float | None = None,
) -> Case:
    """The case of a profile; ``l0_bytes`` is the size of vLLM's cache where only that is known."""
    l0 = None
    if l0_bytes is not None:
        blocks = sums.attention_groups * max(1, profile.cache.chunk_tokens // sums.block_tokens)
        l0 = sums.pool_blocks(l0_bytes) // blocks
    return Case(
        profile=profile,
        sums=sums,
        tiers=tiers_of(profile, sums, "lmcache", l0_chunks=l0),
        alone=tiers_of(profile, sums, "baseline", l0_chunks=l0),
        machine=machine,
        source=source,
        measured=measured,
    )


def published_machine(tokens: int, attention: float) -> Machine:
    """The DGX Spark of the report, from its baseline figure and two ranges that it does not give.

    A draw takes attention's share evenly between none and what the model's shape says, and the read
    rate of the disk evenly on the log scale between the slowest and the fastest figure of the FX100
    article; the estimate is the middle of both. Memory is taken to cost nothing.
    """
    baseline_ms = dgx_spark()["ttft_ms"]["baseline"]["median"]
    rates = fx100()["read_gb_per_s"]
    share, place = _even(0), _even(1)
    ratio = attention * share
    per_token = baseline_ms / (tokens + ratio * tokens**2)
    low, high = math.log(rates["serial"]), math.log(rates["rated"][1])
    return Machine(
        prefill=Prefill(
            constant_ms=time_model.certain(0),
            linear_ms=per_token,
            quadratic_ms=per_token * ratio,
            lengths=(tokens,),
        ),
        restores={
            "L2": Restore(
                latency_ms=time_model.certain(0),
                bytes_per_s=GB * np.exp(low + (high - low) * place),
            )
        },
    )


def published_l0_bytes() -> float:
    """The size of vLLM's cache that the report states."""
    return float(dgx_spark()["l0_gib"]) * GIB


def _even(seed: int) -> Draws:
    """The middle of 0 to 1, then draws from all of it."""
    drawn = np.random.RandomState(seed).uniform(size=RESAMPLES)
    draws: Draws = np.concatenate([[0.5], drawn])
    return draws


def restores_scaled(machine: Machine, factor: float) -> Mapping[str, Restore]:
    """The machine's restores with the bandwidth of L2 so many times as large."""
    restores = dict(machine.restores)
    slow = restores.get("L2")
    if slow is not None and slow.bytes_per_s is not None:
        restores["L2"] = replace(slow, bytes_per_s=slow.bytes_per_s * factor)
    return restores
