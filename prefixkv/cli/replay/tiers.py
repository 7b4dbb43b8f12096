"""The tiers of a replay: one tree each, over blocks that are numbered as they are needed.

The device's tier holds what requests need while they run. A host tier lies behind it and is
inclusive: a request finds what the device has of its prompt, loads what the host has behind that,
and when it ends what the host lacks is written there. So what the device keeps is the same with any
host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from prefixkv.cli.replay.trace import Trace
from prefixkv.errors import ConfigError, check_range
from prefixkv.settings import parse_size
from prefixkv.spi import InsertResult, Policy, PrefixLock, RadixCache, RadixKey

_MOST_BLOCKS: Final = 10**9


def host_blocks(size: str | int, capacity: int, block_bytes: int) -> int:
    """Return the size of a host tier in whole blocks, rounded down: "4x" (of the capacity),
    "64GiB", or blocks. `block_bytes` of 0: not known. Raises ConfigError.

    >>> host_blocks("4x", 1000, 0), host_blocks("1.5GiB", 1000, 1 << 20)
    (4000, 1536)
    """
    name = f"a host tier of {size}"
    parsed = None if isinstance(size, bool) else parse_size(str(size))
    if parsed is None or not (parsed[1] or parsed[0].is_integer()):
        raise ConfigError(f"{name}: a size is 4x (times the capacity), 64GiB, or whole blocks")
    number, unit = parsed
    if unit == "bytes" and not block_bytes:
        raise ConfigError(
            f"{name}: the trace does not say what the KV of a token takes, --bytes-per-token does"
        )
    scaled = {"x": number * capacity, "bytes": number / max(1, block_bytes)}
    found = int(scaled.get(unit, number))
    if unit == "bytes" and number and not found:
        raise ConfigError(f"{name} has no room for a block of {block_bytes:,} bytes")
    check_range(name, found, 0, _MOST_BLOCKS)
    return found


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
        self, key: RadixKey, lock: PrefixLock, now_s: float, visit: bool | None = None
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


class HostTier(Tier):
    """With counts of what is copied to and from it."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int, makes_room: bool) -> None:
        super().__init__(trace, policy, capacity, makes_room)
        self._trace = trace
        self._loads = self._loaded_blocks = self._written_blocks = 0

    def begin(self, key: RadixKey, now_s: float) -> int:
        """Return the number of blocks here of a prompt. Counts as its use."""
        with self.lock(key, now_s) as lock:
            return lock.prefix_len // self._trace.page_size

    def load(self, blocks: int) -> None:
        self._loads += blocks > 0
        self._loaded_blocks += blocks

    def end(self, key: RadixKey, known: int, now_s: float, counted: bool) -> None:
        """Write what is lacking of a prompt that ends, of which `begin` had `known` blocks; of one
        that is too large, the beginning, where room is made before."""
        if not self.capacity:
            return
        # The request was seen when it began, unless nothing of it was there to be used.
        with self.lock(key, now_s, visit=False) as lock:
            size = self._trace.page_size
            path = key.prefix(self.capacity * size) if self._makes_room else key
            new = (len(path) - lock.prefix_len) // size
            self.store(path, lock, now_s, visit=not known)
        self.trim(now_s)
        self._written_blocks += new * counted

    def result(self, device_hits: int, asked: int) -> HostResult:
        block_bytes = self._trace.block_tokens * self._trace.bytes_per_token
        return HostResult(
            host_blocks=self.capacity,
            block_hit_ratio=(device_hits + self._loaded_blocks) / max(1, asked),
            host_hit_ratio=self._loaded_blocks / max(1, asked),
            hit_tokens=self._loaded_blocks * self._trace.block_tokens,
            loads=self._loads,
            loaded_blocks=self._loaded_blocks,
            written_blocks=self._written_blocks,
            loaded_bytes=self._loaded_blocks * block_bytes,
            written_bytes=self._written_blocks * block_bytes,
        )
