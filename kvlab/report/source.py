"""A summary seen in one language: its values by path, its arms by name. Pure.

Whether a headline may be shown at all is decided here, once.
"""

from __future__ import annotations

import json
import re
from typing import Any

from markupsafe import Markup

from kvlab.i18n import Text

Summary = dict[str, Any]
STATUSES = ("proven", "not shown", "refuted", "invalid")
COMPLETE = (None, "complete")
EXPERIMENTS = (
    *("restart", "object-groups", "acceptance", "shared-cache", "eviction", "parallel-read"),
    *("storage", "soak"),
)
"""In the order in which reports speak of them."""
HEADLINE = ("speedup", "ttft_ms", "ttft_series_ms", "false_gain", "predicted")
"""The keys of a summary that state, or nearly state, the result."""


def get(tree: Any, *path: Any) -> Any:
    """The value at a path of keys, or None where the run has none."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def publishable(summary: Summary) -> bool:
    """Whether a headline number may be shown: every invariant is known and holds."""
    checks = summary.get("invariants") or []
    return (
        bool(checks)
        and all(check.get("holds") is True for check in checks)
        and status(summary) != "invalid"
        and get(summary, "status") in COMPLETE
        and (is_other(summary) or get(summary, "speedup", "value") is not None)
        and (status(summary) == "not shown" or not summary.get("control"))
    )


def is_other(summary: Summary) -> bool:
    """Whether it is another experiment than the A/B, whose result is its speedup.

    An A/B whose first arm was missing is one too: it has no speedup.
    """
    return summary.get("experiment") in EXPERIMENTS or "revisit" in summary


def status(summary: Summary) -> str:
    """The verdict's status; what is no verdict counts as invalid."""
    found = get(summary, "verdict", "status")
    return found if found in STATUSES else "invalid"


def without_headline(summary: Summary) -> Summary:
    """The summary as the page may embed it: an unproven headline is not in there either."""
    if publishable(summary):
        return summary
    return {key: value for key, value in summary.items() if key not in HEADLINE}


def slug(name: str) -> str:
    """A name that a run gave, as the last part of a catalogue key or of an id."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


class Source:
    """A summary and the texts of a language."""

    def __init__(self, summary: Summary, text: Text):
        self.summary = summary
        self.text = text
        self.arms = [str(arm) for arm in summary.get("arms") or ("baseline", "lmcache")]
        self.control = bool(summary.get("control"))
        self.publishable = publishable(summary)
        self.status = status(summary) if self.publishable else "invalid"
        self.run = str(summary.get("run", ""))
        self.profile = str(summary.get("profile", ""))

    @property
    def embedded_json(self) -> Markup:
        """The machine-readable summary, safe inside a script element."""
        written = json.dumps(
            without_headline(self.summary), ensure_ascii=False, indent=1, sort_keys=True
        )
        safe = written.replace("<", "\\u003c").replace("&", "\\u0026")
        return Markup(safe)  # noqa: S704 - no character of it can end the element

    def at(self, *path: Any) -> Any:
        """The summary's value at a path of keys, or None."""
        return get(self.summary, *path)

    def arm(self, arm: str) -> str:
        """An arm's name with its letter."""
        return self.text(f"arm.{'control' if arm == 'control' else 'ab'[self.arms.index(arm)]}")

    def plain(self, *path: Any) -> str:
        """A number of the setup, written without a link; "not recorded" when the run has none."""
        value = self.at(*path)
        if not isinstance(value, (int, float)):
            return self.text("word.not_recorded")
        return self.text.plain_number(value)

    def tokens(self, value: Any) -> str:
        """A count, or "unknown"."""
        return self.text("word.unknown") if value is None else self.text.number(value)
