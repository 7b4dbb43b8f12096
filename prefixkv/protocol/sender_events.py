"""What `SenderMachine` takes and what it gives: prefill's events and actions of one room. Values,
and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import AnyBody

Pages = npt.NDArray[np.int32]

# --- events ---------------------------------------------------------------------------------------


class Added(NamedTuple):
    """The engine has the request: KV of `num_tokens` tokens will be handed over."""

    num_tokens: int


class Promised(NamedTuple):
    """Rank `reader` of decode has `prefix_len` tokens and wants the rest of `fill_len` in `units`
    of its pool.

    Checked by the endpoint. `units` are unit pages of `unit_tokens` (paging.py), `fold` of
    them a page of decode's. `readers` are all ranks that will promise. `writes`: False for one that
    only has to know how it ends. Extra state is wanted in `state_slot` (-1: none is);
    `takes_state`: False where none of ours goes there.
    """

    peer: PeerId
    fill_len: int
    prefix_len: int
    units: Pages
    ticket: int = 0
    reader: int = 0
    readers: tuple[int, ...] = (0,)
    writes: bool = True
    unit_tokens: int = 0  # 0: a page of ours
    fold: int = 1
    state_slot: int = -1
    takes_state: bool = False


class ChunkQueued(NamedTuple):
    """The engine hands over pages `first_page`.. of the request, counted from its first token;
    maybe none.

    With the last one, `state_slot` of our state pool has its extra state; -1: there is none.
    """

    first_page: int
    src_pages: Pages
    last: bool
    aux: bytes
    ready: Any
    state_slot: int = -1


class WriteEnded(NamedTuple):
    """A job ended: DONE if `error` is None; else `drained` says whether any of it may still
    land."""

    job_id: int
    error: Exception | None = None
    drained: bool = True


class WriteDrained(NamedTuple):
    """Of a job that had ended in an error, nothing can land any more: its agent was destroyed."""

    job_id: int


class AbortSaid(NamedTuple):
    """This reader wants no more of this room and waits for our Drained."""

    peer: PeerId
    reason: str
    ticket: int = 0
    reader: int = 0
    readers: tuple[int, ...] = (0,)


class Fail(NamedTuple):
    """End the room from this side: aborted by the engine, or the reader `gone` has left. `tell`:
    False tells nobody."""

    error: Exception
    tell: bool = True
    gone: int | None = None


class OutcomeAcked(NamedTuple):
    reader: int = 0


class Tick(NamedTuple):
    pass


Event = (
    Added
    | Promised
    | ChunkQueued
    | WriteEnded
    | WriteDrained
    | AbortSaid
    | Fail
    | OutcomeAcked
    | Tick
)

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send `body` to this reader of the room."""

    peer: PeerId
    body: AnyBody


@dataclass(frozen=True, slots=True, eq=False)
class PostWrite:
    """Queue this write with the transport: of unit pages, the first of them `first_unit` behind the
    prefix.

    With `state` the pages are slots of the state pools.
    """

    job_id: int
    key: RoomKey
    peer: PeerId
    chunk: int
    src_pages: Pages
    dst_pages: Pages
    ready: Any
    first_unit: int
    ticket: int
    state: bool = False


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """Post no further part of the job."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """Engine and all readers have named the room: computing may start. `peer` is the lowest
    reader."""

    key: RoomKey
    peer: PeerId
    prefix_len: int


@dataclass(frozen=True, slots=True)
class RoomEnded:
    """The room's one terminal state, for the engine."""

    key: RoomKey
    poll: KVPoll
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class SourceFree:
    """No write of the room reads our pages any more. Comes once, with RoomEnded or after it."""

    key: RoomKey


Action = Say | PostWrite | CancelWrite | Bootstrapped | RoomEnded | SourceFree
