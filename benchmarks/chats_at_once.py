"""`prefixkv serve` while very many chats begin at once: how long each waits for its first token.

Each burst goes to a server of the small model that has answered one chat. There are two in a row:
the second meets what the first has left behind, such as idle connections. Three sides run turn
about, each with a server of its own: this tree, another commit's, and this tree once more.

    python -m benchmarks chats_at_once --against COMMIT > benchmarks/results/chats_at_once.json
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from benchmarks.against import ROOT, SIDES, commit_of, tree_of
from prefixkv.cli.figures import machine

BURSTS: Final = ("first", "second")
PATIENCE_S: Final = 300.0  # of one burst
_FILES: Final = 20_000


@dataclass(frozen=True)
class Burst:
    """One burst on one side."""

    side: str
    chats: int
    burst: str
    answered: int
    ttft_p50_s: float | None  # of those answered
    ttft_p99_s: float | None
    wall_s: float


@contextmanager
def serving(tree: Path) -> Iterator[tuple[str, int]]:
    """Run `prefixkv serve` of a tree until the end of the `with` block. Gives host and port."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PREFIXKV")}
    with subprocess.Popen(
        [sys.executable, "-m", "prefixkv.cli.main", "serve", "--port", "0", "--status-port", "0",
         "--threads", "1"],
        cwd=tree, env=environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()  # once all serve
            if not words:
                raise SystemExit(f"prefixkv serve of {tree} has not started")
            url = urlsplit(words[1])
            assert url.hostname is not None
            assert url.port is not None
            yield url.hostname, url.port
        finally:
            process.terminate()


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


async def measure(at: tuple[str, int], side: str, num_chats: int, num_tokens: int) -> list[Burst]:
    """Send two bursts to one server of a side."""
    await chat(at, "Rain.", num_tokens)
    found = []
    for name in BURSTS:
        begin_s = time.monotonic()
        asked = (chat(at, f"{name} {i} Rain.", num_tokens) for i in range(num_chats))
        async with asyncio.timeout(PATIENCE_S):
            waits = await asyncio.gather(*asked)
        wall_s = time.monotonic() - begin_s
        answered = sorted(wait for wait in waits if wait is not None)
        p50, p99 = (
            answered[int(len(answered) * part)] if answered else None for part in (0.5, 0.99)
        )
        found.append(Burst(side, num_chats, name, len(answered), p50, p99, wall_s))
    return found


def median(found: Iterable[float | None]) -> float | None:
    """Return the median of the rounds that have a figure."""
    known = [one for one in found if one is not None]
    return statistics.median(known) if known else None


def summary(bursts: list[Burst]) -> list[dict[str, Any]]:
    """Return a row per number of chats and burst: medians over the rounds."""
    rows = []
    for num in sorted({burst.chats for burst in bursts}):
        for name in BURSTS:
            row: dict[str, Any] = {"chats": num, "burst": name}
            for side in SIDES:
                here = [
                    one for one in bursts if (one.chats, one.burst, one.side) == (num, name, side)
                ]
                row[side] = {"answered": min(one.answered for one in here)} | {
                    key: median(getattr(one, key) for one in here)
                    for key in ("ttft_p50_s", "ttft_p99_s", "wall_s")
                }
            rows.append(row)
    return rows


def chats_at_once(
    against: Annotated[str, typer.Option(help="the other commit")],
    chats: Annotated[str, typer.Option(help="chats of each burst")] = "1,50,200,800",
    tokens: Annotated[int, typer.Option(help="tokens of each answer")] = 8,
    rounds: Annotated[int, typer.Option(help="servers of each side")] = 3,
) -> None:
    """Chats that begin all at once: time to the first token, beside another commit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _FILES), hard))
    commit = commit_of(against)
    bursts: list[Burst] = []
    with tree_of(commit) as theirs:
        trees = {"ours": ROOT, "theirs": theirs, "again": ROOT}
        for turn in range(rounds):
            for num in map(int, chats.split(",")):
                # Each side is as often the first.
                for side in SIDES[turn % 3 :] + SIDES[: turn % 3]:
                    with serving(trees[side]) as at:
                        bursts += asyncio.run(measure(at, side, num, tokens))
                    print(*bursts[-2:], sep="\n", file=sys.stderr)
    told = {
        "machine": machine(), "against": commit, "tokens": tokens, "rounds": rounds,
        "rows": summary(bursts), "bursts": [asdict(burst) for burst in bursts],
    }  # fmt: skip
    print(json.dumps(told, indent=1))
