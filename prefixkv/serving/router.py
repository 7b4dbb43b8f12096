"""Choice of a worker: the one that holds most of a request's prefix, unless it is too busy.

    router = BoundedAffinityRouter()
    router.add_worker("decode-0")
    in_sync = router.apply(batch)  # cache events; False: ask that worker for a snapshot
    route = router.route(page_keys(key.data, page_size), now_s)
    ...  # the request goes to route.worker
    router.ended(route, now_s)

Host memory counts as the pool. The worker matches again at admission: a late event costs a hit
only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from prefixkv.errors import CallerError
from prefixkv.settings import CountOrZero, Number, Seconds, SecondsOrZero, check_fields, check_time
from prefixkv.spi import CheckpointRemoved, CheckpointStored, Cleared, EventBatch, Removed, Stored

_STORED = math.inf  # until when a page counts that the worker has reported
_NOTHING: Final[dict[bytes, float]] = {}
_COUNTERS = (
    "routed", "routed_by_prefix", "routed_by_load", "overflowed", "batches", "out_of_sync",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Route:
    """The choice for a request. `matched_pages` of it are on the worker, or expected there."""

    worker: str
    matched_pages: int
    work: float
    _home: _RoutedWorker | None = field(repr=False)  # None once the request has ended


class WorkerIndex:
    """Pages that one worker holds, or is expected to hold soon, in its pool or in its host memory.
    Bounded; of a path longer than the bound allows only the upper part is known."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.incarnation = -1
        self.next_seq = 0
        self._former: deque[int] = deque(maxlen=64)  # earlier incarnations
        self.forget()

    def forget(self) -> None:
        self.num_pages = 0  # a page in both kinds of memory counts twice
        # By kind of memory (`is_behind`) and namespace, then by page key: until when the page
        # counts; `_STORED` once it was reported. Whole prefixes, so a match is found by bisection.
        self._held: dict[tuple[bool, Hashable], dict[bytes, float]] = {}
        # By kind of memory; of host memory once the worker has told of it.
        self._in_sync = {False: False}
        # The worker goes on at checkpoints alone: the pages that these end on, by namespace.
        self._at_checkpoints = False
        self._ends: dict[Hashable, set[bytes]] = {}
        # In order of time, since every expectation lasts as long: `expire` looks at its front.
        self._expected: deque[tuple[float, Hashable, Sequence[bytes]]] = deque()

    @property
    def in_sync(self) -> bool:
        """True if no batch is missing."""
        return all(self._in_sync.values())

    def apply(self, batch: EventBatch) -> bool:
        """Returns False if a batch is missing, until a `Cleared` begins a new snapshot."""
        # 1. A late batch of an earlier incarnation, or one that was applied already: ignored.
        # 2. A new incarnation: its cache is another, so everything known is dropped.
        # 3. A gap in the numbers: out of sync. What is known stays, as it is better than nothing.
        is_known = batch.incarnation == self.incarnation
        if batch.incarnation in self._former or (is_known and batch.seq < self.next_seq):
            return True
        if not is_known:
            self.forget()
            self._former.append(self.incarnation)
            self.incarnation = batch.incarnation
        elif batch.seq != self.next_seq:
            self._in_sync = dict.fromkeys(self._in_sync, False)
        self.next_seq = batch.seq + 1
        self._at_checkpoints |= batch.at_saves
        for event in batch.events:
            if isinstance(event, CheckpointStored | CheckpointRemoved):
                self._note_checkpoint(event)
            elif isinstance(event, Cleared):
                self._clear(event.is_behind)
            elif self._in_sync.get(event.is_behind):
                self._change(event)
        return self.in_sync

    def _clear(self, is_behind: bool) -> None:
        """Repairs any gap: all that there is follows it."""
        for place in [place for place in self._held if place[0] == is_behind]:
            self.num_pages -= len(self._held.pop(place))
        self._in_sync[is_behind] = True
        if not is_behind:
            self._expected.clear()
            self._ends.clear()

    def _change(self, event: Stored | Removed) -> None:
        place = event.is_behind, event.namespace
        held = self._held.get(place, _NOTHING)
        if isinstance(event, Stored):
            # A parent that is not known lies beyond the bound, and so do the pages behind it.
            if not event.parent or held.get(event.parent) == _STORED:
                room = self.max_pages - self.num_pages
                self._hold(place, event.page_keys[:room], _STORED)
            return
        # From the end, so that what is left is a whole prefix at every moment.
        for key in reversed(event.page_keys):
            if held.get(key) == _STORED:
                self._drop(place, key)

    def _hold(self, place: tuple[bool, Hashable], keys: Sequence[bytes], until_s: float) -> None:
        if keys:
            held = self._held.setdefault(place, {})
            before = len(held)
            held.update(dict.fromkeys(keys, until_s))
            self.num_pages += len(held) - before

    def _drop(self, place: tuple[bool, Hashable], key: bytes) -> None:
        del self._held[place][key]
        self.num_pages -= 1
        if not self._held[place]:
            del self._held[place]

    def _note_checkpoint(self, event: CheckpointStored | CheckpointRemoved) -> None:
        """Of a worker that uses pages without checkpoints none is kept."""
        held = self._held.get((False, event.namespace), _NOTHING)
        if isinstance(event, CheckpointRemoved):
            ends = self._ends.get(event.namespace, set())
            ends.discard(event.page_key)
            if not ends:
                self._ends.pop(event.namespace, None)
        # Of a page beyond the bound it is of no use, and costs as much.
        elif self._at_checkpoints and held.get(event.page_key) == _STORED:
            self._ends.setdefault(event.namespace, set()).add(event.page_key)

    def depth(self, namespace: Hashable, keys: Sequence[bytes]) -> int:
        """Count how many of these pages, from the first on, are held or expected. O(log pages). Of
        a worker that goes on at checkpoints alone those up to the deepest of them; O(pages behind
        it). What is expected counts in full: a checkpoint is saved at a prompt's end."""
        pool, host = (self._held.get((behind, namespace), _NOTHING) for behind in (False, True))
        depth = _depth(pool, keys)
        # What is expected lies behind all that is stored.
        if self._at_checkpoints and depth and pool[keys[depth - 1]] == _STORED:
            ends = self._ends.get(namespace, ())
            depth = next((at for at in range(depth, 0, -1) if keys[at - 1] in ends), 0)
        # A whole prefix in either memory, so the longer one counts.
        return max(depth, _depth(host, keys))

    def expect(self, namespace: Hashable, keys: Sequence[bytes], until_s: float) -> None:
        """Count these pages, a prefix, as held until `until_s`, unless events say more by then."""
        held = self._held.get((False, namespace), _NOTHING)
        # Pages that are reported must not be turned into expected ones, which expire.
        keys = [key for key in keys if held.get(key) != _STORED][: self.max_pages - self.num_pages]
        if keys:
            self._hold((False, namespace), keys, until_s)
            self._expected.append((until_s, namespace, keys))

    def expire(self, now_s: float) -> None:
        """Forget pages that were expected by now and not reported. Amortised O(pages expected)."""
        while self._expected and self._expected[0][0] <= now_s:
            _, namespace, keys = self._expected.popleft()
            for key in keys:
                # It may have been reported meanwhile, or be expected for longer by a later request.
                if self._held.get((False, namespace), _NOTHING).get(key, _STORED) <= now_s:
                    self._drop((False, namespace), key)


