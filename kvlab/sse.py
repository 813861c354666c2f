"""One completion stream, read from bytes: server-sent events, then what they prove.

``EventReader`` does the framing, ``Answer`` the meaning. Both are pure: the caller stamps the bytes
when they arrive and hands the stamp in, so nothing here can delay a stamp.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_BOM = b"\xef\xbb\xbf"
_DETAIL_CHARS = 300
_LARGEST = 1 << 53
"""A count or a log-probability beyond this is no answer but junk, and unknown."""

_KINDS = {
    "text": "text",
    "content": "content",
    "refusal": "content",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
"""Fields of a choice or of its delta that carry generated text -> the kind a record names."""

_BOOKKEEPING = {"type", "index", "id", "role"}
"""Keys inside such a field that a server may fill before it has generated anything."""

_LOCAL = ("local_cached_tokens", "num_local_cached_tokens")
_EXTERNAL = ("external_cached_tokens", "num_external_cached_tokens")
"""vLLM 0.32 sends neither; the names are those of its own prefill statistics."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event: its data lines joined by LF, and its name if it has one."""

    data: str
    name: str | None = None


class EventReader:
    """The events in a byte stream that is cut anywhere.

    Lines end at LF or CRLF and nowhere else: U+2028, U+0085 and their like are ordinary payload.
    UTF-8 is decoded once an event is whole. What is pending at the end of the stream is no event.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._at_start = True
        self._data: list[bytes] = []
        self._name = b""

    def feed(self, data: bytes) -> list[ServerEvent]:
        """The events that these bytes complete, in order."""
        self._buffer += data
        if self._at_start and not self._skip_bom():
            return []
        events = []
        begin = 0
        while (end := self._buffer.find(b"\n", max(begin, self._scanned))) >= 0:
            event = self._take(bytes(self._buffer[begin:end]).removesuffix(b"\r"))
            if event is not None:
                events.append(event)
            begin = end + 1
        del self._buffer[:begin]
        self._scanned = len(self._buffer)
        return events

    def _skip_bom(self) -> bool:
        """Whether the start of the stream is settled: a byte order mark is dropped once."""
        head = bytes(self._buffer[: len(_BOM)])
        if len(head) < len(_BOM) and _BOM.startswith(head):
            return False
        if head == _BOM:
            del self._buffer[: len(_BOM)]
        self._at_start = False
        return True

    def _take(self, line: bytes) -> ServerEvent | None:
        """The event that a blank line ends; any other line is kept or ignored."""
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, name = b"\n".join(self._data), self._name
        self._data, self._name = [], b""
        if not data:
            return None
        return ServerEvent(data.decode("utf-8", "replace"), name.decode("utf-8", "replace") or None)


@dataclass(slots=True)
class Answer:
    """What one stream said so far. Stamps are the arrival of the read that completed the event."""

    first_event_ns: int | None = None
    first_token_ns: int | None = None
    first_token_kind: str | None = None
    done_ns: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    local_cached_tokens: int | None = None
    external_cached_tokens: int | None = None
    token: str | None = None
    top_logprobs: dict[str, float] | None = None
    error: str | None = None
    """The first in-band error or unreadable event; what came before it is kept."""

    def take(self, event: ServerEvent, at_ns: int) -> None:
        """Add what one event says."""
        if self.first_event_ns is None:
            self.first_event_ns = at_ns
        if event.data.strip() == "[DONE]":
            if self.done_ns is None:
                self.done_ns = at_ns
            return
        try:
            body = json.loads(event.data)
        except (ValueError, RecursionError):
            body = None
        if event.name == "error" and not is_error(body):
            self._fail(event.data)
        elif not isinstance(body, dict):
            self._fail(event.data, reason="malformed event")
        elif is_error(body):
            self._fail(error_text(body))
        else:
            self._read_usage(body)
            for choice in _list(body.get("choices")):
                self._read_choice(_dict(choice), at_ns)

    def _fail(self, detail: str, *, reason: str | None = None) -> None:
        in_band = "in-band error" if self.first_token_ns is None else "error after token"
        if self.error is None:
            self.error = f"{reason or in_band}: {shorten(detail)}"

    def _read_usage(self, body: dict[str, Any]) -> None:
        """Token counts; one that is absent or null leaves what is known, and None stays None."""
        usage = _dict(body.get("usage"))
        details = _dict(usage.get("prompt_tokens_details"))
        for name, source, keys in (
            ("prompt_tokens", usage, ("prompt_tokens",)),
            ("completion_tokens", usage, ("completion_tokens",)),
            ("cached_tokens", details, ("cached_tokens",)),
            ("local_cached_tokens", details, _LOCAL),
            ("external_cached_tokens", details, _EXTERNAL),
        ):
            for key in keys:
                if (count := _count(source.get(key))) is not None:
                    setattr(self, name, count)

    def _read_choice(self, choice: dict[str, Any], at_ns: int) -> None:
        if choice.get("error") or choice.get("finish_reason") in ("error", "abort"):
            self._fail(json.dumps(choice.get("error") or choice["finish_reason"]))
            return
        kind = token_kind(choice)
        if kind is None or self.first_token_ns is not None:
            return
        self.first_token_ns = at_ns
        self.first_token_kind = kind
        self.token, self.top_logprobs = _first_token(choice)


def read(arrivals: Iterable[tuple[int, bytes]]) -> Answer:
    """The answer in a stream given as (arrival stamp, bytes) of each read."""
    reader, answer = EventReader(), Answer()
    for at_ns, data in arrivals:
        for event in reader.feed(data):
            answer.take(event, at_ns)
    return answer


def token_kind(choice: dict[str, Any]) -> str | None:
    """The kind of field by which a choice proves a generated token; None if it proves none.

    A role, an empty text or an echo of the prompt's ids is no proof. A token may well have empty
    text (half of a multi-byte character): then its id or its logprob entry proves it.
    """
    parts = (choice, _dict(choice.get("delta")), _dict(choice.get("message")))
    for part in parts:
        for field, kind in _KINDS.items():
            if _says_something(part.get(field)):
                return kind
    if any(_list(part.get("token_ids")) for part in parts):
        return "token_ids"
    logprobs = _dict(choice.get("logprobs"))
    if any(_list(logprobs.get(key)) for key in ("tokens", "token_logprobs", "content", "refusal")):
        return "logprobs"
    return None


def is_error(body: Any) -> bool:
    """Whether a JSON body is an error message, in today's form or in vLLM's older flat one."""
    if not isinstance(body, dict):
        return False
    return body.get("error") not in (None, False, "") or body.get("object") == "error"


def error_text(body: dict[str, Any]) -> str:
    """The message of an error body, or the whole of it when it has none."""
    error = body.get("error") or body
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else json.dumps(error)


def shorten(text: str) -> str:
    """A server's words on one line, cut to a length that a table can show."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _DETAIL_CHARS else line[: _DETAIL_CHARS - 1] + "…"


