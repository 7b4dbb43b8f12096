"""prefixkv's tree beside SGLang's own, as its scheduler calls them.

Run by an interpreter that has SGLang's wheel: `python -m benchmarks env sglang-trees`. Both sides
run in one process, turn about, ours twice, on SGLang's own pools and allocator and through its own
functions (`match_kv_cache`, `release_kv_cache`), the collector off. SGLang's side is
`UnifiedRadixCache` with its compiled core, as its server has it. Figures are medians, microseconds
of the thread's CPU time: nothing here waits, and what others do on the machine is left out but for
its traces in the caches.
"""

from __future__ import annotations

import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks.pair import turn_about
from benchmarks.radix import of_sglang
from benchmarks.report import JsonFile, Row, check_outputs, told, write
from benchmarks.samples import no_collector

SIDES: Final = ("prefixkv", "unified-rust", "again")
"""The third is prefixkv's once more: by how much it differs from the first, the machine does."""
PAGE_SIZE: Final = 16
SIZES: Final = (8_192, 32_768)
OUTPUTS: Final = 24
TURN: Final = 512
IN_A_ROW: Final = 3
SETTLING_BYTES: Final = 1 << 16
GOALS: Final = {"match and indices": 1.0, "checkpoint and release": 0.5}


class Side:
    """One tree with its pools, half full of conversations that begin alike."""

    def __init__(self, desk_module: Any, kind: str, num_tokens: int) -> None:
        self._request = desk_module.Request
        self._checkpoint = desk_module.checkpoint_kv_cache
        pool_tokens = 400_000 + 16 * num_tokens
        self.desk = desk_module.Desk(
            "prefixkv" if kind == "again" else kind, PAGE_SIZE,
            pool_tokens // PAGE_SIZE * PAGE_SIZE, keep_kv=False,
            context_len=num_tokens + 64, policy="adaptive",
        )  # fmt: skip
        rng = np.random.default_rng(1)
        system = rng.integers(0, 150_000, 1024)
        for number in range(150):
            turn = rng.integers(0, 150_000, 1024)
            self.serve(f"old-{number}", np.concatenate([system, turn]))

    def request(self, rid: str, tokens: Any) -> Any:
        return self._request(rid, array("q", tokens.tolist()))

    def serve(self, rid: str, tokens: Any) -> None:
        req = self.request(rid, tokens)
        assert self.desk.admit(req)
        self.desk.checkpoint(req)
        self.desk.finish(req)

    def look(self, rid: str, cached: Any) -> dict[str, float]:
        """Microseconds of the calls for a waiting request; all of its prompt is in the tree."""
        desk, took = self.desk, {}
        req = self.request(rid, cached)
        req.refresh_fill_ids()
        for name in ("match", "match again"):
            took[name] = _us(lambda: desk.match(req))
            assert req.prefix_len == len(cached) - PAGE_SIZE
        took["indices"] = _us(lambda: desk.cache.prefix_device_indices(req))
        took["match and indices"] = took["match"] + took["indices"]
        took["lock"] = _us(lambda: setattr(req, "lock", desk.cache.lock(req.last_node)))
        took["unlock"] = _us(lambda: desk.cache.unlock(req.lock))
        return took

    def serve_timed(self, rid: str, prompt: Any) -> dict[str, float]:
        """Microseconds of what hands a request's KV to the tree: when all of it is there, and at
        its end."""
        desk, took = self.desk, {}
        req = self.request(rid, prompt)
        assert desk.admit(req)
        took["checkpoint"] = _us(lambda: self._checkpoint(req, desk.cache))
        for token in range(OUTPUTS):
            assert desk.decode(req, token)
        took["release"] = _us(lambda: desk.finish(req))
        took["checkpoint and release"] = took["checkpoint"] + took["release"]
        return took


def _us(call: Callable[[], Any]) -> float:
    bytearray(SETTLING_BYTES)  # malloc sorts what was freed before, and not on this call's time
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e3


def measure(desk_module: Any, num_tokens: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(num_tokens)
    sides = {kind: Side(desk_module, kind, num_tokens) for kind in SIDES}
    cached = rng.integers(0, 150_000, num_tokens)
    took: dict[str, dict[tuple[str, str], list[float]]] = {kind: {} for kind in SIDES}
    for side in sides.values():
        side.serve("cached", cached)
    with no_collector():
        for number in range(rounds):
            prompts = rng.integers(0, 150_000, (2 * IN_A_ROW, num_tokens))
            prompts[IN_A_ROW:, :-TURN] = cached[:-TURN]
            for kind in turn_about(SIDES, number):
                for what, calls in _round(sides[kind], number, cached, prompts):
                    for name, us in calls.items():
                        took[kind].setdefault((what, name), []).append(us)
    rows = []
    for (what, name), values in took[SIDES[0]].items():
        us, theirs = median(values), median(took[SIDES[1]][what, name])
        row: Row = {
            "what": what, "name": name, "tokens": num_tokens, "us": round(us, 1),
            "peer_us": round(theirs, 1), "ratio_to_peer": round(us / theirs, 3),
            "least_us": round(min(values), 1),
            "peer_least_us": round(min(took[SIDES[1]][what, name]), 1),
            "again": round(median(took[SIDES[2]][what, name]) / us, 3),
        }  # fmt: skip
        if (goal := GOALS.get(name)) is not None:
            row |= {"goal": goal, "met": us <= goal * theirs}
        rows.append(row)
    return rows


def _round(
    side: Side, number: int, cached: Any, prompts: Any
) -> Iterator[tuple[str, dict[str, float]]]:
    """All that is measured of one side in a round, each several times in a row."""
    for at in range(IN_A_ROW):
        yield "a waiting request", side.look(f"look-{number}-{at}", cached)
    for at, prompt in enumerate(prompts):
        what = "a new prompt" if at < IN_A_ROW else "the next turn"
        yield what, side.serve_timed(f"{number}-{at}", prompt)
    for _ in range(IN_A_ROW):
        yield "eviction", {"evict 256 tokens": _us(lambda: side.desk.evict(256))}
    side.desk.evict(IN_A_ROW * len(cached))  # the next round finds the pool as this one did
    side.serve(f"again-{number}", cached)


def sglang(
    rounds: Annotated[int, typer.Option(min=3, help="Of each size, both sides in each.")] = 60,
    serve: Annotated[
        Path | None, typer.Option(help="Run servers instead; a folder for model and logs.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of each server, with --serve.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=0, help="Decode's, if not as many.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """What SGLang's scheduler pays for prefixkv's tree, beside its own; or servers with each."""
    check_outputs(json_file)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are ended
    if serve is not None:
        from benchmarks import sglang_serve

        rows = told([sglang_serve.serve(serve, (tp, decode_tp or tp))])
        write(json_file, f"sglang --serve FOLDER --tp {tp} --decode-tp {decode_tp or tp}", rows)
        return
    import torch

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    [desk] = of_sglang("tests.integration.sglang.inside.desk")
    rows = told(row for num_tokens in SIZES for row in measure(desk, num_tokens, rounds))
    write(
        json_file, f"sglang --rounds {rounds}", rows, page_size=PAGE_SIZE, statistic="median",
        in_a_row=IN_A_ROW, clock="CPU time of the thread", policy="adaptive, against LRU",
        peer="SGLang 0.5.23, UnifiedRadixCache, compiled core",
    )  # fmt: skip
