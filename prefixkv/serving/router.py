"""Choice of a decode worker: the one that holds most of a request's prefix, unless it is too busy.

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
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated

from msgspec import Meta

from prefixkv.errors import CallerError, shown, shown_namespace
from prefixkv.settings import (
    MAX_BYTES,
    CountOrZero,
    Number,
    Seconds,
    SecondsOrZero,
    check_fields,
    check_time,
)
from prefixkv.spi import CheckpointRemoved, CheckpointStored, Cleared, EventBatch, Removed, Stored

_STORED = math.inf  # until when a page counts that the worker has reported
_COUNTERS = (
    "routed", "routed_by_prefix", "routed_by_load", "overflowed", "batches",
    "batches_of_unknown_workers", "out_of_sync",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Route:
    """The choice for a request. `matched_pages` of it are on the worker, or expected there."""

    worker: str
    matched_pages: int
    work: float
    _home: _RoutedWorker | None = field(repr=False)  # None once the request has ended


class _HeldPages:
    """Pages that one worker holds in one kind of memory, by its events. They are whole prefixes, so
    a match is found by bisection."""

    def __init__(self) -> None:
        self.in_sync = False
        self.num_pages = 0
        self.skipped_pages = 0  # reported as stored, but beyond the bound or below such a page
        # By namespace and page key: until when the page counts; `_STORED` once it was reported.
        self._held: dict[Hashable, dict[bytes, float]] = {}

    def of(self, namespace: Hashable) -> dict[bytes, float]:
        """Return until when each page of a namespace counts; not to be changed."""
        return self._held.get(namespace, {})

    def depth(self, namespace: Hashable, keys: Sequence[bytes]) -> int:
        """Count how many of these pages, from the first on, are held. O(log pages)."""
        held = self._held.get(namespace)
        if not held or not keys or keys[0] not in held:
            return 0
        return bisect_left(keys, True, 1, key=lambda page_key: page_key not in held)

    def forget(self) -> None:
        self._held.clear()
        self.num_pages = self.skipped_pages = 0

    def store(self, event: Stored, room: int) -> bool:
        """Add `room` pages at most. Returns False if their parent should be known and is not."""
        held = self._held.get(event.namespace, {})
        keys = event.page_keys
        # The parent is unknown. If any page was skipped before, the parent may be one of those, and
        # its children are skipped like it. Otherwise an event is missing.
        if event.parent and held.get(event.parent) != _STORED:
            self.skipped_pages += len(keys)
            return self.skipped_pages > len(keys)
        keys = keys[:room]
        self.skipped_pages += len(event.page_keys) - len(keys)
        if keys:
            self.hold(event.namespace, keys, _STORED)
        return True

    def remove(self, event: Removed) -> bool:
        """Returns False for a page that is neither known nor skipped."""
        held = self._held.get(event.namespace, {})
        # From the end, so that what is left is a whole prefix at every moment.
        for key in reversed(event.page_keys):
            if held.get(key) == _STORED:
                self.drop(event.namespace, key)
            elif self.skipped_pages:
                self.skipped_pages -= 1
            else:
                return False
        return True

    def hold(self, namespace: Hashable, keys: Sequence[bytes], until_s: float) -> None:
        """Set until when pages count. `num_pages` counts those that are new."""
        held = self._held.setdefault(namespace, {})
        before = len(held)
        held.update(dict.fromkeys(keys, until_s))
        self.num_pages += len(held) - before

    def drop(self, namespace: Hashable, key: bytes) -> None:
        held = self._held[namespace]
        del held[key]
        self.num_pages -= 1
        if not held:
            del self._held[namespace]


class WorkerIndex:
    """Pages that one worker holds, or is expected to hold soon, in its pool or in its host memory.
    Bounded; of a path longer than the bound allows only the upper part is known."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.incarnation = -1
        self._former: deque[int] = deque(maxlen=64)  # earlier incarnations
        self.next_seq = 0
        self._pool = _HeldPages()
        self._host: _HeldPages | None = None  # of a worker that has told of its host memory
        # Of a worker that goes on at checkpoints alone: the pages that these end on, by namespace.
        self._checkpoints: dict[Hashable, set[bytes]] | None = None
        # In order of time, since every expectation lasts as long: `expire` looks at its front
        # alone.
        self._expected: deque[tuple[float, Hashable, Sequence[bytes]]] = deque()

    @property
    def in_sync(self) -> bool:
        """True if no event is missing."""
        return self._pool.in_sync and (self._host is None or self._host.in_sync)

    @property
    def num_pages(self) -> int:
        """A page in both kinds of memory counts twice."""
        return self._pool.num_pages + (0 if self._host is None else self._host.num_pages)

    @property
    def skipped_pages(self) -> int:
        """Pages that were reported and that are not known, for the bound."""
        return self._pool.skipped_pages + (0 if self._host is None else self._host.skipped_pages)

    def apply(self, batch: EventBatch) -> bool:
        """Returns False if an event is missing, until a `Cleared` begins a new snapshot."""
        # 1. A late batch of an earlier incarnation, or one that was applied already: ignored.
        # 2. A new incarnation: its cache is another, so everything known is dropped.
        # 3. A gap in the numbers: out of sync. What is known stays, as it is better than nothing.
        if batch.incarnation in self._former or (
            batch.incarnation == self.incarnation and batch.seq < self.next_seq
        ):
            return True
        if batch.incarnation != self.incarnation:
            self.forget()
            self._former.append(self.incarnation)
            self.incarnation = batch.incarnation
            self._pool.in_sync, self._host, self._checkpoints = False, None, None
        elif batch.seq != self.next_seq:
            self._pool.in_sync = False
            if self._host is not None:
                self._host.in_sync = False
        self.next_seq = batch.seq + 1
        if batch.at_checkpoints and self._checkpoints is None:
            self._checkpoints = {}
        # A `Cleared` repairs any gap: after it all that the worker holds there is reported again.
        for event in batch.events:
            if isinstance(event, CheckpointStored | CheckpointRemoved):
                self._note_checkpoint(event)
                continue
            pages = self._pages_of(event)
            if isinstance(event, Cleared):
                if not event.is_host:
                    self._expected.clear()
                    self._forget_checkpoints()
                pages.forget()
                pages.in_sync = True
            elif pages.in_sync:
                pages.in_sync = (
                    pages.store(event, self.max_pages - self.num_pages)
                    if isinstance(event, Stored)
                    else pages.remove(event)
                )
        return self.in_sync

    def _note_checkpoint(self, event: CheckpointStored | CheckpointRemoved) -> None:
        """Of a worker that uses pages without checkpoints none is kept."""
        if self._checkpoints is None:
            return
        # Of a page beyond the bound it is of no use, and costs as much.
        if isinstance(event, CheckpointStored):
            if self._pool.of(event.namespace).get(event.page_key) == _STORED:
                self._checkpoints.setdefault(event.namespace, set()).add(event.page_key)
            return
        found = self._checkpoints.get(event.namespace, set())
        found.discard(event.page_key)
        if not found:
            self._checkpoints.pop(event.namespace, None)

    def _forget_checkpoints(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.clear()

    def _pages_of(self, event: Stored | Removed | Cleared) -> _HeldPages:
        if not event.is_host:
            return self._pool
        if self._host is None:
            self._host = _HeldPages()
        return self._host

    def depth(self, namespace: Hashable, keys: Sequence[bytes]) -> int:
        """Count how many of these pages, from the first on, are held or expected. O(log pages). Of
        a worker that goes on at checkpoints alone those up to the deepest of them; O(pages behind
        it). What is expected counts in full: a checkpoint is saved at a prompt's end."""
        depth = self._pool.depth(namespace, keys)
        if self._checkpoints is not None:
            ends, held = self._checkpoints.get(namespace, ()), self._pool.of(namespace)
            # What is expected lies behind all that is stored.
            if depth and held.get(keys[depth - 1]) == _STORED:
                depth = next((at for at in range(depth, 0, -1) if keys[at - 1] in ends), 0)
        # A whole prefix in either, so the longer one counts.
        return depth if self._host is None else max(depth, self._host.depth(namespace, keys))

    def expect(self, namespace: Hashable, keys: Sequence[bytes], until_s: float) -> None:
        """Count these pages, a prefix, as held until `until_s`, unless events say more by then."""
        held = self._pool.of(namespace)
        # Pages that are reported must not be turned into expected ones, which expire.
        keys = [key for key in keys if held.get(key, 0.0) != _STORED]
        keys = keys[: self.max_pages - self.num_pages]
        if not keys:
            return
        self._pool.hold(namespace, keys, until_s)
        self._expected.append((until_s, namespace, keys))

    def expire(self, now_s: float) -> None:
        """Forget pages that were expected by now and not reported. Amortised O(pages expected)."""
        while self._expected and self._expected[0][0] <= now_s:
            _, namespace, keys = self._expected.popleft()
            held = self._pool.of(namespace)
            for key in keys:
                # A page may have been reported meanwhile, or be expected for longer by a later
                # request.
                if held.get(key, _STORED) <= now_s:
                    self._pool.drop(namespace, key)

    def forget(self) -> None:
        self._expected.clear()
        self._forget_checkpoints()
        self._pool.forget()
        if self._host is not None:
            self._host.forget()


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

    # --- workers ----------------------------------------------------------------------------------

    def add_worker(self, name: str) -> None:
        """Raises CallerError if it was added before."""
        _check_name(name)
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
        A batch that was applied already, or of a worker that was not added, is counted and dropped;
        that returns True, since nothing is missing. Raises CallerError, with nothing changed, for
        what is not as `EventBatch` declares it.
        """
        _check_batch(batch)
        worker = self._workers.get(batch.worker)
        if worker is None:
            self.counters["batches_of_unknown_workers"] += 1
            return True
        in_sync = worker.index.apply(batch)
        self.counters["batches"] += 1
        self.counters["out_of_sync"] += not in_sync
        return in_sync

    # --- requests ---------------------------------------------------------------------------------

    def route(
        self,
        keys: Sequence[bytes],
        now_s: float,
        *,
        namespace: Hashable = None,
        work: float | None = None,
        among: Collection[str] | None = None,
    ) -> Route:
        """Choose a worker, and count the request there until `ended`. O(workers * log pages of the
        prompt).

        Args:
            keys: of the prompt's whole pages, `cache.events.page_keys`; empty for a request that is
                not to be cached.
            work: what it adds to a load; by default the pages of its prompt, plus one.
            among: only these workers may be chosen (the others drain, say).
        Raises CallerError, with nothing changed: no worker to choose from, or an unknown one; work
        below 0; a time that is no number; page keys or a namespace that cannot be looked up.
        """
        # All checks come before any change, so that an error leaves no count without an end.
        check_time(now_s)
        _check_keys(namespace, keys)
        if work is None:
            work = len(keys) + 1.0
        if isinstance(work, bool) or not (isinstance(work, Real) and 0 <= work < MAX_BYTES):
            raise CallerError(f"work is {shown(work)}, a number of at least 0 is needed")
        workers = self._workers
        if among is not None:
            if not isinstance(among, Collection) or isinstance(among, str):
                raise CallerError(f"among is {shown(among)}, a list of workers is needed")
            try:
                names = [*among]
            except TypeError:  # an array without dimensions has all methods of a collection
                raise CallerError(f"among is {shown(among)}, a list of workers is needed") from None
            workers = {name: workers[self._known(name)] for name in names}
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

    def ended(self, route: Route, now_s: float) -> bool:
        """Move a request's work from open to fading, whatever became of it. Returns False, and does
        nothing, the second time or after its worker was removed. Raises CallerError, with nothing
        changed, for a time that is no number."""
        check_time(now_s)
        if not isinstance(route, Route):
            raise CallerError(f"route is a {type(route).__name__}, a Route is needed")
        # By identity: a worker that was removed and added again has the same name, but another
        # load.
        worker = route._home
        if worker is None or self._workers.get(route.worker) is not worker:
            return False
        route._home = None
        # Before the work is added: it starts to fade now, not when the load was last computed.
        worker.fade(now_s, self.fade_s)
        worker.open_work = max(0.0, worker.open_work - route.work)
        worker.faded += route.work
        return True

    def expire(self, now_s: float) -> None:
        """Forget pages that have not come, for `stats`; `route` does it too."""
        check_time(now_s)
        for worker in self._workers.values():
            worker.index.expire(now_s)

    def loads(self, now_s: float) -> dict[str, float]:
        check_time(now_s)
        return {name: worker.fade(now_s, self.fade_s) for name, worker in self._workers.items()}

    def stats(self) -> dict[str, int]:
        indexes = [worker.index for worker in self._workers.values()]
        return {
            **self.counters,
            "workers": len(indexes),
            "workers_out_of_sync": sum(not index.in_sync for index in indexes),
            "known_pages": sum(index.num_pages for index in indexes),
            "skipped_pages": sum(index.skipped_pages for index in indexes),
        }

    def _choose(self, loads: dict[str, float], depths: dict[str, int], num_pages: int) -> str:
        """`loads` and `depths` are each worker's load and matched pages."""
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
        if best_worth <= 0 or best_worth < enough:
            self.counters["routed_by_load"] += 1
            return idlest
        self.counters["routed_by_prefix"] += 1
        return best

    def _known(self, name: str) -> str:
        _check_name(name)
        if name not in self._workers:
            raise CallerError(f"worker {name!r} is unknown")
        return name


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise CallerError(f"the name of a worker is {shown(name)}, a string is needed")


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


def _check_keys(namespace: Hashable, keys: Sequence[bytes]) -> None:
    """Raise CallerError for what is not as `page_keys` makes it. O(pages)."""
    try:
        hash(namespace)
        all_bytes = isinstance(keys, Sequence) and set(map(type, keys)) <= {bytes}
    except TypeError:
        all_bytes = False
    if not all_bytes:
        raise CallerError(
            f"keys of namespace {shown_namespace(namespace)} are no list of bytes: {shown(keys)}"
        )


def _check_batch(batch: EventBatch) -> None:
    """Raise CallerError for a batch that is not as declared: half of it would leave a worker that
    seems to be in sync and is not."""
    if not isinstance(batch, EventBatch) or not isinstance(batch.events, tuple | list):
        raise CallerError(f"{shown(batch)} is no batch of events")
    if type(batch.incarnation) is not int or type(batch.seq) is not int:
        raise CallerError(f"batch {shown(batch.seq)} of incarnation {shown(batch.incarnation)}")
    for event in batch.events:
        if isinstance(event, Stored | Removed):
            _check_keys(event.namespace, event.page_keys)
            if type(event.parent) is not bytes:
                raise CallerError(f"the parent of {shown(event)} is no page key")
        elif isinstance(event, CheckpointStored | CheckpointRemoved):
            _check_keys(event.namespace, [event.page_key])
        elif not isinstance(event, Cleared):
            raise CallerError(f"{shown(event)} is no event")
