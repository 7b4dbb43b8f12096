"""A transport in memory, as adversarial as the contract allows, and replayable from a seed.

Nothing happens by itself: each `FakeFabric.step` picks one of all actions that are possible now, at
random, and performs it. A posted write is an object of its own. Any of its blocks may land at any
later step, with the bytes that the source holds at that moment, even after the write has failed or
the target was closed; only the end of the writer's transport stops it. Before blocks land, a guard
of the test sees them.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np

from prefixkv import TransportConfig
from prefixkv.errors import (
    AbortedError,
    CallerError,
    ClosedError,
    HandshakeError,
    InternalError,
    PeerLostError,
    TransferError,
)
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.paging import Pages
from prefixkv.protocol.ids import ChunkTag, PeerId
from prefixkv.transport.base import (
    Arrived,
    PeerMemory,
    PeerUnreachable,
    RankMemory,
    Settled,
    Sink,
    TransportEvent,
    WriteDrained,
    WriteFailed,
    WriteJob,
)
from prefixkv.transport.jobs import ActiveJob, JobTable, Outbox
from prefixkv.transport.loop import bare
from prefixkv.transport.runs import Part, Routes, RunTable, part_indices, routes_to

Kind = Literal["event", "connect", "post", "land", "complete", "fail", "notify", "renew"]


class FakeDisconnectError(Exception):
    """Not a class of prefixkv, as NIXL's errors are not."""


@dataclass(frozen=True, slots=True)
class Action:
    """`tag` names the part, if there is one; `number` is its write's, in order of posting."""

    kind: Kind
    owner: PeerId
    target: PeerId | None = None
    job_id: int | None = None
    tag: ChunkTag | None = None
    number: int | None = None


# A choice is an action, and the call that performs it.
Predicate = Callable[[Action], bool]
Choice = tuple[Action, Callable[[], None]]


@dataclass(eq=False, slots=True)
class Hold:
    """Keeps matching actions from happening until `release`."""

    matches: Predicate
    _holds: list[Hold] = field(repr=False)

    def release(self) -> None:
        if self in self._holds:
            self._holds.remove(self)


Guard = Callable[[PeerId, str, ChunkTag, Pages], None]  # target, route, tag
_DEFAULTS = TransportConfig()


@dataclass(eq=False, slots=True)
class _Write:
    """One posted part. `blocks` have not landed yet: (source address, target address, bytes, target
    page, which is a block of the peer's staging area, or a slot of its state, if the job goes
    there)."""

    number: int
    writer: FakeTransport
    peer: _FakePeer
    job: ActiveJob
    part: Part
    tag: ChunkTag
    blocks: list[tuple[int, int, int, int]]
    pending_error: Exception | None = None  # the error that its check will report
    lands_after_error: bool = True  # whether blocks may still land after that error
    ended: bool = False  # reported to the writer; may still have blocks to land


@dataclass(eq=False, slots=True)
class _FakePeer:
    """`routes` is None while the peer is not connected."""

    peer: PeerId
    metadata: bytes
    memory: PeerMemory
    routes: Routes | None = None
    outbox: Outbox = field(default_factory=Outbox)
    in_flight: int = 0
    removed: bool = False


