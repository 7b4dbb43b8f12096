"""Part of `benchmarks/gpu.py`: conversations of several turns between two processes.

Turn about, one request at a time: a prompt is what was said before and `more` new tokens, its
answer is `answer` tokens. Computing is the stand-in's: writing the KV pattern, which is not in the
times. A transfer is from `send_chunk` to `pop_transferred`. Every byte of every page that a request
holds is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.pair import Row, Stuck, Watch
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import InternalError
from prefixkv.testing.hashing import PrefixHasher

if TYPE_CHECKING:
    from prefixkv.prefill.request import PrefillRequest
    from prefixkv.runtime.prefill_node import PrefillNode

SALT = 5


@dataclass(frozen=True)
class Turns:
    device: str
    cache: bool = True
    layout: str = "page_major"
    sessions: int = 4
    turns: int = 5
    first: int = 1024
    more: int = 256
    answer: int = 16
    num_pages: int = 1024
    page_size: int = 16
    num_layers: int = 32

    def pool(self) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        return KVPool.create(
            self.num_pages, self.page_size, self.num_layers, 8, 128,
            order=self.layout, device=self.device,
        )  # fmt: skip


def small(device: str) -> Turns:
    """As small as it still works."""
    return Turns(device, sessions=2, turns=2, first=64, more=32, num_pages=64, num_layers=2)


def serve(
    pipe: Connection, node: PrefillNode, send: Callable[[PrefillRequest], None],
    sent: Callable[[PrefillRequest], None],
) -> None:  # fmt: skip
    """A prefill worker that computes nothing: requests come through the pipe, None ends it."""
    from prefixkv.request import Request

    while True:
        while pipe.poll():
            if (asked := pipe.recv()) is None:
                return
            rid, tokens, room = asked
            node.add(Request(rid, tokens, room=room, decode="decode-0"))
        for req in node.pop_bootstrapped():
            send(req)
        for req in node.pop_sent():
            sent(req)
        for req in node.pop_failed():
            raise InternalError(f"{req.rid} failed") from req.error
        wait([pipe, node.fileno()], 1.0)


def prefill_side(pipe: Connection, _watch: Watch, case: Turns) -> None:
    from prefixkv.runtime.prefill_node import PrefillNode
    from prefixkv.testing.pattern import pattern_in

    pool = case.pool()
    pattern, hasher = pattern_in(pool, SALT), PrefixHasher()
    began: dict[str, float] = {}
    bytes_before = 0

    with PrefillNode(pool, PrefillConfig()) as node:

        def send(req: PrefillRequest) -> None:
            pattern.fill(req.pages, req.prefix_len, hasher.prefixes(req.tokens))
            began[req.rid] = time.monotonic()
            node.send_chunk(req, req.num_tokens, last=True)

        def sent(req: PrefillRequest) -> None:
            nonlocal bytes_before
            pipe.send((began.pop(req.rid), node.bytes_sent - bytes_before))
            bytes_before = node.bytes_sent

        pipe.send(node.endpoint)
        serve(pipe, node, send, sent)


def decode_side(pipe: Connection, _watch: Watch, case: Turns) -> Row:
    from prefixkv.request import Request
    from prefixkv.runtime.decode_node import DecodeNode
    from prefixkv.testing.pattern import pattern_in

    pool = case.pool()
    pattern, hasher = pattern_in(pool, SALT), PrefixHasher()
    random = np.random.default_rng(1)
    said = [np.zeros(0, np.int32)] * case.sessions
    turns: list[list[Row]] = [[] for _ in range(case.turns)]
    wrong = verified = room = 0
    with DecodeNode(pool, DecodeConfig(cache=case.cache)) as node:
        stuck, endpoint = Stuck(node), pipe.recv()

        def run(tokens: Any, answer: int) -> tuple[Row, Any]:
            nonlocal wrong, verified, room
            room += 1
            rid = f"r{room}"
            request = Request(rid, tokens, max_new_tokens=answer, room=room, prefill=endpoint)
            pipe.send((rid, tokens, room))
            node.add(request)
            node.pop_preallocated()
            (req,) = stuck.until(node.pop_transferred)
            arrived_s = time.monotonic()
            began_s, num_bytes = pipe.recv()
            wrong += pattern.mismatches(req.pages, hasher.prefixes(tokens))
            verified += -(-len(tokens) // case.page_size)
            for _ in range(answer):
                node.append_many([req], [int(random.integers(50_000))])
            everything = np.asarray(req.tokens, np.int32)
            pattern.fill(req.pages, len(tokens), hasher.prefixes(everything[:-1]))
            row = {
                "ms": 1e3 * (arrived_s - began_s), "mib": num_bytes / 2**20,
                "hit_tokens": req.prefix_len, "prompt_tokens": len(tokens),
            }  # fmt: skip
            node.finish(req)
            return row, everything

        run(random.integers(50_000, 60_000, 100, dtype=np.int32), 1)  # wires the two up
        for number in range(case.turns):
            for session in range(case.sessions):
                new = random.integers(0, 50_000, case.more if number else case.first, np.int32)
                row, said[session] = run(np.concatenate([said[session], new]), case.answer)
                turns[number].append(row)
        pipe.send(None)
    return {
        "cache": case.cache,
        "layout": case.layout,
        "turns": [
            {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
            for rows in turns
        ],
        "mib_in_all": round(sum(row["mib"] for rows in turns for row in rows), 1),
        "pages_verified": verified,
        "pages_wrong": wrong,
    }
