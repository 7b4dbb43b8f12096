"""Rooms that prefill has drawn itself: whichever decode worker proves the prompt may open one."""

from __future__ import annotations

from typing import Final, NamedTuple

from prefixkv.config import ControlConfig
from prefixkv.digest import proves
from prefixkv.errors import ProtocolError
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.sender_events import Promised

Numbers = tuple[int, int]
"""Room and generation."""

_MAX_CLOSED: Final = 4096


class Offer(NamedTuple):
    """A prompt whose KV is computed, until a decode worker opens its room."""

    num_tokens: int
    digest: bytes
    until_s: float

    def proved_by(self, promise: Promised) -> bool:
        """Whether who promises this knows the prompt. The number of a room proves nothing."""
        known = promise.fill_len == self.num_tokens
        return known and proves(promise.proof, self.digest, *promise.secrets)


class _Closed(NamedTuple):
    why: str
    until_s: float


class Offers:
    """Owned by a `PrefillControl`. An offer's key has no decode worker."""

    def __init__(self, timing: ControlConfig) -> None:
        self._timing = timing
        self._open: dict[Numbers, Offer] = {}
        # Rooms that were opened, withdrawn or overdue: who comes too late hears why.
        self._closed: dict[Numbers, _Closed] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, numbers: Numbers, offer: Offer) -> None:
        self._closed.pop(numbers, None)
        self._open[numbers] = offer

    def all(self) -> list[Numbers]:
        """Those that are open."""
        return list(self._open)

    def get(self, key: RoomKey) -> Offer | None:
        return self._open.get(key.numbers)

    def end(self, numbers: Numbers, why: str, now_s: float) -> bool:
        """Nobody opens the room any more. False: it was not open."""
        if self._open.pop(numbers, None) is None:
            return False
        self._closed[numbers] = _Closed(why, now_s + self._timing.parked_timeout_s)
        if len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        return True

    def check(self, key: RoomKey, promise: Promised, now_s: float) -> Offer | None:
        """The offer that this first promise of a worker takes; None: its room is no offer.

        Raises ProtocolError where the promise proves nothing, which leaves the offer to others, and
        where the room was opened or withdrawn.
        """
        offer = self._open.get(key.numbers)
        if offer is not None and not offer.proved_by(promise):
            raise ProtocolError(
                f"room {key.room} is open to who proves its prompt of {offer.num_tokens} tokens; "
                "the promise does not"
            )
        closed = self._closed.get(key.numbers)
        if closed is not None and offer is None and now_s < closed.until_s:
            raise ProtocolError(closed.why)
        return offer
