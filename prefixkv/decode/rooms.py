"""Numbers of rooms that are in use on decode, and the requests that decode does not take.

Each of these is told to the prefill worker that may have it: it may have computed the prompt, and
waits for a promise that will not come; a refusal ends it there. The number of the room stays in use
until the worker has answered, so that no frame of a later request of that number can be taken for
one of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prefixkv.errors import check_laws
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import DecodeCommand, RefuseRoom
from prefixkv.protocol.ids import RoomKey


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
        self._live: set[int] = set()
        self._undrained: dict[int, set[int]] = {}  # generations of rooms, by number
        self.unanswered: set[RoomKey] = set()  # keys of `note` that prefill has not answered
        # Of these, while the room of a former request of the number is not drained.
        self._late: dict[RoomKey, tuple[str, Exception, bytes]] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._live or room in self._undrained

    def is_live(self, room: int) -> bool:
        return room in self._live

    def add(self, room: int) -> None:
        self._live.add(room)

    def remove(self, room: int) -> None:
        """Note that the live request has ended; the number is free if no room of it is
        undrained."""
        self._live.discard(room)

    def await_drained(self, key: RoomKey) -> None:
        self._undrained.setdefault(key.room, set()).add(key.generation)

    def drained(self, key: RoomKey) -> None:
        """A room is drained: its number is free if nothing else uses it, and what waited for that
        is refused. Not awaited: no-op."""
        generations = self._undrained.get(key.room, set())
        generations.discard(key.generation)
        if not generations:
            self._undrained.pop(key.room, None)
        # One that still waits for this number stays noted, else it could be noted twice.
        if key not in self._late:
            self.unanswered.discard(key)
        # The number is free of every generation: now a frame about a later request cannot be
        # confused with one about this room.
        if self._late and key.room not in self:
            for late in [one for one in self._late if one.room == key.room]:
                self.refuse(late, *self._late.pop(late))

    @property
    def any_undrained(self) -> bool:
        """True if an undrained room keeps a number in use. O(1)."""
        return bool(self._undrained)

    def undrained(self) -> set[RoomKey]:
        """Return all rooms that keep a number in use until they are drained. O(of them)."""
        return {RoomKey(room, gen) for room, gens in self._undrained.items() for gen in gens}

    # --- refusals ---------------------------------------------------------------------------------

    def refuse(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> None:
        """Tell a prefill worker that a request is not taken. The room's number is in use until it
        has answered."""
        command = RefuseRoom(key, self.ticket(), prefill, reason_of(error), digest)
        self._counters["refused"] += 1
        # Reserved before the command leaves: a request that reused the number could be hit by this
        # refusal.
        self.await_drained(key)
        self.commands.append(command)

    def note(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> None:
        """Refuse a room that was never taken, and remember that until prefill has answered. No live
        request has its number; a key in `unanswered` must not come again."""
        # Where a room of its number is not drained, a frame about it now would be read as one about
        # that room: so it waits for `drained`.
        if key.room in self:
            self._late[key] = prefill, error, digest
        else:
            self.refuse(key, prefill, error, digest)
        self.unanswered.add(key)

    def check_invariants(self) -> None:
        """Check what is not answered against the numbers in use. Raises InternalError."""
        laws = {
            "what waits to be refused is not answered": self._late.keys() <= self.unanswered,
            "what was refused keeps its number until prefill has answered": self.unanswered
            - self._late.keys()
            <= self.undrained(),
            "a refusal waits only while its number is in use": all(
                key.room in self for key in self._late
            ),
        }
        check_laws(laws, self.unanswered, self._late, self)

    def __repr__(self) -> str:
        return f"Rooms(live {self._live}, undrained {self._undrained})"
