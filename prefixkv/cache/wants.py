"""Prefixes that requests wait for: each hangs at the deepest page of it that the tree holds.

A page is wanted while some waiting prefix passes through it, whether that page was there when the
prefix began to wait or came later. So a want moves down when pages along it are inserted and up
when they are evicted. Wants at one place are kept by the page they ask for next: an insertion finds
the wants it serves in one look-up, however many there are.
"""

from __future__ import annotations

from prefixkv.cache.node import Node, Want


def hang(want: Want, node: Node, depth: int, page_bytes: int) -> None:
    """Hang a want at `depth`, which lies in `node`."""
    want.node, want.depth = node, depth
    if node.wants is None:
        node.wants = {}
    node.wants.setdefault((depth, want.next_page(page_bytes)), []).append(want)


def unhang(want: Want, page_bytes: int) -> None:
    """Take a want off its node."""
    node = want.node
    assert node is not None
    assert node.wants is not None
    place = (want.depth, want.next_page(page_bytes))
    node.wants[place].remove(want)
    if not node.wants[place]:
        del node.wants[place]
    if not node.wants:
        node.wants = None
    want.node = None


def deepest(node: Node) -> int:
    """The depth of the deepest page of `node` that is wanted; 0 if none is. O(places)."""
    return max((depth for depth, _ in node.wants), default=0) if node.wants else 0


def deepest_below(node: Node) -> int:
    """As `deepest`, of the pages before the last one. O(places)."""
    return (
        max((depth for depth, _ in node.wants if depth < node.end), default=0) if node.wants else 0
    )


def served_by(node: Node, depth: int, first_page: bytes) -> list[Want]:
    """Take off and return the wants that hang at `depth` of `node` and ask for `first_page`
    next."""
    if node.wants is None:
        return []
    served = node.wants.pop((depth, first_page), [])
    if not node.wants:
        node.wants = None
    return served


def move(
    source: Node,
    target: Node,
    from_depth: int,
    to_depth: int,
    page_bytes: int,
    limit: int | None = None,
) -> None:
    """Rehang the wants of `source` at depths in (from_depth, to_depth] on `target`, none deeper
    than `limit`."""
    if source.wants is None:
        return
    for place in [place for place in source.wants if from_depth < place[0] <= to_depth]:
        for want in source.wants.pop(place):
            hang(want, target, want.depth if limit is None else min(want.depth, limit), page_bytes)
    if not source.wants:
        source.wants = None
