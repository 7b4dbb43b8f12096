"""Which of vLLM's cached blocks should go, in the words of a policy: a radix cache beside vLLM's.

The shadow is told of requests as they are admitted and end, and names victims. It owns nothing:
vLLM may take a block against it, forget all its hashes, or have a block that it never heard of. To
be wrong costs a hit, never correctness.

A place in the tree has a number of its own, not that of a block. So what vLLM did against the
policy needs no change of the tree: the place has no block any more, and is passed over when its
turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from prefixkv.spi import MAX_INDEX, InsertResult, Policy, PrefixLock, RadixCache, check_laws

Usable = Callable[[int], bool]
"""Whether a block is free, and its hash is cached."""


class Shadow:
    """One pool's.

    Args:
        block_size: tokens of a block.
        policy: a name of `policy_names()`, or one that is made.
        clock: seconds, for policies that need the time.
    Raises:
        ConfigError: an unknown policy.
    """

    def __init__(self, block_size: int, policy: str | Policy, clock: Callable[[], float]) -> None:
        self._tree = RadixCache(block_size, policy)
        self._clock = clock
        self._locks: dict[str, PrefixLock] = {}
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
        """A request runs, and `blocks` are to hold the first of its `tokens`: they are in use.
        Again, until it ends: no-op.

        They are entered at once. A policy takes the entry of new pages for a part of the last use
        of those before them, so no other request may come between."""
        if rid in self._locks:
            return
        match = self._tree.match_prefix(np.asarray(tokens, np.int32), namespace)
        seen = self._tree.lock(match, self._clock())
        self._locks[rid] = seen
        if blocks:
            inserted = self._insert(tokens, blocks, namespace, visit=False)
            self._locks[rid] = self._tree.lock(inserted, self._clock())
            self._tree.unlock(seen)

    def ended(
        self, rid: str, tokens: Sequence[int], blocks: Sequence[int], namespace: Hashable = None
    ) -> None:
        """A request ends. `blocks` are cached, and hold the KV of the first of its `tokens`."""
        lock = self._locks.pop(rid, None)
        if blocks:
            self._insert(tokens, blocks, namespace, visit=lock is None)
        if lock is not None:
            self._tree.unlock(lock)

    def _insert(
        self, tokens: Sequence[int], blocks: Sequence[int], namespace: Hashable, *, visit: bool
    ) -> InsertResult:
        num_tokens = len(blocks) * self._tree.page_size
        places = np.arange(self._next_place, self._next_place + len(blocks), dtype=np.int32)
        inserted = self._tree.insert(
            np.asarray(tokens[:num_tokens], np.int32), places, namespace,
            now_s=self._clock(), visit=visit,
        )  # fmt: skip
        self._next_place = (self._next_place + len(blocks)) % (MAX_INDEX // 2)
        for place, block in zip(inserted.pages.tolist(), blocks, strict=True):
            self._set(place, block)
        return inserted

    def _set(self, place: int, block: int) -> None:
        if self._block_at.get(place) != block:
            self.taken(block)
            self._place_of.pop(self._block_at.get(place, -1), None)
            self._block_at[place], self._place_of[block] = block, place

    def taken(self, block: int) -> None:
        """vLLM uses this block for something else. Unknown: no-op."""
        place = self._place_of.pop(block, None)
        if place is not None:
            del self._block_at[place]

    def victims(self, number: int, usable: Usable) -> list[int]:
        """The blocks least worth keeping, at most `number`; fewer where the policy knows of no
        more. They are forgotten here."""
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
        """vLLM has forgotten all its hashes."""
        self._tree.reset()
        self._block_at.clear()
        self._place_of.clear()

    def check_invariants(self) -> None:
        """For tests."""
        inverse = {block: place for place, block in self._block_at.items()}
        check_laws({"a block has one place": inverse == self._place_of}, self._place_of)
        self._tree.check_invariants()
