"""Prefill workers, and what they are told: rooms to fill, and requests that decode does not take.

Each of the latter is told to the prefill worker that may have it: it may have computed the prompt,
and waits for a promise that will not come; a refusal ends it there. The number of the room stays in
use until the worker has answered, so that no frame of a later request of that number can be taken
for one of this.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Final

from sortedcontainers import SortedList

from prefixkv.errors import RequestError, check_laws
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import DecodeCommand, RefuseRoom
from prefixkv.protocol.ids import RoomKey

_MOST_IDLE: Final = 64  # workers above which those without requests are forgotten


@dataclass(slots=True)
class _Number:
    """A number with rooms that are not drained. By generation, `undrained` are these, and `noted`
    those of `note` that prefill has not answered: each with its refusal while that waits."""

    undrained: set[int] = field(default_factory=set)
    noted: dict[int, tuple[str, Exception, bytes] | None] = field(default_factory=dict)


class Rooms:
    """Numbers of live requests, and of rooms that are not drained. Owned by the scheduler's thread.
    Every call is O(1), but for `drained` where refusals wait; to list them is O(of them).

    A number is free again when its request has ended and each of its generations is drained: until
    then a peer may write to that room, or the control plane still has to report its end.

    `commands` takes the refusals. `ticket` draws a number for each use of a room, never the same
    one twice.
    """

    def __init__(
        self, commands: list[DecodeCommand], ticket: Callable[[], int], counters: Counter[str]
    ) -> None:
        self.ticket = ticket
        self.commands = commands
        self._counters = counters
        self._live: set[int] = set()
        self._numbers: dict[int, _Number] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._live or room in self._numbers

    def __bool__(self) -> bool:
        """True if any number is in use."""
        return bool(self._live or self._numbers)

    def is_live(self, room: int) -> bool:
        return room in self._live

    def is_unanswered(self, key: RoomKey) -> bool:
        """True if prefill has not answered a `note` of this room yet."""
        return key.room in self._numbers and key.generation in self._numbers[key.room].noted

    def add(self, room: int) -> None:
        """A live request takes a number that is free."""
        self._live.add(room)

    def remove(self, room: int) -> None:
        """Note that the live request has ended; the number is free if no room of it is
        undrained."""
        self._live.remove(room)

    def await_drained(self, key: RoomKey) -> _Number:
        number = self._numbers.setdefault(key.room, _Number())
        number.undrained.add(key.generation)
        return number

    def drained(self, key: RoomKey) -> None:
        """A room is drained: its number is free if nothing else uses it, and what waited for that
        is refused. Not awaited: no-op."""
        if (number := self._numbers.get(key.room)) is None:
            return
        number.undrained.discard(key.generation)
        # One that still waits for this number stays noted, else it could be noted twice.
        if number.noted.get(key.generation) is None:
            number.noted.pop(key.generation, None)
        if number.undrained:
            return
        # The number is free of every generation: now a frame about a later request cannot be
        # confused with one about this room.
        del self._numbers[key.room]
        for generation, late in number.noted.items():
            assert late is not None  # else its room would be undrained
            self.refuse(RoomKey(key.room, generation), *late).noted[generation] = None

    def undrained(self) -> set[RoomKey]:
        """Return all rooms that keep a number in use until they are drained. O(of them)."""
        return {RoomKey(room, gen) for room, one in self._numbers.items() for gen in one.undrained}

    # --- refusals ---------------------------------------------------------------------------------

    def refuse(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> _Number:
        """Tell a prefill worker that a request is not taken. The room's number is in use until it
        has answered."""
        command = RefuseRoom(key, self.ticket(), prefill, reason_of(error), digest)
        self._counters["refused"] += 1
        # Reserved before the command leaves: a request that reused the number could be hit by this
        # refusal.
        number = self.await_drained(key)
        self.commands.append(command)
        return number

    def note(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> None:
        """Refuse a room that was never taken, and remember that until prefill has answered. No live
        request has its number; one that is unanswered must not come again."""
        # Where a room of its number is not drained, a frame about it now would be read as one about
        # that room: so it waits for `drained`.
        if (number := self._numbers.get(key.room)) is not None:
            number.noted[key.generation] = prefill, error, digest
        else:
            self.refuse(key, prefill, error, digest).noted[key.generation] = None

    def check_invariants(self) -> None:
        """Check what is not answered against the numbers in use. Raises InternalError."""
        for room, number in self._numbers.items():
            sent = {generation for generation, late in number.noted.items() if late is None}
            laws = {
                "what is drained is forgotten": bool(number.undrained),
                "no refusal is noted of a live request": room not in self._live or not number.noted,
                "what was refused keeps its number until prefill has answered": sent
                <= number.undrained,
            }
            check_laws(laws, room, number)

    def __repr__(self) -> str:
        return f"Rooms({self._live}, {self._numbers})"


@dataclass(slots=True, eq=False)
class Worker:
    """A prefill worker, as decode knows it, and its line.

    `max_tokens` is the size of its pool, 0 where that is not known. `away_s` is the time since when
    it does not answer. The line of "" has those that ask none: it always answers.
    """

    address: str
    is_open: bool  # it answers
    is_down: bool = False  # it has stopped, or never did; not while it may be on its way
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

    def of(self, address: str) -> Worker:
        """Return the worker at an address. For a new one those are forgotten of which nothing is
        known, where there are many."""
        if (worker := self._workers.get(address)) is None:
            if len(self._workers) >= _MOST_IDLE:
                known = self._workers.values()
                needed = [one for one in known if one.num_waiters or one.is_met or one.num_pages]
                self._workers = {one.address: one for one in needed}
            worker = Worker(address, not (self.gated and address))
            self._workers[address] = worker
        return worker

    def all(self) -> list[Worker]:
        """Return all workers. Any thread may call it."""
        return list(self._workers.values())

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
