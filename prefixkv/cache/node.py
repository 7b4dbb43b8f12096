"""A node of the radix tree: a run of pages, and the marks of uses on it.

A use covers a prefix, so it leaves a single mark, on its last page. The history of a page is the
fold of all marks at it or below. Marks inside a node lie on `steps`, that of its last page in
`mark`. When pages go, their marks fold into the page above. So a use costs the same at every depth,
and splits and merges change no history. Depths are absolute, in pages from the root.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

Mark: TypeAlias = Any
"""A policy's record of a use. Only the policy knows what is in it."""

Fold: TypeAlias = Callable[[Mark, Mark], Mark]
"""Fold(upper or earlier, lower or later) -> the history that both make together."""

PAGE_ID_BYTES = 4

Packed: TypeAlias = bytes | bytearray
"""Tokens or page ids, four bytes each."""

NO_CHILDREN: dict[bytes, TreeNode] = {}
"""Shared by all leaves and never written to: a dictionary per leaf would cost a sixth of its
memory."""

DEAD = -1


@dataclass(slots=True, eq=False)
class Want:
    """A prefix that a request waits for, attached at the deepest page of it that the tree holds:
    page `depth` of `node`'s path.

    A page is wanted while some waiting prefix passes through it, whether that page was there when
    the prefix began to wait or came later. So a want moves down when pages along it are inserted
    and up when they are evicted.

    `place` is its key in `TreeNode.wants`: its depth, and the first page of it that is not in the
    tree. That page is shorter than a whole one (possibly empty) when the tree has all of the
    prefix. So an insertion finds the wants that it serves in one look-up, however many there are.
    """

    data: bytes  # packed tokens, of which whole pages count
    namespace: Hashable
    page_bytes: int
    node: TreeNode | None = None
    place: tuple[int, bytes] = (0, b"")

    @property
    def depth(self) -> int:
        return self.place[0]

    def attach(self, node: TreeNode, depth: int) -> None:
        # The page that the want asks for next. Empty or partial at its end: no insertion asks for
        # such a page, so a complete want stays where it is.
        start = depth * self.page_bytes
        self.node = node
        self.place = depth, self.data[start : start + self.page_bytes]
        if node.wants is None:
            node.wants = {}
        node.wants.setdefault(self.place, []).append(self)

    def detach(self) -> TreeNode:
        node, self.node = self.node, None
        assert node is not None
        assert node.wants is not None
        same_place = node.wants[self.place]
        same_place.remove(self)
        if not same_place:
            node.pop_wants(*self.place)
        return node


