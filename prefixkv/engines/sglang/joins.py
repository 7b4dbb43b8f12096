"""Requests of decode's queue that wait for KV which another one brings, instead of having it sent
again.

SGLang admits each request by itself: of sixteen with one new prompt each has all of it sent. Here
the first of them *brings* its missing pages from when it is admitted until they are in the tree, or
will not come; one that lacks them too is kept back meanwhile, and then finds them. It is kept back
only if at least half of the whole pages that it lacks come that way: else it would wait for a
transfer to be spared a small part of its own.
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
"""Requests that begin alike and go on differently, among which it is looked for."""

Place = tuple[Hashable, int, bytes]
"""Namespace, how many pages are in the tree, and the tokens of the page behind them."""


@dataclass(slots=True)
class _Brings:
    request: Any  # kept alive, so that its id stays its own
    place: Place
    data: bytes
    end: int  # whole pages


class Joins:
    """Of one decode queue. The same on every rank that sees the same queues and trees.

    Args:
        depths: of the tree that decode keeps.
        page_bytes: of a page of the tree's keys.
    """

    def __init__(self, depths: Depths, page_bytes: int) -> None:
        self._depths = depths
        self._page_bytes = page_bytes
        self._brings: dict[int, _Brings] = {}  # id(request)
        self._count = 0  # changes with `_brings`
        self._looked: tuple[int, int] = (-1, -1)
        self._ready: list[Any] = []
        self._held: set[int] = set()
        self._joined: set[int] = set()  # are held, and were counted
        self.num_joined = 0

    def begin(self, requests: Iterable[Any]) -> None:
        """These were admitted: what they lack is on its way."""
        for request in requests:
            found = self._lacks(request)
            if found is not None:
                self._brings[id(request)] = found
                self._count += 1

    def held(self, ready: Sequence[Any], coming: Iterable[Any]) -> set[int]:
        """Which of `ready`, by id, are to be kept back now.

        Args:
            ready: requests that could be admitted, in order.
            coming: all whose KV is on its way, or here and not in the tree yet.
        """
        if self._brings:
            alive = {id(request) for request in coming}
            for ident in [ident for ident in self._brings if ident not in alive]:
                del self._brings[ident]
                self._count += 1
        now = self._depths.version, self._count
        same = len(ready) == len(self._ready) and all(map(is_, ready, self._ready))
        if now == self._looked and same:
            return self._held
        self._looked, self._ready = now, list(ready)
        self._held = self._look() if self._brings or len(ready) > 1 else set()
        self.num_joined += len(self._held - self._joined)
        self._joined = set(self._held)
        return self._held

    def _look(self) -> set[int]:
        leaders: defaultdict[Place, list[_Brings]] = defaultdict(list)
        for one in self._brings.values():
            leaders[one.place].append(one)
        held = set()
        for request in self._ready:
            mine = self._lacks(request)
            if mine is None:
                continue
            like = leaders[mine.place]
            if any(self._spares(one, mine) for one in like):
                held.add(id(request))
            elif len(like) < MAX_LIKE:
                like.append(mine)  # may be admitted in a moment, before the others are looked at
        return held

    def _lacks(self, request: Any) -> _Brings | None:
        """What has to be sent for it; None where that is no whole page."""
        key, depth = self._depths.of(request)
        data, size = key.data, self._page_bytes
        end = len(data) // size
        if depth >= end:
            return None
        place = key.namespace, depth, data[depth * size : (depth + 1) * size]
        return _Brings(request, place, data, end)

    def _spares(self, one: _Brings, mine: _Brings) -> bool:
        """Whether one request brings half of what the other lacks."""
        depth, size = mine.place[1], self._page_bytes
        if not mine.data.startswith(memoryview(one.data)[: (depth + 1) * size]):
            return False
        end = min(one.end, mine.end)
        common = common_pages(mine.data, one.data, depth + 1, end, size)
        return 2 * (common - depth) >= mine.end - depth
