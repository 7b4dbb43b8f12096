"""Requests that wait to be admitted: a line for each prefill worker, and the order of all lines.

    returned    admitted before (retracted, or to be asked for again): the last to return first
    overdue     the request that has waited longest, once that is `patience_s`
    the rest    in the order of an `AdmissionPolicy`

The next group is tried when the one before is empty. A request that those that run cannot make room
for holds up no other, for one of three reasons:

    prefill     its worker does not answer: its whole line has no turn
    share       its worker has its share of the pool: neither has its line; where the share is held
                without proof, the request waits aside alone
    pages       it may need more pages than can come back: it waits aside until enough are proved
                free

Pages are in a worker's power from the promise until the transfer has succeeded, or until it is
proved that no write of it can land there any more. A worker that takes promises and never gives
that proof would come to have them all. So while another worker answers too, each has at most its
share: its requests wait for pages to come back, those of others do not.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from itertools import count, islice
from operator import attrgetter
from typing import Any, Final

from sortedcontainers import SortedList

from prefixkv.admission import make_admission, rank_as_tuple
from prefixkv.config import DecodeConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import RequestError, UserErrors, check_laws
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.timers import Timers

MAX_WALK: Final = 128
"""Places of the order that a search looks at."""

MAX_BACK: Final = 128
"""Requests that a pass brings back from aside."""

PAGES, SHARE, PREFILL = "pages", "share", "prefill"

RETURNED, OVERDUE, RANKED = range(3)

_MOST_IDLE: Final = 64  # workers above which those without requests are forgotten


@dataclass(slots=True, eq=False)
class Worker:
    """A prefill worker, as decode knows it, and its line.

    `max_tokens` is the size of its pool, 0 where that is not known. `away_s` is the time since when
    it does not answer. The line of "" has those that ask none: it always answers.
    """

    address: str
    is_open: bool  # it answers
    away_s: float = -math.inf
    max_tokens: int = 0
    is_met: bool = False  # asked for by MeetPrefill, and not reported as lost
    # Pages in its power.
    num_pages: int = 0
    was_refused: bool = False  # since pages of its last came back
    # Its line, and the places in it.
    has_share: bool = False  # as this pass has found: none in its line has a turn
    num_waiters: int = 0  # with those that are aside
    line: OrderedDict[Any, None] = field(default_factory=OrderedDict)  # by the age of the last look
    order: Any = field(default_factory=SortedList)

    @property
    def is_needed(self) -> bool:
        return bool(self.num_waiters or self.is_met or self.num_pages)


class Workers:
    """All of them. Owned by the scheduler's thread.

    Args:
        gated: a worker is asked only once it is said to answer; else all are.
        patience_s: how long a request waits for a worker that does not answer.
        share_pages: pages that one may have in its power while another answers. One that has none
            may always be promised what a request needs.
    """

    def __init__(
        self, gated: bool = False, patience_s: float = math.inf, share_pages: float = math.inf
    ) -> None:
        self.gated = gated
        self.patience_s = patience_s
        self.share_pages = share_pages
        # Grows when a worker begins or ceases to answer, or one that was refused may have more.
        self.version = 0
        self._workers: dict[str, Worker] = {}
        self._shares: dict[RoomKey, tuple[Worker, int]] = {}  # pages of a room, and whose they are
        # Whether a room has failed, and holds its pages.
        self.is_held: Callable[[RoomKey], bool] = lambda key: False

    def get(self, address: str) -> Worker | None:
        return self._workers.get(address)

    def of(self, address: str) -> Worker:
        """Return the worker at an address. For a new one those are forgotten of which nothing is
        known, where there are many."""
        if (worker := self._workers.get(address)) is None:
            if len(self._workers) >= _MOST_IDLE:
                self._workers = {one.address: one for one in self.all() if one.is_needed}
            worker = Worker(address, not (self.gated and address))
            self._workers[address] = worker
        return worker

    def all(self) -> list[Worker]:
        """Return all workers. Any thread may call it."""
        return list(self._workers.values())

    def is_down(self, address: str) -> bool:
        """True if the worker has stopped answering, or never did; not while it may be on its
        way."""
        worker = self._workers.get(address)
        return worker is not None and not worker.is_open and worker.away_s > -math.inf

    @property
    def closed(self) -> set[str]:
        """Addresses of the workers that do not answer."""
        return {worker.address for worker in self._workers.values() if not worker.is_open}

    def check_holds(self, rid: str, num_tokens: int, address: str) -> None:
        """Raise RequestError where a worker is known to hold fewer tokens, all that the request may
        become: retracted late, it would fail with half of its answer given."""
        worker = self._workers.get(address)
        if worker is not None and 0 < worker.max_tokens < num_tokens:
            raise RequestError(
                f"request {rid!r} may have {num_tokens} tokens (max_new_tokens included), prefill "
                f"worker {address} holds {worker.max_tokens}"
            )

    # --- pages in their power ---------------------------------------------------------------------

    def owners(self) -> list[str]:
        """Return the addresses of workers with pages in their power, at most 8."""
        return sorted({worker.address for worker, _ in self._shares.values()})[:8]

    def refuses(self, worker: Worker, num_pages: int) -> bool:
        """Return True if `num_pages` more would exceed the share. O(1) if they would not."""
        if not worker.num_pages or worker.num_pages + num_pages <= self.share_pages:
            return False
        # The share binds only while another worker that requests go to could use the pages.
        others = self._workers.values()
        if not any(one.is_open and one is not worker and one.address for one in others):
            return False
        # Noted so that `version` grows only for pages of a worker that something waits for.
        worker.was_refused = True
        return True

    def is_hopeless(self, worker: Worker, num_pages: int) -> bool:
        """Return True if `num_pages` more exceed the share even after its transfers' end: pages
        held for failed rooms take it up. O(rooms)."""
        rooms = self._shares.items()
        held = sum(num for key, (one, num) in rooms if one is worker and self.is_held(key))
        return bool(held) and held + num_pages > self.share_pages

    def promise(self, key: RoomKey, worker: Worker, num_pages: int) -> None:
        if num_pages:
            self._shares[key] = worker, num_pages
            worker.num_pages += num_pages

    def release(self, key: RoomKey) -> None:
        """Take a room that succeeded or is drained out of the share. Unknown: no-op, as for a
        success that is followed by its proof."""
        if (share := self._shares.pop(key, None)) is not None:
            worker, num_pages = share
            worker.num_pages -= num_pages
            self.version += worker.was_refused
            worker.was_refused = False

    def check_invariants(self, rooms: Set[RoomKey]) -> None:
        """Check the shares against `rooms`, those that are open or undrained: no other may have
        pages in a worker's power. Raises InternalError."""
        shares = self._shares.values()
        laws = {
            "a worker's pages are those of its rooms": all(
                worker.num_pages == sum(num for one, num in shares if one is worker)
                for worker in self.all()
            ),
            "only open and undrained rooms have pages in a worker's power": self._shares.keys()
            <= rooms,
        }
        check_laws(laws, self._shares)


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits, and the last look at it (`plan.Look`).

    `since_s` is when it came, or came back. `looked_at` is the version of the last look, `seen_at`
    that at which a look admitted nothing.
    """

    req: DecodeRequest
    arrival: int
    is_returned: bool
    since_s: float
    worker: Worker = field(init=False)
    blocked_by: str = ""  # a reason of its own, PAGES or SHARE; "": it stands in its worker's line
    look: Any = None
    looked_at: int = -1
    rank: tuple[float, ...] = ()
    is_overdue: bool = False
    seen_at: int = -1
    want: int = 0  # number of its want in the tree; 0: it is not entered

    @property
    def turn(self) -> int:
        """Those that came back are first, the last of them before the others."""
        return -self.arrival if self.is_returned else self.arrival

    @property
    def place(self) -> tuple[int, tuple[float, ...], int, Waiter]:
        """Its entry in the line's order: its group, by number, and its place there."""
        # Turns differ, so a comparison never reaches the waiter itself, which has no order.
        if self.is_returned or self.is_overdue:
            return (RETURNED if self.is_returned else OVERDUE), (), self.turn, self
        return RANKED, self.rank, self.turn, self

    @property
    def place_aside(self) -> tuple[int, int, Waiter]:
        return self.req.max_pages, self.arrival, self


