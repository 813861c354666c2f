"""What the vendors' tools say of GPUs, in the form that their manuals document."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvlab import gpu


def tool(folder: Path, name: str, body: str) -> None:
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("body", "gpus"),
    [
        (
            "echo 'NVIDIA GB10, [N/A], 580.95'\necho 'NVIDIA X, 81559, 580.95'",
            [
                {"name": "NVIDIA GB10", "memory_mib": None, "driver": "580.95"},
                {"name": "NVIDIA X", "memory_mib": 81559, "driver": "580.95"},
            ],
        ),
        ("exit 9", None),
        ("exec sleep 60", None),
    ],
)
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, gpus: Any) -> None:
    tool(tmp_path, "nvidia-smi", body)
    monkeypatch.setattr(gpu, "QUERY_S", 2.0 if "sleep" not in body else 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu.facts() == gpus


def test_no_gpu_is_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.facts() == []
    assert gpu.now() == []


NVIDIA = """\
NVIDIA GB10, 2411, 3003, 83.12, 61, 96, 0x0000000000000000
NVIDIA GB10, 650, 3003, 17.00, 48, 95, 0x0000000000000024
NVIDIA H100 80GB HBM3, [N/A], [N/A], [Not Supported], [N/A], [N/A], [N/A]
"""


def test_an_nvidia_gpu_now() -> None:
    full, capped, silent = gpu.nvidia_now(NVIDIA)
    assert full == {
        "name": "NVIDIA GB10",
        "clock_mhz": 2411.0,
        "max_clock_mhz": 3003.0,
        "power_w": 83.12,
        "temperature_c": 61.0,
        "utilization_percent": 96.0,
        "slowed": [],
    }
    assert capped["clock_mhz"] == 650.0
    assert capped["slowed"] == ["power cap", "thermal slowdown"]
    assert {key for key, value in silent.items() if value is None} == {
        *("clock_mhz", "max_clock_mhz", "power_w", "temperature_c", "utilization_percent"),
        "slowed",
    }
    assert gpu.nvidia_now("No devices were found\n") == []


ROCM_FACTS = """\
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status
{"card0": {"VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "1",
 "Card Series": "AMD Instinct MI300X", "Card Model": "0x74a1", "Card SKU": "M3000100"},
 "card10": {"VRAM Total Memory (B)": "x", "Card series": "AMD Instinct MI300X"},
 "card2": {"Device Name": "Navi 31"},
 "system": {"Driver version": "6.10.5"}}
"""
ROCM_NOW = """\
{"card0": {"Temperature (Sensor edge) (C)": "45.0", "Temperature (Sensor junction) (C)": "52.0",
 "sclk clock speed:": "(1700Mhz)", "sclk clock level:": "7", "mclk clock speed:": "(900Mhz)",
 "Average Graphics Package Power (W)": "138.0", "GPU use (%)": "97",
 "Card Series": "AMD Instinct MI300X"},
 "card1": {"Current Socket Graphics Package Power (W)": "601.0", "Card Series": "AMD MI"}}
"""


def test_amd_gpus() -> None:
    assert gpu.rocm_facts(ROCM_FACTS) == [
        {"name": "AMD Instinct MI300X", "memory_mib": 196592, "driver": "6.10.5"},
        {"name": "Navi 31", "memory_mib": None, "driver": "6.10.5"},
        {"name": "AMD Instinct MI300X", "memory_mib": None, "driver": "6.10.5"},
    ]
    first, second = gpu.rocm_now(ROCM_NOW)
    assert first == {
        "name": "AMD Instinct MI300X",
        "clock_mhz": 1700.0,
        "max_clock_mhz": None,
        "power_w": 138.0,
        "temperature_c": 52.0,
        "utilization_percent": 97.0,
        "slowed": None,
    }
    assert second["power_w"] == 601.0
    assert second["clock_mhz"] is None


@pytest.mark.parametrize("said", ["", "no json", "{broken", "[1]", '{"card0": 3}'])
def test_what_is_no_answer_of_rocm_smi(said: str) -> None:
    assert gpu.rocm_facts(said) == []
    assert gpu.rocm_now(said) == []
