"""Ghosts: records of evicted pages, so that a path that comes back is recognised.

Ghosts lie at whole blocks: one every `stride_blocks` on a path, and one at its last block. The
number of pages that they stand for is bounded, and the oldest go first. A ghost is found by its
depth and the tokens just before it. Two prefixes that agree in those are taken for one, which can
change the order of evictions and nothing else.

Source: the lists of evicted pages in 2Q (Johnson and Shasha, 1994).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from prefixkv.cache.eviction.policy import Policy, Use
from prefixkv.cache.node import Fold, Mark, TreeNode
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.settings import Count, Number, check_fields

UseCount: TypeAlias = Any
"""A policy's count of a page's uses: it compares with `<` and adds up."""

PATH_PAGES_FIELD = 4
"""Index in a mark of the number of pages that its use covered."""

NAME_BYTES = 16 * TOKEN_BYTES
"""A ghost's name covers the last page before it, and at least this many bytes."""

SEGMENT_BYTES = 8 * TOKEN_BYTES
"""A segment's name covers this many bytes before its beginning."""


Ghost: TypeAlias = tuple[Mark, int, int, int, int | None, bool]
"""(history, depth, stands for, name, segment, is end).

- history: of its page, as the policy keeps it.
- depth: pages from the root to its end.
- stands for: number of pages, for the bound on all ghosts.
- name: its key in `Ghosts`.
- segment: name of the segment in which it ends a path; None for a ghost at a stride.
- is end: True if it is the end, to the block, of the path that its page was last part of.

A plain tuple: making ghosts is most of what an eviction costs.
"""


