"""The laws of a radix cache, one after the other. Slow, and for tests: hot paths never call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from prefixkv.cache.node import DEAD, PAGE_ID_BYTES, Node
from prefixkv.errors import InternalError

if TYPE_CHECKING:
    from prefixkv.cache.tree import RadixTree


def check(cache: RadixTree) -> None:
    """Raise InternalError, with every law that is broken and the state, if one is."""
    broken = (
        list(_tree_laws(cache))
        + list(_lock_laws(cache))
        + list(_queue_laws(cache))
        + list(_want_laws(cache))
    )
    if broken:
        lines = [*(f"broken: {law}" for law in broken), repr(cache.stats()), *_picture(cache)]
        raise InternalError("\n".join(lines))


def _tree_laws(cache: RadixTree) -> Iterator[str]:
    page_bytes = cache._page_bytes
    nodes = list(cache.nodes())
    for namespace, root in cache._roots.items():
        if root.parent is not None or root.end != 0 or root.namespace != namespace:
            yield f"a root has no parent and no pages, and its own namespace: {root}"
        if not root.children and not root.lock_ref and not root.wants:
            yield f"a root with nothing in it and nobody holding it is dropped: {namespace!r}"
    for parent in [*nodes, *cache._roots.values()]:
        if parent.only_child is not (
            next(iter(parent.children.values())) if len(parent.children) == 1 else None
        ):
            yield f"an only child is known as such: {parent}"
        for first_page, child in parent.children.items():
            if child.parent is not parent:
                yield f"a child knows its parent: {child}"
            if first_page != bytes(child.key[:page_bytes]):
                yield f"a child is found by its first page, so siblings differ in it: {child}"
    for node in nodes:
        num_pages, rest = divmod(len(node.key), page_bytes)
        if rest or not num_pages:
            yield f"a key is whole pages, at least one: {node}"
        if len(node.pages) != num_pages * PAGE_ID_BYTES or node.end != node.start + num_pages:
            yield (
                f"a node has one page id a page, and ends that many pages below its parent: {node}"
            )
        if len(node.children) == 1 and node.own_locks == 0:
            yield f"a node with one child and no lock of its own is merged with it: {node}"
        depths = [depth for depth, _ in node.steps or ()]
        if depths != sorted(set(depths)) or any(
            not node.start < depth < node.end for depth in depths
        ):
            yield f"steps rise, and lie inside their node: {node} {depths}"
        if not node.children and node.mark is None:
            yield f"a leaf has been used: {node}"
    ids = np.concatenate(
        [np.frombuffer(node.pages, np.int32) for node in nodes] or [np.empty(0, np.int32)]
    )
    if len(set(ids.tolist())) != len(ids):
        yield "a page is in the tree once"
    if len(ids) != cache.num_pages or len(nodes) != cache.num_nodes:
        yield f"the counters count: {len(ids)} pages, {len(nodes)} nodes"
    if cache._in_tree is not None:
        orphans = np.concatenate(
            [np.frombuffer(node.pages, np.int32) for node in _orphans(cache)] or [ids[:0]]
        )
        both = np.sort(np.concatenate([ids, orphans]))
        if not np.array_equal(both, np.flatnonzero(cache._in_tree)):
            yield "the bitmap has the pages of the tree and of orphans, and no others"


def _lock_laws(cache: RadixTree) -> Iterator[str]:
    ends_on = Counter(lock.node for lock in cache._locks)
    nodes = [*cache.nodes(), *cache._roots.values()]
    orphans = _orphans(cache)
    for node in [*nodes, *orphans]:
        if node.lock_ref != ends_on[node] + sum(
            child.lock_ref > 0 for child in node.children.values()
        ):
            yield (
                f"lock_ref is the locks that end there and the children held: {node}, "
                f"{ends_on[node]} end there"
            )
    protected = sum(node.num_pages for node in nodes if node.lock_ref)
    if protected != cache.protected_pages or min(protected, cache.evictable_pages) < 0:
        yield f"protected pages are those of nodes with lock_ref > 0: {protected}"
    for lock in cache._locks:
        if not lock.held or lock.node.end * cache.page_size != lock.prefix_len:
            yield f"a node ends where a lock on it does: {lock} {lock.node}"
    if any(node.lock_ref == 0 for node in orphans):
        yield "an orphan is held"
    if sum(node.num_pages for node in orphans) != cache.orphan_pages:
        yield "the pages of orphans are counted"


def _queue_laws(cache: RadixTree) -> Iterator[str]:
    for node in cache.nodes():
        if not node.children and not node.lock_ref and node.entry is None:
            yield f"an evictable leaf stands in a queue: {node}"


def _want_laws(cache: RadixTree) -> Iterator[str]:
    page_bytes = cache._page_bytes
    hanging = [want for node in [*cache.nodes(), *cache._roots.values()]
               for at in (node.wants or {}).values() for want in at]  # fmt: skip
    if len(hanging) != len(cache._wants) or set(hanging) != set(cache._wants.values()):
        yield "every want hangs somewhere, once"
    for (namespace, data), want in cache._wants.items():
        node, num_bytes = cache._walk(cache._roots[namespace], data)
        place = (want.depth, want.next_page(page_bytes))
        if want.node is not node or want.depth * page_bytes != num_bytes:
            yield (
                f"a want hangs at the deepest page of it: {want.depth}, not "
                f"{num_bytes // page_bytes} in {node}"
            )
        elif want not in (node.wants or {}).get(place, ()):
            yield f"a want is found by its depth and next page: {want.node}"


def _orphans(cache: RadixTree) -> list[Node]:
    """Every node of a path that was locked when the tree was reset and still is."""
    found: dict[Node, None] = {}
    for lock in cache._locks:
        node = lock.node
        while lock.epoch != cache._epoch and node.parent is not None and node.end != DEAD:
            found[node] = None
            node = node.parent
    return list(found)


def _picture(cache: RadixTree, limit: int = 200) -> list[str]:
    lines: list[str] = []
    for at, node in enumerate(cache.nodes()):
        if at == limit:
            return [*lines, f"and {cache.num_nodes - limit} more"]
        lines.append(
            f"{node!r} mark={node.mark} steps={node.steps} parent={id(node.parent):x} "
            f"id={id(node):x}"
        )
    return lines
