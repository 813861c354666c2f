"""The rows of a report's setup: machine, model, settings, tiers, commands. Pure."""

from __future__ import annotations

from typing import Any

from kvlab.report.source import Source, get

EMBEDDED = ("embedded", "embedded-665", "smoke")


class SetupRows:
    """What was measured on what, row by row, in the page's language."""

    def __init__(self, source: Source):
        self.source = source
        self.text = source.text
        self.at = source.at

    @property
    def connector(self) -> str:
        """Which connector ran: kvlab, stock, or None where none did."""
        found = self.at("engine", "connector") or self.at("about", "connector", "name")
        if found in (None, "stock", "LMCacheMPConnector"):
            return "stock" if found else "unknown"
        return "kvlab"

    @property
    def connector_reason(self) -> str:
        """Why that connector ran, in the run's own English."""
        reason = self.at("engine", "connector_reason") or self.at("about", "connector", "reason")
        return str(reason or "")

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Arm name and shell text of everything that was started, in order."""
        found = self.at("about", "commands") or {}
        return [
            (self.source.arm(arm), "\n\n".join(str(c) for c in texts))
            for arm, texts in found.items()
            if arm in self.source.arms
        ]

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The settings held fixed, as label and value."""
        profile = self.at("about", "profile")
        work, engine = (
            self.source.summary.get("workload") or {},
            self.source.summary.get("engine") or {},
        )
        raw: list[tuple[str, Any]] = [
            ("block", engine.get("block_tokens") or get(profile, "engine", "block_tokens")),
            ("chunk", work.get("chunk_tokens") or get(profile, "cache", "chunk_tokens")),
            ("batched", get(profile, "engine", "max_num_batched_tokens")),
            ("mamba", get(profile, "engine", "mamba_cache_mode")),
            ("prefix_caching", get(profile, "engine", "prefix_caching")),
            ("dtype", get(profile, "engine", "flags", "dtype")),
            ("kv_dtype", get(profile, "engine", "flags", "kv-cache-dtype")),
            ("eviction", get(profile, "cache", "eviction_policy")),
            ("watermark", get(profile, "cache", "eviction_watermark")),
            ("ratio", get(profile, "cache", "eviction_ratio")),
            ("groups", get(profile, "cache", "separate_object_groups")),
            ("transfer", get(profile, "cache", "transfer_mode")),
            ("pause", work.get("pause_s")),
            ("output", work.get("output_tokens")),
        ]
        return [
            (self.text(f"setting.{name}"), self._value(value))
            for name, value in raw
            if value is not None
        ]

    @property
    def tier_capacities(self) -> list[tuple[str, str, str]]:
        """Tier, capacity and role, for the table of tiers."""
        unknown = self.text("word.not_recorded")
        l0 = self.at("engine", "kv_cache_tokens", self.source.arms[0])
        l1 = self.at("about", "profile", "cache", "l1_size_gb")
        l2 = self.at("about", "profile", "cache", "l2", "adapter", "type")
        return [
            (
                self.text("tier.L0"),
                unknown if l0 is None else self.text("tiers.tokens", count=self.text.number(l0)),
                self.text("tiers.role.L0"),
            ),
            (
                self.text("tier.L1"),
                unknown if l1 is None else f"{self.text.plain_number(l1)} GB",
                self.text("tiers.role.L1"),
            ),
            (
                self.text("tier.L2"),
                unknown if l2 is None else self.text("tiers.adapter", adapter=l2),
                self.text("tiers.role.L2"),
            ),
        ]

    @property
    def machine(self) -> list[tuple[str, str]]:
        """Machine, model and versions, as label and value."""
        host, about = self.at("about", "host") or {}, self.at("about") or {}
        cpu, memory = host.get("cpu"), host.get("memory_gib")
        raw: list[tuple[str, Any]] = [
            ("cpu", get(cpu, "model") if isinstance(cpu, dict) else cpu),
            ("cores", get(cpu, "threads")),
            ("memory", None if memory is None else f"{self.text.plain_number(memory)} GiB"),
            ("gpu", _named(host.get("gpus"))),
            ("disk", _disk(host.get("l2_disk") or host.get("disk"))),
            ("os", _words(host.get("system"), host.get("machine"))),
            ("kernel", host.get("kernel")),
            ("python", host.get("python")),
            ("model", get(about, "profile", "model", "name")),
            ("vllm", self.at("engine", "vllm_version")),
            ("lmcache", self.at("engine", "lmcache_version")),
            ("kvlab", about.get("kvlab_version")),
            ("image", _images(about.get("images"))),
        ]
        return [
            (self.text(f"machine.{name}"), self._value(value))
            for name, value in raw
            if value not in (None, "")
        ]

    def _value(self, value: Any) -> str:
        if isinstance(value, bool):
            return self.text("word.yes" if value else "word.no")
        if isinstance(value, (int, float)):
            return self.text.plain_number(value)
        return str(value)

    @property
    def order(self) -> str:
        """The order of the arms over the run, as letters: A B B A A B."""
        sequence = self.at("workload", "order") or []
        letters = dict(zip(self.source.arms, "AB", strict=False))
        names = [item[-1] if isinstance(item, (list, tuple)) else item for item in sequence]
        return " ".join(letters.get(name, "?") for name in names)

    @property
    def reproduce(self) -> str:
        """The command that repeats this run."""
        experiment = self.source.summary.get("experiment", "two-round")
        control = " --control" if self.source.control else ""
        return f"kvlab run {experiment} {self.source.profile}{control}"

    @property
    def built_model(self) -> bool:
        """Whether a small model with random weights was served, as in the embedded profile."""
        source = self.at("about", "profile", "model", "source")
        return source == "built" if source is not None else self.source.profile in EMBEDDED

    @property
    def shape(self) -> str:
        found = self.at("workload", "shape")
        return found if found in ("identical", "prefix_suffix") else "unknown"

    @property
    def pause(self) -> str:
        pause = self.at("workload", "pause_s")
        return self.text("word.not_recorded") if pause is None else self.text.seconds(pause)


def _named(items: Any) -> str | None:
    """The names of a list of devices, which may be names or descriptions that hold one."""
    if not isinstance(items, list) or not items:
        return None
    return ", ".join(
        str(item.get("name", item)) if isinstance(item, dict) else str(item) for item in items
    )


def _disk(disk: Any) -> str | None:
    """Model and file system of the disk that holds the records, as far as they are known."""
    return _words(get(disk, "model"), get(disk, "filesystem"))


def _images(found: Any) -> str | None:
    """The images that containers were made from, each with the start of its digest."""
    if not isinstance(found, dict):
        return None
    shown = []
    for name, image in found.items():
        digest = str(get(image, "digest") or get(image, "id") or "").rpartition("sha256:")[2]
        shown.append(f"{name} (sha256:{digest[:12]})" if digest else str(name))
    return ", ".join(shown)


def _words(*parts: Any) -> str | None:
    return " ".join(str(part) for part in parts if part) or None
