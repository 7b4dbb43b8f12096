"""A decode rank that several prefill ranks write to."""

from typing import Any

import msgspec
import pytest

from prefixkv.control.effects import AgentDestroyed, Connect
from prefixkv.errors import AbortedError, HandshakeError, PeerLostError, TransferTimeoutError
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.protocol.commands import AbortRoom, Fence, MeetPrefill, OpenRoom
from prefixkv.protocol.events import PrefillReady, RoomDrained, RoomEnded
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Fenced,
    Heartbeat,
    Hello,
    HelloWanted,
    LeaseAsk,
    LeaseGrant,
    Outcome,
    Promise,
    Topology,
)
from prefixkv.staging.receiver import Scatter
from prefixkv.transport.base import Arrived
from tests.unit.control.mesh_wire import (
    ADDRESSES,
    AREA,
    KEY,
    PAGE_SIZE,
    TIMING,
    Writers,
    bodies,
    promise,
)
from tests.unit.control.wire import of

ENOUGH, WHY = AbortRoom(KEY, "enough"), AbortedError("enough")


def ended(actions: list[Any]) -> RoomEnded:
    (one,) = of(actions, RoomEnded)
    return one


def test_the_leader_says_where_the_others_are_and_all_are_promised_at_once() -> None:
    pair = Writers(prefill_tp=4, tp=2, rank=1)  # ranks 2 and 3 write to it
    assert of(pair.open(), Connect) == [Connect(ADDRESSES[0])]
    assert of(pair.reply(0), Connect) == [Connect(ADDRESSES[2]), Connect(ADDRESSES[3])]
    assert bodies(pair.reply(3), Promise) == []
    first = msgspec.structs.replace(promise(), life=pair.peers[2].incarnation)
    assert bodies(pair.reply(2), Promise) == [(ADDRESSES[2], first), (ADDRESSES[3], first)]
    assert pair.expected == 1
    again = msgspec.structs.replace(first, room=8, ticket=2)
    assert bodies(pair.open(again), Promise) == [(ADDRESSES[2], again), (ADDRESSES[3], again)], (
        "known by now"
    )


def test_a_process_that_speaks_as_two_ranks_is_fenced_as_any() -> None:
    pair = Writers()
    pair.peers = [pair.peers[0]] * 2
    pair.opened()
    pair.on(ENOUGH)
    pair.say(1, Drained(*KEY.numbers, 1, 1))
    assert of(pair.on(Fence(pair.peers[0])), RoomDrained) == [RoomDrained(KEY)]


def test_a_worker_takes_what_the_smallest_of_its_ranks_takes() -> None:
    pair = Writers()
    pair.on(MeetPrefill(ADDRESSES[0]))
    pair.reply(0, max_tokens=64)
    assert of(pair.reply(1, max_tokens=96), PrefillReady) == [PrefillReady(ADDRESSES[0], 64)]


def test_a_rank_speaks_for_itself_only() -> None:
    pair = Writers().opened()
    for body in (
        Outcome(*KEY.numbers, 0, True, 1, 3, b"", "", True, 1),
        Outcome(*KEY.numbers, 9, True, 1, 3, b"", "", True, 1),
        Drained(*KEY.numbers, 0, 1),
    ):
        assert pair.say(1, body) == []
    assert pair.control.counters["frames_dropped"] == 3
    assert next(iter(pair.control.rooms())).poll is KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize("every", ["0.0.0.0", "*", "[::]"])
@pytest.mark.parametrize("host", ["10.0.0.5", "[fd00::5]", "prefill-0"])
def test_a_rank_on_every_address_of_its_host_is_reached_at_its_leaders(
    every: str, host: str
) -> None:
    """An address of every interface is none of another machine's."""
    pair, leader = Writers(), f"tcp://{host}:14579"
    pair.on(OpenRoom(promise(), leader))
    said = pair.reply(0, address=leader, endpoints=("", f"tcp://{every}:5001"))
    assert of(said, Connect) == [Connect(f"tcp://{host}:5001")]


def test_a_rank_on_every_address_is_reached_here_where_its_leader_has_a_path() -> None:
    pair, leader = Writers(), "ipc:///run/kv"
    pair.on(OpenRoom(promise(), leader))
    said = pair.reply(0, address=leader, endpoints=("", "tcp://0.0.0.0:5001"))
    assert of(said, Connect) == [Connect("tcp://127.0.0.1:5001")]