def _depth(held: Mapping[bytes, float], keys: Sequence[bytes]) -> int:
    if not keys or keys[0] not in held:
        return 0
    return bisect_left(keys, True, 1, key=lambda page_key: page_key not in held)


@dataclass(slots=True, eq=False)
class _RoutedWorker:
    index: WorkerIndex
    open_work: float = 0.0  # of requests in progress
    faded: float = 0.0  # of ended requests, as of `faded_at_s`
    faded_at_s: float = -math.inf

    def fade(self, now_s: float, fade_s: float) -> float:
        """Return the load now: open work, and ended work by its age."""
        if now_s > self.faded_at_s:
            if self.faded:
                self.faded *= math.exp((self.faded_at_s - now_s) / fade_s)
            self.faded_at_s = now_s
        return self.open_work + self.faded


@dataclass(kw_only=True, eq=False, repr=False)
class BoundedAffinityRouter:
    """Affinity to cached prefixes, within a bound on load. Pure; one owner, no threads. Times come
    from one monotonic clock. Raises ConfigError, which names the setting. Source: consistent
    hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).

    A worker's *load* is the work of its requests in progress, and of ended ones, which fades: so
    the second turn of a chat finds its worker, while a document that many chats ask about spreads.
    Workers within `bound` times the mean load, plus `slack` average requests, are eligible. A
    page's *worth* is the squared share of the other workers that lack it: a system prompt that all
    hold counts nothing, and a new worker is not starved. The longest match by worth wins, or else
    the least load.

    Args:
        bound: how far above the mean load a worker may be.
        slack: average requests on top, which let a conversation go on in an idle cluster.
        fade_s: how fast ended work stops counting. Long enough for tens of requests per worker.
        min_worth: least share of a prompt, by worth, for which its worker is preferred to the least
            loaded one. Above about (1 - 1 / bound) squared no worker starves, however long the
            system prompt.
        expect_s: how long a request's pages count as held until events say so.
        max_pages: how many pages are remembered per worker.
    """

    bound: Annotated[float, Meta(ge=1)] = 1.2
    slack: Number = 2.0
    fade_s: Seconds = 300.0
    min_worth: Number = 0.05
    expect_s: SecondsOrZero = 30.0
    max_pages: CountOrZero = 1 << 20

    def __post_init__(self) -> None:
        check_fields(self)
        self.counters = Counter(dict.fromkeys(_COUNTERS, 0))
        self._workers: dict[str, _RoutedWorker] = {}
        # A moving average over requests: the first one sets it, each later one moves it by 1%.
        self._average_work = 0.0

    def add_worker(self, name: str) -> None:
        """Raises CallerError if it was added before."""
        if name in self._workers:
            raise CallerError(f"worker {name!r} is known already")
        self._workers[name] = _RoutedWorker(WorkerIndex(self.max_pages))

    def remove_worker(self, name: str) -> None:
        """Forget a worker, with what it held and did. O(1). Raises CallerError if it is unknown."""
        del self._workers[self._known(name)]

    def apply(self, batch: EventBatch) -> bool:
        """Apply a worker's cache events. Returns False if it is out of sync: ask that worker for
        `EventFeed.take(snapshot=True)`.

        Until that comes, what was known of it still counts. A new incarnation starts from nothing.
        A batch that was applied already, or of a worker that was not added, is dropped; that
        returns True, since nothing is missing.
        """
        worker = self._workers.get(batch.worker)
        if worker is None:
            return True
        in_sync = worker.index.apply(batch)
        self.counters["batches"] += 1
        self.counters["out_of_sync"] += not in_sync
        return in_sync

    def route(
        self, keys: Sequence[bytes], now_s: float, *, namespace: Hashable = None,
        among: Collection[str] | None = None,
    ) -> Route:  # fmt: skip
        """Choose a worker, and count the request there until `ended`: its work is the pages of its
        prompt, plus one. O(workers * log pages of the prompt).

        Args:
            keys: of the prompt's whole pages, `cache.events.page_keys`; empty for a request that is
                not to be cached.
            among: only these workers may be chosen (the others drain, say).
        Raises CallerError, with nothing changed: no worker to choose from, or an unknown one; a
        time that is no number.
        """
        check_time(now_s)
        work = len(keys) + 1.0
        names = self._workers if among is None else map(self._known, among)
        workers = {name: self._workers[name] for name in names}
        if not workers:
            raise CallerError("there is no worker to choose from")
        loads = {name: worker.fade(now_s, self.fade_s) for name, worker in workers.items()}
        depths = {}
        for name, worker in workers.items():
            # First: a page that was expected and never came must not attract another request.
            worker.index.expire(now_s)
            depths[name] = worker.index.depth(namespace, keys)
        chosen = self._choose(loads, depths, len(keys))
        worker = workers[chosen]
        worker.open_work += work
        # The next turn, or a similar prompt, may come before this request's events do.
        if self.expect_s and len(keys) > depths[chosen]:
            worker.index.expect(namespace, keys, now_s + self.expect_s)
        self._average_work += (work - self._average_work) * (0.01 if self._average_work else 1.0)
        self.counters["routed"] += 1
        return Route(chosen, depths[chosen], work, worker)

    def ended(self, route: Route, now_s: float) -> None:
        """Move a request's work from open to fading, whatever became of it. No-op the second time.
        Raises CallerError, with nothing changed, for a time that is no number."""
        check_time(now_s)
        # Not by its name: a worker that was removed and added again has another load.
        worker, route._home = route._home, None
        if worker is not None:
            # Before the work is added: it starts to fade now, not when the load was last computed.
            worker.fade(now_s, self.fade_s)
            worker.open_work = max(0.0, worker.open_work - route.work)
            worker.faded += route.work

    def expire(self, now_s: float) -> None:
        """Forget pages that have not come, for `stats`; `route` does it too."""
        for worker in self._workers.values():
            worker.index.expire(now_s)

    def loads(self, now_s: float) -> dict[str, float]:
        return {name: worker.fade(now_s, self.fade_s) for name, worker in self._workers.items()}

    def stats(self) -> dict[str, int]:
        indexes = [worker.index for worker in self._workers.values()]
        return {
            **self.counters,
            "workers": len(indexes),
            "workers_out_of_sync": sum(not index.in_sync for index in indexes),
            "known_pages": sum(index.num_pages for index in indexes),
        }

    def _choose(self, loads: dict[str, float], depths: dict[str, int], num_pages: int) -> str:
        worths = _worths(list(depths.values()))
        limit = self.bound * sum(loads.values()) / len(loads) + self.slack * self._average_work
        idlest = min(loads, key=loads.__getitem__)
        # The least loaded worker is always eligible, so it is the choice to beat; equal worth goes
        # to the lower load.
        best, best_worth, most = idlest, worths[depths[idlest]], max(worths.values())
        for name, load in loads.items():
            worth = worths[depths[name]]
            if load <= limit and (worth, -load) > (best_worth, -loads[best]):
                best, best_worth = name, worth
        enough = self.min_worth * num_pages
        self.counters["overflowed"] += best_worth < most >= enough  # the best match was too busy
        by_load = best_worth <= 0 or best_worth < enough
        self.counters["routed_by_load" if by_load else "routed_by_prefix"] += 1
        return idlest if by_load else best

    def _known(self, name: str) -> str:
        if name not in self._workers:
            raise CallerError(f"worker {name!r} is unknown")
        return name


def _worths(depths: list[int]) -> dict[int, float]:
    """Return what a match of each of these depths is worth for routing: per page, the square of the
    share of the other workers that lack it.

    >>> _worths([4, 4, 8, 0, 0])
    {0: 0.0, 4: 1.0, 8: 5.0}
    """
    worths: dict[int, float] = {}
    above, worth, num_others = 0, 0.0, max(1, len(depths) - 1)
    # In rising order: all workers before this one in the list are shallower, so they lack the pages
    # between the last depth and this one.
    for num_lacking, depth in enumerate(sorted(depths)):
        if depth > above or not worths:
            worth += (depth - above) * (num_lacking / num_others) ** 2
            worths[depth] = worth
            above = depth
    return worths
