"""The tree as text for people: one node per line, indented by its depth."""

from __future__ import annotations

from collections.abc import Iterator

from prefixkv.cache.node import TreeNode
from prefixkv.cache.tree import RadixTree
from prefixkv.errors import shown_namespace


def lines(tree: RadixTree, max_nodes: int) -> Iterator[str]:
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
            yield "  " * min(above, 40) + describe(tree, node)
            stack += [(above + 1, child) for child in reversed(node.children.values())]


def describe(tree: RadixTree, node: TreeNode) -> str:
    """Return a node's line: where it lies, its locks, its age in uses, what the policy adds."""
    size = int(tree.page_size * tree.policy.token_scale)
    text = (
        f"tokens {node.start * size}..{node.end * size} ({node.num_pages} pages), lock_ref "
        f"{node.lock_ref}"
    )
    history = node.mark  # of the last page; the children show what was used below
    if history is not None:
        policy = tree.policy
        text += f", age {tree.tick - policy.last_tick(history)} uses{policy.describe(history)}"
    if node.steps:
        text += f", {len(node.steps)} steps"
    if node.wants:
        text += f", wanted by {sum(map(len, node.wants.values()))}"
    return text
