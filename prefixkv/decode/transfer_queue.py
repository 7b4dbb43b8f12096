"""Requests with KV on its way, and the steps that follow when it is there.

A flight is complete when its room, copy or computation has succeeded and the flight that it joined
is committed. To commit it is to give its pages to the tree, where the flights that joined it find
them. An engine computes only behind a committed flight, whose KV it reads.

Source: SGLang's `DecodeTransferQueue`; there a request waits for its own transfer only.
"""

from __future__ import annotations

from collections import deque

from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import InternalError, check_laws
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import BrokenEvent, still_pending
from prefixkv.protocol.ids import RoomKey


class DecodeTransferQueue:
    """Open rooms, flights that are computed here or loaded, and complete ones. Owned by the
    scheduler's thread."""

    def __init__(self, pages: PageManager, flights: InFlight) -> None:
        self._pages = pages
        self._flights = flights
        # A flight is in `_open`, `_loads` or `_local`, then in none while the one it joined is on
        # its way, then in `_complete`.
        self._open: dict[RoomKey, Flight] = {}
        self._loads: dict[RoomKey, Flight] = {}
        self._local: dict[Flight, None] = {}
        self._complete: deque[Flight] = deque()

    def add(self, flight: Flight) -> None:
        """Enter the flight of an admitted request; its room is open."""
        key = flight.room_key
        if key in self._open:
            raise InternalError(f"{key} is in transfer twice")
        self._open[key] = flight

    def add_load(self, flight: Flight) -> None:
        """Enter a flight that a copy from host memory brings."""
        self._loads[flight.room_key] = flight

    def loaded(self, key: RoomKey) -> Flight | None:
        """Note that a load's pages are all copied. Return its flight; None if nothing waits for
        it."""
        flight = self._loads.pop(key, None)
        if flight is not None:
            self.arrived(flight)
        return flight

    def get_load(self, key: RoomKey) -> Flight | None:
        return self._loads.get(key)

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
        """Note that a room's pages are all written. Return its flight; None if it was aborted. What
        its request lacks still, the engine computes from now on."""
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
        elif flight.is_load:
            self._loads.pop(flight.room_key, None)
        elif flight.is_open:
            del self._open[flight.room_key]
            return True
        if flight in self._complete:
            self._complete.remove(flight)
        return False

    @property
    def num_open(self) -> int:
        """Number of rooms with pages that are still being written."""
        return len(self._open)

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    @property
    def num_complete(self) -> int:
        """Number of flights that `pop_transferred` will commit."""
        return len(self._complete)

    def __len__(self) -> int:
        return len(self._flights)

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
            "open flights have a room, and each room one": self._open
            == {
                flight.room_key: flight
                for flight in self._flights
                if flight.is_open and flight.has_room
            },
            "what is loaded has no room": self._loads
            == {
                flight.room_key: flight
                for flight in self._flights
                if flight.is_open and flight.is_load
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
