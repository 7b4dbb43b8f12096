"""References that keep blocks from reuse while a peer may still write or read them (`Holds`), and
the blocks that are being loaded, by vLLM's hash, so that a request that lacks one of them waits for
it instead of loading it a second time (`Flights`). `Ledger`: what the parts of the scheduler's side
share."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.orders import StepOrders
from prefixkv.engines.vllm.stats import Counters
from prefixkv.errors import check_laws
from prefixkv.spi import secret_number


class BlockPool(Protocol):
    blocks: list[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def get_num_free_blocks(self) -> int: ...


class Holds:
    """The connector's own references, by request. vLLM can hand a block out when both its own
    references and these are gone. Used in the engine's loop."""

    pool: BlockPool  # set before any request comes

    def __init__(self) -> None:
        # Each entry stands for one reference in `block.ref_cnt`; `release` gives them all back.
        self._held: dict[str, list[Any]] = {}

    @property
    def num_blocks(self) -> int:
        """A block that is held for two requests counts twice."""
        return sum(map(len, self._held.values()))

    @property
    def num_free(self) -> int:
        """Blocks in the prefix cache are free too."""
        return self.pool.get_num_free_blocks()

    def hash_of(self, page: int) -> Hashable:
        """None for a block that is not cached."""
        found: Hashable = self.pool.blocks[page].block_hash
        return found

    def is_cached(self, page: int) -> bool:
        return self.hash_of(page) is not None

    def num_references(self, page: int) -> int:
        return int(self.pool.blocks[page].ref_cnt)

    def take(self, rid: str, pages: Iterable[int]) -> None:
        """The blocks must be in use, or in the prefix cache."""
        # `touch` takes a cached block out of the free queue as well. A block that is free and not
        # cached might have been handed to another request already: hence the precondition.
        blocks = [self.pool.blocks[page] for page in pages]
        self.pool.touch(blocks)
        self._held.setdefault(rid, []).extend(blocks)

    def release(self, rid: str) -> None:
        """Give blocks back, after proof that no peer uses them. No-op for an unknown id. Reversed,
        so that the end of the prompt is evicted before its beginning, as in vLLM."""
        self.pool.free_blocks(reversed(self._held.pop(rid, [])))

    def check_invariants(self) -> None:
        held = [block for blocks in self._held.values() for block in blocks]
        check_laws({"what is held is not free": all(block.ref_cnt > 0 for block in held)}, held)


class Flights:
    """From a block's hash to the request that loads it: the one that began first."""

    def __init__(self) -> None:
        self._carrier: dict[Hashable, str] = {}
        self._blocks: dict[str, list[Hashable]] = {}  # by request; the inverse of `_carrier`

    def __len__(self) -> int:
        return len(self._carrier)

    def begin(self, rid: str, hashes: Iterable[Hashable]) -> None:
        mine = self._blocks.setdefault(rid, [])
        for block in hashes:
            # Two requests load one block where they do not join. The first stays its carrier, so
            # that `land` of the second does not end the wait of those that joined the first.
            if block not in self._carrier:
                self._carrier[block] = rid
                mine.append(block)

    def carrier(self, block: Hashable) -> str | None:
        return self._carrier.get(block)

    def land(self, rid: str) -> None:
        """The blocks have arrived, or will not. No-op for an unknown id."""
        for block in self._blocks.pop(rid, ()):
            del self._carrier[block]

    def check_invariants(self) -> None:
        carried = {block: rid for rid, blocks in self._blocks.items() for block in blocks}
        check_laws({"each block has one carrier": carried == self._carrier}, self._carrier)


@dataclass(slots=True)
class Ledger:
    """Blocks that are held, counts, and the orders of the next step. Used in the engine's loop.

    Args:
        num_ranks: number of workers, each of which has a share of every block.
        draw: returns a new random ticket.
    """

    groups: BlockGroups
    num_ranks: int = 1
    draw: Callable[[], int] = secret_number
    now_s: Callable[[], float] = time.time
    holds: Holds = field(default_factory=Holds)
    counters: Counters = field(default_factory=Counters)
    orders: StepOrders = field(default_factory=StepOrders)
