"""What a full hit costs on an idle pair of nodes over NIXL.

Every prompt is cached on both sides, so no KV is sent; from decode's `add`, with prefill told over
a pipe, to `pop_transferred`, with pauses of 10 ms. `python -m benchmarks transfer --part full_hit`
runs it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import numpy as np

from benchmarks.pair import Stuck, Watch, load_of, quantiles, run_pair
from benchmarks.report import Row

_PAGE_SIZE: Final = 16


@dataclass(frozen=True)
class Hits:
    requests: int = 25
    repeats: int = 12
    tokens: int = 2048
    gap_s: float = 0.01
    patience_s: float = 30.0

    def pool(self) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        return KVPool.create(1024, _PAGE_SIZE, num_layers=8, num_kv_heads=2, head_dim=64)

    def prompt(self) -> Any:
        return np.random.default_rng(1).integers(0, 50_000, self.tokens, dtype=np.int32)


SMALL: Final = Hits(requests=5, repeats=1, patience_s=0.0)


def measured(case: Hits) -> Row:
    row: Row = run_pair(decode_side, prefill_side, case)
    return row


def prefill_side(pipe: Connection, _watch: Watch, case: Hits) -> None:
    """Sends at once whatever it is asked for."""
    from prefixkv import PrefillNode
    from prefixkv.request import Request

    prompt = case.prompt()
    with PrefillNode(case.pool()) as node:
        pipe.send(node.endpoint)
        while True:
            for ready in wait([pipe, node.fileno()], 1.0):
                if ready is not pipe:
                    continue
                if (room := pipe.recv()) is None:
                    return
                node.add(Request(f"r{room}", prompt, room=room, decode="decode-0"))
            for req in node.pop_bootstrapped():
                node.send_chunk(req, req.num_tokens, last=True, aux=b"token")
            node.pop_sent()
            assert not node.pop_failed()


def decode_side(pipe: Connection, watch: Watch, case: Hits) -> Row:
    from prefixkv import DecodeNode
    from prefixkv.request import Request

    prompt = case.prompt()
    took_s: list[float] = []
    with DecodeNode(case.pool()) as node:
        stuck = Stuck(node)
        endpoint = pipe.recv()

        def hit(room: int) -> float:
            time.sleep(case.gap_s)
            began_s = time.perf_counter()
            pipe.send(room)
            node.add(Request(f"r{room}", prompt, max_new_tokens=1, room=room, prefill=endpoint))
            node.pop_preallocated()
            arrived = stuck.until(node.pop_transferred)
            ended_s = time.perf_counter()
            assert room == 0 or arrived[0].prefix_len == case.tokens
            node.append_many(arrived, [7])
            node.finish(arrived[0])
            return ended_s - began_s

        def repetition(number: int) -> Row:
            took_s.extend(hit(len(took_s)) for _ in range(case.requests))
            return {"number": number}

        took_s.append(hit(0))  # connects, and fills both caches
        rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
        pipe.send(None)
    first_s = took_s.pop(0)
    kept = [took_s[row["number"] * case.requests :][: case.requests] for row in rows]
    return {
        "part": "full hit",
        "ms": quantiles(np.concatenate(kept).tolist(), 1e-3),
        "first_request_ms": round(first_s * 1e3, 1),
        **load_of(rows),
    }
