"""How long the first token takes: prefill by length, restore by tier. Pure.

    TTFT(T, C)  = prefill(T, C) + restore(bytes of C)
    prefill     = c + a (T - C) + b (T^2 - C^2)     of T tokens, C of them restored
    restore     = latency + bytes / bandwidth       of each tier that is asked

``b`` is attention: a token attends to every earlier one, restored or not, so restoring the first
half of a prompt saves less than half of its prefill. Decoding is not part of a first token.

Every parameter is an array of ``1 + RESAMPLES`` values: first the estimate, then its bootstrap
draws. Whatever is computed from parameters is such an array again, so that an uncertainty is
carried through to every figure by the same arithmetic. Draws come from MT19937, as numpy froze it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.float64]
"""The estimate, then its bootstrap draws."""

Repeats = Sequence[Sequence[float]]
"""Times of equal requests, one sequence for each repeat that has any."""

RESAMPLES = 400
CONFIDENCE = 0.95
TERMS = ("constant", "linear", "quadratic")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self, unit: str) -> dict[str, object]:
        """The figure under its unit, the interval beside it, as summaries keep them."""
        return {unit: self.value, "ci95": [self.low, self.high]}


def estimate(draws: Draws) -> Estimate:
    """The figure that an array of draws stands for; the interval always holds the value."""
    value = float(draws[0])
    low, high = np.quantile(draws[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def certain(value: float) -> Draws:
    """A value without uncertainty, such as one that is stated."""
    return np.full(1 + RESAMPLES, float(value))


def resampled_median(repeats: Repeats, seed: int) -> Draws:
    """The median over repeats of their medians, and the same of bootstrap resamples.

    Repeats are drawn with replacement, then times within each, as ``kvlab.stats`` does.
    """
    known = [np.asarray(values, dtype=np.float64) for values in repeats if len(values)]
    stream = np.random.RandomState(seed % 2**32)
    drawn = stream.randint(0, len(known), size=(RESAMPLES, len(known)))
    medians = np.empty(drawn.shape)
    for number, times in enumerate(known):
        rows = np.nonzero(drawn == number)
        chosen = stream.randint(0, len(times), size=(len(rows[0]), len(times)))
        medians[rows] = np.median(times[chosen], axis=1)
    value = np.median([np.median(times) for times in known])
    draws: Draws = np.concatenate([[value], np.median(medians, axis=1)])
    return draws


def residuals(repeats: Repeats) -> NDArray[np.float64]:
    """How far each time lies from the median of its repeat: the spread of single requests."""
    known = [np.asarray(values, dtype=np.float64) for values in repeats if len(values)]
    if not known:
        return np.zeros(1)
    return np.concatenate([times - np.median(times) for times in known])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The prefill of a machine, as far as the lengths that were measured tell its terms apart."""

    constant_ms: Draws
    """c: what a request costs whatever its length."""
    linear_ms: Draws
    """a, per token."""
    quadratic_ms: Draws
    """b, per token squared."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Where each term comes from: ``measured``, ``arithmetic`` or ``not separable`` (then 0)."""
    lengths: tuple[int, ...] = ()
    """The lengths that were measured, in tokens."""

    def ms(self, tokens: float, cached: float = 0) -> Draws:
        """Milliseconds to compute the tokens behind ``cached`` ones, of ``tokens`` in all."""
        linear, quadratic = tokens - cached, tokens**2 - cached**2
        return self.constant_ms + self.linear_ms * linear + self.quadratic_ms * quadratic

    def covers(self, tokens: float) -> bool:
        """Whether a length lies within those measured, so that nothing is extrapolated."""
        return bool(self.lengths) and min(self.lengths) <= tokens <= max(self.lengths)


def fit_prefill(
    times_ms: Mapping[int, Repeats], *, seed: int, attention: float | None = None
) -> Prefill | None:
    """The prefill that fits times in ms by length in tokens; None when there is none.

    Least squares over the medians of the lengths, in relative errors, no term below 0. One length
    gives one term, two give the constant as well, three and more the quadratic term. With fewer
    than three, ``attention`` (b / a, from the model's shape: see ``attention_ratio``) sets the
    quadratic term beside the linear one; without it the term is 0 and called not separable.
    """
    lengths = sorted(length for length, repeats in times_ms.items() if any(map(len, repeats)))
    if not lengths:
        return None
    medians = np.stack(
        [resampled_median(times_ms[n], seed + place) for place, n in enumerate(lengths)]
    )
    n = np.asarray(lengths, dtype=np.float64)
    fitted = len(lengths) >= 3
    work = n if fitted else n + (attention or 0.0) * n**2
    columns = [work] if len(lengths) == 1 else [np.ones_like(n), work]
    design = np.stack([*columns, n**2] if fitted else columns, axis=1)
    found = _non_negative(design, medians)
    constant = found[0] if len(lengths) > 1 else certain(0)
    linear = found[0] if len(lengths) == 1 else found[1]
    given = "arithmetic" if attention else "not separable"
    return Prefill(
        constant_ms=constant,
        linear_ms=linear,
        quadratic_ms=found[2] if fitted else linear * (attention or 0.0),
        origin={
            "constant": "measured" if len(lengths) > 1 else "not separable",
            "linear": "measured",
            "quadratic": "measured" if fitted else given,
        },
        lengths=tuple(lengths),
    )


