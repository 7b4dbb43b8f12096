"""Refusals: each is sent once the number of its room is free, and keeps it until the answer."""

from collections import Counter
from itertools import count

from prefixkv.decode.rooms import Rooms
from prefixkv.errors import AbortedError
from prefixkv.protocol.commands import DecodeCommand, RefuseRoom
from prefixkv.protocol.ids import RoomKey

WHY = AbortedError("not today")
OLD, NEW, OTHER = RoomKey(7, 0), RoomKey(7, 1), RoomKey(8, 0)


class Case:
    def __init__(self) -> None:
        self.commands: list[DecodeCommand] = []
        self.counters: Counter[str] = Counter()
        self.rooms = Rooms(self.commands, count(1).__next__, self.counters)

    def note(self, key: RoomKey) -> None:
        self.rooms.note(key, "p", WHY, b"d" * 16)
        self.rooms.check_invariants()

    def drain(self, key: RoomKey) -> list[DecodeCommand]:
        """Return what is sent then."""
        self.commands.clear()
        self.rooms.drained(key)
        self.rooms.check_invariants()
        return self.commands


def test_a_refusal_keeps_its_number_until_the_answer() -> None:
    case = Case()
    case.note(NEW)
    assert case.commands == [RefuseRoom(NEW, 1, "p", "not today", b"d" * 16)]
    assert case.counters["refused"] == 1
    assert NEW.room in case.rooms
    assert case.rooms.is_unanswered(NEW)
    assert not case.drain(NEW)
    assert NEW.room not in case.rooms
    assert not case.rooms.is_unanswered(NEW)


def test_a_number_in_use_is_refused_once_all_its_rooms_are_drained() -> None:
    case = Case()
    case.rooms.await_drained(OLD)
    case.rooms.await_drained(RoomKey(7, 5))
    case.note(NEW)
    assert not case.commands
    assert not case.drain(OLD), "a room of the number is still open"
    assert case.drain(OTHER) == [], "another number's"
    (sent,) = case.drain(RoomKey(7, 5))
    assert isinstance(sent, RefuseRoom)
    assert sent.key == NEW
    assert case.rooms.is_unanswered(NEW), "until prefill has answered that one"
    case.drain(NEW)
    assert not case.rooms.is_unanswered(NEW)


def test_a_room_of_the_same_key_that_is_drained_is_no_answer() -> None:
    """The room of a former request had the same generation: its end is what the refusal waits
    for."""
    case = Case()
    case.rooms.await_drained(OLD)
    case.note(OLD)
    assert [command.key for command in case.drain(OLD) if isinstance(command, RefuseRoom)] == [OLD]
    assert case.rooms.is_unanswered(OLD)
    case.drain(OLD)
    assert not case.rooms.is_unanswered(OLD)
