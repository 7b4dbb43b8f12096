"""Part of `benchmarks/gpu.py`: the host tier's copies between a pool in VRAM and host pages.

The shapes of `benchmarks/host_copies.py`; 64 MiB of random pages at a time, in pieces of
`PIECES_MIB`, to the end of the order as `HostCopies` reports it, by one thread and by two; beside
it a plain copy of as many bytes between one pinned buffer and one of the card, which is as fast as
the bus. The ways turn about, and what was loaded is compared with what was written. "pinned": what
the host pages' memory took to be there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch

from benchmarks.host_copies import PAGE_SIZE, WAIT_S
from benchmarks.pair import Row
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_pool import KVPool
from prefixkv.protocol.host_copy import HostCopy, HostCopyDone
from prefixkv.runtime.host_copies import HostCopies

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
ROUND_MIB: Final = 64
POOL_MIB: Final = 1024
PIECES_MIB: Final = (4, 16)
THREADS: Final = (1, 2)
ROUNDS: Final = 15
ORDERS: Final = ("layer_major", "page_major")


def measures(device: str, quick: bool) -> list[Callable[[], Row]]:
    """A row for each layout."""
    return [partial(_measured, device, order, quick) for order in ORDERS]


def _measured(device: str, order: str, quick: bool) -> Row:
    layers, pool_mib, round_mib, rounds = (2, 8, 2, 2) if quick else (
        LAYERS, POOL_MIB, ROUND_MIB, ROUNDS
    )  # fmt: skip
    page_bytes = layers * HEADS * HEAD_DIM * PAGE_SIZE * 4
    num_pages, count = (mib * 2**20 // page_bytes for mib in (pool_mib, round_mib))
    pool = KVPool.create(num_pages, PAGE_SIZE, layers, HEADS, HEAD_DIM, order=order, device=device)
    for layer in range(layers):
        pool.k(layer).normal_()
        pool.v(layer).normal_()
    began_s = time.perf_counter()
    host = HostPool(pool.layout, num_pages, pool.device)
    host.wait_until_ready()
    pinned_s = time.perf_counter() - began_s
    done: SimpleQueue[HostCopyDone] = SimpleQueue()
    copies = {
        f"{threads} threads, {mib} MiB": HostCopies(
            pool.layout, host, threads, done.put, pool.device, mib << 20
        )
        for threads in THREADS for mib in PIECES_MIB
    }  # fmt: skip
    plain = _Plain(count * page_bytes, device)
    times: dict[tuple[str, str], list[float]] = {}
    random = np.random.default_rng(1)
    try:
        for number in range(rounds + 1):
            names = [*copies, "plain"]
            names = names[number % len(names) :] + names[: number % len(names)]
            for name in names:
                rows, kept, other = (
                    random.permutation(num_pages)[:count].astype(np.int32) for _ in range(3)
                )
                for what, pages in (("write", kept), ("load", other)):
                    began_s = time.perf_counter()
                    if name == "plain":
                        plain.copy(what == "load")
                    else:
                        copies[name].submit(HostCopy(0, what == "load", rows, pages))
                        ended = done.get(timeout=WAIT_S)
                        if ended.error is not None:
                            raise ended.error
                    if number:  # the first compiles the kernels
                        times.setdefault((what, name), []).append(time.perf_counter() - began_s)
                if name != "plain" and not number:
                    _check(pool, kept, other)
    finally:
        for one in copies.values():
            one.close()
        host.close()
    total = count * page_bytes
    ways = {
        f"{what}, {name}": {
            "gb_s": round(total / statistics.median(took) / 1e9, 2),
            "by_plain": round(
                statistics.median(
                    b / a for a, b in zip(took, times[what, "plain"], strict=True)
                ), 2,
            ),
        }
        for (what, name), took in times.items()
    }  # fmt: skip
    return {
        "layout": order, "mib": total / 2**20, "pages": count, "rounds": rounds,
        "host_mib": num_pages * page_bytes / 2**20, "pinned_s": round(pinned_s, 3), "ways": ways,
    }  # fmt: skip


class _Plain:
    """One buffer of the host's, pinned where that is possible, and one of the device's."""

    def __init__(self, num_bytes: int, device: str) -> None:
        is_cuda = device != "cpu"
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._device = device

    def copy(self, is_load: bool) -> None:
        target, source = (self.there, self.host) if is_load else (self.host, self.there)
        target.copy_(source, non_blocking=True)
        if self.there.is_cuda:
            cuda: Any = torch.cuda
            cuda.current_stream(self.there.device).synchronize()


def _check(pool: KVPool, written: np.ndarray[Any, Any], loaded: np.ndarray[Any, Any]) -> None:
    """What was loaded is what was written, but for pages that the load itself has overwritten."""
    keep = ~np.isin(written, loaded)
    sources, targets = (
        torch.from_numpy(pages[keep].astype(np.int64)) for pages in (written, loaded)
    )
    for layer in range(pool.layout.num_layers):
        for part in (pool.k(layer), pool.v(layer)):
            there = sources.to(part.device), targets.to(part.device)
            if not torch.equal(part[there[0]], part[there[1]]):
                raise AssertionError(f"layer {layer}: a page came back with other bytes")
