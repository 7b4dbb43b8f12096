"""Faults of the library that the exploration has to find: the order law broken, and words that are
not heeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from prefixkv.control.prefill.control import PrefillControl
from prefixkv.decode.admission import Admission
from prefixkv.decode.flights import Flights
from prefixkv.decode.rooms import Rooms
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.prefill.bootstrap_queue import PrefillBootstrapQueue
from prefixkv.prefill.request import PrefillState
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.prefill.shared_prefixes import SharedPrefixes
from prefixkv.protocol.commands import AbortRoom, SendChunk
from prefixkv.protocol.events import RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, RoomKey
from tests.laws.liveness.world import Prefill, World

Patch = Callable[[Any, str, Any], None]


def _computes_before_the_promise(patch: Patch) -> None:
    """Prefill takes pages at once, and holds them until decode asks."""
    add, take = PrefillScheduler.add, PrefillScheduler.take_commands

    def taken(self: Any, request: Any) -> Any:
        req = add(self, request)
        self.bootstrapped.add(req, 0)
        return req

    def clipped(self: Any) -> Any:
        return [
            msgspec.structs.replace(one, clip=True) if isinstance(one, SendChunk) else one
            for one in take(self)
        ]

    patch(PrefillScheduler, "add", taken)
    patch(PrefillScheduler, "take_commands", clipped)
    patch(Prefill, "offer", Prefill.add)


def _computes_in_order_of_arrival(patch: Patch) -> None:
    """Prefill starts no prompt before those that came earlier, promised or not."""
    pop = PrefillBootstrapQueue.pop_bootstrapped
    scheduled = PrefillScheduler.pop_bootstrapped

    def in_order(self: Any, now_s: float, limit: int | None = None) -> Any:
        first = next(iter(self.waits_for_promise()), None)
        ready = next(iter(self), None)
        if None not in (first, ready) and self.came.index(first) < self.came.index(ready):
            self._look_due = False  # a promise that comes is heard of
            return []
        return pop(self, now_s, limit)

    def told(self: Any, limit: int | None = None) -> Any:
        unpromised = PrefillState.BOOTSTRAPPING
        self.bootstrapped.came = [*self.requests.values()]
        self.bootstrapped.waits_for_promise = lambda: [
            req for req in self.requests.values() if req.state is unpromised
        ]
        return scheduled(self, limit)

    patch(PrefillBootstrapQueue, "pop_bootstrapped", in_order)
    patch(PrefillScheduler, "pop_bootstrapped", told)


def _waiters_lock_their_prefixes(patch: Patch) -> None:
    """A request of decode's queue keeps what is cached of it while it lacks pages for the rest."""
    attempt = Admission._plan

    def locked(self: Any, waiter: Any, *more: Any) -> Any:
        locks = self.__dict__.setdefault("locks", {})
        if (plan := attempt(self, waiter, *more)) is not None:
            if waiter in locks:
                self._pages.cache.unlock(locks.pop(waiter))
            return plan
        if waiter not in locks and waiter.match is not None:
            locks[waiter] = self._pages.cache.lock(waiter.match)
        return None

    patch(Admission, "_plan", locked)


def _prefill_looks_once(patch: Patch) -> None:
    """What did not fit on prefill is not looked at again when pages have come back."""
    attempt = PrefillBootstrapQueue._open

    def once(self: Any, req: Any, match: Any, now_s: float) -> bool:
        if self.__dict__.get("refused") is req:
            return False
        opened = attempt(self, req, match, now_s)
        self.refused = None if opened else req
        return opened

    patch(PrefillBootstrapQueue, "_open", once)


def _sent_pages_stay(patch: Patch) -> None:
    patch(PrefillScheduler, "source_free", lambda self, key, now_s: None)


def _held_pages_stay(patch: Patch) -> None:
    patch(DecodeScheduler, "room_drained", lambda self, key: None)


def _joiners_sleep(patch: Patch) -> None:
    """A flight that joined another, and has come before it, is not complete when that one is."""
    arrived = Flights.arrived
    patch(
        Flights,
        "arrived",
        lambda self, flight: None if flight.joined is not None else arrived(self, flight),
    )


def _followers_sleep(patch: Patch) -> None:
    """A prompt that waits for a prefix on prefill is not told that it is there."""
    patch(SharedPrefixes, "to_look_at", lambda self, now_s: [])


def _pages_wake_no_request(patch: Patch) -> None:
    """Decode's queue does not look again when pages have come back."""
    patch(Admission, "_version", property(lambda self: self._num_arrivals))


def _refusals_are_lost(patch: Patch) -> None:
    patch(Rooms, "refuse", lambda self, key, prefill, error, digest: None)
    patch(PrefillScheduler, "_decline", lambda self, request, reason: None)


def _aborts_are_lost(patch: Patch) -> None:
    inputs = {**PrefillControl.INPUTS, AbortRoom: lambda self, command, now_s: None}
    patch(PrefillControl, "INPUTS", inputs)


def _offers_stay(patch: Patch) -> None:
    """What prefill offers is kept while a promised prompt lacks its pages."""
    patch(Prefill, "yields", False)


def _offers_end_unsaid(patch: Patch) -> None:
    """A decode worker that comes for an offer that was withdrawn hears nothing."""

    def close(self: Any, key: RoomKey, error: Exception, now_s: float) -> list[Any]:
        if ended := self._rooms.offer(key.numbers) is not None:
            self._rooms.set_offer(key.numbers, None)
        offered = RoomKey(*key.numbers)
        return [RoomEnded(offered, KVPoll.FAILED, error), SourceFree(offered)] if ended else []

    patch(PrefillControl, "_close_offer", close)


MUTANTS: dict[str, Callable[[Patch], None]] = {
    "computes before the promise": _computes_before_the_promise,
    "computes in order of arrival": _computes_in_order_of_arrival,
    "waiters lock their prefixes": _waiters_lock_their_prefixes,
    "prefill looks once": _prefill_looks_once,
    "sent pages stay": _sent_pages_stay,
    "held pages stay": _held_pages_stay,
    "joiners sleep": _joiners_sleep,
    "followers sleep": _followers_sleep,
    "pages wake no request": _pages_wake_no_request,
    "refusals are lost": _refusals_are_lost,
    "aborts are lost": _aborts_are_lost,
    "offers stay": _offers_stay,
    "offers end unsaid": _offers_end_unsaid,
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """With this fault, and without audits, which would find some of them before they do harm."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        def patch(target: Any, attribute: str, value: Any) -> None:
            monkeypatch.setattr(target, attribute, value, raising=False)

        patch(World, "audits", False)
        MUTANTS[name](patch)
        yield
