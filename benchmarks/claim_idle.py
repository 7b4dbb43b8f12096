"""Claims: a full hit costs under a millisecond on an idle pair, and nodes without work cost next to
nothing.

A prefill and a decode node over NIXL. Every prompt is cached on both sides, so no KV is sent; from
decode's `add`, with prefill told over a pipe, to `pop_transferred`, with pauses of 10 ms. Then the
same with both scheduler threads busy in Python, 0.2 ms between two looks at their nodes, at several
switch intervals: node threads have to wait for the interpreter. Last, both nodes are left connected
and alone: the processor time of all their threads.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import numpy as np

from benchmarks.pair import Claim, Row, Stuck, Watch, load_of, quantiles, run_pair

_PAGE_SIZE: Final = 16
_WORK_S: Final = 0.2e-3


@dataclass(frozen=True)
class Hits:
    """`switch_interval_s` of 0: the scheduler threads wait at their nodes, at Python's own
    interval."""

    switch_interval_s: float = 0.0
    requests: int = 25
    repeats: int = 12
    tokens: int = 2048
    gap_s: float = 0.01
    idle_s: float = 1.0
    patience_s: float = 30.0

    @property
    def busy(self) -> bool:
        return self.switch_interval_s > 0

    def begin(self) -> None:
        if self.busy:
            sys.setswitchinterval(self.switch_interval_s)

    def pool(self) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        return KVPool.create(1024, _PAGE_SIZE, num_layers=8, num_kv_heads=2, head_dim=64)

    def prompt(self) -> Any:
        return np.random.default_rng(1).integers(0, 50_000, self.tokens, dtype=np.int32)


def _compute() -> None:
    """A scheduler's Python."""
    end_s = time.perf_counter() + _WORK_S
    while time.perf_counter() < end_s:
        pass


def _idle_share(seconds: float) -> float:
    """Processor time of this process, all threads, as a share of one core, over so many seconds of
    doing nothing."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu_s) / (time.perf_counter() - began_s)


def prefill_side(pipe: Connection, _watch: Watch, case: Hits) -> None:
    """Sends at once whatever it is asked for. A float asks for the processor time of so many idle
    seconds."""
    from prefixkv.request import Request
    from prefixkv.runtime.prefill_node import PrefillNode

    case.begin()
    prompt = case.prompt()
    with PrefillNode(case.pool()) as node:
        pipe.send(node.endpoint)
        while True:
            if case.busy:
                _compute()
            for ready in wait([pipe, node.fileno()], 0.0 if case.busy else 1.0):
                if ready is not pipe:
                    continue
                message = pipe.recv()
                if message is None:
                    return
                if isinstance(message, float):
                    pipe.send(_idle_share(message))
                else:
                    node.add(Request(f"r{message}", prompt, room=message, decode="decode-0"))
            for req in node.pop_bootstrapped():
                node.send_chunk(req, req.num_tokens, last=True, aux=b"token")
            node.pop_sent()
            assert not node.pop_failed()


def decode_side(pipe: Connection, watch: Watch, case: Hits) -> Row:
    from prefixkv.request import Request
    from prefixkv.runtime.decode_node import DecodeNode

    case.begin()
    prompt = case.prompt()
    took_s: list[float] = []
    with DecodeNode(case.pool()) as node:
        stuck = Stuck(node)
        endpoint = pipe.recv()

        def pause() -> None:
            end_s = time.perf_counter() + case.gap_s
            if not case.busy:
                time.sleep(case.gap_s)
            while time.perf_counter() < end_s:
                _compute()
                node.pop_preallocated()

        def hit(room: int) -> float:
            pause()
            began_s = time.perf_counter()
            pipe.send(room)
            node.add(Request(f"r{room}", prompt, max_new_tokens=1, room=room, prefill=endpoint))
            node.pop_preallocated()
            stuck.moved()
            while not (arrived := node.pop_transferred()):
                if case.busy:
                    _compute()
                    node.pop_preallocated()
                else:
                    stuck.wait()
            ended_s = time.perf_counter()
            assert room == 0 or arrived[0].prefix_len == case.tokens
            node.append_many(arrived, [7])
            node.finish(arrived[0])
            return ended_s - began_s

        def repetition(number: int) -> Row:
            took_s.extend(hit(len(took_s)) for _ in range(case.requests))
            return {"number": number, "p50": float(np.median(took_s[-case.requests :]))}

        def idle(_number: int) -> Row:
            pipe.send(case.idle_s)
            return {"decode": _idle_share(case.idle_s), "prefill": float(pipe.recv())}

        took_s.append(hit(0))  # connects, and fills both caches
        rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
        shares = [] if case.busy else watch.least_disturbed(idle, case.repeats, case.patience_s)
        pipe.send(None)
    first = took_s.pop(0)
    kept = [took_s[row["number"] * case.requests :][: case.requests] for row in rows]
    found: Row = {
        "scheduler_threads": f"busy in Python, switch interval {case.switch_interval_s * 1e3:g} ms"
        if case.busy
        else "waiting at their nodes",
        "p50_ms": round(float(np.median([row["p50"] for row in rows])) * 1e3, 3),
        "ttft_full_hit_ms": quantiles(np.concatenate(kept).tolist(), 1e-3),
        "first_request_ms": round(first * 1e3, 1),
        **load_of(rows),
    }
    if shares:
        medians = {
            side: round(float(np.median([row[side] for row in shares])), 5)
            for side in ("decode", "prefill")
        }
        found["idle_share_of_a_core"] = {**medians, **load_of(shares)}
    return found


def measure_hits(quick: bool) -> tuple[list[Claim], Row]:
    case = Hits(requests=5, repeats=1, idle_s=0.05, patience_s=0.0) if quick else Hits()
    rows = [
        run_pair(decode_side, prefill_side, replace(case, switch_interval_s=interval_s))
        for interval_s in ((0.0, 0.5e-3) if quick else (0.0, 5e-3, 0.5e-3, 0.1e-3))
    ]
    claims = [
        Claim(
            "full hit", f"P50, scheduler threads {row['scheduler_threads']}", row["p50_ms"], "ms",
            None if number else 1.0, at_least=False,
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip
    return claims, {"hits": rows}


def measure_idle(quick: bool) -> tuple[list[Claim], Row]:
    case = Hits(requests=2, repeats=1, idle_s=0.05, patience_s=0.0) if quick else Hits(requests=2)
    shares = run_pair(decode_side, prefill_side, case)["idle_share_of_a_core"]
    claims = [
        Claim(
            "idle", f"an idle {side} node, of a core", shares[side], "share", 0.03, at_least=False
        )
        for side in ("decode", "prefill")
    ]
    return claims, shares
