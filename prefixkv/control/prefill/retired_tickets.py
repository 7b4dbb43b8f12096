"""Past uses of rooms, so that a late frame about one is not taken for the next use of its number.

Links keep order, and a rank that has acknowledged the outcome of a use, or aborted it, promises its
pages no more. Until then a repeat of that promise may be on its way, and the pages may be another
request's by the time it comes. An abort is repeated until its answer has arrived, so it may come
even later; what it could do is end a request for nothing.
"""

from __future__ import annotations

from prefixkv.protocol.ids import RoomKey

Use = tuple[RoomKey, int]  # a room, and the ticket of one use of its number


class RetiredTickets:
    """The past uses of one decode rank: at most `most` that it has not answered, and `most` that it
    has; beyond that the oldest is forgotten. Settled ones do not push out one whose promise may
    still be on its way."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Both in order of arrival, the oldest first; the values are unused.
        self._unanswered: dict[Use, None] = {}
        self._answered: dict[Use, None] = {}

    def __contains__(self, use: Use) -> bool:
        return use in self._unanswered or use in self._answered

    def add(self, use: Use, *, answered: bool = False) -> None:
        known = self._answered if answered else self._unanswered
        known[use] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def answer(self, use: Use) -> None:
        """Note that a use was acknowledged or aborted. Not recorded: no-op."""
        if use in self._unanswered:
            del self._unanswered[use]
            self.add(use, answered=True)
