"""A simulated rank's memory, of which every byte is looked at: a KV pool, a staging buffer, and
host memory with the copies between it and the pool: each in two halves, in any order, so that what
reads or writes too early, or too late, shows."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from prefixkv.conformance.pattern import KVPattern
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.memory.kv_layout import BLOCK_BYTES, KVLayout, RelayArea
from prefixkv.memory.mesh import Mesh
from prefixkv.pages.allocator import PageState
from prefixkv.protocol.events import HostCopy, HostCopyDone
from tests.support.mesh_pools import mesh_layout, moved, slab_views
from tests.support.schedulers import host_of

CANARY = 0xA5
SALT = 7


class Memory:
    """A rank's share of the KV, canaries round every region. `pattern` writes and checks it."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        order: str,
        num_pages: int,
        page_size: int,
        attention: str,
        head_bytes: int,
    ) -> None:
        shard = mesh.shard(rank)
        sizes = num_pages, page_size, shard.num_layers, shard.num_heads
        layout, num_bytes = mesh_layout(order, *sizes, attention, head_bytes)
        self.bytes = np.zeros((num_bytes,), np.uint8)
        self.bytes[:] = CANARY
        self.layout: KVLayout = moved(layout, self.bytes.ctypes.data)
        self._is_canary = np.ones(num_bytes, bool)
        for kv in slab_views(layout, self._is_canary):
            kv[:] = False
        self.bytes[~self._is_canary] = 0
        self._kv = slab_views(layout, self.bytes)
        self.pattern = KVPattern(self.layout, SALT, self.bytes, (mesh, rank))

    def read(self, pages: list[int]) -> bytes:
        """What `KVPool.read_pages` would read."""
        return np.stack([kv[pages] for kv in self._kv], axis=1).tobytes()

    def scribble(self, pages: Any, value: int) -> None:
        for kv in self._kv:
            kv[pages] = value

    def check(self) -> None:
        assert (self.bytes[self._is_canary] == CANARY).all(), "a canary of a pool is dead"


class Buffer:
    """A RelayBuffer with a canary before and behind it."""

    device = "cpu"

    def __init__(self, num_bytes: int, lease_bytes: int) -> None:
        self._all = torch.from_numpy(np.zeros((num_bytes + 3 * BLOCK_BYTES,), np.uint8)).fill_(
            CANARY
        )
        self._first = BLOCK_BYTES + -self._all.data_ptr() % BLOCK_BYTES
        self.area = RelayArea(self._all.data_ptr() + self._first, num_bytes, lease_bytes)

    def slice(self, offset: int, num_bytes: int) -> torch.Tensor:
        assert 0 <= offset <= offset + num_bytes <= self.area.num_bytes
        return self._all[self._first + offset : self._first + offset + num_bytes]

    def check(self) -> None:
        end = self._first + self.area.num_bytes
        assert (self._all[: self._first] == CANARY).all(), "a canary before a staging area is dead"
        assert (self._all[end:] == CANARY).all(), "a canary behind a staging area is dead"


GARBAGE = 0xC3


@dataclass(eq=False)
class UnderWay:
    """A copy that has begun: its first pages are there."""

    order: HostCopy
    done: int


@dataclass
class SimHost:
    """The host memory of one life of a decode rank, the copies that run, and the ends of those that
    the scheduler has not heard of."""

    memory: Memory
    host: Memory
    chance: random.Random
    fail: float = 0.07
    ordered: list[HostCopy] = field(default_factory=list)
    running: list[UnderWay] = field(default_factory=list)
    ended: list[HostCopyDone] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def order(self, scheduler: DecodeScheduler, hashes: Callable[[Any], Any]) -> None:
        """Take the copies that are ordered: of pages whose KV is there."""
        for order in scheduler.take_orders():
            assert host_of(scheduler) is not None
            copy = host_of(scheduler)._copies[order.number]
            tokens = np.frombuffer(copy.key.data, "<i4")
            first = copy.start * self.memory.layout.page_size
            source = self.host if order.is_load else self.memory
            wrong = source.pattern.mismatches(copy.src, hashes(tokens)[first:])
            assert wrong == 0, f"T8: {order} copies what is not there"
            self.ordered.append(order)

    def check(self, scheduler: DecodeScheduler, hashes: Callable[[Any], Any]) -> None:
        """Law 8 and T3: whatever can be found, in the pool or in host memory, is of its path."""
        assert host_of(scheduler) is not None
        for cache, memory in (
            (scheduler.pages.cache, self.memory), (host_of(scheduler).cache, self.host),
        ):  # fmt: skip
            above: dict[object, tuple[bytes, bytes]] = {}
            for node in cache.nodes():
                key, pages = above.get(node.parent, (b"", b""))
                key, pages = above[node] = key + bytes(node.key), pages + bytes(node.pages)
                tokens = np.frombuffer(key, "<i4")
                wrong = memory.pattern.mismatches(np.frombuffer(pages, "<i4"), hashes(tokens))
                assert wrong == 0, f"law 8: {wrong} cached pages are not of {tokens.tolist()}"

    @property
    def busy(self) -> bool:
        return bool(self.ordered or self.running or self.ended)

    def step(self, calm: bool = False) -> bool:
        """A copy begins, or ends. False if there is none."""
        if not self.ordered and not self.running:
            return False
        if self.ordered and (not self.running or self.chance.randrange(2)):
            order = self.ordered.pop(self.chance.randrange(len(self.ordered)))
            half = self.chance.randrange(len(order.host_pages) + 1)
            self._move(order, 0, half)
            self.running.append(UnderWay(order, half))
            return True
        one = self.running.pop(self.chance.randrange(len(self.running)))
        order, error = one.order, None
        if not calm and self.chance.random() < self.fail:
            error = OSError("a copy that fails on purpose")
            self._spoil(order, one.done)
            self.counts["failed"] += 1
        else:
            self._move(order, one.done, len(order.host_pages))
        self.counts["loads" if order.is_load else "writes"] += 1
        self.ended.append(HostCopyDone(order.number, error, 1, 1e-6))
        return True

    def hear(self, scheduler: DecodeScheduler, now_s: float) -> bool:
        """The scheduler hears of the end of a copy; they may overtake each other."""
        if not self.ended:
            return False
        done = self.ended.pop(self.chance.randrange(len(self.ended)))
        scheduler.hear(done, now_s)
        return True

    def scribble(self, scheduler: DecodeScheduler) -> None:
        """Overwrite all free host pages, so that one freed too early shows."""
        if host_of(scheduler) is not None:
            free = host_of(scheduler).allocator.pages_in(PageState.FREE)
            self.host.scribble(free, 0xDD)

    def _move(self, order: HostCopy, start: int, end: int) -> None:
        host, device = order.host_pages[start:end], order.device_pages[start:end]
        for slab, pool in zip(self.host._kv, self.memory._kv, strict=True):
            if order.is_load:
                pool[device] = slab[host]
            else:
                slab[host] = pool[device]

    def _spoil(self, order: HostCopy, start: int) -> None:
        to = order.device_pages if order.is_load else order.host_pages
        (self.memory if order.is_load else self.host).scribble(to[start:], GARBAGE)
