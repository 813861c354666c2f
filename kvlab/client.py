"""The request sender: token ids in, one RequestRecord out.

The body is encoded and the connection is open and warm before the clock starts. The clock is read
first when bytes arrive; JSON is read only when the answer is complete, by the task that waits for
it. Raw connections are used, so proxy variables have no effect, and nothing is ever sent twice: a
second try would be answered from a cache.
"""

from __future__ import annotations

import asyncio
import json
import re
import select
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httptools

from kvlab import sse
from kvlab.errors import StackNotReady, UsageError
from kvlab.records import RequestRecord, now_ns

_FRESH_NS = 1_000_000_000
"""A connection idle for longer is replaced: servers close theirs after 2 s or more, unannounced."""

_WARM_S = 5.0
"""Limit for opening and warming one connection; a slow health endpoint is not waited for."""

_SHORTEST_SECRET = 7
"""Shorter words of a header, such as ``Bearer``, are no secrets."""

_LINGER_S = 0.25
"""How long after ``[DONE]`` the server may take to end its response."""

_DONE_LINE = re.compile(rb"\ndata: ?\[DONE\]\r?\n")
_DONE_TAIL = 16
_LINE_BREAK = re.compile(r"[\r\n]")


@dataclass(frozen=True)
class Question:
    """One context as token ids, and how many tokens to ask for."""

    context_id: str
    token_ids: tuple[int, ...]
    max_tokens: int = 1
    prompt_json: bytes = field(init=False, repr=False, compare=False)
    """The ids as they go over the wire, encoded here so that no clock is running."""

    def __post_init__(self) -> None:
        if not self.token_ids or self.max_tokens < 1:
            raise ValueError(f"question {self.context_id!r} needs token ids and max_tokens >= 1")
        encoded = json.dumps(self.token_ids, separators=(",", ":")).encode()
        object.__setattr__(self, "prompt_json", encoded)


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go, split as a socket and a request line need it."""

    host: str
    port: int
    authority: str
    prefix: str
    secure: bool

    @classmethod
    def parse(cls, base_url: str) -> Address:
        """The address in a base URL; ``/v1`` at its end may be there or not."""
        hint = "write it like http://127.0.0.1:8000 or https://host/prefix"
        try:
            url = urlsplit(base_url.strip())
            port = url.port
        except ValueError as error:
            raise UsageError(f"{base_url!r} is not a base URL: {error}", hint=hint) from error
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UsageError(f"{base_url!r} is not an http or https URL", hint=hint)
        if url.query or url.fragment or url.username is not None:
            raise UsageError(f"{base_url!r} has more than host, port and path", hint=hint)
        secure = url.scheme == "https"
        prefix = quote(url.path.rstrip("/").removesuffix("/v1").rstrip("/"), safe="/%:@!$&'()*+,;=")
        return cls(url.hostname, port or (443 if secure else 80), url.netloc, prefix, secure)


@dataclass(slots=True)
class Exchange:
    """One request and what came back, as it arrived."""

    ended: asyncio.Future[None]
    sent_ns: int | None = None
    written_ns: int | None = None
    headers_ns: int | None = None
    status: int | None = None
    arrivals: list[tuple[int, bytes]] = field(default_factory=list)
    """The body: arrival stamp and bytes of each read."""
    whole: bool = False
    """The response ended as HTTP says it should."""
    lost: str | None = None
    """Why the connection ended before the response did."""

    def end(self) -> None:
        """Wake the task that waits."""
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def body(self) -> bytes:
        """Everything that came after the head."""
        return b"".join(data for _, data in self.arrivals)


class Connection(asyncio.Protocol):
    """One keep-alive connection; it stamps every read before it looks at the bytes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._exchange: Exchange | None = None
        self._writing = False
        self._at_ns = 0
        self._tail = b"\n"
        self._idle_since_ns = now_ns()
        self._usable = True

    async def exchange(self, request: bytes, exchange: Exchange) -> None:
        """Send one request and fill the exchange until its response has ended in some way."""
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b"\n"
        self._exchange = exchange
        try:
            # The stamp comes before the call: on a busy machine the processor may be taken away
            # inside it, for as long as the server needs to answer, and TTFT would be next to 0.
            begun_ns = now_ns()
            self._transport.write(request)
            if not self._writing:
                exchange.sent_ns = begun_ns
                exchange.written_ns = now_ns()
            await exchange.ended
        finally:
            self._exchange = None
            self._idle_since_ns = now_ns()
            if not exchange.whole or self._writing:
                self.close()

    def is_fresh(self) -> bool:
        """Whether another request may go out on it: open, lately used, and nothing unread."""
        if not self._usable or now_ns() - self._idle_since_ns > _FRESH_NS:
            return False
        # A readable idle connection holds the server's goodbye, which the loop has not seen yet.
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Drop the connection now."""
        self._usable = False
        self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask to be told when a request has not left as a whole."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=1, low=0)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Stamp, then split head from body; nothing is decoded here."""
        self._at_ns = now_ns()
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        if exchange.headers_ns is None:
            exchange.headers_ns = self._at_ns
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.lost = exchange.lost or f"the answer is not HTTP/1.1: {error}"
            exchange.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever was under way ends here."""
        self._usable = False
        if (exchange := self._exchange) is not None:
            exchange.lost = exchange.lost or str(exc or "the server closed the connection")
            exchange.end()

    def pause_writing(self) -> None:
        """The socket is full: part of the request is still here."""
        self._writing = True

    def resume_writing(self) -> None:
        """The last byte of the request is with the socket."""
        self._writing = False
        if self._exchange is not None and self._exchange.sent_ns is None:
            self._exchange.sent_ns = self._exchange.written_ns = now_ns()

    # What the HTTP parser calls.

    def on_headers_complete(self) -> None:
        """Keep the status, unless it only announces the answer (100, 103)."""
        status = self._parser.get_status_code()
        if self._exchange is None:
            self._usable = False  # a response that nobody asked for
        elif status >= 200:
            self._exchange.status = status

    def on_body(self, data: bytes) -> None:
        """Keep the bytes with their stamp, and notice ``[DONE]``."""
        if self._exchange is None:
            return
        self._exchange.arrivals.append((self._at_ns, data))
        seen = self._tail + data
        if _DONE_LINE.search(seen):
            # Some servers never end a stream that they have finished.
            self._loop.call_later(_LINGER_S, self._exchange.end)
        self._tail = seen[-_DONE_TAIL:]

    def on_message_complete(self) -> None:
        """The response is whole."""
        exchange = self._exchange
        if exchange is None or exchange.status is None:
            return
        exchange.whole = True
        self._exchange = None
        self._usable = self._usable and self._parser.should_keep_alive()
        exchange.end()


class Sender:
    """A fixed number of slots, each with a connection of its own."""

    def __init__(
        self, address: Address, *, model: str, slots: int, headers: Mapping[str, str] | None = None
    ) -> None:
        if slots < 1:
            raise ValueError(f"a sender needs at least one slot, not {slots}")
        self.address = address
        self._tls = ssl.create_default_context() if address.secure else None
        self._options = _options(model)
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if any(_LINE_BREAK.search(part) for item in (headers or {}).items() for part in item):
            raise UsageError("a request header holds a line break", hint="remove it")
        words = [word for value in (headers or {}).values() for word in value.split()]
        self._secrets = [word for word in words if len(word) >= _SHORTEST_SECRET]
        self._slots = slots
        self._free: asyncio.LifoQueue[Connection | None] = asyncio.LifoQueue()

    async def open(self) -> None:
        """Open and warm one connection per slot; raises OSError when the server takes none."""
        for _ in range(self._slots):
            self._free.put_nowait(await self._connect())

    def close(self) -> None:
        """Drop every idle connection."""
        while not self._free.empty():
            if (connection := self._free.get_nowait()) is not None:
                connection.close()

    async def ask(
        self,
        question: Question,
        *,
        scenario: str,
        repeat: int,
        round: str,
        index: int,
        deadline_s: float = 600.0,
        queued_ns: int | None = None,
    ) -> RequestRecord:
        """The record of one question, failed or not.

        ``deadline_s`` covers the whole answer, and starts when a slot is free. ``queued_ns`` is the
        moment the request was due, if that was earlier than now.
        """
        due_ns = now_ns() if queued_ns is None else queued_ns
        exchange = Exchange(asyncio.get_running_loop().create_future())
        trouble = await self._send(question, exchange, deadline_s)
        # One turn of the loop: reads that are ready now are stamped before JSON is read.
        await asyncio.sleep(0)
        answer = sse.read(exchange.arrivals if exchange.status == 200 else ())
        return RequestRecord(
            scenario=scenario,
            repeat=repeat,
            round=round,
            index=index,
            context_id=question.context_id,
            planned_tokens=len(question.token_ids),
            asked_tokens=question.max_tokens,
            queued_ns=due_ns,
            sent_ns=exchange.sent_ns,
            written_ns=exchange.written_ns,
            headers_ns=exchange.headers_ns,
            first_byte_ns=exchange.arrivals[0][0] if exchange.arrivals else None,
            first_event_ns=answer.first_event_ns,
            first_token_ns=answer.first_token_ns,
            last_byte_ns=exchange.arrivals[-1][0] if exchange.arrivals else None,
            done_ns=answer.done_ns,
            first_token_kind=answer.first_token_kind,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            local_cached_tokens=answer.local_cached_tokens,
            external_cached_tokens=answer.external_cached_tokens,
            token=answer.token,
            top_logprobs=answer.top_logprobs,
            error=self._masked(failure(question, exchange, answer, trouble)),
        )

    def _masked(self, text: str | None) -> str | None:
        """The text without the secrets of the headers, which a server may repeat."""
        for secret in self._secrets:
            text = text and text.replace(secret, "***")
        return text

    async def _send(self, question: Question, exchange: Exchange, limit_s: float) -> str | None:
        """What kept the exchange from ending by itself: a refusal, or the deadline."""
        connection = await self._free.get()
        try:
            async with asyncio.timeout(limit_s):
                if connection is None or not connection.is_fresh():
                    connection = await self._reopen(connection)
                await connection.exchange(self._request(question), exchange)
        except TimeoutError:
            return f"timeout: not complete within {limit_s:g} s"
        except OSError as error:
            return f"connection refused: {error}"
        finally:
            self._free.put_nowait(connection)
        return None

    async def _reopen(self, connection: Connection | None) -> Connection:
        if connection is not None:
            connection.close()
        return await self._connect()

    async def _connect(self) -> Connection:
        """A connection on which the server has already answered once."""
        connection = await self._dial()
        exchange = Exchange(asyncio.get_running_loop().create_future())
        with suppress(TimeoutError):
            async with asyncio.timeout(_WARM_S):
                await connection.exchange(self._head("GET", "/health"), exchange)
        # A server that will not keep this one open gets a plain new one.
        return connection if connection.is_fresh() else await self._dial()

    async def _dial(self) -> Connection:
        try:
            async with asyncio.timeout(_WARM_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection,
                    self.address.host,
                    self.address.port,
                    ssl=self._tls,
                    happy_eyeballs_delay=0.25,
                )
        except TimeoutError:
            raise ConnectionError(f"no connection within {_WARM_S:g} s") from None
        return connection

    def _request(self, question: Question) -> bytes:
        body = self._options % (question.max_tokens, question.max_tokens, question.prompt_json)
        return self._head("POST", "/v1/completions", len(body)) + body

    def _head(self, method: str, path: str, length: int | None = None) -> bytes:
        lines = [
            f"{method} {self.address.prefix}{path} HTTP/1.1",
            f"Host: {self.address.authority}",
            "User-Agent: kvlab",
            "Accept-Encoding: identity",
        ]
        if length is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n" + self._headers + "\r\n").encode()


@asynccontextmanager
async def connect(
    base_url: str, *, model: str, slots: int = 1, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Sender]:
    """A sender whose connections are open and warm."""
    sender = Sender(Address.parse(base_url), model=model, slots=slots, headers=headers)
    try:
        try:
            await sender.open()
        except OSError as error:
            hint = "check the address, and the server's log"
            raise StackNotReady(f"{base_url} takes no connection: {error}", hint=hint) from error
        yield sender
    finally:
        sender.close()


def failure(
    question: Question,
    exchange: Exchange,
    answer: sse.Answer,
    trouble: str | None = None,
) -> str | None:
    """Why the request counts as failed, beginning with a stable reason; None if it does not."""
    if exchange.status not in (None, 200):
        return f"http {exchange.status}: {sse.shorten(_plain(exchange))}"
    if answer.error:
        return answer.error
    if trouble and answer.done_ns is None:
        return f"{trouble} ({_progress(exchange, answer)})" if exchange.sent_ns else trouble
    if exchange.status is None:
        return f"connection lost: {exchange.lost}"
    if exchange.sent_ns is None:
        return "connection lost: the answer came before the request was sent"
    if answer.done_ns is None:
        return _unfinished(exchange, answer)
    if answer.first_token_ns is None:
        return "no token: the stream ended without one"
    if answer.completion_tokens not in (None, question.max_tokens):
        return f"wrong output length: {answer.completion_tokens} tokens, not {question.max_tokens}"
    return None


def _unfinished(exchange: Exchange, answer: sse.Answer) -> str:
    """The reason for a body that ended without ``[DONE]``."""
    if exchange.whole and answer.first_event_ns is None:
        said = _plain(exchange)
        reason = "in-band error" if sse.is_error(_json(exchange.body)) else "no token"
        return f"{reason}: {sse.shorten(said) or 'the answer is empty'}"
    return f"truncated stream: {exchange.lost or 'the answer ended'} before [DONE]"


def _progress(exchange: Exchange, answer: sse.Answer) -> str:
    if answer.first_token_ns is not None:
        return "a token but no [DONE]"
    if answer.first_event_ns is not None:
        return "an event but no token"
    return "a response head but no event" if exchange.status else "no response head"


def _plain(exchange: Exchange) -> str:
    """The message of a response that is no event stream."""
    body = _json(exchange.body)
    if isinstance(body, dict):
        return sse.error_text(body)
    return exchange.body.decode("utf-8", "replace")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _options(model: str) -> bytes:
    """The request body with places for max_tokens, min_tokens and the prompt.

    ``return_tokens_as_token_ids`` names every token by its id, so tokens with equal text stay apart
    in ``top_logprobs``. ``return_token_ids`` is left out: it sends the whole prompt back in the
    event that carries the first token, which is what is being timed.
    """
    options = {
        "model": model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
    }
    fixed = json.dumps(options).encode().replace(b"%", b"%%")
    return fixed[:-1] + b', "max_tokens": %d, "min_tokens": %d, "prompt": %b}'
