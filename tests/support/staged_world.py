"""Writers and readers of staged rooms in memory: the machines under test, around them what an
endpoint, a transport, a copy pool and a wire would do, one small step at a time and in any order.

Laws that are looked at as things happen: a write lands in its own section of a live lease and finds
its slot as it was gathered; a gather reads for a job that lives; a scatter writes pages of a room
that is not over; each job and each room ends once; what succeeded has the bytes of all writers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import numpy as np

from prefixkv.memory.mesh import Shard
from prefixkv.memory.staging_area import BLOCK_BYTES, StagingArea, whole_blocks
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import LeaseAsk, LeaseGrant, Promise
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded
from prefixkv.protocol.sender_events import JobDrained, JobEnded
from prefixkv.protocol.tags import ChunkTag
from prefixkv.staging.leases import LeaseCut
from prefixkv.staging.receiver import (
    BreakRoom,
    Grant,
    Scatter,
    SectionArrived,
    StagingPlan,
    StagingReceiver,
)
from prefixkv.staging.sender import (
    CancelStaged,
    Gather,
    PostStaged,
    SendLeaseAsk,
    StagingSender,
)

UNIT_BYTES = {0: 700, 1: 2048, 2: 1024}
UNITS_PER_PIECE = 4
RESEND_S = 1.0


def content(rank: int, unit: int) -> bytes:
    """What a writer's unit page holds: no two alike."""
    mark = bytes([rank + 1, unit & 255, unit >> 8 & 255, unit >> 16])
    return (mark * (UNIT_BYTES[rank] // 4 + 1))[: UNIT_BYTES[rank]]


class Event:
    def __init__(self) -> None:
        self.answer = False

    def query(self) -> bool:
        return self.answer


@dataclass(eq=False)
class Use:
    """One use of a room's number, at its reader."""

    reader: Reader
    key: RoomKey
    ticket: int
    chunks: list[tuple[int, bool]]  # units, and whether their KV is ready at once
    writers: dict[int, Writer]
    pages: dict[int, bytearray]
    undrained: set[int]
    ok: set[int] = field(default_factory=set)
    arrived: Counter[int] = field(default_factory=Counter)  # units, by writer
    machine: str = "open"  # what the room's machine has come to
    drained: bool = False  # and has said so
    state: str = "open"  # what was passed on

    @property
    def num_units(self) -> int:
        return sum(units for units, _ in self.chunks)


@dataclass(eq=False)
class Sending:
    """A use of a room's number, at one of its writers."""

    use: Use
    next_chunk: int = 0
    live: set[int] = field(default_factory=set)  # jobs
    undrained: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    state: str = "open"
    aborted: bool = False
    forgotten: bool = False

    @property
    def handed_over(self) -> bool:
        return self.next_chunk == len(self.use.chunks)


@dataclass(eq=False)
class Write:
    """What the transport has of a PostStaged. `parts` have not landed."""

    reader: Reader
    post: PostStaged
    data: bytes  # of the slot when it was posted
    parts: list[int]
    num_parts: int
    cancelled: bool = False
    undrained: bool = False  # ended in an error, and may still land


@dataclass(eq=False)
class Mail:
    to: Any
    sender: Any
    body: Any
    lossy: bool = False


class Writer:
    """A prefill rank."""

    def __init__(self, world: World, rank: int, slots: int, window: int) -> None:
        self.world, self.rank, self.alive = world, rank, True
        self.slot_bytes = whole_blocks(UNITS_PER_PIECE * UNIT_BYTES[rank])
        self.num_slots = slots
        self.memory = bytearray(slots * self.slot_bytes)
        self.sender = StagingSender(
            rank, slots, self.slot_bytes, window, RESEND_S, lambda: next(world.ids)
        )
        self.rooms: dict[RoomKey, Sending] = {}
        self.jobs: dict[int, Sending] = {}  # until drained
        self.gathers: dict[int, Gather] = {}
        self.writes: dict[int, Write] = {}  # until drained
        self.refused: set[int] = set()

    # what the control thread does

    def take(self, reader: Reader, body: Any) -> None:
        if isinstance(body, LeaseGrant):
            self.do(self.sender.on_grant(reader.peer, body.key, body))
        elif isinstance(body, Use) and body.ticket not in self.refused:
            self.rooms[body.key] = Sending(body)
            self.progress(self.rooms[body.key])
        elif isinstance(body, tuple):
            _, use = body
            self.refused.add(use.ticket)
            sending = self.rooms.get(use.key)
            if sending is None or sending.use is not use:
                self.world.say(use.reader, self, ("drained", use))
            else:
                sending.aborted = True
                self.fail(sending, tell=False)
                self.progress(sending)

    def may_take(self, use: Use) -> bool:
        """The number's last use has ended here."""
        before = self.rooms.get(use.key)
        return before is None or before.forgotten

    def hand_over(self, sending: Sending) -> None:
        """The engine's next chunk."""
        use = sending.use
        first = sum(units for units, _ in use.chunks[: sending.next_chunk])
        units, at_once = use.chunks[sending.next_chunk]
        sending.next_chunk += 1
        event = None if at_once else Event()
        if event is not None:
            sending.events.append(event)
        job_id = next(self.world.ids)
        sending.live.add(job_id)
        self.jobs[job_id] = sending
        src = np.arange(use.ticket * 256 + first, use.ticket * 256 + first + units, dtype=np.int32)
        self.do(
            self.sender.write(
                job_id, use.key, use.ticket, use.reader.peer, first, src, event, self.world.now_s
            )
        )

    def fail(self, sending: Sending, tell: bool = True) -> None:
        if sending.state == "open":
            sending.state = "failed"
            sending.events.clear()
            if tell:
                self.world.say(sending.use.reader, self, ("failed", sending.use))
            for job_id in sorted(sending.live):
                self.do(self.sender.cancel(job_id))

    def abort(self, sending: Sending) -> None:
        self.fail(sending)
        self.progress(sending)

    def progress(self, sending: Sending) -> None:
        use = sending.use
        if sending.state == "open" and sending.handed_over and not sending.live:
            sending.state = "done"
            self.world.say(use.reader, self, ("ok", use))
        if sending.state != "open" and not sending.live and not sending.forgotten:
            sending.forgotten = True
            self.sender.forget(use.key)
        if sending.aborted and not sending.live and not sending.undrained:
            sending.aborted = False
            under_way = self.writes.values()  # a write to a decode that is gone may yet be there
            assert not any(w.post.key == use.key and w.reader is use.reader for w in under_way)
            self.world.say(use.reader, self, ("drained", use))

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, SendLeaseAsk):
                (reader,) = [reader for reader in self.world.readers if reader.peer == action.peer]
                self.world.say(reader, self, action.ask, lossy=True)
            elif isinstance(action, Gather):
                self.gathers[action.gather_id] = action
            elif isinstance(action, PostStaged):
                self.post(action)
            elif isinstance(action, CancelStaged):
                self.writes[action.write_id].cancelled = True
            elif isinstance(action, JobEnded):
                sending = self.jobs[action.job_id]
                sending.live.remove(action.job_id)
                if action.drained:
                    del self.jobs[action.job_id]
                else:
                    sending.undrained.add(action.job_id)
                if action.error is not None:
                    self.fail(sending)
                self.progress(sending)
            else:
                assert isinstance(action, JobDrained)
                sending = self.jobs.pop(action.job_id)
                sending.undrained.remove(action.job_id)
                self.progress(sending)

    # what the copy pool does

    def gather(self, gather_id: int, error: Exception | None = None) -> None:
        gather = self.gathers.pop(gather_id)
        data = b"".join(content(self.rank, int(unit)) for unit in gather.src_units)
        assert len(data) == gather.num_bytes <= self.slot_bytes
        owners = [
            s
            for s in self.jobs.values()
            if s.live and s.use.ticket == int(gather.src_units[0]) // 256
        ]
        assert owners, "a gather reads pages that its room has let go of"
        start = gather.slot * self.slot_bytes
        self.memory[start : start + len(data)] = data if error is None else b"\xee" * len(data)
        self.do(self.sender.on_gathered(gather_id, error))

    # what the transport does

    def post(self, post: PostStaged) -> None:
        (reader,) = [reader for reader in self.world.everybody if reader.peer == post.peer]
        num_parts = 1 + post.write_id % 3
        data = self.slot(post)
        self.writes[post.write_id] = Write(reader, post, data, list(range(num_parts)), num_parts)

    def slot(self, post: PostStaged) -> bytes:
        start = post.slot * self.slot_bytes
        return bytes(self.memory[start : start + whole_blocks(post.num_bytes)])

    def land(self, write: Write, part: int) -> None:
        write.parts.remove(part)
        post, reader = write.post, write.reader
        assert self.slot(post) == write.data, "the slot was used again"
        lease = reader.staging.leases.get(post.lease_id)
        assert lease is not None
        assert (lease.key, lease.piece) == (post.key, post.piece)
        assert self.rank in lease.missing
        offset = reader.cut.sections(UNITS_PER_PIECE)[self.rank].offset
        assert post.dst_offset >= lease.offset
        assert post.dst_offset + len(write.data) <= lease.end
        assert offset == 0 or post.dst_offset > lease.offset
        step = -(-len(write.data) // write.num_parts)
        start, end = part * step, min((part + 1) * step, len(write.data))
        reader.memory[post.dst_offset + start : post.dst_offset + end] = write.data[start:end]
        if not write.undrained:
            tag = ChunkTag(
                1, *post.key.numbers, self.rank, post.piece, part, write.num_parts, post.lease_id,
                whole_blocks(len(write.data)) // BLOCK_BYTES,
            )  # fmt: skip
            self.world.say(reader, self, tag)

    def end_write(self, write: Write, error: Exception | None = None, drained: bool = True) -> None:
        write_id = write.post.write_id
        assert self.sender.owns(write_id)
        if drained:
            del self.writes[write_id]
        else:
            write.undrained = True
        self.do(self.sender.on_write_ended(write_id, error, drained, self.world.now_s))

    def drain(self, write: Write) -> None:
        del self.writes[write.post.write_id]
        self.do(self.sender.on_write_drained(write.post.write_id))

    # what may happen next

    def steps(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = []
        for sending in self.rooms.values():
            if sending.state == "open" and not sending.handed_over:
                steps.append(lambda s=sending: self.hand_over(s))
            steps += [
                lambda e=event: setattr(e, "answer", True)
                for event in sending.events
                if not event.answer
            ]
        steps += [lambda g=gather: self.gather(g) for gather in self.gathers]
        for write in self.writes.values():
            steps += [lambda w=write, p=part: self.land(w, p) for part in write.parts]
            if write.undrained:
                steps.append(lambda w=write: self.drain(w))
            elif not write.parts:
                steps.append(lambda w=write: self.end_write(w))
            elif write.cancelled:
                steps.append(lambda w=write: self.end_write(w, OSError("cancelled")))
        return steps


class Reader:
    """A decode rank. Its pages are unit pages; a room of ticket t has pages 256 * t.."""

    def __init__(self, world: World, name: str, incarnation: int, cut: LeaseCut) -> None:
        self.world, self.alive = world, True
        self.peer = PeerId(name, incarnation)
        self.cut = cut
        parts = {rank: Shard(0, 1, rank, 1) for rank in cut.ranks}
        self.plan = StagingPlan(cut, parts, unit_tokens=1)
        area = StagingArea(BLOCK_BYTES, cut.area_bytes, cut.area_bytes)
        self.staging = StagingReceiver(area)
        self.memory = bytearray(cut.area_bytes)
        self.uses: dict[RoomKey, Use] = {}
        self.scatters: dict[int, tuple[Use, Scatter]] = {}

    # what the control thread does

    def open(self, key: RoomKey, chunks: list[tuple[int, bool]]) -> None:
        writers, ticket = dict(self.world.writers), next(self.world.tickets)
        use = Use(self, key, ticket, chunks, writers, {}, set(self.cut.ranks))
        use.pages = {rank: bytearray(use.num_units * UNIT_BYTES[rank]) for rank in self.cut.ranks}
        self.uses[key] = use
        self.world.uses.append(use)
        page_ids = np.arange(256 * ticket, 256 * ticket + use.num_units, dtype=np.int32)
        promise = Promise(*key.numbers, use.num_units, 0, page_ids.tobytes(), ticket)
        self.do(self.staging.open(promise, 1, self.plan))
        for writer in use.writers.values():
            self.world.say(writer, self, use)

    def take(self, writer: Writer, body: Any) -> None:
        if isinstance(body, LeaseAsk):
            self.do(self.staging.on_ask(writer.rank, body))
            return
        if isinstance(body, ChunkTag):
            self.do(self.staging.on_arrival(body))
            return
        what, use = body
        if what in ("ok", "drained"):
            use.undrained.discard(writer.rank)
        if use.machine == "open" and what == "ok":
            use.ok.add(writer.rank)
            self.maybe_succeeded(use)
        elif what == "failed":
            self.fail(use)
        self.maybe_drained(use)

    def maybe_succeeded(self, use: Use) -> None:
        units = [use.arrived[rank] for rank in self.cut.ranks]
        if use.machine == "open" and use.ok == self.cut.ranks and min(units) == use.num_units:
            use.machine = "succeeded"
            self.do(self.staging.pass_on(RoomEnded(use.key, KVPoll.SUCCESS)))

    def fail(self, use: Use) -> None:
        if use.machine == "open":
            use.machine = "failed"
            self.do(self.staging.pass_on(RoomEnded(use.key, KVPoll.FAILED, OSError("failed"))))
            for rank in sorted(use.undrained):
                self.world.say(use.writers[rank], self, ("abort", use))
            self.maybe_drained(use)

    def fenced(self, rank: int, use: Use) -> None:
        use.undrained.discard(rank)
        if rank not in use.ok:
            self.fail(use)
        self.maybe_drained(use)

    def maybe_drained(self, use: Use) -> None:
        if use.machine == "failed" and not use.undrained and not use.drained:
            use.drained = True
            self.do(self.staging.pass_on(RoomDrained(use.key)))

    def over(self, use: Use) -> None:
        assert not any(other is use for other, _ in self.scatters.values())
        for writer in self.world.writers.values():
            assert not any(
                write.post.key == use.key and write.reader is self
                for write in writer.writes.values()
            )
        del self.uses[use.key]

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Scatter):
                lease = self.staging.leases.get(action.lease_id)
                assert lease is not None
                self.scatters[action.lease_id] = (self.uses[lease.key], action)
                continue
            if isinstance(action, SectionArrived):
                if (landed := self.uses.get(action.key)) is not None:
                    landed.arrived[action.rank] += action.num_units
                    self.maybe_succeeded(landed)
                continue
            use = self.uses[action.key]
            if isinstance(action, Grant):
                assert (action.grant.ticket, use.machine) == (use.ticket, "open")
                self.world.say(use.writers[action.rank], self, action.grant, lossy=True)
            elif isinstance(action, BreakRoom):
                assert use.machine == "open"
                self.fail(use)
            elif isinstance(action, RoomEnded):
                assert use.state == "open"
                use.state = "failed"
                if action.poll is KVPoll.SUCCESS:
                    assert use.machine == "succeeded"
                    use.state = "succeeded"
                    for rank, pages in use.pages.items():
                        units = range(use.ticket * 256, use.ticket * 256 + use.num_units)
                        assert bytes(pages) == b"".join(content(rank, unit) for unit in units)
                    self.over(use)
            else:
                assert isinstance(action, RoomDrained)
                assert use.state == "failed"
                self.over(use)

    # what the copy pool does

    def scatter(self, lease_id: int, error: Exception | None = None) -> None:
        use, scatter = self.scatters.pop(lease_id)
        assert self.uses.get(use.key) is use, "a copy writes pages of a room that is over"
        first, num_units = int(scatter.units[0]) - 256 * use.ticket, len(scatter.units)
        assert scatter.units.tolist() == list(
            range(256 * use.ticket + first, 256 * use.ticket + first + num_units)
        )
        assert (scatter.unit_tokens, scatter.parts) == (1, self.plan.parts)
        for rank, offset, num_bytes in scatter.sections:
            start = first * UNIT_BYTES[rank]
            assert num_bytes == num_units * UNIT_BYTES[rank]
            if error is None:
                use.pages[rank][start : start + num_bytes] = self.memory[
                    offset : offset + num_bytes
                ]
        self.do(self.staging.on_scattered(lease_id, error))

    def steps(self) -> list[Callable[[], None]]:
        return [lambda lease=lease_id: self.scatter(lease) for lease_id in self.scatters]


class World:
    """All of it. `pieces` is how many of the largest leases the readers' areas take, halves
    allowed."""

    def __init__(
        self, num_writers: int, num_readers: int, pieces: float, slots: int, window: int
    ) -> None:
        self.ids, self.tickets = count(1), count(1)
        self.now_s = 0.0
        self.mail: list[Mail] = []
        self.uses: list[Use] = []
        self.slots, self.window = slots, window
        shares = tuple((rank, UNIT_BYTES[rank]) for rank in range(num_writers))
        lease = sum(whole_blocks(UNITS_PER_PIECE * num_bytes) for _, num_bytes in shares)
        self.cut = LeaseCut(shares, UNITS_PER_PIECE, whole_blocks(int(pieces * lease)))
        self.everybody = [Reader(self, f"decode-{i}", 1, self.cut) for i in range(num_readers)]
        self.readers = list(self.everybody)
        self.writers: dict[int, Writer] = {}
        for rank in range(num_writers):
            self.start_writer(rank)

    def start_writer(self, rank: int) -> None:
        self.writers[rank] = Writer(self, rank, self.slots, self.window)
        for reader in self.readers:
            self.writers[rank].sender.add_peer(reader.peer, self.cut)

    def open(self, room: int, chunks: list[tuple[int, bool]]) -> bool:
        """Open a room, unless its number is in use. Rooms are shared out among the readers."""
        key, reader = RoomKey(room, 0), self.readers[room % len(self.readers)]
        if key in reader.uses:
            return False
        reader.open(key, chunks)
        return True

    def say(self, to: Any, sender: Any, body: Any, lossy: bool = False) -> None:
        self.mail.append(Mail(to, sender, body, lossy))

    def deliver(self, mail: Mail, again: bool = False) -> None:
        if not again:
            self.mail.remove(mail)
        if mail.to.alive and mail.sender.alive:
            mail.to.take(mail.sender, mail.body)

    # faults

    def restart_writer(self, rank: int) -> None:
        """The rank's process is gone, its writes with it, and every reader knows."""
        gone = self.writers[rank]
        gone.alive = False
        self.start_writer(rank)
        for reader in self.readers:
            for use in [use for use in reader.uses.values() if use.writers[rank] is gone]:
                reader.fenced(rank, use)

    def restart_reader(self, number: int) -> None:
        gone = self.readers[number]
        gone.alive = False
        for use in gone.uses.values():
            use.state = "lost"
        self.readers[number] = Reader(self, gone.peer.name, gone.peer.incarnation + 1, self.cut)
        self.everybody.append(self.readers[number])
        for writer in self.writers.values():
            for sending in writer.rooms.values():
                if sending.use.reader is gone:
                    writer.fail(sending, tell=False)
            writer.do(writer.sender.remove_peer(gone.peer))
            for sending in list(writer.rooms.values()):
                writer.progress(sending)
            writer.sender.add_peer(self.readers[number].peer, self.cut)

    def faults(self) -> list[Callable[[], None]]:
        """What may go wrong now, but for restarts."""
        faults: list[Callable[[], None]] = []
        for mail in self.mail:
            if mail.lossy:
                faults.append(lambda m=mail: self.mail.remove(m))
                faults.append(lambda m=mail: self.deliver(m, again=True))
        for writer in self.writers.values():
            faults += [
                lambda w=writer, g=gather: w.gather(g, OSError("gather"))
                for gather in writer.gathers
            ]
            for write in [write for write in writer.writes.values() if not write.undrained]:
                faults.append(lambda w=writer, x=write: w.end_write(x, OSError("refused")))
                faults.append(
                    lambda w=writer, x=write: w.end_write(x, OSError("lost"), drained=False)
                )
            faults += [lambda w=writer, s=sending: w.abort(s) for sending in writer.rooms.values()]
        for reader in self.readers:
            faults += [
                lambda r=reader, x=lease: r.scatter(x, OSError("scatter"))
                for lease in reader.scatters
            ]
            faults += [lambda r=reader, u=use: r.fail(u) for use in reader.uses.values()]
        return faults

    def storm(self, seed: int, num_steps: int, fault_every: int) -> None:
        """So many steps, drawn from the seed, about one in `fault_every` a fault; rooms open again
        as they end."""
        rng = Random(seed)
        for _ in range(num_steps):
            faults = self.faults() if rng.randrange(fault_every) == 0 else []
            if faults:
                kinds = Counter(fault.__code__ for fault in faults)
                kind = rng.choice(sorted(kinds, key=lambda code: code.co_firstlineno))
                rng.choice([fault for fault in faults if fault.__code__ is kind])()
            elif rng.randrange(40 * fault_every) == 0:
                self.restart_writer(rng.choice(sorted(self.writers)))
            elif rng.randrange(40 * fault_every) == 0:
                self.restart_reader(rng.randrange(len(self.readers)))
            elif rng.randrange(8) == 0:
                self.open(
                    rng.randrange(5),
                    [(rng.randint(1, 11), rng.random() < 0.5) for _ in range(rng.randint(0, 3))],
                )
            else:
                self.step(rng.randrange(2**16))
            self.check()

    # time passes

    def steps(self) -> list[Callable[[], None]]:
        """All that may happen now, but for faults and for time."""
        steps: list[Callable[[], None]] = []
        for mail in self.mail:
            if not isinstance(mail.body, Use) or not mail.to.alive or mail.to.may_take(mail.body):
                steps.append(lambda m=mail: self.deliver(m))
        for writer in self.writers.values():
            steps += writer.steps()
        for reader in self.readers:
            steps += reader.steps()
        return steps

    def tick(self) -> bool:
        """Time passes up to the next wake-up. False if no sender wants one."""
        wake_s = min(writer.sender.wake_s for writer in self.writers.values())
        if wake_s == float("inf"):
            return False
        self.now_s = max(self.now_s, wake_s)
        for writer in self.writers.values():
            writer.do(writer.sender.tick(self.now_s))
        return True

    def step(self, pick: int) -> None:
        """One of the steps, or time, as `pick` says."""
        steps = self.steps()
        if pick % 8 == 0 or not steps:
            self.tick()
        else:
            steps[pick // 8 % len(steps)]()

    def finish(self, seed: int = 1, limit: int = 50_000, loss_percent: int = 0) -> None:
        """Without any fault, but for frames and notifications that are lost: everything ends, and
        nothing is held."""
        pick = seed
        for _ in range(limit):
            steps = self.steps()
            if not steps and not any(reader.uses for reader in self.readers):
                break
            pick = (pick * 1103515245 + 12345) % 2**31
            lossy = [mail for mail in self.mail if mail.lossy]
            if lossy and pick // 2**8 % 100 < loss_percent:
                self.mail.remove(lossy[(pick >> 16) % len(lossy)])
            elif steps:
                steps[(pick >> 8) % len(steps)]()
            else:
                assert self.tick(), "stuck"
        else:
            raise AssertionError("it goes on for ever")
        self.check()
        for writer in self.writers.values():
            sender = writer.sender
            assert (len(sender.jobs), sender.num_rooms, len(sender.free_slots)) == (
                0,
                0,
                writer.num_slots,
            )
            assert writer.jobs == {}
        for reader in self.readers:
            assert (reader.staging.num_rooms, reader.staging.num_waiting) == (0, 0)
            assert reader.staging.leases.all() == []
        assert all(use.state in ("succeeded", "failed", "lost") for use in self.uses)

    def check(self) -> None:
        for writer in self.writers.values():
            writer.sender.check_invariants()
            assert len(writer.sender.jobs) == sum(
                len(sending.live) for sending in writer.rooms.values()
            )
        for reader in self.readers:
            reader.staging.check_invariants()
