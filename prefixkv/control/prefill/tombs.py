"""What is remembered of rooms that are not there, bounded for each decode worker.

A request has two halves under one number: the engine's here, and decode's promise. They come in any
order, and one may be over before the other has come. Two kinds of tombs stand for that:

- *A half is awaited*, at a number. The half that comes within the time ends with the tomb's error.
  Only where both sides name a prompt, and the two differ, does it belong to the number's next use;
  so does a promise under another ticket than the tomb has met.
- *A use is over*, at a number, a decode rank and a ticket. A late word of that rank about it is
  answered and changes nothing; above all a repeat of the promise opens no room. It has no deadline:
  until decode has answered, nothing tells whether a repeat is on its way.

An offer that is closed is a half that is awaited of any decode worker: its key names none.
"""

from __future__ import annotations

import enum
import math
from typing import Final, NamedTuple, TypeVar

from prefixkv.protocol.ids import PeerId, RoomKey

Use = tuple[RoomKey, PeerId, int]
"""A number, the decode rank that has spoken of it, and the ticket of that use."""
K = TypeVar("K")
V = TypeVar("V")


class Half(enum.Flag):
    """A half of a request, by the side that it comes from."""

    REQUEST = enum.auto()
    PROMISE = enum.auto()


class Tomb(NamedTuple):
    """The end of a half. `digest`: of its prompt; b"": of any. `ticket`: of decode's half, once a
    word of it has come."""

    error: Exception
    awaits: Half
    digest: bytes
    ticket: int | None
    until_s: float

    def is_of(self, digest: bytes) -> bool:
        """Return whether this prompt may be the tomb's; b"" names none."""
        return not (self.digest and digest) or self.digest == digest


_MOST_OFFERS: Final = 4096
"""Closed offers that are kept: they name no worker, so those of all count together."""


class Tombs:
    """The tombs of one prefill rank. Owned by a `PrefillControl`.

    Of each decode worker `most` numbers, and of each of its ranks `most` uses that it has answered
    and `most` that it has not. Beyond that the oldest is forgotten: never another worker's, and
    never an unanswered use for an answered one.
    """

    def __init__(self, most: int, keep_s: float) -> None:
        self._most = most
        self._keep_s = keep_s
        # In order of arrival, by the name of the worker ("": any).
        self._awaited: dict[str, dict[RoomKey, Tomb]] = {}
        # The same by rank.
        self._answered: dict[PeerId, dict[Use, Exception]] = {}
        self._unanswered: dict[PeerId, dict[Use, Exception]] = {}

    # --- a half is awaited ------------------------------------------------------------------------

    def await_half(
        self,
        key: RoomKey,
        half: Half,
        error: Exception,
        now_s: float,
        *,
        digest: bytes = b"",
        ticket: int | None = None,
    ) -> None:
        """End the half that comes next under this number with `error`."""
        tombs = self._awaited.setdefault(key.decode, {})
        tombs.pop(key, None)  # to the end, which is the order of the deadlines
        tombs[key] = Tomb(error, half, digest, ticket, now_s + self._keep_s)
        self._bound(tombs, self._most if key.decode else _MOST_OFFERS)

    def meet_request(self, key: RoomKey, digest: bytes) -> Exception | None:
        """Return the error with which a request that has come ends, None if it goes on.

        The number is in use again: what was awaited under it is forgotten in any case.
        """
        tomb = self._awaited.get(key.decode, {}).pop(key, None)
        is_met = tomb is not None and Half.REQUEST in tomb.awaits and tomb.is_of(digest)
        return tomb.error if tomb is not None and is_met else None

    def meet_offer(self, numbers: tuple[int, int]) -> Exception | None:
        """As `meet_request`, for one that belongs to no decode worker yet."""
        met = [self.meet_request(RoomKey(*numbers, name), b"") for name in self._awaited]
        return next((error for error in met if error is not None), None)

    def meet_promise(
        self, key: RoomKey, ticket: int, digest: bytes, *, next_too: bool = True
    ) -> Exception | None:
        """Return the error with which a promise ends, None if it goes on.

        Other ranks promise the same, so the tomb stays. Where the prompt is known, the request that
        was ended may have been the one before: with `next_too` the next one has lost its promise.
        """
        tombs = self._awaited.get(key.decode, {})
        tomb = tombs.get(key)
        if tomb is None or Half.PROMISE not in tomb.awaits:
            return None
        if not key.decode:  # a closed offer: any worker, any ticket
            return tomb.error if tomb.is_of(digest) else None
        if not tomb.is_of(digest) or tomb.ticket not in (None, ticket):
            del tombs[key]  # the number's next use
            return None
        more = Half.REQUEST if next_too and tomb.digest else Half.PROMISE
        tombs[key] = tomb._replace(ticket=ticket, awaits=tomb.awaits | more)
        return tomb.error

    def expire(self, now_s: float) -> None:
        """Forget the halves that have not come in time. O(expired + decode workers)."""
        for name, tombs in list(self._awaited.items()):
            while tombs and tombs[key := next(iter(tombs))].until_s <= now_s:
                del tombs[key]
            if not tombs:
                del self._awaited[name]

    @property
    def due_s(self) -> float:
        """When the next half is awaited no more, infinity if none is. O(decode workers)."""
        firsts = (next(iter(tombs.values())).until_s for tombs in self._awaited.values() if tombs)
        return min(firsts, default=math.inf)

    def awaited(self) -> list[RoomKey]:
        """Return the numbers of which a half is awaited, for audits."""
        return [key for tombs in self._awaited.values() for key in tombs]

    # --- a use is over ----------------------------------------------------------------------------

    def bury(self, use: Use, error: Exception, *, answered: bool = False) -> None:
        """Remember that a use is over; `answered`: its rank has acknowledged or aborted it."""
        table = self._answered if answered else self._unanswered
        uses = table.setdefault(use[1], {})
        uses[use] = error
        self._bound(uses, self._most)

    def answer(self, use: Use) -> None:
        """Note that the rank has acknowledged or aborted a use. Not buried: no-op."""
        if error := self._unanswered.get(use[1], {}).pop(use, None):
            self.bury(use, error, answered=True)

    def over(self, use: Use) -> Exception | None:
        """Return how a use ended, None if it is not known to be over."""
        error = self._unanswered.get(use[1], {}).get(use)
        return error or self._answered.get(use[1], {}).get(use)

    def forget(self, peer: PeerId) -> None:
        """Forget the uses of a rank that is no peer any more: it has to say Hello first."""
        self._unanswered.pop(peer, None)
        self._answered.pop(peer, None)

    def _bound(self, tombs: dict[K, V], most: int) -> None:
        if len(tombs) > most:
            del tombs[next(iter(tombs))]
