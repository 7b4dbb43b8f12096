"""The prefill workers that requests name: whether each answers, how much it holds, how many of
decode's pages it has in its power, and the line of requests that wait for it.

Pages are in a worker's power from the promise until the transfer has succeeded, or until it is
proved that no write of it can land there any more. A worker that takes promises and never gives
that proof would come to have them all. So while another worker answers too, each has at most its
share: its requests wait for pages to come back, those of others do not.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Final

from sortedcontainers import SortedList

from prefixkv.errors import RequestError, check_laws
from prefixkv.protocol.ids import RoomKey

_MOST_IDLE: Final = 64  # workers above which those without requests are forgotten

ALONE: Final = ""
"""In place of a prefill worker's address: of those requests for which none is to be asked. This
worker computes what they lack. It always answers."""


@dataclass(slots=True, eq=False)
class Worker:
    """A prefill worker, as decode knows it, and its line (`waiting.py`).

    `max_tokens` is the size of its pool, 0 where that is not known. `away_s` is the time since when
    it does not answer.
    """

    address: str
    is_open: bool  # it answers
    away_s: float = -math.inf
    max_tokens: int = 0
    is_met: bool = False  # asked for by MeetPrefill, and not reported as lost
    # Pages in its power.
    num_pages: int = 0
    was_refused: bool = False  # since pages of its last came back
    # Its line: all, and of these the ones without a place in the order yet.
    has_share: bool = False  # as this pass has found: none in its line has a turn
    num_waiters: int = 0  # with those that are aside
    line: OrderedDict[Any, None] = field(default_factory=OrderedDict)  # by the age of the last look
    new: dict[Any, None] = field(default_factory=dict)
    order: Any = field(default_factory=SortedList)  # places


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
        """Return the worker at an address. One that is new is not kept before a request waits for
        it (`keep`)."""
        return self._workers.get(address) or Worker(address, not self.gated or address == ALONE)

    def keep(self, worker: Worker) -> None:
        self._workers[worker.address] = worker

    def forget_if_idle(self, worker: Worker) -> None:
        """Forget a worker of which nothing is known, where there are many: a few are kept for the
        next request."""
        is_needed = worker.num_waiters or worker.is_met or worker.num_pages
        if len(self._workers) > _MOST_IDLE and not is_needed:
            self._workers.pop(worker.address, None)

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
            self.keep(worker)  # its line may have forgotten it, with its last request
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
            self.forget_if_idle(worker)

    def check_invariants(self, rooms: Set[RoomKey]) -> None:
        """Check the shares against `rooms`, those that are open or undrained: no other may have
        pages in a worker's power. Raises InternalError."""
        pages = Counter[Worker]()
        for worker, num_pages in self._shares.values():
            pages[worker] += num_pages
        laws = {
            "a worker's pages are those of its rooms": all(
                worker.num_pages == pages[worker] for worker in self.all()
            ),
            "only open and undrained rooms have pages in a worker's power": self._shares.keys()
            <= rooms,
        }
        check_laws(laws, self._shares)
