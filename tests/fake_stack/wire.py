"""Just enough HTTP/1.1 to control every byte and every pause of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body or b"null")


class Reply:
    """The answer to one request: whole, or as a stream of chunks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    async def send(
        self, body: bytes, *, status: int = 200, content_type: str = "application/json"
    ) -> None:
        self._writer.write(
            _head(status, f"content-length: {len(body)}", f"content-type: {content_type}") + body
        )
        await self._writer.drain()

    async def json(self, value: Any, status: int = 200) -> None:
        await self.send(compact(value), status=status)

    async def begin_stream(self) -> None:
        self._writer.write(
            _head(
                200, "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked"
            )
        )
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def end_stream(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def hang(self) -> None:
        """Wait until the client has given up."""
        while await self._reader.read(4096):
            pass
        raise ConnectionResetError

    def drop(self) -> None:
        """End the connection here."""
        self._writer.close()
        raise ConnectionResetError


Handler = Callable[[Request, Reply], Awaitable[None]]


class Listener:
    """A server of routes on one port of 127.0.0.1."""

    def __init__(self, routes: dict[tuple[str, str], Handler]):
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self.heads: list[tuple[str, dict[str, str]]] = []
        """Path and headers of every request."""

    async def start(self, port: int = 0) -> int:
        """The port on which it listens; 0 asks for a free one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Stop listening and end every connection, as a dying process does."""
        if self._server is not None:
            self._server.close()
        for writer in self._open.values():
            writer.transport.abort()

    async def stop(self) -> None:
        self.cut()
        mine = [task for task in self._open if task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            while (request := await _read(reader)) is not None:
                self.heads.append((request.path, request.headers))
                reply = Reply(reader, writer)
                handler = self._routes.get((request.method, request.path))
                if handler is None:
                    await reply.json({"detail": "Not Found"}, 404)
                else:
                    await handler(request, reply)
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client or the server has gone: nobody is left to tell
        finally:
            del self._open[task]
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


async def call(url: str, method: str, path: str, body: Any = None) -> Any:
    """The JSON answer of one server to the other; raises OSError when it has gone."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        payload = compact(body)
        head = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    if b"\r\n\r\n" not in answer:
        raise ConnectionResetError(f"{url}{path} did not answer")
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def compact(value: Any) -> bytes:
    """JSON as the real servers write it: no spaces, characters as they are."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None when the client has closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    parts = urlsplit(target)
    return Request(method, parts.path, dict(parse_qsl(parts.query)), headers, body)


def _head(status: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "server: uvicorn", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
