"""What prefill is told: rooms that it is to fill, and requests that decode does not take.

Each of the latter is told to the prefill worker that may have it: it may have computed the prompt,
and waits for a promise that will not come; a refusal ends it there. The number of the room stays in
use until the worker has answered, so that no frame of a later request of that number can be taken
for one of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from prefixkv.errors import check_laws
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import DecodeCommand, RefuseRoom
from prefixkv.protocol.ids import RoomKey


@dataclass(slots=True)
class _Number:
    """A number in use. By generation, `undrained` are its rooms, and `noted` those of `note` that
    prefill has not answered: each with its refusal while that waits."""

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
        self._numbers: dict[int, _Number] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def is_live(self, room: int) -> bool:
        return room in self._numbers and self._numbers[room].is_live

    def is_unanswered(self, key: RoomKey) -> bool:
        """True if prefill has not answered a `note` of this room yet."""
        return key.room in self._numbers and key.generation in self._numbers[key.room].noted

    def add(self, room: int) -> None:
        """A live request takes a number that is free."""
        self._numbers[room] = _Number(is_live=True)

    def remove(self, room: int) -> None:
        """Note that the live request has ended; the number is free if no room of it is
        undrained."""
        number = self._numbers[room]
        number.is_live = False
        if not number.undrained:
            del self._numbers[room]

    def await_drained(self, key: RoomKey) -> _Number:
        number = self._numbers.setdefault(key.room, _Number(is_live=False))
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
        return {RoomKey(room, gen) for room, one in numbers for gen in one.undrained}

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
