"""Decode's second tier: what the device's pool cannot keep stays in host memory.

Two trees of one class over two pools, with copies in both directions:

    write   behind a request's end. Both prefixes are pinned while it runs. An eviction waits for
            it only where it would take the pages that are read.
    load    at admission, beside the transfer of the rest. It is a flight (`flights.py`), so others
            join it. Its device pages are HELD if the flight ends before the copy.
    park    a session that pauses: once written, its device pages go first. A load without a request
            brings them back ahead of its next turn.

Only decisions are made here: `take_orders` gives the copies, `ended` takes what became of them.
Laws T1 to T8 are in docs/architecture.md.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from prefixkv.cache.events import EventFeed
from prefixkv.cache.eviction.policy import Policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import TOKEN_BYTES, RadixKey, common_pages
from prefixkv.cache.results import MatchResult, PrefixLock, Releases
from prefixkv.config import DecodeConfig
from prefixkv.decode.flights import Flight, Need, Release, Segment
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeParts
from prefixkv.decode.sources import MeasuringSource, Sources
from prefixkv.errors import UserErrors, check_laws
from prefixkv.pages.allocator import PageAllocator
from prefixkv.pages.requests import still_pending
from prefixkv.paging import Pages
from prefixkv.protocol.events import HostCopy, HostCopyDone
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.timers import Timers
from prefixkv.request import RETURNS_AFTER_S, DeviceEvent, Request
from prefixkv.settings import Continues

HOST: Final = "host memory"
"""In place of a decode worker's name in the key by which a load holds its pages; no room has it."""

FRESH_S: Final = 60.0
"""Seconds after which what loads took is no longer used: the load may be another by then."""

PARKED_S: Final = 120.0
"""A session that pauses for so long is parked."""

RETRY_S: Final = 1.0
"""Time until a parked path is tried again that found no room on the device."""

_MOST_WRITES: Final = 32  # under way at once
_MOST_DUE: Final = 1024  # paths that wait to be written
_MOST_DUE_BYTES: Final = 64 << 20  # of their keys
_KEPT: Final = 0.9  # the weight that the loads before keep when another has ended
_LOOKS: Final = 8  # at paths that are due, in one pass


class HostPages(NamedTuple):
    """Pages of host memory behind the pool. `ready` says how many of them, from the first on, can
    be used by now; None: all."""

    num_pages: int
    policy: str | Policy
    ready: Callable[[], int] | None = None


class DevicePath(Protocol):
    """The pages that the device has of a key, from the first on: `depth` of them."""

    @property
    def depth(self) -> int: ...

    @property
    def pages(self) -> Pages: ...

    @property
    def unprotected_pages(self) -> int:
        """Pages of the path that count as available until it is pinned."""
        ...


class DeviceLock(Protocol):
    """A pin of a path on the device: while it is `held`, nothing takes one of its `pages`."""

    held: bool

    @property
    def pages(self) -> Pages: ...


LockT = TypeVar("LockT", bound=DeviceLock)


class DevicePages(Protocol[LockT]):
    """The device's pages as the host tier sees them: a `PageManager`'s, or an engine's blocks.

    `epoch` counts the flushes: what was copied before one is of no use behind it.
    """

    page_size: int
    errors: UserErrors
    epoch: int

    @property
    def available_pages(self) -> int: ...

    @property
    def may_load(self) -> bool: ...

    def find(self, key: RadixKey) -> DevicePath: ...

    def pin_key(self, key: RadixKey, now_s: float) -> LockT: ...

    def unpin(self, lock: LockT) -> None: ...

    def release(self, owner: Hashable) -> int:
        """Release the pages that `owner`, a load that has ended, holds; return how many."""
        ...

    def holds_all(self, owner: Hashable, pages: Pages) -> bool: ...


class _Due(NamedTuple):
    """A path that a request has left on the device, to be written."""

    key: RadixKey
    now_s: float
    continues: Continues
    keep_pages: int  # that are of use though the conversation has ended


@dataclass(slots=True, eq=False)
class _Pause:
    """A path of which the next turn comes late: parked in host memory, and loaded ahead."""

    key: RadixKey
    session: str
    priority: int
    due_s: float
    load_s: float  # from when on it is loaded
    keep_pages: int = 0  # that other sessions begin with


