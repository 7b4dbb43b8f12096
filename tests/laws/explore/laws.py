"""What follows when a control object of the explorer's world takes an input, and the laws: they are
checked by what schedulers are told and transports are asked.

- a write lands in pages of its own request only, while they are its (4, 5);
- decode succeeds once every page is written, by every rank, with that request's KV and aux, and
  never where prefill failed (7, 8);
- a room ends once on each side; its pages are drained once, after it has failed, and then (as after
  its SUCCESS) no write of it can land; prefill's are free once it has ended and nothing reads them;
- at rest all has ended, no write may land, no control object keeps anything, and what no fault has
  struck has succeeded.
"""

from operator import attrgetter, getitem
from typing import Any

from prefixkv.protocol.ids import PeerId
from tests.laws.explore import actors
from tests.laws.explore.actors import USE_PAGES, Actors, Use
from tests.laws.explore.state import (
    CLOSED,
    DONE,
    DRAINED,
    FAILED,
    FORGOTTEN,
    OPEN,
    Config,
    Draft,
    LawError,
    Packed,
    Record,
    Share,
    State,
    Write,
    assert_law,
    put,
)  # fmt: skip

_parts_of = attrgetter(*State._fields)  # of a draft or a state


class Laws:
    """Ranks have slots: prefill's from 0, then decode's."""

    def __init__(self, config: Config, table: Actors | None = None) -> None:
        """`table`: of another world of the same ranks and uses, which has worked some of it
        out."""
        self.config = config
        self.table = table or Actors()
        # Of each field of a state: its values, and the number of each.
        self._parts: list[list[Any]] = [[] for _ in State._fields]
        self._numbers: list[dict[Any, int]] = [{} for _ in State._fields]
        self.num_writers = config.prefill
        ranks = [
            (worker, rank) for worker, size in enumerate(config.decode) for rank in range(size)
        ]
        self.readers = ranks  # by slot, less num_writers
        self.num_slots = self.num_writers + len(ranks)

    # --- places -----------------------------------------------------------------------------------

    def id_of(self, slot: int, life: int) -> PeerId:
        if slot < self.num_writers:
            return actors.prefill_id(slot, life)
        return actors.decode_id(*self.readers[slot - self.num_writers], life)

    def _new(self, slot: int, life: int) -> int:
        if slot < self.num_writers:
            return self.table.add(actors.new_prefill(slot, life, self.num_writers))
        worker, rank = self.readers[slot - self.num_writers]
        return self.table.add(actors.new_decode(worker, rank, life, self.config.decode[worker]))

    def _slots_of(self, worker: int) -> list[int]:
        return [
            self.num_writers + i for i, (owner, _) in enumerate(self.readers) if owner == worker
        ]

    def _rank(self, slot: int) -> int:
        return self.readers[slot - self.num_writers][1]

    def _worker(self, slot: int) -> int:
        return self.readers[slot - self.num_writers][0]

    def _wire(self, writer: int, reader: int, to_prefill: bool) -> int:
        """The number of a wire: between these two, in this direction."""
        pair = writer * len(self.readers) + reader - self.num_writers
        return 2 * pair + to_prefill

    def _ends(self, wire: int) -> tuple[int, int, bool]:
        pair, to_prefill = divmod(wire, 2)
        writer, reader = divmod(pair, len(self.readers))
        return writer, reader + self.num_writers, bool(to_prefill)

    def _leader(self, draft: Draft | State, use: Use) -> PeerId:
        """Rank 0 of the decode worker that asks, in its life now."""
        slot = self._slots_of(use.worker)[0]
        return self.id_of(slot, draft.lives[slot])

    def start(self) -> Packed:
        config = self.config
        uses = tuple(
            Record((CLOSED,) * config.decode[use.worker], (Share(),) * config.prefill,
                   (0,) * config.prefill * config.decode[use.worker])
            for use in config.uses
        )  # fmt: skip
        slots = range(self.num_slots)
        state = State(
            tuple(self._new(slot, 1) for slot in slots), (1,) * self.num_slots,
            ((),) * (2 * self.num_writers * len(self.readers)), None, (), (), (), uses, (), (),
            config.budget,
        )  # fmt: skip
        return tuple(self._number(i, part) for i, part in enumerate(state))

    def pack(self, made: Draft | State, before: State, packed: Packed) -> Packed:
        """A state as a few numbers, those of its parts; `packed` are those of the one before."""
        numbers = list(packed)
        for i, (part, former) in enumerate(zip(_parts_of(made), before, strict=True)):
            if part is not former:
                numbers[i] = self._number(i, part)
        return tuple(numbers)

    def unpack(self, packed: Packed) -> State:
        return State._make(map(getitem, self._parts, packed))

    def _number(self, field: int, part: Any) -> int:
        number = self._numbers[field].get(part)
        if number is None:
            parts = self._parts[field]
            number = self._numbers[field][part] = len(parts)
            parts.append(part)
        return number

    def _me(self, draft: Draft, slot: int) -> PeerId:
        return self.id_of(slot, draft.lives[slot])

    def _send(self, draft: Draft, wire: int, frame: int) -> None:
        draft.wires = put(draft.wires, wire, (*draft.wires[wire], frame))

    def _set_use(self, draft: Draft, number: int, **changes: Any) -> None:
        draft.uses = put(draft.uses, number, draft.uses[number]._replace(**changes))

    def _set_read(self, draft: Draft, use: int, rank: int, read: int) -> None:
        self._set_use(draft, use, reads=put(draft.uses[use].reads, rank, read))

    def _set_share(self, draft: Draft, use: int, rank: int, **changes: Any) -> None:
        shares = draft.uses[use].shares
        self._set_use(draft, use, shares=put(shares, rank, shares[rank]._replace(**changes)))

    # --- what follows -----------------------------------------------------------------------------

    def _take(
        self, draft: Draft, slot: int, name: Any, build: Any, adding: int | None = None
    ) -> None:
        """`adding` is the use that the input adds."""
        before = draft.actors[slot]
        actor, said = self.table.take(before, name, build)
        draft.actors = put(draft.actors, slot, actor)
        if actor != before and self._lives_stay(draft):
            was, known = self.table.known(before), self.table.known(actor)
            if was is not known:
                alive = (self._me(draft, other) for other in range(self.num_slots))
                forgets = (was - known).intersection(alive)
                assert_law(not forgets, f"{forgets} live, and are forgotten")
        for word in said:
            if slot < self.num_writers:
                self._prefill_says(draft, slot, word, adding)
            else:
                self._decode_says(draft, slot, word)

    def _lives_stay(self, draft: Draft) -> bool:
        """Whether no life ends any more, so that none that was heard is forgotten; only asked
        in brief configurations."""
        stay = self.config.brief and not draft.budget.restart
        return stay and not draft.dead and not draft.fences

    def _decode_says(self, draft: Draft, slot: int, word: Any) -> None:
        match word:
            case ("send", to, frame):
                writer = next(i for i in range(self.num_writers) if actors.address(i) == to)
                self._send(draft, self._wire(writer, slot, True), frame)
            case ("settle", token):
                draft.settling = (*draft.settling, (slot, token))
            case ("ended", key, True, aux):
                self._succeeded(draft, slot, self._opened(draft, slot, key, OPEN), aux)
            case ("ended", key, False, _):
                use = self._opened(draft, slot, key, OPEN)
                self._set_read(draft, use.number, self._rank(slot), FAILED)
                draft.uses = put(
                    draft.uses, use.number, draft.uses[use.number]._replace(wanted=False)
                )
            case ("drained", key):
                use = self._opened(draft, slot, key, FAILED)
                self._set_read(draft, use.number, self._rank(slot), DRAINED)
                self._check_over(draft, slot, use, "is drained")
            case ("overdue", key):
                self._opened(draft, slot, key, FAILED)
            case _:
                raise AssertionError(f"decode does not say {word}")

    def _opened(self, draft: Draft, slot: int, key: Any, read: int) -> Use:
        """The use that decode's scheduler has in this state under this key."""
        for use in self.config.uses:
            mine = use.worker == self._worker(slot) and use.decode_key() == key
            if mine and draft.uses[use.number].reads[self._rank(slot)] == read:
                return use
        raise LawError(f"decode hears of {key}, which it has not, or not in that state")

    def _succeeded(self, draft: Draft, slot: int, use: Use, aux: bytes) -> None:
        record = draft.uses[use.number]
        every, rank = (1 << use.chunks) - 1, self._rank(slot)
        for writer in actors.writers(self.num_writers, len(record.reads), rank):
            written = record.written[writer * len(record.reads) + rank]
            assert_law(written == every, "SUCCESS, and a page is not written")
        assert_law(aux == use.aux, "SUCCESS with the aux of another")
        self._set_read(draft, use.number, rank, DONE)
        if set(draft.uses[use.number].reads) == {DONE}:
            good = all(share.lost or share.ended is True for share in record.shares)
            assert_law(good, "decode succeeded where prefill did not")
        self._check_over(draft, slot, use, "has succeeded")

    def _check_over(self, draft: Draft, slot: int, use: Use, how: str) -> None:
        for write in draft.writes:
            lands = write.reader == slot and write.pages[0] // USE_PAGES == use.number
            assert_law(not lands, f"{use.number} {how}, and a write of it may land")

    def _prefill_says(self, draft: Draft, slot: int, word: Any, adding: int | None) -> None:
        match word:
            case ("send", to, frame):
                for reader in range(self.num_writers, self.num_slots):
                    if actors.route(self._me(draft, reader)) == to:
                        self._send(draft, self._wire(slot, reader, False), frame)
            case ("write", job, peer, src, dst, tag):
                self._posted(draft, slot, job, peer, src, dst, tag)
            case ("cancel", job):
                self._each_write(draft, slot, lambda write: write.job == job, cancelled=True)
            case ("remove", peer):
                self._each_write(draft, slot, lambda write: write.peer == peer, cancelled=True)
            case ("load", _):
                pass
            case ("renew",):
                failed = lambda write: write.status == "failed"  # noqa: E731
                self._each_write(draft, slot, failed, status="renewing")
            case ("boot", key):
                use = self._added(draft, slot, key, adding)
                share = draft.uses[use.number].shares[slot]
                assert_law(not share.booted and share.ended is None, "bootstrapped twice")
                self._set_share(draft, use.number, slot, booted=True)
            case ("ended", key, ok, _):
                use = self._added(draft, slot, key, adding)
                ended = draft.uses[use.number].shares[slot].ended
                assert_law(ended is None, "prefill's room ended twice")
                self._set_share(draft, use.number, slot, ended=ok)
            case ("free", key):
                use = self._added(draft, slot, key, adding)
                share = draft.uses[use.number].shares[slot]
                assert_law(share.ended is not None and not share.free, "source free twice, or open")
                self._set_share(draft, use.number, slot, free=True)
                for write in draft.writes:
                    reads = write.slot == slot and write.use == use.number
                    reading = reads and write.status == "posted"
                    assert_law(not reading, "the source is free, and a write reads it")
            case _:
                raise AssertionError(f"prefill does not say {word}")

    def _each_write(self, draft: Draft, slot: int, which: Any, **changes: Any) -> None:
        draft.writes = tuple(
            write._replace(**changes)
            if write.slot == slot and write.status in ("posted", "failed") and which(write)
            else write
            for write in draft.writes
        )

    def _added(self, draft: Draft, slot: int, key: Any, adding: int | None) -> Use:
        """The request that prefill's engine has under this key."""
        for use in self.config.uses:
            share = draft.uses[use.number].shares[slot]
            mine = use.number == adding if adding is not None else True
            alike = use.prefill_key(self._leader(draft, use)) == key
            if mine and alike and share.added and not share.over:
                return use
        raise LawError(f"prefill hears of {key}, which it has not")

    def _posted(
        self, draft: Draft, slot: int, job: int, peer: PeerId, src: Any, dst: Any, tag: bytes
    ) -> None:
        use = src[0] // USE_PAGES
        reader = -1
        for other in range(self.num_writers, self.num_slots):
            if self._me(draft, other) == peer:
                reader = other
        if reader >= 0:
            theirs = dst[0] // USE_PAGES
            assert_law(theirs < len(draft.uses), "a write to pages of no request")
            mine = self.config.uses[theirs].worker == self._worker(reader)
            read = draft.uses[theirs].reads[self._rank(reader)] if mine else CLOSED
            assert_law(
                read in (OPEN, FAILED), f"a write to pages that are not its request's: {dst}"
            )
            same = self.config.uses[theirs].digest == self.config.uses[use].digest
            same &= [page % USE_PAGES for page in src] == [page % USE_PAGES for page in dst]
            assert_law(same, f"KV of {src} to pages of {dst}")
        posted = Write(slot, job, use, reader, peer, dst, tag)
        draft.writes = tuple(sorted((*draft.writes, posted)))

    # --- rest -------------------------------------------------------------------------------------

    def check_rest(self, state: State) -> None:
        """Nothing more happens by itself: so all has ended, and nothing is left."""
        for slot, actor in enumerate(state.actors):
            left = self.table.leftovers(actor)
            assert_law(not left, f"at rest, {self.id_of(slot, state.lives[slot])} keeps {left}")
        assert_law(not state.writes, f"at rest, writes may land: {state.writes}")
        for number, record in enumerate(state.uses):
            if self.config.retry and number and set(record.reads) == {CLOSED}:
                first = state.uses[0].reads
                assert_law(not set(first) <= {FAILED, DRAINED}, "a request is never tried again")
                continue
            ended = {DONE, DRAINED, FORGOTTEN}
            assert_law(set(record.reads) <= ended, f"{number} never ends on decode: {record}")
            over = all(share.over for share in record.shares)
            assert_law(over, f"{number} never ends on prefill: {record}")
            if not record.spoilt:
                good = set(record.reads) == {DONE}
                assert_law(good, f"{number} failed where nothing but a frame was lost: {record}")
