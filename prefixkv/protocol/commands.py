"""What the decode scheduler wants of the control plane."""

from __future__ import annotations

from dataclasses import dataclass

from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Promise


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """Promise these pages to the prefill worker at `address`."""

    promise: Promise
    address: str


@dataclass(frozen=True, slots=True)
class AbortRoom:
    key: RoomKey
    error: Exception


@dataclass(frozen=True, slots=True)
class RefuseRoom:
    """Tell the prefill worker at `address` that this room will not be opened. `room_drained`
    follows."""

    key: RoomKey
    ticket: int
    address: str
    error: Exception


Command = OpenRoom | AbortRoom | RefuseRoom
