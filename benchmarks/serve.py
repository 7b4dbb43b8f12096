"""`prefixkv serve` while very many chats begin at once, and while it only waits.

    python -m benchmarks serve --against COMMIT --json benchmarks/results/serve.json

`burst`: how long each of many chats waits for its first token. A burst goes to a server of the
small model that has answered one chat. There are two in a row: the second meets what the first has
left behind, such as idle connections. Sides run turn about, each with a server of its own: this
tree, this tree once more, and with `--against` another commit's between them.

`idle`: the processor time of the front and its two workers, user and system, of all their threads.
`idle`: nothing is asked. `waits`: decode has promised most of its pool to a prompt that nothing
computes, and eight clients wait. `decode stopped`: decode stands still and prefill writes to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from benchmarks.report import ROOT, JsonFile, Row, check_json, tell, write

BURSTS: Final = ("first", "second")
PATIENCE_S: Final = 300.0  # of one burst
_FILES: Final = 20_000
BOUND: Final = 0.05
"""Of a core, a process that waits."""
REST_S: Final = 4.0
"""From a request, or from the server's first answer, until it is measured."""
PAGES, PAGE, CLIENTS = 64, 16, 8  # of each pool; tokens; that wait at the front


# --- chats that begin at once ---------------------------------------------------------------------


