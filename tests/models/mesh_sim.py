"""A prefill and a decode worker of any two meshes in one process, joined by a bad network, all from
one seed.

Real: endpoints, machines, rings, the control threads' wiring, RankRooms, gather and scatter, KV
bytes. Simulated: the network (drops, duplicates, reorder), the transport (`FakeFabric`), the clock,
the copy pools' threads, the carriage of orders and news between decode ranks, and the two
schedulers, which know no cache: each use of a room gets pages of its own, promises them and looks
at every byte when it has succeeded.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError
from prefixkv.memory.mesh import Mesh, sent_shares
from prefixkv.memory.staging_area import BLOCK_BYTES, whole_blocks
from prefixkv.paging import pages_for
from prefixkv.prefill import scheduler as prefill_scheduler
from prefixkv.prefill.send_plan import SendPlan
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.commands import AbortRoom, OpenRoom, RefuseRoom
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Promise
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded
from prefixkv.protocol.tags import ChunkTag
from prefixkv.ranks.rooms import (
    Fenced,
    RankRooms,
    RoomEvent,
    RoomOrder,
    order_of,
    unpack_news,
)
from prefixkv.runtime.control_thread import Fence
from prefixkv.testing.fabric import FakeFabric
from tests.models.mesh_ranks import HEAD_BYTES, DecodeRank, PrefillRank, Side

LAYERS, HEADS = 2, 4
NUM_PAGES = 24
_orders = msgspec.msgpack.Decoder(RoomOrder)


@dataclass
class Storm:
    """Probabilities, per frame, copy, write or step."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    junk: float = 0.0
    abort_decode: float = 0.0
    abort_rank: float = 0.0
    fail_copy: float = 0.0
    fail_at_post: float = 0.0
    fail_at_check: float = 0.0
    lose_notification: float = 0.0
    restart_prefill: float = 0.0
    restart_decode: float = 0.0
    slow_writes: float = (
        0.0  # of the steps in which a transport could do something, those that it lets pass
    )
    slow_copies: float = 0.0


@dataclass
class Shape:
    """The two workers. `staging` is how many leases decode's areas take; 0: nothing is staged."""

    prefill: tuple[int, int] = (1, 1)  # tp, pp
    decode: tuple[int, int] = (1, 1)
    attention: str = "mha"
    page_sizes: tuple[int, int] = (4, 4)
    orders: tuple[str, str] = ("layer_major", "page_major")
    staging: float = 0.0
    units_per_lease: int = 2
    slots: int = 2
    window: int = 2

    @property
    def meshes(self) -> tuple[Mesh, Mesh]:
        heads = 1 if self.attention == "mla" else HEADS
        return Mesh(LAYERS, heads, *self.prefill), Mesh(LAYERS, heads, *self.decode)


class Ready:
    """The device event of a chunk."""

    def __init__(self) -> None:
        self.is_ready = False

    def query(self) -> bool:
        return self.is_ready


@dataclass(eq=False)
class Sending:
    """One prefill rank's share of a use. `pages` are its own."""

    rank: PrefillRank
    pages: np.ndarray
    plan: SendPlan | None = None
    added: bool = False
    poll: KVPoll | None = None
    source_free: bool = False
    aborted: bool = False
    lost: bool = False  # with its process

    @property
    def over(self) -> bool:
        return self.lost or (self.poll is not None and self.source_free)


@dataclass(eq=False)
class Use:
    """One use of a room's number."""

    key: RoomKey
    ticket: int
    fill_len: int
    prefix_len: int
    pages: np.ndarray
    kv: np.ndarray = field(repr=False)
    worker: PeerId
    sendings: list[Sending]
    chunks: list[int]  # ends, still to be handed over
    refused: bool = False
    asked_to_abort: bool = False
    poll: KVPoll | None = None  # as decode's scheduler was told
    drained: bool = False
    forgotten: bool = False  # decode's worker was restarted
    unready: list[tuple[Ready, int]] = field(default_factory=list)

    @property
    def decode_over(self) -> bool:
        return self.forgotten or self.drained or self.poll is KVPoll.SUCCESS

    @property
    def over(self) -> bool:
        return self.decode_over and all(sending.over for sending in self.sendings)


