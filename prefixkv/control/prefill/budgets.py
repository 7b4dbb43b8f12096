"""Limits on what one decode worker can make a prefill rank hold: bytes per worker, promised pages
per rank.

A page of decode's is in one undrained room at a time, on both sides: decode promises it again only
after it has heard that the room before is drained, and prefill says so only when that is true here
(`SenderMachine.drained`). Frames of one decode process are taken in their order. A prefix that
several requests share is promised by one room; a partial last page belongs to one request. So no
honest rank has more pages in undrained rooms than its pool has, and no slack is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from prefixkv.errors import BudgetError, check_laws
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Hello

ROOM_BYTES: Final = 4096  # a room's machine and its entries here; 2.6 kB were measured
ABORT_BYTES: Final = 512  # an early abort, without its reason
PAGE_BYTES: Final = 4
_RANGE_BYTES: Final = 256  # one slab, region or tensor of a Hello


def hello_bytes(hello: Hello) -> int:
    """Return roughly how many bytes of a decode worker's budget a Hello takes while it is kept."""
    lists: list[Collection[object]] = [hello.layout.slabs, hello.layout.regions]
    for group in hello.layout.groups:
        lists += [group.layout.slabs, group.layout.regions]
    if hello.state is not None:
        lists += [hello.state.entries, hello.state.regions]
    return len(hello.agent_metadata) + len(hello.shm) + _RANGE_BYTES * (1 + sum(map(len, lists)))


class Budget:
    """The bytes held for one decode worker, counted against `limit`.

    It counts the Hellos of all its ranks, their rooms with the promised page ids, and aborts that
    came before the engine's request. All ranks of a worker share one `Budget`, so that a peer
    cannot raise its limit by opening more ranks.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raise BudgetError if `num_bytes` more would exceed the limit of what prefill holds for a
        decode worker. Nothing is counted yet."""
        if self.num_bytes + num_bytes > self.limit:
            raise BudgetError(
                f"{self.num_bytes} bytes are held for this decode worker and {num_bytes} more are "
                f"wanted, max_peer_bytes is {self.limit}"
            )


class RankClaims:
    """The rooms that one decode rank has named, with the number of pages it promised in each."""

    def __init__(self, num_pages: int, budget: Budget) -> None:
        self.rooms: dict[RoomKey, int] = {}  # pages promised in each, 0 for an abort
        self.num_undrained = 0  # pages that our writes may still reach: the sum over `_undrained`
        self._num_pages = num_pages
        self._budget = budget
        # The part of `rooms` that is not drained. A room leaves it first (`drained`), then `rooms`.
        self._undrained: dict[RoomKey, int] = {}

    def check(self, key: RoomKey, num_pages: int) -> None:
        """Check that a decode rank's promise of `num_pages` fits its pool and its worker's budget,
        before anything is read of its pages.

        A promise that is repeated, or that is for the next use of the number, replaces the one
        before, so that one's pages and bytes are not counted against it.

        Raises:
            BudgetError: the rank's pool has fewer pages, or the worker has no bytes left; nothing
                changes.
        """
        others = self.num_undrained - self._undrained.get(key, 0)
        if others + num_pages > self._num_pages:
            raise BudgetError(
                f"{others} pages are promised in rooms that are not drained and {num_pages} more "
                f"are, the pool has {self._num_pages}"
            )
        self._budget.check(self._cost(num_pages) - self._cost(self.rooms.get(key)))

    def add(self, key: RoomKey, num_pages: int) -> None:
        """Count as claimed by a decode rank, and in its worker's budget, a room that was checked: a
        first or repeated promise, or an abort, which has no pages."""
        known = self.rooms.get(key)
        if known is not None and not num_pages:
            return  # an abort leaves the promise as it is
        self._budget.num_bytes += self._cost(num_pages) - self._cost(known)
        self.num_undrained += num_pages - self._undrained.get(key, 0)
        self.rooms[key] = self._undrained[key] = num_pages

    def drained(self, key: RoomKey) -> None:
        """Stop counting the pages of a room that a decode rank claims as undrained: they may be
        promised again."""
        self.num_undrained -= self._undrained.pop(key, 0)

    def drop(self, key: RoomKey) -> None:
        """Stop counting a decode rank's claim on a room, its pages and its bytes in the budget.
        Unknown: no-op."""
        # Pages first: a room may leave `rooms` only when `_undrained` counts no page of it.
        self.drained(key)
        self._budget.num_bytes -= self._cost(self.rooms.pop(key, None))

    @property
    def num_bytes(self) -> int:
        return sum(map(self._cost, self.rooms.values()))

    def _cost(self, num_pages: int | None) -> int:
        return 0 if num_pages is None else ROOM_BYTES + PAGE_BYTES * num_pages

    def check_invariants(self, is_drained: Mapping[RoomKey, bool]) -> None:
        """Raise AssertionError if what is counted of this decode rank's claims differs from its
        rooms; `is_drained` is by room."""
        undrained = {key: num for key, num in self.rooms.items() if not is_drained[key]}
        laws = {
            "what is not drained is what was promised and may land": self._undrained == undrained,
            "its pages are counted": self.num_undrained == sum(undrained.values()),
            "and are no more than the pool has": self.num_undrained <= self._num_pages,
        }
        check_laws(laws, self._undrained, undrained)
