"""The tree as text, for people: one node a line, as deep as it lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixkv.cache.node import Node
    from prefixkv.cache.tree import RadixTree


def lines(cache: RadixTree, max_nodes: int) -> Iterator[tuple[int, str]]:
    """(how many nodes above, description) of the roots and the first `max_nodes` nodes, each before
    its children."""
    shown = 0
    for namespace, root in cache._roots.items():
        yield 0, f"namespace {namespace!r}: {len(root.children)} children, lock_ref {root.lock_ref}"
        stack: list[tuple[int, Node]] = [(1, child) for child in reversed(root.children.values())]
        while stack:
            above, node = stack.pop()
            if shown == max_nodes:
                yield 0, f"and {cache.num_nodes - shown} more nodes"
                return
            shown += 1
            yield above, describe(cache, node)
            stack += [(above + 1, child) for child in reversed(node.children.values())]


def describe(cache: RadixTree, node: Node) -> str:
    """One node: where it lies, how many tokens it has, who holds it, how long ago it was used, what
    it ranks."""
    size = cache.page_size
    text = (
        f"tokens {node.start * size}..{node.end * size} ({node.num_pages} pages), lock_ref "
        f"{node.lock_ref}"
    )
    history = node.mark  # of the last page; what its children know more is theirs to show
    if history is not None:
        policy = cache.policy
        text += f", age {cache.tick - policy.last_tick(history)} uses{policy.describe(history)}"
    if node.steps:
        text += f", {len(node.steps)} steps"
    if node.wants:
        text += f", wanted by {sum(want.count for hung in node.wants.values() for want in hung)}"
    return text


def as_text(cache: RadixTree, max_nodes: int) -> str:
    """See `RadixCache.dump`. Indented no further than 40 levels, so that a chain is not a
    triangle."""
    return "\n".join(f"{'  ' * min(above, 40)}{text}" for above, text in lines(cache, max_nodes))


def as_rich(cache: RadixTree, max_nodes: int) -> Any:
    """A `rich.tree.Tree` for a terminal; deeper than 40 levels it goes on at the side."""
    from rich.text import Text
    from rich.tree import Tree

    top = Tree(Text(repr(cache.stats())))
    branches = {-1: top}
    for above, text in lines(cache, max_nodes):
        level = min(above, 40)
        branches[level] = branches[level - 1].add(Text(text))
    return top
