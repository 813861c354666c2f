"""The section of what was predicted: its answers and its calibration, in words. Pure."""

from __future__ import annotations

from typing import Any

from kvlab.i18n import Text
from kvlab.report.numbers import Shown, sample
from kvlab.report.others import Other
from kvlab.report.source import Summary, slug

BLIND_POINTS = 2.0
"""A share is as predicted within so many points."""
ANSWERS = {True: "holds", False: "fails", None: "unknown"}


class Predicted(Other):
    """The prediction of the A/B: part of its summary, withheld together with its headline."""

    def __init__(self, summary: Summary, text: Text):
        super().__init__({**summary, "experiment": "predicted"}, text)

    @property
    def missing(self) -> str | None:
        """Why nothing was predicted, as a key of the catalogue."""
        reason = self.at("predicted", "missing")
        if reason is None:
            return None
        key = slug(str(reason))
        return key if self.text.has(f"predicted.missing.{key}") else "profile"

    def answer(self, check: str) -> str:
        """Whether a figure came out as predicted, as a key of the catalogue."""
        found = {one.get("id"): one.get("holds") for one in self.at("predicted", "checks") or []}
        return ANSWERS.get(found.get(check), "unknown")

    @property
    def broken(self) -> list[tuple[str, str]]:
        """Each assumption that broke, and the tier that showed it."""
        checks = self.at("predicted", "checks") or []
        return [
            (str(one["broke"]), str(one.get("id", "")).removeprefix("share-"))
            for one in checks
            if self.text.has(f"predicted.broke.{one.get('broke')}")
        ]

    @property
    def blind(self) -> str | None:
        """Whether the shares would hold without knowing the loop's looks; None: not told."""
        points = self.at("predicted", "blind_points")
        replayed = self.at("predicted", "served_share", "L1", "replayed")
        if points is None or replayed is None:
            return None
        return "holds" if points <= BLIND_POINTS else "fails"

    def points(self, *path: Any) -> Shown:
        """A difference of shares in points."""
        return self._show(path, lambda value: self.text.number(value, 1))

    @property
    def lengths(self) -> str:
        """How many prompt lengths the prefill rests on."""
        return self.text.number(
            len(self.at("predicted", "calibration", "prefill", "lengths") or [])
        )

    @property
    def quadratic(self) -> str:
        """Where the quadratic term comes from, as a key of the catalogue."""
        key = slug(str(self.at("predicted", "calibration", "prefill", "origin", "quadratic")))
        known = self.text.has(f"predicted.calibrated.quadratic.{key}")
        return key if known else "not_separable"

    def bandwidth(self, tier: str) -> str:
        """A tier's bandwidth, or that it has none of its own."""
        rate = self.at("predicted", "calibration", "restore", tier, "gb_per_s")
        if rate is None:
            return self.text("predicted.calibrated.no_bandwidth")
        return self.text("predicted.calibrated.bandwidth", rate=self.text.number(rate, 2))

    @property
    def used(self) -> str:
        """Which part calibrated, and which it was compared with."""
        if self.at("predicted", "calibration", "halved"):
            return self.text("predicted.calibrated.halved")
        repeats = self.at("predicted", "calibration", "repeats") or []
        listed = ", ".join(self.text.number(repeat) for repeat in repeats)
        return self.text("predicted.calibrated.repeats", repeats=listed)

    def _title(self, path: str) -> str:
        return self.text("number.title", formula=path, count=sample(self), run=self.run)
