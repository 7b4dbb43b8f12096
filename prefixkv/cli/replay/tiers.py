"""The tiers of a replay: one tree each, over blocks that are numbered as they are needed.

The device's tier holds what requests need while they run. A host tier lies behind it and is
inclusive: a request finds what the device has of its prompt, loads what the host has behind that,
and when it ends what the host lacks is written there. So what the device keeps is the same with any
host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixkv.cli.replay.trace import Trace
from prefixkv.spi import InsertResult, Policy, PrefixLock, RadixCache, RadixKey


@dataclass(frozen=True, slots=True)
class HostResult:
    host_blocks: int  # its size
    block_hit_ratio: float  # of all blocks asked for: found by the device or here
    host_hit_ratio: float  # of all blocks asked for: found here alone
    hit_tokens: int  # found here alone
    loads: int  # requests that loaded something
    loaded_blocks: int
    written_blocks: int
    loaded_bytes: int  # 0 where the KV of a token is not known
    written_bytes: int


class Tier:
    """A tree of at most `capacity` blocks, with a policy of its own. With `makes_room` room is made
    before blocks are inserted, so they never take more than the capacity; else what is over goes
    afterwards, the blocks just inserted included (`trim`)."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int, makes_room: bool) -> None:
        policy.token_scale = trace.token_scale
        self.cache = RadixCache(page_size=trace.page_size, policy=policy)
        self.capacity, self._makes_room = capacity, makes_room
        # Page ids: `_free` first, then new ones.
        self._free: list[int] = []
        self._next_page = 0

    def lock(self, key: RadixKey, now_s: float, visit: bool | None = None) -> PrefixLock:
        return self.cache.lock(self.cache.match_prefix(key), now_s, visit=visit)

    def store(
        self,
        key: RadixKey,
        lock: PrefixLock,
        now_s: float,
        visit: bool | None = None,
    ) -> InsertResult:
        """Insert all of a prompt, of which `lock` holds what is there, and then all of it."""
        missing = (len(key) - lock.prefix_len) // self.cache.page_size
        if self._makes_room:
            self.trim(now_s, missing)
        while len(self._free) < missing:
            self._free.append(self._next_page)
            self._next_page += 1
        # The ids used come off the end of `_free` only once they are inserted.
        cut = len(self._free) - missing
        pages = np.array(self._free[cut:], np.int32)
        inserted = self.cache.insert(
            key, pages, now_s=now_s, visit=visit, lock=lock, extend_lock=True
        )
        del self._free[cut:]
        return inserted

    def trim(self, now_s: float, more: int = 0) -> None:
        """Evict what is over the capacity, or would be with `more` blocks."""
        over = self.cache.num_pages + more - self.capacity
        if over > 0:
            self._free += self.cache.evict(over, now_s).tolist()


class SimulatedTier(Tier):
    """A host tier, and counts of what is copied to and from it."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int, makes_room: bool) -> None:
        super().__init__(trace, policy, capacity, makes_room)
        self._page_size = trace.page_size
        self._block_bytes = trace.block_tokens * trace.bytes_per_token
        self._block_tokens = trace.block_tokens
        self.loads = self.loaded_blocks = self.written_blocks = 0

    def begin(self, key: RadixKey, now_s: float) -> int:
        """Return the number of blocks here of a prompt. Counts as its use."""
        with self.lock(key, now_s) as lock:
            return lock.prefix_len // self._page_size

    def load(self, blocks: int) -> None:
        self.loads += blocks > 0
        self.loaded_blocks += blocks

    def end(self, key: RadixKey, found: int, now_s: float, counted: bool) -> None:
        """Write what is lacking of a prompt that ends, of which `begin` has `found` blocks; of one
        that is too large, the beginning, where room is made before."""
        if not self.capacity:
            return
        # The request was seen when it began, unless nothing of it was there to be used.
        with self.lock(key, now_s, visit=False) as lock:
            path = key.prefix(self.capacity * self._page_size) if self._makes_room else key
            new = (len(path) - lock.prefix_len) // self._page_size
            self.store(path, lock, now_s, visit=not found)
        self.trim(now_s)
        if counted:
            self.written_blocks += new

    def result(self, device_hits: int, asked: int) -> HostResult:
        asked = max(1, asked)
        return HostResult(
            host_blocks=self.capacity,
            block_hit_ratio=(device_hits + self.loaded_blocks) / asked,
            host_hit_ratio=self.loaded_blocks / asked,
            hit_tokens=self.loaded_blocks * self._block_tokens,
            loads=self.loads,
            loaded_blocks=self.loaded_blocks,
            written_blocks=self.written_blocks,
            loaded_bytes=self.loaded_blocks * self._block_bytes,
            written_bytes=self.written_blocks * self._block_bytes,
        )
