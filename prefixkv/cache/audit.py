"""The laws of a radix cache, and the tree as text for people. Slow: no hot path calls this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np

from prefixkv.cache.node import DEAD, PAGE_ID_BYTES, TreeNode
from prefixkv.cache.results import PrefixLock, packed_ids
from prefixkv.cache.tree import RadixTree
from prefixkv.errors import shown_namespace


def broken_laws(tree: RadixTree, locks: Collection[PrefixLock], epoch: int) -> list[str]:
    """Return every law that does not hold. O(tree).

    `locks` are all that are held; a lock of an epoch before `epoch` holds an orphan.
    """
    orphans = _orphans(locks, epoch)
    return [
        *_tree_laws(tree, orphans),
        *_lock_laws(tree, locks, orphans),
        *_want_laws(tree),
        *tree.policy.broken_laws(),
        *tree._queue.broken_laws(),
    ]


def _tree_laws(tree: RadixTree, orphans: list[TreeNode]) -> Iterator[str]:
    page_bytes = tree._page_bytes
    nodes = list(tree.nodes())
    # 1. Roots.
    for namespace, root in tree._roots.items():
        if root.parent is not None or root.end != 0 or root.namespace != namespace:
            yield f"a root has no parent and no pages, and its own namespace: {root}"
        if not root.children and not root.lock_ref and not root.wants:
            named = shown_namespace(namespace)
            yield f"a root with nothing in it that nothing holds is dropped: {named}"
    # 2. Parents and children.
    for parent in [*nodes, *tree._roots.values()]:
        if parent.only_child is not (
            next(iter(parent.children.values())) if len(parent.children) == 1 else None
        ):
            yield f"an only child is known as such: {parent}"
        for first_page, child in parent.children.items():
            if child.parent is not parent:
                yield f"a child knows its parent: {child}"
            if first_page != bytes(child.key[:page_bytes]):
                yield f"a child is found by its first page, so siblings differ in it: {child}"
    # 3. Each node by itself.
    for node in nodes:
        num_pages, rest = divmod(len(node.key), page_bytes)
        if rest or not num_pages:
            yield f"a key is whole pages, at least one: {node}"
        if len(node.pages) != num_pages * PAGE_ID_BYTES or node.end != node.start + num_pages:
            yield (
                f"a node has one page id a page, and ends that many pages below its parent: {node}"
            )
        # The shape is minimal: it must not depend on how the tree came about.
        only = node.only_child
        if only is not None and node.lock_ref == (only.lock_ref > 0):
            yield f"a node with one child and no lock of its own is merged with it: {node}"
        lists = (node.steps, node.end - 1, "steps"), (node.hashes, node.end, "hashes")
        for marks, last, what in lists:
            depths = [depth for depth, _ in marks or ()]
            if depths != sorted({depth for depth in depths if node.start < depth <= last}):
                yield f"{what} rise, and are of paths that end inside their node: {node} {depths}"
        if not node.children and node.mark is None:
            yield f"a leaf has been used: {node}"
        if not node.children and not node.lock_ref and node.entry is None:
            yield f"an evictable leaf stands in a queue: {node}"
    # 4. All pages together. Orphans are in no tree, but their pages must not be inserted either.
    ids = packed_ids([node.pages for node in nodes])
    if len(set(ids.tolist())) != len(ids):
        yield "a page is in the tree once"
    if len(ids) != tree.num_pages or len(nodes) != tree.num_nodes:
        yield f"the counters count: {len(ids)} pages, {len(nodes)} nodes"
    if tree._in_tree is not None:
        both = np.sort(packed_ids([node.pages for node in [*nodes, *orphans]]))
        if not np.array_equal(both, np.flatnonzero(tree._in_tree)):
            yield "the bitmap has the pages of the tree and of orphans, and no others"


def _lock_laws(
    tree: RadixTree, locks: Collection[PrefixLock], orphans: list[TreeNode]
) -> Iterator[str]:
    ends_on = Counter(lock.node for lock in locks)
    nodes = [*tree.nodes(), *tree._roots.values()]
    # The law of lock_ref, worked out from the locks themselves.
    for node in [*nodes, *orphans]:
        if node.lock_ref != ends_on[node] + sum(
            child.lock_ref > 0 for child in node.children.values()
        ):
            yield (
                f"lock_ref is the locks that end there and the children held: {node}, "
                f"{ends_on[node]} end there"
            )
    protected = sum(node.num_pages for node in nodes if node.lock_ref)
    if protected != tree.protected_pages or min(protected, tree.evictable_pages) < 0:
        yield f"protected pages are those of nodes with lock_ref > 0: {protected}"
    for lock in locks:
        if not lock.held or lock.node.end * tree.page_size != lock.prefix_len:
            yield f"a node ends where a lock on it does: {lock} {lock.node}"
    # An orphan that nothing holds would never be given back: no unlock leads to it.
    if any(node.lock_ref == 0 for node in orphans):
        yield "an orphan is held"
    if sum(node.num_pages for node in orphans) != tree.orphan_pages:
        yield "the pages of orphans are counted"


def _want_laws(tree: RadixTree) -> Iterator[str]:
    page_bytes = tree._page_bytes
    nodes = [*tree.nodes(), *tree._roots.values()]
    attached = [want for node in nodes for some in (node.wants or {}).values() for want in some]
    if len(attached) != len(tree._wants) or set(attached) != set(tree._wants.values()):
        yield "every want is attached somewhere, once"
    for want in tree._wants.values():
        node, num_bytes = tree._walk(tree._roots[want.namespace], want.data)
        if want.node is not node or want.depth * page_bytes != num_bytes:
            yield (
                f"a want is attached at the deepest page of it: {want.depth}, not "
                f"{num_bytes // page_bytes} in {node}"
            )
        elif want not in (node.wants or {}).get(want.place, ()):
            yield f"a want is found by its depth and next page: {want.node}"


def _orphans(locks: Collection[PrefixLock], epoch: int) -> list[TreeNode]:
    found: dict[TreeNode, None] = {}
    for lock in locks:
        node = lock.node
        while lock.epoch != epoch and node.parent is not None and node.end != DEAD:
            found[node] = None
            node = node.parent
    return list(found)


def dump(tree: RadixTree, max_nodes: int) -> Iterator[str]:
    """Yield the roots and the first `max_nodes` nodes, each before its children; indented 40 levels
    at most, so that a long chain stays readable."""
    shown = 0
    for namespace, root in tree._roots.items():
        named = shown_namespace(namespace)
        yield f"namespace {named}: {len(root.children)} children, lock_ref {root.lock_ref}"
        # A stack, not recursion: a chain of nodes may be deeper than Python's limit. Reversed, so
        # that the first child is printed first.
        stack: list[tuple[int, TreeNode]] = [
            (1, child) for child in reversed(root.children.values())
        ]
        while stack:
            above, node = stack.pop()
            if shown == max_nodes:
                yield f"and {tree.num_nodes - shown} more nodes"
                return
            shown += 1
            wanted = f", wanted by {sum(map(len, node.wants.values()))}" if node.wants else ""
            yield f"{'  ' * min(above, 40)}{node}, used {node.mark}{wanted}"
            stack += [(above + 1, child) for child in reversed(node.children.values())]
