"""Prefill's side of staging: chunks cut into pieces, each written into a lease. Pure, one per rank.

It stands between the rooms' machines and the transport: to a machine a staged chunk is one job that
ends once, like a direct one. A piece of it goes

    queued --its KV is ready--> ASKED --LeaseGrant--> GRANTED --a free slot--> GATHERING --> WRITING
        --> done, or UNDRAINED --proof that nothing of the write can land--> done

and holds a local slot from GATHERING on. A slot is free again when its write is DONE or drained:
before that the transport may still read it.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from prefixkv.control.effects import Cancel, RelaySlots
from prefixkv.errors import AbortedError, InternalError, PeerLostError, check_laws
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.paging import Pages
from prefixkv.protocol.ids import ChunkTag, PeerId, RoomKey
from prefixkv.protocol.messages import LeaseAsk, LeaseGrant
from prefixkv.protocol.sender_machine import JobDrained, JobEnded, PostWrite
from prefixkv.protocol.timers import Backoff, Timers
from prefixkv.staging.leases import LeaseCut
from prefixkv.transport.base import WriteJob

READY_POLL_S: Final = 0.001
NextId = Callable[[], int]

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendLeaseAsk:
    """Send `ask` to this reader."""

    peer: PeerId
    ask: LeaseAsk


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Copy our part of these units into the first `num_bytes` of a slot; `on_gathered` answers."""

    gather_id: int
    peer: PeerId
    src_units: Pages
    slot: int
    num_bytes: int


StagedWriteAction = SendLeaseAsk | Gather | WriteJob | Cancel | JobEnded | JobDrained


class PieceState(enum.Enum):
    """The state of a piece; the module draws the way through them."""

    ASKED = enum.auto()
    GRANTED = enum.auto()
    GATHERING = enum.auto()
    WRITING = enum.auto()
    UNDRAINED = enum.auto()


@dataclass(slots=True, eq=False)
class _Stream:
    """The pieces of one room for one reader."""

    key: RoomKey
    peer: PeerId
    ticket: int
    cut: LeaseCut
    resend: Backoff
    next_piece: int = 0
    next_unit: int = 0
    queued: deque[_ChunkPiece] = field(default_factory=deque)
    open: dict[int, _ChunkPiece] = field(default_factory=dict)  # asked, not done; by number
    failed: bool = False  # a job of it failed, so there is a gap in what was written

    def pieces_of(self, job: _ChunkJob) -> list[_ChunkPiece]:
        return [piece for piece in self.open.values() if piece.job is job]


Streams = dict[PeerId, _Stream]
"""Those of one room, which keeps them."""


@dataclass(slots=True, eq=False)
class _ChunkJob:
    job_id: int
    stream: _Stream
    ready: Any
    num_left: int = 0  # pieces with a write that is not DONE
    error: Exception | None = None
    undrained: bool = False  # a write of it ended without proof of drain


@dataclass(slots=True, eq=False)
class _ChunkPiece:
    """The part of a chunk that goes through one lease."""

    job: _ChunkJob
    number: int
    first_unit: int
    src_units: Pages
    num_bytes: int  # size of our section of the lease
    state: PieceState = PieceState.ASKED  # before that it is queued
    lease_id: int = -1
    dst_offset: int = -1
    slot: int = -1


