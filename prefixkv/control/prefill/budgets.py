"""What a prefill rank may hold for a decode worker: bytes of all, pages of each of its ranks.

A page of decode's is in one undrained room at a time, on both sides: decode promises it again only
after it has heard that the room before is drained, and prefill says so only when that is true here
(`SenderMachine.drained`); one decode process's frames are taken in their order. What a flight
shares is promised by one room, the others name it in their prefix; a partial last page is its own
request's. So no honest rank has more pages in undrained rooms than its pool has, and no slack is
needed.
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
    """What a Hello takes while it is kept, in bytes, roughly."""
    lists: list[Collection[object]] = [hello.layout.slabs, hello.layout.regions]
    if hello.state is not None:
        lists += [hello.state.entries, hello.state.regions]
    return len(hello.agent_metadata) + len(hello.shm) + _RANGE_BYTES * (1 + sum(map(len, lists)))


class Budget:
    """The bytes held for one decode worker: the Hellos of its ranks, their rooms with the page ids
    promised, aborts of rooms that are not known yet."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raises BudgetError where that many more are too many."""
        if self.num_bytes + num_bytes > self.limit:
            raise BudgetError(
                f"{self.num_bytes} bytes are held for this decode worker and {num_bytes} more are "
                f"wanted, max_peer_bytes is {self.limit}"
            )


class Claimed:
    """The rooms that one decode rank has named, and the pages it has promised there."""

    def __init__(self, num_pages: int, budget: Budget) -> None:
        """`num_pages` of its pool."""
        self.rooms: dict[RoomKey, int] = {}  # the pages promised
        self.num_undrained = 0  # pages
        self._num_pages = num_pages
        self._budget = budget
        self._undrained: dict[RoomKey, int] = {}

    def check(self, key: RoomKey, num_pages: int) -> None:
        """Before a promise of that many pages is looked at. One that is said again, or for the next
        use of the number, stands in the place of the one before.

        Raises BudgetError where the rank's pool has fewer, or its worker has too many bytes.
        """
        others = self.num_undrained - self._undrained.get(key, 0)
        if others + num_pages > self._num_pages:
            raise BudgetError(
                f"{others} pages are promised in rooms that are not drained and {num_pages} more "
                f"are, the pool has {self._num_pages}"
            )
        self._budget.check(self._cost(num_pages) - self._cost(self.rooms.get(key)))

    def add(self, key: RoomKey, num_pages: int) -> None:
        """A promise that was checked, said perhaps again; or an abort, of no pages."""
        known = self.rooms.get(key)
        if known is not None and not num_pages:
            return  # an abort leaves the promise as it is
        self._budget.num_bytes += self._cost(num_pages) - self._cost(known)
        self.num_undrained += num_pages - self._undrained.get(key, 0)
        self.rooms[key] = self._undrained[key] = num_pages

    def drained(self, key: RoomKey) -> None:
        """Its pages may be promised again."""
        self.num_undrained -= self._undrained.pop(key, 0)

    def drop(self, key: RoomKey) -> None:
        self.drained(key)
        self._budget.num_bytes -= self._cost(self.rooms.pop(key, None))

    @property
    def num_bytes(self) -> int:
        return sum(map(self._cost, self.rooms.values()))

    def _cost(self, num_pages: int | None) -> int:
        return 0 if num_pages is None else ROOM_BYTES + PAGE_BYTES * num_pages

    def check_invariants(self, is_drained: Mapping[RoomKey, bool]) -> None:
        """The laws, given all rooms there are."""
        undrained = {key: num for key, num in self.rooms.items() if not is_drained[key]}
        laws = {
            "what is not drained is what was promised and may land": self._undrained == undrained,
            "its pages are counted": self.num_undrained == sum(undrained.values()),
            "and are no more than the pool has": self.num_undrained <= self._num_pages,
        }
        check_laws(laws, self._undrained, undrained)
