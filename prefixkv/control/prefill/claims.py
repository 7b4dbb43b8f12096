"""The rooms and pages that a decode rank claims: no more pages at once than its pool has.

A page of decode's is in one undrained room at a time: decode promises it again only after it has
heard that the room before is drained (`SenderMachine.drained`), and its frames are taken in order.
Requests with a common prefix promise it by one room. So a right rank needs no slack.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefixkv.errors import OverpromisedError, check_laws
from prefixkv.protocol.ids import RoomKey


class RankClaims:
    """The rooms that one decode rank has named, with the number of pages it promised in each."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` is the size of the rank's pool."""
        self.rooms: dict[RoomKey, int] = {}  # pages promised in each, 0 for an abort
        self.num_undrained = 0  # pages that our writes may still reach: the sum over `_undrained`
        self._num_pages = num_pages
        # The part of `rooms` that is not drained. A room leaves it first (`drained`), then `rooms`.
        self._undrained: dict[RoomKey, int] = {}

    def check(self, key: RoomKey, num_pages: int) -> None:
        """Check that a promise of `num_pages` fits the pool, before anything is read of its pages.

        A promise that is repeated, or for the next use of the number, replaces the one before.
        Raises OverpromisedError, with nothing changed, if the pool has fewer pages.
        """
        others = self.num_undrained - self._undrained.get(key, 0)
        if others + num_pages > self._num_pages:
            raise OverpromisedError(
                f"{others} pages are promised in rooms that are not drained and {num_pages} more "
                f"are, the pool has {self._num_pages}"
            )

    def add(self, key: RoomKey, num_pages: int) -> None:
        """Count a checked room: a first or repeated promise, or an abort, which has no pages."""
        if key in self.rooms and not num_pages:
            return  # an abort leaves the promise as it is
        self.num_undrained += num_pages - self._undrained.get(key, 0)
        self.rooms[key] = self._undrained[key] = num_pages

    def drained(self, key: RoomKey) -> None:
        """Stop counting a room's pages: they may be promised again."""
        self.num_undrained -= self._undrained.pop(key, 0)

    def drop(self, key: RoomKey) -> None:
        """Stop counting a room. Unknown: no-op."""
        # Pages first: a room may leave `rooms` only when `_undrained` counts no page of it.
        self.drained(key)
        self.rooms.pop(key, None)

    def check_invariants(self, is_drained: Mapping[RoomKey, bool]) -> None:
        """Raise AssertionError if counts differ from the rooms; `is_drained` is by room."""
        undrained = {key: num for key, num in self.rooms.items() if not is_drained[key]}
        laws = {
            "what is not drained is what was promised and may land": self._undrained == undrained,
            "its pages are counted": self.num_undrained == sum(undrained.values()),
            "and are no more than the pool has": self.num_undrained <= self._num_pages,
        }
        check_laws(laws, self._undrained, undrained)
