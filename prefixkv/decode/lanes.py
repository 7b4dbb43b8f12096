"""Requests that wait for pages, by the prefill worker that they go to: a lane each.

A lane is open while its worker answers. In a closed one requests wait without pages, and hold up
none of another lane; so a worker that has never answered, or answers no more, costs others nothing.
The size of a worker's pool in tokens is known once it has answered.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sortedcontainers import SortedDict, SortedList

from prefixkv.cache.results import MatchResult
from prefixkv.decode.request import DecodeRequest
from prefixkv.protocol.timers import Timers

_MOST_IDLE: Final = 64  # number of lanes above which idle ones are dropped

ALONE: Final = ""
"""In place of a prefill worker's address: of the lane of requests for which none is to be asked.
This worker computes what they lack. It is always open."""

NOT_ENTERED, LEFT = 0, -1  # in place of a want's number: not entered yet; waits no longer


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in a lane, or aside, and the result of the last look at it.

    `since_s` is when it came, None if it came back since the last pass. Admitting it takes
    `new_pages` at once, besides those of a load; `needed_pages` have to be available, the reserve
    included; `most_pages` it may come to take. The last two include the evictable pages that its
    match would lock. `seen_at` is the version at which a look admitted nothing.
    """

    req: DecodeRequest
    arrival: int
    lane: Lane
    is_returned: bool
    since_s: float | None = None
    is_aside: bool = False  # it may need more pages than can come back
    match: MatchResult | None = None
    new_pages: int = 0
    found_in_host: MatchResult | None = None  # in host memory
    load_end: int = 0  # end of what a load from there would bring, in pages; 0: no load
    needed_pages: int = 0
    most_pages: int = 0
    rank: tuple[float, ...] = ()
    seen_at: int = -1
    want: int = NOT_ENTERED  # number of its want, or NOT_ENTERED or LEFT
    leaves_last: bool = False  # all of it is cached or on its way; its last page is not taken

    @property
    def place(self) -> tuple[tuple[float, ...], int, Waiter]:
        """Entry in the lane's order: by rank, then by arrival."""
        # Arrivals differ, so a comparison never reaches the waiter itself, which has no order.
        return self.rank, self.arrival, self


