"""Pages that several requests need, and that are on their way, are sent once.

An admitted request's transfer is a *flight*. It brings what is neither in the tree nor on its way,
and *joins* the flight that brings the rest; it is committed after that one. So flights form trees:

    a: [0, 9)    b joined a at 6: [6, 8)    c joined b at 8: [8, 12)

A copy from host memory is a *load*: a flight without an owner. A flight that loses its request goes
on while another waits for it. One that will not arrive ends all that wait: their requests ask
again.

A flight is complete when its room, copy or computation has succeeded and the flight that it joined
is committed. To commit it is to give its pages to the tree, where the flights that joined it find
them. An engine computes only behind a committed flight, whose KV it reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from operator import attrgetter
from typing import TypeAlias

from prefixkv.cache.radix_key import TOKEN_BYTES, RadixKey, common_pages
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import InternalError, check_laws
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.requests import BrokenEvent, still_pending
from prefixkv.protocol.ids import RoomKey
from prefixkv.request import Request

StartKey: TypeAlias = tuple[Hashable, int, bytes]
"""A namespace, the page number at which a flight begins, and the packed tokens of that page."""


@dataclass(slots=True, eq=False, repr=False)
class Flight:
    """One request's pages on their way.

    A load has `prefill` of "", the first request that joined it as `request`, and a `room_key` of
    its own, which holds its pages where it ends before its copy. `owner` is None for a load, and
    once the request has gone while others wait. `key` does not change while it is on its way. It
    brings the whole pages at [start_pages, end_pages) of the request's row, without those that are
    computed here; `joined` brings those before that are not in the tree.
    """

    owner: DecodeRequest | None
    request: Request
    prefill: str
    room_key: RoomKey
    key: RadixKey
    pages: RequestPages
    start_pages: int
    end_pages: int
    joined: Flight | None
    number: int
    # Until its pages are here, or its room has ended without them.
    is_open: bool = True
    is_local: bool = False  # computed by this worker's own engine: it has no room
    is_load: bool = False  # copied from host memory: it has no room
    start_key: StartKey | None = None  # key in `InFlight._by_start`; None: may not be joined
    waiters: dict[Flight, None] = field(default_factory=dict)  # flights that joined, oldest first

    @property
    def num_pages(self) -> int:
        """Number of whole pages that the flight brings."""
        return self.end_pages - self.start_pages

    @property
    def has_room(self) -> bool:
        return not self.is_local and not self.is_load

    def __repr__(self) -> str:
        owner = self.owner.rid if self.owner is not None else None
        return f"Flight({self.number}, {owner!r}, [{self.start_pages}, {self.end_pages}))"


class InFlight:
    """All flights, and an index of those that may be joined. Owned by the scheduler's thread.

    A look-up is O(1) if nothing is found; else O(flights on the path), and a memcmp each.
    """

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._flights: dict[Flight, None] = {}
        self._by_owner: dict[DecodeRequest, Flight] = {}
        # By where a flight begins and the page it begins with. The pages before may differ, so each
        # is a list.
        self._by_start: dict[StartKey, list[Flight]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def all(self) -> list[Flight]:
        """Return all flights, by number. Any thread may call it: the copy is made in one step."""
        return list(self._flights)

    @property
    def num_owned(self) -> int:
        """Number of flights with a request of their own."""
        return len(self._by_owner)

    def of(self, req: DecodeRequest) -> Flight | None:
        return self._by_owner.get(req)

    # --- looking ----------------------------------------------------------------------------------

    def find(self, key: RadixKey, start_pages: int) -> tuple[Flight | None, int]:
        """Return the flight that brings most of `key` beyond `start_pages`, and their common end in
        pages. (None, `start_pages`) if there is none.

        One flight may begin where another ends or is left: they are followed as far as they go, and
        the last one, which waits for those before, is returned.
        """
        found, end = None, start_pages
        if not self._by_start:
            return found, end
        data, page_bytes = key.data, self._page_bytes
        while True:
            page = data[end * page_bytes : (end + 1) * page_bytes]
            bucket = self._by_start.get((key.namespace, end, page))
            # Also where the key ends: no flight begins with a partial page.
            if bucket is None:
                return found, end
            for flight in bucket:
                if common := self._common_pages(flight, data, end):
                    found, end = flight, common
                    # No other flight of this bucket can match: it would have joined this one.
                    break
            else:
                return found, end

    def _common_pages(self, flight: Flight, data: bytes, start: int) -> int:
        """Return where `data` and a flight part from `start` on; 0 if before the end of the
        flight's first page."""
        page_bytes = self._page_bytes
        flight_data = flight.key.data
        # The key compares one page only; the pages before it may differ, and then the KV does.
        if not data.startswith(memoryview(flight_data)[: (start + 1) * page_bytes]):
            return 0
        high = min(flight.end_pages, len(data) // page_bytes)
        return common_pages(data, flight_data, start + 1, high, page_bytes)

    # --- the life of a flight ---------------------------------------------------------------------

    def start(self, owner: DecodeRequest, joined: Flight | None, shareable: bool) -> Flight:
        key, pages = owner.key, owner.pages_held
        assert pages is not None
        flight = Flight(
            owner=owner,
            request=owner.request,
            prefill=owner.prefill,
            room_key=owner.room_key,
            key=key,
            pages=pages,
            start_pages=pages.num_shared,
            end_pages=owner.sent_len * TOKEN_BYTES // self._page_bytes,
            joined=joined,
            number=self._count + 1,
        )
        self._by_owner[owner] = flight
        self._enter(flight, shareable)
        return flight

    def start_load(
        self,
        first: DecodeRequest,
        key: RadixKey,
        pages: RequestPages,
        room_key: RoomKey,
        joined: Flight | None,
    ) -> Flight:
        """Enter the flight that loads the last pages of `key`; `first` joins it next."""
        flight = Flight(
            owner=None,
            request=first.request,
            prefill="",
            room_key=room_key,
            key=key,
            pages=pages,
            start_pages=pages.num_shared,
            end_pages=pages.num_pages,
            joined=joined,
            number=self._count + 1,
            is_load=True,
        )
        self._enter(flight, shareable=True)
        return flight

    def _enter(self, flight: Flight, shareable: bool) -> None:
        self._count += 1
        self._flights[flight] = None
        if flight.joined is not None:
            flight.joined.waiters[flight] = None
        # It can be found only if it brings a whole page: a partial one is never shared.
        start, page_bytes = flight.start_pages, self._page_bytes
        if shareable and start < flight.end_pages:
            first_page = flight.key.data[start * page_bytes : (start + 1) * page_bytes]
            flight.start_key = start_key = flight.key.namespace, start, first_page
            self._by_start.setdefault(start_key, []).append(flight)

    def disown(self, flight: Flight) -> None:
        """Take a flight's owner from it: its request ends, it continues for its waiters."""
        if flight.owner is not None:
            del self._by_owner[flight.owner]
            flight.owner = None

    def commit(self, flight: Flight) -> list[Flight]:
        # From here on a match finds its pages in the tree, so no flight may be found for them.
        self._take_out(flight)
        waiters = list(flight.waiters)
        flight.waiters.clear()
        for waiter in waiters:
            waiter.joined = None
        return waiters

    def remove(self, flight: Flight) -> list[Flight]:
        """Take out a flight that is not to be committed. Return the others that end with it, by
        number: those that wait for it, and those it waited for that nothing else needs."""
        gone = [flight, *self.waiting_for(flight)]
        # Upwards: a flight without an owner lived only for those that waited. The first that has an
        # owner, or another waiter, stays.
        needless = flight
        while (above := needless.joined) is not None:
            del above.waiters[needless]
            if above.owner is not None or above.waiters:
                break
            gone.append(above)
            needless = above
        # Links are cut only now: the walks above follow them.
        for one in gone:
            self._take_out(one)
            one.waiters.clear()
            one.joined = None
        return sorted(gone[1:], key=attrgetter("number"))

    def waiting_for(self, flight: Flight) -> list[Flight]:
        """Return the flights that wait for this one, directly or not."""
        found = list(flight.waiters)
        for one in found:  # the list grows as waiters of waiters come to light
            found.extend(one.waiters)
        return found

    def flush(self) -> list[Flight]:
        """Take out and return the flights that a flush ends, by number: none of their pages may go
        to the tree any more. Those without an owner, and those that wait, end. The others continue
        for their own request alone."""
        flights = self._flights
        gone = [one for one in flights if one.joined is not None or one.owner is None]
        for flight in gone:
            self._forget(flight)
            flight.joined = None
            flight.waiters.clear()
        # What arrives later is of the old weights: a request that came after the flush must not
        # join it.
        for flight in flights:
            flight.waiters.clear()
            flight.start_key = None
        self._by_start.clear()
        return gone

    def remove_all(self) -> list[Flight]:
        """Take out every flight. Return them by number."""
        gone = list(self._flights)
        for flight in gone:
            flight.joined = flight.start_key = None
            flight.waiters.clear()
        self._flights.clear()
        self._by_owner.clear()
        self._by_start.clear()
        return gone

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight]
        if flight.owner is not None:
            del self._by_owner[flight.owner]

    def _take_out(self, flight: Flight) -> None:
        self._forget(flight)
        if flight.start_key is not None:
            bucket = self._by_start[flight.start_key]
            bucket.remove(flight)
            if not bucket:
                del self._by_start[flight.start_key]

    # --- checks -----------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InternalError if a law of the flights or of the index is broken."""
        flights, page_bytes = self._flights, self._page_bytes
        keys = {
            flight: start_key for start_key, bucket in self._by_start.items() for flight in bucket
        }
        laws = {
            "numbers count up, so that nothing waits for itself": all(
                a.number < b.number for a, b in pairwise(flights)
            ),
            "only owners have a flight": len(self._by_owner)
            == sum(flight.owner is not None for flight in flights),
            "no two begin alike": all(
                not one.key.data.startswith(other.key.data[: (other.start_pages + 1) * page_bytes])
                for bucket in self._by_start.values()
                for one, other in combinations(bucket, 2)
            ),
            "what is found is on its way": keys.keys() <= flights.keys(),
        }
        check_laws(laws, list(flights))
        for flight in flights:
            above, owner, key = flight.joined, flight.owner, flight.key
            laws = {
                "what a flight waits for is older": above is None or above.number < flight.number,
                "a flight that waits, and the one it waits for, know of each other": (
                    above is None or (above in flights and flight in above.waiters)
                )
                and all(waiter in flights and waiter.joined is flight for waiter in flight.waiters),
                "a flight that joined shares pages that are on their way, others share none": (
                    above is not None
                )
                == (flight.pages.num_joined > 0),
                "what is joined is brought": above is None
                or (
                    above.start_pages < flight.start_pages <= above.end_pages
                    and key.data.startswith(above.key.data[: flight.start_pages * page_bytes])
                    and key.namespace == above.key.namespace
                ),
                "without an owner, another flight waits": bool(owner or flight.waiters),
                "a load has no owner, and is not computed here": not flight.is_load
                or (owner is None and not flight.is_local),
                "an owner's pages are the flight's": owner is None
                or (owner.pages_held is flight.pages and self.of(owner) is flight),
                "a flight begins where it is found": flight.start_key == keys.get(flight)
                and flight.start_key
                in (None, (key.namespace, flight.start_pages, _page(flight, page_bytes))),
            }
            check_laws(laws, flight, list(flights))


