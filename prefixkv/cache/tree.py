"""The nodes of a radix cache, and everything that changes them: walking, splitting and merging,
holding, attaching new pages and taking pages out. `radix_cache.py` says what they are for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from prefixkv.cache import wants
from prefixkv.cache.events import EventLog
from prefixkv.cache.eviction.hints import HintedQueue, Hints
from prefixkv.cache.eviction.policy import Policy, Use, make_policy
from prefixkv.cache.eviction.queues import EvictionQueue, LeafHeap, forget
from prefixkv.cache.node import PAGE_ID_BYTES, Mark, Node, Packed, Root, Want
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.cache.results import PrefixLock, packed_ids
from prefixkv.errors import PageStateError, UserErrors
from prefixkv.paging import MAX_INDEX, Pages, Where
from prefixkv.settings import check_whole


def _no_rank(mark: Mark) -> int:
    return 0


class RadixTree:
    """Nodes, and all that is counted of them. One owner, no threads.

    Attributes:
        evictable_pages: pages in the tree that no lock covers.
        protected_pages: pages in the tree that a lock covers.
        orphan_pages: pages of paths that were locked when the tree was reset, and still are.
        num_nodes: nodes in the tree, roots not counted.
        tick: how many uses there were.
        version: of the content: counts what adds or takes pages, not splits and merges.
    """

    def __init__(
        self, page_size: int, policy: str | Policy, pool_pages: int | None, errors: UserErrors
    ) -> None:
        self.errors = errors  # of the policy
        check_whole("page_size", page_size, 1, MAX_INDEX)
        check_whole("pool_pages", pool_pages or 0, 0, MAX_INDEX)
        self.page_size = page_size
        self.policy = make_policy(policy)
        self.policy.serve(page_size, pool_pages)
        self.pool_pages = pool_pages
        self.version = self.tick = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Hashable, Root] = {}
        try:
            self._queue: EvictionQueue = self.policy.make_queue()
        except BaseException:
            self.policy.release()
            raise
        self._hints: Hints | None = None  # from the first one on
        # Leaves on the path of a waiting request: they go last.
        self._wanted_queue = LeafHeap(self.policy.last_tick)
        # Evictable leaves that the policy did not rank when asked: they go before all others.
        self._strays = LeafHeap(_no_rank)
        self._wants: dict[int, Want] = {}  # by number
        self._in_tree = None if pool_pages is None else np.zeros(pool_pages, np.bool_)
        self._log: EventLog | None = None
        self._now_s = 0.0  # the latest time that was given
        self.evictable_pages = self.protected_pages = self.orphan_pages = self.num_nodes = 0
        self._inserted_pages = self._evicted_pages = 0

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages in the tree. Those of orphans (see `reset`) are not."""
        return self.evictable_pages + self.protected_pages

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, each before its children. Do not change the tree meanwhile."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children:
                stack += node.children.values()

    # --- walking -------------------------------------------------------------------------------

    def _walk(self, node: Node, data: bytes, at: int = 0) -> tuple[Node, int]:
        """Follow `data` down from the end of a node, where `at` bytes of it have matched.

        Returns the node in which the match ends, and the bytes that matched (whole pages).
        """
        page_bytes = self._page_bytes
        end = len(data)
        end -= end % page_bytes
        while at < end:
            child = node.only_child or node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            key = child.key
            if not data.startswith(key, at):
                common = self._common_bytes(data, at, end, key)
                return (child, at + common) if common else (node, at)
            node = child
            at += len(key)
        return node, at

    def _common_bytes(self, data: bytes, at: int, end: int, key: bytes | bytearray) -> int:
        """How many bytes of `key`, in whole pages, `data` has at `at`.

        A binary search whose probes never look at the same bytes twice when they match: memcmp in
        all but name.
        """
        page_bytes = self._page_bytes
        view = memoryview(key)
        high = min(len(key), end - at)
        if not data.startswith(view[:page_bytes], at):
            return 0
        if data.startswith(view[page_bytes:high], at + page_bytes):
            return high
        # Equal up to low_page, different somewhere before high_page.
        low_page, high_page = 1, high // page_bytes
        while high_page - low_page > 1:
            middle = (low_page + high_page) // 2
            if data.startswith(
                view[low_page * page_bytes : middle * page_bytes], at + low_page * page_bytes
            ):
                low_page = middle
            else:
                high_page = middle
        return low_page * page_bytes

    # --- shape ---------------------------------------------------------------------------------

    def _root(self, namespace: Hashable) -> Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def _drop_root_if_idle(self, root: Node) -> None:
        """Namespaces come and go; an empty one leaves nothing behind."""
        assert isinstance(root, Root)
        if not root.children and not root.lock_ref and not root.wants:
            del self._roots[root.namespace]
            root.leave_tree()

    def _split(self, node: Node, depth: int) -> Node:
        """Make `depth` the end of a new node, and return it; `node` keeps what lies below."""
        upper = node.split(depth, self._page_bytes)
        assert upper.parent is not None
        upper.parent.adopt(bytes(upper.key[: self._page_bytes]), upper)
        if node.wants:
            wants.move(node, upper, upper.start, depth, limit=depth)
        self.num_nodes += 1
        return upper

    def _merge_if_idle(self, node: Node) -> None:
        """Merge a node with its only child, if no lock ends on it. The node's object dies, the
        child's goes on."""
        grandparent = node.parent
        child = node.only_child
        if grandparent is None or child is None or node.lock_ref > (child.lock_ref > 0):
            return
        first_page = bytes(node.key[: self._page_bytes])
        forget(node)
        if node.wants:
            wants.move(node, child, node.start, node.end, limit=node.end)
        child.absorb_parent()
        grandparent.adopt(first_page, child)
        self.num_nodes -= 1

    def _subtree(self, top: Node, held: bool = False) -> list[Node]:
        """`top` and all below it, or only what is held, each before its children."""
        found = [top]
        for node in found:  # grows meanwhile
            found += [child for child in node.children.values() if child.lock_ref or not held]
        return found

    # --- holding -------------------------------------------------------------------------------

    def _hold(self, node: Node) -> None:
        """One more holder of `node`. The walk up ends at the first node that is held already: the
        law of lock_ref."""
        end = node.end
        node.lock_ref += 1
        while node.lock_ref == 1 and node.parent is not None:
            node = node.parent
            node.lock_ref += 1
        num_pages = end - node.end
        self.evictable_pages -= num_pages
        self.protected_pages += num_pages

    def _release(self, node: Node) -> None:
        end = node.end
        node.lock_ref -= 1
        while node.lock_ref == 0 and node.parent is not None:
            node = node.parent
            node.lock_ref -= 1
        num_pages = end - node.end
        self.evictable_pages += num_pages
        self.protected_pages -= num_pages

    # --- what the policy says; it may raise -------------------------------------------------------

    def _fold(self, upper: Mark, lower: Mark) -> Mark:
        if upper is None or lower is None:  # a mark is missing that the policy did not say
            return upper if lower is None else lower
        try:
            return self.policy.fold(upper, lower)
        except Exception as error:
            self.errors.caught(error)
            return lower

    def _marks(self, use: Use) -> list[tuple[int, Mark]]:
        """What the insertion of new pages leaves, the last of it on the last page."""
        try:
            marks = list(self.policy.insertion_marks(use))
            if marks[-1][0] == use.num_pages and marks[0][0] >= use.old_pages:
                return marks
            raise ValueError(f"insertion_marks of {use.num_pages} pages are {marks}")
        except Exception as error:
            self.errors.caught(error)
            return [(use.num_pages, None)]

    def _enqueue(self, leaf: Node) -> None:
        """It is an evictable leaf now, or has another history."""
        if leaf.mark is None:  # the policy did not say what its use leaves, so it has no rank
            forget(leaf)
            self._strays.add(leaf)
            return
        try:
            self._queue.add(leaf)
        except Exception as error:
            self.errors.caught(error)
            if leaf.entry is None:
                self._strays.add(leaf)

    def _hint(self, mark: Mark, continues: bool) -> None:
        """The session of the use that left this mark goes on, or is over."""
        try:
            tick = self.policy.last_tick(mark)
            if self._hints is None:
                hints = Hints(self.policy.promise_s, self.policy.tells_returns)
                if self.policy.tells_returns:
                    self.policy.came_back = hints.came_back
                self._queue = HintedQueue(self.policy, hints, self._queue)
                self._hints = hints
            self._hints.say(tick, continues, self._now_s)
        except Exception as error:
            self.errors.caught(error)

    def _expect(self, num_leaves: int) -> None:
        try:
            self._queue.expect(num_leaves, self._now_s)
        except Exception as error:
            self.errors.caught(error)

    # --- attaching -----------------------------------------------------------------------------

    def _new_pages(self, ids: Pages, num_old: int) -> Pages:
        """The ids but the first `num_old`. Raises PageStateError if one cannot be new."""
        new = ids[num_old:]
        if self._in_tree is not None:
            try:
                in_tree = self._in_tree[ids.astype(np.intp)]
            except IndexError:
                raise PageStateError(
                    f"page id {ids.max()} is not below pool_pages {len(self._in_tree)}"
                ) from None
            again = in_tree[num_old:]
            if b"\1" in again.tobytes():
                raise PageStateError(f"page id {new[int(again.argmax())]} is in the tree already")
        return new

    def _attach(
        self,
        node: Node,
        depth: int,
        key: bytes,
        pages: bytes,
        where: Where | None,
        use: Use,
        lock: PrefixLock | None,
    ) -> Node:
        """Put new pages at `depth` of `node`, and return the node that ends with them. `where`: the
        same pages as an index, if the caller has one. `lock` will hold them; where nothing else
        does, the node that it ends on grows."""
        fold, page_bytes, num_pages = self._fold, self._page_bytes, len(pages) // PAGE_ID_BYTES
        *inner_marks, (_, mark) = self._marks(use)
        if depth < node.end:
            node = self._split(node, depth)
        if inner_marks and inner_marks[0][0] == depth > 0:
            node.leave_mark(*inner_marks.pop(0), fold, False)  # what the old pages get
        parent, pages_above = node, node.pages[-PAGE_ID_BYTES:]
        lock_ref = 1 if lock is not None and lock.node is node else 0
        if node.parent is not None and not node.children and node.lock_ref == lock_ref:
            node.grow(key, pages, mark)  # a branch that goes on is the same branch
        else:
            node = Node(key, pages, depth + num_pages, parent)
            node.mark = mark
            parent.adopt(key[:page_bytes], node)
            self.num_nodes += 1
        for at, inner_mark in inner_marks:
            if at > depth:
                node.leave_mark(at, inner_mark, fold, False)
        if parent.wants:
            if parent is node:
                forget(node)  # it may stand among the wanted, and ends elsewhere now
            # Wants that hang here and ask for these pages move down.
            for want in wants.served_by(parent, depth, key[:page_bytes]):
                whole = len(want.data) - len(want.data) % page_bytes
                common = self._common_bytes(want.data, depth * page_bytes, whole, key)
                wants.hang(want, node, depth + common // page_bytes)
        if node.lock_ref:
            self.protected_pages += num_pages
        else:
            self.evictable_pages += num_pages
            if lock is None:
                self._enqueue(node)
        self._inserted_pages += num_pages
        self.version += 1
        if self._in_tree is not None:
            if where is None:
                where = np.frombuffer(pages, np.int32).astype(np.intp)
            self._in_tree[where] = True
        if self._log is not None:
            self._log_stored(node, pages_above, key, pages)
        return node

    def _log_stored(self, node: Node, pages_above: Packed, key: Packed, pages: Packed) -> None:
        assert self._log is not None
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root)
        self._log.stored(node.namespace, pages_above, key, pages)

    # --- taking out ----------------------------------------------------------------------------

    def _victim(self) -> Node | None:
        """The leaf whose last page goes first; a wanted one only when there is no other."""
        if (node := self._strays.first()) is not None:
            return node
        try:
            while (node := self._queue.first(self._now_s)) is not None:
                if not (node.wants and wants.deepest(node, node.end) == node.end):
                    return node
                forget(node)
                self._wanted_queue.add(node)
            return self._wanted_queue.first()
        except Exception as error:
            self.errors.caught(error)
        for node in self.nodes():  # without an order: all that may go, until they are used again
            if not node.children and not node.lock_ref:
                forget(node)
                self._strays.add(node)
        return self._strays.first()

    def _evict_in_order(self, num_pages: int, thinned: dict[Node, None]) -> list[Packed]:
        taken: list[Packed] = []
        ghost_pages = self.policy.ghost_pages
        self._expect(num_pages * self.num_nodes // self.evictable_pages)
        missing = num_pages
        while missing:
            node = self._victim()
            if node is None:
                break
            parent, end, steps = node.parent, node.end, node.steps
            assert parent is not None
            floor = self._floor(node, end - missing) if steps else parent.end
            if node.wants:
                floor = max(floor, wants.deepest(node, end - 1))
            count = end - floor
            if count > missing:
                count = missing
            missing -= count
            if ghost_pages and end // ghost_pages != (end - count) // ghost_pages:
                try:
                    self.policy.evicted(node, count)
                except Exception as error:
                    self.errors.caught(error)
            if end - count == parent.end:
                for _, mark in reversed(steps or ()):
                    node.mark = self._fold(mark, node.mark)
                taken.append(node.pages)
                self._remove_leaf(node, parent, thinned)
            else:
                taken.append(self._trim(node, count))
        self._expect(0)
        return taken

    def _floor(self, node: Node, low: int) -> int:
        """Down to which depth a leaf with steps may be cut, at least to `low` if that is one tread.
        Pages above have another history, so it may not be their turn."""
        steps, mark = node.steps, node.mark
        assert steps
        assert node.parent is not None
        if mark is None or steps[-1][0] <= low:
            return steps[-1][0]
        try:
            floor = self.policy.floor(steps, mark, low)
        except Exception as error:
            self.errors.caught(error)
            return steps[-1][0]
        return node.parent.end if floor is None else floor

    def _trim(self, node: Node, num_pages: int) -> bytes:
        """Cut pages off the end of a leaf; returns their ids."""
        end = node.end
        pages = node.trim(num_pages, self._page_bytes, self._fold)
        if node.wants:
            wants.move(node, node, node.end, end, limit=node.end)
        self._enqueue(node)
        return pages

    def _remove_leaf(self, node: Node, parent: Node, thinned: dict[Node, None]) -> None:
        """Take a leaf out; what is known of its uses goes to the page above."""
        parent.disown(bytes(node.key[: self._page_bytes]))
        self.num_nodes -= 1
        if parent.parent is not None:
            mark = parent.mark
            parent.mark = node.mark if mark is None else self._fold(mark, node.mark)
        if node.wants:
            wants.move(node, parent, parent.end, node.end, limit=parent.end)
        self._leave_queue(node)
        node.leave_tree()
        if parent.children:
            thinned[parent] = None
        elif parent.parent is None:
            self._drop_root_if_idle(parent)
        elif not parent.lock_ref:
            self._enqueue(parent)

    def _leave_queue(self, leaf: Node) -> None:
        """`_victim` chose it. A queue whose ranks do not compare may raise here."""
        try:
            leaf.entry[2].take(leaf)
        except Exception as error:
            self.errors.caught(error)

    def _order_is_free(self) -> bool:
        """Whether evicting everything leaves the same in any order: it does if no ghosts are left.

        Whether events are recorded must not matter: of several ranks only one records them, and
        marks that fold in another order may round to other floats.
        """
        ghost_pages = self.policy.ghost_pages
        return not (ghost_pages and any(node.end >= ghost_pages for node in self.nodes()))

    def _strip(self, thinned: dict[Node, None]) -> list[Packed]:
        """Take out everything that no lock covers; page ids of it, those of each branch before what
        follows. What was known of it goes to the page above."""
        freed: list[Packed] = []
        fold = self._fold
        for root in list(self._roots.values()):
            for node in self._subtree(root, held=True):
                gone = [item for item in node.children.items() if not item[1].lock_ref]
                for first_page, child in gone:
                    node.disown(first_page)
                    branch = self._subtree(child) if child.children else [child]
                    for below in branch:
                        freed.append(below.pages)
                        if node is not root:
                            for _, mark in [*(below.steps or ()), (below.end, below.mark)]:
                                if mark is not None:
                                    node.mark = mark if node.mark is None else fold(node.mark, mark)
                        if below.wants:
                            wants.move(below, node, 0, below.end, limit=node.end)
                        below.leave_tree()
                        self.num_nodes -= 1
                if gone:
                    thinned[node] = None
            self._drop_root_if_idle(root)
        # All that stood in the old ones is gone, or held.
        try:
            self._queue = self.policy.make_queue()
            if self._hints is not None:
                self._queue = HintedQueue(self.policy, self._hints, self._queue)
        except Exception as error:
            self.errors.caught(error)
            self._queue = LeafHeap(self.policy.rank)
        self._wanted_queue = LeafHeap(self.policy.last_tick)
        self._strays = LeafHeap(_no_rank)
        return freed

    def _release_orphan(self, node: Node) -> Pages:
        """Release an orphaned path, and take the pages that no lock holds any more."""
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
        """The ids of pages that are in the tree no longer."""
        ids = packed_ids(runs)
        if self._in_tree is not None:
            self._in_tree[ids.astype(np.intp)] = False
        return ids