@dataclass
class MeshSim:
    """See the module's text. Each `step` lets one thing happen."""

    seed: int
    shape: Shape = field(default_factory=Shape)
    storm: Storm = field(default_factory=Storm)
    num_uses: int = 8
    reuse: float = 0.5
    refuse: float = 0.05
    new_random: Callable[[int], random.Random] = random.Random  # recording.py has its own

    def __post_init__(self) -> None:
        self.random = self.new_random(self.seed)
        self.num_steps = 0
        self.now_s = 1000.0
        self.calm = False
        storm = self.storm
        self.fabric = FakeFabric(
            self.seed, fail_at_post=storm.fail_at_post, fail_at_check=storm.fail_at_check,
            lose_notification=storm.lose_notification, guard=self._guard,
            staging_guard=self._staging_guard,
        )  # fmt: skip
        self.fabric.random = self.new_random(self.seed)
        self.counters: Counter[str] = Counter()
        self._incarnation = self._ticket = self._room = 0
        self.wire: list[tuple[Any, Any, bytes]] = []
        self.uses: list[Use] = []  # that are not over
        self.every_use: list[Use] = []
        self.generations: dict[int, int] = {}
        self.to_fence: list[tuple[PrefillRank, bool]] = []  # and whether it is only stopped yet
        prefill, decode = self.shape.meshes
        lease = self._lease_bytes(prefill, decode)
        self.sides = [
            Side(
                mesh,
                self.shape.orders[i],
                NUM_PAGES * 4 // self.shape.page_sizes[i],
                self.shape.page_sizes[i],
                self.shape.attention,
                self._transport(lease, self.shape.slots if i == 0 else self.shape.staging),
            )
            for i, mesh in enumerate((prefill, decode))
        ]
        self.addresses = tuple(f"tcp://prefill-{rank}" for rank in range(prefill.num_ranks))
        self.prefill = [self._new_prefill(rank) for rank in range(prefill.num_ranks)]
        self.free_src = [set(range(self.sides[0].num_pages)) for _ in self.prefill]
        self._start_decode()

    # --- processes --------------------------------------------------------------------------------

    def _lease_bytes(self, prefill: Mesh, decode: Mesh) -> int:
        kinds = 1 if self.shape.attention == "mla" else 2
        head_bytes = min(self.shape.page_sizes) * HEAD_BYTES * kinds * self.shape.units_per_lease
        return max(
            sum(
                whole_blocks(share.num_layers * share.num_heads * head_bytes)
                for share in sent_shares(prefill, decode, reader).values()
            )
            for reader in range(decode.num_ranks)
        )

    def _transport(self, lease: int, leases: float) -> TransportConfig:
        size = whole_blocks(int(lease * leases)) if self.shape.staging else 0
        return TransportConfig(
            post_descriptors=5,
            window=3,
            staging_bytes=size,
            lease_bytes=lease,
            staging_window=self.shape.window,
        )

    def next_incarnation(self) -> int:
        self._incarnation += 1
        return self._incarnation

    def _new_prefill(self, rank: int) -> PrefillRank:
        return PrefillRank(
            self, self.sides[0], rank, self.next_incarnation(), ("", *self.addresses[1:])
        )

    def _start_decode(self) -> None:
        ranks: list[DecodeRank] = []
        for rank in range(self.sides[1].mesh.num_ranks):
            worker = ranks[0].me if ranks else None
            ranks.append(DecodeRank(self, self.sides[1], rank, self.next_incarnation(), worker))
        self.decode = ranks
        self.rank_rooms = RankRooms(len(ranks)) if len(ranks) > 1 else None
        self.free_dst = set(range(self.sides[1].num_pages))

    # --- the network ------------------------------------------------------------------------------

    def send(self, source: Any, to: Any, raw: bytes) -> None:
        if not source.alive:
            return
        if not self.calm and self.random.random() < self.storm.drop:
            return
        for _ in range(2 if not self.calm and self.random.random() < self.storm.duplicate else 1):
            self.wire.append((source, to, raw))

    def _deliver(self) -> None:
        reordered = not self.calm and self.random.random() < self.storm.reorder
        source, to, raw = self.wire.pop(self.random.randrange(len(self.wire)) if reordered else 0)
        if not self.calm and self.random.random() < self.storm.junk:
            # Cut, not changed: a flipped bit may name a sequence number that nothing true comes
            # after.
            raw = raw[: self.random.randrange(len(raw))]
        if isinstance(to, str):
            self.prefill[self.addresses.index(to or self.addresses[0])].frame(source.route, raw)
            return
        for rank in self.decode:
            if rank.route == to:
                rank.frame(self.addresses[source.rank], raw)

    # --- decode's scheduler -----------------------------------------------------------------------

    def open(self) -> None:
        """A use of a room: of a new number, one that is over, or a later attempt at one that
        failed."""
        fill_len = self.random.randint(1, 40)
        page_size = self.sides[1].page_size
        prefix_len = self.random.randint(0, fill_len // page_size) * page_size
        if self.random.random() < 0.4:
            prefix_len = 0
        num_pages = pages_for(fill_len, page_size) - prefix_len // page_size
        src_pages = pages_for(fill_len, self.sides[0].page_size)
        if num_pages > len(self.free_dst) or any(src_pages > len(free) for free in self.free_src):
            self.counters["no pages"] += 1
            return
        self._ticket += 1
        key = self._key()
        mesh, kinds = self.sides[0].mesh, 1 if self.shape.attention == "mla" else 2
        kv = np.random.default_rng(self._ticket).integers(
            0, 256, (LAYERS, kinds, fill_len, mesh.num_kv_heads, HEAD_BYTES), np.uint8
        )
        sendings = [
            Sending(rank, self._pick(free, src_pages))
            for rank, free in zip(self.prefill, self.free_src, strict=True)
        ]
        ends = sorted(
            {
                fill_len,
                *(self.random.randint(1, fill_len) for _ in range(self.random.randint(0, 3))),
            }
        )
        refused = self.random.random() < self.refuse
        pages = self._pick(self.free_dst, 0 if refused else num_pages)
        use = Use(
            key,
            self._ticket,
            fill_len,
            prefix_len,
            pages,
            kv,
            self.decode[0].me,
            sendings,
            ends,
            refused,
        )
        self.uses.append(use)
        self.every_use.append(use)
        self.counters["uses"] += 1
        if refused:
            use.poll = KVPoll.FAILED
            self._command(RefuseRoom(key, use.ticket, self.addresses[0], AbortedError("refused")))
        else:
            promise = Promise(*key, fill_len, prefix_len, pages.astype("<i4").tobytes(), use.ticket)
            self._command(OpenRoom(promise, self.addresses[0]))

    def _pick(self, free: set[int], count: int) -> np.ndarray:
        pages = self.random.sample(sorted(free), count)
        free.difference_update(pages)
        return np.array(pages, np.int32)

    def _key(self) -> RoomKey:
        live = {use.key for use in self.uses}
        busy = {use.key.room for use in self.uses if not use.decode_over and use.poll is None}
        again = [
            use.key for use in self.uses if use.poll is KVPoll.FAILED and use.key.room not in busy
        ]
        if (
            again and self.random.random() < self.reuse
        ):  # a later attempt, while the former may be undrained
            room = self.random.choice(again).room
            self.generations[room] += 1
            self.counters["higher generations"] += 1
            return RoomKey(room, self.generations[room])
        ended = [
            RoomKey(room, gen) for room, last in self.generations.items() for gen in range(last + 1)
        ]
        ended = [
            key
            for key in ended
            if key not in live and key.room not in {use.key.room for use in self.uses}
        ]
        if ended and self.random.random() < self.reuse:
            self.counters["numbers reused"] += 1
            return self.random.choice(ended)
        self._room += 1
        self.generations[self._room] = 0
        return RoomKey(self._room, 0)

    def _command(self, command: Any) -> None:
        self.decode[0].inbox.put(command)
        for rank in self.decode[1:]:
            rank.orders.append(_orders.decode(msgspec.msgpack.encode(order_of(command))))

    def _join(self) -> None:
        """Rank 0's scheduler takes in what one rank has said."""
        rank = self.random.choice(self.decode)
        if self.rank_rooms is None:
            if rank.events.items:
                self._room_said(rank.events.items.popleft())
        elif rank.rank == 0:
            if rank.events.items:
                self._rank_said(0, rank.events.items.popleft())
        elif rank.news:
            news, events = unpack_news(rank.news.popleft())
            for event in events:
                self._rank_said(news.rank, event)
        else:
            rank.take_news()

    def _rank_said(self, rank: int, event: RoomEvent) -> None:
        assert self.rank_rooms is not None
        joined, commands = self.rank_rooms.on(rank, event)
        for command in commands:
            self._command(command)
        for news in joined:
            self._room_said(news)

    def _room_said(self, event: RoomEvent) -> None:
        (use,) = [use for use in self.uses if use.key == event.key and not use.decode_over]
        if isinstance(event, RoomEnded):
            assert use.poll is None, f"{use.key} ended twice"
            use.poll = event.poll
            self.counters[event.poll.name] += 1
            if event.poll is KVPoll.SUCCESS:
                self._succeeded(use, event.aux)
            else:
                self.counters[f"failed: {str(event.error)[:40]}"] += 1
        elif isinstance(event, RoomDrained):
            assert use.poll is KVPoll.FAILED, f"{use.key} is drained and has not failed"
            use.drained = True
            self._free(use)

    def _succeeded(self, use: Use, aux: bytes) -> None:
        assert aux == b"aux %d" % use.ticket, f"{use.key}: the aux of another"
        for rank in self.decode:
            wrong = rank.memory.wrong_bytes(use.pages, use.kv, use.prefix_len)
            assert not wrong, f"{wrong} bytes of {use.key} are wrong on rank {rank.rank}"
        for sending in use.sendings:
            assert sending.lost or sending.poll is KVPoll.SUCCESS, (
                f"{use.key} succeeded where prefill failed"
            )
        self._free(use)

    def _free(self, use: Use) -> None:
        """Its pages are anybody's: nothing may land in them any more, on any rank."""
        names = {rank.me for rank in self.decode}
        for write in self.fabric._writes:
            if write.job.room == use.key and write.peer.peer in names:
                assert not write.blocks, f"{use.key} is drained, and a write of it may land"
        self.free_dst.update(use.pages.tolist())
        for rank in self.decode:
            rank.memory.scribble(use.pages, 0xDD)

    def _owner(self, key: RoomKey) -> Use | None:
        found = [use for use in self.uses if use.key == key and not use.decode_over]
        return found[0] if found else None

    # --- prefill's engine -------------------------------------------------------------------------

    def _prefill_step(self) -> None:
        """One thing that the engine may do for one use."""
        if not self.uses:
            return
        use = self.random.choice(self.uses)
        if any(sending.lost or sending.poll is KVPoll.FAILED for sending in use.sendings):
            for sending in use.sendings:  # as PrefillGroup does
                if (
                    sending.added
                    and not sending.aborted
                    and sending.poll is None
                    and not sending.lost
                ):
                    self._abort(use, sending)
        waiting = [sending for sending in use.sendings if not sending.added and not sending.over]
        if waiting:
            self._add(use, self.random.choice(waiting))
        elif use.chunks and all(
            sending.plan is not None for sending in use.sendings if not sending.over
        ):
            self._hand_over(use)
        elif use.unready:
            self._compute(use)

    def _add(self, use: Use, sending: Sending) -> None:
        key, rank = use.key, sending.rank
        # The scheduler takes no request whose number is in use.
        if any(
            other.rank is rank and other.added and not other.over
            for u in self.uses
            if u.key == key and u is not use
            for other in u.sendings
        ):
            return
        sending.added = True
        rank.inbox.put(prefill_scheduler.AddRoom(key, use.fill_len))

    def _abort(self, use: Use, sending: Sending) -> None:
        sending.aborted = True
        sending.rank.inbox.put(prefill_scheduler.AbortRoom(use.key, AbortedError("the engine")))

    def _hand_over(self, use: Use) -> None:
        end, last = use.chunks[0], len(use.chunks) == 1
        event = Ready()
        handed = False
        for sending in use.sendings:
            if sending.over or sending.plan is None or sending.poll is not None:
                continue
            span = sending.plan.send(end, last)
            src = sending.pages[span.first_page : span.end_page]
            aux = b"aux %d" % use.ticket if last else b""
            sending.rank.inbox.put(
                prefill_scheduler.SendChunk(use.key, span.first_page, src, last, aux, event)
            )
            handed = True
        use.chunks.pop(0)
        if handed:
            use.unready.append((event, end))
        while use.unready and self.random.random() < 0.5:
            self._compute(use)

    def _compute(self, use: Use) -> None:
        """The device has computed the oldest chunk: only now are its bytes there."""
        event, end = use.unready.pop(0)
        for sending in use.sendings:
            if not sending.over:
                sending.rank.memory.write(sending.pages, use.kv, 0, end)
        event.is_ready = True

    def prefill_said(self, rank: PrefillRank, event: Any) -> None:
        found = [
            (use, sending)
            for use in self.uses
            for sending in use.sendings
            if use.key == event.key and sending.rank is rank and sending.added and not sending.over
        ]
        assert len(found) == 1, f"{event} and {len(found)} requests"
        use, sending = found[0]
        if isinstance(event, sender.Bootstrapped):
            assert sending.poll is None
            assert sending.plan is None
            assert event.prefix_len == use.prefix_len, f"{use.key} was promised to another use"
            sending.plan = SendPlan(use.fill_len, event.prefix_len, self.sides[0].page_size)
        elif isinstance(event, sender.RoomEnded):
            assert sending.poll is None, f"{use.key} ended twice on prefill"
            sending.poll = event.poll
        else:
            assert isinstance(event, sender.SourceFree)
            assert not sending.source_free
            sending.source_free = True
        if sending.over:
            for write in self.fabric._writes:
                staged = write.job.job.route == "staging"  # then it reads a slot
                if write.job.room == use.key and write.writer.me == rank.me and not staged:
                    assert write.ended, f"{use.key}: the source is free, and a write reads it"
            self._free_source(use, sending)

    def _free_source(self, use: Use, sending: Sending) -> None:
        rank = sending.rank
        if self.prefill[rank.rank] is rank:
            self.free_src[rank.rank].update(sending.pages.tolist())
        rank.memory.scribble(sending.pages, 0xEE)

    # --- faults -----------------------------------------------------------------------------------

    def _faults(self) -> None:
        storm, roll = self.storm, self.random.random
        if roll() < storm.abort_decode:
            open_uses = [use for use in self.uses if not use.decode_over]
            if open_uses:
                self._command(
                    AbortRoom(self.random.choice(open_uses).key, AbortedError("decode's engine"))
                )
        if roll() < storm.abort_rank and self.uses:
            use = self.random.choice(self.uses)
            sending = self.random.choice(use.sendings)
            if sending.added and not sending.over and not sending.aborted:
                self._abort(use, sending)
        if roll() < storm.restart_prefill:
            self.restart_prefill(
                self.random.randrange(len(self.prefill)),
                self.random.choice(["killed", "stopped", "left"]),
            )
        if roll() < storm.restart_decode:
            self.restart_decode()

    def restart_prefill(self, number: int, how: str) -> None:
        """A new life of one rank. The old one is killed, or leaves in good order, or is only
        stopped: then what it has posted goes on landing until it is killed.
        """
        old = self.prefill[number]
        if how == "left":
            old.leave()
        elif how == "killed":
            self.fabric.kill(old.me)
        old.alive = False
        self.to_fence.append((old, how == "stopped"))
        self.counters[f"prefill {how}"] += 1
        self.prefill[number] = self._new_prefill(number)
        self.free_src[number] = set(range(self.sides[0].num_pages))
        for use in self.uses:
            for sending in use.sendings:
                sending.lost |= sending.rank is old

    def _fence(self) -> None:
        """The orchestrator makes sure that one is dead, and says so."""
        old, stopped = self.to_fence.pop(self.random.randrange(len(self.to_fence)))
        if stopped:
            self.fabric.kill(old.me)
        self.counters["fences"] += 1
        self.decode[0].inbox.put(Fence(old.me))
        for rank in self.decode[1:]:
            rank.orders.append(Fenced(old.me))

    def restart_decode(self) -> None:
        self.counters["decode restarted"] += 1
        for rank in self.decode:
            self.fabric.kill(rank.me)
            rank.alive = False
        for use in self.uses:
            use.forgotten |= not use.decode_over
        self._start_decode()

    # --- steps ------------------------------------------------------------------------------------

    def step(self) -> None:
        self.num_steps += 1
        choices: list[Any] = [
            self.random.choice(self.prefill).work, self.random.choice(self.decode).work, self._join,
            self._prefill_step, self._tick, self.random.choice(self.decode).apply,
        ]  # fmt: skip
        if self.wire:
            choices += [self._deliver] * 3
        if self.calm or self.random.random() >= self.storm.slow_writes:
            choices += [self.fabric.step] * 3
        copies = [
            (rank, number)
            for rank in (*self.prefill, *self.decode)
            for number in range(len(rank.copies.jobs))
        ]
        if copies and (self.calm or self.random.random() >= self.storm.slow_copies):
            choices.append(lambda: self._copy(*self.random.choice(copies)))
        if self.to_fence and (self.calm or self.random.random() < 0.02):
            choices.append(self._fence)
        self.random.choice(choices)()
        if not self.calm:
            self._faults()
        self.uses = [use for use in self.uses if not use.over]
        if self.random.random() < 0.05:
            for rank in (*self.prefill, *self.decode):
                rank.check()

    def _tick(self) -> None:
        num_ranks = len(self.prefill) + len(self.decode)  # of whom one does something in a step
        self.now_s += self.random.choice([0.02, 0.1, 0.4]) / num_ranks

    def _copy(self, rank: PrefillRank | DecodeRank, number: int) -> None:
        fails = not self.calm and self.random.random() < self.storm.fail_copy
        error = OSError("the copy failed") if fails else None
        if isinstance(rank, PrefillRank):
            rank.copy(number, error)
        else:
            rank.copy(number, error, self._may_write)

    def _may_write(self, key: RoomKey, pages: np.ndarray) -> None:
        use = self._owner(key)
        assert use is not None, f"a scatter for {key}, which is over"
        assert set(pages.tolist()) <= set(use.pages.tolist()), (
            f"a scatter of {key} writes pages that are not its own"
        )

    def _guard(self, target: PeerId, key: RoomKey, pages: np.ndarray) -> None:
        """Called as bytes land in a pool."""
        if target in {rank.me for rank in self.decode}:
            use = self._owner(key)
            assert use is not None, f"a write of {key}, which is over, lands"
            assert set(pages.tolist()) <= set(use.pages.tolist()), (
                f"a write of {key} lands on pages not its own"
            )

    def _staging_guard(self, target: PeerId, tag: ChunkTag, blocks: np.ndarray) -> None:
        """Called as bytes land in a staging area."""
        for rank in self.decode:
            if rank.me == target:
                staging = rank.endpoint.staging
                lease = staging.live_lease(tag.slot)
                assert lease is not None, "a write lands in a lease that has ended"
                assert lease.key == (tag.room, tag.generation)
                assert lease.piece == tag.chunk
                assert tag.rank in lease.missing, "a write lands in a lease where it was counted"
                sections = staging.sections_of(lease)
                offset, size = next(where for writer, *where in sections if writer == tag.rank)
                first = offset // BLOCK_BYTES
                assert set(blocks.tolist()) <= set(range(first, first + -(-size // BLOCK_BYTES)))

    def run(self, max_steps: int = 60_000) -> None:
        """Uses one by one in the storm; then it calms down, and nothing may be left."""
        for _ in range(self.num_uses):
            self.open()
            for _ in range(self.random.randint(0, 150)):
                self.step()
        for _ in range(600):
            self.step()
        self.calm = True
        self.fabric.fail_at_post = self.fabric.fail_at_check = self.fabric.lose_notification = 0.0
        for taken in range(max_steps):
            self.step()
            if self._idle():
                self.now_s += 0.5
            if taken % 200 == 0 and self.at_rest():
                break
        assert self.at_rest(), f"stuck: {self.leftovers()}"
        for rank in (*self.prefill, *self.decode):
            rank.check()
            rank.memory.check()
            if rank.buffer is not None:
                rank.buffer.check()

    def _idle(self) -> bool:
        """Nothing will happen until time has passed."""
        ranks = (*self.prefill, *self.decode)
        return not (
            self.wire
            or self.to_fence
            or any(rank.inbox.items or rank.events.items or rank.copies.jobs for rank in ranks)
            or any(rank.orders or rank.news for rank in self.decode)
            or any(use.unready for use in self.uses)
            or self.fabric.pending()
        )

    def at_rest(self) -> bool:
        return not self.leftovers()

    def leftovers(self) -> dict[str, Any]:
        left = {str(rank.me): rank.leftovers() for rank in (*self.prefill, *self.decode)}
        left |= {
            "uses": self.uses,
            "to fence": self.to_fence,
            "joined": self.rank_rooms and len(self.rank_rooms),
        }  # type: ignore[dict-item]
        return {name: what for name, what in left.items() if what}


_STORM = {
    "drop": 0.1, "duplicate": 0.3, "reorder": 0.5, "junk": 0.05, "abort_decode": 0.01,
    "abort_rank": 0.01, "fail_copy": 0.05, "fail_at_post": 0.04, "fail_at_check": 0.06,
    "lose_notification": 0.3, "restart_prefill": 0.002, "restart_decode": 0.001, "slow_writes": 1.0,
    "slow_copies": 1.0,
}  # fmt: skip
_SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


def shape_of(chance: random.Random) -> Shape:
    """Two workers that can work together."""
    return Shape(
        prefill=chance.choice(_SIZES), decode=chance.choice(_SIZES),
        attention=chance.choice(["mha", "mha", "mla"]),
        page_sizes=chance.choice([(4, 4), (4, 4), (4, 8), (8, 4)]),
        orders=chance.choice([("layer_major", "page_major"), ("page_major", "layer_major")]),
        staging=chance.choice([0, 1.5, 1.5, 4]), units_per_lease=chance.choice([1, 2]),
        slots=chance.choice([1, 2, 4]), window=chance.choice([1, 2, 4]),
    )  # fmt: skip


def simulation(seed: int, **more: Any) -> MeshSim:
    """A simulation whose workers and storms follow from the seed."""
    chance = random.Random(seed)
    shape = shape_of(chance)
    storm = Storm(
        **{name: most * chance.random() for name, most in _STORM.items() if chance.random() < 0.5}
    )
    return MeshSim(seed, shape, storm, **more)


def calm_simulation(seed: int, **more: Any) -> MeshSim:
    """Without faults, and without anything that could be mistaken: every use has to succeed."""
    return MeshSim(seed, shape_of(random.Random(seed)), reuse=0.0, refuse=0.0, **more)
