"""What SGLang's queues tell the tree, and in what order decode's is tried.

SGLang has no call that says which prefixes are waited for, and tries its decode queue in the order
of arrival. Both are done by hooks around its own methods, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey

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


class NewPagesFirst:
    """Orders a queue by what would have to be sent: the fewest new pages first, but what has waited
    for `patience_s` before all others, as it came.

    A prompt is matched anew only when pages came or went since.
    """

    def __init__(
        self, tree: RadixCache, key_of: Callable[[Any], RadixKey], patience_s: float = PATIENCE_S
    ) -> None:
        self._tree = tree
        self._key_of = key_of
        self._patience_s = patience_s
        self._since: dict[int, float] = {}  # id(request): when it was seen first
        self._new: dict[int, int] = {}  # id(request): its new pages
        self._version = -1

    def order(self, queue: list[Any], request_of: Callable[[Any], Any], now_s: float) -> None:
        """Sort `queue` in place; equals stay in order."""
        if self._version != self._tree.version:
            self._version = self._tree.version
            self._new.clear()
        here = {id(item) for item in queue}
        for gone in self._since.keys() - here:
            del self._since[gone]
            self._new.pop(gone, None)
        ranks: dict[int, tuple[int, float]] = {}
        for item in queue:
            ident = id(item)
            since = self._since.setdefault(ident, now_s)
            if now_s - since >= self._patience_s:
                ranks[ident] = (0, since)
                continue
            if ident not in self._new:
                key = self._key_of(request_of(item))
                match = self._tree.match_prefix(key)
                self._new[ident] = len(key) // self._tree.page_size - match.depth
            ranks[ident] = (1, self._new[ident])
        queue.sort(key=lambda item: ranks[id(item)])
