"""A node of the radix tree: a run of pages, and the staircase of uses over them.

A use covers a prefix, so it is enough to leave one mark on the last page it covers: the history of
a page is the fold of all marks at it or below it. Marks inside a node lie on `steps`, the one at
its last page in `mark`; between two marks every page has the same history (a tread). When pages go,
their marks fold into the page above. So nothing is copied up the path at a use, a branch may be
merged or split anywhere without changing any page's history, and a use costs the same at every
depth.

Depths are absolute, in pages from the root, so that splitting and merging renumber nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

Mark: TypeAlias = Any
"""What a policy keeps about a use; the policy alone knows what is in it."""

Fold: TypeAlias = Callable[[Mark, Mark], Mark]
"""Fold(upper or earlier, lower or later) -> the history that both make together."""

PAGE_ID_BYTES = 4

Packed: TypeAlias = bytes | bytearray
"""Tokens or page ids, four bytes each."""

NO_CHILDREN: dict[bytes, Node] = {}
"""Shared by all leaves, never written to: a dictionary a leaf would cost a sixth of its memory."""

DEAD = -1


class Want:
    """A prefix that a request waits for. It hangs at page `depth` of `node`'s path (see
    `wants.py`).

    `place` is where it hangs in `Node.wants`: its depth, and the first page of it that is not in
    the tree; less than a page when all of it is.
    """

    __slots__ = ("data", "namespace", "node", "page_bytes", "place")

    node: Node | None
    place: tuple[int, bytes]

    def __init__(self, data: bytes, namespace: Hashable, page_bytes: int) -> None:
        self.data = data  # packed tokens, of which whole pages count
        self.namespace = namespace
        self.page_bytes = page_bytes

    @property
    def depth(self) -> int:
        return self.place[0]


class Node:
    """Pages `start` to `end` of one path. The policy and the counters are `RadixCache`'s."""

    __slots__ = (
        "children", "end", "entry", "key", "lock_ref", "mark", "only_child", "pages", "parent",
        "steps", "wants",
    )  # fmt: skip

    def __init__(self, key: Packed, pages: Packed, end: int, parent: Node | None) -> None:
        self.key = key  # packed tokens, whole pages; a bytearray once it has grown or shrunk
        self.pages = pages  # packed int32 page ids, one a page
        self.end = end  # pages from the root to the end of this node; DEAD once it left the tree
        self.parent = parent  # None for a root, and for a node that left the tree
        self.children = NO_CHILDREN  # by the packed tokens of their first page
        # If there is exactly one: a walk compares with it and hashes nothing.
        self.only_child: Node | None = None
        self.lock_ref = 0  # locks that end here + children with lock_ref > 0
        self.mark: Mark = None  # uses that end at the last page; None: none did
        # (depth, mark) of uses that end inside, ascending
        self.steps: list[tuple[int, Mark]] | None = None
        self.entry: Any = None  # this node's live place in an eviction queue
        self.wants: dict[tuple[int, bytes], list[Want]] | None = None  # see wants.py

    @property
    def start(self) -> int:
        """Pages from the root to the start of this node."""
        return self.parent.end if self.parent is not None else 0

    @property
    def num_pages(self) -> int:
        return len(self.pages) // PAGE_ID_BYTES

    @property
    def own_locks(self) -> int:
        """How many locks end here. O(children)."""
        return self.lock_ref - sum(child.lock_ref > 0 for child in self.children.values())

    def __lt__(self, other: Node) -> bool:
        return self.end < other.end  # for heaps only: among equal ranks at most one entry is live

    def __repr__(self) -> str:
        return (
            f"<Node pages {self.start}..{self.end} lock_ref={self.lock_ref} "
            f"children={len(self.children)}>"
        )

    # --- family ----------------------------------------------------------------------------------

    def adopt(self, first_page: bytes, child: Node) -> None:
        """Put a child where its first page says, maybe in another's place."""
        if not self.children:
            self.children = {}
        self.children[first_page] = child
        self.only_child = child if len(self.children) == 1 else None

    def disown(self, first_page: bytes) -> None:
        children = self.children
        del children[first_page]
        if not children:
            self.children, self.only_child = NO_CHILDREN, None
        elif len(children) == 1:
            (self.only_child,) = children.values()

    # --- the staircase ---------------------------------------------------------------------------

    def leave_mark(self, depth: int, mark: Mark, fold: Fold, supersedes: bool) -> None:
        """Note a use that ends at `depth`. Amortised O(1) when later marks supersede, else O(log
        steps)."""
        if depth == self.end:
            self.mark = mark if self.mark is None else fold(self.mark, mark)
            if supersedes:
                self.steps = None
            return
        steps = self.steps
        if steps is None:
            self.steps = [(depth, mark)]
            return
        at = bisect_left(steps, (depth,))
        if at < len(steps) and steps[at][0] == depth:
            mark = fold(steps[at][1], mark)
            del steps[at]
        if supersedes:
            del steps[:at]  # whatever covered less, earlier, is covered by this one
            at = 0
        steps.insert(at, (depth, mark))

    def mark_at(self, depth: int) -> Mark:
        """The mark at `depth`; None if there is none. O(log steps)."""
        if depth == self.end:
            return self.mark
        steps = self.steps or []
        at = bisect_left(steps, (depth,))
        return steps[at][1] if at < len(steps) and steps[at][0] == depth else None

    # --- cutting and joining ---------------------------------------------------------------------

    def split(self, depth: int, page_bytes: int) -> Node:
        """Cut at `depth`. The lower half stays this object, with its children and locks; returns
        the new upper half.

        The caller puts the upper half in this node's place among the parent's children, and moves
        the wants.
        """
        num_pages = depth - self.start
        upper_key, self.key = _cut(self.key, num_pages * page_bytes)
        upper_pages, self.pages = _cut(self.pages, num_pages * PAGE_ID_BYTES)
        upper = Node(upper_key, upper_pages, depth, self.parent)
        self.parent = upper
        upper.adopt(bytes(self.key[:page_bytes]), self)
        upper.lock_ref = 1 if self.lock_ref else 0
        if self.steps:
            at = bisect_left(self.steps, (depth,))
            above, below = self.steps[:at], self.steps[at:]
            if below and below[0][0] == depth:
                upper.mark = below.pop(0)[1]
            upper.steps = above or None
            self.steps = below or None
        return upper

    def absorb_parent(self) -> None:
        """Take over the parent's pages and marks; the parent, whose only child this is, leaves the
        tree.

        The caller puts this node in the parent's place among the grandparent's children, and has
        moved the wants.
        """
        parent = self.parent
        assert parent is not None
        self.key = _join(parent.key, self.key)
        self.pages = _join(parent.pages, self.pages)
        steps = parent.steps or []
        if parent.mark is not None:
            steps.append((parent.end, parent.mark))
        if self.steps:
            steps += self.steps
        self.steps = steps or None
        self.parent = parent.parent
        parent.leave_tree()

    def grow(self, key: bytes, pages: bytes, mark: Mark) -> None:
        """Append pages at the end, with their first mark. O(of the new), amortised."""
        if type(self.key) is bytes:
            self.key = bytearray(self.key)
            self.pages = bytearray(self.pages)
        self.key += key
        self.pages += pages
        if self.mark is not None:
            if self.steps is None:
                self.steps = []
            self.steps.append((self.end, self.mark))
        self.end += len(pages) // PAGE_ID_BYTES
        self.mark = mark

    def trim(self, num_pages: int, page_bytes: int, fold: Fold) -> bytes:
        """Cut pages off the end, fold their marks into the page above; returns the ids. O(cut)."""
        if type(self.key) is bytes:
            self.key = bytearray(self.key)
            self.pages = bytearray(self.pages)
        cut = num_pages * PAGE_ID_BYTES
        removed = bytes(self.pages[-cut:])
        del self.pages[-cut:]  # type: ignore[union-attr]
        del self.key[-num_pages * page_bytes :]  # type: ignore[union-attr]
        self.end -= num_pages
        steps = self.steps
        if steps:
            while steps and steps[-1][0] >= self.end:
                self.mark = fold(steps.pop()[1], self.mark)
            if not steps:
                self.steps = None
        return removed

    def leave_tree(self) -> None:
        """Let go of everything, so that a match that still has this object sees that it is dead."""
        self.end = DEAD
        self.parent = self.entry = self.steps = self.wants = self.only_child = None
        self.children = NO_CHILDREN


class Root(Node):
    """The top of one namespace: no pages, never evicted."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(b"", b"", 0, None)
        self.namespace = namespace


def _cut(run: Packed, at: int) -> tuple[Packed, Packed]:
    """Both parts of a run. Of a bytearray only the lesser one is copied, and it mostly is one: what
    was cut once is joined again, and cut anew for the next request."""
    if type(run) is bytes:
        return bytearray(memoryview(run)[:at]), run[at:]
    if 2 * at < len(run):
        upper = run[:at]
        del run[:at]  # type: ignore[union-attr]
        return upper, run
    lower = run[at:]
    del run[at:]  # type: ignore[union-attr]
    return run, lower


def _join(upper: Packed, lower: Packed) -> Packed:
    """`upper` + `lower`, in place if `upper` is a bytearray: a short merge copies no long trunk."""
    if type(upper) is bytearray:
        upper += lower
        return upper
    return bytes(upper) + bytes(lower) if type(lower) is bytes else bytearray(upper) + lower
