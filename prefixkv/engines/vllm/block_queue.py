"""vLLM's queue of free blocks, with the victims named by a `Shadow`.

vLLM still decides which blocks are free and which request gets them; only the choice among cached
blocks changes. This depends on internals of vLLM (`compat.POLICY`), so it is used only with tested
versions. Importing it raises ConfigError where vLLM lacks one of them.
"""

from __future__ import annotations

from typing import Any

from prefixkv.engines.vllm import compat
from prefixkv.engines.vllm.shadow import Shadow
from prefixkv.engines.vllm.stats import Counters

_Base: Any = compat.require(compat.POLICY).FreeKVCacheBlockQueue


class GovernedQueue(_Base):
    """A queue that hands out uncached blocks, then the shadow's victims, then in vLLM's order."""

    shadow: Shadow
    counters: Counters
    blocks: list[Any]

    @classmethod
    def install(cls, pool: Any, shadow: Shadow, counters: Counters) -> None:
        """Turn the free block queue of vLLM's `BlockPool` into a governed one.

        It is called before blocks are cached.
        """
        # The class is exchanged in place: the queue's links run through the blocks themselves, and
        # vLLM may hold further references to the queue.
        queue = pool.free_block_queue
        queue.__class__ = cls
        queue.blocks, queue.shadow, queue.counters = pool.blocks, shadow, counters

    def popleft_n(self, n: int) -> list[Any]:
        """Take `n` blocks out of vLLM's queue of free blocks; vLLM has checked that it has them."""
        found: list[Any] = []
        # 1. Uncached blocks at the front cost no hit. vLLM puts them there.
        while len(found) < n:
            front = self.fake_free_list_head.next_free_block
            if front is self.fake_free_list_tail or front.block_hash is not None:
                break
            found.append(self._taken(front))
        # 2. The policy's victims, which may lie anywhere in the queue.
        if len(found) < n:
            named = self.shadow.victims(n - len(found), self._usable)
            found += [self._taken(self.blocks[block]) for block in named]
            self.counters.add("evicted_by_policy", len(named))
        # 3. vLLM's order. The shadow learns of it, or it would name these blocks later.
        if missing := n - len(found):
            self.counters.add("evicted_in_order", missing)
            rest = super().popleft_n(missing)
            for block in rest:
                self.shadow.taken(block.block_id)
            found += rest
        return found

    def _usable(self, block: int) -> bool:
        """Return whether a block is free, cached and in vLLM's queue.

        The shadow, which names it, may be out of date.
        """
        one = self.blocks[block]
        return one.ref_cnt == 0 and one.block_hash is not None and one.prev_free_block is not None

    def _taken(self, block: Any) -> Any:
        """Take one block out of vLLM's queue of free blocks, and out of the shadow."""
        self.remove(block)
        self.shadow.taken(block.block_id)
        return block


compat.check_overrides(GovernedQueue, _Base)
