"""What a run writes down: one request, one scrape, one event. Frozen, integers of nanoseconds.

All stamps come from one monotonic clock, ``time.monotonic_ns()``; the manifest anchors it to UTC.
What did not happen is ``None``, never 0.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

SCHEMA = 1
"""Version of the run folder. A newer one is refused, an older one is upgraded on load."""

Round = Literal["probe", "warmup", "fill", "measure"]
Source = Literal["vllm", "lmcache"]


def now_ns() -> int:
    """The monotonic clock of every record, in nanoseconds."""
    return time.monotonic_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, from the moment it was due to the end of its stream."""

    scenario: str
    repeat: int
    """Counts from 1."""
    round: str
    index: int
    """Place in the round's order; counts from 0."""
    context_id: str
    planned_tokens: int
    asked_tokens: int
    """The output length that was asked for."""
    queued_ns: int
    """The request was due; ``sent_ns - queued_ns`` is the sender's own delay, kept out of TTFT."""
    sent_ns: int | None = None
    """The request's last byte was about to be handed to the socket: TTFT starts here."""
    written_ns: int | None = None
    """The socket had taken it. Much later than ``sent_ns`` means that the machine was busy."""
    headers_ns: int | None = None
    """The first byte of the response's head arrived."""
    first_byte_ns: int | None = None
    """The first byte of the response's body arrived."""
    first_event_ns: int | None = None
    """The first server-sent event that carries data was complete."""
    first_token_ns: int | None = None
    """The first event that proves a token was complete: TTFT ends here."""
    last_byte_ns: int | None = None
    done_ns: int | None = None
    """The stream's ``[DONE]`` arrived."""
    first_token_kind: str | None = None
    """The field that proved it: text, content, reasoning, tool_calls, token_ids or logprobs."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """The engine's own count of prompt tokens that it did not compute; None = it did not say."""
    local_cached_tokens: int | None = None
    external_cached_tokens: int | None = None
    token: str | None = None
    """The first generated token, as the server names it."""
    top_logprobs: dict[str, float] | None = None
    """Natural-log probabilities of the likeliest first tokens."""
    error: str | None = None
    """Why the request failed: a short reason, then the detail."""

    @property
    def ttft_ns(self) -> int | None:
        """First token minus last byte sent; None for a request that failed or has no such time."""
        if self.error or self.first_token_ns is None or self.sent_ns is None:
            return None
        span = self.first_token_ns - self.sent_ns
        return span if span > 0 else None  # no answer comes before its question

    @property
    def shift(self) -> int | None:
        """Prompt tokens that the server counted beyond the plan; None when it did not count."""
        return None if self.prompt_tokens is None else self.prompt_tokens - self.planned_tokens

    @property
    def shift_text(self) -> str:
        """The shift in words: the prefix moves by as many tokens, and with it every chunk."""
        by = self.shift or 0
        return (
            f"planned {self.planned_tokens}, seen {self.prompt_tokens} ({by:+d}):"
            f" prefix shifted by {abs(by)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One reading of one server's counters, each series summed over its labels."""

    scenario: str
    repeat: int
    boundary: str
    """Where in the run: ``fill:start``, ``fill:end``, ``measure:start``, ``measure:7``, …"""
    source: str
    at_ns: int
    samples: dict[str, float] | None = None
    """None: the server did not answer; see ``error``."""
    info: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels of the series whose name ends in ``_info``."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the run: a launch, a boundary, a drain, a failure."""

    at_ns: int
    kind: str
    scenario: str | None = None
    repeat: int | None = None
    round: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Record = RequestRecord | Scrape | Event
R = TypeVar("R", RequestRecord, Scrape, Event)


def to_json(record: Record) -> dict[str, Any]:
    """A record as a JSON object; fields that did not happen are written as null."""
    return dataclasses.asdict(record)


def from_json(kind: type[R], row: dict[str, Any]) -> R:
    """The record that a JSON object holds; fields of a later minor version are dropped."""
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in row.items() if key in names})