def _page(flight: Flight, page_bytes: int) -> bytes:
    return flight.key.data[flight.start_pages * page_bytes :][:page_bytes]


class DecodeTransferQueue:
    """Open rooms, flights that are computed here or loaded, and complete ones. Owned by the
    scheduler's thread.

    Source: SGLang's `DecodeTransferQueue`; there a request waits for its own transfer only.
    """

    def __init__(self, pages: PageManager, flights: InFlight) -> None:
        self._pages = pages
        self._flights = flights
        # A flight is in `_open` or `_local`, then in neither while the one it joined is on its way,
        # then in `_complete`.
        self._open: dict[RoomKey, Flight] = {}  # loads too: no room has the key of one
        self._local: dict[Flight, None] = {}
        self._complete: deque[Flight] = deque()

    def add(self, flight: Flight) -> None:
        """Enter the flight of an admitted request; its room is open. Or one that a copy from host
        memory brings."""
        key = flight.room_key
        if key in self._open:
            raise InternalError(f"{key} is in transfer twice")
        self._open[key] = flight

    def add_local(self, flight: Flight) -> None:
        """Enter a flight that the engine computes; it has no room, or none any more."""
        flight.is_local = True
        self._local[flight] = None

    @property
    def local(self) -> list[Flight]:
        """Flights that the engine computes, or has to, oldest first. Any thread may ask."""
        return list(self._local)

    def get(self, key: RoomKey) -> Flight | None:
        return self._open.get(key)

    def succeed(self, key: RoomKey, aux: bytes) -> Flight | None:
        """Note that a room's pages are all written, or a load's copied. Return its flight; None if
        it was aborted. What its request lacks still, the engine computes from now on."""
        flight = self._open.pop(key, None)
        if flight is not None:
            if (owner := flight.owner) is not None:
                owner.aux = aux
                if owner.sent_len < owner.fill_len:
                    self.add_local(flight)
                    return flight
            self.arrived(flight)
        return flight

    def arrived(self, flight: Flight) -> None:
        flight.is_open = False
        self._local.pop(flight, None)
        # Else `pop_transferred` appends it, when the joined flight is committed.
        if flight.joined is None:
            self._complete.append(flight)

    def is_complete(self, flight: Flight) -> bool:
        """Return True if a flight has arrived and waits for no other, nor for the device."""
        has_arrived = not flight.is_open and flight.joined is None
        return has_arrived and not self._would_free_unwritten(flight)

    @property
    def complete(self) -> list[Flight]:
        """Flights that `pop_transferred` will commit, once the device has written."""
        return list(self._complete)

    def remove(self, flight: Flight) -> bool:
        if flight in self._local:
            del self._local[flight]
        elif flight.is_open:
            del self._open[flight.room_key]
            return flight.has_room
        if flight in self._complete:
            self._complete.remove(flight)
        return False

    @property
    def num_open(self) -> int:
        """Number of rooms, and of loads, with pages that are still being written."""
        return len(self._open)

    @property
    def num_complete(self) -> int:
        """Number of flights that `pop_transferred` will commit."""
        return len(self._complete)

    def pop_transferred(self, now_s: float) -> list[DecodeRequest]:
        """Commit the complete flights, and return their requests. Whole pages become cached prefix,
        which the request locks."""
        # A commit may complete flights that joined it, so the queue grows as it is worked off.
        committed, unwritten = [], []
        while self._complete:
            flight = self._complete.popleft()
            if self._would_free_unwritten(flight):
                unwritten.append(flight)
                continue
            req = flight.owner
            # 1. To the tree. A flight without an owner is there only for others, which find it in
            # the tree.
            if req is None or req.request.cacheable:
                priority = flight.request.priority
                self._pages.cache_unfinished(flight.pages, flight.key, now_s, priority=priority)
            # 2. Its waiters lock what they joined, before the flight's own lock may end below: in
            # between nothing may evict these pages.
            for waiter in self._flights.commit(flight):
                # The load was the use of the request that it was begun for.
                is_own = flight.is_load and waiter.request is flight.request
                self._pages.lock_joined(waiter.pages, waiter.key, now_s, is_used=is_own)
                if not waiter.is_open:
                    self._complete.append(waiter)
            # 3. Without an owner nothing runs: the lock and the tail go.
            if req is None:
                self._pages.drop(flight.pages)
            else:
                req.become(DecodeState.TRANSFERRED)
                committed.append(req)
        self._complete.extend(unwritten)
        return committed

    def stuck(self) -> list[tuple[DecodeRequest, Exception]]:
        """Return the requests that would wait for ever, with the reason: their device event has
        raised, and they would free what the device may still write."""
        found = []
        for flight in self._complete:
            event = None if flight.owner is None else flight.owner.unwritten
            if isinstance(event, BrokenEvent) and self._would_free_unwritten(flight):
                assert flight.owner is not None
                found.append((flight.owner, event.error))
        return found

    def _would_free_unwritten(self, flight: Flight) -> bool:
        """True if the commit frees pages that the device may still write: its own copies of what
        the tree has by now. Prefill could write there next, beside it."""
        req = flight.owner
        if req is not None and req.unwritten is not None:
            req.unwritten = still_pending(req.unwritten, self._pages.errors)
        if req is None or req.unwritten is None or not req.request.cacheable:
            return False
        return self._pages.find(flight.key).depth > flight.pages.num_locked

    def check_invariants(self) -> None:
        """Check every law, those of the flights included. Raises InternalError."""
        self._flights.check_invariants()
        arrived = [flight for flight in self._flights if not flight.is_open]
        complete = [flight for flight in arrived if flight.joined is None]
        laws = {
            "open flights have a room, or a load's key, and each key one": self._open
            == {
                flight.room_key: flight
                for flight in self._flights
                if flight.is_open and not flight.is_local
            },
            "what is computed here has no room": set(self._local)
            == {flight for flight in self._flights if flight.is_open and flight.is_local},
            "what is computed here is somebody's: a request's": all(
                flight.owner is not None for flight in self._local
            ),
            "what has arrived and waits for nothing is complete": sorted(map(id, complete))
            == sorted(map(id, self._complete)),
        }
        check_laws(laws, self._open, self._complete)
