"""The end of a copy on every rank is joined to one."""

from __future__ import annotations

from typing import Any

from prefixkv.errors import PeerLostError
from prefixkv.protocol.events import CopyEnded
from prefixkv.protocol.host_copy import HostCopyDone
from prefixkv.ranks.copies import RankCopies
from prefixkv.ranks.joined import pack_rank_events
from prefixkv.ranks.leader import RankLeader
from prefixkv.ranks.rooms import RankRooms
from prefixkv.ranks.row_log import RankLog


def test_a_copy_has_ended_when_it_has_on_every_rank() -> None:
    copies = RankCopies(3)
    assert copies.on(0, HostCopyDone(1, None, 10, 0.5)) is None
    assert copies.on(2, HostCopyDone(1, None, 20, 0.2)) is None
    assert copies.on(1, HostCopyDone(2, None, 5, 0.1)) is None, "another copy"
    assert copies.on(1, HostCopyDone(1, None, 30, 0.9)) == HostCopyDone(1, None, 60, 0.9)
    assert len(copies) == 1


def test_a_copy_that_failed_on_one_rank_has_failed() -> None:
    copies = RankCopies(2)
    error = OSError("a bad page")
    assert copies.on(1, HostCopyDone(1, error, 0, 0.1)) is None
    joined = copies.on(0, HostCopyDone(1, None, 10, 0.5))
    assert joined is not None
    assert joined.error is error


def test_the_end_of_a_copy_travels_to_rank_0() -> None:
    rooms = RankRooms(2)
    raw = pack_rank_events(1, 0, [CopyEnded(7, OSError("a bad page"), 3, 0.25)])
    ((rank, event),) = rooms.unpack(raw)
    assert rank == 1
    assert isinstance(event, CopyEnded)
    assert (event.number, event.num_bytes, event.seconds) == (7, 3, 0.25)
    assert "a bad page" in str(event.error)


def test_a_copy_waits_for_no_rank_that_is_dead() -> None:
    copies = RankCopies(3)
    for rank in (0, 2):
        copies.on(rank, HostCopyDone(1, None, 10, 0.5))
    copies.on(2, HostCopyDone(2, None, 10, 0.5))
    error = PeerLostError("dead")
    assert copies.fence(1, error) == [HostCopyDone(1, error, 20, 0.5)]
    # One under way on others too, and one of which no rank has said anything.
    assert copies.on(0, HostCopyDone(2, None, 10, 0.5)) == HostCopyDone(2, error, 20, 0.5)
    assert copies.on(2, HostCopyDone(3, None, 1, 0.1)) is None
    joined = copies.on(0, HostCopyDone(3, None, 1, 0.1))
    assert joined is not None
    assert joined.error is error
    assert not len(copies)


class Heard:
    """What a leader tells its scheduler."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


def test_the_scheduler_hears_of_copies_that_a_dead_rank_held_up() -> None:
    heard: Any = Heard()
    leader = RankLeader(heard, 2, RankLog(), print)
    assert leader.copies.on(0, HostCopyDone(1, None, 10, 0.5)) is None
    leader.fence(1, 3.0, None)
    (first, error, *_), (second, done, now_s) = heard.calls
    assert (first, second, now_s) == ("end_all", "copy_ended", 3.0)
    assert done == HostCopyDone(1, error, 10, 0.5)
