"""The GPUs of the machine, as their vendors' own tools state them: what they are, what they do now.

Nothing here asks for a serial number or a UUID.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

QUERY_S = 5.0
NVIDIA_FACTS = ("name", "memory.total", "driver_version")
NVIDIA_NOW = (
    *("name", "clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "utilization.gpu"),
    "clocks_throttle_reasons.active",
)
"""Fields of ``nvidia-smi --query-gpu``; see ``nvidia-smi --help-query-gpu``."""

SLOWED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""The bits of ``clocks_throttle_reasons.active`` that take speed away (NVML's documentation)."""

ROCM_FACTS = ("--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json")
ROCM_NOW = ("--showproductname", "--showclocks", "--showpower", "--showtemp", "--showuse", "--json")


def facts() -> list[dict[str, Any]] | None:
    """Name, memory in MiB and driver of every GPU; empty without one, None without an answer."""
    return _every(("nvidia-smi", *_query(NVIDIA_FACTS)), nvidia_facts, ROCM_FACTS, rocm_facts)


def now() -> list[dict[str, Any]] | None:
    """Clock, power, temperature and use of every GPU now; empty without one, None: no answer.

    Keys: ``name``, ``clock_mhz``, ``max_clock_mhz``, ``power_w``, ``temperature_c``,
    ``utilization_percent``, ``slowed``: why the GPU itself lowers its clock. Unknown is None.
    """
    return _every(("nvidia-smi", *_query(NVIDIA_NOW)), nvidia_now, ROCM_NOW, rocm_now)


Rows = list[dict[str, Any]]


def _every(
    nvidia: Sequence[str],
    read_nvidia: Callable[[str], Rows],
    rocm: Sequence[str],
    read_rocm: Callable[[str], Rows],
) -> Rows | None:
    """What both vendors' tools say together; None when one is there and does not answer."""
    found: Rows = []
    for command, read in ((nvidia, read_nvidia), (("rocm-smi", *rocm), read_rocm)):
        said = run(command)
        if said is None:
            return None
        found += read(said)
    return found


def _query(fields: Sequence[str]) -> tuple[str, str]:
    return f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"


def run(command: Sequence[str], limit_s: float | None = None) -> str | None:
    """What a tool prints; empty where there is no such tool, None when it fails or hangs."""
    try:
        done = subprocess.run(  # found on the user's own PATH
            list(command),
            capture_output=True,
            text=True,
            timeout=limit_s or QUERY_S,
            check=True,
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def nvidia_facts(said: str) -> list[dict[str, Any]]:
    """The rows of ``NVIDIA_FACTS``."""
    return [
        {"name": row[0], "memory_mib": _whole(row[1]), "driver": row[2]}
        for row in _rows(said, len(NVIDIA_FACTS))
    ]


def nvidia_now(said: str) -> list[dict[str, Any]]:
    """The rows of ``NVIDIA_NOW``."""
    return [
        {
            "name": name,
            "clock_mhz": _number(clock),
            "max_clock_mhz": _number(most),
            "power_w": _number(power),
            "temperature_c": _number(temperature),
            "utilization_percent": _number(use),
            "slowed": _slowed(reasons),
        }
        for name, clock, most, power, temperature, use, reasons in _rows(said, len(NVIDIA_NOW))
    ]


def _rows(said: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(said))]
    return [row for row in rows if len(row) == width]


def _slowed(text: str) -> list[str] | None:
    """The reasons in a mask such as ``0x0000000000000004``; None where it is not told."""
    if not re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return None
    mask = int(text, 16)
    return [name for bit, name in SLOWED.items() if mask & bit]


def rocm_facts(said: str) -> list[dict[str, Any]]:
    """The cards of ``rocm-smi --json`` with ``ROCM_FACTS``."""
    cards, system = _cards(said)
    driver = system.get("Driver version")
    return [
        {
            "name": _named(card, "card series", "card model", "device name") or "AMD GPU",
            "memory_mib": _mib(_named(card, "vram total memory (b)")),
            "driver": driver or "unknown",
        }
        for card in cards
    ]


def rocm_now(said: str) -> list[dict[str, Any]]:
    """The cards of ``rocm-smi --json`` with ``ROCM_NOW``."""
    cards, _ = _cards(said)
    return [
        {
            "name": _named(card, "card series", "card model", "device name") or "AMD GPU",
            "clock_mhz": _number(_named(card, "sclk clock speed")),
            "max_clock_mhz": None,
            "power_w": _number(_named(card, "graphics package power", "socket power")),
            "temperature_c": _number(_named(card, "sensor junction", "sensor edge")),
            "utilization_percent": _number(_named(card, "gpu use (%)")),
            "slowed": None,
        }
        for card in cards
    ]


def _cards(said: str) -> tuple[list[Mapping[str, str]], Mapping[str, str]]:
    """The cards in their order, and what the tool says of the whole machine."""
    start = said.find("{")  # warnings may stand before it
    try:
        tree = json.loads(said[start:]) if start >= 0 else {}
    except ValueError:
        tree = {}
    if not isinstance(tree, dict):
        return [], {}
    parts = {str(key): value for key, value in tree.items() if isinstance(value, dict)}
    cards = [name for name in parts if re.fullmatch(r"card\d+", name)]
    return [parts[name] for name in sorted(cards, key=lambda n: int(n[4:]))], parts.get(
        "system", {}
    )


def _named(card: Mapping[str, str], *words: str) -> str | None:
    """The first value whose key holds one of the words: their spelling differs by version."""
    for word in words:
        for key, value in card.items():
            if word in key.lower():
                return str(value)
    return None


def _number(text: str | None) -> float | None:
    """The number in ``83.12``, ``(1700Mhz)`` or ``45.0 W``; None in ``[N/A]``."""
    match = re.search(r"\d+(?:\.\d+)?", text or "")
    return float(match[0]) if match else None


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _mib(text: str | None) -> int | None:
    return int(text) // (1024 * 1024) if text and text.isdigit() else None