@dataclass(eq=False)
class FakeFabric:
    """All transports of a test, and the chance that drives them. Not thread-safe: one thread steps
    it and calls the transports.

    Args:
        seed: every choice follows from it.
        fail_at_post, fail_at_check: probability that a part is refused, or fails once posted.
        lands_late: probability that a part which failed at its check still lands at some time.
        lose_notification: probability that a notification never arrives.
        guard: called before blocks land, so that a test can assert that each page, slot, or block
            of a staging area is written only by the room that owns it, or the lease.
    """

    seed: int
    _: KW_ONLY
    fail_at_post: float = 0.0
    fail_at_check: float = 0.0
    lands_late: float = 0.5
    lose_notification: float = 0.0
    guard: Guard | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.steps = 0
        self.transports: dict[PeerId, FakeTransport] = {}
        self._lost: list[PeerId] = []
        # Writes that have not ended, and ended ones with blocks that may still land.
        self._writes: list[_Write] = []
        self._notifications: list[tuple[PeerId, PeerId, ChunkTag]] = []  # writer, target, tag
        self._holds: list[Hold] = []
        self._posted = 0

    # --- what a test does -------------------------------------------------------------------------

    def transport(
        self, me: PeerId, memory: RankMemory, sink: Sink, config: TransportConfig = _DEFAULTS,
        owner: object = None,
    ) -> FakeTransport:  # fmt: skip
        """Make a transport. `owner` owns the addresses that `memory` describes; it is kept alive,
        since writes land late. Raises CallerError if `me` has one."""
        if me in self.transports:
            raise CallerError(f"{me} is on this fabric already")
        self.transports[me] = FakeTransport(self, me, memory, sink, config, owner)
        return self.transports[me]

    def step(self) -> bool:
        """Perform one possible action, by chance. Returns False if there is none: everything is
        quiet, held, not ready, or notifies a peer that expects nothing."""
        choices = self._choices()
        if not choices:
            return False
        self.steps += 1
        self.random.choice(choices)[1]()
        return True

    def run(self, max_steps: int = 100_000) -> int:
        """Step until nothing is possible; return the steps. InterruptedError beyond `max_steps`."""
        for taken in range(max_steps):
            if not self.step():
                return taken
        raise InterruptedError(f"something still happens after {max_steps} steps: {self.pending()}")

    def pending(self) -> list[Action]:
        return [action for action, _ in self._choices()]

    def hold(self, matches: Predicate) -> Hold:
        """Keep actions from happening, e.g. `lambda a: a.kind == "complete"`, until `release`."""
        hold = Hold(matches, self._holds)
        self._holds.append(hold)
        return hold

    def lose(self, peer: PeerId) -> None:
        """Writes in flight to a peer fail, and may land; new posts are refused."""
        self._lost.append(peer)
        # A write that is doomed already keeps its error and its fate.
        for write in self._writes:
            if write.peer.peer == peer and not write.ended and write.pending_error is None:
                write.pending_error = _disconnect_error(peer)

    def restore(self, peer: PeerId) -> None:
        self._lost.remove(peer)

    def kill(self, peer: PeerId) -> None:
        """End a peer's process: writes stop, its sink is silent, nothing lands in it any more."""
        self._lost.append(peer)
        self.transports[peer].die()
        # The memory is gone with the process, so the blocks of writes into it are dropped.
        for write in self._writes:
            if write.peer.peer == peer and not write.ended:
                write.pending_error, write.lands_after_error = _disconnect_error(peer), False
                write.blocks.clear()
        self._writes = [w for w in self._writes if w.blocks or not w.ended]

    def in_flight(self, writer: PeerId) -> int:
        return sum(1 for write in self._writes if write.writer.me == writer and not write.ended)

    # --- choices ----------------------------------------------------------------------------------

    def _choices(self) -> list[Choice]:
        possible = chain(
            chain.from_iterable(transport.choices() for transport in self.transports.values()),
            chain.from_iterable(self._write_choices(write) for write in self._writes),
            self._notify_choices(),
        )
        return [one for one in possible if not any(hold.matches(one[0]) for hold in self._holds)]

    def _notify_choices(self) -> Iterator[Choice]:
        for notification in self._notifications:
            writer, target, tag = notification
            # A real transport looks for notifications only while rooms are expected.
            if self.transports[target].expected:
                action = Action("notify", writer, target, tag=tag)
                yield action, partial(self._notify, notification)

    def _write_choices(self, write: _Write) -> Iterator[Choice]:
        """Yield what can happen to a part posted: land, fail, complete."""
        names = (write.writer.me, write.peer.peer, write.job.job.job_id, write.tag, write.number)
        # 1. Some of its blocks land, also after it has ended.
        # 2. A doomed part fails at any time, with blocks landed or not.
        # 3. A sound one completes once all of its blocks have landed.
        if write.blocks:
            yield Action("land", *names), partial(self._land, write)
        if write.pending_error is not None and not write.ended:
            yield Action("fail", *names), partial(self._fail, write)
        elif not write.blocks and not write.ended:
            yield Action("complete", *names), partial(self._complete, write)

    def _land(self, write: _Write) -> None:
        """Copy some blocks, most often all that are left. `post` has shuffled their order."""
        if self.random.random() < 0.5:
            count = len(write.blocks)
        else:
            count = self.random.randint(1, len(write.blocks))
        blocks, write.blocks = write.blocks[:count], write.blocks[count:]
        self._check_landing(write, blocks)
        for source, target, num_bytes, _ in blocks:
            ctypes.memmove(target, source, num_bytes)
        # It failed before: with its last block landed there is nothing left of it.
        if write.ended and not write.blocks:
            self._writes.remove(write)

    def _check_landing(self, write: _Write, blocks: list[tuple[int, int, int, int]]) -> None:
        """Call the test's guard. For a staged write also check that the area is still the target's,
        and that the blocks are the job's. Raises InternalError."""
        pages = np.unique(np.array([page for *_, page in blocks], dtype=np.int32))
        peer, job = write.peer.peer, write.job.job
        if self.guard is not None:
            self.guard(peer, job.route, write.tag, pages)
        if job.route != "staging":
            return
        area = self.transports[peer].memory.relay
        blocks_of_job = job.dst_pages.tolist()
        # Addresses of the job's blocks in the area that the target has now.
        first = (
            {area.base + BLOCK_BYTES * at for at in blocks_of_job} if area is not None else set()
        )
        for _, target, num_bytes, _ in blocks:
            if target not in first or num_bytes != BLOCK_BYTES:
                raise InternalError(
                    f"job {job.job_id} lands at {target}, its blocks in {area} are {job.dst_pages}"
                )

    def _complete(self, write: _Write) -> None:
        """Notify the target, unless the notification is lost by chance, and tell the writer."""
        self._writes.remove(write)
        write.ended = True
        target = self.transports.get(write.peer.peer)
        arrives = target is not None and not target.closed
        if arrives and self.random.random() >= self.lose_notification:
            self._notifications.append((write.writer.me, write.peer.peer, write.tag))
        write.writer.part_ended(write, None)

    def _fail(self, write: _Write) -> None:
        """End a doomed part. Its blocks stay if they may still land."""
        write.ended = True
        if not write.lands_after_error:
            write.blocks.clear()
        # One with blocks left stays among the writes until they have landed, or its writer is
        # fenced.
        if not write.blocks:
            self._writes.remove(write)
        write.writer.part_ended(write, write.pending_error)

    def _notify(self, notification: tuple[PeerId, PeerId, ChunkTag]) -> None:
        self._notifications.remove(notification)
        _, target, tag = notification
        self.transports[target].emit(Arrived(tag.pack()))

    # --- what the transports do -------------------------------------------------------------------

    def is_reachable(self, peer: PeerId) -> bool:
        target = self.transports.get(peer)
        return target is not None and not target.closed and peer not in self._lost

    def post(
        self, writer: FakeTransport, peer: _FakePeer, job: ActiveJob, number: int
    ) -> Exception | None:
        """Returns the error if the part is refused."""
        part = job.parts[number]
        tag = job.part_tag(number)
        if not self.is_reachable(peer.peer):
            return _disconnect_error(peer.peer)
        if self.random.random() < self.fail_at_post:
            return TransferError("refused by chance")
        fails = self.random.random() < self.fail_at_check
        lands = fails and self.random.random() < self.lands_late
        write = _Write(self._posted, writer, peer, job, part, tag, _blocks(job, part))
        self._posted += 1
        # RDMA gives no order within a write, so blocks land in a random one.
        self.random.shuffle(write.blocks)
        if fails:
            write.pending_error = TransferError("failed by chance")
            write.lands_after_error = lands
        self._writes.append(write)
        return None

    def end_former(self, transport: FakeTransport) -> None:
        """The agent is replaced: nothing of its posts lands; those that have not ended fail."""
        mine = [write for write in self._writes if write.writer is transport]
        self._writes = [write for write in self._writes if write.writer is not transport]
        for write in mine:
            if not write.ended:
                write.ended = True
                transport.part_ended(write, TransferError("its agent was replaced"), may_land=False)

    def forget(self, transport: FakeTransport) -> None:
        """Nothing that the transport has posted lands any more. Notifications it has sent still
        arrive; those for it are dropped."""
        self._writes = [write for write in self._writes if write.writer is not transport]
        self._notifications = [n for n in self._notifications if n[1] != transport.me]


