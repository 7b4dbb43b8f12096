"""What is remembered of pages that were evicted, so that a path that comes back is known.

Few ghosts are kept, at whole blocks only: one every `stride_blocks` blocks on a path, and one at
the last block of the path. Together they stand for a bounded number of pages; the oldest are
forgotten first. The bound is part of the idea: a session that comes back in time is still known,
and one that does not makes room.

A ghost is found by its depth and the tokens just before it. Two prefixes that agree in those and
differ elsewhere are taken for one, which can change the order of evictions and nothing else.

Source: the lists of evicted pages in 2Q (Johnson and Shasha, 1994).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from prefixkv.cache.eviction.policy import Policy, Use
from prefixkv.cache.node import Mark, Node
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.settings import at_least, check_types

Worth: TypeAlias = Any
"""Whatever a policy counts of a page's uses: it compares with `<` and adds up."""

NAME_BYTES = 16 * TOKEN_BYTES
"""A ghost's name holds the last page before it, and at least this much."""


class Ghost(NamedTuple):
    history: Mark  # of the page, as its policy keeps it
    depth: int  # pages from the root to its end
    stands_for: int  # pages


class Ghosts:
    """A bounded queue with a look-up. O(1) a ghost.

    Args:
        page_bytes: of packed tokens.
        block_pages: ghosts lie at multiples of this depth only.
        stride_blocks: how many blocks lie between two ghosts of one path.
    """

    def __init__(self, page_bytes: int, block_pages: int, stride_blocks: int) -> None:
        self._page_bytes = page_bytes
        self._name_bytes = max(page_bytes, NAME_BYTES)
        self.block_pages = block_pages
        self.stride_pages = stride_blocks * block_pages
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self.num_pages = 0  # that all of them stand for

    def clear(self) -> None:
        self._ghosts.clear()
        self.num_pages = 0

    def remember(
        self, node: Node, num_pages: int, path_pages: int, limit_pages: int
    ) -> list[Ghost]:
        """The last `num_pages` of a leaf go: leave ghosts of them, and forget the oldest beyond
        `limit_pages`.

        Args:
            path_pages: how long the path was that these pages were last part of.
        Returns:
            The forgotten.
        """
        end = node.end
        low, stride = end - num_pages, self.stride_pages
        last_block = self.whole_blocks(path_pages)
        depths = range(end - end % stride, low, -stride)
        ends_here = low < last_block <= end and last_block % stride
        for depth in [last_block, *depths] if ends_here else depths:
            name = self._name_in_tree(node, depth)
            self._forget(name)
            self._ghosts[name] = ghost = Ghost(node.mark, depth, (depth - 1) % stride + 1)
            self.num_pages += ghost.stands_for
        forgotten = []
        while self.num_pages > limit_pages:
            forgotten.append(self._ghosts.popitem(last=False)[1])
            self.num_pages -= forgotten[-1].stands_for
        return forgotten

    def whole_blocks(self, num_pages: int) -> int:
        """`num_pages`, down to the end of a block."""
        return num_pages - num_pages % self.block_pages

    def find(self, data: bytes, old_pages: int) -> list[Ghost]:
        """Those of a packed path beyond its `old_pages`, rising in depth. O(found + stride)."""
        if not self._ghosts:
            return []
        end = len(data) // self._page_bytes
        block, stride = self.block_pages, self.stride_pages
        found: list[Ghost] = []
        depth = old_pages - old_pages % stride + stride
        while depth <= end and (ghost := self._ghosts.get(self._name(data, depth))) is not None:
            found.append(ghost)
            depth += stride
        low = max(old_pages, depth - stride)  # the end of the path is less than a stride further
        for last in range(min(depth - block, end - end % block), low, -block):
            ghost = self._ghosts.get(self._name(data, last))
            if ghost is not None:
                found.append(ghost)
                break
        return found

    def come_back(self, data: bytes, found: list[Ghost]) -> None:
        """The pages of these ghosts are in the tree again."""
        for ghost in found:
            self._forget(self._name(data, ghost.depth))

    def _forget(self, name: int) -> None:
        ghost = self._ghosts.pop(name, None)
        if ghost is not None:
            self.num_pages -= ghost.stands_for

    def _name(self, data: bytes, depth: int) -> int:
        """What the page before `depth` of a packed path is known by."""
        end = depth * self._page_bytes
        return hash((depth, data[max(0, end - self._name_bytes) : end]))

    def _name_in_tree(self, node: Node, depth: int) -> int:
        """As `_name`, of the path that `node` ends."""
        end = (depth - node.start) * self._page_bytes
        tokens = bytes(node.key[max(0, end - self._name_bytes) : end])
        while len(tokens) < self._name_bytes and node.parent is not None:
            node = node.parent
            missing = self._name_bytes - len(tokens)
            tokens = bytes(node.key[max(0, len(node.key) - missing) :]) + tokens
        return hash((depth, tokens))


