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
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from prefixkv.cache.eviction.policy import Policy, Use
from prefixkv.cache.node import Fold, Mark, Node
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.settings import Count, Number, SecondsOrZero, check_fields

Worth: TypeAlias = Any
"""Whatever a policy counts of a page's uses: it compares with `<` and adds up."""

PATH = 4
"""Where a mark has how many pages its use covered."""

NAME_BYTES = 16 * TOKEN_BYTES
"""A ghost's name holds the last page before it, and at least this much."""

SEGMENT_BYTES = 8 * TOKEN_BYTES
"""A segment's name holds this much before its begin."""


Ghost: TypeAlias = tuple[Mark, int, int, int, int | None, bool]
"""(history, depth, stands for, name, segment, is end): the history of its page, as its policy keeps
it; pages from the root to its end; how many pages it stands for; the name of the segment that it
ends, None if it lies at a stride; whether it is the end, to the block, of the path that its page
was last part of.

A plain tuple: making ghosts is most of what an eviction costs.
"""


class Ghosts:
    """A bounded queue with a look-up. O(1) a ghost.

    A segment is what lies between two strides of a path, and is known by its begin (the first, by
    its first block). It is counted how many ghosts of path ends a segment has, so that a look-up
    tries the blocks of a segment only if there is one.

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
        self._ends: dict[int, int] = {}  # by segment: ghosts of path ends in it
        self.num_pages = 0  # that all of them stand for
        # (packed path, old pages, what was found) of the last look-up, while it holds
        self._last: tuple[bytes, int, list[Ghost]] | None = None

    def __len__(self) -> int:
        return len(self._ghosts)

    def clear(self) -> None:
        self._ghosts.clear()
        self._ends.clear()
        self.num_pages = 0
        self._last = None

    def remember(
        self, node: Node, num_pages: int, path_pages: int, limit_pages: int, fold: Fold
    ) -> list[Ghost]:
        """The last `num_pages` of a leaf go: leave ghosts of them, and forget the oldest beyond
        `limit_pages`.

        Args:
            path_pages: how long the path was that these pages were last part of.
            fold: the policy's.
        Returns:
            Of the forgotten those that were ends of their paths.
        """
        end, stride = node.end, self.stride_pages
        low = end - num_pages
        self._last = None
        last = path_pages - path_pages % self.block_pages
        history, steps = node.mark, node.steps
        at = len(steps) - 1 if steps is not None else -1
        ghosts, size, page_bytes = self._ghosts, self._name_bytes, self._page_bytes
        key = node.key
        bytes_above = end * page_bytes - len(key)
        cut = max(0, low * page_bytes - bytes_above - size)
        tail, bytes_above = bytes(key[cut:]), bytes_above + cut
        num_pages = self.num_pages
        if low < last <= end and (over := last % stride):
            while at >= 0 and steps[at][0] >= last:  # type: ignore[index]
                history = fold(steps[at][1], history)  # type: ignore[index]
                at -= 1
            begin = last - over or self.block_pages
            at_byte = begin * page_bytes - bytes_above
            if at_byte >= SEGMENT_BYTES:
                segment = hash((begin, tail[at_byte - SEGMENT_BYTES : at_byte]))
            else:
                segment = self._name_in_tree(node, begin, SEGMENT_BYTES)
            at_byte = last * page_bytes - bytes_above
            if at_byte >= size:
                name = hash((last, tail[at_byte - size : at_byte]))
            else:
                name = self._name_in_tree(node, last, size)
            if name in ghosts:
                num_pages -= self._forget(ghosts[name])
            self._ends[segment] = self._ends.get(segment, 0) + 1
            ghosts[name] = (history, last, over, name, segment, True)
            num_pages += over
        for depth in range(end - end % stride, low, -stride):
            while at >= 0 and steps[at][0] >= depth:  # type: ignore[index]
                history = fold(steps[at][1], history)  # type: ignore[index]
                at -= 1
            at_byte = depth * page_bytes - bytes_above
            if at_byte >= size:
                name = hash((depth, tail[at_byte - size : at_byte]))
            else:
                name = self._name_in_tree(node, depth, size)
            if name in ghosts:
                num_pages -= self._forget(ghosts[name])
            ghosts[name] = (history, depth, stride, name, None, depth == last)
            num_pages += stride
        forgotten: list[Ghost] = []
        while num_pages > limit_pages:
            _, ghost = ghosts.popitem(last=False)
            num_pages -= ghost[2]
            if ghost[5]:
                if ghost[4] is not None:
                    self._leave_segment(ghost[4])
                forgotten.append(ghost)
        self.num_pages = num_pages
        return forgotten

    def find(self, data: bytes, old_pages: int) -> list[Ghost]:
        """Those of a packed path beyond its `old_pages`, rising in depth. O(found + stride)."""
        if not self._ghosts:
            return []
        if (known := self._last) is not None and known[0] is data and known[1] == old_pages:
            return known[2]
        get, size, page_bytes = self._ghosts.get, self._name_bytes, self._page_bytes
        end = len(data) // page_bytes
        block, stride = self.block_pages, self.stride_pages
        found: list[Ghost] = []
        depth = old_pages - old_pages % stride + stride
        while depth <= end:
            at = depth * page_bytes
            ghost = get(hash((depth, data[at - size if at > size else 0 : at])))
            if ghost is None:
                break
            found.append(ghost)
            depth += stride
        # The end of the path is less than a stride further.
        begin = depth - stride
        low = old_pages if old_pages > begin else begin
        high = min(depth - block, end - end % block)
        if high > low and self._name(data, begin or block, SEGMENT_BYTES) in self._ends:
            for last in range(high, low, -block):
                if (ghost := get(self._name(data, last, size))) is not None:
                    found.append(ghost)
                    break
        self._last = data, old_pages, found
        return found

    def none_beyond(self, data: bytes, old_pages: int) -> None:
        """The next look-up of this path finds nothing."""
        self._last = data, old_pages, []

    def come_back(self, found: list[Ghost]) -> None:
        """The pages of these ghosts, just found, are in the tree again."""
        if found:
            ghosts, num_pages = self._ghosts, self.num_pages
            for _, _, stands_for, name, segment, _ in found:
                del ghosts[name]
                num_pages -= stands_for
                if segment is not None:
                    self._leave_segment(segment)
            self.num_pages = num_pages
            self._last = None

    def broken_laws(self) -> list[str]:
        """Every law that does not hold; for tests. O(ghosts)."""
        ghosts = self._ghosts
        ends = Counter(ghost[4] for ghost in ghosts.values() if ghost[4] is not None)
        laws = {
            "a ghost is found by its name": all(name == ghost[3] for name, ghost in ghosts.items()),
            "the pages that ghosts stand for are counted": self.num_pages
            == sum(ghost[2] for ghost in ghosts.values()),
            "ghosts of path ends are counted by segment": self._ends == dict(ends),
            "ghosts lie at whole blocks, those at strides end no segment": all(
                not depth % self.block_pages
                and (segment is None) == (not depth % self.stride_pages)
                for _, depth, _, _, segment, _ in ghosts.values()
            ),
        }
        return [law for law, holds in laws.items() if not holds]

    def _forget(self, ghost: Ghost) -> int:
        """Returns how many pages it stood for."""
        del self._ghosts[ghost[3]]
        if ghost[4] is not None:
            self._leave_segment(ghost[4])
        return ghost[2]

    def _leave_segment(self, segment: int) -> None:
        if self._ends[segment] == 1:
            del self._ends[segment]
        else:
            self._ends[segment] -= 1

    def _name(self, data: bytes, depth: int, num_bytes: int) -> int:
        """What `depth` of a packed path is known by: so many bytes before it."""
        end = depth * self._page_bytes
        return hash((depth, data[end - num_bytes if end > num_bytes else 0 : end]))

    def _name_in_tree(self, node: Node, depth: int, num_bytes: int) -> int:
        """As `_name`, of the path that `node` ends."""
        key = node.key
        end = len(key) - (node.end - depth) * self._page_bytes
        if end >= num_bytes:
            return hash((depth, bytes(key[end - num_bytes : end])))
        parent = node.parent
        while end <= 0 and parent is not None:
            node, parent = parent, parent.parent
            end += len(node.key)
        tokens = bytes(node.key[end - num_bytes if end > num_bytes else 0 : end])
        while len(tokens) < num_bytes and parent is not None:
            tokens = bytes(parent.key[len(tokens) - num_bytes :]) + tokens
            parent = parent.parent
        return hash((depth, tokens))


@dataclass(kw_only=True, eq=False, repr=False)
class GhostPolicy(Policy):
    """The base of policies that remember evicted pages. A mark of theirs is a tuple; it begins with
    the tick of its use, and has at `PATH` how many pages its use covered.

    Args:
        ghosts: how many pages the ghosts may stand for, as a multiple of the pool (or of the tree,
            at its largest).
        block_tokens, stride_blocks: how far ghosts lie apart.
        promise_s: see `Policy`.
    Raises:
        ConfigError: a setting below its bound.
    """

    tells_returns = True

    ghosts: Number = 5.0
    block_tokens: Count = 512
    stride_blocks: Count = 8
    promise_s: SecondsOrZero = 600.0

    def __post_init__(self) -> None:
        check_fields(self)

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._page_tokens = page_size * self.token_scale
        self._capacity_pages = pool_pages or 0
        self.ghost_pages = max(1, self.block_tokens // self._page_tokens)
        self.remembered = Ghosts(self._page_bytes, self.ghost_pages, self.stride_blocks)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        found = self.remembered.find(use.data, use.old_pages)
        marks = self.marks_of_new(use, found)
        self.remembered.come_back(found)
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
            last, known = found[-1][:2]
        new_pages = len(use.data) // self._page_bytes - known
        if last is None:
            return None, new_pages
        end: int = last[PATH]
        if found:
            end -= end % self.ghost_pages
        if end != known:
            return None, new_pages
        if self.came_back is not None:
            self.came_back(last[0])
        return last, new_pages

    def last_tick(self, history: Mark) -> int:
        return history[0]  # type: ignore[no-any-return]

    def evicted(self, node: Node, num_pages: int) -> None:
        self.remember(node, num_pages)

    def remember(self, node: Node, num_pages: int) -> list[Ghost]:
        """Leave ghosts of evicted pages; returns the ends of paths that are forgotten for them."""
        limit_pages = int(self.ghosts * self._capacity_pages)
        path_pages = node.mark[PATH]
        return self.remembered.remember(node, num_pages, path_pages, limit_pages, self.fold)

    def reset(self) -> None:
        self.remembered.clear()

    def broken_laws(self) -> list[str]:
        limit_pages = int(self.ghosts * self._capacity_pages)
        broken = self.remembered.broken_laws()
        if self.remembered.num_pages > limit_pages:
            broken.append(f"ghosts stand for {limit_pages} pages at most")
        return broken


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
