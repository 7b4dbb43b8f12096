"""vLLM's queue of free blocks, with the victims named by a `Shadow`.

Which blocks are free, and who gets them, stays vLLM's. Only the choice among those that are cached
changes. This stands on internals of vLLM (`compat.POLICY`), so it is used with versions that were
tested, and with others not at all. Importing it raises ConfigError where vLLM lacks one of them.
"""

from __future__ import annotations

from typing import Any

from prefixkv.engines.vllm import compat
from prefixkv.engines.vllm.shadow import Shadow
from prefixkv.engines.vllm.stats import Counters

_Base: Any = compat.require(compat.POLICY).FreeKVCacheBlockQueue


class GovernedQueue(_Base):
    """Blocks that are not cached go first, then those that the shadow names, then vLLM's order."""

    shadow: Shadow
    counters: Counters
    blocks: list[Any]

    @classmethod
    def install(cls, pool: Any, shadow: Shadow, counters: Counters) -> None:
        """Make the queue of vLLM's `BlockPool` one of these. Before blocks are cached."""
        queue = pool.free_block_queue
        queue.__class__ = cls
        queue.blocks, queue.shadow, queue.counters = pool.blocks, shadow, counters

    def popleft_n(self, n: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < n:
            front = self.fake_free_list_head.next_free_block
            if front is self.fake_free_list_tail or front.block_hash is not None:
                break
            found.append(self._taken(front))
        if len(found) < n:
            named = self.shadow.victims(n - len(found), self._usable)
            found += [self._taken(self.blocks[block]) for block in named]
            self.counters.add("evicted_by_policy", len(named))
        if missing := n - len(found):
            self.counters.add("evicted_in_order", missing)
            rest = super().popleft_n(missing)
            for block in rest:
                self.shadow.taken(block.block_id)
            found += rest
        return found

    def _usable(self, block: int) -> bool:
        one = self.blocks[block]
        return one.ref_cnt == 0 and one.block_hash is not None and one.prev_free_block is not None

    def _taken(self, block: Any) -> Any:
        self.remove(block)
        self.shadow.taken(block.block_id)
        return block
