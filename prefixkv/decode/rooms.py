"""What prefill is told: rooms that it is to fill, and requests that decode does not take.

Each of the latter is told to the prefill worker that may have it: it may have computed the prompt,
and waits for a promise that will not come; a refusal ends it there. The number of the room stays in
use until the worker has answered, so that no frame of a later request of that number can be taken
for one of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefixkv.decode.flights import Flight, Release, Segment, Source
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import DecodeRequest, PrefillAsk
from prefixkv.errors import check_laws
from prefixkv.pages.requests import reason_of
from prefixkv.paging import pages_for
from prefixkv.protocol.commands import AbortRoom, DecodeCommand, OpenRoom, RefuseRoom
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Promise


@dataclass(slots=True)
class _Number:
    """A number with more than a live request. By generation, `undrained` are its rooms, and `noted`
    those of `note` that prefill has not answered: each with its refusal while that waits."""

    is_live: bool
    undrained: set[int] = field(default_factory=set)
    noted: dict[int, tuple[str, Exception, bytes] | None] = field(default_factory=dict)


class Rooms:
    """Numbers of live requests, and of rooms that are not drained. Owned by the scheduler's thread.
    Every call is O(1), but for `drained` where refusals wait.

    A number is free again when its request has ended and each of its generations is drained: until
    then a peer may write to that room, or the control plane still has to report its end.

    `commands` takes the refusals. `ticket` draws a number for each use of a room, never the same
    one twice.
    """

    def __init__(
        self, commands: list[DecodeCommand], ticket: Callable[[], int], counters: Counter[str]
    ) -> None:
        self.ticket = ticket
        self.commands = commands
        self._counters = counters
        # Those in use; None: by a live request alone.
        self._numbers: dict[int, _Number | None] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def is_live(self, room: int) -> bool:
        number = self._numbers.get(room)
        return room in self._numbers if number is None else number.is_live

    def is_unanswered(self, key: RoomKey) -> bool:
        """True if prefill has not answered a `note` of this room yet."""
        number = self._numbers.get(key.room)
        return number is not None and key.generation in number.noted

    def add(self, room: int) -> None:
        """A live request takes a number that is free."""
        self._numbers[room] = None

    def remove(self, room: int) -> None:
        """Note that the live request has ended; the number is free if no room of it is
        undrained."""
        if (number := self._numbers[room]) is None:
            del self._numbers[room]
        else:
            number.is_live = False
            if not number.undrained:
                del self._numbers[room]

    def await_drained(self, key: RoomKey) -> _Number:
        if (number := self._numbers.get(key.room)) is None:
            number = self._numbers[key.room] = _Number(is_live=key.room in self._numbers)
        number.undrained.add(key.generation)
        return number

    def drained(self, key: RoomKey) -> None:
        """A room is drained: its number is free if nothing else uses it, and what waited for that
        is refused. Not awaited: no-op."""
        if (number := self._numbers.get(key.room)) is None:
            return
        number.undrained.discard(key.generation)
        # One that still waits for this number stays noted, else it could be noted twice.
        if number.noted.get(key.generation) is None:
            number.noted.pop(key.generation, None)
        if number.is_live or number.undrained:
            return
        # The number is free of every generation: now a frame about a later request cannot be
        # confused with one about this room.
        del self._numbers[key.room]
        for generation, late in number.noted.items():
            assert late is not None  # else its room would be undrained
            self.refuse(RoomKey(key.room, generation), *late).noted[generation] = None

    def undrained(self) -> set[RoomKey]:
        """Return all rooms that keep a number in use until they are drained. O(of them)."""
        numbers = self._numbers.items()
        return {RoomKey(room, gen) for room, one in numbers if one for gen in one.undrained}

    # --- refusals ---------------------------------------------------------------------------------

    def refuse(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> _Number:
        """Tell a prefill worker that a request is not taken. The room's number is in use until it
        has answered."""
        command = RefuseRoom(key, self.ticket(), prefill, reason_of(error), digest)
        self._counters["refused"] += 1
        # Reserved before the command leaves: a request that reused the number could be hit by this
        # refusal.
        number = self.await_drained(key)
        self.commands.append(command)
        return number

    def note(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> None:
        """Refuse a room that was never taken, and remember that until prefill has answered. No live
        request has its number; one that is unanswered must not come again."""
        # Where a room of its number is not drained, a frame about it now would be read as one about
        # that room: so it waits for `drained`.
        if (number := self._numbers.get(key.room)) is not None:
            number.noted[key.generation] = prefill, error, digest
        else:
            self.refuse(key, prefill, error, digest).noted[key.generation] = None

    def check_invariants(self) -> None:
        """Check what is not answered against the numbers in use. Raises InternalError."""
        for room, number in self._numbers.items():
            if number is None:
                continue
            sent = {generation for generation, late in number.noted.items() if late is None}
            laws = {
                "a number is in use while its request lives or a room of it is not drained": (
                    number.is_live or bool(number.undrained)
                ),
                "what was refused keeps its number until prefill has answered": sent
                <= number.undrained,
            }
            check_laws(laws, room, number)

    def __repr__(self) -> str:
        return f"Rooms({self._numbers})"


class PrefillSource(Source):
    """What a prefill worker computes and sends, into pages that it was promised: a room.

    `name` is this decode worker's. The other `sources` hear of promises and answers. `asks` are the
    prompts that the engine submits again, in order.
    """

    name, sends = "sent", True

    def __init__(self, ledger: Ledger, rooms: Rooms, sources: Sequence[Source], name: str) -> None:
        self._ledger, self._rooms, self._sources = ledger, rooms, sources
        self._name = name
        self.asks_late = any(source.asks_late for source in sources)
        self.open: dict[RoomKey, Flight] = {}
        self.asks: list[PrefillAsk] = []

    def sent(self, req: DecodeRequest, start: int) -> Segment | None:
        """Return what it sends: all behind `start`, if it answers."""
        worker = self._ledger.workers.get(req.prefill)
        is_open = req.prefill and worker is not None and worker.is_open
        return Segment(self, start, req.kv_len) if is_open else None

    def may_have(self, req: DecodeRequest) -> bool:
        """True if prefill may have the present attempt before it is asked for it."""
        return not self.asks_late and req.generation == req.request.generation

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        req, key = flight.owner, flight.room_key
        assert req is not None
        # A later attempt: prefill has ended, or never had, the request of this generation.
        if not self.may_have(req):
            self.asks.append(PrefillAsk(req, self._name, segment.end))
        # Before the command leaves, so that an answer always finds its flight.
        self.open[key] = flight
        workers = self._ledger.workers
        workers.promise(key, workers.of(req.prefill), flight.pages.num_own)
        for source in self._sources:
            source.asked(flight, segment.end, now_s)
        self._rooms.commands.append(self._promise(req, flight, segment.end))

    def _promise(self, req: DecodeRequest, flight: Flight, fill_len: int) -> OpenRoom:
        """Costs a match and a digest, where that is not its whole prompt."""
        pages, manager = flight.pages, self._ledger.pages
        end = pages_for(fill_len, manager.page_size)
        # After some output the tokens to compute are more than the prompt, and without its end they
        # are fewer, so their digest is another.
        digest = req.request.digest
        if fill_len != req.prompt_len:
            key = req.key if fill_len == len(req.key) else req.key.prefix(fill_len)
            digest, _ = manager.digest(key, manager.match(key, req.request.cacheable))
        promise = Promise(
            *flight.room_key.numbers,
            fill_len=fill_len,
            prefix_len=req.prefix_len,
            pages=manager.table.packed(pages.row, flight.start_pages, end),
            ticket=self._rooms.ticket(),
            digest=digest,
            weights_version=self._ledger.weights_version,
            groups=manager.groups.promised(pages.row, end),
        )
        return OpenRoom(promise, req.prefill)

    def arrived(self, key: RoomKey, aux: bytes, now_s: float) -> Flight | None:
        """Note that prefill has sent all that a room was promised for. Return its flight; None if
        nothing waits for it any more."""
        # It proves that every write has landed, so the pages leave prefill's share at once.
        self._ledger.workers.release(key)
        flight = self.open.pop(key, None)
        if flight is None:
            return None
        self._ledger.journal.transferred(flight, now_s)
        rest = flight.rest
        for source in self._sources:
            source.answered(flight, len(flight.key) if rest is None else rest.start, now_s)
        if flight.owner is not None:
            flight.owner.aux = aux
        if rest is None:
            self._ledger.flights.arrived(flight)
        else:
            flight.source = rest.source
            rest.source.begin(flight, rest, now_s)
        return flight

    def give_up(self, flight: Flight, error: Exception | None) -> Release:
        key = flight.room_key
        if self.open.pop(key, None) is None:  # it has succeeded: nothing can land
            return Release.DROP
        if error is not None:
            self._rooms.commands.append(AbortRoom(key, reason_of(error)))
            self._ledger.journal.transfer_ended(flight.prefill, "aborted")
        self._ledger.workers.hold(key)
        self._rooms.await_drained(key)
        for source in self._sources:
            source.unanswered(flight)
        return Release.HOLD

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        flights, undrained = self._ledger.flights, self._rooms.undrained()
        is_mine = [one for one in flights if one.is_open and one.source is self]
        laws = {
            "an open room has a flight, and prefill brings it": self.open
            == {flight.room_key: flight for flight in is_mine},
            "the room of a flight without an owner is in use": all(
                one.owner is not None or one.room_key in undrained for one in is_mine
            ),
        }
        check_laws(laws, self.open)
        # Pages may be in a worker's power only while a room is open, or failed and not drained.
        self._ledger.workers.check_invariants(self.open.keys() | undrained)
