"""All that a few control objects, their network, transports and engines can be in at one time, as a
value (`State`), and all that may happen next (`World.moves`).

Links keep order; of all frames on them one may be lost, one repeated or overtaken by those behind
it. A write may land from when it is wanted until it is proved over. Time stands still while
anything can happen, and then goes on to the next deadline or repeat; it runs ahead as a fault
(`Budget.slow`: to the next repeat, `stall`: past all deadlines). Where `Config.heard`, heartbeats
come as it goes on. Then nothing has an end but by words, and by the deadline that a request of
prefill's engine has of its own where decode has done with it, and cannot say so: where decode has
it still, or says that it has not, the protocol alone has to end it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from prefixkv.control import effects
from prefixkv.errors import TransferError
from prefixkv.protocol import commands
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Arrived, Settled, WriteDone, WriteDrained, WriteFailed
from tests.laws.explore import actors
from tests.laws.explore.actors import PAST_DEADLINES_S, TIMING, USE_PAGES, Use
from tests.laws.explore.laws import Laws
from tests.laws.explore.state import (
    CLOSED,
    DONE,
    DRAINED,
    FAILED,
    FORGOTTEN,
    OPEN,
    Draft,
    Move,
    Record,
    Share,
    State,
    Write,
    assert_law,
    put,
)  # fmt: skip


class World(Laws):
    """The moves of one configuration."""

    # --- what may happen --------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[tuple[bool, Move]]:
        """What may happen, and whether it is a fault; `apply` does it, `name` says what it is."""
        busy = False
        for move in self._work(state):
            busy = True
            yield False, move
        if state.held is not None:  # what happens sometime, but not by any time
            yield False, (self._release,)
        for peer in state.dead:
            yield False, (self._fence, peer)
        for slot, peer in state.fences:
            yield False, (self._fence_decode, slot, peer)
        waits = [self.table.wake_s(actor) for actor in state.actors]
        wait_s = min((wait for wait in waits if wait), default=0.0)
        if not busy and wait_s:
            yield False, (self._pass, wait_s)
            if self.config.heard:
                yield from self._deadlines(state)
        for move in self._faults(state):
            yield True, move
        budget = state.budget
        if busy and budget.slow and 0 < wait_s <= TIMING.resend_s:
            yield True, (self._pass, wait_s, "slow")
        if busy and budget.stall:
            yield True, (self._pass, PAST_DEADLINES_S, "stall")
        if not busy and wait_s and budget.hush:
            yield True, (self._pass, wait_s, "hush")

    def _work(self, state: State) -> Iterator[Move]:
        """What happens by itself, before time goes on."""
        for slot, actor in enumerate(state.actors):
            if self.table.wake_s(actor) == 0.0:
                yield self._tick, slot
        for wire, frames in enumerate(state.wires):
            if frames:
                yield self._deliver, wire
        for write in state.writes:
            if write.status == "posted":
                yield self._write_done, write
                if write.cancelled:
                    yield self._write_failed, write, True
            elif write.status == "renewing":
                yield self._renewed, write
        for slot, token in state.settling:
            yield self._settled, slot, token
        for slot, use, tag in state.arrived:
            yield self._arrive, slot, use, tag
        for use, record in zip(self.config.uses, state.uses, strict=True):
            yield from self._engines(use, record, state)

    def _engines(self, use: Use, record: Record, state: State) -> Iterator[Move]:
        for rank, read in enumerate(record.reads):
            if read == CLOSED and self._is_free(use, state) and self._is_due(use, state):
                yield self._open, use, rank
            elif read == OPEN and not record.wanted:
                yield self._end, use, rank
        for rank, share in enumerate(record.shares):
            if not share.added:
                asked = not self._is_retry(use) or CLOSED not in record.reads
                if asked and self._is_free(use, state):
                    yield self._add, use, rank
            elif share.ended is not None:
                pass
            elif any(other.ended is False for other in record.shares):
                yield self._abort, use, rank, False
            elif share.booted and share.chunks < use.chunks:
                yield self._chunk, use, rank

    def _deadlines(self, state: State) -> Iterator[tuple[bool, Move]]:
        for use, record in zip(self.config.uses, state.uses, strict=True):
            if set(record.reads) <= {DONE, DRAINED, FORGOTTEN}:
                for rank, share in enumerate(record.shares):
                    if share.added and share.ended is None:
                        yield False, (self._late, use, rank)

    def _is_retry(self, use: Use) -> bool:
        return self.config.retry and use.number > 0

    def _is_due(self, use: Use, state: State) -> bool:
        """A further attempt is made once the first has failed on all ranks of decode."""
        return not self._is_retry(use) or set(state.uses[0].reads) <= {FAILED, DRAINED}

    def _is_free(self, use: Use, state: State) -> bool:
        """Whether the number may be used again: its request has ended on both sides, whatever is
        still on its way."""
        if not self.config.successor or not use.number:
            return True
        before = state.uses[use.number - 1]
        if not all(read in (DONE, DRAINED, FORGOTTEN) for read in before.reads):
            return False
        return all(share.over for share in before.shares)

    def _faults(self, state: State) -> Iterator[Move]:
        budget = state.budget
        for wire, frames in enumerate(state.wires):
            if frames and budget.lose:
                yield self._lose, wire
            if frames and budget.repeat and state.held is None:
                yield self._repeat, wire
                yield self._hold, wire
        if budget.fail:
            for write in state.writes:
                if write.status == "posted":
                    yield self._write_failed, write, False
                    yield self._write_failed, write, True
        if budget.abort:
            for use, record in zip(self.config.uses, state.uses, strict=True):
                yield from self._ends_by_engines(use, record)
        if budget.restart:
            for how in ("killed", "killed, and the network forgets", "left"):
                for slot in range(self.num_writers):
                    yield self._restart_prefill, slot, how
                for worker in range(len(self.config.decode)):
                    yield self._restart_decode, worker, how

    def _ends_by_engines(self, use: Use, record: Record) -> Iterator[Move]:
        if record.wanted and OPEN in record.reads:
            yield self._unwant, use
        if self.config.refuse and record.reads == (CLOSED,):
            yield self._refuse, use
        for rank, share in enumerate(record.shares):
            if share.added and share.ended is None:
                yield self._abort, use, rank, True

    def apply(self, state: State, move: Move) -> Draft:
        act, *args = move
        draft = Draft(state)
        act(draft, *args)
        if draft.held is not None and draft.held[2] and self._lives_stay(draft):
            self._forget_copy(draft, *draft.held[:2])
        return draft

    def _forget_copy(self, draft: Draft, wire: int, frame: int) -> None:
        writer, reader, to_prefill = self._ends(wire)
        slot, other = (writer, reader) if to_prefill else (reader, writer)
        sender, actor = self.table.frames.sender(frame), draft.actors[slot]
        if sender != self._me(draft, other) or sender not in self.table.known(actor):
            return
        after, said = self.table.take(actor, *self._frame_input(wire, frame, stale=True))
        if after == actor and not said:
            draft.held = None

    def name(self, state: State, move: Move) -> str:
        """For traces."""
        act, *args = move
        what = act.__name__.strip("_").replace("_", " ")
        match args:
            case [int(wire)] if act != self._tick:
                return f"{what} {self._frame_name(wire, state.wires[wire][0])}"
            case []:
                assert state.held is not None
                return f"{what} {self._frame_name(*state.held[:2])}"
            case [Write() as write, *more]:
                return " ".join(
                    map(str, [what, write.job, write.status, f"of p{write.slot}", *more])
                )
            case [Use() as use, *more]:
                return " ".join(map(str, [what, use.number, *more]))
        return " ".join(map(str, [what, *args]))

    def _frame_name(self, wire: int, frame: int) -> str:
        writer, reader, to_prefill = self._ends(wire)
        ends = [f"p{writer}", f"d{reader - self.num_writers}"]
        body, sender = self.table.frames[frame], self.table.frames.sender(frame)
        more = [f"{name}={getattr(body, name)}" for name in ("ticket", "ok") if hasattr(body, name)]
        named = type(body).__name__, f"life {sender.incarnation}", *more
        return " > ".join(ends[::-1] if to_prefill else ends) + f" {', '.join(named)}"

    # --- time and frames --------------------------------------------------------------------------

    def _tick(self, draft: Draft, slot: int) -> None:
        self._take(draft, slot, "tick", effects.Tick)

    def _pass(self, draft: Draft, seconds: float, fault: str = "") -> None:
        if fault:
            draft.spend(fault)
        quiet = [frozenset[PeerId]()] * self.num_slots
        heard = self._beat(draft) if self.config.heard and fault in ("", "slow") else quiet
        draft.actors = tuple(
            self.table.later(actor, seconds, theirs)
            for actor, theirs in zip(draft.actors, heard, strict=True)
        )
        if fault in ("stall", "hush"):
            self._spoil(draft)

    def _beat(self, draft: Draft) -> list[frozenset[PeerId]]:
        """Who hears whom, by slot. A heartbeat to a prefill rank that does not know its sender is a
        frame, since it is answered."""
        talks = [self.table.talks(actor) for actor in draft.actors]
        heard: list[set[PeerId]] = [set() for _ in talks]
        for writer in range(self.num_writers):
            for reader in range(self.num_writers, self.num_slots):
                ours, theirs = self._me(draft, writer), self._me(draft, reader)
                if theirs in talks[writer] and ours in talks[reader]:
                    heard[reader].add(ours)
                if talks[reader].get(actors.address(writer)):
                    if theirs in talks[writer]:
                        heard[writer].add(theirs)
                    else:
                        beat = self.table.frames.heartbeat(theirs)
                        self._send(draft, self._wire(writer, reader, True), beat)
        return [frozenset(some) for some in heard]

    def _spoil(self, draft: Draft, *uses: int) -> None:
        for number in uses or range(len(draft.uses)):
            self._set_use(draft, number, spoilt=True)

    def _pop(self, draft: Draft, wire: int) -> int:
        first, *rest = draft.wires[wire]
        draft.wires = put(draft.wires, wire, tuple(rest))
        return first

    def _deliver(self, draft: Draft, wire: int) -> None:
        frame = self._pop(draft, wire)
        if draft.held is not None and draft.held[0] == wire and not draft.held[2]:
            sender = self.table.frames.sender
            same_life = sender(frame) == sender(draft.held[1])
            draft.held = (*draft.held[:2], same_life)
        self._hand_over(draft, wire, frame, stale=False)

    def _hand_over(self, draft: Draft, wire: int, frame: int, stale: bool) -> None:
        writer, reader, to_prefill = self._ends(wire)
        slot = writer if to_prefill else reader
        self._take(draft, slot, *self._frame_input(wire, frame, stale))

    def _frame_input(self, wire: int, frame: int, stale: bool) -> tuple[Any, Any]:
        """What stands for the arrival of a frame, and what makes it."""
        writer, _, to_prefill = self._ends(wire)
        source: Any = actors.address(writer)
        if to_prefill:
            source = actors.route(self.table.frames.sender(frame))
        raw = self.table.frames.raw
        return ("frame", source, frame, stale), lambda: effects.FrameReceived(
            source, raw(frame, stale)
        )

    def _lose(self, draft: Draft, wire: int) -> None:
        draft.spend("lose")
        self._pop(draft, wire)
        if self.config.budget.lose > 3:  # it may be all that is said of something by its deadline
            self._spoil(draft)

    def _repeat(self, draft: Draft, wire: int) -> None:
        draft.spend("repeat")
        frame = draft.wires[wire][0]
        self._deliver(draft, wire)
        draft.held = (wire, frame, True)

    def _hold(self, draft: Draft, wire: int) -> None:
        draft.spend("repeat")
        draft.held = (wire, self._pop(draft, wire), False)

    def _release(self, draft: Draft) -> None:
        assert draft.held is not None
        wire, frame, stale = draft.held
        draft.held = None
        self._hand_over(draft, wire, frame, stale)

    # --- engines ----------------------------------------------------------------------------------

    def _slot(self, use: Use, rank: int) -> int:
        return self._slots_of(use.worker)[rank]

    def _open(self, draft: Draft, use: Use, rank: int) -> None:
        self._set_read(draft, use.number, rank, OPEN)
        self._take(draft, self._slot(use, rank), ("open", use.number), use.open)

    def _refuse(self, draft: Draft, use: Use) -> None:
        draft.spend("abort")
        self._set_read(draft, use.number, 0, FAILED)
        self._spoil(draft, use.number)
        self._take(draft, self._slot(use, 0), ("refuse", use.number), use.refuse)

    def _unwant(self, draft: Draft, use: Use) -> None:
        draft.spend("abort")
        self._set_use(draft, use.number, wanted=False)
        self._spoil_ended(draft, use)

    def _spoil_ended(self, draft: Draft, use: Use) -> None:
        """An engine ends it. Until a promise of the number's next use has come, prefill cannot tell
        what is said, or remembered, of this one from what is meant for that, if the prompts are
        equal."""
        alike = self.config.successor and len({one.digest for one in self.config.uses}) == 1
        self._spoil(draft, *() if alike else (use.number,))

    def _end(self, draft: Draft, use: Use, rank: int) -> None:
        abort = commands.AbortRoom(use.decode_key(), "decode's engine")
        self._take(draft, self._slot(use, rank), ("abort", use.number), lambda: abort)
        assert_law(draft.uses[use.number].reads[rank] != OPEN, "an abort does not end the room")

    def _add(self, draft: Draft, use: Use, rank: int) -> None:
        self._set_share(draft, use.number, rank, added=True)
        leader = self._leader(draft, use)
        build = partial(use.add, leader)
        self._take(draft, rank, ("add", use.number, leader), build, use.number)

    def _chunk(self, draft: Draft, use: Use, rank: int) -> None:
        number = draft.uses[use.number].shares[rank].chunks
        self._set_share(draft, use.number, rank, chunks=number + 1)
        leader = self._leader(draft, use)
        build = partial(use.chunk, leader, number)
        self._take(draft, rank, ("chunk", use.number, number, leader), build)

    def _abort(self, draft: Draft, use: Use, rank: int, fault: bool) -> None:
        if fault:
            draft.spend("abort")
            self._spoil_ended(draft, use)
        leader = self._leader(draft, use)
        build = lambda: commands.AbortRoom(use.prefill_key(leader), "prefill's engine")  # noqa: E731
        self._take(draft, rank, ("abort", use.number, leader), build)
        assert_law(
            draft.uses[use.number].shares[rank].ended is not None, "an abort does not end the room"
        )

    def _late(self, draft: Draft, use: Use, rank: int) -> None:
        """The request's own deadline is over."""
        self._abort(draft, use, rank, False)

    # --- writes -----------------------------------------------------------------------------------

    def _write_done(self, draft: Draft, write: Write) -> None:
        draft.writes = tuple(one for one in draft.writes if one is not write)
        if write.reader >= 0:
            use = write.pages[0] // USE_PAGES
            record = draft.uses[use]
            at = write.slot * len(record.reads) + self._rank(write.reader)
            pages = record.written[at] | sum(1 << page % USE_PAGES for page in write.pages)
            self._set_use(draft, use, written=put(record.written, at, pages))
            if self.config.arrivals:
                draft.arrived = tuple(sorted((*draft.arrived, (write.reader, use, write.tag))))
            else:
                self._notified(draft, write.reader, use, write.tag)
        done = WriteDone(write.job, 64)
        self._take(draft, write.slot, ("done", write.job), lambda: done)

    def _write_failed(self, draft: Draft, write: Write, drained: bool) -> None:
        if not (drained and write.cancelled):
            draft.spend("fail")
            self._spoil(draft, write.use)
        if drained:
            draft.writes = tuple(one for one in draft.writes if one is not write)
        else:
            self._set_write(draft, write, status="failed")
        build = lambda: WriteFailed(write.job, TransferError("the write broke"), drained)  # noqa: E731
        self._take(draft, write.slot, ("failed", write.job, drained), build)

    def _renewed(self, draft: Draft, write: Write) -> None:
        """The agent that posted it is destroyed; kernels may still hold some of it."""
        if write.reader >= 0:
            self._set_write(draft, write, status="kernel", writer=self._me(draft, write.slot))
        else:
            draft.writes = tuple(one for one in draft.writes if one is not write)
        drained = WriteDrained(write.job)
        self._take(draft, write.slot, ("drained", write.job), lambda: drained)

    def _set_write(self, draft: Draft, write: Write, **changes: Any) -> None:
        changed = write._replace(**changes)
        draft.writes = tuple(changed if one is write else one for one in draft.writes)

    def _arrive(self, draft: Draft, slot: int, use: int, tag: bytes) -> None:
        rest = list(draft.arrived)
        rest.remove((slot, use, tag))
        draft.arrived = tuple(rest)
        self._notified(draft, slot, use, tag)

    def _notified(self, draft: Draft, slot: int, use: int, tag: bytes) -> None:
        before, read = draft.actors[slot], draft.uses[use].reads[self._rank(slot)]
        self._take(draft, slot, ("arrived", tag), lambda: Arrived(tag))
        same = read in (OPEN, FAILED) or draft.actors[slot] == before
        assert_law(same, f"a notification of {use}, which is over, counts for another use")

    def _settled(self, draft: Draft, slot: int, token: Any) -> None:
        """The target has read what kernels held of this writer; what was there then has landed."""
        draft.settling = tuple(one for one in draft.settling if one != (slot, token))
        draft.writes = tuple(
            write
            for write in draft.writes
            if not (write.status == "kernel" and write.reader == slot and _is_of(write, token))
        )
        self._take(draft, slot, ("settled", token), lambda: Settled(token))

    # --- processes --------------------------------------------------------------------------------

    def _restart_prefill(self, draft: Draft, slot: int, how: str) -> None:
        draft.spend("restart")
        old = self._me(draft, slot)
        if how == "left":
            self._take(draft, slot, "leave", effects.AgentDestroyed)
        status = "kernel" if how == "left" else "ghost"
        draft.writes = tuple(
            write._replace(status=status, writer=old, job=0)
            if write.slot == slot and write.writer is None and write.reader >= 0
            else write
            for write in draft.writes
            if not (write.slot == slot and write.reader < 0)
        )
        if how.endswith("forgets"):
            for reader in range(self.num_writers, self.num_slots):
                for to_prefill in (False, True):
                    draft.wires = put(draft.wires, self._wire(slot, reader, to_prefill), ())
        draft.dead = (*draft.dead, old)
        draft.fences = tuple(one for one in draft.fences if one[0] != slot)
        draft.lives = put(draft.lives, slot, draft.lives[slot] + 1)
        draft.actors = put(draft.actors, slot, self._new(slot, draft.lives[slot]))
        self._spoil(draft)
        for use in self.config.uses:
            shares = put(draft.uses[use.number].shares, slot, Share(lost=True))
            self._set_use(draft, use.number, shares=shares)

    def _restart_decode(self, draft: Draft, worker: int, how: str) -> None:
        draft.spend("restart")
        for slot in self._slots_of(worker):
            if self.config.fenced:
                fenced = ((writer, self._me(draft, slot)) for writer in range(self.num_writers))
                draft.fences = (*draft.fences, *fenced)
            if how == "left":
                self._take(draft, slot, "leave", effects.AgentDestroyed)
            draft.writes = tuple(
                write._replace(reader=-1) if write.reader == slot else write
                for write in draft.writes
                if not (write.reader == slot and write.status in ("ghost", "kernel"))
            )
            draft.settling = tuple(one for one in draft.settling if one[0] != slot)
            draft.arrived = tuple(one for one in draft.arrived if one[0] != slot)
            for writer in range(self.num_writers):
                draft.wires = put(draft.wires, self._wire(writer, slot, False), ())
                if how.endswith("forgets"):
                    draft.wires = put(draft.wires, self._wire(writer, slot, True), ())
            draft.lives = put(draft.lives, slot, draft.lives[slot] + 1)
            draft.actors = put(draft.actors, slot, self._new(slot, draft.lives[slot]))
        for use in self.config.uses:
            if use.worker == worker:
                reads = draft.uses[use.number].reads
                if set(reads) != {CLOSED}:  # else it comes to the new life
                    reads = (FORGOTTEN,) * len(reads)
                self._set_use(draft, use.number, reads=reads, spoilt=True)

    def _fence(self, draft: Draft, peer: PeerId) -> None:
        """The operator makes sure that it is dead, and says so to every decode rank."""
        draft.dead = tuple(one for one in draft.dead if one != peer)
        draft.writes = tuple(
            write._replace(status="kernel") if write.writer == peer else write
            for write in draft.writes
        )
        fence = commands.Fence(peer)
        for slot in range(self.num_writers, self.num_slots):
            self._take(draft, slot, ("fence", peer), lambda: fence)

    def _fence_decode(self, draft: Draft, slot: int, peer: PeerId) -> None:
        """Prefill's operator knows that this life of decode is over, and says so to this rank."""
        draft.fences = tuple(one for one in draft.fences if one != (slot, peer))
        self._take(draft, slot, ("fence", peer), lambda: commands.Fence(peer))


def _is_of(write: Write, token: Any) -> bool:
    """Whether this write is what a Settle of this token is about."""
    if isinstance(token, PeerId | effects.Left):
        return write.writer == (token.peer if isinstance(token, effects.Left) else token)
    return write.slot == token.rank
