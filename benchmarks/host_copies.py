"""Copies between a pool and host pages on the CPU, beside a memcpy of the same rows.

Pools of bf16 in pages of 16 tokens, 512 MiB of the device's (here the CPU's) and as much host
memory, one rank: a model of 8B (32 layers, 8 KV heads of 128), a rank of its TP4, and MLA (61
layers of 576). A round moves the same 64 MiB of random pages in every way, in both directions; ways
turn about. Times are of the clock, and of the processor (all threads), which other processes
disturb less. `benchmarks/gpu.py` has copies to VRAM.

    rows    numpy's copy of each row (the bytes of a page that lie together in the pool), in a loop
            over arrays that are made before: what is measured against
    rows'   the same again: A against A
    copy    `PageCopy` on this thread, in pieces of 4 MiB
    order   `HostCopies`, one order, to its end, with one thread and with two
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from benchmarks.pair import turn_about
from benchmarks.report import Row
from prefixkv.config import HostConfig
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.page_copy import CpuPageCopy, page_runs
from prefixkv.protocol.events import HostCopy, HostCopyDone
from prefixkv.runtime.host_copies import HostCopies

POOL_BYTES, ROUND_BYTES, PIECE_BYTES, PAGE_SIZE = 512 << 20, 64 << 20, 4 << 20, 16
WAIT_S = 60.0


def _made(
    layers: int, heads: int, dim: int, order: str = "layer_major", attention: str = "mha"
) -> Callable[[int], KVPool]:
    return lambda num_pages: KVPool.create(
        num_pages, PAGE_SIZE, layers, heads, dim, order=order, attention=attention
    )


SHAPES: dict[str, tuple[int, Callable[[int], KVPool]]] = {
    "8B, layer_major": (2 << 20, _made(32, 8, 128)),
    "8B, page_major": (2 << 20, _made(32, 8, 128, "page_major")),
    "8B, TP4, layer_major": (512 << 10, _made(32, 2, 128)),
    "MLA, layer_major": (61 * PAGE_SIZE * 576 * 2, _made(61, 1, 576, attention="mla")),
}
"""By name: bytes per page, and the pool of so many pages."""


class Tier(ExitStack):
    """A pool on any device, as many host pages, and threads that copy between them."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__()
        self.pool, self.num_pages = pool, pool.layout.num_pages
        self.host = HostPool(pool.layout, self.num_pages, pool.device)
        self.callback(self.host.close)
        self.done: SimpleQueue[HostCopyDone] = SimpleQueue()

    def copies(self, threads: int, piece_bytes: int) -> HostCopies:
        config = HostConfig(copy_threads=threads, piece_bytes=piece_bytes)
        pool = self.pool
        copies = HostCopies(pool.layout, self.host, config, self.done.put, pool.device)
        self.callback(copies.close)
        return copies

    def order(
        self, copies: HostCopies, host: Any, device: Any, is_load: bool, after: Any = None
    ) -> float:
        """Copy pages to the end, behind an event of the device; returns how long that took since
        the event."""
        copies.submit(HostCopy(0, is_load, host, device), after)
        while after is not None and not after.query():
            pass
        began_s = time.perf_counter()
        done = self.done.get(timeout=WAIT_S)
        if done.error is not None:
            raise done.error
        assert done.num_bytes == len(host) * self.host.page_bytes
        return time.perf_counter() - began_s


