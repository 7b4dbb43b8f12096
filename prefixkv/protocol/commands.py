"""Commands of a scheduler to its control object. Those for other ranks travel as they are."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.errors import AbortedError, TransferError
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import Count, FailureCode, Promise, Version, error_of
from prefixkv.request import DeviceEvent


class _Command(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of a scheduler's commands that travel."""


class OpenRoom(_Command, frozen=True, tag="open"):
    """Promise these pages to the prefill worker at `address`, for the prompt of this digest. A
    RoomEnded follows, and after a failure a RoomDrained."""

    promise: Promise
    address: str


class MeetPrefill(_Command, frozen=True, tag="meet"):
    """Greet the prefill worker at `address`, and report whether it answers. PrefillReady and
    PrefillAway follow as that changes, until a PrefillLost."""

    address: str


class RefuseRoom(_Command, frozen=True, tag="refuse"):
    """Tell the prefill worker at `address` that this room is refused. A RoomDrained follows.
    `digest` is the prompt's; b"" stands for any prompt."""

    key: RoomKey
    ticket: int
    address: str
    reason: str
    digest: bytes = b""


class AbortRoom(_Command, frozen=True, tag="abort"):
    """End the room from this side; or the offer, where the key names no decode worker. Unknown or
    ended, or an offer that is opened: no-op."""

    key: RoomKey
    reason: str
    code: FailureCode = FailureCode.OTHER

    @property
    def error(self) -> TransferError:
        return error_of(self.code, self.reason, AbortedError)


class Fence(_Command, frozen=True, tag="fence"):
    """Note that this incarnation can write no more; `proved`: the kernel says so."""

    peer: PeerId
    proved: bool = False


class MoveWeights(_Command, frozen=True, tag="move-weights"):
    """Move to weights of this version. Rooms of another version end, with a RoomEnded each.

    Without `ends_waiting` those rooms of prefill stay for which no page was promised and no chunk
    was handed over: the engine has not begun to compute them.
    """

    weights_version: Version
    ends_waiting: bool = True


class AddRoom(_Command, frozen=True, tag="add"):
    """Enter the request of this room in prefill: its length in tokens, and its prompt's digest."""

    key: RoomKey
    num_tokens: int
    digest: bytes


class OfferRoom(_Command, frozen=True, tag="offer"):
    """Offer a room, drawn for a prompt that is computed: the first decode worker that proves the
    digest within `timeout_s` opens it. The key names no decode worker."""

    key: RoomKey
    num_tokens: int
    digest: bytes
    timeout_s: float


class DeclineRoom(_Command, frozen=True, tag="decline"):
    """Tell decode why this request is not taken. No event follows, and a room that was added is not
    touched. `digest` is the prompt's; b"" stands for any prompt."""

    key: RoomKey
    reason: str
    digest: bytes = b""


class GroupChunk(NamedTuple):
    """Pages of one group that go with a chunk: `src_pages` of prefill's memory, of which the
    first is the `first`-th that decode has promised there."""

    first: Count
    src_pages: npt.NDArray[np.int32]


class SendChunk(_Command, frozen=True, eq=False, tag="chunk"):
    """Send KV of these pages of prefill's pool, once `ready` reports that it is computed.

    The first of them is page `first_page` of the request, counted from its first token; there may
    be none. With `last` the outcome and `aux` follow. With `clip` the chunk may come before
    decode's promise, for which it waits; and pages of the prefix that decode has may be in it,
    which are left out. `groups`: by group, as in `Promise`, what goes with it.
    """

    key: RoomKey
    first_page: Count
    src_pages: npt.NDArray[np.int32]
    last: bool
    aux: bytes
    ready: DeviceEvent | None
    clip: bool = False
    groups: tuple[GroupChunk, ...] = ()


DecodeCommand = OpenRoom | MeetPrefill | RefuseRoom | AbortRoom | MoveWeights | Fence
PrefillCommand = AddRoom | OfferRoom | DeclineRoom | SendChunk | AbortRoom | MoveWeights | Fence
