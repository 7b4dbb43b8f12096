"""Blocks that vLLM's pool may not hand out yet: a peer may still write or read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from prefixkv.spi import InternalError


class BlockPool(Protocol):
    """Of vLLM's `BlockPool`, what is used here: blocks that count their references."""

    blocks: list[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def get_num_free_blocks(self) -> int: ...


class Holds:
    """References of ours, by request. A block is free for vLLM when its own and these are gone."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[str, list[Any]] = {}

    @property
    def num_blocks(self) -> int:
        """With those that are held for two requests twice."""
        return sum(map(len, self._held.values()))

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may hand out, those in the prefix cache included."""
        return self._pool.get_num_free_blocks()

    def is_cached(self, page: int) -> bool:
        """Whether vLLM finds this block by its hash."""
        return self._pool.blocks[page].block_hash is not None

    def take(self, rid: str, pages: Iterable[int]) -> None:
        """Hold these blocks too for a request. They must be in use, or in the prefix cache."""
        blocks = [self._pool.blocks[page] for page in pages]
        self._pool.touch(blocks)
        self._held.setdefault(rid, []).extend(blocks)

    def release(self, rid: str) -> None:
        """The proof is there. The last block is evicted first, as vLLM does it."""
        self._pool.free_blocks(reversed(self._held.pop(rid, [])))

    def check_invariants(self) -> None:
        for rid, blocks in self._held.items():
            if any(block.ref_cnt < 1 for block in blocks):
                raise InternalError(f"a block that is held for {rid} is free")
