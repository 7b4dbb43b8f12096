"""Eviction by a policy: a radix cache beside vLLM's, and a queue of free blocks that asks it.

The shadow follows requests as they are admitted and end, and names victims. It owns nothing: vLLM
may take a block against it, forget all hashes, or have a block that it does not know. An error
costs a hit, never correctness.

A place in the tree has its own number, not the block's. So a block that vLLM takes against the
policy needs no change of the tree: its place has no block any more, and is skipped at its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from prefixkv.engines.vllm.stats import Counters
from prefixkv.engines.vllm.versions import check_takes
from prefixkv.errors import check_laws
from prefixkv.settings import Continues
from prefixkv.spi import MAX_INDEX, InsertResult, Policy, PrefixLock, RadixCache


class Shadow:
    """The policy's view of one block pool. `policy` is one of `policy_names()`, or an object; an
    unknown name raises ConfigError."""

    def __init__(self, block_size: int, policy: str | Policy, clock: Callable[[], float]) -> None:
        self._tree = RadixCache(block_size, policy)
        self._clock = clock
        self._locks: dict[str, PrefixLock] = {}  # by running request; `ended` unlocks
        self._next_place = 0
        self._block_at: dict[int, int] = {}  # by place
        self._place_of: dict[int, int] = {}  # by block; the inverse

    def admitted(
        self,
        rid: str,
        tokens: Sequence[int],
        blocks: Sequence[int] = (),
        namespace: Hashable = None,
    ) -> None:
        """Lock the blocks of a request that starts to run; no-op for one that runs already. They
        are entered at once: a policy takes the entry of new pages for a part of the last use of the
        pages before them, so no other request may come between."""
        if rid in self._locks:
            return
        match = self._tree.match_prefix(np.asarray(tokens, np.int32), namespace)
        seen = self._tree.lock(match, self._clock())
        self._locks[rid] = seen
        if blocks:
            # No visit: the lock of the match has counted this use. The match stays locked until
            # the longer path is locked, so no page is evictable in between.
            inserted = self._insert(tokens, blocks, namespace, visit=False)
            self._locks[rid] = self._tree.lock(inserted, self._clock())
            self._tree.unlock(seen)

    def ended(
        self, rid: str, tokens: Sequence[int], blocks: Sequence[int], namespace: Hashable = None,
        continues: Continues = None,
    ) -> None:  # fmt: skip
        """Enter and unlock the blocks of a request that ends, all of them cached."""
        lock = self._locks.pop(rid, None)
        # A request that was never admitted here has not been counted as a use.
        if blocks:
            inserted = self._insert(tokens, blocks, namespace, visit=lock is None)
            self._tree.hint(inserted, continues)
        if lock is not None:
            self._tree.unlock(lock)

    def _insert(
        self, tokens: Sequence[int], blocks: Sequence[int], namespace: Hashable, *, visit: bool
    ) -> InsertResult:
        # Under fresh place numbers; pages that the tree has keep theirs.
        num_tokens = len(blocks) * self._tree.page_size
        places = np.arange(self._next_place, self._next_place + len(blocks), dtype=np.int32)
        inserted = self._tree.insert(
            np.asarray(tokens[:num_tokens], np.int32), places, namespace,
            now_s=self._clock(), visit=visit,
        )  # fmt: skip
        self._next_place = (self._next_place + len(blocks)) % (MAX_INDEX // 2)
        for place, block in zip(inserted.pages.tolist(), blocks, strict=True):
            # Both are disconnected from what they had before.
            if self._block_at.get(place) != block:
                self.taken(block)
                self._place_of.pop(self._block_at.get(place, -1), None)
                self._block_at[place], self._place_of[block] = block, place
        return inserted

    def taken(self, block: int) -> None:
        """vLLM uses the block for something else. No-op for an unknown one."""
        place = self._place_of.pop(block, None)
        if place is not None:
            del self._block_at[place]

    def victims(self, number: int, usable: Callable[[int], bool]) -> list[int]:
        """Return the blocks that are least worth keeping, fewer if there are none; forget them.
        `usable`: whether a block is free, and its hash is cached."""
        # Some evicted places have no usable block any more, so evict until there are enough.
        found: list[int] = []
        while len(found) < number:
            places = self._tree.evict(number - len(found), self._clock())
            if not len(places):
                break
            for place in places.tolist():
                block = self._block_at.get(place)
                if block is not None:
                    self.taken(block)
                    if usable(block):
                        found.append(block)
        return found

    def flush(self) -> None:
        self._tree.reset()
        self._block_at.clear()
        self._place_of.clear()

    def check_invariants(self) -> None:
        inverse = {block: place for place, block in self._block_at.items()}
        check_laws({"a block has one place": inverse == self._place_of}, self._place_of)
        self._tree.check_invariants()


def govern(pool: Any, shadow: Shadow, counters: Counters) -> None:
    """Have vLLM's `BlockPool` hand out uncached blocks, then the shadow's victims, then blocks in
    its own order. To be called before any block is cached, so that the shadow misses none."""
    queue, blocks = pool.free_block_queue, pool.blocks
    theirs = queue.popleft_n

    def take(block: Any) -> Any:
        queue.remove(block)
        shadow.taken(block.block_id)
        return block

    def is_usable(number: int) -> bool:
        # The shadow may be out of date.
        one = blocks[number]
        return one.ref_cnt == 0 and one.block_hash is not None and one.prev_free_block is not None

    def popleft_n(n: int) -> list[Any]:
        """vLLM has checked that there are `n` blocks."""
        found: list[Any] = []
        # 1. Uncached blocks at the front cost no hit. vLLM puts them there.
        while len(found) < n:
            front = queue.fake_free_list_head.next_free_block
            if front is queue.fake_free_list_tail or front.block_hash is not None:
                break
            found.append(take(front))
        # 2. The policy's victims, which may lie anywhere in the queue.
        if len(found) < n:
            named = shadow.victims(n - len(found), is_usable)
            found += [take(blocks[number]) for number in named]
            counters.add("evicted_by_policy", len(named))
        # 3. vLLM's order. The shadow learns of it, or it would name these blocks later.
        if missing := n - len(found):
            counters.add("evicted_in_order", missing)
            rest = theirs(missing)
            for block in rest:
                shadow.taken(block.block_id)
            found += rest
        return found

    check_takes(popleft_n, theirs, "popleft_n")
    queue.popleft_n = popleft_n
