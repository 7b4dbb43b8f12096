"""Requests of decode's queue: the order in which they are tried (SGLang's is that of arrival),
those that wait for KV which another request brings, and the time that all ranks share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from prefixkv.spi import RadixCache, RadixKey, TreeNode, common_pages


class Depths:
    """Cache of how many pages of each waiting prompt are in the tree. A prompt is matched again
    only when pages came or went since."""

    def __init__(self, tree: RadixCache, key_of: Callable[[Any], RadixKey]) -> None:
        self.tree = tree
        self._key_of = key_of
        # By id(request): the request, kept alive so that its id stays its own, its key and depth.
        self._found: dict[int, tuple[Any, RadixKey, int]] = {}
        self._version = -1  # the tree's, at which `_found` is valid

    def of(self, request: Any) -> tuple[RadixKey, int]:
        """Return the packed prompt, not to be changed or kept, and its number of cached pages."""
        if self._version != self.tree.version:
            self._version = self.tree.version
            self._found.clear()
        found = self._found.get(id(request))
        if found is None:
            key = self._key_of(request)
            found = request, key, self.tree.match_prefix(key).depth
            self._found[id(request)] = found
        return found[1:]


class NewPagesFirst:
    """Fewest pages to send first. Requests that have waited for `patience_s` come before all
    others, in the order of arrival."""

    def __init__(self, depths: Depths, patience_s: float) -> None:
        self._depths = depths
        self._patience_s = patience_s
        self._since: dict[int, float] = {}  # by id(item): time at which it was first seen

    def order(self, queue: list[Any], now_s: float) -> None:
        """Sort in place, stably. `now_s` is the ranks' common time, so all sort alike."""
        # Forget items that left first: a new item may get the id of a former one.
        here = {id(item) for item in queue}
        for gone in self._since.keys() - here:
            del self._since[gone]
        # Group 0: out of patience, by arrival. Group 1: by new pages. Only group 1 needs a match.
        ranks: dict[int, tuple[int, float]] = {}
        for item in queue:
            ident = id(item)
            since = self._since.setdefault(ident, now_s)
            if now_s - since >= self._patience_s:
                ranks[ident] = (0, since)
                continue
            key, depth = self._depths.of(item.req)
            ranks[ident] = (1, len(key) // self._depths.tree.page_size - depth)
        queue.sort(key=lambda item: ranks[id(item)])


def weight_order(ends: Sequence[TreeNode | None]) -> list[int]:
    """Return the indices of `ends` (None: the root) in the order that shares prefixes best: depth
    first, at each node the branch with most requests first. O(requests * nodes on their paths).

    Equal weights keep the order of `ends`, so that it is the same on every rank.
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


@dataclass(frozen=True)
class TimeMark:
    """An element among the requests of a broadcast."""

    now_s: float


class RankClock:
    """The latest time that came with requests. It never goes back. The scheduler's thread alone.

    Each rank has its own tree and evicts by itself, and a policy compares times: the trees stay
    equal only with equal times. The rank that receives requests hands them to the others; the time
    travels with them, and stands still in between.

    >>> clock = RankClock()
    >>> clock.take(["a request", TimeMark(2.5)]), clock.now_s
    (['a request'], 2.5)
    """

    MARK_EVERY_S = 0.05

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sent_s = float("-inf")

    def mark(self, requests: list[object], now_s: float) -> list[object]:
        """Return the list to broadcast, on the rank that gets requests. It has no mark where there
        are no requests and a mark was sent less than `MARK_EVERY_S` ago."""
        # An idle scheduler broadcasts an empty list all the time, which should stay cheap.
        if not requests and now_s - self._sent_s < self.MARK_EVERY_S:
            return requests
        self._sent_s = now_s
        return [*requests, TimeMark(now_s)]

    def take(self, requests: list[object]) -> list[object]:
        """Return the requests without marks, and set the clock to the newest, on every rank."""
        marks = [one for one in requests if isinstance(one, TimeMark)]
        if not marks:
            return requests
        self.now_s = max(self.now_s, *(mark.now_s for mark in marks))
        return [one for one in requests if not isinstance(one, TimeMark)]


CLOCK = RankClock()
"""The clock of this process."""


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
    """The joins of one decode queue. Equal on all ranks that see the same queues and trees.

    SGLang would admit each by itself: sixteen requests with one new prompt cause sixteen transfers.
    Here the first *brings* its missing pages, from its admission until they are in the tree or will
    not come; others are kept back meanwhile, and then find them cached. A request is kept back only
    if at least half of the whole pages that it lacks come that way, so that it never waits for a
    transfer to save a small part of its own.
    """

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
        now = self._depths.tree.version, self._count
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
