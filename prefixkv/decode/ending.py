"""Ends: what a flight or a request holds is released, or handed on, once.

    finish, retract           whole pages go to the tree, the tail is freed
    one that ran is cut short own pages are freed, once the device is done
    a flight that ends        its source says: free; held by its key until a proof, since a posted
                              write cannot be called back; or its request's until the device is done
    its request ends, others  the flight keeps lock and pages, without an owner
    wait for the flight

All flights that wait for an ended flight end too: their requests ask again. What the device may
still read or write of an ended request is kept until its event.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Final, NamedTuple

from prefixkv.cache.results import Releases
from prefixkv.decode.flights import Flight, Release
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import CUT_SHORT, DecodeRequest, DecodeState
from prefixkv.errors import AbortedError
from prefixkv.paging import page_floor
from prefixkv.request import NO_HINTS, DeviceEvent, Request
from prefixkv.settings import Continues

_MOST_SESSIONS: Final = 1 << 14  # whose shared prompts are remembered


class End(NamedTuple):
    """A request to be released once the device is done. An abort may come first."""

    req: DecodeRequest
    continues: Continues = None
    keep_tokens: int | None = None  # of its key: what follows is not cached


class _Untold:
    """In place of an event, until the engine names one by `pop_failed`."""

    def query(self) -> bool:
        return False


UNTOLD: Final = _Untold()


class Ending:
    """Owned by the scheduler's thread. `ask_again` queues a request that has lost what it waited
    for, or was retracted."""

    def __init__(self, ledger: Ledger, ask_again: Callable[[DecodeRequest], None]) -> None:
        self._ledger, self._pages = ledger, ledger.pages
        self._ask_again = ask_again
        # By session: tokens that other sessions begin with, as it has said.
        self._shared: dict[tuple[Hashable, str], int] = {}

    # --- flights ----------------------------------------------------------------------------------

    def leave(self, flight: Flight, error: Exception) -> None:
        """Take a flight from its request, which ends; it goes on if others wait for it, and
        something brings it."""
        assert flight.owner is not None
        # Those that joined ask again where nothing computes it any more, or the pages behind what
        # is sent; or where this engine has computed it, which may be why its request ends (law 10).
        if (
            not flight.waiters
            or not flight.source.outlives_request
            or flight.end_pages < len(flight.key) // self._pages.page_size
        ):
            self.cancel(flight, error)
            return
        self._ledger.journal.counters["flights_adopted"] += 1
        # The flight keeps the pages and the lock, and nothing that the request has saved. It lets
        # go of them first, so that they have one owner at any time; the room number has to outlive
        # the request.
        self._ledger.own.dropped(flight.owner)
        flight.owner.pages_held = None
        self._ledger.flights.disown(flight)
        if flight.is_open:
            self._ledger.rooms.await_drained(flight.room_key)

    def cancel(self, flight: Flight, error: Exception | None) -> None:
        """End a flight: abort its room with `error`; None: it has failed. Its owner stays for the
        caller to decide about. Flights that waited for it fall back."""
        # Out of the index first: a request that asks again must not join a flight that is ending.
        others = self._ledger.flights.remove(flight)
        self.end(flight, error)
        self.fall_back(others)

    def fall_back(self, flights: list[Flight]) -> None:
        """End flights, out of the index already, that did not fail; their owners ask again, in
        order of arrival."""
        for flight in flights:
            self.end(flight, AbortedError("what it waited for has ended, or nothing waits for it"))
        owners = [flight.owner for flight in flights if flight.owner is not None]
        owners.sort(key=attrgetter("arrived_s"))
        for req in reversed(owners):  # each goes to the front, so the last one first
            self._ledger.journal.counters["flight_fallbacks"] += 1
            self._ask_again(req)

    def end(self, flight: Flight, error: Exception | None) -> None:
        """End what brings a flight, out of the index already, and hand on its pages."""
        release, owner = flight.source.give_up(flight, error), flight.owner
        if release is Release.AFTER_DEVICE:
            return
        if owner is not None:
            self._ledger.own.dropped(owner)
            owner.pages_held = None
        if release is Release.HOLD:
            self._pages.hold(flight.pages, flight.room_key)
        else:
            self._pages.drop(flight.pages)

    # --- requests ---------------------------------------------------------------------------------

    def coming_pages(self, releases: Releases) -> int:
        """Count the pages that come back by themselves. `releases` collects the locks that end with
        them."""
        coming = sum(source.coming_pages(releases) for source in self._ledger.organs)
        return coming + self._ledger.deferred_pages(releases)

    def release_after(self, after: DeviceEvent | None, end: End, now_s: float) -> None:
        """Defer the release of an ended request until `after` is done; None: release it at once.

        The device may not have written all that was computed of one that was cut short.
        """
        req = end.req
        if req.state in CUT_SHORT and after is not UNTOLD:
            after = self._ledger.own.still_writes(req, after)
        if after is not None:
            self._ledger.deferred[req] = after, end
        else:
            self.release(end, now_s)

    def release(self, end: End, now_s: float) -> None:
        """Release what an ended request holds: the device is done with it."""
        req, continues, keep_tokens = end
        self._ledger.deferred.pop(req, None)
        # 1. A request that finished, or was retracted, leaves its whole pages to the cache; one
        # that was aborted or has failed, also since it was retracted, leaves nothing (law 10).
        if req.pages_held is not None:
            if req.state not in CUT_SHORT and req.request.cacheable:
                key, keep, organs = req.key, 0, self._ledger.organs
                if keep_tokens is not None:
                    key = key.prefix(page_floor(keep_tokens, self._pages.page_size))
                if req.request.hints is not NO_HINTS:
                    keep = self._shared_tokens(req.request)
                for source in organs:
                    source.leaving(req, key, now_s)
                self._pages.cache_finished(
                    req.pages_held, key, now_s, priority=req.request.priority,
                    continues=continues, shared_tokens=keep,
                )  # fmt: skip
                # Behind the device's work, so that no copy reads what is still to be written.
                for source in organs:
                    source.left(req.request, key, now_s, continues, keep)
            else:
                self._ledger.own.dropped(req)
                self._pages.drop(req.pages_held)
            req.pages_held = req.unwritten = None
        # 2. Only now may a retracted request queue again: it must hold nothing, and the next match
        # finds what has just been cached. One aborted meanwhile is over.
        if req.state is DecodeState.RETRACTED:
            self._ask_again(req)

    def _shared_tokens(self, request: Request) -> int:
        hints, num_tokens = request.hints, len(request.key)
        name = request.key.namespace, hints.session
        most = max(self._shared.pop(name, 0), num_tokens * hints.shared)
        if most and hints.session:
            self._shared[name] = most
            if len(self._shared) > _MOST_SESSIONS:
                del self._shared[next(iter(self._shared))]
        return most