class Waiting:
    """The list. Owned by the scheduler's thread. To enter or leave costs O(log waiting), a search
    O(workers) besides.

    A request that has waited `admission_patience_s` is overtaken by nothing; one without a
    `deadline_s`, and any that came back, may wait `admission_wait_s`. What the policy raises when a
    request is ranked again is in `errors`.
    """

    def __init__(self, workers: Workers, config: DecodeConfig, errors: UserErrors) -> None:
        self._workers, self._errors = workers, errors
        self._policy = make_admission(config.admission)
        self._patience_s, self._timeout_s = config.admission_patience_s, config.admission_wait_s
        self._waiters: dict[DecodeRequest, Waiter] = {}
        # Those aside, by reason: (pages it may need, arrival, waiter).
        self._aside: dict[str, SortedList] = {PAGES: SortedList(), SHARE: SortedList()}
        self._shares_at = -1  # version of `workers` at which those over their share were tried
        self._most_pages: float = math.inf  # most that one request may get; set by each pass
        self.stepped_aside = {PAGES: 0, SHARE: 0, PREFILL: 0}
        self._arrivals = count(1)
        self._late: Timers[DecodeRequest] = Timers()
        self._overdue: Timers[Waiter] = Timers()  # of those in line, that have a place
        # Times at which one has waited long for a worker that does not answer, or a little earlier.
        self._unanswered: Timers[Waiter] = Timers()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, req: object) -> bool:
        return req in self._waiters

    def __iter__(self) -> Iterator[DecodeRequest]:
        """Iterate over the requests that came back, the last first, then the others by arrival."""
        waiters = sorted(self._waiters.values(), key=attrgetter("turn"))
        return iter([waiter.req for waiter in waiters])

    def at(self, address: str) -> list[DecodeRequest]:
        """Return the requests that wait for this worker, aside or not, by arrival. O(waiting)."""
        waiters = [one for one in self._waiters.values() if one.worker.address == address]
        return [waiter.req for waiter in sorted(waiters, key=attrgetter("arrival"))]

    # --- coming and going -------------------------------------------------------------------------

    def _enter(self, waiter: Waiter, most_pages: int) -> None:
        """Let a request wait: in line, or aside if it may need more than `most_pages`."""
        worker = waiter.worker
        self._waiters[waiter.req] = waiter
        worker.num_waiters += 1
        if waiter.req.max_pages > most_pages:
            self._block(waiter, PAGES)
            return
        self._stand(waiter)
        self.stepped_aside[PREFILL] += not worker.is_open

    def _exit(self, waiter: Waiter) -> None:
        worker = waiter.worker
        del self._waiters[waiter.req]
        worker.num_waiters -= 1
        if waiter.blocked_by:
            self._aside[waiter.blocked_by].remove(waiter.place_aside)
        else:
            self._leave_line(waiter)
        waiter.blocked_by = ""

    def _stand(self, waiter: Waiter) -> None:
        worker = waiter.worker
        waiter.blocked_by = ""
        worker.line[waiter] = None
        worker.order.add(waiter.place)
        if not (waiter.is_returned or waiter.is_overdue):
            self._overdue.wake(waiter, waiter.req.arrived_s + self._patience_s)
        self._time_answer(waiter)

    def _leave_line(self, waiter: Waiter) -> None:
        worker = waiter.worker
        del worker.line[waiter]
        self._unanswered.forget(waiter)
        self._overdue.forget(waiter)
        worker.order.remove(waiter.place)
        worker.has_share &= bool(worker.line)

    def _block(self, waiter: Waiter, reason: str) -> None:
        """Set a request that stands nowhere aside."""
        waiter.blocked_by = reason
        self.stepped_aside[reason] += 1
        self._aside[reason].add(waiter.place_aside)

    # --- workers ----------------------------------------------------------------------------------

    def opens(self, worker: Worker, max_tokens: int) -> None:
        """A worker answers, and its pool holds `max_tokens`: its line has its turn."""
        worker.is_open, worker.max_tokens = True, max_tokens
        self._workers.version += 1

    def closes(self, worker: Worker, now_s: float) -> None:
        """A worker has stopped answering: those in its line wait for it from now on."""
        worker.is_open, worker.away_s = False, now_s
        self._workers.version += 1
        for waiter in worker.line:
            self._time_answer(waiter)

    def _answer_due_s(self, waiter: Waiter) -> float:
        return max(waiter.since_s, waiter.worker.away_s) + self._workers.patience_s

    def _time_answer(self, waiter: Waiter) -> None:
        if not waiter.worker.is_open:
            self._unanswered.wake(waiter, self._answer_due_s(waiter))

    # --- whose turn it is -------------------------------------------------------------------------

    def _turns(self) -> list[Worker]:
        """Return the workers whose lines have a turn, in order."""
        workers = self._workers.all()
        return [one for one in workers if one.line and one.is_open and not one.has_share]

    def _note_overdue(self, now_s: float) -> None:
        """Let those whose patience is over go before all that did not come back."""
        for waiter in self._overdue.due(now_s):
            waiter.worker.order.remove(waiter.place)
            waiter.is_overdue = True
            waiter.worker.order.add(waiter.place)

    def _first_of_all(self) -> Waiter | None:
        """Return the waiter that nothing may overtake now: the last to come back, the oldest that
        is overdue, or the first where the policy lets none overtake it. O(workers)."""
        turns = self._turns()
        if not turns:
            return None
        place = min([worker.order[0] for worker in turns])
        return None if place[0] == RANKED and self._policy.overtakes else place[-1]

    def _in_turn(self) -> Iterator[Waiter]:
        """Iterate over those whose turn it is, in order, `MAX_WALK` at most."""
        orders = [islice(worker.order, MAX_WALK) for worker in self._turns()]
        places = orders[0] if len(orders) == 1 else islice(heapq.merge(*orders), MAX_WALK)
        return (place[-1] for place in places)

    def _rank(self, waiter: Waiter) -> tuple[float, ...]:
        return rank_as_tuple(self._policy.rank(waiter.req, waiter.look.new_pages))

    def _renew(self, waiter: Waiter) -> bool:
        """Rank a waiter in line, that did not come back, by its new estimate. Return True if its
        place is behind the old one. Where the policy raises it keeps its rank."""
        worker, before = waiter.worker, waiter.rank
        # Before the policy is called: one that raises each time would else stay the oldest, and get
        # all looks.
        worker.line.move_to_end(waiter)
        try:
            rank = self._rank(waiter)
        except Exception as error:
            self._errors.caught(error)
            return False
        if rank != before:
            worker.order.remove(waiter.place)
            waiter.rank = rank
            worker.order.add(waiter.place)
        return before < rank

    # --- aside ------------------------------------------------------------------------------------

    def _bring_back(self, most_pages: int) -> bool:
        """Begin a pass, in which one request may get `most_pages`: forget which lines have no turn
        for their share, and put those aside into line that may fit now. Of those that wait for
        pages `MAX_BACK` at most; returns False if more of them may."""
        self._most_pages = most_pages
        for worker in self._workers.all():
            worker.has_share = False
        # 1. Those over their share, all at once, and only when a worker has changed: before that
        # they would step aside again.
        if self._shares_at != self._workers.version:
            self._shares_at = self._workers.version
            waiters, self._aside[SHARE] = self._aside[SHARE], SortedList()
            for *_, waiter in waiters:
                self._stand(waiter)
        # 2. Those that need too many pages, by what they need: behind the first that cannot return
        # none can.
        for_pages = self._aside[PAGES]
        for _ in range(MAX_BACK):
            if not for_pages or for_pages[0][0] > most_pages:
                return True
            self._stand(for_pages.pop(0)[-1])
        return False

    def _step_aside(self, waiter: Waiter) -> bool:
        """Set a waiter in line that did not fit aside, if waiting for the running ones cannot help
        it. Return whether."""
        worker, workers = waiter.worker, self._workers
        # 1. More pages than can come back without a proof.
        if waiter.req.max_pages > self._most_pages:
            self._leave_line(waiter)
            self._block(waiter, PAGES)
            return True
        # 2. It does not fit for another reason than its worker's share: pages will come back, so it
        # waits where it is.
        if not workers.refuses(worker, waiter.look.new_pages):
            return False
        # 3. The share. If even the end of all its worker's transfers would not help, it waits
        # alone. Otherwise the whole line does: what comes behind it there, and needs less, would
        # overtake it each time.
        if workers.is_hopeless(worker, waiter.look.new_pages):
            self._leave_line(waiter)
            self._block(waiter, SHARE)
        else:
            self.stepped_aside[SHARE] += 1
            worker.has_share = True
        return True

    def aside(self) -> dict[str, int]:
        """Count the requests that hold up no others, by reason. Any thread may call it."""
        lines = self._workers.all()
        with_share = sum(
            len(worker.line) for worker in lines if worker.is_open and worker.has_share
        )
        return {
            PAGES: len(self._aside[PAGES]),
            SHARE: len(self._aside[SHARE]) + with_share,
            PREFILL: sum(len(worker.line) for worker in lines if not worker.is_open),
        }

    # --- deadlines --------------------------------------------------------------------------------

    @property
    def wake_s(self) -> float:
        """Time at which the next request has waited too long, or is overdue, or a little earlier;
        infinity if none waits. O(1)."""
        return min(self._late.next_s, self._unanswered.next_s, self._overdue.next_s)

    def unanswered(self, now_s: float) -> list[DecodeRequest]:
        """Return those that have waited too long for a worker that does not answer. They have to be
        removed. O(1) if there are none."""
        late = []
        for waiter in sorted(self._unanswered.due(now_s), key=attrgetter("arrival")):
            if not waiter.worker.is_open and self._answer_due_s(waiter) <= now_s:
                late.append(waiter.req)
            else:  # the worker answers, or has stopped again since
                self._time_answer(waiter)
        return late

    # --- laws -------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Check lines, orders and those aside against the waiters. Raises InternalError."""
        waiters = [*self._waiters.values()]
        of = {one: [w for w in waiters if w.worker is one] for one in self._workers.all()}
        lines = {one: {w for w in ones if not w.blocked_by} for one, ones in of.items()}
        laws = {
            "the worker of each is known": all(waiter.worker in of for waiter in waiters),
            "a worker counts its waiters": all(one.num_waiters == len(of[one]) for one in of),
            "all that are not aside stand in its line": all(
                {*one.line} == line and list(one.order) == sorted(waiter.place for waiter in line)
                for one, line in lines.items()
            ),
            "the others are aside, for a reason": all(
                list(places) == sorted(w.place_aside for w in waiters if w.blocked_by == why)
                for why, places in self._aside.items()
            ),
            "deadlines are of waiting requests": len(self._late) <= len(waiters),
            "a wait for an answer ends in time": all(
                self._answer_due_s(waiter) >= self._unanswered.next_s
                for one, line in lines.items()
                for waiter in line
                if not one.is_open
            ),
        }
        check_laws(laws, list(self._waiters))