@dataclass(slots=True, eq=False)
class Lane:
    """Requests that wait for the prefill worker at `address`, without those that are aside.

    `order` has the places of what is in `waiting`, `estimated` the same waiters, the oldest
    estimate first. `max_tokens` is the size of the worker's pool, 0 where that is not known.
    `away_s` is the time since when it does not answer.
    """

    address: str
    is_open: bool
    away_s: float = -math.inf
    max_tokens: int = 0
    is_met: bool = False  # asked for by MeetPrefill, and not reported as lost
    num_waiters: int = 0  # with those that are aside
    returned: Any = field(default_factory=SortedDict)  # by arrival
    waiting: Any = field(default_factory=SortedDict)  # by arrival
    order: Any = field(default_factory=SortedList)
    estimated: OrderedDict[Waiter, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.returned) + len(self.waiting)

    def waiters(self) -> Iterator[Waiter]:
        """Iterate over the waiters in line: first those that came back, each group by arrival."""
        yield from self.returned.values()
        yield from self.waiting.values()

    def enter(self, waiter: Waiter) -> None:
        if waiter.is_returned:
            self.returned[waiter.arrival] = waiter
            return
        self.order.add(waiter.place)
        self.waiting[waiter.arrival] = waiter
        self.estimated[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        """Take a waiter out of the line. It must stand there."""
        if waiter.is_returned:
            del self.returned[waiter.arrival]
            return
        del self.waiting[waiter.arrival]
        if self.waiting:
            self.order.remove(waiter.place)
        else:
            self.order.clear()
        del self.estimated[waiter]

    def unanswered(self, patience_s: float, now_s: float) -> tuple[list[Waiter], float]:
        """Return the waiters that have waited `patience_s`, and the time at which the next one will
        have. O(of them)."""
        found: list[Waiter] = []
        next_s = math.inf
        for group in (self.returned, self.waiting):
            # Both groups are sorted by arrival, so the first that is not due ends the search.
            for waiter in group.values():  # oldest first
                since_s = now_s if waiter.since_s is None else waiter.since_s
                due_s = max(since_s, self.away_s) + patience_s
                if due_s > now_s:
                    next_s = min(next_s, due_s)
                    break
                found.append(waiter)
        return found, next_s


class Lanes:
    """The lanes of all prefill workers. Owned by the scheduler's thread.

    `gated`: a lane is closed until its worker is said to answer; else all are open. `patience_s`:
    how long a request waits for a worker that does not answer.
    """

    def __init__(self, gated: bool = False, patience_s: float = math.inf) -> None:
        self.gated = gated
        self.version = 0  # grows whenever a lane opens or closes
        self._patience_s = patience_s
        self._lanes: dict[str, Lane] = {}
        self._busy: dict[Lane, None] = {}  # open lanes with waiters in line
        self._timers: Timers[Lane] = Timers()  # closed lanes with waiters in line

    def get(self, address: str) -> Lane | None:
        return self._lanes.get(address)

    def of(self, address: str) -> Lane:
        """Return the lane of an address, made if there is none; a new one is closed if `gated`."""
        lane = self._lanes.get(address)
        if lane is None:
            lane = self._lanes[address] = Lane(address, not self.gated or address == ALONE)
        return lane

    def max_tokens(self, address: str) -> int:
        lane = self._lanes.get(address)
        return 0 if lane is None else lane.max_tokens

    def is_down(self, address: str) -> bool:
        """True if the worker has stopped answering, or never did; not while it may be on its
        way."""
        lane = self._lanes.get(address)
        return lane is not None and not lane.is_open and lane.away_s > -math.inf

    def all(self) -> list[Lane]:
        """Return all lanes. Any thread may call it."""
        return list(self._lanes.values())

    @property
    def busy(self) -> dict[Lane, None]:
        """Open lanes in which something stands in line."""
        return self._busy

    @property
    def closed(self) -> set[str]:
        """Addresses of the workers that do not answer."""
        return {lane.address for lane in self._lanes.values() if not lane.is_open}

    # --- waiters in line --------------------------------------------------------------------------

    def enter(self, waiter: Waiter) -> None:
        """Put a waiter in line: in an open lane, which is busy then, else its wait is timed."""
        lane = waiter.lane
        lane.enter(waiter)
        if lane.is_open:
            # An open lane takes part in passes. In a closed one a timer runs instead, from when
            # both hold: the request waits, and the worker does not answer. One that came back is
            # stamped by the next pass first.
            self._busy[lane] = None
        elif waiter.since_s is not None:
            self._timers.wake(lane, max(waiter.since_s, lane.away_s) + self._patience_s)

    def stamp(self, waiter: Waiter, now_s: float) -> None:
        """Begin the waiting time of a request that has come back."""
        waiter.since_s = now_s
        if not waiter.is_aside and not waiter.lane.is_open:
            self._timers.wake(waiter.lane, max(now_s, waiter.lane.away_s) + self._patience_s)

    def leave(self, waiter: Waiter) -> None:
        """Take a waiter out; a lane left empty is neither busy nor timed any more."""
        lane = waiter.lane
        lane.leave(waiter)
        # A pass walks the busy lanes, and a timer of an empty lane would wake the scheduler for
        # nothing.
        if not len(lane):
            self._busy.pop(lane, None)
            self._timers.forget(lane)

    def forget_if_idle(self, lane: Lane) -> None:
        """Drop an empty lane of an unknown worker, where there are many: a few are kept for the
        next request."""
        if len(self._lanes) > _MOST_IDLE and not lane.num_waiters and not lane.is_met:
            self._lanes.pop(lane.address, None)

    def forget_if_new(self, lane: Lane) -> None:
        """Drop a lane that was made for a request which was then refused."""
        # It may be older than that request: then something waits there, or was asked or learnt of
        # its worker.
        if not lane.num_waiters and not lane.is_met and not lane.max_tokens:
            self._lanes.pop(lane.address, None)

    # --- state of the workers ---------------------------------------------------------------------

    def ready(self, lane: Lane, max_tokens: int) -> None:
        """Open a lane: its worker answers, and its pool holds `max_tokens`."""
        lane.max_tokens = max_tokens
        lane.is_open = True
        self.version += 1
        # No request there waits for an answer any more.
        self._timers.forget(lane)
        if len(lane):
            self._busy[lane] = None

    def away(self, lane: Lane, now_s: float) -> None:
        """Close a lane: its worker has stopped answering."""
        lane.is_open, lane.away_s = False, now_s
        self.version += 1
        self._busy.pop(lane, None)
        # Those in line wait for the worker from now on, not from when they came.
        if len(lane):
            self._timers.wake(lane, now_s + self._patience_s)

    @property
    def wake_s(self) -> float:
        """Time at which a request may have waited too long for its worker."""
        return self._timers.next_s

    def unanswered(self, now_s: float) -> list[Waiter]:
        """Return the waiters that have waited too long for their worker. They still have to be
        taken out, or to enter again. O(1) if there are none."""
        found: list[Waiter] = []
        if self._timers.next_s > now_s:
            return found
        for lane in self._timers.due(now_s):
            late, next_s = lane.unanswered(self._patience_s, now_s)
            found += late
            # A timer fires once: set it again for those that are not late yet.
            if next_s < math.inf:
                self._timers.wake(lane, next_s)
        return found