class Ghosts:
    """A bounded queue of ghosts with a look-up by name. O(1) per ghost.

    A segment lies between two strides of a path and is named after its beginning. Ghosts of path
    ends are counted per segment, so a look-up tries only the blocks of a segment that has ghosts.
    """

    def __init__(self, page_bytes: int, block_pages: int, stride_blocks: int) -> None:
        self._page_bytes = page_bytes
        self._name_bytes = max(page_bytes, NAME_BYTES)
        self.block_pages = block_pages
        self.stride_pages = stride_blocks * block_pages
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()  # by name, the oldest first
        self._ends: dict[int, int] = {}  # by segment: ghosts of path ends in it, never 0
        self.num_pages = 0  # pages that all of them stand for
        # (packed path, old pages, ghosts found) of the last look-up, as long as no ghost has come
        # or gone: a request looks the same path up for its mark and for its insertion.
        self.last: tuple[bytes, int, list[Ghost]] | None = None

    def __len__(self) -> int:
        return len(self._ghosts)

    def clear(self) -> None:
        self._ghosts.clear()
        self._ends.clear()
        self.num_pages = 0
        self.last = None

    def add_ghosts(
        self, node: TreeNode, num_pages: int, path_pages: int, limit_pages: int, fold: Fold
    ) -> list[Ghost]:
        """Leave ghosts of the last `num_pages` of a leaf, and forget the oldest beyond
        `limit_pages`.

        `path_pages`: length of the path that these pages were last part of. Returns the forgotten
        ghosts that were ends of their paths.
        """
        end, stride = node.end, self.stride_pages
        low = end - num_pages
        self.last = None
        # The last whole block of the path is its end, as far as ghosts are concerned.
        last = path_pages - path_pages % self.block_pages
        # The history at a depth: the leaf's mark, folded with the steps at or below that depth.
        # Depths only fall from here on, so one pass over the steps serves all ghosts.
        history, steps = node.mark, node.steps
        at = len(steps) - 1 if steps is not None else -1
        ghosts, size, page_bytes = self._ghosts, self._name_bytes, self._page_bytes
        # The tokens that names are made of, copied once. Near the top of the node a name may reach
        # into its ancestors: that is the slow way, `_name_in_tree`.
        key = node.key
        bytes_above = end * page_bytes - len(key)
        cut = max(0, low * page_bytes - bytes_above - size)
        tail, bytes_above = bytes(key[cut:]), bytes_above + cut
        # 1. The end of the path, unless it lies at a stride. Then the strides, from below, so that
        #    a deeper ghost is older and forgotten before what it follows.
        places = range(end - end % stride, low, -stride)
        over = last % stride
        for depth in (last, *places) if low < last <= end and over else places:
            while at >= 0 and steps[at][0] >= depth:  # type: ignore[index]
                history = fold(steps[at][1], history)  # type: ignore[index]
                at -= 1
            at_byte = depth * page_bytes - bytes_above
            if at_byte >= size:
                name = hash((depth, tail[at_byte - size : at_byte]))
            else:
                name = self._name_in_tree(node, depth, size)
            # An older ghost of the same name goes first: it leaves its segment, and the new one is
            # the newest in the order of forgetting.
            if name in ghosts:
                self.forget(ghosts[name])
            stands_for, segment = depth % stride or stride, None
            if stands_for < stride:
                segment = self._name_in_tree(node, depth - over or self.block_pages, SEGMENT_BYTES)
                self._ends[segment] = self._ends.get(segment, 0) + 1
            ghosts[name] = (history, depth, stands_for, name, segment, depth == last)
            self.num_pages += stands_for
        # 2. Forget the oldest until the bound holds.
        forgotten: list[Ghost] = []
        while self.num_pages > limit_pages:
            ghost = next(iter(ghosts.values()))
            self.forget(ghost)
            if ghost[5]:
                forgotten.append(ghost)
        return forgotten

    def find(self, data: bytes, old_pages: int) -> list[Ghost]:
        """Return the ghosts of a packed path beyond its `old_pages`. O(found + stride)."""
        if not self._ghosts:
            return []
        # Identity of the bytes is enough, and costs nothing: a request keeps its packed tokens.
        if (same := self.last) is not None and same[0] is data and same[1] == old_pages:
            return same[2]
        get, size, page_bytes = self._ghosts.get, self._name_bytes, self._page_bytes
        end = len(data) // page_bytes
        block, stride = self.block_pages, self.stride_pages
        found: list[Ghost] = []
        # 1. From stride to stride, as long as there are ghosts.
        depth = old_pages - old_pages % stride + stride
        while depth <= end:
            at = depth * page_bytes
            ghost = get(hash((depth, data[at - size if at > size else 0 : at])))
            if ghost is None:
                break
            found.append(ghost)
            depth += stride
        # 2. The end of the path is less than a stride further. Its blocks are tried from below only
        # if the segment has such a ghost at all.
        begin = depth - stride
        low = old_pages if old_pages > begin else begin
        high = min(depth - block, end - end % block)
        if high > low:
            top = begin or block
            at = top * page_bytes
            segment = data[at - SEGMENT_BYTES if at > SEGMENT_BYTES else 0 : at]
            for last in range(high, low, -block) if hash((top, segment)) in self._ends else ():
                at = last * page_bytes
                ghost = get(hash((last, data[at - size if at > size else 0 : at])))
                if ghost is not None:
                    found.append(ghost)
                    break
        self.last = data, old_pages, found
        return found

    def broken_laws(self) -> list[str]:
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

    def forget(self, ghost: Ghost) -> None:
        _, _, stands_for, name, segment, _ = ghost
        del self._ghosts[name]
        self.num_pages -= stands_for
        self.last = None
        if segment is not None:
            self._ends[segment] -= 1
            if not self._ends[segment]:
                del self._ends[segment]

    def _name_in_tree(self, node: TreeNode, depth: int, num_bytes: int) -> int:
        """Return a name on the path that `node` ends. O(nodes that hold the bytes)."""
        key = node.key
        end = len(key) - (node.end - depth) * self._page_bytes
        if end >= num_bytes:
            return hash((depth, bytes(key[end - num_bytes : end])))
        # Up to the node in which `depth` lies, then further up until there are bytes enough.
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
    """The base of policies that remember evicted pages.

    Their marks are tuples that begin with the tick of the use, and hold at `PATH_PAGES_FIELD` the
    number of pages that the use covered.

    Args:
        ghosts: pages that the ghosts may stand for, as a multiple of the pool (or of the tree, at
            its largest, if the size of the pool is not known).
        block_tokens, stride_blocks: distance between ghosts.

    Raises ConfigError: a setting below its bound.
    """

    ghosts: Number = 5.0
    block_tokens: Count = 512
    stride_blocks: Count = 8

    def __post_init__(self) -> None:
        check_fields(self)

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._page_tokens = max(1, int(page_size * self.token_scale))
        self._capacity_pages = pool_pages or 0
        self.evicted_every_pages = max(1, self.block_tokens // self._page_tokens)
        self.remembered = Ghosts(self._page_bytes, self.evicted_every_pages, self.stride_blocks)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        # Marks first: they are worked out from the ghosts, which go once their pages are back.
        found = self.remembered.find(use.data, use.old_pages)
        marks = self.marks_of_new(use, found)
        for ghost in found:
            self.remembered.forget(ghost)
        return marks

    @abstractmethod
    def marks_of_new(self, use: Use, found: list[Ghost]) -> Sequence[tuple[int, Mark]]:
        """Return `insertion_marks`; `found` are the ghosts of the new pages."""

    def goes_on(self, use: Use, found: list[Ghost]) -> tuple[Mark | None, int]:
        """Return the last use that this first use of a request continues, or None, and the number
        of new pages.

        It continues a use if it goes on where the last path that held the known pages ended. If
        `found`, the ghosts beyond the old pages, is not empty, that end is known to the block only.
        """
        self._capacity_pages = max(self._capacity_pages, use.tree_pages)
        # Known are the pages in the tree, or those up to the deepest ghost.
        known_pages, last = use.old_pages, use.before
        if found:
            last, known_pages = found[-1][:2]
        new_pages = len(use.data) // self._page_bytes - known_pages
        if last is None:
            return None, new_pages
        end: int = last[PATH_PAGES_FIELD]
        if found:
            end -= end % self.evicted_every_pages
        # The known pages end elsewhere: this path parts from that one, which may still continue.
        if end != known_pages:
            return None, new_pages
        return last, new_pages

    def last_tick(self, history: Mark) -> int:
        return history[0]  # type: ignore[no-any-return]

    def evicted(self, node: TreeNode, num_pages: int) -> None:
        self.add_ghosts(node, num_pages)

    def add_ghosts(self, node: TreeNode, num_pages: int) -> list[Ghost]:
        """Leave ghosts of evicted pages, and return the path ends that are forgotten for them."""
        limit_pages = int(self.ghosts * self._capacity_pages)
        path_pages = node.mark[PATH_PAGES_FIELD]
        return self.remembered.add_ghosts(node, num_pages, path_pages, limit_pages, self.fold)

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
    totals: list[tuple[int, UseCount]],
    one: UseCount,
    nothing: UseCount,
    less: Callable[[UseCount, UseCount], UseCount],
) -> list[tuple[int, UseCount]]:
    """Return (depth, count added by a mark there), rising, so that each page whose ghost came back
    gets its total.

    New pages down to a ghost have the ghost's count besides this visit, those below the last ghost
    have this visit. The old pages have at most this visit: what was added for the new ones is
    subtracted where the old ones end.

    Args:
        totals: (depth, count) of the ghosts found, this visit included, rising in depth.
        one, nothing: the count of this visit, and none.
        less: the first count without the second.
    """
    if not totals or totals[-1][0] < use.num_pages:
        totals.append((use.num_pages, one))
    # From below: a mark counts for all pages above it too, so each step adds only the difference.
    steps = []
    below = nothing  # what marks further down add to a page already
    for depth, total in [*reversed(totals), (use.old_pages, one if use.visit else nothing)]:
        # A ghost with a lower total than what lies below it is left out: counts do not fall
        # upwards.
        if depth == use.old_pages or total > below:
            steps.append((depth, less(total, below)))
            below = total
    return steps[::-1]
