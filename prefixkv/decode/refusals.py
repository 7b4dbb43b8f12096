"""Requests that decode does not take: each is told to the prefill worker that may have it.

That worker may have computed the prompt, and waits for a promise that will not come; a refusal ends
it there. The number of the room stays in use until the worker has answered, so that no frame of a
later request of that number can be taken for one of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prefixkv.decode.room_numbers import RoomNumbers
from prefixkv.errors import check_laws
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import DecodeCommand, RefuseRoom
from prefixkv.protocol.ids import RoomKey


class Refusals:
    """What is refused, and what of it prefill has not answered. Owned by the scheduler's thread.
    Every call is O(1), but for `drained`."""

    def __init__(
        self,
        rooms: RoomNumbers,
        commands: list[DecodeCommand],
        ticket: Callable[[], int],
        counters: Counter[str],
    ) -> None:
        self._rooms = rooms
        self._commands = commands
        self._ticket = ticket
        self._counters = counters
        self.unanswered: set[RoomKey] = set()  # keys of `note` that prefill has not answered
        # Of these, while the room of a former request of the number is not drained.
        self._late: dict[RoomKey, tuple[str, Exception, bytes]] = {}

    def send(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> None:
        """Tell a prefill worker that a request is not taken. The room's number is in use until it
        has answered."""
        command = RefuseRoom(key, self._ticket(), prefill, reason_of(error), digest)
        self._counters["refused"] += 1
        # Reserved before the command leaves: a request that reused the number could be hit by this
        # refusal.
        self._rooms.await_drained(key)
        self._commands.append(command)

    def note(
        self, key: RoomKey, prefill: str, error: Exception, digest: bytes, is_free: bool
    ) -> None:
        """Refuse a room that was never taken, and remember that until prefill has answered.
        `is_free`: no room of its number is live, or not drained. A key in `unanswered` must not
        come again."""
        # 1. The number is free: refuse now.
        # 2. The number is in use by a room that is not drained: a frame about it now would be read
        # as one about that room, so it waits for `drained`.
        if is_free:
            self.send(key, prefill, error, digest)
        else:
            self._late[key] = prefill, error, digest
        self.unanswered.add(key)

    def drained(self, key: RoomKey) -> None:
        """A room is drained, and its number given back: send what waited. O(refusals that wait)."""
        # One that still waits for this number stays noted, else it could be noted twice.
        if key not in self._late:
            self.unanswered.discard(key)
        # The number is free of every generation: now a frame about a later request cannot be
        # confused with one about this room.
        if self._late and key.room not in self._rooms:
            for late in [one for one in self._late if one.room == key.room]:
                self.send(late, *self._late.pop(late))

    def check_invariants(self) -> None:
        """Check what is not answered against the numbers in use. Raises InternalError."""
        sent = self.unanswered - self._late.keys()
        laws = {
            "what waits to be refused is not answered": self._late.keys() <= self.unanswered,
            "what was refused keeps its number until prefill has answered": sent
            <= self._rooms.undrained(),
            "a refusal waits only while its number is in use": all(
                key.room in self._rooms for key in self._late
            ),
        }
        check_laws(laws, self.unanswered, self._late, self._rooms)
