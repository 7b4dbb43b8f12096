"""The nodes of a radix cache and every change of them: walking, splitting, merging, holding,
attaching new pages and taking pages out. `radix_cache.py` builds the public calls from these."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import ClassVar

import numpy as np

from prefixkv.cache.events import Change, ChangeLog, Inserted
from prefixkv.cache.eviction.plain import Guard, guarded
from prefixkv.cache.eviction.policy import (
    EvictionQueue,
    LeafHeap,
    Policy,
    Said,
    SessionHints,
    Use,
    forget,
    make_policy,
)
from prefixkv.cache.node import PAGE_ID_BYTES, Mark, Packed, Root, TreeNode, Want, root_of
from prefixkv.cache.radix_key import TOKEN_BYTES, common_pages
from prefixkv.cache.results import PrefixLock, packed_ids
from prefixkv.errors import InternalError, PageStateError, UserErrors
from prefixkv.paging import MAX_INDEX, Pages, Where
from prefixkv.settings import check_whole


class RadixTree:
    """Nodes, and the counters of their pages. One owner, no threads.

    Attributes:
        evictable_pages: pages in the tree that no lock covers.
        protected_pages: pages in the tree that a lock covers.
        orphan_pages: pages of paths that were locked when the tree was reset, and still are.
        num_nodes: nodes in the tree, roots not counted.
        evicted_pages: pages that were evicted so far.
        tick: number of uses so far.
        version: counts changes of content: pages added or taken out. Splits and merges do not
            count, so a result of the same version is still right.
    """

    hint_makers: ClassVar[list[Callable[[], SessionHints]]] = []
    """What makes a cache's hints, at the first of them. Without one they count for nothing."""

    def __init__(
        self, page_size: int, policy: str | Policy, pool_pages: int | None, errors: UserErrors
    ) -> None:
        check_whole("page_size", page_size, 1, MAX_INDEX)
        check_whole("pool_pages", pool_pages or 0, 0, MAX_INDEX)
        self.page_size = page_size
        chosen = make_policy(policy)
        queue = chosen.serve(page_size, pool_pages)
        self.pool_pages = pool_pages
        self.version = self.tick = 0
        self._page_bytes = page_size * TOKEN_BYTES
        # One root per namespace that has pages, locks or wants; others are dropped at once.
        self._roots: dict[Hashable, Root] = {}
        self.policy, self._queue = guarded(chosen, queue, errors, self._requeue)
        self._hints: list[SessionHints] = []  # what keeps them, from the first one on
        # Every evictable leaf stands in exactly one of two queues. `TreeNode.entry` says where.
        # Leaves on the path of a waiting request: they go last.
        self._wanted_queue = LeafHeap(self.policy.last_tick)
        self._wants: dict[int, Want] = {}  # by number
        # One flag per page of the pool: in the tree, or in an orphan. It refuses an id that is
        # inserted a second time, which would give two prompts the same memory.
        self._in_tree = None if pool_pages is None else np.zeros(pool_pages, np.bool_)
        # Of the readers that listen: recording costs nothing before there is one.
        self._logs: list[ChangeLog] = []
        self._now_s = 0.0  # the latest time that was given
        self.evictable_pages = self.protected_pages = self.orphan_pages = self.num_nodes = 0
        self.evicted_pages = 0

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages in the tree, without those of orphans (see `RadixCache.reset`)."""
        return self.evictable_pages + self.protected_pages

    def nodes(self) -> Iterator[TreeNode]:
        """Iterate over all nodes but the roots, each before its children. The tree must not change
        meanwhile."""
        stack: list[TreeNode] = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children:
                stack += node.children.values()

    # --- walking -------------------------------------------------------------------------------

    def _walk(self, node: TreeNode, data: bytes, at: int = 0) -> tuple[TreeNode, int]:
        """Follow `data` from the end of `node`, where `at` bytes have matched already. Returns the
        node in which the match ends, and the matched bytes, whole pages."""
        page_bytes = self._page_bytes
        # A partial last page can not match: no request may share a page that is still being
        # written.
        end = len(data)
        end -= end % page_bytes
        while at < end:
            # An only child is taken unseen, which saves hashing a page; the comparison below
            # decides. Else the children's first pages differ, so at most one can match.
            child = node.only_child or node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            key = child.key
            # The run differs, or `data` ends inside it. It ends the walk within the child, or above
            # it if not even the first page is equal (an only child that was taken unseen).
            if not data.startswith(key, at):
                if not data.startswith(memoryview(key)[:page_bytes], at):
                    return node, at
                high = min(len(key), end - at) // page_bytes
                return child, at + common_pages(data, key, 1, high, page_bytes, at) * page_bytes
            node = child
            at += len(key)
        return node, at

    # --- shape ---------------------------------------------------------------------------------

    def _root(self, namespace: Hashable) -> Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def _drop_root_if_idle(self, root: TreeNode) -> None:
        """Namespaces come and go with tenants: drop one without pages, locks or wants."""
        assert isinstance(root, Root)
        if not root.children and not root.lock_ref and not root.wants:
            del self._roots[root.namespace]
            root.leave_tree()
            for hints in self._hints:
                hints.forget(root.namespace)

    def _split(self, node: TreeNode, depth: int) -> TreeNode:
        """Split `node` so that a node ends at `depth`, and return that; `node` keeps the rest."""
        upper = node.split(depth, self._page_bytes)
        if node.wants:
            node.move_wants(upper, upper.start, depth, limit=depth)
        self.num_nodes += 1
        return upper

    def _merge_if_idle(self, node: TreeNode) -> None:
        """Merge a node with its only child unless a lock ends on it. The child's object stays."""
        # Not merged are
        # 1. roots and nodes that left the tree,
        # 2. leaves and forks,
        # 3. nodes on which a lock ends: the single child accounts for 1 of lock_ref at most.
        grandparent = node.parent
        child = node.only_child
        if grandparent is None or child is None or node.lock_ref > (child.lock_ref > 0):
            return
        # Read before the child takes the parent's key over. Out of the queue and without wants
        # before the object dies, or both would refer to a dead node.
        first_page = bytes(node.key[: self._page_bytes])
        forget(node)
        if node.wants:
            node.move_wants(child, node.start, node.end, limit=node.end)
        child.absorb_parent()
        grandparent.adopt(first_page, child)
        self.num_nodes -= 1

    def _subtree(self, top: TreeNode, held: bool = False) -> list[TreeNode]:
        """Return `top` and all below it, each before its children; with `held`, only those that a
        lock covers."""
        found = [top]
        # The list grows while it is iterated over: a breadth-first walk.
        for node in found:
            found += [child for child in node.children.values() if child.lock_ref or not held]
        return found

    # --- holding -------------------------------------------------------------------------------

    def _hold(self, node: TreeNode) -> None:
        """Add a holder to `node`, and count its pages as protected. By the law of lock_ref a held
        node counts 1 at its parent, so the walk up ends at the first node that was held before."""
        end = node.end
        node.lock_ref += 1
        while node.lock_ref == 1 and node.parent is not None:
            node = node.parent
            node.lock_ref += 1
        # `node` is now the deepest that was held before, or the root. What lies between was
        # evictable until now. Depths are absolute, so one subtraction counts all pages on the way.
        num_pages = end - node.end
        self.evictable_pages -= num_pages
        self.protected_pages += num_pages

    def _release(self, node: TreeNode) -> None:
        """Remove a holder: the reverse of `_hold`. The caller enqueues or merges the node."""
        end = node.end
        node.lock_ref -= 1
        while node.lock_ref == 0 and node.parent is not None:
            node = node.parent
            node.lock_ref -= 1
        num_pages = end - node.end
        self.evictable_pages += num_pages
        self.protected_pages -= num_pages

    # --- the policy -------------------------------------------------------------------------------

    def _new_queue(self) -> EvictionQueue:
        queue = self.policy.make_queue()
        for hints in self._hints:
            queue = hints.queue(self.policy, queue)
        return queue

    def _requeue(self) -> EvictionQueue:
        queue = self._queue = self._new_queue()
        for node in self.nodes():
            node.entry = None
            if not node.children and not node.lock_ref:
                queue.add(node)
        return queue

    def _hint(self, node: TreeNode, mark: Mark, said: Said) -> None:
        if not self._hints:
            self._hints = [make() for make in self.hint_makers]
            for hints in self._hints:
                self._queue = hints.queue(self.policy, self._queue)
        root = root_of(node)
        tick = self.policy.last_tick(mark)
        for hints in self._hints:
            hints.note(tick, root, said)

    # --- attaching -----------------------------------------------------------------------------

    def _check_new(self, ids: Pages, num_old: int) -> None:
        """Raise PageStateError if a page id, of those behind the first `num_old`, cannot be new."""
        if self._in_tree is None:
            return
        try:
            # All ids are looked up, also those of pages that the tree has: an id out of range is
            # refused wherever it stands.
            again = self._in_tree[ids.astype(np.intp)][num_old:]
        except IndexError:
            raise PageStateError(
                f"page id {ids.max()} is not below pool_pages {self.pool_pages}"
            ) from None
        if b"\1" in again.tobytes():
            new = ids[num_old + int(again.argmax())]
            raise PageStateError(f"page id {new} is in the tree already")

    def _attach(
        self,
        node: TreeNode,
        depth: int,
        key: bytes,
        pages: bytes,
        where: Where | None,
        use: Use,
        lock: PrefixLock | None,
    ) -> TreeNode:
        """Put new pages at `depth` of `node`, and return the node that ends with them. Nothing here
        may fail: the caller has checked everything.

        `where`: the pages as an index, if known. `lock` is what `_extend` will make hold
        them, or None: a node on which no other lock ends grows even if this one ends on it.
        """
        page_bytes, num_pages = self._page_bytes, len(pages) // PAGE_ID_BYTES
        *inner_marks, (_, mark) = self.policy.insertion_marks(use)
        fold = self.policy.fold
        # Where the new branch leaves an edge in the middle there has to be a node.
        if depth < node.end:
            node = self._split(node, depth)
        if inner_marks and inner_marks[0][0] == depth > 0:
            # The old pages' share of the use, on the last of them.
            node.leave_mark(*inner_marks.pop(0), fold, False)
        # Copied before `grow` appends to the same buffer.
        parent, pages_above = node, node.pages[-PAGE_ID_BYTES:]
        above = node.key[-page_bytes:] if self._hints else b""
        # A leaf may grow if no lock ends on it but the one that moves to the new end anyway: a lock
        # ends where its node ends. Roots have no pages, and a node with children would hide them.
        lock_ref = 1 if lock is not None and lock.node is node else 0
        if node.parent is not None and not node.children and node.lock_ref == lock_ref:
            node.grow(key, pages, mark)
        else:
            node = TreeNode(key, pages, depth + num_pages, parent)
            node.mark = mark
            parent.adopt(key[:page_bytes], node)
            self.num_nodes += 1
        # Those at `depth` or above were for the old pages.
        for at, inner_mark in inner_marks:
            if at > depth:
                node.leave_mark(at, inner_mark, fold, False)
        if parent.wants:
            if parent is node:
                # It may stand in the queue of wanted leaves, for a last page that is inside now.
                forget(node)
            # Wants that are attached here and ask for these pages move down.
            for want in parent.pop_wants(depth, key[:page_bytes]):
                at = depth * page_bytes
                same = common_pages(want.data, key, 1, num_pages, page_bytes, at)
                want.attach(node, depth + same)
        # A node that grew under `lock` is held already. A new node is not, and `_extend` moves its
        # pages from evictable to protected; it stays out of the queue, which it would leave at
        # once.
        if node.lock_ref:
            self.protected_pages += num_pages
        else:
            self.evictable_pages += num_pages
            if lock is None:
                self._queue.add(node)
        for hints in self._hints:
            hints.came(root_of(node), depth, above, key, num_pages)
        self.version += 1
        if self._in_tree is not None:
            self._in_tree[np.frombuffer(pages, np.int32) if where is None else where] = True
        if self._logs:
            self.note_change(inserted(node, pages_above, key, pages), num_pages)
        return node

    def note_change(self, change: Change, num_pages: int = 0) -> None:
        """Note a change for listeners, in the order of the cache's own."""
        for log in [*self._logs]:
            log.add(change, num_pages)

    # --- taking out ----------------------------------------------------------------------------

    def _victim(self) -> TreeNode | None:
        """Return the leaf that loses a page next. A wanted leaf goes last."""
        # 1. The policy's first, passing over leaves with a last page that a request waits for.
        # 2. Those wanted leaves, the least recently used first.
        while (node := self._queue.first(self._now_s)) is not None:
            if not (node.wants and node.deepest_want(node.end) == node.end):
                return node
            forget(node)
            # The queue does not know of wants, so a wanted leaf moves aside when it comes up.
            # `unwant` brings it back, and so does a later use.
            self._wanted_queue.add(node)
        leaf = self._wanted_queue.first()
        if leaf is None and isinstance(self.policy, Guard):
            lost = InternalError("its queue names no leaf, and some can be evicted")
            leaf = self.policy.fall(lost).first(self._now_s)
        return leaf

    def _evict_in_order(
        self, num_pages: int, merge_candidates: dict[TreeNode, None], only_worthless: bool = False
    ) -> list[Packed]:
        """Take exactly `num_pages` pages, coldest leaf first; return their packed ids. With
        `only_worthless` fewer: it ends where hints do not say of the next leaf that it goes first.

        Equals single steps that each take the last page of the first leaf. `merge_candidates` gets
        every node that lost a child but keeps others: the caller merges those.
        """
        taken: list[Packed] = []
        every_pages = self.policy.evicted_every_pages
        missing = num_pages
        while missing:
            node = self._victim()
            if node is None or (
                only_worthless and not any(hints.goes_first(node) for hints in self._hints)
            ):
                break
            # How far up this leaf may be cut before another leaf could be due: to its parent if all
            # its pages have one history, else to where the policy says, and not past a wanted page.
            parent, end, steps = node.parent, node.end, node.steps
            assert parent is not None
            floor = self._floor(node, end - missing) if steps else parent.end
            if node.wants:
                floor = max(floor, node.deepest_want(end - 1))
            count = end - floor
            if count > missing or count > self._queue.most_pages:
                count = min(missing, self._queue.most_pages)
            missing -= count
            # The policy remembers evicted paths at every so many pages. It reads the path from the
            # node, so it hears of it before the pages leave.
            if every_pages and end // every_pages != (end - count) // every_pages:
                self.policy.evicted(node, count)
            for hints in self._hints:
                hints.went(node, count)
            # The whole leaf goes: fold its steps into its one mark, which `_remove_leaf` hands to
            # the parent.
            if end - count == parent.end:
                for _, mark in reversed(steps or ()):
                    node.mark = self.policy.fold(mark, node.mark)
                taken.append(node.pages)
                self._remove_leaf(node, parent, merge_candidates)
            else:
                taken.append(self._trim(node, count))
        return taken

    def _floor(self, node: TreeNode, low: int) -> int:
        """Return the depth down to which a leaf with steps may be cut in one go; `low` is enough.
        Pages above a step have another history, so it may not be their turn, unless the policy says
        that ranks are equal."""
        steps, mark = node.steps, node.mark
        assert steps
        assert node.parent is not None
        if steps[-1][0] <= low:
            return steps[-1][0]
        floor = self.policy.floor(steps, mark, low)
        return node.parent.end if floor is None else floor

    def _trim(self, node: TreeNode, num_pages: int) -> bytes:
        end = node.end
        pages = node.trim(num_pages, self._page_bytes, self.policy.fold)
        # A want is attached at the deepest page of it that the tree has: now this leaf's end.
        if node.wants:
            node.move_wants(node, node.end, end, limit=node.end)
        self._queue.add(node)
        return pages

    def _remove_leaf(
        self, node: TreeNode, parent: TreeNode, merge_candidates: dict[TreeNode, None]
    ) -> None:
        parent.disown(bytes(node.key[: self._page_bytes]))
        self.num_nodes -= 1
        # Roots have no pages, so no history either.
        if parent.parent is not None:
            mark = parent.mark
            parent.mark = node.mark if mark is None else self.policy.fold(mark, node.mark)
        if node.wants:
            node.move_wants(parent, parent.end, node.end, limit=parent.end)
        # Out of the queue while the node still has its entry, which `leave_tree` clears.
        forget(node)
        node.leave_tree()
        # 1. The parent has other children: if one is left in the end, the caller merges.
        # 2. An empty root is dropped.
        # 3. A parent that became a leaf is evictable: the rest of this eviction may take it.
        if parent.children:
            merge_candidates[parent] = None
        elif parent.parent is None:
            self._drop_root_if_idle(parent)
        elif not parent.lock_ref:
            self._queue.add(parent)

    def _clear(self) -> list[Packed]:
        """Take out all that no lock covers. What is left is held: it keeps its own root, so that
        locks can still walk up, but no match finds that root again. Its wants and queue entries
        belong to the tree, which goes on without it."""
        freed: list[Packed] = []
        for root in self._roots.values():
            # The list holds only held nodes and the root, none of which leaves below: safe to
            # iterate over.
            for node in self._subtree(root, held=True):
                gone = [item for item in node.children.items() if not item[1].lock_ref]
                for first_page, child in gone:
                    node.disown(first_page)
                    for below in self._subtree(child):
                        freed.append(below.pages)
                        below.leave_tree()
                node.wants = node.entry = None
        self._roots.clear()
        # All that stood in the old ones is gone, or held.
        self._queue = self._new_queue()
        self._wanted_queue = LeafHeap(self.policy.last_tick)
        return freed

    def _release_orphan(self, node: TreeNode) -> Pages:
        """Release a path of before a reset, and return the pages without a lock. Unlike in
        `_release` a node without holders is freed: no match finds it."""
        freed: list[Packed] = []
        node.lock_ref -= 1
        while node.lock_ref == 0 and node.parent is not None:
            parent = node.parent
            freed.append(node.pages)
            parent.disown(bytes(node.key[: self._page_bytes]))
            node.leave_tree()
            node = parent
            node.lock_ref -= 1
        ids = self._taken_out(freed)
        self.orphan_pages -= len(ids)
        return ids

    def _taken_out(self, runs: list[Packed]) -> Pages:
        ids = packed_ids(runs)
        if self._in_tree is not None:
            self._in_tree[ids.astype(np.intp)] = False
        return ids


def inserted(node: TreeNode, pages_above: Packed, key: Packed, pages: Packed) -> Inserted:
    # Copies: nodes grow in place, and a reader may look at this later in another thread. The named
    # tuple's own `__new__` takes twice as long.
    change = root_of(node).namespace, bytes(pages_above[-PAGE_ID_BYTES:]), bytes(key), bytes(pages)
    return tuple.__new__(Inserted, change)
