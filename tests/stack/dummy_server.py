"""A server that does nothing but live, in the way that its options say. Standard library only."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import shared_memory
from pathlib import Path

ANSWERS = {
    "/v1/models": {"data": [{"id": "fake-model"}]},
    "/version": {"version": "dummy"},
}
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(ANSWERS.get(self.path, {"status": "healthy"})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--line", default="dummy starts")
    parser.add_argument("--exit", type=int)
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--children", type=int, default=0, help="deaf ones that call setsid")
    parser.add_argument("--pids", type=Path, help="file that receives the pids")
    parser.add_argument(
        "--stopped", type=Path, help="file to which the name is appended at SIGTERM"
    )
    parser.add_argument("--name", default="dummy")
    parser.add_argument("--shm", type=Path, help="file that receives the name of a leaked segment")
    parser.add_argument("--never-listen", action="store_true")
    options = parser.parse_args()
    print(options.line, flush=True)
    if options.exit is not None:
        sys.exit(options.exit)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else lambda *_: stop(options))
    children = [
        subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
        for _ in range(options.children)
    ]
    if options.shm:
        segment = shared_memory.SharedMemory(create=True, size=4096)
        options.shm.write_text(segment.name)
    if options.pids:
        complete = options.pids.with_suffix(".new")
        complete.write_text(json.dumps([os.getpid(), *(child.pid for child in children)]))
        complete.replace(options.pids)
    if options.port is None or options.never_listen:
        time.sleep(600)
    else:
        ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


def stop(options: argparse.Namespace) -> None:
    if options.stopped:
        with options.stopped.open("a") as file:
            file.write(f"{options.name}\n")
    os._exit(0)  # without cleaning up: what it leaves is the guard's to remove


if __name__ == "__main__":
    main()
