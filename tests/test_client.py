"""The sender against a raw server on loopback that can misbehave in every way a test needs.

Stamps are compared with each other, never with a wall clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab import client
from kvlab.errors import StackNotReady, UsageError
from kvlab.records import RequestRecord, now_ns

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
QUESTION = client.Question("c1", (5, 6, 7, 8))


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, str) else json.dumps(body)).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def usage(completion: int = 1, **details: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": 4, "completion_tokens": completion}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details or None}}


TOKEN = event({"choices": [{"index": 0, "text": "A"}]})
ERROR = event({"error": {"message": "engine is gone", "code": 500}})
DONE = event("[DONE]")
GOOD = TOKEN + event(usage()) + DONE


@dataclass
class Request:
    line: str
    headers: dict[str, str]
    body: bytes
    connection: int


Reply = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool | None]]
"""Answers one request; True closes the connection afterwards."""


@dataclass
class Server:
    """What the raw server saw."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def asked(self) -> list[Request]:
        return [request for request in self.requests if request.line.startswith("POST")]


def send(*parts: bytes, close: bool = False) -> Reply:
    """A reply that writes each part by itself and lets the other side run in between."""

    async def reply(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.002)
        return close

    return reply


def stream(*bodies: bytes, close: bool = False) -> Reply:
    """A proper chunked stream."""
    return send(CHUNKED, *(chunk(body) for body in bodies), LAST, close=close)