def test_farewell_is_said_to_each_that_is_known() -> None:
    pair = Writers().opened()
    pair.on(MeetPrefill("tcp://silent"))
    said = bodies(pair.on(AgentDestroyed()), Fenced)
    assert said == [(address, Fenced()) for address in ADDRESSES[:2]]


# --- leaders that lie ---------------------------------------------------------------------------


LIES: dict[str, tuple[list[tuple[int, dict[str, Any]]], str]] = {
    "rank 1 for a leader": ([(1, {"address": ADDRESSES[0]})], "rank"),
    "too few endpoints": ([(0, {"endpoints": ("",)})], "endpoints"),
    "itself as another rank": ([(0, {"endpoints": ("", ADDRESSES[0])})], "rank"),
    "another rank": ([(0, {}), (1, {"rank": 0})], "rank"),
    "another topology": ([(0, {}), (1, {"topology": Topology(PAGE_SIZE, 4)})], "topology"),
    "one that stages and one that does not": (
        [(0, {"relayed": True}), (1, {"relayed": False})], "staging",
    ),
    "staging, where decode has none": ([(0, {"relayed": True}), (1, {"relayed": True})], "staging"),
}  # fmt: skip


@pytest.mark.parametrize(("replies", "text"), LIES.values(), ids=LIES)
def test_ranks_that_cannot_be_of_one_worker_are_refused(
    replies: list[tuple[int, dict[str, Any]]], text: str
) -> None:
    pair = Writers(staging=AREA if text == "staging" and not replies[1][1]["relayed"] else None)
    pair.open()
    for rank, changes in replies:
        said = pair.reply(rank, **changes)
    error = ended(said).error
    assert isinstance(error, HandshakeError)
    assert text in str(error)
    assert pair.control.num_rooms == 0


def test_what_answers_at_a_forgotten_ranks_address_is_looked_at_like_the_first() -> None:
    pair = Writers().opened()
    for rank in range(2):
        pair.outcome(rank, ok=False)
    while ADDRESSES[1] in pair.control._links:
        pair.after(TIMING.heartbeat_s)
        pair.say(0, Heartbeat())
    # Another worker's leader, by now.
    pair.on(MeetPrefill(ADDRESSES[1]))
    pair.reply(1, by=PeerId("other", 6), rank=0, topology=Topology(PAGE_SIZE, 1))
    said = pair.open(msgspec.structs.replace(promise(), room=8, ticket=2))
    assert bodies(said, Promise) == []
    assert isinstance(ended(said).error, HandshakeError)


def test_a_rank_that_never_answers_fails_the_room_by_its_deadline_with_no_rank_told() -> None:
    pair = Writers()
    pair.open()
    pair.reply(0)
    said = []
    for _ in range(round(TIMING.bootstrap_timeout_s / 0.25)):
        said += pair.after(0.25)
    assert isinstance(ended(said).error, TransferTimeoutError)
    assert of(said, RoomDrained) == [RoomDrained(KEY)]
    assert bodies(said, Promise) == []


def test_a_writer_that_falls_silent_after_the_promise_holds_the_pages_alone() -> None:
    pair = Writers().opened()
    pair.outcome(0)
    said = []
    for _ in range(round(TIMING.waiting_timeout_s / 0.25) + 4):
        said += pair.after(0.25)
    assert isinstance(ended(said).error, TransferTimeoutError)
    assert {to for to, _ in bodies(said, Abort)} == {ADDRESSES[1]}, "rank 0 has proved it"
    assert of(said, RoomDrained) == []
    assert of(pair.say(1, Drained(*KEY.numbers, 1, 1)), RoomDrained) == [RoomDrained(KEY)]


# --- one of them is another now -------------------------------------------------------------------


@pytest.mark.parametrize("word", ["reply", "wanted"])
def test_a_writer_that_was_restarted_fails_the_room_and_only_a_fence_drains_it(word: str) -> None:
    pair = Writers().opened()
    newer = PeerId("p/1", 6)
    if word == "wanted":
        assert bodies(pair.say(1, HelloWanted(), by=newer), Hello)
    said = pair.reply(1, by=newer)
    assert isinstance(ended(said).error, PeerLostError)
    assert [to for to, _ in bodies(said, Abort)] == [ADDRESSES[0]], (
        "the new one knows nothing of it"
    )
    assert pair.say(1, Drained(*KEY.numbers, 1, 1), by=newer) == []
    pair.say(0, Drained(*KEY.numbers, 0, 1))
    assert of(pair.on(Fence(pair.peers[1])), RoomDrained) == [RoomDrained(KEY)]


