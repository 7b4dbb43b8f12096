"""The order of requests in which they share prefixes best: depth first through the tree, at each
node the branch with most requests first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prefixkv.spi import TreeNode


def weight_order(ends: Sequence[TreeNode | None]) -> list[int]:
    """Return the indices of requests, in that order. O(requests * nodes on their paths).

    Equal weights keep the order of `ends`, so that it is the same on every rank.

    Args:
        ends: per request the node at which its prefix ends; None: the root of the tree.
    """
    # 1. Weigh the nodes: each request counts for every node on its path to the root. Children are
    #    kept in dicts, not sets, so that their order does not depend on hashes.
    at: dict[TreeNode | None, list[int]] = {None: []}
    weight: Counter[TreeNode] = Counter()
    below: dict[TreeNode | None, dict[TreeNode, None]] = {None: {}}
    for place, end in enumerate(ends):
        at.setdefault(end, []).append(place)
        node = end
        while node is not None:
            weight[node] += 1
            below.setdefault(node, {})
            below.setdefault(node.parent, {})[node] = None
            node = node.parent
    # 2. Walk the tree with a stack, since a path may be deeper than Python's recursion limit. A
    #    node comes up twice: first its children are pushed, then its own requests are placed.
    order: list[int] = []
    stack: list[tuple[TreeNode | None, bool]] = [(None, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order += at.get(node, ())
            continue
        stack.append((node, True))
        # The heaviest is pushed last, so comes first; `sorted` keeps equals in order.
        children = sorted(below[node], key=lambda child: -weight[child])
        stack += [(child, False) for child in reversed(children)]
    return order