@dataclass(slots=True, eq=False)
class _TierCopy(Generic[LockT]):
    """A copy that is under way: of the pages [start, end) of `key`, the last ones of it."""

    number: int
    is_load: bool
    key: RadixKey
    start: int
    end: int
    src: Pages
    dst: Pages
    epoch: int
    host_lock: PrefixLock
    device_lock: LockT | None  # of a write
    is_given_up: bool = False  # a load whose flight has ended; its device pages are held


class HostTier(Generic[LockT]):
    """Host tree and pages, and the copies between the tiers. Owned by the scheduler's thread.

    Args:
        pages: the device's; a `PageManager` needs a spare row for each load that is under way.
        num_pages: host pages.
        spare: returns how many device pages a write has to leave available.
        are_ready: whether all host pages can be used from the start; else `ready` says which.
    """

    def __init__(
        self,
        pages: DevicePages[LockT],
        num_pages: int,
        policy: str | Policy,
        counters: Counter[str],
        spare: Callable[[], int],
        are_ready: bool = True,
    ) -> None:
        self.pages = pages
        self.cache = RadixCache(pages.page_size, policy, num_pages, pages.errors)
        self.allocator = PageAllocator(num_pages)
        self._page_bytes = pages.page_size * TOKEN_BYTES
        self._counters = counters
        self._spare = spare
        # Pages that are not ready are owned by nothing that writes.
        self.num_ready = num_pages if are_ready else 0
        if not are_ready:
            self.allocator.alloc(num_pages)
        # Called with a path, in whole pages, that is in host memory, as far as the device had it.
        self.on_written: Callable[[RadixKey, float], None] = lambda key, now_s: None
        self._found: MatchResult | None = None  # the last one
        self._copies: dict[int, _TierCopy[LockT]] = {}
        self._orders: list[HostCopy] = []  # not taken yet
        self.due: OrderedDict[tuple[Hashable, bytes], _Due] = OrderedDict()
        self._due_bytes = 0  # of their keys
        # How many paths that are due were looked at in vain, one after the other, and the least
        # pages that a write could have had then.
        self._looked, self._room = 0, 0
        self._unwritten: list[tuple[DeviceEvent, Pages]] = []  # of the device, until its event
        self._count = 0
        self.num_writes = 0  # under way, each of which keeps its pages on the device
        # Of loads: pages that are under way; pages and seconds of those that ended, fading sums.
        self._loading_pages = 0
        self._loaded_pages = self._loading_s = 0.0
        self._loaded_s = -math.inf  # when the last of them ended

    def __len__(self) -> int:
        """Copies that are under way."""
        return len(self._copies)

    def ready(self, num_pages: int) -> None:
        """Note that the first `num_pages` can be used, no fewer than before."""
        if num_pages > self.num_ready:
            self.allocator.free(range(self.num_ready, num_pages))
            self.num_ready = num_pages

    def take_orders(self) -> list[HostCopy]:
        """Return the copies to be made, and forget them."""
        orders, self._orders = self._orders, []
        return orders

    # --- loads ------------------------------------------------------------------------------------

    def find(self, key: RadixKey) -> MatchResult | None:
        """Return what host memory has of `key`, if a load can begin; else None."""
        if not self.pages.may_load or not self.cache.num_pages:
            return None
        # A request is looked at when it comes, and again when it is admitted.
        found = self._found
        is_same = found is not None and found.data is key.data and found.is_current
        if found is None or not is_same or found.namespace != key.namespace:
            self._found = found = self.cache.match_prefix(key)
        return found

    def load_s(self, num_pages: int, now_s: float) -> float:
        """Return the seconds that a load takes, behind those under way, by what the last ones took;
        0 if not known."""
        # What is not loaded is not measured: so what once took long is tried again.
        if not self._loaded_pages or now_s - self._loaded_s > FRESH_S:
            return 0.0
        return (self._loading_pages + num_pages) * self._loading_s / self._loaded_pages

    def load(self, found: MatchResult, key: RadixKey, device_pages: Pages, now_s: float) -> RoomKey:
        """Order the load of the last pages of `key` to these device pages; return the key of its
        flight. `found` is what was found of `key`, or of more."""
        end = len(key.data) // self._page_bytes
        if found.depth > end:
            found = self.cache.match_prefix(key)
        host_lock = self.cache.pin(found, now_s)
        num_pages = len(device_pages)
        src = host_lock.pages[-num_pages:]
        self._order(True, key, end - num_pages, src, device_pages, host_lock, None)
        self._loading_pages += num_pages
        self._counters["host_loads"] += 1
        self._counters["host_loaded_pages"] += num_pages
        return load_key(self._count)

    def give_up(self, key: RoomKey) -> bool:
        """Note that a load's flight has ended. True if its copy goes on: then its key has to hold
        the device pages, which `ended` releases."""
        copy = self._copies.get(key.room)
        if copy is None:
            return False
        copy.is_given_up = True
        return True

    # --- writes -----------------------------------------------------------------------------------

    def computed(self, device_pages: Pages, after: DeviceEvent) -> None:
        """The device may write these pages until `after` is done: nothing reads them before."""
        self._forget_written()
        self._unwritten.append((after, device_pages))

    def leave(self, key: RadixKey, now_s: float, continues: Continues, keep_pages: int = 0) -> None:
        """Note that a request has left a path in the device's tree, to be written unless the
        conversation ends; then only the first `keep_pages`. O(log due)."""
        if len(key.data) < self._page_bytes:
            return
        # A key of its own: that of a retracted request grows.
        name = key.namespace, key.data
        self._forget_due(name)
        copied = RadixKey.of_packed(key.data, key.namespace)
        self.due[name] = _Due(copied, now_s, continues, keep_pages)
        self._due_bytes += len(key.data)
        while len(self.due) > 1 and (
            len(self.due) > _MOST_DUE or self._due_bytes > _MOST_DUE_BYTES
        ):
            oldest = next(iter(self.due))
            self._forget_due(oldest)
            self._counters["host_missed_pages"] += len(oldest[1]) // self._page_bytes
        self._looked = 0
        self.write_due()

    def _forget_due(self, name: tuple[Hashable, bytes]) -> None:
        if self.due.pop(name, None) is not None:
            self._due_bytes -= len(name[1])

    def write_due(self) -> None:
        """Begin due writes, as far as there is room. O(1) if none is, or nothing has changed since
        they were looked at."""
        room = self.pages.available_pages - self._spare()
        if room > self._room or self._unwritten:
            self._looked = 0
        for name in list(islice(self.due, _LOOKS)):
            if self.num_writes >= _MOST_WRITES or self._looked >= len(self.due):
                return
            if self._begin_write(self.due[name]):
                self._forget_due(name)
            else:
                # It may have to wait for long: others take their turns.
                self.due.move_to_end(name)
                self._room = min(room, self._room) if self._looked else room
                self._looked += 1

    def _begin_write(self, due: _Due) -> bool:
        """Count the use of a path in the host's tree, and begin the write of what that lacks. False
        if a part has to wait."""
        key, now_s, continues, keep_pages = due
        match, found = self.pages.find(key), self.cache.match_prefix(key)
        start, end, whole = found.depth, match.depth, len(key.data) // self._page_bytes
        # 1. Another write brings a part of it: what is left then is seen when that has ended.
        if self._is_being_written(key, start, whole):
            return False
        # 2. What need not be written, or cannot any more.
        if continues == 0:
            whole = end = min(end, max(start, keep_pages))
        num_pages = max(0, end - start)
        if num_pages:
            if self._is_unwritten(match, start, end):
                return False
            # 3. The copy keeps device pages that those that run may need for their next tokens: so
            # the last ones have to wait.
            left = self.pages.available_pages - self._spare() - match.unprotected_pages
            num_pages += min(0, left)
            if num_pages <= 0:
                return False
        num_later = end - start - num_pages if num_pages else 0
        self._counters["host_missed_pages"] += max(0, whole - max(start, end))
        # 4. One use a request; and what is there already stays until the rest is.
        host_lock = self.cache.lock(found, now_s)
        num_pages = min(num_pages, self.allocator.free_pages + self.cache.evictable_pages)
        if num_pages <= 0:
            if continues is not None:
                self.cache.hint(host_lock, continues, keep_pages=keep_pages)
            self._free(self.cache.unlock(host_lock))
            if start >= whole:
                self.on_written(key.prefix(whole * self.pages.page_size), now_s)
            return True
        # 5. Shorter where the rest of host memory is pinned: a prefix is of use as well.
        end = start + num_pages
        missing = num_pages - self.allocator.free_pages
        if missing > 0:
            self._free(self.cache.evict(missing, now_s))
        dst = self.allocator.alloc(num_pages)
        key = key.prefix(end * self.pages.page_size)
        # Cut to what is written: what lies behind may be evicted meanwhile.
        device_lock = self.pages.pin_key(key, now_s)
        self._order(False, key, start, device_lock.pages[start:], dst, host_lock, device_lock)
        self.num_writes += 1
        return num_later <= 0

    def _is_being_written(self, key: RadixKey, start: int, whole: int) -> bool:
        """True if a write under way brings pages of `key` behind `start`. O(writes)."""
        return any(
            not copy.is_load
            and copy.epoch == self.pages.epoch
            and copy.key.namespace == key.namespace
            and (end := min(copy.end, whole)) > start
            and common_pages(key.data, copy.key.data, 0, end, self._page_bytes) > start
            for copy in self._copies.values()
        )

    def _is_unwritten(self, match: DevicePath, start: int, end: int) -> bool:
        self._forget_written()
        if not self._unwritten:
            return False
        pages = match.pages[start:end]
        return any(np.isin(pages, theirs).any() for _, theirs in self._unwritten)

    def _forget_written(self) -> None:
        self._unwritten = [
            (pending, pages)
            for event, pages in self._unwritten
            if (pending := still_pending(event, self.pages.errors)) is not None
        ]

    # --- copies -----------------------------------------------------------------------------------

    def _order(
        self,
        is_load: bool,
        key: RadixKey,
        start: int,
        src: Pages,
        dst: Pages,
        host_lock: PrefixLock,
        device_lock: LockT | None,
    ) -> None:
        self._count = number = self._count + 1
        end, epoch = start + len(src), self.pages.epoch
        self._copies[number] = _TierCopy(
            number, is_load, key, start, end, src, dst, epoch, host_lock, device_lock
        )
        host_pages, device_pages = (src, dst) if is_load else (dst, src)
        self._orders.append(HostCopy(number, is_load, host_pages, device_pages))

    def ended(self, done: HostCopyDone, now_s: float) -> RoomKey | None:
        """Note that a copy has ended: nothing reads its source or writes its destination. Return
        the key of a load's flight; None for a write, or where the flight has ended before."""
        copy = self._copies.pop(done.number)
        if done.error is not None:
            self._counters["host_copies_failed"] += 1
        if copy.is_load:
            self._loading_pages -= len(copy.src)
            if done.error is None:
                self._loaded_pages = self._loaded_pages * _KEPT + len(copy.src)
                self._loading_s = self._loading_s * _KEPT + done.seconds
                self._loaded_s = now_s
            self._free(self.cache.unlock(copy.host_lock))
            if copy.is_given_up:
                self.pages.release(load_key(copy.number))
                return None
            return load_key(copy.number)
        self.num_writes -= 1
        self._looked = 0
        self._wrote(copy, done.error is None and copy.epoch == self.pages.epoch, now_s)
        self.write_due()
        return None

    def _wrote(self, copy: _TierCopy[LockT], is_good: bool, now_s: float) -> None:
        assert copy.device_lock is not None
        self.pages.unpin(copy.device_lock)
        if is_good:
            # The lock was this request's use, but where it held nothing.
            result = self.cache.insert(
                copy.key, copy.dst, now_s=now_s, lock=copy.host_lock, visit=copy.start == 0
            )
            # T4: nothing else has written these pages meanwhile.
            num_there = result.prefix_len // self.pages.page_size - copy.start
            self.allocator.free(copy.dst[:num_there])
            self.allocator.cache(copy.dst[num_there:])
            self._counters["host_written_pages"] += len(copy.dst)
        else:
            self.allocator.free(copy.dst)
        self._free(self.cache.unlock(copy.host_lock))
        if is_good:
            self.on_written(copy.key, now_s)

    def flush(self) -> None:
        """Empty host memory, after the device's tree. Copies under way end for nothing."""
        self.due.clear()
        self._due_bytes = 0
        self._free(self.cache.reset())

    def _free(self, ids: Pages) -> None:
        if len(ids):
            self.allocator.uncache(ids)
            self.allocator.free(ids)

    # --- what comes back --------------------------------------------------------------------------

    @property
    def held_pages(self) -> int:
        """Device pages that are held for loads whose flights have ended."""
        return sum(len(copy.dst) for copy in self._copies.values() if copy.is_given_up)

    # --- laws -------------------------------------------------------------------------------------

    @property
    def loads(self) -> set[RoomKey]:
        """Keys of the loads under way."""
        return {load_key(copy.number) for copy in self._copies.values() if copy.is_load}

    @property
    def held_by(self) -> set[RoomKey]:
        """Keys of the loads that hold device pages."""
        return {load_key(copy.number) for copy in self._copies.values() if copy.is_given_up}

    @property
    def pins(self) -> set[LockT]:
        """Locks of writes in the device's tree."""
        locks = (copy.device_lock for copy in self._copies.values())
        return {lock for lock in locks if lock is not None}

    def fills(self, key: RoomKey, device_pages: Pages) -> bool:
        """Return whether the load of this key fills just these device pages."""
        return np.array_equal(self._copies[key.room].dst, device_pages)

    def check_invariants(self) -> None:
        """Check T1 to T4 and T6. Raises InternalError."""
        self.cache.check_invariants()
        self.allocator.check_invariants()
        copies, pages, allocator = list(self._copies.values()), self.pages, self.allocator
        writes = [copy for copy in copies if not copy.is_load]
        owned = sum(len(copy.dst) for copy in writes) + allocator.num_pages - self.num_ready
        brought = [
            (copy.is_load, copy.key.namespace, copy.key.data[: (page + 1) * self._page_bytes])
            for copy in copies
            if copy.epoch == pages.epoch and not copy.is_given_up
            for page in range(copy.start, copy.end)
        ]
        laws = {
            "T1 host pages are free, owned or cached": not allocator.held_pages
            and not allocator.quarantined_pages,
            "T1 cached host pages are the host's tree's, and its orphans'": allocator.cached_pages
            == self.cache.num_pages + self.cache.orphan_pages,
            "T1 owned host pages are being written, or not ready": allocator.owned_pages == owned,
            "writes are counted": self.num_writes == len(writes),
            "pages of loads are counted": self._loading_pages
            == sum(len(copy.dst) for copy in copies if copy.is_load),
            "every lock in the host's tree is a copy's": self.cache.locks
            == {copy.host_lock for copy in copies},
            "T4 no page of a path is brought twice at once": len(set(brought)) == len(brought),
            "what is due is a path": all(
                len(data) >= self._page_bytes and data == due.key.data
                for (_, data), due in self.due.items()
            ),
            "the bytes of what is due are counted": self._due_bytes
            == sum(len(data) for _, data in self.due),
            "T6 without a copy nothing is protected": bool(copies)
            or not (self.cache.protected_pages or self.cache.orphan_pages),
        }
        check_laws(laws, f"{len(copies)} copies", allocator)
        for copy in copies:
            source: DeviceLock | None = copy.host_lock if copy.is_load else copy.device_lock
            laws = {
                "T2 a copy's source is locked": source is not None
                and source.held
                and np.array_equal(source.pages[copy.start : copy.end], copy.src),
                "T2 the host's part of a copied path is locked": copy.host_lock.held
                and copy.host_lock.prefix_len >= copy.start * pages.page_size,
                "T2 a copy has as many pages as it names": len(copy.src)
                == len(copy.dst)
                == copy.end - copy.start
                > 0,
                "T2 a load whose flight has ended holds its pages": not copy.is_given_up
                or pages.holds_all(load_key(copy.number), copy.dst),
            }
            check_laws(laws, copy)