class TreeNode:
    """Pages `start` to `end` of one path. Only `RadixTree` and `RadixCache` change it.

    The methods here keep the node itself consistent. Counters, eviction queues and the policy are
    the tree's business, and so is the parent's table of children unless a method says otherwise.
    """

    __slots__ = (
        # Slots: a node per branch, so an instance dictionary would cost memory for each.
        "children", "end", "entry", "hashes", "key", "lock_ref", "mark", "only_child", "pages",
        "parent", "steps", "wants",
    )  # fmt: skip

    def __init__(self, key: Packed, pages: Packed, end: int, parent: TreeNode | None) -> None:
        # What the node owns: its tokens and the page ids that belong to them, equally many pages.
        self.key = key  # packed tokens, whole pages; a bytearray once it has grown or shrunk
        self.pages = pages  # packed int32 page ids, one a page
        self.end = end  # pages from the root to the end of this node; DEAD once it left the tree
        self.parent = parent  # None for a root, and for a node that left the tree
        self.children = NO_CHILDREN  # by the packed tokens of their first page
        # If there is exactly one: a walk compares with it and hashes nothing.
        self.only_child: TreeNode | None = None
        # The law of lock_ref. It makes lock and unlock stop at the first ancestor that is held
        # anyway: the count of an ancestor changes only when a child's count leaves or reaches 0.
        self.lock_ref = 0  # locks that end here + children with lock_ref > 0
        # The staircase of uses, see the top of the file. Every leaf of the tree has a mark.
        self.mark: Mark = None  # uses that end at the last page; None: none did
        # (depth, mark) of uses that end inside, ascending
        self.steps: list[tuple[int, Mark]] | None = None
        # Set and cleared by the queue alone. An entry found elsewhere in a queue is out of date.
        self.entry: Any = None  # this node's live place in an eviction queue
        self.wants: dict[tuple[int, bytes], list[Want]] | None = None  # by `Want.place`
        # (depth, hash) of the path down to there, ascending. See `RadixCache.keep_hash`.
        self.hashes: list[tuple[int, Any]] | None = None

    @property
    def start(self) -> int:
        """Pages from the root to the start of this node."""
        return self.parent.end if self.parent is not None else 0

    @property
    def num_pages(self) -> int:
        """Pages of this node itself, at least 1 (0 for a root)."""
        return len(self.pages) // PAGE_ID_BYTES

    @property
    def own_locks(self) -> int:
        """Locks that end on this node. O(children)."""
        return self.lock_ref - sum(child.lock_ref > 0 for child in self.children.values())

    def __lt__(self, other: TreeNode) -> bool:
        return self.end < other.end  # for heaps only: among equal ranks at most one entry is live

    def __repr__(self) -> str:
        return (
            f"<TreeNode pages {self.start}..{self.end} lock_ref={self.lock_ref} "
            f"children={len(self.children)}>"
        )

    # --- family ----------------------------------------------------------------------------------

    def adopt(self, first_page: bytes, child: TreeNode) -> None:
        """Make `child` the child that begins with `first_page`, replacing a former one."""
        # NO_CHILDREN is shared: the first child needs a dictionary of its own.
        if not self.children:
            self.children = {}
        self.children[first_page] = child
        self.only_child = child if len(self.children) == 1 else None

    def disown(self, first_page: bytes) -> None:
        """Remove the child that begins with `first_page`."""
        children = self.children
        del children[first_page]
        if not children:
            self.children, self.only_child = NO_CHILDREN, None
        elif len(children) == 1:
            (self.only_child,) = children.values()

    # --- the staircase ---------------------------------------------------------------------------

    def leave_mark(self, depth: int, mark: Mark, fold: Fold, supersedes: bool) -> None:
        """Record a use up to `depth`. Amortised O(1) if later marks supersede, else O(log steps).

        `supersedes`: the history of a page is that of its last use alone (`Policy.supersedes`).
        """
        # 1. The use ends at the last page: its mark has a field of its own.
        if depth == self.end:
            self.mark = mark if self.mark is None else fold(self.mark, mark)
            if supersedes:
                self.steps = None
            return
        # 2. It ends inside: put it among the steps, which stay sorted by depth, one per depth.
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
        """Return the mark at `depth`, or None if no use ended there. O(log steps)."""
        if depth == self.end:
            return self.mark
        steps = self.steps or []
        at = bisect_left(steps, (depth,))
        return steps[at][1] if at < len(steps) and steps[at][0] == depth else None

    # --- wants -----------------------------------------------------------------------------------

    def deepest_want(self, limit: int) -> int:
        """Return the depth, at most `limit`, of the deepest want here; or 0. O(places)."""
        return max((depth for depth, _ in self.wants or () if depth <= limit), default=0)

    def pop_wants(self, depth: int, next_page: bytes) -> list[Want]:
        """Detach and return the wants at `depth` that ask for this page next."""
        found = self.wants.pop((depth, next_page), []) if self.wants else []
        # No empty dictionary is left behind: `wants` is tested for truth.
        self.wants = self.wants or None
        return found

    def move_wants(self, target: TreeNode, from_depth: int, to_depth: int, limit: int) -> None:
        """Move the wants in (from_depth, to_depth] to `target`, none deeper than `limit`. If this
        node is the target they move up: pages were cut off its end."""
        for place in [place for place in self.wants or () if from_depth < place[0] <= to_depth]:
            for want in self.pop_wants(*place):
                want.attach(target, min(want.depth, limit))

    # --- cutting and joining ---------------------------------------------------------------------

    def split(self, depth: int, page_bytes: int) -> TreeNode:
        """Cut this node at `depth` and return the new upper half. The lower half stays this object.

        Locks and queue entries refer to the object and to its last page, which is the lower half's.
        So they stay right without being visited. A match that ended in the upper half finds it
        through `parent` (`RadixCache.locate`).

        The caller moves the wants.
        """
        parent = self.parent
        assert parent is not None
        num_pages = depth - parent.end
        upper_key, self.key = _cut(self.key, num_pages * page_bytes)
        upper_pages, self.pages = _cut(self.pages, num_pages * PAGE_ID_BYTES)
        upper = TreeNode(upper_key, upper_pages, depth, parent)
        self.parent = upper
        upper.children, upper.only_child = {bytes(self.key[:page_bytes]): self}, self
        # In this node's place among the parent's children.
        parent.children[bytes(upper_key[:page_bytes])] = upper
        if parent.only_child is self:
            parent.only_child = upper
        # No lock ends on the upper half, and this is its only child: by the law of lock_ref it
        # counts 1 if the child is held. The ancestors see no difference.
        upper.lock_ref = 1 if self.lock_ref else 0
        # Marks keep their depth. The one exactly at the cut ends at the upper half's last page.
        if self.steps:
            at = bisect_left(self.steps, (depth,))
            above, below = self.steps[:at], self.steps[at:]
            if below and below[0][0] == depth:
                upper.mark = below.pop(0)[1]
            upper.steps = above or None
            self.steps = below or None
        if self.hashes:
            at = bisect_left(self.hashes, (depth + 1,))
            upper.hashes, self.hashes = self.hashes[:at] or None, self.hashes[at:] or None
        return upper

    def absorb_parent(self) -> None:
        """Take over the pages and marks of the parent, which leaves the tree.

        The child's object survives because locks may end on it; none ends on the parent. The caller
        has moved the wants, and puts this node in the parent's place among the grandparent's
        children.
        """
        parent = self.parent
        assert parent is not None
        self.key = _join(parent.key, self.key)
        self.pages = _join(parent.pages, self.pages)
        # All of the parent's marks lie above this node's, so the lists are joined in order. Its
        # last page is now inside a node, so the mark there becomes a step.
        steps = parent.steps or []
        if parent.mark is not None:
            steps.append((parent.end, parent.mark))
        if self.steps:
            steps += self.steps
        self.steps = steps or None
        if parent.hashes:
            self.hashes = parent.hashes + (self.hashes or [])
        self.parent = parent.parent
        parent.leave_tree()

    def grow(self, key: bytes, pages: bytes, mark: Mark) -> None:
        """Append pages, with their first mark. Amortised O(new pages)."""
        # A bytearray grows in place: a conversation that goes on does not copy its past each turn.
        if type(self.key) is bytes:
            self.key = bytearray(self.key)
            self.pages = bytearray(self.pages)
        self.key += key
        self.pages += pages
        # Uses that ended at the old end now end inside the node. Before `end` moves: it is their
        # depth.
        if self.mark is not None:
            if self.steps is None:
                self.steps = []
            self.steps.append((self.end, self.mark))
        self.end += len(pages) // PAGE_ID_BYTES
        self.mark = mark

    def trim(self, num_pages: int, page_bytes: int, fold: Fold) -> bytes:
        """Cut `num_pages`, fewer than all, off the end and return their ids; their marks fold into
        the page above. O(cut)."""
        if type(self.key) is bytes:
            self.key = bytearray(self.key)
            self.pages = bytearray(self.pages)
        # Copy the ids out before the buffer shrinks.
        cut = num_pages * PAGE_ID_BYTES
        removed = bytes(self.pages[-cut:])
        del self.pages[-cut:]  # type: ignore[union-attr]
        del self.key[-num_pages * page_bytes :]  # type: ignore[union-attr]
        self.end -= num_pages
        if self.hashes and self.hashes[-1][0] > self.end:
            self.hashes = [one for one in self.hashes if one[0] <= self.end] or None
        # The page that is now last inherits the history of all that was below it, so that evicting
        # a tail forgets no use of the prefix. From below upwards: `fold` takes (upper, lower).
        steps = self.steps
        if steps:
            while steps and steps[-1][0] >= self.end:
                self.mark = fold(steps.pop()[1], self.mark)
            if not steps:
                self.steps = None
        return removed

    def leave_tree(self) -> None:
        """Clear this node: a match that still refers to it sees that it is dead (`end` is DEAD)."""
        # Less than every depth: `locate` then walks again from the root.
        self.end = DEAD
        self.parent = self.entry = self.steps = self.wants = self.only_child = self.hashes = None
        self.children = NO_CHILDREN


class Root(TreeNode):
    """The top of one namespace. It has no pages and is never evicted."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(b"", b"", 0, None)
        self.namespace = namespace


def root_of(node: TreeNode) -> Root:
    """O(nodes above)."""
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


def _cut(run: Packed, at: int) -> tuple[Packed, Packed]:
    """Copies only the smaller part of a bytearray. Bytes become a bytearray above the cut: what was
    cut once is usually joined and cut again for the next request, and then only the small part
    moves."""
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
    """Joins in place if `upper` is a bytearray: a short merge copies no long trunk."""
    if type(upper) is bytearray:
        upper += lower
        return upper
    return bytes(upper) + bytes(lower) if type(lower) is bytes else bytearray(upper) + lower
