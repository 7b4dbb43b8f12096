"""Ends: what a flight or a request holds is released, or handed on, once.

A flight that is not committed:

    a load is under way      its key holds the pages until the copy has ended
    its room is open         the room holds them until it is drained: a posted write cannot be
                             called back
    the engine computes it   they stay its request's until the device is done
    none of these            they are free at once

All flights that wait for an ended flight end too: their requests ask again. What the device may
still read or write of an ended request is kept until its event.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from prefixkv.cache.results import Releases
from prefixkv.decode.inflight import Flight
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import CUT_SHORT, DecodeRequest, DecodeState
from prefixkv.decode.rooms import Rooms
from prefixkv.errors import AbortedError
from prefixkv.pages.requests import AllOf, BrokenEvent, reason_of, still_pending
from prefixkv.protocol.commands import AbortRoom
from prefixkv.request import DeviceEvent


class FlightEnds:
    """What ends flights, and tells their rooms. Owned by the scheduler's thread.

    `ask_again` queues a request that has lost what it waited for.
    """

    def __init__(
        self, ledger: Ledger, rooms: Rooms, ask_again: Callable[[DecodeRequest], None]
    ) -> None:
        self._pages = ledger.pages
        self._flights, self._arriving = ledger.flights, ledger.arriving
        self._workers, self._sources = ledger.workers, ledger.sources
        self._computing, self._points, self._host = ledger.computing, ledger.points, ledger.host
        self._counters = ledger.journal.counters
        self._rooms = rooms
        self._transfer_ended = ledger.journal.transfer_ended
        self._ask_again = ask_again

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
                self._rooms.commands.append(AbortRoom(key, reason_of(error)))
                self._transfer_ended(flight.prefill, "aborted")
            self._pages.hold(flight.pages, key)
            self._workers.hold(key)
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


class _DeferredEnd(NamedTuple):
    """A request to be released once the device is done. An abort may come first."""

    req: DecodeRequest
    continues: bool | None
    keep_tokens: int | None  # of its key: what follows is not cached


class Deferred:
    """Ended requests with a release that waits for the device. Owned by a `DecodeScheduler`.

    `queue_again` queues a request that was retracted, when its pages are released.
    """

    def __init__(self, ledger: Ledger, queue_again: Callable[[DecodeRequest], None]) -> None:
        self._pages, self._points, self._host = ledger.pages, ledger.points, ledger.host
        self._queue_again = queue_again
        self._waiting: list[tuple[DeviceEvent, _DeferredEnd]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def requests(self) -> list[DecodeRequest]:
        """Return the requests whose release is deferred. Any thread may call it."""
        # Copied first, in one step: the scheduler's thread may append meanwhile.
        return [ended.req for _, ended in self._waiting.copy()]

    def coming_pages(self, releases: Releases) -> int:
        """Count the pages that are available once the device, or a host copy, is done. O(of these).
        `releases` collects the locks that end with them."""
        coming = 0
        if self._host is not None:
            coming = self._host.held_pages + sum(map(releases.end, self._host.pins))
        return coming + self.num_pages(releases)

    def num_pages(self, releases: Releases, is_broken: bool = False) -> int:
        """Count the pages that come back with a device event; or those that a broken one keeps,
        since nothing proves that they do."""
        held = [
            ended.req.pages_held
            for event, ended in self._waiting
            if isinstance(event, BrokenEvent) is is_broken
        ]
        return sum(pages.num_own + releases.end(pages.lock) for pages in held if pages is not None)

    def release_after(
        self,
        after: DeviceEvent | None,
        req: DecodeRequest,
        continues: bool | None,
        now_s: float,
        keep_tokens: int | None = None,
    ) -> None:
        """Defer the release of an ended request until `after` is done; None: release it at once.

        The device may not have written all that was computed of one that was cut short: its own
        event has to be done too. Where that has raised, a later one counts.
        """
        if req.state in CUT_SHORT and req.unwritten is not None:
            unwritten = still_pending(req.unwritten, self._pages.errors)
            if after is None or unwritten is None:
                after = after or unwritten
            elif not isinstance(unwritten, BrokenEvent):
                after = AllOf(after, unwritten)
        ended = _DeferredEnd(req, continues, keep_tokens)
        if after is not None:
            self._waiting.append((after, ended))
        else:
            self._release(ended, now_s)

    def release(self, now_s: float) -> None:
        """Release what the device is done with. O(deferred requests)."""
        if not self._waiting:
            return
        # A fresh list, since `_release` may queue a request again, and `still_pending` runs the
        # user's code.
        waiting, self._waiting = self._waiting, []
        for event, ended in waiting:
            if (left := still_pending(event, self._pages.errors)) is None:
                self._release(ended, now_s)
            else:
                self._waiting.append((left, ended))

    def _release(self, ended: _DeferredEnd, now_s: float) -> None:
        """Hand on the pages as the request's end asks for: to the cache, or free; queue a retracted
        one again."""
        req, continues, keep_tokens = ended
        # 1. A request that finished, or was retracted, leaves its whole pages to the cache; one
        # that was aborted or has failed, also since it was retracted, leaves nothing (law 10).
        if req.pages_held is not None:
            points = self._points
            if req.state not in CUT_SHORT and req.request.cacheable:
                self._pages.cache_finished(
                    req.pages_held,
                    req.key,
                    now_s,
                    priority=req.request.priority,
                    continues=continues,
                    keep_tokens=keep_tokens,
                    on_cached=None if points is None else lambda: points.leave(req),
                )
                # Behind the device's work, so that no copy reads what is still to be written.
                if self._host is not None:
                    key = req.key if keep_tokens is None else req.key.prefix(keep_tokens)
                    self._host.leave(key, now_s, continues)
            else:
                if points is not None:
                    points.end(req)
                self._pages.drop(req.pages_held)
            req.pages_held = req.unwritten = None
        # 2. Only now may a retracted request queue again: it must hold nothing, and the next match
        # finds what has just been cached. One aborted meanwhile is over.
        if req.state is DecodeState.RETRACTED:
            self._queue_again(req)