def load_key(number: int) -> RoomKey:
    return RoomKey(number, 0, HOST)


class HostSource(MeasuringSource):
    """What host memory has behind what is cached or on its way: loaded by a copy.

    A load has no owner: requests join it, that which it is begun for first.
    """

    name, setting, brings_pages_only = "loaded", "host_memory", True

    def __init__(self, ledger: Ledger, host: HostPages, rule: Sources) -> None:
        super().__init__(ledger, rule)
        self._ready = host.ready
        # A write leaves a page to each request that runs, for its next token.
        self.tier: HostTier[PrefixLock] = HostTier(
            ledger.pages, host.num_pages, host.policy, ledger.journal.counters,
            lambda: len(ledger.budget), host.ready is None,
        )  # fmt: skip
        self.tier.on_written = self._park
        self._open: dict[RoomKey, Flight] = {}
        self._pauses: OrderedDict[tuple[Hashable, bytes], _Pause] = OrderedDict()  # by path
        self._pause_bytes = 0  # of their keys
        self._by_session: dict[tuple[Hashable, str], _Pause] = {}
        self._parked: Timers[_Pause] = Timers()  # when they are loaded

    # --- the way of a request ---------------------------------------------------------------------

    def reach(self, need: Need) -> Segment | None:
        found = self.tier.find(need.key) if need.req.may_load else None
        if found is None:
            return None
        page_size = self._ledger.page_size
        end = min(found.depth, len(need.key) // page_size) * page_size
        is_more = end > need.start and self._is_worth_loading(need, end - need.start)
        return Segment(self, need.start, end, found) if is_more else None

    def _is_worth_loading(self, need: Need, num_tokens: int) -> bool:
        if not need.can_ask:
            return True
        load_s = self.tier.load_s(num_tokens // self._ledger.page_size, need.now_s)
        missing = len(need.key) - need.start
        return self.rule.worth_loading(missing, num_tokens, load_s, need.req.prefill, need.now_s)

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        table = self._ledger.pages.table
        packed = table.packed(flight.pages.row, flight.start_pages, flight.end_pages)
        pages = np.frombuffer(packed, np.int32)
        flight.room_key = self.tier.load(segment.found, flight.key, pages, now_s)
        self._open[flight.room_key] = flight
        num_hit = 0 if flight.is_ahead else segment.end - segment.start
        self._ledger.journal.counters["host_hit_tokens"] += num_hit

    def give_up(self, flight: Flight, error: Exception | None) -> Release:
        self._open.pop(flight.room_key, None)
        if flight.is_open and self.tier.give_up(flight.room_key):
            return Release.HOLD
        return Release.DROP

    # --- copies -----------------------------------------------------------------------------------

    def take_orders(self) -> list[HostCopy]:
        return self.tier.take_orders()

    def hear(self, event: HostCopyDone, now_s: float) -> Flight | None:
        key = self.tier.ended(event, now_s)
        flight = self._open.pop(key, None) if key is not None else None
        if flight is None or event.error is None:
            if flight is not None:
                self._ledger.flights.arrived(flight)
            return None
        # No second try from host memory: the error may be of these pages.
        for one in self._ledger.flights.waiting_for(flight):
            if one.owner is not None:
                one.owner.may_load = False
        return flight

    # --- what the tier hears of -------------------------------------------------------------------

    def new_pass(self, now_s: float) -> tuple[()]:
        if self._ready is not None:
            self.tier.ready(self._ready())
        self.tier.write_due()
        for pause in self._parked.due(now_s):
            if pause.due_s < now_s or self._load_ahead(pause, now_s):
                self._end_pause(pause)
            else:
                self._parked.wake(pause, now_s + RETRY_S)
        return ()

    def written(self, pages: Pages, after: DeviceEvent) -> None:
        self.tier.computed(pages, after)

    def feeds(self, worker: PeerId) -> list[EventFeed]:
        return [EventFeed(self.tier.cache, *worker, is_behind=True)]

    def left(
        self, request: Request, key: RadixKey, now_s: float, continues: Continues, keep_tokens: int
    ) -> None:
        page_size, session = self._ledger.page_size, request.hints.session
        keep_pages = keep_tokens // page_size
        self._end_pause(self._by_session.get((key.namespace, session)))
        # A flag says of no pause: a turn may come at once.
        pause_s = 0.0 if isinstance(continues, bool) else continues or 0.0
        size = len(key) // page_size * page_size
        if pause_s >= PARKED_S and size:
            path = key.prefix(size)
            self._end_pause(self._pauses.get((path.namespace, path.data)))
            # A pause is over the time of the class below.
            load_s = now_s + max(one for one in (0.0, *RETURNS_AFTER_S) if one < pause_s)
            pause = _Pause(path, session, request.priority, now_s + pause_s, load_s, keep_pages)
            self._pauses[path.namespace, path.data] = pause
            self._pause_bytes += len(path.data)
            if session:
                self._by_session[path.namespace, session] = pause
            while len(self._pauses) > _MOST_DUE or self._pause_bytes > _MOST_DUE_BYTES:
                self._end_pause(next(iter(self._pauses.values())))
        self.tier.leave(key, now_s, continues, keep_pages)

    # --- pauses -----------------------------------------------------------------------------------

    def _end_pause(self, pause: _Pause | None) -> None:
        if pause is not None:
            self._parked.forget(pause)
            del self._pauses[pause.key.namespace, pause.key.data]
            self._pause_bytes -= len(pause.key.data)
            name = pause.key.namespace, pause.session
            if self._by_session.get(name) is pause:
                del self._by_session[name]

    def _park(self, key: RadixKey, now_s: float) -> None:
        """A path is in host memory: if its session pauses, the device's pages go first."""
        if (pause := self._pauses.get((key.namespace, key.data))) is not None:
            self._say(pause, now_s, is_parked=True)
            self._parked.wake(pause, pause.load_s)

    def _say(self, pause: _Pause, now_s: float, is_parked: bool) -> None:
        left_s, keep = pause.due_s - now_s, pause.keep_pages
        places = (self._ledger.pages.cache, is_parked), (self.tier.cache, False)
        for cache, first in places if left_s > 0 else ():
            cache.hint(cache.match_prefix(pause.key), left_s, is_parked=first, keep_pages=keep)

    def wake_s(self) -> float:
        return self._parked.next_s

    def announced(self, session: str, namespace: Hashable, now_s: float) -> None:
        if (pause := self._by_session.get((namespace, session))) is not None:
            pause.load_s, pause.due_s = now_s, max(pause.due_s, now_s + RETURNS_AFTER_S[0])
            self._parked.wake(pause, now_s)

    def _load_ahead(self, pause: _Pause, now_s: float) -> bool:
        """Load what the device lacks of a parked path, if that takes only pages that are free, or
        worth nothing. False if it has to wait."""
        ledger, pages, page_size = self._ledger, self._ledger.pages, self._ledger.page_size
        found, match = self.tier.find(pause.key), pages.find(pause.key)
        if found is None:
            return False
        start, end = match.depth, found.depth
        if end <= start:
            self._say(pause, now_s, is_parked=False)
        if end > start and ledger.flights.find(pause.key, start)[0] is None:
            missing = end - start + ledger.budget.kept_back - pages.allocator.free_pages
            if missing > 0:
                # What is left of the path itself is parked too.
                lock = pages.pin_key(pause.key, now_s)
                pages.free_worthless(missing, now_s)
                pages.unpin(lock)
                if end - start + ledger.budget.kept_back > pages.allocator.free_pages:
                    return False
                match = pages.find(pause.key)
            row = pages.open(match, end - start, now_s, is_load=True, is_used=True)
            request = Request("", pause.key, room=0, priority=pause.priority)
            flight = Flight(
                self, None, request, "", RoomKey(0, 0, HOST), pause.key.prefix(end * page_size),
                row, start, end, None, is_ahead=True,
            )  # fmt: skip
            ledger.flights.enter(flight, shareable=True)
            self.begin(flight, Segment(self, start * page_size, end * page_size, found), now_s)
        return True

    def flushed(self) -> None:
        for pause in list(self._pauses.values()):
            self._end_pause(pause)
        self.tier.flush()

    def coming_pages(self, releases: Releases) -> int:
        # A load ahead is for nobody yet: what it brings can be evicted at once.
        ahead = [one.pages for one in self._open.values() if one.is_ahead and not one.waiters]
        coming = self.tier.held_pages + sum(pages.num_own for pages in ahead)
        locks = {*self.tier.pins, *(pages.lock for pages in ahead)}
        return coming + sum(map(releases.end, locks))

    def keeps(self) -> tuple[set[PrefixLock], set[RoomKey]]:
        return self.tier.pins, self.tier.held_by

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        self.tier.check_invariants()
        pages = self._ledger.pages
        laws = {
            "T5 what waits for a load has one under way": self._open.keys()
            == self.tier.loads - self.tier.held_by,
            "a load is a flight that is open": list(self._open.values())
            == [one for one in self._ledger.flights if one.is_open and one.source is self],
            "T2 a load fills the pages of its flight": all(
                self.tier.fills(key, pages.pages(one.pages)[one.start_pages :])
                for key, one in self._open.items()
            ),
        }
        check_laws(laws, list(self._open))


def make_host(ledger: Ledger, config: DecodeConfig, parts: DecodeParts) -> HostSource | None:
    host = parts.organs.get(HostSource.setting)
    # With own compute both ways are about as good: what is loaded makes prompts short enough for
    # it.
    is_compared = config.compute is None
    return None if host is None else HostSource(ledger, host, Sources(loads=is_compared))