def _non_negative(design: NDArray[np.float64], medians: NDArray[np.float64]) -> list[Draws]:
    """The terms of each draw; rows are weighted by their time, so that errors are relative."""
    if design.shape == (2, 2):
        return _through_two(design, medians)
    from scipy.optimize import nnls

    terms = np.empty((design.shape[1], medians.shape[1]))
    for draw, times in enumerate(medians.T):
        weighted = design / times[:, None]
        scale = np.abs(weighted).max(axis=0)
        terms[:, draw] = nnls(weighted / scale, np.ones(len(times)))[0] / scale
    return list(terms)


def _through_two(design: NDArray[np.float64], medians: NDArray[np.float64]) -> list[Draws]:
    """The line through two points; where a term would be below 0, the other one alone."""
    (_, near), (_, far) = design
    low, high = medians
    slope = (high - low) / (far - near)
    constant = low - slope * near
    alone = near / low, far / high  # relative errors of a line through 0: sum of (slope x - 1)^2
    through_zero = (alone[0] + alone[1]) / (alone[0] ** 2 + alone[1] ** 2)
    level = (1 / low + 1 / high) / (1 / low**2 + 1 / high**2)
    slope_kept = np.where(slope < 0, 0.0, np.where(constant < 0, through_zero, slope))
    constant_kept = np.where(slope < 0, level, np.maximum(0.0, constant))
    return [constant_kept, slope_kept]


def attention_ratio(
    *, active_parameters: float, attention_layers: int, heads: int, head_dim: int
) -> float:
    """b / a of a model: how much dearer a token gets per token before it. Arithmetic only.

    A token costs ``2 x active parameters`` floating-point operations, and in every attention
    layer ``4 x heads x head_dim`` for each earlier token (scores and values, 2 each). Summed over
    a prompt the earlier tokens are n^2 / 2, hence the 2. It takes all operations for equally fast.
    """
    return 2 * heads * head_dim * attention_layers / (2 * active_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What one tier takes to give tokens back."""

    latency_ms: Draws
    bytes_per_s: Draws | None = None
    """None: the bandwidth could not be told from the latency, which then holds all of it."""
    spread_ms: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    """How far single requests lay from the median of their repeat."""

    def ms(self, size: float) -> Draws:
        """Milliseconds to restore so many bytes; nothing is asked for 0 bytes."""
        if size <= 0:
            return certain(0)
        if self.bytes_per_s is None:
            return self.latency_ms
        return self.latency_ms + 1000 * size / self.bytes_per_s


def calibrate_restore(
    times_ms: Repeats,
    prefill: Prefill,
    *,
    tokens: float,
    restored: float,
    size: float,
    bytes_per_s: float | None,
    seed: int,
) -> Restore | None:
    """The restore that explains times of requests with ``restored`` of ``tokens`` given back.

    What the prefill of the rest and the transfer of ``size`` bytes leave is latency, 0 at least.
    None: there are no times.
    """
    if not any(map(len, times_ms)):
        return None
    left = resampled_median(times_ms, seed) - prefill.ms(tokens, restored)
    if bytes_per_s is not None:
        left = left - 1000 * size / bytes_per_s
    return Restore(
        latency_ms=np.maximum(0.0, left),
        bytes_per_s=None if bytes_per_s is None else certain(bytes_per_s),
        spread_ms=residuals(times_ms),
    )


def fit_restore(times_ms: Mapping[float, Repeats], *, seed: int) -> Restore | None:
    """Latency and bandwidth from restore times by bytes, two sizes at least; None below that."""
    sizes = sorted(size for size, repeats in times_ms.items() if any(map(len, repeats)))
    if len(sizes) < 2:
        return None
    medians = np.stack([resampled_median(times_ms[s], seed + i) for i, s in enumerate(sizes)])
    design = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=np.float64)], axis=1)
    latency, per_byte = _non_negative(design, medians)
    if per_byte[0] <= 0:
        return Restore(latency_ms=latency)
    slope = np.where(per_byte > 0, per_byte, per_byte[0])
    return Restore(latency_ms=latency, bytes_per_s=1000 / slope)


def ttft_ms(
    prefill: Prefill,
    restores: Mapping[str, Restore],
    *,
    tokens: float,
    served_bytes: Mapping[str, float],
    served_tokens: float,
) -> Draws:
    """TTFT of a prompt of ``tokens``, the first ``served_tokens`` of them from these tiers.

    Tiers are asked at the same time and share the way into the engine: of their latencies the
    largest counts, of their transfers the sum. A tier that is not in ``restores`` costs nothing.
    """
    asked = [
        (restores[tier], size)
        for tier, size in served_bytes.items()
        if size > 0 and tier in restores
    ]
    time = prefill.ms(tokens, served_tokens)
    if asked:
        time = time + np.max([one.latency_ms for one, _ in asked], axis=0)
        for one, size in asked:
            time = time + (one.ms(size) - one.latency_ms)
    return time


def break_even_tokens(
    prefill: Prefill, restore: Restore, *, bytes_per_chunk: float, chunk: int, most: int
) -> int | None:
    """The shortest prefix of whole chunks whose restore takes less than its prefill.

    The prompt is that prefix and one token. None: no prefix of up to ``most`` tokens does.
    """
    for chunks in range(1, max(0, most - 1) // chunk + 1):
        prefix = chunks * chunk
        saved = prefill.ms(prefix + 1) - prefill.ms(prefix + 1, prefix)
        if restore.ms(chunks * bytes_per_chunk)[0] < saved[0]:
            return prefix
    return None
