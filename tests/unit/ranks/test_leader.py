"""One room on several ranks: whatever the order of their words, the scheduler hears one end, and
that its pages are free in time. A copy has ended when it has on all of them."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv import errors
from prefixkv.errors import (
    CallerError,
    ConfigError,
    PeerLostError,
    PromptMismatchError,
    TransferError,
    WeightsVersionError,
)
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import (
    MAX_ERROR_CHARS,
    Bootstrapped,
    DecodeEvent,
    HostCopyDone,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    SourceFree,
    decode_error,
    encode_error,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.ranks.leader import RankLeader, pack_rank_events
from tests.unit.control.wire import Alike, members, of

KEY, OTHER = RoomKey(7, 1), RoomKey(8, 0)
DEAD = "its process is dead"
OVERDUE, DRAINED, FREE = RoomOverdue(KEY), RoomDrained(KEY), SourceFree(KEY)
PEER = PeerId("decode-0", 1)


class Led(RankLeader[Any]):
    """A leader with what its scheduler hears, aborts among it, and the events that it takes."""

    def __init__(self, num_ranks: int, side: str = "decode") -> None:
        self.heard: list[Any] = []
        self.taken: list[tuple[int, Any]] = []
        hear = lambda event, _: self.heard.append(event)  # noqa: E731
        super().__init__(side, num_ranks, None, self.heard.append, hear)

    def on(self, rank: int, event: Any, now_s: float = 0.0) -> None:
        self.taken.append((rank, event))
        super().on(rank, event, now_s)

    def on_raw(self, rank: int, number: int, *events: Any) -> None:
        self.on_rank_events(pack_rank_events(rank, number, events), 0.0)

    def dies(self, rank: int) -> None:
        self.fence(rank, 0.0, self.heard.append)


def success(rank: int) -> RoomEnded:
    return RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux%d" % rank)


def failure(rank: int) -> RoomEnded:
    return RoomEnded(KEY, KVPoll.FAILED, PeerLostError(f"rank {rank} broke", PEER))


def begun(rank: int) -> Bootstrapped:
    return Bootstrapped(KEY, PeerId(f"decode-0/{rank}", 1), 8)


def histories(rank: int) -> list[list[Any]]:
    """All that a decode rank may say of one room."""
    return [[success(rank)], [failure(rank), DRAINED], [failure(rank), OVERDUE, DRAINED], [DRAINED]]


def of_prefill(rank: int) -> list[list[Any]]:
    return [
        [begun(rank), success(rank), FREE],
        [begun(rank), failure(rank), FREE],
        [failure(rank), FREE],
    ]


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
        leader = Led(2)
        for i, (rank, word) in enumerate(order):
            leader.on(rank, word)
            said = [word for _, word in order[: i + 1]]
            good = sum(isinstance(word, RoomEnded) and bool(word.aux) for word in said)
            is_drained = good < 2 and said.count(DRAINED) + good == 2
            assert (DRAINED in leader.heard) == is_drained
        aborts, ends = of(leader.heard, AbortRoom), of(leader.heard, RoomEnded)
        bad = [(rank, word) for rank, word in order if getattr(word, "error", None)]
        if first == 3:
            assert leader.heard == [DRAINED]
        elif not bad:
            assert leader.heard == [success(0)]
        else:
            (rank, word), *_ = bad
            assert ends == [
                word if rank == 0 else same(failure(1), of_rank("decode", 1, word.error))
            ]
            assert leader.heard[-1] == DRAINED
            # Before the scheduler, which may open the next room at once.
            assert leader.heard.index(aborts[0]) < leader.heard.index(ends[0])
        assert leader.heard.count(OVERDUE) == any(word == OVERDUE for _, word in order)
        assert [abort.key for abort in aborts] == ([KEY] if bad else [])
        assert len(leader) == 0


@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", range(4))
def test_a_rank_that_dies_is_done_with_its_rooms(first: int, second: int) -> None:
    """Wherever it dies between its words, and whenever that is said."""
    for kept in range(len(histories(1)[second])):
        said = (histories(0)[first], [*histories(1)[second][:kept], DEAD])
        for order in merges(said):
            leader = Led(2)
            for rank, word in order:
                leader.dies(1) if word is DEAD else leader.on(rank, word)
            ends = of(leader.heard, RoomEnded)
            assert leader.heard.count(DRAINED) == 1
            after = leader.heard[leader.heard.index(DRAINED) + 1 :]
            assert all(word == OVERDUE or isinstance(word, PeerLostError) for word in after)
            assert len(ends) <= 1, "one that had not begun here has ended with its request"
            assert not any(end.poll is KVPoll.SUCCESS for end in ends)
            assert not len(leader)
            assert leader.awaited() == {}


@given(st.data())
def test_whatever_the_order_prefill_hears_what_all_ranks_say(data: st.DataObject) -> None:
    """Also where the process of a rank dies between two of its words."""
    num_ranks = data.draw(st.integers(2, 3))
    said = [list(data.draw(st.sampled_from(of_prefill(rank)))) for rank in range(num_ranks)]
    if (dead := data.draw(st.integers(0, num_ranks - 1))) > 0:
        del said[dead][data.draw(st.integers(0, len(said[dead]) - 1)) :]
        said[dead].append(DEAD)
    succeeds = all(success(rank) in words for rank, words in enumerate(said))
    leader, numbers, num_begun = Led(num_ranks, "prefill"), [0] * num_ranks, 0
    order: list[int] = []
    while any(said):
        rank = data.draw(st.sampled_from([rank for rank, words in enumerate(said) if words]))
        event = said[rank].pop(0)
        order.append(rank)
        if event is DEAD:
            leader.dies(rank)
            leader.on_raw(rank, numbers[rank], FREE)  # what it said before that comes now
        elif rank:
            leader.on_raw(rank, numbers[rank], event)
            numbers[rank] += 1
        else:
            leader.on(0, event)
        # 1. Begun once every rank is, as the first word of the room; free once every rank has said
        # so, or is dead, with the last word of all.
        num_begun += isinstance(event, Bootstrapped)
        words = [word for word in leader.heard if not isinstance(word, PeerLostError)]
        assert of(words, Bootstrapped) in ([], words[:1])
        assert num_begun == num_ranks or not of(leader.heard, Bootstrapped)
        assert (FREE in leader.heard) == (not any(said))
    ends, aborts = of(leader.heard, RoomEnded), of(leader.heard, AbortRoom)
    assert leader.heard.count(FREE) == 1
    # Before a room's first word it is not known here: its request ends without it.
    if dead and order[0] == dead and not numbers[dead]:
        assert len(ends) <= 1
        return
    (ended,) = ends
    assert (ended.poll is KVPoll.SUCCESS) == succeeds
    # After a failure nothing begins.
    assert begun(0) not in words[1:]
    assert succeeds <= (begun(0) in words)
    # 2. The first failure ends the room on all ranks, once.
    assert len(aborts) == (not succeeds)
    if not succeeds:
        assert isinstance(ended.error, PeerLostError)
        assert ended.error.peer == PEER or DEAD in str(ended.error)
    assert not len(leader)


def test_a_rank_that_alone_is_not_done_is_named() -> None:
    leader = Led(3, "prefill")
    for rank in (0, 2):
        leader.on(rank, begun(rank))
        assert leader.awaited() == {}
        leader.on(rank, FREE)
    leader.on(0, SourceFree(OTHER))
    assert leader.awaited() == {1: 1}
    for bad in (0, 3, -1, "1", None):
        with pytest.raises((CallerError, ConfigError), match="rank"):
            leader.dies(bad)  # type: ignore[arg-type]
    leader.dies(1)
    assert leader.awaited() == {2: 1}
    assert len(leader) == 1


def of_rank(side: str, rank: int, error: Exception) -> Exception:
    """What the scheduler is told of a failure on another rank than its own."""
    text = f"{side} rank {rank}: {error}"
    return (
        PeerLostError(text, error.peer) if isinstance(error, PeerLostError) else type(error)(text)
    )


def test_another_ranks_error_is_of_the_class_that_it_was() -> None:
    for error, told in (
        (PromptMismatchError("other"), PromptMismatchError("decode rank 1: other")),
        (OSError("gone"), TransferError("decode rank 1: gone")),
    ):
        leader = Led(2)
        leader.on(1, RoomEnded(KEY, KVPoll.FAILED, error))
        assert leader.heard[1].error == Alike(told)


# --- copies ---------------------------------------------------------------------------------------


def ended(number: int, num_bytes: int, seconds: float, error: Any = None) -> HostCopyDone:
    return HostCopyDone(number, error, num_bytes, seconds)


def test_a_copy_has_ended_when_it_has_on_every_rank() -> None:
    leader = Led(3)
    leader.on(0, ended(1, 10, 0.5))
    leader.on_raw(2, 0, ended(1, 20, 0.2))
    leader.on_raw(1, 0, ended(2, 5, 0.1))  # another copy
    assert leader.heard == []
    leader.on_raw(1, 1, ended(1, 30, 0.9))
    assert leader.heard == [ended(1, 60, 0.9)]
    # One that failed on one rank has failed.
    leader.on(0, ended(2, 5, 0.1))
    leader.on_raw(2, 1, ended(2, 3, 0.25, OSError("a bad page")))
    assert leader.heard[1:] == [ended(2, 13, 0.25, Alike(TransferError("a bad page")))]


def test_a_copy_waits_for_no_rank_that_is_dead() -> None:
    leader = Led(3)
    for rank in (0, 2):
        leader.on(rank, ended(1, 10, 0.5))
    leader.on(2, ended(2, 10, 0.5))
    leader.dies(1)
    error, *heard = leader.heard  # the requests end first
    assert isinstance(error, PeerLostError)
    assert heard == [ended(1, 20, 0.5, error)]
    # One under way on others too, and one of which no rank has said anything.
    leader.on(0, ended(2, 10, 0.5))
    leader.on(2, ended(3, 1, 0.1))
    assert leader.heard[2:] == [ended(2, 20, 0.5, error)]
    leader.on(0, ended(3, 1, 0.1))
    assert leader.heard[3:] == [ended(3, 2, 0.1, error)]


# --- what travels ---------------------------------------------------------------------------------

KEYS = st.builds(RoomKey, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
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


def same(event: DecodeEvent, error: Exception | None = None) -> Any:
    """Equal to the event with its error, or another one, whichever object that is."""
    if not isinstance(event, RoomEnded) or event.error is None:
        return event
    return msgspec.structs.replace(event, error=Alike(error or event.error))


def test_every_event_of_decode_is_tried_here() -> None:
    assert set(EVENTS) == members(DecodeEvent)


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
    leader = Led(4)
    for number in range(2):
        leader.on_raw(rank, number, *said)
    assert leader.taken == 2 * [(rank, same(event)) for event in said]


# --- bytes that are none of ours ------------------------------------------------------------------


def refuses(raw: Any, match: str | None = None) -> None:
    """CallerError, and the leader takes what it would have taken before."""
    leader = Led(3)
    leader.on(1, success(1))
    leader.on_raw(1, 0, DRAINED)
    before = list(leader.taken)
    with pytest.raises(CallerError, match=match):
        leader.on_rank_events(raw, 0.0)
    assert (len(leader), leader.heard) == (1, [])
    leader.on_raw(1, 1, OVERDUE)
    leader.on_raw(2, 0, DRAINED)
    assert leader.taken[len(before) :] == [(1, OVERDUE), (2, DRAINED)]


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (pack_rank_events(0, 0, [DRAINED]), "a message of rank 0"),
        (pack_rank_events(3, 0, [DRAINED]), "a message of rank 3"),
        (pack_rank_events(-1, 0, [DRAINED]), "a message of rank -1"),
        (pack_rank_events(1, 0, [DRAINED]), "message 0 of rank 1 came where 1 is the next"),
        (pack_rank_events(1, 2, [DRAINED]), "message 2 of rank 1 came where 1 is the next"),
        (pack_rank_events(2, 1, [DRAINED]), "message 1 of rank 2 came where 0 is the next"),
        (pack_rank_events(1, 1, [DRAINED]).replace(b"drained", b"burnt12"), "burnt"),
        (pack_rank_events(1, 1, [FREE]), "source-free"),
        (b"junk", "no message of a rank"),
        (7, "bytes are needed"),
    ],
)
def test_news_that_are_not_the_next_of_a_rank_are_refused(raw: Any, match: str) -> None:
    refuses(raw, match)
