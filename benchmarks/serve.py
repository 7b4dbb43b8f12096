"""`prefixkv serve` while very many chats begin at once, and while it only waits.

    python -m benchmarks serve --against COMMIT --json benchmarks/results/serve.json

`burst`: how long each of many chats waits for its first token. A burst goes to a server of the
small model that has answered one chat. There are two in a row: the second meets what the first has
left behind, such as idle connections. Sides run turn about, each with a server of its own: this
tree, this tree once more, and with `--against` another commit's between them. Beside it of each
server the seconds from its start to the end of its first answer, the processor time of front and
workers a request, and the front's memory in the end.

`agents`: seconds to the first token of later turns. Each agent pauses between its turns, for a tool
or a user, and has helpers of one turn. Side "hints" says in each request whether and when its
session goes on; "none" says nothing, nor does "again". Decode has host memory, and pool and host
memory together hold less than all agents have.

`idle`: the processor time of the front and its two workers while nothing is asked, user and system,
of all their threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import urlsplit

import typer

from benchmarks.pair import turn_about
from benchmarks.report import ROOT, JsonFile, Row, check_outputs, told, write

BURSTS: Final = ("first", "second")
PATIENCE_S: Final = 300.0  # of one burst
_FILES: Final = 20_000
BOUND: Final = 0.05
"""Of a core, a process that waits."""
AGENT_TURNS: Final = 6
ARRIVALS_PER_S: Final = 0.6
AGENT_MEMORY: Final = (
    "--decode-pages", "1536", "--host-memory", "2x", "--prefill-pages", "768",
    "--compute-below", "16384",
)  # fmt: skip
"""Decode computes what is little: a hit saves prefill no computation where prefill has lost it."""
AGENT_BOUND: Final = 0.8
"""Of the seconds without hints."""
REST_S: Final = 4.0
"""From the server's start until it is measured."""


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


