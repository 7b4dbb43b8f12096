"""Requests of decode's queue that wait for KV which another request brings.

SGLang would admit each by itself: sixteen requests with one new prompt cause sixteen transfers.
Here the first *brings* its missing pages, from its admission until they are in the tree or will not
come; others are kept back meanwhile, and then find them cached. A request is kept back only if at
least half of the whole pages that it lacks come that way, so that it never waits for a transfer to
save a small part of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from prefixkv.engines.sglang.waiting import Depths
from prefixkv.spi import common_pages

MAX_LIKE: int = 8
"""Limit of requests with the same next page and different continuations that are compared."""

NextPage = tuple[Hashable, int, bytes]
"""Namespace, number of pages in the tree, and the tokens of the page after them."""


@dataclass(slots=True)
class _MissingPages:
    """The missing pages of one request: from `place` to page `end` of the packed prompt `data`."""

    request: Any  # kept alive, so that its id stays its own
    next_page: NextPage
    data: bytes
    end: int  # whole pages


class Joins:
    """The joins of one decode queue. Equal on all ranks that see the same queues and trees."""

    def __init__(self, depths: Depths, page_bytes: int) -> None:
        self._depths = depths
        self._page_bytes = page_bytes
        self._bringing: dict[int, _MissingPages] = {}  # by id(request)
        self._count = 0  # a version number of `_bringing`
        # The inputs of the last look, and its result: most steps change none of them.
        self._looked: tuple[int, int] = (-1, -1)
        self._ready: list[Any] = []
        self._held: set[int] = set()
        self._joined: set[int] = set()  # held requests that were counted in `num_joined`
        self.num_joined = 0

    def begin(self, requests: Iterable[Any]) -> None:
        """Record that these requests bring their missing pages."""
        for request in requests:
            found = self._missing_pages(request)
            if found is not None:
                self._bringing[id(request)] = found
                self._count += 1

    def requests_to_hold(self, ready: Sequence[Any], coming: Iterable[Any]) -> set[int]:
        """Return the ids of those of `ready` that join another's transfer and have to wait now.
        `coming`: all requests with KV on its way, or here and not in the tree yet."""
        # 1. A request that is no longer coming brings nothing: its pages are in the tree, or it
        #    failed. Its followers are then free to go.
        if self._bringing:
            alive = {id(request) for request in coming}
            for ident in [ident for ident in self._bringing if ident not in alive]:
                del self._bringing[ident]
                self._count += 1
        # 2. Look again only if the tree, the bringing requests or the queue have changed.
        now = self._depths.version, self._count
        same = len(ready) == len(self._ready) and all(map(is_, ready, self._ready))
        if now == self._looked and same:
            return self._held
        self._looked, self._ready = now, list(ready)
        self._held = self._find_held() if self._bringing or len(ready) > 1 else set()
        self.num_joined += len(self._held - self._joined)
        self._joined = set(self._held)
        return self._held

    def _find_held(self) -> set[int]:
        leaders: defaultdict[NextPage, list[_MissingPages]] = defaultdict(list)
        for one in self._bringing.values():
            leaders[one.next_page].append(one)
        held = set()
        for request in self._ready:
            lacking = self._missing_pages(request)
            if lacking is None:
                continue
            same_page = leaders[lacking.next_page]
            if any(self._brings_half_of(one, lacking) for one in same_page):
                held.add(id(request))
            elif len(same_page) < MAX_LIKE:
                same_page.append(
                    lacking
                )  # may be admitted in a moment, before the others are looked at
        return held

    def _missing_pages(self, request: Any) -> _MissingPages | None:
        """Return None where no whole page is missing."""
        key, depth = self._depths.of(request)
        data, size = key.data, self._page_bytes
        end = len(data) // size
        if depth >= end:
            return None
        place = key.namespace, depth, data[depth * size : (depth + 1) * size]
        return _MissingPages(request, place, data, end)

    def _brings_half_of(self, one: _MissingPages, lacking: _MissingPages) -> bool:
        depth, size = lacking.next_page[1], self._page_bytes
        if not lacking.data.startswith(memoryview(one.data)[: (depth + 1) * size]):
            return False
        end = min(one.end, lacking.end)
        common = common_pages(lacking.data, one.data, depth + 1, end, size)
        return 2 * (common - depth) >= lacking.end - depth
