"""A decode scheduler under a day of loads that admission finds hard, in simulated time.

Prefill workers that answer, that hold little, that refuse connections, that never speak, and that
stop for a while, so that pages stay held without proof; requests that fit, that fit only an empty
pool, that fail and are tried again, that are retracted. The laws are checked from outside, by what
the day itself knows of its workers and from the states of the pages.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixkv.decode.request import CAN_RUN, DecodeRequest, DecodeState
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.decode.workers import Workers
from prefixkv.errors import OutOfPagesError, PeerLostError, RequestError, TransferError
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.commands import AbortRoom, MeetPrefill, OpenRoom, RefuseRoom
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest
from tests.support.schedulers import decode_scheduler, timed_by

PAGE_SIZE = 4
PAGES = 40
PATIENCE_S = 20.0
WAITING_S = 300.0
MEETING_S = 30.0
SUSPECT_S = 5.0
TRANSFER_S = 60.0
SMALL_POOL = 6 * PAGE_SIZE

GOOD, SMALL, DEAD, MUTE, STOPS = "good", "small", "dead", "mute", "stops"


@dataclass(slots=True)
class Room:
    """An open room at a worker: what becomes of it, and when."""

    key: RoomKey
    worker: str
    ends_s: float
    fails: bool
    is_over: bool = False  # failed, and not drained


class Event:
    """The device is done with it at the next step but one."""

    left = 2

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


@dataclass(slots=True)
class Seen:
    """What the day knows of a request."""

    arrived_s: float
    bound_s: float  # it has to be admitted, or to have ended, by then
    admitted_s: float | None = None


@dataclass(slots=True)
class Mix:
    """How often a request is of a kind."""

    small: float = 0.70
    nearly: float = 0.06  # needs all of an empty pool, or almost
    long: float = 0.14
    at: dict[str, float] = field(
        default_factory=lambda: {GOOD: 0.7, STOPS: 0.15, DEAD: 0.05, MUTE: 0.05, SMALL: 0.05}
    )
    fails: float = 0.1
    aborts: float = 0.03


class AdmissionDay:
    """One scheduler and its workers. `every_s` is the time between two arrivals, on average."""

    def __init__(
        self,
        seed: int,
        admission: str,
        mix: Mix | None = None,
        *,
        every_s: float = 25.0,
        audits: bool = False,
        max_retries: int = 1,
    ) -> None:
        self.chance = random.Random(seed)
        self.mix = mix or Mix()
        self.every_s = every_s
        self.audits = audits
        self.now_s = 0.0
        self.ready: set[str] = set()  # workers that were said to answer
        self.asked: dict[str, float] = {}  # workers that were asked about, and since when
        self.stopped_s: float | None = None  # since when STOPS is stopped
        self.rooms: dict[RoomKey, Room] = {}
        self.seen: dict[str, Seen] = {}
        self.waits: dict[str, list[float]] = {"small": [], "nearly": [], "long": []}
        self.outcomes: Counter[str] = Counter()
        self.retractions = 0
        self._next_s = 0.0
        self._number = 0
        self.pages = PageManager(PAGES, PAGE_SIZE, 12)
        self.scheduler = decode_scheduler(
            self.pages,
            timed_by(self, DecodeScheduler),
            reserve_tokens=8,
            max_retries=max_retries,
            admission=admission,
            patience_s=PATIENCE_S,
            waiting_timeout_s=WAITING_S,
            workers=Workers(True, MEETING_S, PAGES / 2),
        )
        self.overtakes = self.scheduler.waiting._policy.overtakes

    # --- the day ----------------------------------------------------------------------------------

    def run(self, until_s: float, step_s: float = 5.0) -> None:
        while self.now_s < until_s:
            self.step(step_s)

    def step(self, step_s: float) -> None:
        self.now_s += step_s
        self._workers()
        while self._next_s <= self.now_s:
            self._arrive()
            self._next_s += self.chance.expovariate(1 / self.every_s)
        self._rooms_end()
        self._admit()
        self._decode()
        if self.audits:
            self.scheduler.check_invariants()

    def finish(self) -> None:
        """No more arrivals; what stopped goes on. All ends, and nothing is left."""
        self._next_s = math.inf
        self.mix.aborts = 0.0
        end_s = self.now_s + 20 * WAITING_S
        while self.scheduler.requests or self.rooms or self.scheduler.num_deferred:
            if self.stopped_s is not None:
                self._go_on()
            self.step(5.0)
            assert self.now_s < end_s, f"{list(self.scheduler.requests.values())} never end"
        assert_at_rest(self.scheduler)
        assert not len(self.scheduler.waiting)
        assert sum(self.scheduler.waiting.aside().values()) == 0
        assert (self.scheduler.budget.active, self.scheduler.budget.reserved_pages) == (0, 0)
        assert self.scheduler.workers.owners() == []

    # --- prefill workers --------------------------------------------------------------------------

    def _workers(self) -> None:
        """What the control object would say of them."""
        scheduler, now_s = self.scheduler, self.now_s
        for worker, since_s in list(self.asked.items()):
            is_up = worker in (GOOD, SMALL) or (worker == STOPS and self.stopped_s is None)
            if is_up and worker not in self.ready:
                self.ready.add(worker)
                scheduler.prefill_ready(worker, SMALL_POOL if worker == SMALL else 10**6, now_s)
            elif worker == DEAD and now_s >= since_s + 1.0:
                del self.asked[worker]
                scheduler.prefill_lost(worker, PeerLostError("no answer"), now_s)
        if self.stopped_s is None:
            if self.chance.random() < 0.01:
                self.stopped_s = now_s
        elif now_s - self.stopped_s > SUSPECT_S and STOPS in self.ready:
            self.ready.discard(STOPS)
            scheduler.prefill_away(STOPS, now_s)
        elif self.chance.random() < 0.01:
            self._go_on()

    def _go_on(self) -> None:
        """It goes on, and proves at once what it has to prove."""
        self.stopped_s = None
        for room in list(self.rooms.values()):
            if room.worker == STOPS and room.is_over:
                self._drained(room)

    def _rooms_end(self) -> None:
        for room in list(self.rooms.values()):
            if room.is_over or room.key not in self.rooms:
                continue
            if room.worker == STOPS and self.stopped_s is not None:
                if self.now_s >= self.stopped_s + TRANSFER_S:
                    self._failed(room, is_drained=False)
                    self.scheduler.room_overdue(room.key)
            elif self.now_s >= room.ends_s:
                if room.fails:
                    self._failed(room, is_drained=True)
                else:
                    del self.rooms[room.key]
                    self.scheduler.room_ended(room.key, KVPoll.SUCCESS, None, b"", self.now_s)

    def _failed(self, room: Room, is_drained: bool) -> None:
        room.is_over = True
        error = TransferError("broken")
        self.scheduler.room_ended(room.key, KVPoll.FAILED, error, b"", self.now_s)
        if is_drained:
            self._drained(room)

    def _drained(self, room: Room) -> None:
        del self.rooms[room.key]
        self.scheduler.room_drained(room.key)

    def _commands(self) -> None:
        for command in self.scheduler.take_commands():
            match command:
                case MeetPrefill(address):
                    assert address not in self.asked, "asked twice"
                    self.asked[address] = self.now_s
                case OpenRoom(promise, address):
                    assert address in self.ready, "pages for a worker that does not answer"
                    ends_s = self.now_s + self.chance.uniform(0.1, 10.0)
                    fails = self.chance.random() < self.mix.fails
                    self.rooms[promise.key] = Room(promise.key, address, ends_s, fails)
                case AbortRoom(key):
                    room = self.rooms.get(key)
                    if room is None or room.is_over:
                        continue  # it has ended by itself
                    stands = room.worker == STOPS and self.stopped_s is not None
                    self._failed(room, is_drained=not stands)
                case RefuseRoom(key):
                    self.scheduler.room_drained(key)

    # --- requests ---------------------------------------------------------------------------------

    def _arrive(self) -> None:
        chance, mix = self.chance, self.mix
        self._number += 1
        rid, kind, draw = "", "long", chance.random()
        if draw < mix.small:
            kind, length, most = "small", chance.randint(1, 8), chance.randint(1, 8)
        elif draw < mix.small + mix.nearly:
            most = chance.choice([1, 2, 30])
            kind, length = "nearly", PAGES * PAGE_SIZE - most + 1 - chance.choice([0, 0, 3, 12])
        else:
            length, most = chance.randint(16, 60), chance.randint(1, 60)
        rid = f"{kind}{self._number}"
        worker = chance.choices(list(mix.at), list(mix.at.values()))[0]
        first = 10 * self._number if chance.random() < 0.7 else 10 * chance.randint(0, 3)
        deadline_s = chance.choice([None, None, None, 60.0])
        request = Request(
            rid, range(first, first + length), most, room=self._number, prefill=worker,
            priority=chance.choice([0, 0, 5]), deadline_s=deadline_s,
            cacheable=chance.random() < 0.9,
        )  # fmt: skip
        try:
            self.scheduler.add(request)
        except RequestError as error:
            assert worker == SMALL, error
            assert worker in str(error)
            self.outcomes["refused"] += 1
            return
        bound_s = WAITING_S if deadline_s is None else deadline_s
        self.seen[rid] = Seen(self.now_s, self.now_s + bound_s)

    def _admit(self) -> None:
        scheduler = self.scheduler
        self._pass()
        while scheduler.waiting.may_admit:
            self._pass()
        for req in scheduler.pop_transferred():
            assert req.rid in self.seen
        for req in scheduler.pop_failed():
            self.outcomes[f"{type(req.error).__name__}"] += 1
            del self.seen[req.rid]
        scheduler.pop_needs_prefill()
        self._check_bounds()

    def _pass(self) -> None:
        before = self._possible()
        admitted = self.scheduler.pop_preallocated()
        self._commands()
        for req in admitted:
            # One that the device was busy with may have come back in this very pass.
            assert before.get(req, True), f"{req} was admitted though it could not be"
            self._check_overtaken(req, before)
            seen = self.seen[req.rid]
            if seen.admitted_s is None:
                seen.admitted_s = self.now_s
                if req.prefill in (GOOD, SMALL):
                    self.waits[req.rid.rstrip("0123456789")].append(self.now_s - seen.arrived_s)
        if not admitted and not self.scheduler.waiting.may_admit:
            self._check_held_up()

    # --- the laws ---------------------------------------------------------------------------------

    def _unproved(self) -> int:
        """Pages that nothing which runs gives back, from the pages' states and the open rooms."""
        pages = self.pages.allocator
        held = len(pages.pages_in(PageState.HELD)) + len(pages.pages_in(PageState.QUARANTINED))
        flying = [
            flight.pages
            for flight in self.scheduler.flights
            if flight.is_open and flight.prefill not in self.ready
        ]
        # Prefixes that these lock come back with them, where nothing else locks them.
        locks = [pages.lock for pages in flying if pages.lock is not None]
        others = [lock for lock in self.pages.cache.locks if lock not in locks]
        locked = {page for lock in locks for page in lock.pages.tolist()}
        locked -= {page for lock in others for page in lock.pages.tolist()}
        return held + sum(pages.num_own for pages in flying) + len(locked)

    def _possible(self) -> dict[DecodeRequest, bool]:
        """Which of those that wait could be admitted, if all that run gave back what they have."""
        most = PAGES - self._unproved() if len(self.scheduler.waiting) else 0
        return {
            req: req.prefill in self.ready and req.max_pages <= most
            for req in self.scheduler.waiting
        }

    def _check_overtaken(self, req: DecodeRequest, before: dict[DecodeRequest, bool]) -> None:
        """Nothing that has waited `PATIENCE_S` and fits is overtaken by what came later."""
        if req.state is DecodeState.RETRACTED or req.retries or req.retractions:
            return  # what was admitted before goes first
        for other, could in before.items():
            if other in self.scheduler.waiting and could and other.arrived_s < req.arrived_s:
                is_old = self.now_s - other.arrived_s >= PATIENCE_S
                assert not is_old or self._is_limited(other, before), f"{req} has overtaken {other}"

    def _is_limited(self, req: DecodeRequest, waiting: Iterable[DecodeRequest]) -> bool:
        """Its worker has pages in its power, and with those it needs these are above its share; or
        that is so of one that stands before it in the same line."""
        has = self.scheduler.workers.of(req.prefill).num_pages
        before = [
            other
            for other in waiting
            if other.prefill == req.prefill
            and (other.state is DecodeState.RETRACTED or other.arrived_s <= req.arrived_s)
        ]
        return has > 0 and any(has + one.max_pages > PAGES / 2 for one in [req, *before])

    def _check_held_up(self) -> None:
        """The pass is over. What would fit now waits only for one that could be admitted too."""
        scheduler = self.scheduler
        if not self.pages.can_open:
            return
        waiting = [req for req, could in self._possible().items() if could]
        ahead = [
            req
            for req in waiting
            if req.state is DecodeState.RETRACTED or self.now_s - req.arrived_s >= PATIENCE_S
        ]
        if ahead or (not self.overtakes and len(waiting) > 1):
            return
        space = self.pages.available_pages - scheduler.budget.kept_back
        for req in waiting:
            # What needs no more than this fits whatever it shares.
            needed = req.max_pages
            fits = needed <= space and needed <= self.pages.available_pages
            assert not fits or self._is_limited(req, waiting), (
                f"{req} needs {needed} of {space}, and waits"
            )

    def _check_bounds(self) -> None:
        """Whatever waits ends by its deadline; one that came back has a time of its own."""
        for req in self.scheduler.waiting:
            if req.state is DecodeState.QUEUED:
                late_s = self.now_s - self.seen[req.rid].bound_s
                assert late_s < 1.0, f"{req} waits {late_s:.0f} s longer than it may"

    # --- what runs --------------------------------------------------------------------------------

    def _decode(self) -> None:
        scheduler = self.scheduler
        for _ in range(self.chance.randint(1, 4)):
            running = [req for req in scheduler.requests.values() if req.state in CAN_RUN]
            full = [req for req in running if len(req.output) == req.max_new_tokens]
            for req in full:
                scheduler.finish(req, self._device_work())
                self.outcomes["finished"] += 1
                del self.seen[req.rid]
            batch = [req for req in running if req not in full]
            while batch:
                try:
                    scheduler.append_many(batch, [1] * len(batch))
                    break
                except OutOfPagesError as error:
                    if not error.retract:
                        return  # they come back by themselves
                    self.retractions += 1
                    scheduler.retract(error.retract[0], self._device_work())
                    batch = [req for req in batch if req.rid != error.retract[0]]
        live = list(scheduler.requests)
        if live and self.chance.random() < self.mix.aborts:
            scheduler.abort(self.chance.choice(live), after=self._device_work())
            self._commands()

    def _device_work(self) -> Event | None:
        return Event() if self.chance.random() < 0.5 else None