async def hang(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await reader.read()


def then_hang(*parts: bytes) -> Reply:
    async def reply(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await send(*parts)(request, reader, writer)
        await reader.read()

    return reply


@contextlib.asynccontextmanager
async def serving(
    *replies: Reply, health: Reply | None = None, host: str = "127.0.0.1", tls: Any = None
) -> AsyncIterator[Server]:
    """A server that gives the replies in order, the last one again and again."""
    seen = Server()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.writers.append(writer)
        number = len(seen.writers)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await take(reader, number)
                seen.requests.append(request)
                if request.line.startswith("GET"):
                    reply = health or send(OK)
                else:
                    reply = replies[min(len(seen.asked), len(replies)) - 1]
                if await reply(request, reader, writer):
                    break
        writer.close()

    server = await asyncio.start_server(handle, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    seen.url = f"{'https' if tls else 'http'}://{name}:{port}"
    try:
        yield seen
    finally:
        server.close()
        for writer in seen.writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


async def take(reader: asyncio.StreamReader, connection: int) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {}
    for line in head[1:-2]:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(head[0], headers, body, connection)


async def ask(
    sender: client.Sender,
    question: client.Question = QUESTION,
    *,
    index: int = 0,
    deadline_s: float = 20.0,
    queued_ns: int | None = None,
) -> RequestRecord:
    return await sender.ask(
        question,
        scenario="lmcache",
        repeat=2,
        round="measure",
        index=index,
        deadline_s=deadline_s,
        queued_ns=queued_ns,
    )


async def record_of(
    *replies: Reply, question: client.Question = QUESTION, deadline_s: float = 20.0
) -> RequestRecord:
    """The record of one question to a server that gives this reply."""
    async with (
        serving(*replies) as server,
        client.connect(server.url, model="m") as sender,
    ):
        return await ask(sender, question, deadline_s=deadline_s)


class TestRecord:
    async def test_a_good_stream(self) -> None:
        top = {"token_id:7": -0.25, "token_id:9": -1.5}
        logprobs = {"tokens": ["token_id:7"], "token_logprobs": [-0.25], "top_logprobs": [top]}
        token = event({"choices": [{"index": 0, "text": "A", "logprobs": logprobs}]})
        before = now_ns()
        record = await record_of(stream(b": ping\n\n", token, event(usage(cached_tokens=3)), DONE))
        assert record.error is None
        assert (record.scenario, record.repeat, record.round, record.index) == (
            "lmcache",
            2,
            "measure",
            0,
        )
        assert (record.context_id, record.planned_tokens, record.asked_tokens) == ("c1", 4, 1)
        assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (4, 1, 3)
        assert (record.local_cached_tokens, record.external_cached_tokens) == (None, None)
        assert (record.token, record.top_logprobs) == ("token_id:7", top)
        assert record.first_token_kind == "text"
        stamps = [
            before,
            record.queued_ns,
            record.sent_ns,
            record.headers_ns,
            record.first_byte_ns,
            record.first_event_ns,
            record.done_ns,
            now_ns(),
        ]
        known = [stamp for stamp in stamps if stamp is not None]
        assert len(known) == len(stamps)
        assert known == sorted(known)
        # The comment came in a read of its own, so the first byte is older than the first event.
        assert record.first_byte_ns is not None
        assert record.first_event_ns is not None
        assert record.first_byte_ns < record.first_event_ns
        assert record.first_event_ns == record.first_token_ns
        assert record.last_byte_ns is not None
        assert record.done_ns is not None
        assert record.done_ns <= record.last_byte_ns
        assert record.ttft_ns is not None
        assert record.ttft_ns > 0

    async def test_first_event_and_first_token_part(self) -> None:  # P-01
        role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        token = event({"choices": [{"index": 0, "delta": {"content": "A"}}]})
        record = await record_of(stream(role, token, DONE))
        assert record.first_event_ns is not None
        assert record.first_token_ns is not None
        assert record.first_event_ns < record.first_token_ns
        assert (record.error, record.first_token_kind) == (None, "content")

    async def test_the_token_is_stamped_when_its_event_is_whole(self) -> None:
        record = await record_of(stream(TOKEN[:11], TOKEN[11:-1], TOKEN[-1:], DONE))
        assert record.first_byte_ns is not None
        assert record.first_token_ns is not None
        assert record.done_ns is not None
        assert record.first_byte_ns < record.first_token_ns < record.done_ns

    async def test_no_usage_is_unknown_not_wrong(self) -> None:  # P-07
        record = await record_of(stream(TOKEN + DONE))
        assert record.error is None
        assert record.prompt_tokens is None
        assert record.completion_tokens is None
        assert record.cached_tokens is None

    async def test_another_prompt_length_is_recorded(self) -> None:  # P-05, P-06
        body = event({"usage": {"prompt_tokens": 5, "completion_tokens": 1}})
        record = await record_of(stream(TOKEN, body, DONE))
        assert (record.planned_tokens, record.prompt_tokens) == (4, 5)

    async def test_buffered_stream_shows_in_the_stamps(self) -> None:  # P-08, test 2
        record = await record_of(
            send(CHUNKED + chunk(TOKEN * 20 + event(usage(20)) + DONE) + LAST),
            question=client.Question("c", (1,), 20),
        )
        assert record.error is None
        assert record.first_byte_ns == record.last_byte_ns == record.done_ns
        assert record.completion_tokens == 20


class TestFailed:
    @pytest.mark.parametrize(
        ("reply", "reason"),
        [
            (stream(ERROR, DONE), "in-band error: engine is gone"),  # P-03 a
            (stream(DONE), "no token: "),  # P-03 b
            (stream(TOKEN, ERROR, DONE), "error after token: engine is gone"),  # P-03 c
            (send(CHUNKED, chunk(TOKEN), close=True), "truncated stream: "),  # P-03 d
            (stream(ERROR), "in-band error: engine is gone"),
            (send(CHUNKED, chunk(ERROR), close=True), "in-band error: engine is gone"),
            (stream(TOKEN), "truncated stream: "),
            (stream(TOKEN, b"data: [DONE]"), "truncated stream: "),
            (stream(TOKEN, b"data: [DONE]\n"), "truncated stream: "),
            (send(CHUNKED, close=True), "truncated stream: "),
            (send(HEAD + b"Content-Length: 999\r\n\r\n" + TOKEN, close=True), "truncated stream: "),
            (send(HEAD + b"\r\n" + TOKEN, close=True), "truncated stream: "),
            (send(CHUNKED, chunk(TOKEN), b"zz\r\n"), "truncated stream: the answer is not HTTP"),
            (stream(), "no token: the answer is empty"),
            (send(HEAD + b"Content-Length: 0\r\n\r\n"), "no token: the answer is empty"),
            (stream(b": ping\n\n", event(usage(0)), DONE), "no token: "),
            (stream(TOKEN, event(usage(2)), DONE), "wrong output length: 2 tokens, not 1"),
            (stream(TOKEN, event(usage(0)), DONE), "wrong output length: 0 tokens, not 1"),
            (stream(b'data: {"choices": [\n\n', TOKEN, DONE), "malformed event: "),
            (
                send(b'HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n{"error":{"message":1}}'[:-1]),
                "no token: ",
            ),
            (
                send(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"error":"bad"}'),
                "in-band error: bad",
            ),
            (send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), "no token: hello"),
            (
                send(b'HTTP/1.1 400 X\r\nContent-Length: 27\r\n\r\n{"error":{"message":"long"}}'),
                "http 400: ",
            ),
            (send(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n"), "http 404: "),
            (send(b"HTTP/1.1 503 X\r\n\r\nbusy", close=True), "http 503: busy"),
            (send(b"HTTP/1.1 307 X\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"), "http 307: "),
            (send(b"HTTP/1.1 204 X\r\n\r\n"), "http 204: "),
            (send(close=True), "connection lost: the server closed the connection"),
            (send(b"HTTP/1.1 200", close=True), "connection lost: "),
            (send(b"220 mail ready\r\n"), "connection lost: the answer is not HTTP/1.1: "),
            (send(b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), "connection lo"),
        ],
    )
    async def test_reason(self, reply: Reply, reason: str) -> None:
        record = await record_of(reply)
        assert str(record.error).startswith(reason)
        assert record.ttft_ns is None
        assert record.sent_ns is not None

    @pytest.mark.parametrize(
        ("reply", "progress"),
        [
            (hang, "no response head"),
            (then_hang(b"HTTP/1.1 100 Continue\r\n\r\n"), "no response head"),
            (then_hang(CHUNKED), "a response head but no event"),
            (then_hang(CHUNKED, chunk(b": ping\n\n")), "a response head but no event"),  # P-30
            (then_hang(CHUNKED, chunk(event({"choices": []}))), "an event but no token"),
            (then_hang(CHUNKED, chunk(TOKEN)), "a token but no [DONE]"),
        ],
    )
    async def test_a_server_that_stalls(self, reply: Reply, progress: str) -> None:
        record = await record_of(reply, deadline_s=0.3)
        assert record.error == f"timeout: not complete within 0.3 s ({progress})"
        assert record.ttft_ns is None

    async def test_a_server_that_drips(self) -> None:
        async def drip(
            request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            writer.write(CHUNKED)
            while not writer.transport.is_closing():
                writer.write(chunk(b":"))
                await asyncio.sleep(0.005)

        record = await record_of(drip, deadline_s=0.3)
        assert str(record.error).startswith("timeout: ")
        assert record.first_byte_ns is not None
        assert record.last_byte_ns is not None
        assert record.last_byte_ns > record.first_byte_ns

    async def test_an_error_before_a_stall_is_the_reason(self) -> None:
        record = await record_of(then_hang(CHUNKED, chunk(ERROR)), deadline_s=0.3)
        assert record.error == "in-band error: engine is gone"

    async def test_a_status_before_a_stall_is_the_reason(self) -> None:
        reply = then_hang(b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\nout of")
        assert (await record_of(reply, deadline_s=0.3)).error == "http 500: out of"

    async def test_a_reset(self) -> None:
        async def reset(
            request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            writer.write(CHUNKED + chunk(TOKEN))
            await asyncio.sleep(0.01)
            peer = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()

        record = await record_of(reset)
        assert str(record.error).startswith("truncated stream: ")
        assert "reset" in str(record.error).lower()
        assert record.first_token_ns is not None

    async def test_an_answer_before_the_request_is_sent(self) -> None:
        """No TTFT can be told, and the rest of the request must not run into the next one."""
        writers: list[asyncio.StreamWriter] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while head := await reader.readuntil(b"\r\n\r\n"):
                    writer.write(OK if head.startswith(b"GET") else CHUNKED + chunk(GOOD) + LAST)
                    if head.startswith(b"POST"):
                        await writer.wait_closed()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1024)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client.connect(url, model="m") as sender:
            record = await ask(sender, client.Question("big", tuple(range(3_000_000))))
            assert record.error == "connection lost: the answer came before the request was sent"
            assert (record.sent_ns, record.ttft_ns) == (None, None)
            assert (await ask(sender)).error is None
        assert len(writers) == 2
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def test_a_failure_is_not_sent_again(self) -> None:  # P-30
        async with (
            serving(send(close=True), stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert (await ask(sender)).error is not None
            assert len(server.asked) == 1
            assert (await ask(sender)).error is None

    async def test_a_late_answer_does_not_reach_the_next_question(self) -> None:
        async def late(
            request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await asyncio.sleep(0.15)
            await stream(TOKEN, event(usage(7)), DONE)(request, reader, writer)

        async with (
            serving(late, stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert str((await ask(sender, deadline_s=0.05)).error).startswith("timeout")
            second = await ask(sender)
            assert (second.error, second.completion_tokens) == (None, 1)
            assert server.asked[0].connection != server.asked[1].connection

    async def test_a_server_that_is_gone(self) -> None:
        async with serving(stream(GOOD)) as server:
            sender = client.Sender(client.Address.parse(server.url), model="m", slots=1)
            await sender.open()
            assert (await ask(sender)).error is None
        record = await ask(sender)
        sender.close()
        assert str(record.error).startswith("connection refused: ")
        assert record.sent_ns is None
        assert record.ttft_ns is None

    async def test_connect_says_so_when_nobody_listens(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(StackNotReady, match="takes no connection"):
                async with client.connect(url, model="m"):
                    pass

    async def test_an_error_of_the_caller_is_left_alone(self) -> None:
        async with serving(stream(GOOD)) as server:
            with pytest.raises(OSError, match="disk full"):
                async with client.connect(server.url, model="m"):
                    raise OSError("disk full")


class TestEndOfStream:
    @pytest.mark.parametrize(
        "reply",
        [
            stream(GOOD),
            stream(*(GOOD[i : i + 1] for i in range(len(GOOD)))),
            send(HEAD + b"\r\n" + GOOD, close=True),
            send(HEAD.replace(b"1.1", b"1.0") + b"\r\n" + GOOD, close=True),
            send(HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD),
            send(b"HTTP/1.1 100 Continue\r\n\r\n", CHUNKED + chunk(GOOD) + LAST),
            send(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED + chunk(GOOD) + LAST),
            stream(GOOD.replace(b"\n", b"\r\n")),
            stream(TOKEN, event(usage()), b"data:[DONE]\r\n\r\n"),
            send(CHUNKED, chunk(GOOD), close=True),
        ],
    )
    async def test_ways_to_end_well(self, reply: Reply) -> None:
        record = await record_of(reply)
        assert record.error is None
        assert record.done_ns is not None

    @pytest.mark.parametrize(
        "parts", [(CHUNKED, chunk(GOOD)), (HEAD + b"\r\n", GOOD[:-5], GOOD[-5:])]
    )
    async def test_done_ends_a_response_that_the_server_never_ends(
        self, parts: tuple[bytes, ...]
    ) -> None:
        async with (
            serving(then_hang(*parts), stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            async with asyncio.timeout(30):
                assert (await ask(sender, deadline_s=600)).error is None
            assert (await ask(sender)).error is None
            assert server.asked[0].connection != server.asked[1].connection

    async def test_done_before_the_deadline_is_in_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "_LINGER_S", 60.0)
        record = await record_of(then_hang(CHUNKED, chunk(GOOD)), deadline_s=0.3)
        assert (record.error, record.completion_tokens) == (None, 1)

    async def test_done_inside_a_text_ends_nothing(self) -> None:
        token = event({"choices": [{"text": "\ndata: [DONE]\n\n"}]})
        record = await record_of(
            then_hang(CHUNKED, chunk(token), chunk(b": [DONE]\n\n")), deadline_s=0.6
        )
        assert str(record.error).startswith("timeout: ")


class TestRequest:
    async def test_body_and_head(self) -> None:
        async with (
            serving(stream(TOKEN * 3 + event(usage(3)) + DONE)) as server,
            client.connect(
                server.url + "/base/v1/", model='a"%s', headers={"Authorization": "Bearer k"}
            ) as sender,
        ):
            record = await ask(sender, client.Question("c", (0, 4095, 17), 3))
        assert record.error is None
        (request,) = server.asked
        assert request.line == "POST /base/v1/completions HTTP/1.1"
        assert request.headers["host"] == server.url.removeprefix("http://")
        assert request.headers["authorization"] == "Bearer k"
        assert json.loads(request.body) == {
            "model": 'a"%s',
            "prompt": [0, 4095, 17],
            "max_tokens": 3,
            "min_tokens": 3,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        assert server.requests[0].line == "GET /base/health HTTP/1.1"

    async def test_sent_is_stamped_when_the_last_byte_has_left(self) -> None:
        async with (
            serving(stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            transport: Any = server.writers[0].transport
            transport.pause_reading()
            big = client.Question("big", tuple(range(1_500_000)))
            task = asyncio.create_task(ask(sender, big))
            await asyncio.sleep(0.2)
            reading_ns = now_ns()
            transport.resume_reading()
            record = await task
        assert record.error is None
        assert record.sent_ns is not None
        assert record.queued_ns < reading_ns < record.sent_ns

    async def test_a_processor_lost_while_sending_is_inside_ttft(self) -> None:
        """The answer may be there when the call returns: a later stamp would give a TTFT of 0."""
        async with (
            serving(stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            connection = sender._free.get_nowait()
            assert connection is not None
            sender._free.put_nowait(connection)
            write = connection._transport.write

            def slow(data: bytes) -> None:
                write(data)
                time.sleep(0.2)

            connection._transport.write = slow  # type: ignore[method-assign]
            record = await ask(sender)
        assert record.error is None
        assert record.sent_ns is not None
        assert record.written_ns is not None
        assert record.written_ns - record.sent_ns > 190_000_000
        assert record.ttft_ns is not None
        assert record.ttft_ns > 190_000_000

    @pytest.mark.parametrize(("ids", "asked"), [((), 1), ((1,), 0)])
    def test_a_question_needs_content(self, ids: tuple[int, ...], asked: int) -> None:
        with pytest.raises(ValueError, match="needs token ids"):
            client.Question("c", ids, asked)

    def test_questions_compare_by_what_they_ask(self) -> None:
        assert client.Question("c", (1, 2)) == client.Question("c", (1, 2))
        assert hash(client.Question("c", (1, 2))) == hash(client.Question("c", (1, 2)))
        assert "prompt_json" not in repr(client.Question("c", (1, 2)))

    def test_a_sender_needs_a_slot(self) -> None:
        with pytest.raises(ValueError, match="at least one slot"):
            client.Sender(client.Address.parse("http://h"), model="m", slots=0)

    @pytest.mark.parametrize("headers", [{"A": "b\r\nC: d"}, {"A\n": "b"}])
    def test_headers_cannot_smuggle(self, headers: dict[str, str]) -> None:
        with pytest.raises(UsageError, match="line break"):
            client.Sender(client.Address.parse("http://h"), model="m", slots=1, headers=headers)


class TestAddress:
    @pytest.mark.parametrize(
        ("url", "host", "port", "authority", "prefix", "secure"),
        [
            ("http://127.0.0.1:8000", "127.0.0.1", 8000, "127.0.0.1:8000", "", False),
            ("http://localhost:8000/", "localhost", 8000, "localhost:8000", "", False),
            ("http://[::1]:8000/v1", "::1", 8000, "[::1]:8000", "", False),
            ("https://gpu.example/a/b/v1/", "gpu.example", 443, "gpu.example", "/a/b", True),
            ("HTTP://h", "h", 80, "h", "", False),
            ("http://h/a b\r\n", "h", 80, "h", "/a%20b", False),
        ],
    )
    def test_parts(
        self, url: str, host: str, port: int, authority: str, prefix: str, secure: bool
    ) -> None:
        assert client.Address.parse(url) == client.Address(host, port, authority, prefix, secure)

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "127.0.0.1:8000",
            "ftp://h",
            "http://",
            "http://h:x",
            "http://h:99999",
            "http://h?a=1",
            "http://u:p@h",
            "http://[::1",
        ],
    )
    def test_refused(self, url: str) -> None:
        with pytest.raises(UsageError):
            client.Address.parse(url)


class TestConnections:
    async def test_opened_and_warmed_before_the_first_question(self) -> None:
        async with serving(stream(GOOD)) as server:
            async with client.connect(server.url, model="m", slots=3) as sender:
                assert [r.line for r in server.requests] == ["GET /health HTTP/1.1"] * 3
                assert len(server.writers) == 3
                records = await asyncio.gather(*(ask(sender, index=i) for i in range(3)))
            assert [record.error for record in records] == [None] * 3
            assert {r.connection for r in server.asked} == {1, 2, 3}
            assert len(server.writers) == 3

    async def test_kept_between_questions(self) -> None:
        async with (
            serving(stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            for index in range(5):
                assert (await ask(sender, index=index)).error is None
            assert {r.connection for r in server.asked} == {1}

    @pytest.mark.parametrize(
        "health",
        [
            send(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n"),
            send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", close=True),
            send(close=True),
            send(b"nonsense"),
        ],
    )
    async def test_a_server_without_a_health_page(self, health: Reply) -> None:
        async with (
            serving(stream(GOOD), health=health) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert (await ask(sender)).error is None

    async def test_a_health_page_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "_WARM_S", 0.05)
        async with (
            serving(stream(GOOD), health=hang) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert (await ask(sender)).error is None

    @pytest.mark.parametrize("seen_by_the_loop", [True, False])
    async def test_one_that_the_server_closed_is_reopened_before_the_clock(
        self, seen_by_the_loop: bool
    ) -> None:
        async with (
            serving(stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert (await ask(sender)).error is None
            if seen_by_the_loop:
                server.writers[0].close()
                await asyncio.sleep(0.05)
            else:
                # The goodbye waits in the socket; no turn of the loop passes before the question.
                server.writers[0].get_extra_info("socket").shutdown(socket.SHUT_WR)
            record = await ask(sender)
            assert record.error is None
            assert [r.connection for r in server.asked] == [1, 2]
            assert server.requests[-2].line.startswith("GET")

    async def test_an_idle_one_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with (
            serving(stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            monkeypatch.setattr(client, "_FRESH_NS", -1)
            assert (await ask(sender)).error is None
            assert server.asked[0].connection == 3

    async def test_connection_close_is_obeyed(self) -> None:
        reply = send(CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunk(GOOD))
        async with (
            serving(reply, stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert (await ask(sender)).error is None
            assert (await ask(sender)).error is None
            assert [r.connection for r in server.asked] == [1, 2]

    async def test_a_response_nobody_asked_for(self) -> None:
        async with (
            serving(send(CHUNKED + chunk(GOOD) + LAST + OK), stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert (await ask(sender)).error is None
            assert (await ask(sender)).error is None
            assert [r.connection for r in server.asked] == [1, 2]

    async def test_waiting_for_a_slot_is_not_in_ttft(self) -> None:
        gate = asyncio.Event()

        async def gated(
            request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await gate.wait()
            await stream(GOOD)(request, reader, writer)

        async with (
            serving(gated, stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            tasks = [asyncio.create_task(ask(sender, index=i)) for i in range(2)]
            await asyncio.sleep(0.1)
            assert len(server.asked) == 1
            gate.set()
            first, second = await asyncio.gather(*tasks)
        assert second.sent_ns is not None
        assert first.done_ns is not None
        assert second.queued_ns < first.done_ns < second.sent_ns

    async def test_a_due_time_of_the_caller_is_kept(self) -> None:
        async with (
            serving(stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            assert (await ask(sender, queued_ns=123)).queued_ns == 123

    async def test_cancelling_frees_the_slot(self) -> None:
        async with (
            serving(hang, stream(GOOD)) as server,
            client.connect(server.url, model="m") as sender,
        ):
            task = asyncio.create_task(ask(sender))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await ask(sender)).error is None

    async def test_nothing_is_left_open(self) -> None:
        async with serving(stream(GOOD)) as server:
            async with client.connect(server.url, model="m", slots=4) as sender:
                await ask(sender)
            await asyncio.sleep(0.05)
            assert all(writer.transport.is_closing() for writer in server.writers)

    @pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
    async def test_proxies_are_ignored(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # P-08
        monkeypatch.setenv("NO_PROXY", "")
        assert (await record_of(stream(GOOD))).error is None

    @pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
    async def test_ipv6(self) -> None:
        try:
            async with (
                serving(stream(GOOD), host="::1") as server,
                client.connect(server.url, model="m") as sender,
            ):
                assert (await ask(sender)).error is None
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")

    async def test_a_host_name(self) -> None:
        async with (
            serving(stream(GOOD)) as server,
            client.connect(server.url.replace("127.0.0.1", "localhost"), model="m") as sender,
        ):
            assert (await ask(sender)).error is None


class TestTls:
    @pytest.fixture
    def tls(self, tmp_path: Path) -> ssl.SSLContext:
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", str(key), "-out", str(certificate)]
        try:
            subprocess.run(
                ["openssl", *options.split(), *names, *files], check=True, capture_output=True
            )
        except FileNotFoundError:
            pytest.skip("no openssl program here")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context

    async def test_a_trusted_certificate(
        self, tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        async with (
            serving(stream(GOOD), tls=tls) as server,
            client.connect(server.url, model="m", slots=2) as sender,
        ):
            for index in range(3):
                record = await ask(sender, client.Question("c", tuple(range(90_000))), index=index)
                assert record.error is None
                assert record.ttft_ns is not None

    async def test_an_unknown_certificate_is_refused(self, tls: ssl.SSLContext) -> None:
        async with serving(stream(GOOD), tls=tls) as server:
            with pytest.raises(StackNotReady, match=r"(?i)certificate"):
                async with client.connect(server.url, model="m"):
                    pass


def unstamped(record: RequestRecord) -> dict[str, Any]:
    """The record's fields; of a stamp, whether it is there."""
    names = RequestRecord.__dataclass_fields__
    fields = {name: getattr(record, name) for name in names}
    return {k: v is not None if k.endswith("_ns") else v for k, v in fields.items()}


STREAMS: Sequence[bytes] = (
    GOOD,
    b"\xef\xbb\xbf: ping\r\n\r\n" + GOOD.replace(b"\n", b"\r\n"),
    TOKEN + ERROR + DONE,
    TOKEN + b"data: [DONE]\n",
    event(usage(0)) + DONE,
)


@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 300), max_size=6))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_cuts_on_the_wire_change_no_field(raw: bytes, places: list[int]) -> None:
    wire = CHUNKED + chunk(raw[: len(raw) // 2]) + chunk(raw[len(raw) // 2 :]) + LAST
    edges = [0, *sorted(place % len(wire) for place in places), len(wire)]
    pieces = [wire[a:b] for a, b in itertools.pairwise(edges)]
    whole = asyncio.run(record_of(send(wire)))
    assert unstamped(asyncio.run(record_of(send(*pieces)))) == unstamped(whole)