def test_an_abort_before_the_promise_is_said_to_all_that_would_have_had_it() -> None:
    pair = Writers()
    pair.open()
    assert of(pair.on(ENOUGH), RoomDrained) == [RoomDrained(KEY)]
    pair.reply(0)
    assert [to for to, _ in bodies(pair.reply(1), Abort)] == [ADDRESSES[0], ADDRESSES[1]]
    assert pair.control.num_rooms == 1
    for rank in (0, 1):
        assert pair.say(rank, Drained(*KEY.numbers, rank, 1)) == [], (
            "no news: the pages were never told"
        )
    assert pair.control.num_rooms == 0


# --- staged ---------------------------------------------------------------------------------------


def asked(
    pair: Writers, rank: int, piece: int = 0, first: int = 0, count: int = 1, **changes: Any
) -> list[Any]:
    fields = {"ticket": 1, **changes}
    return pair.say(rank, LeaseAsk(*KEY.numbers, rank, piece, first, count, **fields))


def whole(pair: Writers, rank: int, piece: int, lease_id: int) -> Arrived:
    """The notification of all that this writer writes of a lease."""
    staging = pair.control.relay
    lease = staging.leases.get(lease_id)
    (num_bytes,) = [one.num_bytes for one in staging.sections_of(lease) if one.rank == rank]
    blocks = -(-num_bytes // BLOCK_BYTES)
    tag = ChunkTag(5, *KEY.numbers, rank, piece, lease_id=lease_id, num_pages=blocks, ticket=1)
    return Arrived(tag.pack())


def staged() -> Writers:
    return Writers(staging=AREA).opened(relayed=True)


def test_a_grant_goes_to_all_writers_and_a_lease_is_scattered_by_their_sections() -> None:
    pair = staged()
    assert asked(pair, 1) == []
    said = bodies(asked(pair, 0), LeaseGrant)
    assert [to for to, _ in said] == [ADDRESSES[0], ADDRESSES[1]]
    assert said[0][1] == said[1][1]
    lease = said[0][1].lease_id
    for rank in (1, 0):
        actions = pair.on(whole(pair, rank, 0, lease))
    (scatter,) = of(actions, Scatter)
    assert scatter.units.tolist() == [3]
    assert [
        (part.first_head, part.num_heads) for _, part in sorted(scatter.plan.parts.items())
    ] == [(0, 2), (2, 2)]
    assert [section.rank for section in scatter.sections] == [0, 1]


def test_restarted_writers_without_staging_write_directly() -> None:
    pair = staged()
    for rank in (0, 1):
        pair.peers[rank] = PeerId(f"p/{rank}", 6)
        pair.reply(rank, relayed=False)
    assert of(pair.on(Fence(PeerId("p/0", 5))), RoomDrained) == []
    assert of(pair.on(Fence(PeerId("p/1", 5))), RoomDrained) == [RoomDrained(KEY)]
    assert len(bodies(pair.open(promise(2)), Promise)) == 2
    pair.outcome(0, ticket=2)
    success = RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux0")
    assert of(pair.outcome(1, ticket=2), RoomEnded) == [success]


@pytest.mark.parametrize(
    "bad", [{"count": 4}, {"first": 1}, {"count": 3}], ids=["many", "gap", "large"]
)
def test_an_ask_that_cannot_be_fails_its_room_alone(bad: dict[str, int]) -> None:
    pair = staged()
    other = Promise(8, 0, 10, 0, promise().pages, 2)
    pair.open(other)
    said = asked(pair, 1, **bad)
    assert "piece" in str(ended(said).error)
    assert pair.control.counters["frames_dropped"] == 1
    assert len(list(pair.control.rooms())) == 2
    assert [machine.poll.ended for machine in pair.control.rooms()] == [True, False]


def test_asks_of_another_use_or_where_nothing_is_staged_are_dropped() -> None:
    pair = staged()
    assert asked(pair, 0, ticket=2) == []
    assert pair.say(1, LeaseAsk(*KEY.numbers, 0, 0, 0, 1, 1)) == [], "in another rank's name"
    assert pair.control.counters["frames_dropped"] == 2
    plain = Writers().opened()
    assert asked(plain, 0) == []
    assert next(iter(plain.control.rooms())).poll is KVPoll.WAITING_FOR_INPUT
