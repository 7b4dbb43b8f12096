"""What SGLang's queues tell the tree, and in what order decode's is tried.

SGLang has no call that says which prefixes are waited for, and tries its decode queue in the order
of arrival. Both are done by hooks around its own methods, which stay as they are. So is `joins.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prefixkv.spi import RadixCache, RadixKey

PATIENCE_S = 5.0
"""A request that has waited this long is overtaken by nothing (as `DecodeConfig.patience_s`)."""


class WaitingPrefixes:
    """What a tree was told of one queue: prefixes that are waited for are evicted last."""

    def __init__(self, tree: RadixCache, key_of: Callable[[Any], RadixKey]) -> None:
        self._tree = tree
        self._key_of = key_of
        self._told: dict[int, tuple[Any, int]] = {}  # id(request): it, kept alive, and its want

    def follow(self, requests: Iterable[Any]) -> None:
        """These wait now, and no others. O(requests), and O(prompt) for one that is new or gone."""
        now = {id(request): request for request in requests}
        for ident in [ident for ident in self._told if ident not in now]:
            self._tree.unwant(self._told.pop(ident)[1])
        for ident, request in now.items():
            if ident not in self._told:
                key = RadixKey(self._key_of(request))  # as it is now: the request's own grows
                self._told[ident] = (request, self._tree.want(self._tree.match_prefix(key)))


class Depths:
    """How many pages of a waiting prompt are in the tree. Each is matched anew only when pages came
    or went since."""

    def __init__(self, tree: RadixCache, key_of: Callable[[Any], RadixKey]) -> None:
        self._tree = tree
        self._key_of = key_of
        self._found: dict[int, tuple[Any, RadixKey, int]] = {}  # id(request): it, kept alive
        self._version = -1

    @property
    def version(self) -> int:
        """Of the tree; the same as before: so are all depths."""
        return self._tree.version

    @property
    def page_size(self) -> int:
        """Words of a key that make a page."""
        return self._tree.page_size

    def of(self, request: Any) -> tuple[RadixKey, int]:
        """The packed prompt, not to be changed or kept, and the pages of it."""
        if self._version != self._tree.version:
            self._version = self._tree.version
            self._found.clear()
        found = self._found.get(id(request))
        if found is None:
            key = self._key_of(request)
            found = request, key, self._tree.match_prefix(key).depth
            self._found[id(request)] = found
        return found[1:]


class NewPagesFirst:
    """Orders a queue by what would have to be sent: the fewest new pages first, but what has waited
    for `patience_s` before all others, as it came."""

    def __init__(self, depths: Depths, patience_s: float = PATIENCE_S) -> None:
        self._depths = depths
        self._patience_s = patience_s
        self._since: dict[int, float] = {}  # id(item): when it was seen first

    def order(self, queue: list[Any], request_of: Callable[[Any], Any], now_s: float) -> None:
        """Sort `queue` in place; equals stay in order."""
        here = {id(item) for item in queue}
        for gone in self._since.keys() - here:
            del self._since[gone]
        ranks: dict[int, tuple[int, float]] = {}
        for item in queue:
            ident = id(item)
            since = self._since.setdefault(ident, now_s)
            if now_s - since >= self._patience_s:
                ranks[ident] = (0, since)
                continue
            key, depth = self._depths.of(request_of(item))
            ranks[ident] = (1, len(key) // self._depths.page_size - depth)
        queue.sort(key=lambda item: ranks[id(item)])