@dataclass(kw_only=True, eq=False, repr=False)
class GhostPolicy(Policy):
    """The base of policies that remember evicted pages. A mark of theirs has `tick`, that of its
    use, and `path_pages`, how many pages its use covered.

    Args:
        ghosts: how many pages the ghosts may stand for, as a multiple of the pool (or of the tree,
            at its largest).
        block_tokens, stride_blocks: how far ghosts lie apart.
        promise_s: see `Policy`.
    Raises:
        ConfigError: a setting below its bound.
    """

    ghosts: float = 5.0
    block_tokens: int = 512
    stride_blocks: int = 8
    promise_s: float = 600.0

    def __post_init__(self) -> None:
        check_types(self)
        at_least(0, ghosts=self.ghosts, promise_s=self.promise_s)
        at_least(1, block_tokens=self.block_tokens, stride_blocks=self.stride_blocks)

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._page_tokens = page_size * self.token_scale
        self._capacity_pages = pool_pages or 0
        self.ghost_pages = max(1, self.block_tokens // self._page_tokens)
        self.remembered = Ghosts(self._page_bytes, self.ghost_pages, self.stride_blocks)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        found = self.remembered.find(use.data, use.old_pages)
        marks = self.marks_of_new(use, found)
        self.remembered.come_back(use.data, found)
        return marks

    @abstractmethod
    def marks_of_new(self, use: Use, found: list[Ghost]) -> Sequence[tuple[int, Mark]]:
        """As `insertion_marks`, where `found` are the ghosts of the new pages."""

    def goes_on(self, use: Use, found: list[Ghost]) -> tuple[Mark | None, int]:
        """The use that this first use of a request goes on from, and how many pages it adds.

        It goes on where the last path that held the known pages ended, if it does; else None. Of
        `found`, the ghosts beyond the old pages, that end is known to the block only.
        """
        self._capacity_pages = max(self._capacity_pages, use.tree_pages)
        known, last = use.old_pages, use.before
        if found:
            last, known, _ = found[-1]
        new_pages = len(use.data) // self._page_bytes - known
        if last is None:
            return None, new_pages
        end = self.remembered.whole_blocks(last.path_pages) if found else last.path_pages
        return last if end == known else None, new_pages

    def last_tick(self, history: Mark) -> int:
        return history.tick  # type: ignore[no-any-return]

    def evicted(self, node: Node, num_pages: int) -> None:
        self.remember(node, num_pages)

    def remember(self, node: Node, num_pages: int) -> list[Ghost]:
        """Leave ghosts of evicted pages; returns those that are forgotten for them."""
        limit_pages = int(self.ghosts * self._capacity_pages)
        return self.remembered.remember(node, num_pages, node.mark.path_pages, limit_pages)

    def reset(self) -> None:
        self.remembered.clear()


def staircase(
    use: Use,
    totals: list[tuple[int, Worth]],
    one: Worth,
    nothing: Worth,
    less: Callable[[Worth, Worth], Worth],
) -> list[tuple[int, Worth]]:
    """(depth, what a mark there adds), rising: what an insertion leaves so that each page has its
    total.

    New pages up to a ghost have the ghost's worth besides this visit, those below the last ghost
    have this visit. The old pages have at most this visit: what was added for the new ones is taken
    off again where they end.

    Args:
        totals: (depth, worth) of the ghosts found, this visit included, rising in depth.
        one, nothing: the worth of this visit, and none.
        less: the first worth without the second.
    """
    if not totals or totals[-1][0] < use.num_pages:
        totals.append((use.num_pages, one))
    steps = []
    below = nothing  # what marks further down add to a page already
    for depth, total in [*reversed(totals), (use.old_pages, one if use.visit else nothing)]:
        if depth == use.old_pages or total > below:
            steps.append((depth, less(total, below)))
            below = total
    return steps[::-1]
