"""A simulation whose ranks are put to bare uses of rooms. There are no schedulers, and no cache:
each use gets pages of its own, promises them and looks at every byte when it has succeeded.
RankLeader joins decode's ranks; carriage of orders and news is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.digest import prompt_digest
from prefixkv.paging import pages_for
from prefixkv.prefill.request import SendPlan
from prefixkv.protocol import commands
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import Promise
from prefixkv.ranks.leader import RankLeader
from prefixkv.testing.hashing import Hashes
from tests.support.sim import Sim, scrambled, shape_of, storm_of
from tests.support.sim_rank import DecodeRank, PrefillRank

_NUM_TOKENS = 96  # that a pool holds
_decode = msgspec.msgpack.Decoder(commands.DecodeCommand).decode


class Commands:
    """A log of commands alone: there are no rows here."""

    def __init__(self) -> None:
        self.commands: list[commands.DecodeCommand] = []

    def command(self, command: commands.DecodeCommand) -> None:
        self.commands.append(command)


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
    prefix_len: int
    pages: np.ndarray
    hashes: Hashes = field(repr=False)
    sendings: list[Sending]
    chunks: list[int]  # ends, still to be handed over
    poll: KVPoll | None = None  # as decode's scheduler was told
    drained: bool = False
    forgotten: bool = False  # decode's worker was restarted
    unready: list[tuple[Ready, int]] = field(default_factory=list)

    @property
    def fill_len(self) -> int:
        return len(self.hashes)

    @property
    def digest(self) -> bytes:
        return prompt_digest([self.ticket % 2**31])

    @property
    def decode_over(self) -> bool:
        return self.forgotten or self.drained or self.poll is KVPoll.SUCCESS

    @property
    def over(self) -> bool:
        return self.decode_over and all(sending.over for sending in self.sendings)


@dataclass
class RoomSim(Sim):
    """See the module's text."""

    num_uses: int = 8
    reuse: float = 0.5
    refuse: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.shape.page_sizes
        num_pages = _NUM_TOKENS // sizes[0], _NUM_TOKENS // sizes[1]
        self.sides = self.shape.sides(("prefill", "decode"), num_pages)
        self.uses: list[Use] = []  # that are not over
        self.every_use: list[Use] = []
        self.generations: dict[int, int] = {}
        self._room = 0
        self.writers = [self.new_writer(rank) for rank in range(self.sides[0].mesh.num_ranks)]
        self.free_src = [set(range(num_pages[0])) for _ in self.writers]
        self._start_decode()

    def _start_decode(self) -> None:
        self.start_readers()
        self.log = Commands()
        submit = self.readers[0].inbox.append
        self.leader = RankLeader[Any](
            "decode",
            len(self.readers),
            self.log,
            submit,
            partial(DecodeScheduler.hear, self),  # type: ignore[arg-type]
        )
        self.free_dst = set(range(self.sides[1].num_pages))

    # --- decode's scheduler -----------------------------------------------------------------------

    def open(self) -> None:
        """A use of a room: of a new number, one that is over, or a later attempt at one that
        failed."""
        chance = self.random
        fill_len = chance.randint(1, 40)
        page_size = self.sides[1].page_size
        prefix_len = chance.randint(0, fill_len // page_size) * page_size
        if chance.random() < 0.4:
            prefix_len = 0
        num_pages = pages_for(fill_len, page_size) - prefix_len // page_size
        src_pages = pages_for(fill_len, self.sides[0].page_size)
        if num_pages > len(self.free_dst) or any(src_pages > len(free) for free in self.free_src):
            self.counters["no pages"] += 1
            return
        self._ticket += 1
        key = self._key()
        hashes = self.hasher.prefixes(np.arange(fill_len, dtype=np.int32) + 1000 * self._ticket)
        sendings = [
            Sending(rank, self._pick(free, src_pages))
            for rank, free in zip(self.writers, self.free_src, strict=True)
        ]
        ends = {chance.randint(1, fill_len) for _ in range(chance.randint(0, 3))}
        refused = chance.random() < self.refuse
        pages = self._pick(self.free_dst, 0 if refused else num_pages)
        chunks = sorted({fill_len, *ends})
        use = Use(key, scrambled(self._ticket), prefix_len, pages, hashes, sendings, chunks)
        self.uses.append(use)
        self.every_use.append(use)
        self.counters["uses"] += 1
        if refused:
            use.poll = KVPoll.FAILED
            self.leader.command(commands.RefuseRoom(key, use.ticket, self.addresses[0], "refused"))
        else:
            raw = pages.astype("<i4").tobytes()
            promise = Promise(*key.numbers, fill_len, prefix_len, raw, use.ticket)
            self.leader.command(commands.OpenRoom(promise, self.addresses[0], use.digest))
        self._publish()

    def _pick(self, free: set[int], count: int) -> np.ndarray:
        pages = self.random.sample(sorted(free), count)
        free.difference_update(pages)
        return np.array(pages, np.int32)

    def _key(self) -> RoomKey:
        live = {use.key.room for use in self.uses}
        busy = {use.key.room for use in self.uses if not use.decode_over and use.poll is None}
        failed = [use.key.room for use in self.uses if use.poll is KVPoll.FAILED]
        again = [room for room in failed if room not in busy]
        if again and self.random.random() < self.reuse:
            # A later attempt, while the former may be undrained.
            room = self.random.choice(again)
            self.generations[room] += 1
            self.counters["higher generations"] += 1
            return RoomKey(room, self.generations[room])
        ended = [
            RoomKey(room, generation)
            for room, last in self.generations.items()
            for generation in range(last + 1)
            if room not in live
        ]
        if ended and self.random.random() < self.reuse:
            self.counters["numbers reused"] += 1
            return self.random.choice(ended)
        self._room += 1
        self.generations[self._room] = 0
        return RoomKey(self._room, 0)

    def _publish(self) -> None:
        """For the other ranks. It goes through their bytes' format."""
        for rank in self.readers[1:]:
            rank.orders.extend(map(msgspec.msgpack.encode, self.log.commands))
        self.log.commands.clear()

    def _join(self) -> None:
        self.hear(self.random.choice(self.readers))

    def _read_order(self, rank: DecodeRank) -> None:
        if rank.orders:
            rank.inbox.append(_decode(rank.orders.popleft()))

    def _use(self, key: RoomKey) -> Use:
        """Raises AssertionError where it is over on decode."""
        found = [use for use in self.uses if use.key == key and not use.decode_over]
        assert len(found) == 1, f"{key} is over"
        return found[0]

    def room_ended(
        self, key: RoomKey, poll: KVPoll, error: Exception | None, aux: bytes, now_s: float
    ) -> None:
        use = self._use(key)
        assert use.poll is None, f"{key} ended twice"
        use.poll = poll
        self.counters[poll.name] += 1
        if poll is KVPoll.SUCCESS:
            self._succeeded(use, aux)
        else:
            self.counters[f"failed: {str(error)[:40]}"] += 1

    def room_drained(self, key: RoomKey) -> None:
        use = self._use(key)
        assert use.poll is KVPoll.FAILED, f"{key} is drained and has not failed"
        use.drained = True
        self._free(use)

    def room_overdue(self, key: RoomKey) -> None:
        self._use(key)

    def _succeeded(self, use: Use, aux: bytes) -> None:
        assert aux == b"aux %d" % use.ticket, f"{use.key}: the aux of another"
        for rank in self.readers:
            rank.check_bytes(use.key, use.pages, use.hashes[use.prefix_len :])
        for sending in use.sendings:
            assert sending.lost or sending.poll is KVPoll.SUCCESS, (
                f"{use.key} succeeded where prefill failed"
            )
        self._free(use)

    def _free(self, use: Use) -> None:
        """Its pages are free: nothing may land in them any more, on any rank."""
        names = {rank.me for rank in self.readers}
        for write in self.fabric._writes:
            if write.job.room == use.key and write.peer.peer in names:
                assert not write.blocks, f"{use.key} is drained, and a write of it may land"
        self.free_dst.update(use.pages.tolist())
        for rank in self.readers:
            rank.scribble(use.pages, (), 0xDD)

    # --- prefill's engine -------------------------------------------------------------------------

    def _prefill_step(self) -> None:
        """One thing that the engine may do for one use."""
        if not self.uses:
            return
        use = self.random.choice(self.uses)
        if any(sending.lost or sending.poll is KVPoll.FAILED for sending in use.sendings):
            for sending in use.sendings:  # as PrefillGroup does
                if not (sending.lost or sending.aborted) and sending.added and sending.poll is None:
                    self._abort(use, sending)
        waiting = [sending for sending in use.sendings if not sending.added and not sending.over]
        if waiting:
            self._add(use, self.random.choice(waiting))
        elif use.chunks and all(s.plan is not None for s in use.sendings if not s.over):
            self._hand_over(use)
        elif use.unready:
            self._compute(use)

    def _add(self, use: Use, sending: Sending) -> None:
        others = [other for u in self.uses if u.key == use.key for other in u.sendings]
        if not any(o.rank is sending.rank and o.added and not o.over for o in others):
            # The scheduler takes no request whose number is in use.
            sending.added = True
            add = commands.AddRoom(self.sent(use.key), use.fill_len, use.digest)
            sending.rank.inbox.append(add)

    def _abort(self, use: Use, sending: Sending) -> None:
        sending.aborted = True
        sending.rank.inbox.append(commands.AbortRoom(self.sent(use.key), "the engine"))

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
            sending.rank.inbox.append(
                commands.SendChunk(self.sent(use.key), span.first_page, src, last, aux, event)
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
                sending.rank.fill(sending.pages, 0, use.hashes[:end])
        event.is_ready = True

    def said(self, rank: Any, event: Any) -> None:
        if isinstance(rank, DecodeRank):
            rank.events.append(event)
            return
        found = [
            (use, sending)
            for use in self.uses
            for sending in use.sendings
            if self.sent(use.key) == event.key
            and sending.rank is rank
            and sending.added
            and not sending.over
        ]
        assert len(found) == 1, f"{event} and {len(found)} requests"
        use, sending = found[0]
        if isinstance(event, Bootstrapped):
            assert sending.poll is None
            assert sending.plan is None
            assert event.prefix_len == use.prefix_len, f"{use.key} was promised to another use"
            sending.plan = SendPlan(use.fill_len, event.prefix_len, self.sides[0].page_size)
        elif isinstance(event, RoomEnded):
            assert sending.poll is None, f"{use.key} ended twice on prefill"
            sending.poll = event.poll
        else:
            assert isinstance(event, SourceFree)
            assert not sending.source_free
            sending.source_free = True
        if sending.over:
            for write in self.fabric._writes:
                staged = write.job.job.route == "staging"  # then it reads a slot
                if write.job.room == use.key and write.writer.me == rank.me and not staged:
                    assert write.ended, f"{use.key}: the source is free, and a write reads it"
            if self.writers[rank.rank] is rank:
                self.free_src[rank.rank].update(sending.pages.tolist())
            rank.scribble(sending.pages, (), 0xEE)

    # --- faults -----------------------------------------------------------------------------------

    def faults(self) -> None:
        storm, roll = self.storm, self.random.random
        if roll() < storm.abort:
            open_uses = [use for use in self.uses if not use.decode_over]
            if open_uses:
                self.leader.command(
                    commands.AbortRoom(self.random.choice(open_uses).key, "decode's engine")
                )
        if roll() < storm.abort_rank and self.uses:
            use = self.random.choice(self.uses)
            sending = self.random.choice(use.sendings)
            if sending.added and not sending.over and not sending.aborted:
                self._abort(use, sending)
        if roll() < storm.restart_prefill:
            number = self.random.randrange(len(self.writers))
            self._restart_prefill(number, self.random.choice(["killed", "stopped", "left"]))
        if roll() < storm.restart_decode:
            self._restart_decode()

    def _restart_prefill(self, number: int, how: str) -> None:
        """A new life of one rank."""
        old = self.writers[number]
        self.end_writer(old, how)
        self.writers[number] = self.new_writer(number)
        self.free_src[number] = set(range(self.sides[0].num_pages))
        for use in self.uses:
            for sending in use.sendings:
                sending.lost |= sending.rank is old

    def _restart_decode(self) -> None:
        self.end_readers()
        for use in self.uses:
            use.forgotten |= not use.decode_over
        self._start_decode()

    def may_write(self, key: RoomKey, pages: np.ndarray, what: str) -> None:
        own = set(self._use(key).pages.tolist())
        assert set(pages.tolist()) <= own, f"{what} of {key} lands on pages that are not its own"

    # --- a run ------------------------------------------------------------------------------------

    def choices(self) -> list[Callable[[], object]]:
        writer, reader = self.random.choice(self.writers), self.random.choice(self.readers)
        order = self.random.choice(self.readers)
        work = [writer.work, reader.work]
        return [*work, self._join, self._prefill_step, self.tick, lambda: self._read_order(order)]

    def after_step(self) -> None:
        self.uses = [use for use in self.uses if not use.over]
        self._publish()
        if self.random.random() < 0.05:
            self.check_ranks()

    def start(self) -> None:
        for _ in range(self.num_uses):
            self.open()
            for _ in range(self.random.randint(0, 150)):
                self.step()
        for _ in range(600):
            self.step()

    def is_over(self, taken: int) -> bool:
        if self.idle() and not any(use.unready for use in self.uses):
            self.now_s += 0.5
        return taken % 200 == 0 and not self.leftovers()

    def assert_at_rest(self) -> None:
        assert not self.leftovers(), f"stuck: {self.leftovers()}"

    def leftovers(self) -> dict[str, Any]:
        left = super().leftovers() | {"uses": self.uses}
        left["joined"] = len(self.leader)
        return {name: what for name, what in left.items() if what}


_STORM = {
    "drop": 0.1, "duplicate": 0.3, "reorder": 0.5, "junk": 0.05, "abort": 0.01, "abort_rank": 0.01,
    "fail_copy": 0.05, "fail_at_post": 0.04, "fail_at_check": 0.06, "lose_notification": 0.01,
    "restart_prefill": 0.002, "restart_decode": 0.001, "slow_writes": 1.0, "slow_copies": 1.0,
}  # fmt: skip


def simulation(seed: int, **more: Any) -> RoomSim:
    """A simulation whose workers and storms follow from the seed."""
    chance = random.Random(seed)
    shape = shape_of(chance)
    return RoomSim(seed, storm_of(chance, _STORM), shape, **more)


def calm_simulation(seed: int, **more: Any) -> RoomSim:
    """Without faults, and without anything that could be mistaken: every use has to succeed."""
    return RoomSim(seed, shape=shape_of(random.Random(seed)), reuse=0.0, refuse=0.0, **more)
