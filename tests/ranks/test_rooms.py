"""One room on several ranks: whatever the order of their words, the scheduler hears one end, and
one drain in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefixkv.errors import AbortedError, CallerError, TransferError
from prefixkv.protocol.commands import AbortRoom, OpenRoom, RefuseRoom
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import Promise
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded, RoomOverdue
from prefixkv.ranks.rooms import RankRooms, command_of, order_of, pack_news, unpack_news

KEY, OTHER = RoomKey(7, 1), RoomKey(8, 0)
OVERDUE, DRAINED = RoomOverdue(KEY), RoomDrained(KEY)


def success(rank: int) -> RoomEnded:
    return RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux%d" % rank)


def failure(rank: int) -> RoomEnded:
    return RoomEnded(KEY, KVPoll.FAILED, TransferError(f"rank {rank} broke"))


def histories(rank: int) -> list[list[Any]]:
    """All that a rank may say of one room."""
    return [[success(rank)], [failure(rank), DRAINED], [failure(rank), OVERDUE, DRAINED], [DRAINED]]


def merges(words: tuple[list[Any], ...]) -> Iterator[list[tuple[int, Any]]]:
    """Every order of the ranks' words that keeps each rank's own."""
    if not any(words):
        yield []
    for rank, said in enumerate(words):
        if said:
            rest = (*words[:rank], said[1:], *words[rank + 1 :])
            yield from ([(rank, said[0]), *more] for more in merges(rest))


@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", range(3))
def test_every_order_of_two_ranks_words_ends_right(first: int, second: int) -> None:
    if second == 3:
        first = 3  # a refused room: each rank says only that it is drained
    for order in merges((histories(0)[first], histories(1)[second])):
        rooms = RankRooms(2)
        news: list[Any] = []
        commands: list[Any] = []
        for i, (rank, word) in enumerate(order):
            joined, orders = rooms.on(rank, word)
            news += joined
            commands += orders
            heard = order[: i + 1]
            good = sum(
                isinstance(said, RoomEnded) and said.poll is KVPoll.SUCCESS for _, said in heard
            )
            assert (DRAINED in news) == (
                good < 2 and sum(said == DRAINED for _, said in heard) + good == 2
            )
        ends = [word for word in news if isinstance(word, RoomEnded)]
        bad = [
            word for _, word in order if isinstance(word, RoomEnded) and word.poll is KVPoll.FAILED
        ]
        if first == 3:
            assert (ends, news) == ([], [DRAINED])
        elif not bad:
            assert news == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux0")]
        else:
            assert ends == [RoomEnded(KEY, KVPoll.FAILED, bad[0].error)]
            assert news[-1] == DRAINED
        assert news.count(OVERDUE) == (any(word == OVERDUE for _, word in order))
        assert [command.key for command in commands] == ([KEY] if bad else [])
        assert len(rooms) == 0


def test_rooms_are_kept_apart_and_a_number_may_come_again() -> None:
    rooms = RankRooms(2)
    assert rooms.on(0, success(0)) == ([], [])
    assert rooms.on(1, RoomEnded(OTHER, KVPoll.SUCCESS)) == ([], [])
    assert len(rooms) == 2
    for _ in range(2):
        assert rooms.on(1, success(1))[0] == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux0")]
        assert rooms.on(0, success(0)) == ([], [])


def test_the_abort_that_follows_a_failure_names_rank_and_reason() -> None:
    _, [command] = RankRooms(3).on(2, failure(2))
    assert isinstance(command, AbortRoom)
    assert "rank 2" in str(command.error)
    assert "broke" in str(command.error)


def test_news_come_back_as_they_were() -> None:
    said = [
        success(3),
        RoomEnded(OTHER, KVPoll.FAILED, TransferError("x" * 5000)),
        DRAINED,
        OVERDUE,
    ]
    news, events = unpack_news(pack_news(3, 17, said))
    assert (news.rank, news.number) == (3, 17)
    assert events[0] == said[0]
    assert (events[1].key, events[1].poll) == (OTHER, KVPoll.FAILED)
    assert str(events[1].error).startswith("decode rank 3: xxx")
    assert events[2:] == said[2:]


@pytest.mark.parametrize("cut", [0, 1, -1, "junk"])
def test_bytes_that_are_no_news_are_the_callers_mistake(cut: int | str) -> None:
    raw = pack_news(1, 0, [success(1)])
    with pytest.raises(CallerError):
        unpack_news(b"junk" if cut == "junk" else raw[: int(cut)])
    with pytest.raises(CallerError, match="burnt"):
        unpack_news(pack_news(1, 0, [DRAINED]).replace(b"drained", b"burnt12"))


def test_orders_come_back_as_they_were_but_for_the_kind_of_error() -> None:
    opened = OpenRoom(Promise(7, 1, 10, 4, b"\0\0\0\0" * 2, 9), "tcp://p")
    assert command_of(order_of(opened)) == opened
    for command in (
        AbortRoom(KEY, TransferError("why")),
        RefuseRoom(KEY, 9, "tcp://p", TransferError("why")),
    ):
        back = command_of(order_of(command))
        assert type(back) is type(command)
        assert isinstance(back.error, AbortedError)
        assert (back.key, str(back.error)) == (KEY, "why")
