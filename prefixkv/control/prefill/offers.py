"""Rooms that prefill has drawn itself: whichever decode worker proves the prompt may open one."""

from __future__ import annotations

from typing import Final, NamedTuple

from prefixkv.config import ControlConfig
from prefixkv.errors import ProtocolError
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.sender_events import Promised

Numbers = tuple[int, int]
"""Room and generation."""

_MAX_CLOSED: Final = 4096


class Offer(NamedTuple):
    """A prompt with computed KV, until a decode worker opens its room."""

    num_tokens: int
    digest: bytes
    until_s: float

    def proved_by(self, promise: Promised) -> bool:
        """Return whether the sender of this promise knows the prompt. The number of a room proves
        nothing: it travels through routers, and can be guessed or repeated."""
        return promise.fill_len == self.num_tokens and promise.digest == self.digest


class _Closed(NamedTuple):
    """An offer that is open no more: the reason, and until when it is remembered."""

    offer: Offer
    why: str
    until_s: float


class Offers:
    """The offers of one prefill rank, by room and generation alone: their keys name no decode
    worker. Owned by a `PrefillControl`."""

    def __init__(self, timing: ControlConfig) -> None:
        self._timing = timing
        self._open: dict[Numbers, Offer] = {}
        # Offers that were opened, withdrawn or overdue, so that a late promise is refused with the
        # reason. The oldest comes first.
        self._closed: dict[Numbers, _Closed] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, numbers: Numbers, offer: Offer) -> None:
        """Open an offer; a closed one of the same numbers is forgotten."""
        self._closed.pop(numbers, None)
        self._open[numbers] = offer

    def all(self) -> list[Numbers]:
        return list(self._open)

    def get(self, key: RoomKey) -> Offer | None:
        """Return the open offer of this key, whichever decode worker it names."""
        return self._open.get(key.numbers)

    def end(self, numbers: Numbers, why: str, now_s: float) -> bool:
        """Close an offer and remember why for `parked_timeout_s`; False if it was not open."""
        if (offer := self._open.pop(numbers, None)) is None:
            return False
        self._closed[numbers] = _Closed(offer, why, now_s + self._timing.parked_timeout_s)
        # All stay equally long, so the first is the one that would go next.
        if len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        return True

    def check(self, key: RoomKey, promise: Promised, now_s: float) -> Offer | None:
        """Return the offer that this first promise takes, None if its room is no offer.

        Raises ProtocolError: the promise does not prove the prompt, which leaves the offer to
        others; or the offer was opened or withdrawn. A promise for another prompt than a closed
        offer's is of the number's next use.
        """
        offer = self._open.get(key.numbers)
        if offer is not None and not offer.proved_by(promise):
            raise ProtocolError(
                f"room {key.room} is open to who proves its prompt of {offer.num_tokens} tokens; "
                "the promise does not"
            )
        closed = self._closed.get(key.numbers)
        is_late = closed is not None and offer is None and now_s < closed.until_s
        if closed is not None and is_late and closed.offer.proved_by(promise):
            raise ProtocolError(closed.why)
        return offer
