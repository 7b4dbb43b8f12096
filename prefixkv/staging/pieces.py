"""What `StagedSender` knows of its chunks: streams of pieces, and the jobs they belong to."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.protocol.backoff import Backoff
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.staging.cut import LeaseCut

Pages = npt.NDArray[np.int32]


class At(enum.Enum):
    """How far a piece is; `staged_sender` has the picture."""

    QUEUED = enum.auto()
    ASKED = enum.auto()
    GRANTED = enum.auto()
    GATHERING = enum.auto()
    WRITING = enum.auto()


@dataclass(slots=True, eq=False)
class Stream:
    """The pieces of one room for one reader."""

    key: RoomKey
    peer: PeerId
    ticket: int
    cut: LeaseCut
    resend: Backoff
    next_piece: int = 0
    next_unit: int = 0
    queued: deque[Piece] = field(default_factory=deque)
    open: dict[int, Piece] = field(default_factory=dict)  # by number: asked, and not done
    failed: bool = False  # a job of it was, so there is a gap in what was written

    @property
    def num_written(self) -> int:
        """The first piece whose write is not DONE; only where nothing has failed."""
        return min(self.open, default=self.queued[0].number if self.queued else self.next_piece)


@dataclass(slots=True, eq=False)
class Job:
    """A chunk for one reader."""

    job_id: int
    stream: Stream
    ready: Any
    num_left: int  # pieces whose writes are not DONE
    error: Exception | None = None
    num_undrained: int = 0  # writes that may still land
    undrained: bool = False  # there were some
    ended: bool = False


@dataclass(slots=True, eq=False)
class Piece:
    """What goes through one lease."""

    job: Job
    number: int
    first_unit: int
    src_units: Pages
    num_bytes: int  # of our section
    at: At = At.QUEUED
    lease_id: int = -1
    dst_offset: int = -1
    slot: int = -1
    action_id: int = -1  # of the gather or write under way
