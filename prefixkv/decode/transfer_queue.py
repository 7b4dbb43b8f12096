"""Requests whose KV is on its way, and what to do when it is there.

A flight is complete when its room has succeeded and the flight that it joined has been committed.
To commit it is to give its pages to the tree. The flights that joined it then find there what they
waited for.

Source: SGLang's `DecodeTransferQueue`; there a request waits for its own transfer only.
"""

from __future__ import annotations

from collections import deque

from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import InternalError, check_laws
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.ids import RoomKey


class DecodeTransferQueue:
    """Owned by the scheduler's thread."""

    def __init__(self, books: PageManager, flights: InFlight) -> None:
        self._books = books
        self._flights = flights
        self._open: dict[RoomKey, Flight] = {}
        self._complete: deque[Flight] = deque()

    def add(self, flight: Flight) -> None:
        """A request was admitted; its room is open."""
        key = flight.room_key
        if key in self._open:
            raise InternalError(f"{key} is in transfer twice")
        self._open[key] = flight

    def get(self, key: RoomKey) -> Flight | None:
        """The flight of an open room."""
        return self._open.get(key)

    def succeed(self, key: RoomKey, aux: bytes) -> Flight | None:
        """The room's pages are all written. Unknown (it was aborted meanwhile): None."""
        flight = self._open.pop(key, None)
        if flight is not None:
            if flight.owner is not None:
                flight.owner.aux = aux
            self.arrived(flight)
        return flight

    def arrived(self, flight: Flight) -> None:
        """Its own pages are there; what is left to wait for is the flight it joined, if any."""
        flight.is_open = False
        if flight.joined is None:
            self._complete.append(flight)

    def is_complete(self, flight: Flight) -> bool:
        """Whether `pop_transferred` will commit it."""
        return not flight.is_open and flight.joined is None

    def remove(self, flight: Flight) -> bool:
        """Take a flight out that will not be committed. True if its room was still open."""
        if flight.is_open:
            del self._open[flight.room_key]
            return True
        if flight in self._complete:
            self._complete.remove(flight)
        return False

    @property
    def num_open(self) -> int:
        """Rooms whose pages are still being written."""
        return len(self._open)

    @property
    def num_complete(self) -> int:
        """Flights that `pop_transferred` will commit."""
        return len(self._complete)

    def __len__(self) -> int:
        return len(self._flights)

    def pop_transferred(self, now_s: float) -> list[DecodeRequest]:
        """Commit what is complete: its whole pages become cached prefix that the request holds by a
        lock."""
        # A commit may complete flights that joined it, so the queue grows as it is worked off.
        committed = []
        while self._complete:
            flight = self._complete.popleft()
            req = flight.owner
            if req is None or req.request.cacheable:
                priority = flight.request.priority
                self._books.cache_unfinished(flight.pages, flight.key, now_s, priority=priority)
            for waiter in self._flights.commit(flight):
                self._books.lock_joined(waiter.pages, waiter.key, now_s)
                if not waiter.is_open:
                    self._complete.append(waiter)
            if req is None:
                self._books.drop(flight.pages)
            else:
                req.become(DecodeState.TRANSFERRED)
                committed.append(req)
        return committed

    def check_invariants(self) -> None:
        """Check every law, those of the flights included. Raises InternalError."""
        self._flights.check_invariants()
        arrived = [flight for flight in self._flights if not flight.is_open]
        complete = [flight for flight in arrived if flight.joined is None]
        laws = {
            "open flights have a room, and each room one": self._open
            == {flight.room_key: flight for flight in self._flights if flight.is_open},
            "what has arrived and waits for nothing is complete": sorted(map(id, complete))
            == sorted(map(id, self._complete)),
        }
        check_laws(laws, self._open, self._complete)
