"""What each request sender adds to a time to first token that is known in advance.

A streaming server in a process of its own answers every request after a set delay. The senders take
turns against it, each in a fresh process, in an order that is reversed from pass to pass. What a
sender reports beyond the set delay is its error; how much of it the server caused is printed too.

    python benchmarks/client_overhead.py --engine-python .venv-engine/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import importlib.util
import itertools
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

MODEL = "overhead"
OWN = ("kvlab", "socket", "aiohttp", "httpx", "httpx-per-slot")
ENGINE = ("vllm-bench", "lmcache-bench")
Ask = Callable[[int], Awaitable[float]]
"""Sends one request on one slot; returns its time to first token in seconds."""


# --- the server -----------------------------------------------------------------------------------


class Answering(asyncio.Protocol):
    """One connection of the server: whole request in, three events out after the delay."""

    delay_s = 0.05
    late_s: ClassVar[list[float]] = []
    """Of each request: seconds from its last byte to the first token's write, less the delay."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        received = time.monotonic()
        self.buffer += data
        head, blank, rest = self.buffer.partition(b"\r\n\r\n")
        match = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        length = int(match[1]) if match else 0
        if not blank or len(rest) < length:
            return
        self.buffer = b""
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/v1/") and path.endswith(b"completions"):
            loop = asyncio.get_running_loop()
            loop.call_at(received + self.delay_s, self.answer, received, b"chat" in path)
        else:
            self.inform(path)

    def answer(self, received: float, chat: bool) -> None:
        choice = {"delta": {"role": "assistant", "content": "A"}} if chat else {"text": "A"}
        kind = {"id": "x", "created": 1, "model": MODEL}
        kind["object"] = "chat.completion.chunk" if chat else "text_completion"
        first = {**kind, "choices": [{"index": 0, "finish_reason": "length", **choice}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        self.late_s.append(time.monotonic() - received - self.delay_s)
        self.transport.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for body in (json.dumps(first), json.dumps({**kind, "choices": [], "usage": usage})):
            self.transport.write(chunk(b"data: " + body.encode() + b"\n\n"))
        self.transport.write(chunk(b"data: [DONE]\n\n") + chunk(b""))

    def inform(self, path: bytes) -> None:
        body: Any = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        if path == b"/log":
            body = list(self.late_s)
            self.late_s.clear()
        text = json.dumps(body).encode()
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(delay_s: float) -> None:
    """Serve until killed; the port is the first line of output."""
    Answering.delay_s = delay_s
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- kvlab and the bare loops: each returns the times to first token, in seconds ------------------


def body(tokens: int) -> bytes:
    options = {"model": MODEL, "max_tokens": 1, "temperature": 0, "stream": True}
    return json.dumps({**options, "prompt": list(range(100, 100 + tokens))}).encode()


async def closed_loop(ask: Ask, slots: int, requests: int) -> list[float]:
    """One request per slot to warm up, then ``requests`` spread over the slots."""
    await asyncio.gather(*(ask(slot) for slot in range(slots)))

    async def work(slot: int) -> list[float]:
        return [await ask(slot) for _ in range(requests // slots)]

    done = await asyncio.gather(*(work(slot) for slot in range(slots)))
    return [time_s for times in done for time_s in times]


async def send_kvlab(url: str, slots: int, requests: int, tokens: int) -> list[float]:
    from kvlab import client

    question = client.Question("overhead", tuple(range(100, 100 + tokens)))
    async with client.connect(url, model=MODEL, slots=slots) as sender:

        async def ask(slot: int) -> float:
            record = await sender.ask(question, scenario="-", repeat=1, round="probe", index=slot)
            if record.ttft_ns is None:
                raise RuntimeError(record.error)
            return record.ttft_ns / 1e9

        return await closed_loop(ask, slots, requests)


async def send_aiohttp(url: str, slots: int, requests: int, tokens: int) -> list[float]:
    import aiohttp

    data, headers = body(tokens), {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=slots)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(slot: int) -> float:
            first, start = 0.0, time.monotonic()
            async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    first = first or time.monotonic()
            return first - start

        return await closed_loop(ask, slots, requests)


async def send_httpx(
    url: str, slots: int, requests: int, tokens: int, per_slot: bool = False
) -> list[float]:
    import httpx

    data, headers = body(tokens), {"Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=slots, max_keepalive_connections=slots)
    count = slots if per_slot else 1
    clients = [httpx.AsyncClient(limits=limits, trust_env=False) for _ in range(count)]

    async def ask(slot: int) -> float:
        client = clients[slot % len(clients)]
        first, start = 0.0, time.monotonic()
        async with client.stream(
            "POST", f"{url}/v1/completions", content=data, headers=headers
        ) as answer:
            async for _ in answer.aiter_raw():
                first = first or time.monotonic()
        return first - start

    try:
        return await closed_loop(ask, slots, requests)
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))


def send_socket(url: str, slots: int, requests: int, tokens: int) -> list[float]:
    """The floor: one thread, one selector, no HTTP parser; the clock starts as in kvlab."""
    host, port = url.removeprefix("http://").split(":")
    data = body(tokens)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    peers = [socket.create_connection((host, int(port))) for _ in range(slots)]
    for peer in peers:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    socket_loop(peers, head.encode() + data, 1)
    return socket_loop(peers, head.encode() + data, requests // slots)


def socket_loop(peers: list[socket.socket], request: bytes, each: int) -> list[float]:
    """The times of ``each`` requests on every connection."""
    times: list[float] = []
    left = dict.fromkeys(peers, each)
    sent: dict[socket.socket, float] = {}
    first: dict[socket.socket, float] = {}
    tail: dict[socket.socket, bytes] = {}

    def ask(peer: socket.socket) -> None:
        tail[peer] = b""
        peer.sendall(request)
        sent[peer] = time.monotonic()

    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ, peer)
            ask(peer)
        while any(left.values()):
            for key, _ in selector.select():
                seen = tail[key.data] + key.data.recv(65536)
                if b"data: " in seen:
                    first.setdefault(key.data, time.monotonic())
                tail[key.data] = seen[-256:]
                if not seen.endswith(b"0\r\n\r\n"):
                    continue
                times.append(first.pop(key.data) - sent[key.data])
                left[key.data] -= 1
                if left[key.data]:
                    ask(key.data)
    return times


def send(name: str, url: str, slots: int, requests: int, tokens: int) -> list[float]:
    if name == "socket":
        return send_socket(url, slots, requests, tokens)
    if name == "kvlab":
        return asyncio.run(send_kvlab(url, slots, requests, tokens))
    if name == "aiohttp":
        return asyncio.run(send_aiohttp(url, slots, requests, tokens))
    return asyncio.run(send_httpx(url, slots, requests, tokens, per_slot=name != "httpx"))


# --- the engines' own load generators, from their own environment ---------------------------------

_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = {"<unk>": 0, "hi": 1, **{f"w{i}": i for i in range(2, 4096)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(sys.argv[1])
"""

_VLLM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def make_tokenizer(python: Path, folder: Path) -> None:
    """A word-level tokenizer on disk, so that nothing has to be downloaded."""
    run([str(python), "-c", _TOKENIZER, str(folder)])


def vllm_bench(
    python: Path, folder: Path, url: str, slots: int, requests: int, tokens: int
) -> list[float]:
    command = f"""--backend openai --base-url {url} --model {MODEL} --tokenizer {folder}
        --dataset-name random --random-input-len {tokens} --random-output-len 1
        --num-prompts {requests} --max-concurrency {slots} --num-warmups {slots} --disable-tqdm
        --save-result --save-detailed --result-dir {folder} --result-filename vllm.json"""
    run([str(python), "-c", _VLLM, *command.split()])
    result = json.loads((folder / "vllm.json").read_text())
    if result["completed"] != requests:
        raise RuntimeError(f"only {result['completed']} of {requests} completed")
    return [float(value) for value in result["ttfts"]]


def lmcache_bench(
    python: Path, folder: Path, url: str, slots: int, requests: int, tokens: int
) -> list[float]:
    documents = min(slots, 8)
    command = f"""bench engine --engine-url {url} --model {MODEL} --workload long-doc-qa
        --kv-cache-volume 1 --tokens-per-gb-kvcache {documents * tokens}
        --ldqa-document-length {tokens} --ldqa-query-per-document {requests // documents}
        --ldqa-num-inflight-requests {slots} --ldqa-max-output-length 1
        --output-dir {folder} --no-interactive --quiet"""
    for old in folder.glob("*.csv"):
        old.unlink()
    run([str(python.with_name("lmcache")), *command.split()])
    (path,) = folder.glob("*.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if "warmup" not in row["request_id"]]
    if len(rows) != requests or any(row["successful"] != "True" for row in rows):
        raise RuntimeError(f"{len(rows)} of {requests} requests in its table, or some failed")
    return [float(row["ttft"]) for row in rows]


def run(command: list[str]) -> str:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false"}
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    done = subprocess.run(
        command, env=environment | quiet, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


# --- the comparison -------------------------------------------------------------------------------


def one_run(name: str, url: str, slots: int, args: argparse.Namespace, folder: Path) -> list[float]:
    requests = args.requests // slots * slots if slots > 1 else args.requests_alone
    if name == "vllm-bench":
        return vllm_bench(args.engine_python, folder, url, slots, requests, args.tokens)
    if name == "lmcache-bench":
        return lmcache_bench(args.engine_python, folder, url, slots, requests, args.tokens)
    call = [sys.executable, __file__, "--send", name, "--url", url, "--slots", str(slots)]
    call += ["--requests", str(requests), "--tokens", str(args.tokens)]
    return [float(value) for value in json.loads(run(call))]


def server_log(url: str) -> list[float]:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return [float(value) for value in json.load(direct.open(f"{url}/log"))]


def compare(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Errors in milliseconds by concurrency and sender, and what could not run."""
    call = [sys.executable, __file__, "--serve", "--delay-ms", str(args.delay_ms)]
    server = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        with tempfile.TemporaryDirectory() as folder:
            return take_turns(args, names, url, Path(folder))
    finally:
        server.kill()
        server.wait()


def take_turns(
    args: argparse.Namespace, names: list[str], url: str, folder: Path
) -> dict[str, Any]:
    """Every sender at every concurrency in every pass; the order is reversed in each second one."""
    errors: dict[tuple[int, str], list[list[float]]] = {}
    late: dict[tuple[int, str], list[float]] = {}
    missing: dict[str, str] = {}
    if set(names) & set(ENGINE):
        make_tokenizer(args.engine_python, folder)
    for number, slots in itertools.product(range(args.passes), args.concurrency):
        for name in names if number % 2 == 0 else names[::-1]:
            if name in missing:
                continue
            print(f"pass {number + 1}: {name} at {slots}", file=sys.stderr)
            server_log(url)
            try:
                times = one_run(name, url, slots, args, folder)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                missing[name] = f"stopped in pass {number + 1} at {slots}: {error}"
                continue
            # What came before the last len(times) requests was the sender's warm-up.
            log = server_log(url)[-len(times) :]
            errors.setdefault((slots, name), []).append([1000 * t - args.delay_ms for t in times])
            late.setdefault((slots, name), []).extend(1000 * late_s for late_s in log)
    rows = [summarise(*key, passes, late[key]) for key, passes in errors.items()]
    return {"settings": settings(args), "rows": add_ratios(rows), "missing": missing}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("delay_ms", "passes", "requests", "requests_alone", "tokens")
    return {name: getattr(args, name) for name in names} | {"cpus": os.cpu_count()}


def summarise(
    slots: int, name: str, passes: list[list[float]], late: list[float]
) -> dict[str, Any]:
    """One line of the table, all passes together."""
    pooled = sorted(error for errors in passes for error in errors)
    mean = statistics.fmean(pooled)
    return {
        "concurrency": slots,
        "sender": name,
        "n": len(pooled),
        "median_ms": statistics.median(pooled),
        "mean_ms": mean,
        "p99_ms": pooled[min(len(pooled) - 1, int(0.99 * len(pooled)))],
        "pass_means_ms": [statistics.fmean(values) for values in passes],
        "server_mean_ms": statistics.fmean(late),
        "own_mean_ms": mean - statistics.fmean(late),
    }


def add_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        for other in ("socket", "aiohttp"):
            for base in rows:
                if (base["sender"], base["concurrency"]) == (other, row["concurrency"]):
                    row[f"mean_over_{other}"] = row["mean_ms"] / base["mean_ms"]
    return sorted(rows, key=lambda row: (row["concurrency"], row["mean_ms"]))


def table(result: dict[str, Any]) -> str:
    head = ("at", "sender", "n", "median", "mean", "p99", "server", "own", "x socket", "x aiohttp")
    keys = ("median_ms", "mean_ms", "p99_ms", "server_mean_ms", "own_mean_ms")
    form = "{:>3} {:<15}{:>6}{:>9}{:>9}{:>9}{:>9}{:>9}{:>10}{:>11}"
    lines = [f"error over a set {result['settings']['delay_ms']:g} ms, in ms", form.format(*head)]
    for row in result["rows"]:
        cells = [f"{row[key]:.2f}" for key in keys]
        for other in ("socket", "aiohttp"):
            ratio = row.get(f"mean_over_{other}")
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        lines.append(form.format(row["concurrency"], row["sender"], row["n"], *cells))
    for name, reason in result["missing"].items():
        said = reason.strip().splitlines()
        errors = [line for line in said[1:] if "Error" in line]
        lines.append(f"missing: {name}: {' ... '.join(said[:1] + errors[-1:])}")
    return "\n".join(lines)


def available(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The senders that can run here, and why the others cannot."""
    names, missing = [], {}
    for name in args.only or OWN + ENGINE:
        module = name.removesuffix("-per-slot")
        if module in ("aiohttp", "httpx") and importlib.util.find_spec(module) is None:
            missing[name] = f"{module} is not installed"
        elif name in ENGINE and not (args.engine_python and args.engine_python.exists()):
            missing[name] = "no engine environment (--engine-python)"
        else:
            names.append(name)
    return names, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--requests", type=int, default=320, help="per pass, at concurrency > 1")
    parser.add_argument("--requests-alone", type=int, default=40, help="per pass, at concurrency 1")
    parser.add_argument("--tokens", type=int, default=1000, help="prompt length")
    parser.add_argument("--engine-python", type=Path, default=Path(".venv-engine/bin/python"))
    parser.add_argument("--only", nargs="+", choices=OWN + ENGINE)
    parser.add_argument("--json", action="store_true")
    for internal, kind in (("--send", str), ("--url", str), ("--slots", int)):
        parser.add_argument(internal, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.delay_ms / 1000))
    elif args.send:
        print(json.dumps(send(args.send, args.url, args.slots, args.requests, args.tokens)))
    else:
        names, missing = available(args)
        result = compare(args, names)
        result["missing"] = missing | result["missing"]
        print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
