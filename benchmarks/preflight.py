"""How long preflight takes: every rule over each profile, and what is tried on this machine.

python benchmarks/preflight.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kvlab import preflight, profile

PASSES = 20


def main() -> None:
    """Print a line per profile: milliseconds of the pure rules, and of gathering the case."""
    print(f"{'profile':<18}{'rules ms':>10}{'gather ms':>11}{'findings':>10}")
    for name in profile.names():
        chosen = profile.load(name)
        case = preflight.gather(chosen)
        rules_ms = median_ms(lambda case=case: preflight.evaluate(case))
        gather_ms = median_ms(lambda chosen=chosen: preflight.gather(chosen), passes=3)
        print(f"{name:<18}{rules_ms:>10.1f}{gather_ms:>11.0f}{len(preflight.evaluate(case)):>10}")


def median_ms(call: Callable[[], object], passes: int = PASSES) -> float:
    """The median time of a call in milliseconds."""
    times = []
    for _ in range(passes):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    main()