@contextmanager
def serving(tree: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `prefixkv serve` of a tree until the end of the `with` block. Gives the process, the
    address of its API, and that of its status."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PREFIXKV")}
    with subprocess.Popen(
        [sys.executable, "-m", "prefixkv.cli.main", "serve", "--port", "0", "--status-port", "0",
         "--threads", "1", "--compute-below", "0", "--no-carry-on", *more],
        cwd=tree, env=environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()  # once all serve
            if not words:
                raise SystemExit(f"prefixkv serve of {tree} has not started")
            yield process, words[1], words[-1].rstrip(")")
        finally:
            process.terminate()
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()


async def chat(at: tuple[str, int], words: str, num_tokens: int) -> float | None:
    """Have one chat; return the seconds to its first token, or None if it failed."""
    asked = {
        "model": "small", "messages": [{"role": "user", "content": words}], "stream": True,
        "max_tokens": num_tokens, "ignore_eos": True,
    }  # fmt: skip
    body = json.dumps(asked).encode()
    begin_s, first_s, got = time.monotonic(), None, b""
    reader, writer = await asyncio.open_connection(*at)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        while piece := await reader.read(65536):
            got += piece
            # The first event has the role alone.
            if first_s is None and got.count(b"data: ") > 1:
                first_s = time.monotonic() - begin_s
    except ConnectionError:
        return None
    finally:
        writer.close()
    return first_s if b"data: [DONE]" in got else None


async def bursts(url: str, num_chats: int, num_tokens: int) -> dict[str, list[float]]:
    """Send two bursts to one server; return the seconds to the first token of the chats that were
    answered, by burst."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    at = parts.hostname, parts.port
    await chat(at, "Rain.", num_tokens)
    found = {}
    for name in BURSTS:
        asked = (chat(at, f"{name} {i} Rain.", num_tokens) for i in range(num_chats))
        async with asyncio.timeout(PATIENCE_S):
            waits = await asyncio.gather(*asked)
        found[name] = sorted(wait for wait in waits if wait is not None)
    return found


def chats_at_once(commit: str | None, chats: list[int], tokens: int, rounds: int) -> Iterator[Row]:
    """A row for each number of chats and burst: medians over the rounds, by side."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _FILES), hard))
    with ExitStack() as stack:
        trees = {"ours": ROOT, "again": ROOT}
        if commit is not None:
            from benchmarks.against import tree_of

            trees = {"ours": ROOT, "theirs": stack.enter_context(tree_of(commit)), "again": ROOT}
        found: dict[tuple[int, str, str], list[list[float]]] = {}
        sides = [*trees]
        for turn in range(rounds):
            for num in chats:
                # Each side is as often the first.
                for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                    with serving(trees[side]) as (_, url, _status):
                        for burst, waits in asyncio.run(bursts(url, num, tokens)).items():
                            found.setdefault((num, burst, side), []).append(waits)
    for num in chats:
        for burst in BURSTS:
            row: Row = {"part": "burst", "chats": num, "burst": burst}
            for side in sides:
                each = found[num, burst, side]
                row[side] = {"answered": min(map(len, each))} | {
                    f"ttft_p{percent}_s": _median(
                        one[int(len(one) * percent / 100)] for one in each if one
                    )
                    for percent in (50, 99)
                }
            yield row


def _median(found: Iterable[float]) -> float | None:
    known = [*found]
    return round(statistics.median(known), 4) if known else None


# --- what waiting costs ---------------------------------------------------------------------------


def cpu_share(pids: Iterable[int], seconds: float) -> float:
    """Of one core, the share that these processes use together in the next `seconds`: user and
    system time of all their threads, as the kernel counts it."""
    return cpu_shares({"": pids}, seconds)[""]


def cpu_shares(servers: Mapping[str, Iterable[int]], seconds: float) -> dict[str, float]:
    """`cpu_share` of several servers, by their names, in the same `seconds`."""
    pids = {name: list(each) for name, each in servers.items()}
    begun_s, before_s = time.monotonic(), {name: sum(map(_cpu_s, pids[name])) for name in pids}
    time.sleep(seconds)
    passed_s = time.monotonic() - begun_s
    return {name: (sum(map(_cpu_s, pids[name])) - before_s[name]) / passed_s for name in pids}


def _cpu_s(pid: int) -> float:
    """0 for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


class _Front:
    """`prefixkv serve` with small pools, and its workers."""

    def __init__(self, process: subprocess.Popen[str], url: str, status: str) -> None:
        self.url = url
        workers = _ask(f"{status}/health")["workers"]
        environ_of = Path(f"/proc/{workers['decode-0']['pid']}/environ").read_bytes().split(b"\0")
        (key,) = (one for one in environ_of if one.startswith(b"PREFIXKV_API_KEY="))
        self.key = key.decode().partition("=")[2]
        self.infos = {
            name: _ask(f"{worker['url']}/info", key=self.key) for name, worker in workers.items()
        }
        self.pids = {"front": process.pid} | {
            info["role"]: info["pid"] for info in self.infos.values()
        }

    def complete(self, word: int, num_tokens: int) -> threading.Thread:
        """Ask the front for one token, in a thread of its own."""
        prompt = [3 + (word * 7919 + i * 31) % 300 for i in range(num_tokens)]
        body = {"model": "small", "prompt": prompt, "max_tokens": 1, "temperature": 0}

        def ask() -> None:
            with suppress(urllib.error.HTTPError):  # a worker that stands still is given up
                _ask(f"{self.url}/completions", body)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread

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


def _open(url: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=PATIENCE_S)


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


def idle_rows(seconds: float) -> list[Row]:
    """The processes' shares of a core in each state."""
    rows: list[Row] = []

    def measure(state: str, but: str = "") -> None:
        time.sleep(REST_S)
        servers = {name: (pid,) for name, pid in front.pids.items() if name != but}
        for name, share in cpu_shares(servers, seconds).items():
            row = {"part": "idle", "server": name, "state": state, "share": round(share, 4)}
            rows.append(row | {"bound": BOUND, "met": share < BOUND})

    sizes = ("--page-size", str(PAGE), "--prefill-pages", str(PAGES), "--decode-pages", str(PAGES))
    with serving(ROOT, *sizes) as (process, url, status), _deaf_prefill() as deaf:
        front = _Front(process, url, status)
        measure("idle")
        # Decode has promised most of its pool to a prompt that nothing computes: what clients ask
        # for waits on decode for pages, on prefill for decode's promise, and at the front.
        with front.promised((PAGES - 16) * PAGE, deaf):
            asked = [front.complete(word, PAGES // 2 * PAGE) for word in range(CLIENTS)]
            measure("waits")
            if not all(thread.is_alive() for thread in asked):
                raise SystemExit("a request that should wait has ended")
        for thread in asked:
            thread.join()
        # Decode stands still when prefill has begun to compute for it.
        last = front.complete(CLIENTS, 60 * PAGE)
        while not front.is_computing():
            time.sleep(0.01)
        os.kill(front.pids["decode"], signal.SIGSTOP)
        try:
            measure("decode stopped", but="decode")
        finally:
            os.kill(front.pids["decode"], signal.SIGCONT)
        last.join()
    return rows


def serve(
    json_file: JsonFile = None,
    against: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="Bursts beside another commit's.")
    ] = None,
    chats: Annotated[str, typer.Option(help="Chats of each burst; none: no bursts.")] = "1,50,200",
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Servers of each side.")] = 3,
    seconds: Annotated[
        float, typer.Option(help="Of each measurement of what waiting costs; 0: none.")
    ] = 10.0,
) -> int:
    """Chats that begin all at once, and the processor time of servers that only wait."""
    check_json(json_file)
    if against is not None:
        from benchmarks.against import commit_of

        against = commit_of(against)
    rows: list[Row] = []
    parts: list[Callable[[], Iterable[Row]]] = []
    if chats:
        numbers = [int(one) for one in chats.split(",")]
        parts.append(lambda: chats_at_once(against, numbers, tokens, rounds))
    if seconds:
        parts.append(lambda: idle_rows(seconds))
    for part in parts:
        for row in part():
            rows.append(row)
            tell(row)
    write(
        json_file, f"serve --chats {chats}" + (f" --against {against}" if against else ""), rows,
        tokens=tokens, rounds=rounds, seconds=seconds,
        ttft="of those answered, medians over the servers of a side",
    )  # fmt: skip
    return 0 if all(row.get("met", True) for row in rows if row.get("state") != "idle") else 1