class StagingSender:
    """The staged writes of one prefill rank. Owned by the control object. What is to be done is
    said to `say`, in order.

    At most `window` pieces of a room and reader are between asked and done. There is no bound over
    rooms: a reader grants what all its writers have asked for, so writers that hold asks back could
    wait for each other. A lease is asked for once the KV is ready. Slots go by the order of grants,
    to one of several readers at most half, rounded up, so that a stuck reader does not stall them
    all.

    A job with an error, or cancelled, starts nothing more and ends once nothing of it is gathered
    or written. A failed lease is never written again, and nothing more is asked for its room and
    reader: grants are in order, and the room's owner cancels its other jobs.
    """

    def __init__(
        self, me: PeerId, rank: int, slots: RelaySlots, resend_s: float, next_id: NextId,
        say: Callable[[StagedWriteAction], None],
    ) -> None:  # fmt: skip
        """Begin without readers. `next_id` names gathers, writes and the machines' jobs, so that no
        two collide."""
        self.num_slots, self.slot_bytes, self._window = slots
        self.counters: Counter[str] = Counter()
        self._me, self._rank = me, rank
        self._resend_s, self._next_id, self._say = resend_s, next_id, say
        self.peers: dict[PeerId, LeaseCut] = {}  # for reading only
        # Each slot is in `free_slots`, or held by one entry of `_holding`, which an answer of the
        # transport or of a copy ends.
        self.jobs: dict[int, _ChunkJob] = {}  # that have not ended, by id; for reading only
        self._granted: dict[_ChunkPiece, None] = {}  # wait for a slot, in the order of grants
        self._holding: dict[int, _ChunkPiece] = {}  # pieces with a slot, by gather or write
        self.free_slots = list(range(slots.num_slots))  # for reading only
        self._unready: dict[_Stream, None] = {}  # streams with a next piece not computed yet
        self._poll_s = float("inf")
        self._timers: Timers[_Stream] = Timers()

    def add_peer(self, peer: PeerId, cut: LeaseCut) -> None:
        """Stage writes for this reader from now on. Raises HandshakeError where our section of its
        leases does not fit into a slot."""
        cut.check_slots(self._rank, self.slot_bytes)
        self.peers[peer] = cut

    def remove_peer(self, peer: PeerId) -> None:
        """Cancel a reader's jobs; they end once their gathers and writes have. Unknown: no-op."""
        if self.peers.pop(peer, None) is not None:
            for job in [job for job in self.jobs.values() if job.stream.peer == peer]:
                self._fail(job, PeerLostError(f"{peer} is gone"))
            self._take_slots()  # the peers that are left may have more of them

    def write(self, post: PostWrite, streams: Streams, now_s: float) -> None:
        """Stage a chunk: unit pages, from `post.first_unit` behind the promised prefix on. A room's
        chunks for one reader come in order. A JobEnded follows. `streams` are the room's.

        Raises InternalError for a chunk out of order, or of another use of the room.
        """
        job_id, key, ticket, peer = post.job_id, post.key, post.ticket, post.peer
        if (cut := self.peers.get(peer)) is None:
            self._say(JobEnded(job_id, PeerLostError(f"{peer} takes no staged writes")))
            return
        fresh = _Stream(key, peer, ticket, cut, Backoff(self._resend_s))
        stream = streams.setdefault(peer, fresh)
        # 1. Both sides cut a chunk from its first unit on, so a gap or another use of the room
        # would put KV into wrong pages.
        if (stream.ticket, stream.next_unit) != (ticket, post.first_unit):
            raise InternalError(
                f"units {post.first_unit}.. of {key} under ticket {ticket}, where unit "
                f"{stream.next_unit} under {stream.ticket} is next"
            )
        # 2. Pieces are granted in order, and one before this has ended without being written: no
        # lease would ever come.
        if stream.failed:
            self._say(JobEnded(job_id, AbortedError(f"an earlier chunk of {key} failed")))
            return
        # 3. Cut, queue, and ask for as many as the window allows. A chunk without pieces ends at
        # once.
        self.jobs[job_id] = job = _ChunkJob(job_id, stream, post.ready)
        for first, count in cut.pieces(len(post.src_pages)):
            piece = _ChunkPiece(
                job,
                number=stream.next_piece,
                first_unit=stream.next_unit,
                src_units=post.src_pages[first : first + count],
                num_bytes=cut.sections(count)[self._rank].num_bytes,
            )
            stream.queued.append(piece)
            stream.next_piece += 1
            stream.next_unit += count
            job.num_left += 1
        self._end(job)
        self._ask(stream, now_s)

    def cancel(self, job_id: int) -> None:
        """Start nothing more of a job. Unknown: no-op. It ends when its gathers and writes have;
        without an error if these were all of it."""
        if (job := self.jobs.get(job_id)) is not None:
            self._fail(job, AbortedError("the staged write was cancelled"))

    def forget(self, streams: Streams) -> None:
        """Drop those of a room that is over. Raises InternalError if a job has not ended."""
        if any(stream.queued or stream.open for stream in streams.values()):
            raise InternalError(f"a room is over and has jobs under way: {streams}")
        for stream in streams.values():
            self._timers.forget(stream)
            self._unready.pop(stream, None)
        streams.clear()

    def owns(self, write_id: int) -> bool:
        """Return True if this write's end is to be reported to `on_write_ended` or
        `on_write_drained`."""
        piece = self._holding.get(write_id)
        return piece is not None and piece.state is not PieceState.GATHERING

    # --- input ------------------------------------------------------------------------------------

    def on_grant(self, stream: _Stream | None, grant: LeaseGrant) -> None:
        """Take a lease for a piece. Not awaited, or outside the area: counted, no-op."""
        piece = None if stream is None else stream.open.get(grant.piece)
        # 1. Repeated, late or invented. A second grant must not move a piece that is being written.
        awaited = PieceState.ASKED, grant.ticket
        if not stream or not piece or (piece.state, stream.ticket) != awaited:
            self.counters["grants_not_awaited"] += 1
            return
        # 2. The offset comes from the peer, and becomes an address of its memory: whole blocks,
        # inside.
        cut, num_units = stream.cut, len(piece.src_units)
        if grant.offset % BLOCK_BYTES or grant.offset + cut.lease_bytes(num_units) > cut.area_bytes:
            self.counters["grants_outside"] += 1
            return
        # 3. Granted. It waits for a slot in the order of the grants.
        piece.state = PieceState.GRANTED
        piece.lease_id = grant.lease_id
        piece.dst_offset = grant.offset + cut.sections(num_units)[self._rank].offset
        self._granted[piece] = None
        self._take_slots()

    def on_gathered(self, gather_id: int, error: Exception | None) -> None:
        """Take the end of a Gather: write the slot into the lease of its piece. Unknown: no-op."""
        if (piece := self._let_go(gather_id, PieceState.GATHERING)) is None:
            return
        if error is None and piece.job.error is None:
            self._post(piece)
            return
        # The copy failed, or its job did meanwhile. Nothing was posted, so the slot is free without
        # proof.
        self.free_slots.append(piece.slot)
        del piece.job.stream.open[piece.number]
        self._fail(piece.job, error or AbortedError("cancelled"))
        self._take_slots()

    def _post(self, piece: _ChunkPiece) -> None:
        write_id, stream = self._hold(piece, PieceState.WRITING), piece.job.stream
        # Rounded up: slots and leases are whole blocks, so the last one stays inside both.
        blocks = np.arange(-(-piece.num_bytes // BLOCK_BYTES), dtype=np.int32)
        src = blocks + np.int32(piece.slot * (self.slot_bytes // BLOCK_BYTES))
        dst = blocks + np.int32(piece.dst_offset // BLOCK_BYTES)
        numbers = self._me.incarnation, *stream.key.numbers, self._rank, piece.number
        tag = ChunkTag(
            *numbers, lease_id=piece.lease_id, ticket=stream.ticket, first=piece.first_unit
        )
        units = piece.src_units
        self._say(WriteJob(write_id, stream.peer, src, dst, tag, route="staging", units=units))

    def on_write_ended(
        self, write_id: int, error: Exception | None, drained: bool, now_s: float
    ) -> None:
        """Take the end of a write, as WriteDone or WriteFailed report it. Unknown: no-op."""
        if (piece := self._let_go(write_id, PieceState.WRITING)) is None:
            return
        job = piece.job
        del job.stream.open[piece.number]
        # Before the job is ended or failed: `_end` looks at what is still held. An error is no
        # proof, so the slot stays with the write, which the transport may still read from.
        if error is None or drained:
            self.free_slots.append(piece.slot)
        else:
            piece.state, self._holding[write_id] = PieceState.UNDRAINED, piece
            job.undrained = True
        if error is None:
            job.num_left -= 1
            self.counters["pieces_written"] += 1
            self.counters["bytes_staged"] += piece.num_bytes
            self._end(job)
            self._ask(job.stream, now_s)
        else:
            self._fail(job, error)
        # Last, when the free slots and the limits per reader are as they will be.
        self._take_slots()

    def on_write_drained(self, write_id: int) -> None:
        """Take the proof that a write which ended undrained can land no more: its slot is free.
        Unknown: no-op."""
        if (piece := self._let_go(write_id, PieceState.UNDRAINED)) is not None:
            self.free_slots.append(piece.slot)
            self._end(piece.job)
            self._take_slots()

    def tick(self, now_s: float) -> None:
        """Send a LeaseAsk again that has no grant, look whether KV is ready."""
        for stream in self._timers.due(now_s):
            asked = [piece for piece in stream.open.values() if piece.state is PieceState.ASKED]
            # Asks without an answer: the ask or its grant was lost, or the lease waits. The reader
            # answers an ask that it has granted again, so repeating is safe.
            if asked and not stream.failed:
                if stream.resend.take(now_s):
                    self.counters["asks_repeated"] += len(asked)
                    for piece in asked:
                        self._send_ask(piece)
                self._timers.wake(stream, stream.resend.due_s)
        if now_s >= self._poll_s:
            # Emptied first: `_ask` enters those that are still not ready again.
            unready, self._unready, self._poll_s = self._unready, {}, float("inf")
            for stream in unready:
                self._ask(stream, now_s)

    @property
    def wake_s(self) -> float:
        """Time at which the next `tick` is wanted, infinity if never."""
        return min(self._timers.next_s, self._poll_s)

    def _ask(self, stream: _Stream, now_s: float) -> None:
        while not stream.failed and stream.queued and len(stream.open) < self._window:
            if not self._ready(stream.queued[0].job, now_s):
                return
            # Not before: if the KV was not ready, or `query` failed the job, the queue is as it
            # was, or was cleaned by `_fail`.
            piece = stream.queued.popleft()
            # The first ask that is open starts the pause; later ones are repeated together with it.
            if all(other.state is not PieceState.ASKED for other in stream.open.values()):
                stream.resend.start(now_s)
                self._timers.wake(stream, stream.resend.due_s)
            stream.open[piece.number] = piece
            self.counters["pieces_asked"] += 1
            self._send_ask(piece)

    def _ready(self, job: _ChunkJob, now_s: float) -> bool:
        """Else the job is looked at again, or fails."""
        try:
            if job.ready is None or job.ready.query():
                job.ready = None
                return True
        except Exception as error:
            self._fail(job, error)
            return False
        self._unready[job.stream] = None
        self._poll_s = min(self._poll_s, now_s + READY_POLL_S)
        return False

    def _send_ask(self, piece: _ChunkPiece) -> None:
        stream = piece.job.stream
        ask = LeaseAsk(
            *stream.key.numbers,
            rank=self._rank,
            piece=piece.number,
            first_unit=piece.first_unit,
            num_units=len(piece.src_units),
            ticket=stream.ticket,
        )
        self._say(SendLeaseAsk(stream.peer, ask))

    def _hold(self, piece: _ChunkPiece, state: PieceState) -> int:
        """Enter a new gather or write of a piece, which holds its slot; return its id."""
        action_id = self._next_id()
        piece.state, self._holding[action_id] = state, piece
        return action_id

    def _let_go(self, action_id: int, state: PieceState) -> _ChunkPiece | None:
        piece = self._holding.get(action_id)
        return self._holding.pop(action_id) if piece is not None and piece.state is state else None

    def _take_slots(self) -> None:
        while self.free_slots and (piece := self._next_to_gather()) is not None:
            del self._granted[piece]
            piece.slot = self.free_slots.pop()
            gather_id, peer = self._hold(piece, PieceState.GATHERING), piece.job.stream.peer
            self._say(Gather(gather_id, peer, piece.src_units, piece.slot, piece.num_bytes))

    def _next_to_gather(self) -> _ChunkPiece | None:
        limit = self.num_slots if len(self.peers) == 1 else (self.num_slots + 1) // 2
        slots_of = Counter(piece.job.stream.peer for piece in self._holding.values())
        return next((p for p in self._granted if slots_of[p.job.stream.peer] < limit), None)

    def _fail(self, job: _ChunkJob, error: Exception) -> None:
        """End the job if nothing is under way. Its first error counts."""
        if job.error is None:
            job.error = error
            stream = job.stream
            stream.failed = True
            # 1. What was not asked for is dropped.
            stream.queued = deque(piece for piece in stream.queued if piece.job is not job)
            # 2. What is being written cannot be called back: no further part is posted, and it ends
            # by itself.
            for write_id, piece in self._holding.items():
                if piece.job is job and piece.state is PieceState.WRITING:
                    self._say(Cancel(write_id))
            # 3. What waits for a grant or a slot is dropped. A grant that comes later finds no
            # piece; the reader frees the lease with the room.
            for piece in stream.pieces_of(job):
                if piece.state in (PieceState.ASKED, PieceState.GRANTED):
                    self._granted.pop(piece, None)
                    del stream.open[piece.number]
        self._end(job)

    def _end(self, job: _ChunkJob) -> None:
        """Report that a job has ended or is drained, where that has just come true. An ended job
        holds slots for undrained writes alone."""
        over = not job.num_left or job.error is not None
        # Ended once, and not while a piece is gathered or written. All pieces written is success
        # even after a cancel.
        if over and job.job_id in self.jobs and not job.stream.pieces_of(job):
            del self.jobs[job.job_id]
            self._say(JobEnded(job.job_id, job.error if job.num_left else None, not job.undrained))
        # Drained only behind the end, when the last undrained write was proved.
        holds = any(piece.job is job for piece in self._holding.values())
        if job.undrained and job.job_id not in self.jobs and not holds:
            self._say(JobDrained(job.job_id))

    def check_invariants(self) -> None:
        """Check every law. Raises InternalError that names the broken one, with the state."""
        streams = {job.stream: None for job in self.jobs.values()} | self._unready
        opened = [piece for stream in streams for piece in stream.open.values()]
        queued = [piece for stream in streams for piece in stream.queued]
        asked = [piece for piece in opened if piece.state is PieceState.ASKED]
        holding = list(self._holding.values())
        under_way = [piece for piece in holding if piece.state is not PieceState.UNDRAINED]
        placed = map(id, [*asked, *self._granted, *under_way])
        slots = [*self.free_slots, *(piece.slot for piece in holding)]
        jobs = self.jobs.values()
        over = [j for j in jobs if not j.num_left or (j.error and not j.stream.pieces_of(j))]
        for piece in [*opened, *queued]:
            state, job = piece.state, piece.job
            laws = {
                "a piece is of a job that has not ended": self.jobs.get(job.job_id) is job,
                "a failed job starts nothing": not job.error
                or state in (PieceState.GATHERING, PieceState.WRITING),
                "a granted piece waits for a slot": (piece in self._granted)
                == (state is PieceState.GRANTED),
            }
            check_laws(laws, piece)
        laws = {
            "each slot is free or held, once": sorted(slots) == list(range(self.num_slots)),
            "an open piece is where its state says": sorted(map(id, opened)) == sorted(placed),
            "what is queued has not been asked for": not {*queued} & {*opened},
            "windows hold": all(len(stream.open) <= self._window for stream in streams),
            "a job lives while it has pieces to go": not over,
            "asks are repeated": self._timers.next_s < float("inf")
            or all(piece.job.stream.failed for piece in asked),
            "a piece waits for a slot only where it may have none": not self.free_slots
            or self._next_to_gather() is None,
            "unready KV is looked at again": not self._unready or self._poll_s < float("inf"),
        }
        check_laws(laws, streams, self.free_slots, holding)