class _Case(Tier):
    """One pool of the CPU, and the ways to copy."""

    def __init__(self, page_bytes: int, make: Callable[[int], KVPool], pool_bytes: int) -> None:
        super().__init__(make(pool_bytes // page_bytes))
        layout = self.pool.layout
        assert layout.page_bytes == page_bytes
        for _, memory in self.host.stretches(np.arange(self.num_pages, dtype=np.int32)):
            memory.zero_()  # touches it
        self.copy = CpuPageCopy(layout, self.host)
        self.by_threads = {threads: self.copies(threads, PIECE_BYTES) for threads in (1, 2)}

    def rows(self, host: np.ndarray, device: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each row of these pages, as (host, device) arrays."""
        starts, strides, of_a_page = page_runs(self.pool.layout)
        places = starts + device.astype(np.int64)[:, None] * strides
        rows = self.host.addresses(host)[:, None] + np.cumsum(of_a_page) - of_a_page
        lengths = np.broadcast_to(of_a_page, places.shape)
        return [
            (_array(row, num_bytes), _array(place, num_bytes))
            for row, place, num_bytes in zip(
                rows.ravel().tolist(), places.ravel().tolist(), lengths.ravel().tolist(),
                strict=True
            )
        ]  # fmt: skip

    def by_pieces(self, host: np.ndarray, device: np.ndarray, is_load: bool) -> None:
        act = self.copy.load if is_load else self.copy.write
        step = max(1, PIECE_BYTES // self.host.page_bytes)
        for first in range(0, len(host), step):
            act(host[first : first + step], device[first : first + step])


def _array(address: int, num_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _by_rows(rows: list[tuple[np.ndarray, np.ndarray]], is_load: bool) -> None:
    if is_load:
        for host, device in rows:
            device[:] = host
    else:
        for host, device in rows:
            host[:] = device


def _measure(shape: str, rounds: int, seed: int, pool_bytes: int) -> list[dict[str, Any]]:
    case = _Case(*SHAPES[shape], pool_bytes)
    random = np.random.default_rng(seed)
    count = min(ROUND_BYTES, pool_bytes // 4) // case.host.page_bytes
    total = count * case.host.page_bytes
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}  # by direction and way
    for number in range(rounds + 1):
        host, device = (
            random.permutation(case.num_pages)[:count].astype(np.int32) for _ in range(2)
        )
        rows = case.rows(host, device)
        for what, is_load in (("load", True), ("write", False)):
            ways: dict[str, Callable[[], object]] = {
                "rows": partial(_by_rows, rows, is_load),
                "copy": partial(case.by_pieces, host, device, is_load),
                "order_1": partial(case.order, case.by_threads[1], host, device, is_load),
                "rows_again": partial(_by_rows, rows, is_load),
                "order_2": partial(case.order, case.by_threads[2], host, device, is_load),
            }
            # Each way has every place in a round equally often: what ran before leaves the caches.
            took = {name: _timed_s(ways[name]) for name in turn_about([*ways], number)}
            if number:  # the first touches the memory
                for name, both_s in took.items():
                    times.setdefault((what, name), []).append(both_s)
    clocks = {key: np.array(rounds_s).T for key, rounds_s in times.items()}  # wall, processor
    lengths = page_runs(case.pool.layout)[2]
    case.close()
    return [
        {
            "part": "copies",
            "shape": shape,
            "what": what,
            "rows_per_page": len(lengths),
            "row_bytes": round(float(lengths.mean())),
            "mib": round(total / 2**20, 1),
            **{
                f"{name}_gb_s": round(total / float(np.median(wall_s)) / 1e9, 2)
                for (of, name), (wall_s, _) in clocks.items() if of == what
            },
            # Of each round: speed by the speed of the loop over rows.
            **{
                f"{name}_by_rows{more}": _quartiles(
                    clocks[what, "rows"][at] / clocks[what, name][at]
                )
                for at, more in enumerate(("", "_cpu"))
                for name in ("rows_again", "copy", "order_1", "order_2")
            }
        }
        for what in ("load", "write")
    ]  # fmt: skip


def _quartiles(ratios: Any) -> list[float]:
    """The median, and the quartiles around it."""
    return [round(float(np.percentile(ratios, at)), 2) for at in (50, 25, 75)]


def _timed_s(act: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(rounds: int, seed: int, pool_bytes: int = POOL_BYTES) -> Iterator[Row]:
    """A row for each shape and direction, over rounds of which the median counts."""
    for shape in SHAPES:
        yield from _measure(shape, rounds, seed, pool_bytes)