class FakeTransport:
    """Keeps the contract of `base.Transport`. Events reach the sink during `step()`."""

    def __init__(
        self, fabric: FakeFabric, me: PeerId, memory: RankMemory, sink: Sink,
        config: TransportConfig, owner: object,
    ) -> None:  # fmt: skip
        memory.validate()
        self.me = me
        self.memory = memory
        self.expected = 0
        self.closed = False
        self._fabric = fabric
        self._sink = sink
        self._config = config
        self._owner = owner
        self._peers: dict[PeerId, _FakePeer] = {}
        self._events: list[TransportEvent] = []
        self._jobs = JobTable(self._report, config.post_bytes, config.post_descriptors)
        # Jobs that failed without proof of drain; `renew` proves them by replacing the agent.
        self._unproven: set[int] = set()
        self._renewing = False

    @property
    def metadata(self) -> bytes:
        return f"fake {self.me.name}#{self.me.incarnation}".encode()

    def add_peer(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        self._check_open()
        if (known := self._peers.get(peer)) is not None:
            # Described as before: nothing to do. Otherwise its memory has moved, so jobs that were
            # cut for the former layout must not be posted.
            if not known.removed and (known.metadata, known.memory) == (metadata, memory):
                return
            lost = PeerLostError(f"the memory of {peer.name} is another now")
            self._jobs.drop(known.outbox, lost)
        self._peers[peer] = _FakePeer(peer, metadata, memory)
        self._connect(self._peers[peer])

    def remove_peer(self, peer: PeerId) -> None:
        known = self._peers.get(peer)
        if known is not None:
            known.removed = True
            self._jobs.drop(known.outbox, AbortedError(f"peer {peer.name} was removed"))
            self._forget_if_unused(known)

    def write(self, job: WriteJob) -> None:
        """Queue a job, or park it until the peer is connected."""
        self._check_open()
        peer = self._peers.get(job.peer)
        if peer is None or peer.removed:
            self._jobs.refuse(job, PeerLostError(f"{job.peer} is no peer of this transport"))
        else:
            self._jobs.start(peer.outbox, peer.routes, job)

    def cancel(self, job_id: int) -> None:
        if not self.closed:
            self._jobs.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        self._check_open()
        self.expected = num_rooms

    def settle(self, token: Hashable, for_s: float) -> None:
        self._check_open()
        self._events.append(Settled(token))  # there are no kernels here

    def renew(self) -> None:
        """Have a step replace the agent, if there are unproven jobs."""
        if not self.closed:
            self._renewing = bool(self._unproven)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            # The fence first: the jobs then end as drained, which is what their last events say.
            self._fabric.forget(self)
            self._jobs.close(fenced=True)
            while self._events:
                self._sink(self._events.pop(0))

    # --- what the fabric does ---------------------------------------------------------------------

    def choices(self) -> Iterator[Choice]:
        if self.closed:
            return
        if self._events:
            yield Action("event", self.me), lambda: self._sink(self._events.pop(0))
        if self._renewing:
            yield Action("renew", self.me), self._renew
        for peer in self._peers.values():
            # A peer that is not connected is tried again only with jobs to send, and once its
            # former writes have ended.
            if peer.routes is None:
                if peer.routes is None and peer.outbox and not peer.in_flight:
                    yield Action("connect", self.me, peer.peer), partial(self._connect, peer)
            elif peer.in_flight < self._config.window:
                yield from self._post_choices(peer)

    def _post_choices(self, peer: _FakePeer) -> Iterator[Choice]:
        """Yield the next part of each job that may be posted now."""
        for job in list(peer.outbox.round()):
            error: Exception | None = None
            try:
                if not job.poll_ready():
                    continue
            # Not raised here: listing choices must not change anything. The step that picks it
            # stops the job.
            except Exception as failure:
                error = bare(failure)
            tag = job.part_tag(job.next_part)
            action = Action("post", self.me, peer.peer, job.job.job_id, tag)
            yield action, partial(self._post, peer, job, error)

    def _post(self, peer: _FakePeer, job: ActiveJob, error: Exception | None) -> None:
        """Post a job's next part, or stop the job with the error of its `ready`."""
        if error is not None:
            self._jobs.stop(job, error)
            return
        number = job.next_part
        self._jobs.part_posted(job)
        # Counted before the post: a refused part ends like any other, which counts it down.
        peer.in_flight += 1
        refused = self._fabric.post(self, peer, job, number)
        if refused is not None:
            self._ended(peer, job, refused, may_land=False)

    def part_ended(self, write: _Write, error: Exception | None, may_land: bool = True) -> None:
        self._ended(write.peer, write.job, error, may_land)

    def _renew(self) -> None:
        """End the former agent's posts, and report that unproven jobs are drained."""
        self._renewing = False
        # First: jobs that fail by it join `_unproven`, and are reported failed before drained.
        self._fabric.end_former(self)
        for job_id in sorted(self._unproven):
            self._events.append(WriteDrained(job_id))
        self._unproven.clear()

    def _report(self, event: TransportEvent) -> None:
        """Remember jobs that ended without proof."""
        if isinstance(event, WriteFailed) and not event.drained:
            self._unproven.add(event.job_id)
        self._events.append(event)

    def _ended(
        self, peer: _FakePeer, job: ActiveJob, error: Exception | None, may_land: bool
    ) -> None:
        peer.in_flight -= 1
        self._jobs.part_ended(job, error, may_land)
        if isinstance(error, FakeDisconnectError) and peer.routes is not None:
            self._lose(peer, error)
        self._forget_if_unused(peer)

    def _connect(self, peer: _FakePeer) -> None:
        """Check a peer's description against its real memory, as a handshake would, and start its
        parked jobs. A mismatch makes it unreachable."""
        peer.routes = None
        try:
            target = self._fabric.transports.get(peer.peer)
            if target is None or not self._fabric.is_reachable(peer.peer):
                raise _disconnect_error(peer.peer)
            # Another life of the peer: addresses of the former one must not be written to.
            if peer.metadata != target.metadata:
                raise HandshakeError("agent name in the metadata", target.metadata, peer.metadata)
            routes = routes_to(self.memory, peer.memory)
            theirs, own = peer.memory, target.memory
            if "staging" in routes and theirs.relay != own.relay:
                raise HandshakeError("staging", own.relay, theirs.relay, "is not registered")
            if theirs.state is not None and theirs.state.layout != own.state:
                raise HandshakeError("state", own.state, theirs.state.layout, "is not registered")
        except Exception as error:
            self._lose(peer, error)
            return
        peer.routes = routes
        self._jobs.cut(peer.outbox, routes)

    def _lose(self, peer: _FakePeer, error: Exception) -> None:
        peer.routes = None
        self._jobs.drop(peer.outbox, error)
        if not peer.removed:
            self._events.append(PeerUnreachable(peer.peer, error))

    def _forget_if_unused(self, peer: _FakePeer) -> None:
        if peer.removed and not peer.in_flight and self._peers.get(peer.peer) is peer:
            del self._peers[peer.peer]

    def emit(self, event: TransportEvent) -> None:
        self._sink(event)

    def die(self) -> None:
        """Stop like a killed process: without events."""
        self.closed = True
        self._events.clear()
        self._fabric.forget(self)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the transport of {self.me.name} is closed")


def _disconnect_error(peer: PeerId) -> FakeDisconnectError:
    return FakeDisconnectError(f"{peer.name} is gone")


def _blocks(job: ActiveJob, part: Part) -> list[tuple[int, int, int, int]]:
    """Return (source address, target address, bytes, the target's own page) of each block."""
    runs = job.runs
    src, dst = part_indices(runs, part, job.src_pages, job.dst_pages)
    units = job.dst_pages[np.arange(part.start, part.stop) % len(job.dst_pages)]
    # Pages of the job are unit pages; guards want pages of the target's own size.
    pages = units // runs.dst_positions.fold
    return [
        (_address(runs.src, i), _address(runs.dst, j), part.group.block_bytes, page)
        for i, j, page in zip(src.tolist(), dst.tolist(), pages.tolist(), strict=True)
    ]


def _address(table: RunTable, index: int) -> int:
    """Count blocks as NIXL does: row by row, equally many in each."""
    row, block = divmod(index, int(table[0, 4]))
    return int(table[row, 0]) + block * int(table[row, 3])
