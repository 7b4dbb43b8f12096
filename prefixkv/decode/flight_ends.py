"""Ends of flights that are not committed: what a flight holds is released, or handed on, once.

    a load is under way      its key holds the pages until the copy has ended
    its room is open         the room holds them until it is drained: a posted write cannot be
                             called back
    the engine computes it   they stay its request's until the device is done
    none of these            they are free at once

All flights that wait for an ended flight end too: their requests ask again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter

from prefixkv.cache.results import PrefixLock
from prefixkv.decode.computing import Computing
from prefixkv.decode.host_tier import HostTier
from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.room_numbers import RoomNumbers
from prefixkv.decode.shares import PrefillShares
from prefixkv.decode.sources import Sources
from prefixkv.decode.state_checkpoints import DecodeCheckpoints
from prefixkv.decode.transfer_queue import DecodeTransferQueue
from prefixkv.errors import AbortedError
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import AbortRoom, DecodeCommand


class FlightEnds:
    """What ends flights, and tells their rooms. Owned by the scheduler's thread.

    `ask_again` queues a request that has lost what it waited for. `transfer_ended` gets the prefill
    worker and "aborted" for each room that ends so.
    """

    def __init__(
        self,
        pages: PageManager,
        flights: InFlight,
        arriving: DecodeTransferQueue,
        shares: PrefillShares,
        rooms: RoomNumbers,
        sources: Sources,
        computing: Computing,
        points: DecodeCheckpoints | None,
        host: HostTier[PrefixLock] | None,
        commands: list[DecodeCommand],
        transfer_ended: Callable[[str, str], None],
        ask_again: Callable[[DecodeRequest], None],
        counters: Counter[str],
    ) -> None:
        self._pages = pages
        self._flights, self._arriving = flights, arriving
        self._shares, self._rooms, self._sources = shares, rooms, sources
        self._computing, self._points, self._host = computing, points, host
        self._commands = commands
        self._transfer_ended = transfer_ended
        self._ask_again = ask_again
        self._counters = counters

    def leave(self, flight: Flight, error: Exception) -> None:
        """Take a flight from its request, which ends; it goes on if others wait for it, and
        something brings it."""
        assert flight.owner is not None
        # Those that joined ask again where nothing computes it any more, or the pages behind what
        # is sent; or where this engine has computed it, which may be why its request ends (law 10).
        if (
            not flight.waiters
            or flight.is_local
            or flight.end_pages < len(flight.key) // self._pages.page_size
        ):
            self.cancel(flight, error)
            return
        self._counters["flights_adopted"] += 1
        # The flight keeps the pages and the lock, and nothing that the request has saved. It lets
        # go of them first, so that they have one owner at any time; the room number has to outlive
        # the request.
        if self._points is not None:
            self._points.end(flight.owner)
        flight.owner.pages_held = None
        self._flights.disown(flight)
        if flight.is_open:
            self._rooms.await_drained(flight.room_key)

    def cancel(self, flight: Flight, error: Exception | None) -> None:
        """End a flight: abort its room with `error`; None: it has failed. Its owner stays for the
        caller to decide about. Flights that waited for it fall back."""
        # Out of the index first: a request that asks again must not join a flight that is ending.
        others = self._flights.remove(flight)
        self.end(flight, error)
        self.fall_back(others)

    def fall_back(self, flights: list[Flight]) -> None:
        """End flights, out of the index already, that did not fail; their owners ask again, in
        order of arrival."""
        for flight in flights:
            reason = "what it waited for will not come, or nothing waits for it anymore"
            self.end(flight, AbortedError(reason))
        owners = [flight.owner for flight in flights if flight.owner is not None]
        owners.sort(key=attrgetter("arrived_s"))
        for req in reversed(owners):  # each goes to the front, so the last one first
            self._counters["flight_fallbacks"] += 1
            self._ask_again(req)

    def end(self, flight: Flight, error: Exception | None) -> None:
        """End what brings a flight, out of the index already, and hand on its pages: to its room,
        as long as a peer may write them. The room's number stays in use as long: the control plane
        has to report its end."""
        key = flight.room_key
        # 0. A load: the copy may still write its pages, and they wait for its end.
        if flight.is_load:
            assert self._host is not None
            self._arriving.remove(flight)
            if flight.is_open and self._host.give_up(key):
                self._pages.hold(flight.pages, key)
            else:
                self._pages.drop(flight.pages)
            return
        # 1. The room is open, or has failed: the pages change owner, from request to room, and wait
        # for proof.
        # 2. The room has succeeded, or was never opened: nothing can land, so they are free at
        # once.
        if self._arriving.remove(flight):
            if error is not None:
                self._commands.append(AbortRoom(key, reason_of(error)))
                self._transfer_ended(flight.prefill, "aborted")
            self._pages.hold(flight.pages, key)
            self._shares.hold(key)
            self._rooms.await_drained(key)
            self._sources.gave_up(flight.prefill, key)
        # 3. The engine computes it, or its device is not done with that: these pages stay the
        # request's, which has ended, until the engine says that the device is done.
        elif flight.owner is not None and (
            self._computing.give_up(flight.owner) or flight.owner.unwritten is not None
        ):
            return
        else:
            if self._points is not None and flight.owner is not None:
                self._points.end(flight.owner)
            self._pages.drop(flight.pages)
        if flight.owner is not None:
            flight.owner.pages_held = None