async def chat(
    at: tuple[str, int], words: str, num_tokens: int, before: Sequence[Any] = (),
    hits: list[float] | None = None, **more: Any,
) -> float | None:  # fmt: skip
    """Have one turn of a chat; return the seconds to its first token, or None if it failed. Adds
    to `hits` the share of the prompt that was on decode, host memory included."""
    asked = {
        "model": "small", "messages": [*before, {"role": "user", "content": words}],
        "stream": True, "stream_options": {"include_usage": True}, "max_tokens": num_tokens,
        "ignore_eos": True, **more,
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
    if b"data: [DONE]" not in got:
        return None
    if hits is not None:
        on_decode, prompt = (
            int(found[1]) if (found := re.search(rb'"%s":\s*(\d+)' % name, got)) else 0
            for name in (b"decode_hit_tokens", b"prompt_tokens")
        )
        hits.append(on_decode / prompt)
    return first_s


class Burst(NamedTuple):
    waits_s: list[float]  # to the first token of each chat that was answered, sorted
    cpu_ms: float  # of the front and its workers, a chat
    front_mib: float  # resident, after it
    start_s: float  # of the server, to the end of its first answer


async def bursts(tree: Path, num_chats: int, num_tokens: int) -> dict[str, Burst]:
    """Send two bursts to one server of a tree."""
    import psutil

    begin_s = time.monotonic()
    with serving(tree) as (process, url, _status):
        at = _place(url)
        await chat(at, "Rain.", num_tokens)
        start_s = time.monotonic() - begin_s
        front = psutil.Process(process.pid)
        pids = [process.pid, *(child.pid for child in front.children(recursive=True))]
        found = {}
        for name in BURSTS:
            before_s = sum(map(_cpu_s, pids))
            asked = (chat(at, f"{name} {i} Rain.", num_tokens) for i in range(num_chats))
            async with asyncio.timeout(PATIENCE_S):
                waits = await asyncio.gather(*asked)
            cpu_ms = 1e3 * (sum(map(_cpu_s, pids)) - before_s) / num_chats
            front_mib = front.memory_info().rss / 2**20
            waits_s = sorted(wait for wait in waits if wait is not None)
            found[name] = Burst(waits_s, cpu_ms, front_mib, start_s)
    return found


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def chats_at_once(commit: str | None, chats: list[int], tokens: int, rounds: int) -> Iterator[Row]:
    """A row for each number of chats and burst: medians over the rounds, by side."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _FILES), hard))
    with ExitStack() as stack:
        trees = {"ours": ROOT, "again": ROOT}
        if commit is not None:
            from benchmarks.against import tree_of

            trees = {"ours": ROOT, "theirs": stack.enter_context(tree_of(commit)), "again": ROOT}
        found: dict[tuple[int, str, str], list[Burst]] = {}
        sides = [*trees]
        for turn in range(rounds):
            for num in chats:
                # Each side is as often the first.
                for side in turn_about(sides, turn):
                    for burst, one in asyncio.run(bursts(trees[side], num, tokens)).items():
                        found.setdefault((num, burst, side), []).append(one)
    for num in chats:
        for burst in BURSTS:
            row: Row = {"part": "burst", "chats": num, "burst": burst}
            for side in sides:
                each = found[num, burst, side]
                row[side] = {"answered": min(len(one.waits_s) for one in each)} | {
                    f"ttft_p{percent}_s": _median(
                        one.waits_s[int(len(one.waits_s) * percent / 100)]
                        for one in each
                        if one.waits_s
                    )
                    for percent in (50, 99)
                }
                row[side] |= {
                    name: _median(getattr(one, name) for one in each)
                    for name in ("cpu_ms", "front_mib", "start_s")
                }
            yield row


def _median(found: Iterable[float]) -> float | None:
    known = [*found]
    return round(statistics.median(known), 4) if known else None


# --- agents that come back ------------------------------------------------------------------------


async def agents(url: str, num_agents: int, hints: bool) -> tuple[list[float], float]:
    """Play agents with their helpers; return the seconds to the first token of later turns, and the
    mean share of their prompts that was on decode."""
    at, later, hits = _place(url), list[float](), list[float]()
    await chat(at, "Rain.", 2)

    async def turn(name: str, text: str, before: list[Any], said: dict[str, Any]) -> float | None:
        more = {"session_id": name, "kv_hints": said} if hints else {}
        shares = hits if before else None
        found = await chat(at, f"{name}: {text}", 8, before, shares, **more)
        before += [{"role": "user", "content": f"{name}: {text}"},
                   {"role": "assistant", "content": "Yes."}]  # fmt: skip
        return found

    async def agent(number: int) -> None:
        draw, before = Random(number), list[Any]()
        await asyncio.sleep(draw.uniform(0, num_agents / ARRIVALS_PER_S))
        for left in reversed(range(AGENT_TURNS)):
            is_user = draw.random() < 0.25
            pause_s = draw.uniform(40, 70) if is_user else draw.uniform(3, 20)
            said = {"returns_after": 120 if is_user else 30} if left else {"ends": True}
            text = f"turn {left}. " + "Rain. " * (300 if not before else 60)
            first_s = await turn(f"agent {number}", text, before, said)
            if left < AGENT_TURNS - 1 and first_s is not None:
                later.append(first_s)
            for helper in range(draw.choice((0, 1, 2)) if left else 0):
                name = f"helper {number}.{left}.{helper}"
                await turn(name, "Rain. " * 360, [], {"ends": True})
            if left:
                await asyncio.sleep(pause_s)

    await asyncio.gather(*map(agent, range(num_agents)))
    return later, statistics.mean(hits)


def agents_row(num_agents: int, rounds: int) -> Row:
    found: dict[str, list[float]] = {"hints": [], "none": [], "again": []}
    hits: dict[str, list[float]] = {side: [] for side in found}
    for number in range(rounds):
        for side in turn_about([*found], number):
            with serving(ROOT, *AGENT_MEMORY) as (_, url, _status):
                waits, share = asyncio.run(agents(url, num_agents, side == "hints"))
            found[side].append(round(statistics.median(waits), 4))
            hits[side].append(round(share, 4))
    by_none = {
        side: _median(a / b for a, b in zip(found[side], found["none"], strict=True))
        for side in ("hints", "again")
    }
    return {
        "part": "agents", "agents": num_agents, "later_ttft_p50_s": found, "later_hits": hits,
        "by_none": by_none,
        "bound": AGENT_BOUND, "met": (by_none["hints"] or 0.0) <= AGENT_BOUND,
    }  # fmt: skip


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


def idle_rows(seconds: float) -> list[Row]:
    """The shares of a core of a front and its workers that no client asks."""
    with serving(ROOT) as (process, _url, status):
        with urllib.request.urlopen(f"{status}/health", timeout=PATIENCE_S) as answer:
            workers = json.load(answer)["workers"]
        pids = {"front": process.pid} | {name: one["pid"] for name, one in workers.items()}
        time.sleep(REST_S)
        shares = cpu_shares({name: (pid,) for name, pid in pids.items()}, seconds)
    return [
        {"part": "idle", "server": name, "share": round(share, 4), "bound": BOUND,
         "met": share < BOUND}
        for name, share in shares.items()
    ]  # fmt: skip


def serve(
    json_file: JsonFile = None,
    against: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="Bursts beside another commit's.")
    ] = None,
    chats: Annotated[str, typer.Option(help="Chats of each burst; none: no bursts.")] = "1,50,200",
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Servers of each side.")] = 3,
    num_agents: Annotated[
        int, typer.Option("--agents", help="Agents that come back; 0: none.")
    ] = 48,
    seconds: Annotated[
        float, typer.Option(help="Of each measurement of what waiting costs; 0: none.")
    ] = 10.0,
) -> int:
    """Chats that begin all at once, agents that come back, and the processor time of servers that
    only wait."""
    check_outputs(json_file)
    if against is not None:
        from benchmarks.against import commit_of

        against = commit_of(against)
    parts: list[Callable[[], Iterable[Row]]] = []
    if chats:
        numbers = [int(one) for one in chats.split(",")]
        parts.append(lambda: chats_at_once(against, numbers, tokens, rounds))
    if num_agents:
        parts.append(lambda: [agents_row(num_agents, rounds)])
    if seconds:
        parts.append(lambda: idle_rows(seconds))
    rows = told(row for part in parts for row in part())
    write(
        json_file, f"serve --chats {chats}" + (f" --against {against}" if against else ""), rows,
        tokens=tokens, rounds=rounds, seconds=seconds,
        ttft="of those answered, medians over the servers of a side",
    )  # fmt: skip
    return int(not all(row.get("met", True) for row in rows))
