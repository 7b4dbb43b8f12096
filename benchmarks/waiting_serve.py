"""`prefixkv serve` that only waits: for the benchmark `waiting_cpu`.

The front and its two workers are measured while they are idle, while all three wait and there is no
prompt that could be computed, and while decode stands still and prefill writes to it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from prefixkv.runtime.closing import Closing

PAGES: Final = 64  # of each pool
PAGE: Final = 16  # tokens
ANSWER_S: Final = 300.0
CLIENTS: Final = 8  # that wait at the front


class Serve(Closing):
    """`prefixkv serve` with small pools."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "prefixkv.cli.main", "serve"]
        pages = ("--prefill-pages", str(PAGES), "--decode-pages", str(PAGES))
        sizes = ("--page-size", str(PAGE), *pages, "--threads", "1")
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith("PREFIXKV")
        }
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--status-port", "0", *sizes],
            stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()  # once all serve
        if not words:
            raise SystemExit("prefixkv serve has not started")
        self.url, status = words[1], words[-1].rstrip(")")
        workers = _ask(f"{status}/health")["workers"]
        environ_of = Path(f"/proc/{workers['decode-0']['pid']}/environ").read_bytes().split(b"\0")
        (key,) = (one for one in environ_of if one.startswith(b"PREFIXKV_API_KEY="))
        self.key = key.decode().partition("=")[2]
        self.infos = {
            name: _ask(f"{worker['url']}/info", key=self.key) for name, worker in workers.items()
        }
        self.pids = {"front": self.process.pid} | {
            info["role"]: info["pid"] for info in self.infos.values()
        }

    def complete(self, word: int, num_tokens: int) -> None:
        """Ask the front, and wait for the answer, a token."""
        prompt = [3 + (word * 7919 + i * 31) % 300 for i in range(num_tokens)]
        body = {"model": "small", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        _ask(f"{self.url}/completions", body)

    @contextmanager
    def promised(self, num_tokens: int, prefill_url: str) -> Iterator[None]:
        """A prompt that decode has promised its pages to, and that no prefill worker hears of."""
        decode, prefill = self.infos["decode-0"], self.infos["prefill-0"]
        body = {
            "rid": "promised", "tokens": [3 + i % 300 for i in range(num_tokens)],
            "max_new_tokens": 1, "prefill": prefill["endpoint"], "prefill_url": prefill_url,
        }  # fmt: skip
        with _open(f"{decode['url']}/generate", body, self.key):
            yield

    def is_computing(self) -> bool:
        """Whether prefill has a prompt, as its metrics say."""
        with urllib.request.urlopen(f"{self.infos['prefill-0']['status_url']}/metrics") as answer:
            name = 'prefixkv_pages{node="prefill-0",state="owned"} '
            return any(
                line.startswith(name) and float(line.removeprefix(name))
                for line in answer.read().decode().splitlines()
            )

    @contextmanager
    def stopped(self, server: str) -> Iterator[None]:
        os.kill(self.pids[server], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[server], signal.SIGCONT)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _open(url: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=ANSWER_S)


def _ask(url: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    with _open(url, body, key) as answer:
        return json.loads(answer.read())


@contextmanager
def _deaf_prefill() -> Iterator[str]:
    """An address that takes every job and computes none."""

    class Deaf(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(202)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Deaf)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def measure(shares: Callable[[str, dict[str, int]], None], rest_s: float) -> None:
    """Have `shares(state, pids)` measure the processes in each state."""

    def all_of(state: str, but: str = "") -> None:
        time.sleep(rest_s)
        shares(state, {name: pid for name, pid in serve.pids.items() if name != but})

    def ask(word: int, num_tokens: int) -> threading.Thread:
        def complete() -> None:
            with suppress(urllib.error.HTTPError):  # a worker that stands still is given up
                serve.complete(word, num_tokens)

        thread = threading.Thread(target=complete)
        thread.start()
        return thread

    with Serve() as serve, _deaf_prefill() as deaf:
        all_of("idle")
        # Decode has promised most of its pool to a prompt that nothing computes: what clients ask
        # for waits on decode for pages, on prefill for decode's promise, and at the front.
        with serve.promised((PAGES - 16) * PAGE, deaf):
            asked = [ask(word, PAGES // 2 * PAGE) for word in range(CLIENTS)]
            all_of("waits")
            if not all(thread.is_alive() for thread in asked):
                raise SystemExit("a request that should wait has ended")
        for thread in asked:
            thread.join()
        # Decode stands still when prefill has begun to compute for it.
        last = ask(CLIENTS, 60 * PAGE)
        while not serve.is_computing():
            time.sleep(0.01)
        with serve.stopped("decode"):
            all_of("decode stopped", but="decode")
        last.join()
