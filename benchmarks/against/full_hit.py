"""A full hit over NIXL, by one driver for all commits: it knows no more than nodes and a pair.

Both sides wait at their nodes. A prompt that both have is added on both; prefill sends what it is
asked for at once, that is its answer alone. Each process has a core, so all of its threads' work
counts. A commit with a driver of its own and without this one has another name for what it measures
so: that is not compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import numpy as np

HITS, TOKENS, GAP_S, PATIENCE_S = 50, 2048, 0.01, 60.0


def _node_of(side: str, kind: str) -> Any:
    from prefixkv.memory.kv_pool import KVPool

    pool = KVPool.create(1024, 16, num_layers=8, num_kv_heads=2, head_dim=64)
    return getattr(import_module(f"prefixkv.runtime.{side}_node"), kind)(pool)


def _request(room: int, **more: Any) -> Any:
    from prefixkv.request import Request

    return Request(f"r{room}", _PROMPT, room=room, **more)


_PROMPT = np.random.default_rng(1).integers(0, 50_000, TOKENS, dtype=np.int32)


def prefill_side(pipe: Connection, _watch: Any, _hits: int) -> None:
    with _node_of("prefill", "PrefillNode") as node:
        pipe.send(node.endpoint)
        while True:
            for ready in wait([pipe, node.fileno()], 1.0):
                if ready is pipe:
                    if (room := pipe.recv()) is None:
                        return
                    node.add(_request(room, decode="decode-0"))
            for req in node.pop_bootstrapped():
                node.send_chunk(req, req.num_tokens, last=True, aux=b"token")
            node.pop_sent()
            assert not node.pop_failed()


def decode_side(pipe: Connection, _watch: Any, hits: int) -> float:
    """Return the median from `add` to the commit, in seconds."""
    took_s = []
    with _node_of("decode", "DecodeNode") as node:
        endpoint = pipe.recv()
        for room in range(hits + 1):  # the first connects, and fills both caches
            time.sleep(GAP_S)
            began_s = time.perf_counter()
            pipe.send(room)
            node.add(_request(room, max_new_tokens=1, prefill=endpoint))
            node.pop_preallocated()
            while not (arrived := node.pop_transferred()):
                assert time.perf_counter() < began_s + PATIENCE_S, node.stats()
                assert not node.pop_failed()
                node.wait(1.0)
                node.pop_preallocated()
            took_s.append(time.perf_counter() - began_s)
            assert room == 0 or arrived[0].prefix_len == TOKENS
            node.append_many(arrived, [7])
            node.finish(arrived[0])
        pipe.send(None)
    return median(took_s[1:])


def measure(run_pair: Callable[..., float], quick: bool) -> dict[str, list[float]]:
    """`run_pair`: of the commit's own benchmarks."""
    return {
        "full hit of nodes": [run_pair(decode_side, prefill_side, HITS // 10 if quick else HITS)]
    }
