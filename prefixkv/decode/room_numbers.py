"""Room numbers that are in use on decode, and why."""

from __future__ import annotations

from prefixkv.protocol.ids import RoomKey


class RoomNumbers:
    """Numbers of live requests, and of rooms that are not drained. Owned by the scheduler's thread.

    A number is free again when its request has ended and each of its generations is drained: until
    then a peer may write to that room, or the control plane still has to report its end.

    >>> rooms = RoomNumbers()
    >>> rooms.add(7)
    >>> rooms.await_drained(RoomKey(7, 0))
    >>> rooms.remove(7)
    >>> 7 in rooms
    True
    >>> rooms.drained(RoomKey(7, 0))
    >>> 7 in rooms
    False
    """

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._undrained: dict[int, set[int]] = {}  # generations of rooms, by number

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
        """A room is drained: its number is free if nothing else uses it. Not awaited: no-op."""
        generations = self._undrained.get(key.room, set())
        generations.discard(key.generation)
        if not generations:
            self._undrained.pop(key.room, None)

    @property
    def any_undrained(self) -> bool:
        """True if an undrained room keeps a number in use. O(1)."""
        return bool(self._undrained)

    def undrained(self) -> set[RoomKey]:
        """Return all rooms that keep a number in use until they are drained. O(of them)."""
        return {RoomKey(room, gen) for room, gens in self._undrained.items() for gen in gens}

    def __repr__(self) -> str:
        return f"RoomNumbers(live {self._live}, undrained {self._undrained})"
