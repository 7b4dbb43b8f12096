"""Events that `SenderMachine` takes and actions that it returns: prefill's side of one room."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from prefixkv.errors import AbortedError, TransferError, WeightsVersionError
from prefixkv.paging import Pages, unit_pages
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.events import PrefillEvent
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.machine import Fail, RoomTick
from prefixkv.protocol.messages import AnyBody
from prefixkv.request import DeviceEvent

# --- events ---------------------------------------------------------------------------------------


class Added(msgspec.Struct, frozen=True):
    """The engine has the request, and hands over KV of `num_tokens` tokens, of this digest."""

    num_tokens: int
    digest: bytes
    weights_version: str = ""


class Promised(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rank `reader` of decode has `prefix_len` tokens and wants the rest of `fill_len` in `pages`
    of its pool: `num_units` unit pages of `unit_tokens`, `fold` of them per page.

    The control object has checked it. `readers` are all ranks that will promise. `writes` is False
    for a reader that gets none of our KV and only has to know how the room ends. `digest` is that
    of the prompt. `groups` are the pages promised in each group: `num_windows` of windows, then
    extra state's, if any; `takes_state` is False where none of ours goes there.
    """

    peer: PeerId
    fill_len: int
    prefix_len: int
    pages: Pages
    num_units: int
    ticket: int = 0
    reader: int = 0
    readers: tuple[int, ...] = (0,)
    writes: bool = True
    unit_tokens: int = 0  # 0: a page of ours
    fold: int = 1
    takes_state: bool = False
    digest: bytes = b""
    weights_version: str = ""
    groups: tuple[Pages, ...] = ()
    num_windows: int = 0

    @property
    def all_pages(self) -> int:
        """Number of pages, those of groups included."""
        return len(self.pages) + sum(map(len, self.groups))

    def takes(self, group: int) -> bool:
        """Return whether we write to the reader's pages, or to those of this group."""
        is_state = self.num_windows <= group
        return self.takes_state if is_state else self.writes

    def span(self, chunk: SendChunk, page_size: int) -> tuple[int, int, int]:
        """Return a chunk's units, counted behind the promised prefix: (first, end, units per page).
        `first` is negative where decode has some of them."""
        unit_tokens = self.unit_tokens or page_size
        fold = page_size // unit_tokens
        first = chunk.first_page * fold - self.prefix_len // unit_tokens
        return first, first + len(chunk.src_pages) * fold, fold

    def units(self, start: int, stop: int) -> Pages:
        """Return the unit pages of the reader's pool from `start` to `stop`."""
        return unit_pages(self.pages, self.fold, start, stop)

    def repeats(self, other: Promised) -> bool:
        same = self.peer == other.peer and self.digest == other.digest
        return same and _equal((self.pages, *self.groups), (other.pages, *other.groups))

    def agrees_with(self, other: Promised) -> bool:
        """Return True if two readers agree, each in its own pool's units."""
        mine = (self.ticket, self.fill_len, self.prefix_len, self.num_units)
        others = (other.ticket, other.fill_len, other.prefix_len, other.num_units)
        same = self.weights_version == other.weights_version and mine == others
        same &= list(map(len, self.groups)) == list(map(len, other.groups))
        return same and _equal(self.groups[self.num_windows :], other.groups[other.num_windows :])


def _equal(mine: Sequence[Pages], others: Sequence[Pages]) -> bool:
    return len(mine) == len(others) and all(map(np.array_equal, mine, others))


class JobEnded(msgspec.Struct, frozen=True):
    """A job ended: DONE without `error`; else `drained` is False where some may still land."""

    job_id: int
    error: Exception | None = None
    drained: bool = True


class JobDrained(msgspec.Struct, frozen=True):
    """A job that had ended in an error can land no more: its agent was destroyed."""

    job_id: int


class AbortSaid(msgspec.Struct, frozen=True, kw_only=True):
    """This reader wants no more of this room and waits for our Drained."""

    peer: PeerId
    reason: str
    ticket: int = 0
    reader: int = 0
    readers: tuple[int, ...] = (0,)
    versions: tuple[str, str] | None = None

    @property
    def error(self) -> TransferError:
        return abort_error(self.reason, self.versions)


def abort_error(reason: str, versions: tuple[str, str] | None) -> TransferError:
    if versions is None:
        return AbortedError(f"decode: {reason}")
    return WeightsVersionError(*versions, "decode")


class OutcomeAcked(msgspec.Struct, frozen=True):
    """This reader knows the outcome."""

    reader: int = 0


class LifeBegan(msgspec.Struct, frozen=True):
    """Decode was started after the request came: it has until `until_s` to promise."""

    peer: PeerId
    until_s: float


PeerSaid = Promised | AbortSaid | OutcomeAcked
SenderEvent = PeerSaid | Added | SendChunk | JobEnded | JobDrained | Fail | LifeBegan | RoomTick

# --- actions --------------------------------------------------------------------------------------


class SendToReader(msgspec.Struct, frozen=True):
    """Send `body` to this reader of the room."""

    peer: PeerId
    body: AnyBody


class PostWrite(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Queue a write with the transport: unit pages, from `first_unit` behind the prefix on; with
    a `group`, pages of the one of this number."""

    job_id: int
    key: RoomKey
    peer: PeerId
    chunk: int
    src_pages: Pages
    dst_pages: Pages
    ready: DeviceEvent | None
    first_unit: int
    ticket: int
    group: int = -1


class CancelWrite(msgspec.Struct, frozen=True):
    """Post no further part of the job."""

    job_id: int


SenderAction = SendToReader | PostWrite | CancelWrite | PrefillEvent
