"""``python -m tests.fake_stack vllm|lmcache --port … --config JSON``: one fake server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path

from tests.fake_stack.base import FakeServer
from tests.fake_stack.lmcache import FakeLmcache
from tests.fake_stack.servers import serve
from tests.fake_stack.settings import Settings
from tests.fake_stack.vllm import FakeVllm


def main(argv: list[str]) -> int:
    """The exit code of the server that the arguments describe."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_stack")
    parser.add_argument("role", choices=("vllm", "lmcache"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--http-port", type=int, help="lmcache: where HTTP is served")
    parser.add_argument("--model", help="vllm: the name that requests must give")
    parser.add_argument("--lmcache-url")
    parser.add_argument("--config", default="{}", help="Settings as JSON")
    given = parser.parse_args(argv)
    settings = Settings.from_json(given.config)
    if given.model:
        settings = dataclasses.replace(settings, served_name=given.model)
    return asyncio.run(_serve(given, settings))


async def _serve(given: argparse.Namespace, settings: Settings) -> int:
    server: FakeServer
    if given.role == "vllm":
        server = FakeVllm(settings, given.lmcache_url, echo=True)
        return await serve(server, given.port)
    folder = Path(settings.l2_path) if settings.l2 and settings.l2_path else None
    server = FakeLmcache(settings, folder, echo=True)
    if given.http_port is None:
        return await serve(server, given.port)
    # The real server's other port speaks another protocol: here it is only taken.
    taken = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", given.port)
    async with taken:
        return await serve(server, given.http_port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
