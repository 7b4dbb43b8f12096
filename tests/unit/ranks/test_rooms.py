"""One room on several ranks: whatever the order of their words, the scheduler hears one end, and
one drain in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixkv import errors
from prefixkv.errors import CallerError, PromptMismatchError, TransferError, WeightsVersionError
from prefixkv.protocol.commands import (
    AbortRoom,
    DecodeCommand,
    Fence,
    MeetPrefill,
    MoveWeights,
    OpenRoom,
    RefuseRoom,
)
from prefixkv.protocol.events import (
    MAX_ERROR_CHARS,
    DecodeEvent,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    decode_error,
    encode_error,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Promise
from prefixkv.ranks.joined import pack_rank_events
from prefixkv.ranks.rooms import RankRooms
from tests.unit.control.wire import Alike, members

KEY, OTHER = RoomKey(7, 1), RoomKey(8, 0)
DEAD = object()
OVERDUE, DRAINED = RoomOverdue(KEY), RoomDrained(KEY)


def success(rank: int) -> RoomEnded:
    return RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux%d" % rank)


def failure(rank: int) -> RoomEnded:
    return RoomEnded(KEY, KVPoll.FAILED, TransferError(f"rank {rank} broke"))


def of_rank(rank: int, error: Exception) -> TransferError:
    """What the scheduler is told of a failure on another rank than its own."""
    return TransferError(f"decode rank {rank}: {error}")


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
            first_rank = next(rank for rank, word in order if word is bad[0])
            error = bad[0].error if first_rank == 0 else Alike(of_rank(first_rank, bad[0].error))
            assert ends == [RoomEnded(KEY, KVPoll.FAILED, error)]
            assert news[-1] == DRAINED
        assert news.count(OVERDUE) == (any(word == OVERDUE for _, word in order))
        assert [command.key for command in commands] == ([KEY] if bad else [])
        assert len(rooms) == 0


@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", range(4))
def test_a_rank_that_dies_is_done_with_its_rooms(first: int, second: int) -> None:
    """Wherever it dies between its words, and whenever that is said."""
    for kept in range(len(histories(1)[second])):
        said = (histories(0)[first], [*histories(1)[second][:kept], DEAD])
        for order in merges(said):
            rooms = RankRooms(2)
            news: list[Any] = []
            for rank, word in order:
                joined, _ = rooms.fence(1) if word is DEAD else rooms.on(rank, word)
                news += joined
            ends = [word for word in news if isinstance(word, RoomEnded)]
            assert news.count(DRAINED) == 1
            assert news[-1] == DRAINED or news[-2:] == [DRAINED, OVERDUE]
            assert len(ends) <= 1, "one that had not begun here has ended with its request"
            assert not any(end.poll is KVPoll.SUCCESS for end in ends)
            assert not len(rooms)
            assert rooms.awaited() == {}


def test_another_ranks_error_is_of_the_class_that_it_was() -> None:
    for error, kind in (
        (PromptMismatchError("other tokens"), PromptMismatchError),
        (OSError("gone"), TransferError),
    ):
        rooms = RankRooms(2)
        (ended,), _ = rooms.on(1, RoomEnded(KEY, KVPoll.FAILED, error))
        assert type(ended.error) is kind
        assert str(ended.error) == f"decode rank 1: {error}"


# --- what travels ---------------------------------------------------------------------------------

KEYS = st.builds(RoomKey, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
U64, I31 = st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)
PEERS = st.builds(PeerId, st.text(min_size=1, max_size=20), U64)
IDS = st.binary(max_size=40)
PROMISES = st.builds(
    Promise, U64, I31, I31, I31, IDS, U64, groups=st.lists(IDS, max_size=3).map(tuple)
)
TRANSFER_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, TransferError)
    and kind is not WeightsVersionError
]
ERRORS = st.builds(
    lambda kind, text: kind(text), st.sampled_from(TRANSFER_ERRORS), st.text()
) | st.builds(WeightsVersionError, st.text(), st.text(), st.text())
COMMANDS = {
    OpenRoom: st.builds(OpenRoom, PROMISES, st.text()),
    MeetPrefill: st.builds(MeetPrefill, st.text()),
    RefuseRoom: st.builds(RefuseRoom, KEYS, U64, st.text(), st.text()),
    AbortRoom: st.builds(AbortRoom, KEYS, st.text()),
    MoveWeights: st.builds(MoveWeights, st.text(max_size=256), st.booleans()),
    Fence: st.builds(Fence, PEERS),
}
EVENTS = {
    RoomEnded: st.builds(
        RoomEnded, KEYS, st.sampled_from(KVPoll), st.none() | ERRORS, st.binary(max_size=20)
    ),
    RoomDrained: st.builds(RoomDrained, KEYS),
    RoomOverdue: st.builds(RoomOverdue, KEYS),
}


def there_and_back(value: Any, kind: Any) -> Any:
    raw = msgspec.msgpack.Encoder(enc_hook=encode_error).encode(value)
    return msgspec.msgpack.Decoder(kind, dec_hook=decode_error).decode(raw)


def same(event: DecodeEvent) -> Any:
    """Equal to the event, whichever object its error is."""
    if not isinstance(event, RoomEnded) or event.error is None:
        return event
    return msgspec.structs.replace(event, error=Alike(event.error))


def test_every_command_and_event_of_decode_is_tried_here() -> None:
    assert set(COMMANDS) == members(DecodeCommand)
    assert set(EVENTS) == members(DecodeEvent)


@given(st.one_of(*COMMANDS.values()))
def test_commands_come_back_as_they_were(command: Any) -> None:
    assert there_and_back(command, DecodeCommand) == command


@given(st.one_of(*EVENTS.values()))
def test_events_come_back_as_they_were(event: Any) -> None:
    back = there_and_back(event, DecodeEvent)
    assert (type(back), back) == (type(event), same(event))


@pytest.mark.parametrize(
    ("error", "back"),
    [
        (TransferError("x" * 5000), TransferError("x" * MAX_ERROR_CHARS)),
        (OSError("gone"), TransferError("gone")),
        (errors.InternalError("a law"), TransferError("a law")),
        (errors.OutOfPagesError(3, 1), TransferError("3 pages needed, 1 free and 0 evictable")),
        (errors.HandshakeError("rank", 1, 2), TransferError("rank differs: ours 1, theirs 2")),
    ],
)
def test_an_error_comes_back_cut_and_as_one_that_a_transfer_may_have(
    error: Exception, back: Exception
) -> None:
    assert there_and_back(RoomEnded(KEY, KVPoll.FAILED, error), DecodeEvent).error == Alike(back)


@given(st.integers(1, 3), st.lists(st.one_of(*EVENTS.values()), max_size=5))
def test_news_come_back_in_order_with_their_rank(rank: int, said: list[Any]) -> None:
    rooms = RankRooms(4)
    for number in range(2):
        taken = list(rooms.unpack(pack_rank_events(rank, number, said)))
        assert taken == [(rank, same(event)) for event in said]
    assert len(rooms) == 0, "taken, and not yet told"


# --- bytes that are none of ours ------------------------------------------------------------------


def refuses(raw: bytes, match: str | None = None) -> None:
    """`taken` raises CallerError, and takes what it would have taken before."""
    rooms = RankRooms(3)
    rooms.on(1, success(1))
    list(rooms.unpack(pack_rank_events(1, 0, [DRAINED])))
    with pytest.raises(CallerError, match=match):
        rooms.unpack(raw)
    assert len(rooms) == 1
    assert list(rooms.unpack(pack_rank_events(1, 1, [OVERDUE]))) == [(1, OVERDUE)]
    assert list(rooms.unpack(pack_rank_events(2, 0, [DRAINED]))) == [(2, DRAINED)]


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (pack_rank_events(0, 0, [DRAINED]), "a message of rank 0"),
        (pack_rank_events(3, 0, [DRAINED]), "a message of rank 3"),
        (pack_rank_events(-1, 0, [DRAINED]), "a message of rank -1"),
        (pack_rank_events(1, 0, [DRAINED]), "message 0 of rank 1, 1 is next"),
        (pack_rank_events(1, 2, [DRAINED]), "message 2 of rank 1, 1 is next"),
        (pack_rank_events(2, 1, [DRAINED]), "message 1 of rank 2, 0 is next"),
        (pack_rank_events(1, 1, [DRAINED]).replace(b"drained", b"burnt12"), "burnt"),
    ],
    ids=["its own", "beyond", "negative", "repeated", "a gap", "of another", "unknown"],
)
def test_news_that_are_not_the_next_of_a_rank_are_refused(raw: bytes, match: str) -> None:
    refuses(raw, match)


GOOD = pack_rank_events(1, 1, [success(1), failure(1), DRAINED, OVERDUE])


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=3))
@example([])
def test_damaged_news_are_taken_whole_or_refused_whole(damage: list[tuple[int, int]]) -> None:
    raw = bytearray(GOOD)
    for place, byte in damage:
        raw[place] = byte
    rooms = RankRooms(3)
    list(rooms.unpack(pack_rank_events(1, 0, [])))
    try:
        taken = list(rooms.unpack(bytes(raw)))
    except CallerError:
        refuses(bytes(raw))
    else:
        assert 1 <= len(taken) <= 15
        assert {rank for rank, _ in taken} <= {1, 2}
        for rank, event in taken:
            rooms.on(rank, event)


def test_news_that_are_cut_are_refused() -> None:
    for cut in range(len(GOOD)):
        refuses(GOOD[:cut])


@pytest.mark.parametrize(
    "name",
    ["CallerError", "InternalError", "PrefixKVError", "Mapping", "__name__", "", "os.system"],
)
def test_an_error_of_another_name_comes_back_as_a_plain_one(name: str) -> None:
    raw = pack_rank_events(1, 0, [failure(1)]).replace(
        msgspec.msgpack.encode("TransferError"), msgspec.msgpack.encode(name)
    )
    ((_, event),) = RankRooms(2).unpack(raw)
    assert event == same(failure(1))
