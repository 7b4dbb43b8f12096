"""References on vLLM's blocks, which keep those from reuse that a peer may still write or read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from prefixkv.spi import InternalError


class BlockPool(Protocol):
    """The part of vLLM's `BlockPool` that is used here: blocks that count their references."""

    blocks: list[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def get_num_free_blocks(self) -> int: ...


class Holds:
    """The connector's own block references, by request.

    vLLM can hand a block out when both its own references and these are gone. Used by
    `SchedulerSide` alone, in vLLM's engine loop.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # Each entry stands for one reference in `block.ref_cnt`; `release` gives them all back.
        self._held: dict[str, list[Any]] = {}

    @property
    def num_blocks(self) -> int:
        """Number of references: a block that is held for two requests counts twice."""
        return sum(map(len, self._held.values()))

    @property
    def num_free(self) -> int:
        """Number of blocks that vLLM may hand out, those in the prefix cache included."""
        return self._pool.get_num_free_blocks()

    def is_cached(self, page: int) -> bool:
        """Return whether vLLM finds this block by its hash."""
        return self._pool.blocks[page].block_hash is not None

    def take(self, rid: str, pages: Iterable[int]) -> None:
        """Hold more blocks for a request. They must be in use, or in the prefix cache."""
        # `touch` takes a cached block out of the free queue as well. A block that is free and not
        # cached might have been handed to another request already: hence the precondition.
        blocks = [self._pool.blocks[page] for page in pages]
        self._pool.touch(blocks)
        self._held.setdefault(rid, []).extend(blocks)

    def release(self, rid: str) -> None:
        """Give a request's blocks back, after proof that no peer uses them. Unknown id: no-op.

        Reversed, so that the end of the prompt is evicted before its beginning, as in vLLM.
        """
        self._pool.free_blocks(reversed(self._held.pop(rid, [])))

    def check_invariants(self) -> None:
        """Raise InternalError if a held block is free. For tests."""
        for rid, blocks in self._held.items():
            if any(block.ref_cnt < 1 for block in blocks):
                raise InternalError(f"a block that is held for {rid} is free")
