"""Events that tell a scheduler what became of a room, or of a prefill worker. Decode's events of
rooms travel to rank 0 as they are. An exception travels as its class's name and its text:
`encode_error`."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from prefixkv import errors
from prefixkv.paging import Pages
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey

MAX_ERROR_CHARS = 1000


class _Event(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of the events that a control object reports to its scheduler."""


class RoomEnded(_Event, frozen=True, tag="ended"):
    """The room's one terminal state. `aux` came with decode's SUCCESS, `error` is set on FAILED."""

    key: RoomKey
    poll: KVPoll
    error: Exception | None = None
    aux: bytes = b""


class RoomDrained(_Event, frozen=True, tag="drained"):
    """After decode's FAILED: no write can land in the room's pages any more. Comes once."""

    key: RoomKey


class RoomOverdue(_Event, frozen=True, tag="overdue"):
    """After decode's FAILED: not drained by its deadline. The pages stay; look at the peer."""

    key: RoomKey


class PrefillReady(_Event, frozen=True, tag="ready"):
    """All ranks of this worker answer. Its pool holds `max_tokens`, 0 where it does not say."""

    address: str
    max_tokens: int = 0


class PrefillAway(_Event, frozen=True, tag="away"):
    """A rank of the prefill worker at this address has stopped answering, or was replaced."""

    address: str


class PrefillLost(_Event, frozen=True, tag="lost"):
    """Nothing answers at this address, or what does is refused, as `error` says. No further event
    of this address comes until it is asked about again."""

    address: str
    error: Exception


class Bootstrapped(_Event, frozen=True, tag="bootstrapped"):
    """The engine and all readers have named the room: computing may start. `peer` is the lowest
    reader, `prefix_len` what decode has."""

    key: RoomKey
    peer: PeerId
    prefix_len: int


class SourceFree(_Event, frozen=True, tag="source-free"):
    """The room's writes read prefill's pages no more. Comes once, with RoomEnded or later."""

    key: RoomKey


DecodeEvent = RoomEnded | RoomDrained | RoomOverdue
WorkerEvent = PrefillReady | PrefillAway | PrefillLost
"""Said to a scheduler that has asked by MeetPrefill, and to rank 0 only."""
PrefillEvent = Bootstrapped | RoomEnded | SourceFree
RoomEvent = RoomEnded | RoomDrained | RoomOverdue | Bootstrapped | SourceFree | WorkerEvent


def encode_error(value: Any) -> tuple[Any, ...]:
    """Return an exception as its class's name and its text, cut to MAX_ERROR_CHARS, with the lost
    peer or the two versions; a msgspec `enc_hook`."""
    # Subclasses before Exception: these carry fields that the scheduler of another rank acts on.
    if isinstance(value, errors.PeerLostError) and value.peer is not None:
        return type(value).__name__, str(value)[:MAX_ERROR_CHARS], *value.peer
    if isinstance(value, errors.WeightsVersionError):
        return type(value).__name__, value.whose, *value.versions
    if isinstance(value, Exception):
        return type(value).__name__, str(value)[:MAX_ERROR_CHARS]
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def decode_error(kind: type, value: Any) -> Exception:
    """Return the exception that `encode_error` has encoded; a msgspec `dec_hook`. Any class but our
    TransferErrors comes back as a TransferError.

    >>> decode_error(Exception, encode_error(errors.AbortedError("enough")))
    AbortedError('enough')
    >>> decode_error(Exception, encode_error(OSError("gone")))
    TransferError('gone')
    """
    if kind is not Exception:
        raise NotImplementedError(f"{kind} does not travel")
    name, text, *more = value
    # The name came with a frame. It only selects a class of our own module, and the checks below
    # admit none but errors of transfers.
    found = getattr(errors, str(name), None)
    if found is errors.PeerLostError and len(more) == 2:
        return errors.PeerLostError(str(text), PeerId(str(more[0]), int(more[1])))
    if found is errors.WeightsVersionError:
        if len(more) != 2:
            return errors.TransferError(str(text))
        return errors.WeightsVersionError(str(more[0]), str(more[1]), str(text))
    if isinstance(found, type) and issubclass(found, errors.TransferError):
        return found(str(text))
    return errors.TransferError(str(text))


# --- copies of decode's host tier -----------------------------------------------------------------


class HostCopy(NamedTuple):
    """An order to copy pages between host memory and the device's pool.

    Until its `HostCopyDone` has come, nothing writes the pages that it reads, and nothing reads or
    writes those that it fills. A load names each of its device pages once, a write each of its host
    pages.
    """

    number: int  # of the order; none that is under way has the same
    is_load: bool  # host to device; else it is a write, device to host
    host_pages: Pages  # int32 [n], n >= 1
    device_pages: Pages  # int32 [n]; host_pages[i] and device_pages[i] are the ends of page i


class HostCopyDone(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="copied"):
    """The end of an order: nothing of it touches memory any more. Comes once. After an error some
    destination pages may have been written, and their bytes mean nothing."""

    number: int
    error: Exception | None  # the first one; None if all pages were copied
    num_bytes: int  # that were copied, of the pieces without an error
    seconds: float  # from the begin of the order's first piece on; 0 if none began