def _says_something(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_says_something(v) for key, v in value.items() if key not in _BOOKKEEPING)
    if isinstance(value, list):
        return any(_says_something(v) for v in value)
    return isinstance(value, str) and value != ""


def _first_token(choice: dict[str, Any]) -> tuple[str | None, dict[str, float] | None]:
    """The first token's name and its likeliest rivals, from either form of logprobs."""
    logprobs = _dict(choice.get("logprobs"))
    entry = _dict(_first(logprobs.get("content")))
    rivals = _first(logprobs.get("top_logprobs"))
    if entry:
        token = entry.get("token")
        listed = [_dict(rival) for rival in _list(entry.get("top_logprobs"))]
        rivals = {str(rival.get("token")): rival.get("logprob") for rival in listed}
    else:
        token = _first(logprobs.get("tokens"))
    if not isinstance(token, str):
        ids = choice.get("token_ids") or _dict(choice.get("delta")).get("token_ids")
        token = None if _first(ids) is None else f"token_id:{_first(ids)}"
    top = {_storable(name): float(p) for name, p in _dict(rivals).items() if _is_finite(p)}
    return token and _storable(token), top or None


def _storable(token: str) -> str:
    """The token without lone surrogates, which JSON can carry and UTF-8 files cannot."""
    return token.encode("utf-8", "replace").decode()


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGEST


def _count(value: Any) -> int | None:
    ok = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
    return value if ok else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _first(value: Any) -> Any:
    return next(iter(_list(value)), None)
