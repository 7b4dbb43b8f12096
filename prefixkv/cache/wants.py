"""Prefixes that requests wait for. Each is attached at the deepest page of it that the tree holds.

A page is wanted while some waiting prefix passes through it, whether that page was there when the
prefix began to wait or came later. So a want moves down when pages along it are inserted and up
when they are evicted. Wants at one depth are kept by the page they ask for next: an insertion finds
the wants it serves in one look-up, however many there are.
"""

from __future__ import annotations

from prefixkv.cache.node import TreeNode, Want


def attach(want: Want, node: TreeNode, depth: int) -> None:
    # The page that the want asks for next. Empty or partial at its end: no insertion asks for such
    # a page, so a complete want stays where it is.
    start = depth * want.page_bytes
    want.node = node
    want.place = place = (depth, want.data[start : start + want.page_bytes])
    if node.wants is None:
        node.wants = {}
    node.wants.setdefault(place, []).append(want)


def detach(want: Want) -> TreeNode:
    node, want.node = want.node, None
    assert node is not None
    assert node.wants is not None
    same_place = node.wants[want.place]
    same_place.remove(want)
    # Leave no empty list and no empty dictionary behind: `node.wants` is tested for truth.
    if not same_place:
        del node.wants[want.place]
        node.wants = node.wants or None
    return node


def deepest(node: TreeNode, limit: int) -> int:
    """Return the depth, at most `limit`, of the deepest want in `node`; or 0. O(places)."""
    return max((depth for depth, _ in node.wants or () if depth <= limit), default=0)


def served_by(node: TreeNode, depth: int, first_page: bytes) -> list[Want]:
    """Detach and return the wants at `depth` of `node` that ask for `first_page` next."""
    if node.wants is None:
        return []
    served = node.wants.pop((depth, first_page), [])
    node.wants = node.wants or None
    return served


def move(source: TreeNode, target: TreeNode, from_depth: int, to_depth: int, limit: int) -> None:
    """Move the wants of `source` in (from_depth, to_depth] to `target`, none deeper than `limit`.
    With one node for both they move up: pages were cut off its end."""
    if source.wants is None:
        return
    # A list, not a view: attaching to the same node changes the dictionary.
    for place in [place for place in source.wants if from_depth < place[0] <= to_depth]:
        for want in source.wants.pop(place):
            attach(want, target, min(want.depth, limit))
    source.wants = source.wants or None
