"""In what order requests share prefixes best: depth first, the branch that most of them are on
before the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prefixkv.spi import Node


def weight_order(ends: Sequence[Node | None]) -> list[int]:
    """The places of requests, ordered. O(requests * nodes on their paths).

    Equal weights keep the order of `ends`, so that it is the same on every rank.

    Args:
        ends: where the prefix of each ends; None: at the root of the tree.
    """
    at: dict[Node | None, list[int]] = {None: []}
    weight: Counter[Node] = Counter()
    below: dict[Node | None, dict[Node, None]] = {None: {}}
    for place, end in enumerate(ends):
        at.setdefault(end, []).append(place)
        node = end
        while node is not None:
            weight[node] += 1
            below.setdefault(node, {})
            below.setdefault(node.parent, {})[node] = None
            node = node.parent
    order: list[int] = []
    stack: list[tuple[Node | None, bool]] = [(None, False)]
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
