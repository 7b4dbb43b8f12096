"""A prefill rank that several decode ranks read from: which of them speaks; and a decode rank that
several prefill ranks write to. Their rooms' machines: tests/unit/protocol."""

import dataclasses
from typing import Any

import msgspec
import pytest

from prefixkv.config import CurveConfig
from prefixkv.control.effects import (
    AddPeer,
    AgentDestroyed,
    Cancel,
    Connect,
    CopyDone,
    RemovePeer,
    Renew,
)
from prefixkv.errors import (
    AbortedError,
    HandshakeError,
    PeerLostError,
    PromptMismatchError,
    RequestError,
    TransferError,
    TransferTimeoutError,
)
from prefixkv.memory.kv_layout import BLOCK_BYTES, RelayArea
from prefixkv.protocol.commands import AbortRoom, Fence, MeetPrefill, OpenRoom
from prefixkv.protocol.events import Bootstrapped, PrefillReady, RoomDrained, RoomEnded, SourceFree
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Fenced,
    Heartbeat,
    Hello,
    HelloReply,
    HelloWanted,
    LeaseAsk,
    LeaseGrant,
    Outcome,
    Promise,
    PromiseAck,
    Topology,
)
from prefixkv.staging.receiver import Scatter
from prefixkv.staging.sender import Gather
from prefixkv.transport.base import Arrived, WriteDrained, WriteJob
from tests.unit.control.mesh_wire import (
    ADDRESSES,
    AREA,
    DIGEST,
    KEY,
    PAGE_SIZE,
    SENT,
    SLOTS,
    TIMING,
    Readers,
    Writers,
    add_room,
    bodies,
    hello,
    promise,
)
from tests.unit.control.wire import Alike, of

A, B = PeerId("d", 5), PeerId("d/1", 5)
WHY = AbortedError("enough")


def test_claims_of_one_worker_are_joined_and_those_of_another_are_of_its_own_room() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    other = peer.greet(2, "x")
    assert bodies(peer.say(a, promise()), PromiseAck)
    for stranger in other:
        assert bodies(peer.say(stranger, promise()), PromiseAck)
    assert peer.on(add_room()) == []
    assert of(peer.say(b, promise()), Bootstrapped) == [Bootstrapped(SENT, a, 0)]
    for stranger in other:
        assert bodies(peer.say(stranger, Abort(*SENT.numbers, "no", 1)), Drained), (
            "nothing goes there"
        )
    assert peer.control.num_rooms == 1
    posts = of(peer.chunk(0, [1, 2, 3], last=True), WriteJob)
    assert [post.peer for post in posts] == [a, b]


def test_every_reader_proves_its_own_promise() -> None:
    for liar in (0, 1):
        peer = Readers(tp=1)
        readers = peer.greet(2)
        assert peer.on(add_room()) == []
        for reader in readers:
            proof = promise().digest if reader != readers[liar] else bytes(32)
            effects = peer.say(reader, msgspec.structs.replace(promise(), digest=proof))
            if reader == readers[liar]:
                break
            assert not of(effects, Bootstrapped)
        [ended] = of(effects, RoomEnded)
        assert isinstance(ended.error, PromptMismatchError)
        assert not bodies(peer.chunk(0, [1, 2, 3], last=True), Outcome)


def refused(said: list[Any]) -> str:
    ((_, reply),) = bodies(said, HelloReply)
    return str(reply.refused)


STRANGERS: list[tuple[PeerId, Any, str]] = [
    # A rank is of the worker that its name says, and of no other: else it would read another's
    # prompt, since a room is shared out over a worker's ranks.
    *(
        (PeerId(name, 6), hello(2, 1, A), "name")
        for name in ("twin", "twin/1", "d/1/1", "d/01", "d/2")
    ),
    (PeerId("twin", 6), hello(2, 0, A), "name"),
    (PeerId("d", 6), hello(2, 0, PeerId("d", 7)), "name"),
    (PeerId("d/1", 9), hello(4, 1, A), "topology"),
]


@pytest.mark.parametrize(("stranger", "says", "text"), STRANGERS)
def test_what_is_no_rank_of_the_worker_that_it_names_is_refused(
    stranger: PeerId, says: Any, text: str
) -> None:
    peer = Readers(tp=1)
    peer.greet(2)
    assert text in refused(peer.say(stranger, says))
    assert set(peer.control.peers(peer.now_s)) == {A, B}


def test_a_rank_of_a_worker_that_is_over_is_refused_by_name() -> None:
    peer = Readers(tp=1)
    peer.greet(2)
    peer.greet(1, incarnation=6)
    why = refused(peer.say(PeerId("d/1", 9), hello(2, 1, A)))
    assert why.startswith("d life 5 was superseded by life 6: the name 'd' is taken by another")


def test_workers_are_counted_and_not_their_ranks() -> None:
    peer = Readers(tp=1)
    assert TIMING.max_peers == 2
    assert all(len(peer.greet(2, name)) == 2 for name in ("d", "e"))
    third = PeerId("f", 5)
    text = refused(peer.say(third, hello(1, 0, third)))
    assert ("max_peers" in text, "'d'" in text, "'e'" in text) == (True, False, False)
    peer.greet(2, "e", incarnation=6)
    assert len(peer.control.peers(peer.now_s)) == 4, "a restart takes its own place"


def parked(peer: Readers) -> list[int]:
    """By reader, the promises that wait for their requests."""
    return [known.num_parked for known in peer.control._peers.all()]


def test_parked_promises_are_counted_by_reader_and_come_free_with_the_request() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    for room in range(TIMING.max_parked_per_peer):
        for reader in (a, b):
            assert bodies(
                peer.say(reader, msgspec.structs.replace(promise(), room=room)), PromiseAck
            )
    full = msgspec.structs.replace(promise(), room=50)
    assert "limit" in bodies(peer.say(a, full), Outcome)[0][1].error
    assert parked(peer) == [TIMING.max_parked_per_peer] * 2
    peer.on(add_room(RoomKey(0, 0, SENT.decode), 10))
    assert parked(peer) == [TIMING.max_parked_per_peer - 1] * 2
    peer.say(b, Abort(1, 0, "no", 1))
    assert parked(peer) == [TIMING.max_parked_per_peer - 2] * 2
    peer.after(TIMING.parked_timeout_s)
    assert parked(peer) == [0, 0]


def test_a_reader_that_leaves_takes_no_other_readers_proof_with_it() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    peer.on(add_room())
    for reader in (a, b):
        peer.say(reader, promise())
    to_a, to_b = of(peer.chunk(0, [1, 2, 3]), WriteJob)
    peer.say(b, Fenced())
    peer.ended(to_b.job_id, WHY)
    peer.ended(to_a.job_id, TransferError("after its post"), drained=False)
    assert bodies(peer.say(a, Abort(*SENT.numbers, "no", 1)), Drained) == [], (
        "it may still land in the other's pages"
    )
    ((to, drained),) = bodies(peer.on(WriteDrained(to_a.job_id)), Drained)
    assert (to, drained.settle) == (b"d", True)
    assert peer.control.num_rooms == 0


def test_a_lone_reader_of_replicas_is_written_by_one_and_told_by_all() -> None:
    """MLA: rank 1 of two writes to none, and its engine waits for the room as well."""
    digest = msgspec.structs.replace(DIGEST, attention="mla", num_kv_heads=1)
    peer = Readers(tp=2, rank=1, digest=digest)
    layout = msgspec.structs.replace(
        hello(4, 0, A).layout, attention="mla", slabs=hello(4, 0, A).layout.slabs[::2]
    )  # fmt: skip
    said = peer.say(A, hello(1, 0, A, digest=digest, layout=layout))
    assert [body.refused for _, body in bodies(said, HelloReply)] == [""]
    assert of(said, AddPeer) == []
    peer.say(A, promise())
    assert of(peer.on(add_room()), Bootstrapped)
    actions = peer.chunk(0, [1, 2, 3], last=True)
    assert of(actions, WriteJob) == []
    assert [body.num_pages for _, body in bodies(actions, Outcome)] == [3]


KEYS = {"key d": "d", "key e": "e", "key r": "e/1", "key 1": "x", "key 2": "x"}
GREETINGS = [  # in this order: name, rank, key, whether it is let in
    ("e", 0, "key e", True),
    ("d/1", 1, "key e", False),
    *((name, 1, "key d", False) for name in ("d/x", "d/", "/1")),
    ("/1", 1, "", False),
    ("e/1", 1, "key e", False),  # another key's own name
    ("e/1", 1, "key r", True),  # a rank with a key of its own
    ("d/1", 1, "key d", True),
    ("d", 0, "key d", True),
    *((f"e/{rank}", 0, "key e", False) for rank in range(2, 20)),  # a key has one worker
    ("x", 0, "key 1", True),
    ("x/1", 1, "key 2", False),  # the same name by another key
    ("x/1", 1, "key 1", True),
]


def test_a_worker_of_several_ranks_has_one_key() -> None:
    curve = CurveConfig("p" * 40, "s" * 40, allowed_clients=KEYS)
    peer = Readers(timing=dataclasses.replace(TIMING, curve=curve, max_peers=50))
    for name, rank, key, is_let_in in GREETINGS:
        me = PeerId(name, 5)
        worker = PeerId(name.partition("/")[0], 5) if rank else me
        said = peer.say(me, hello(2, rank, worker), key)
        assert bool(of(said, AddPeer)) is is_let_in, (name, key)


# --- a room is of one life of a worker, and of one process for each rank: another hears so --------

ABORT = Abort(*SENT.numbers, "no", 1)


def claimed_by_rank_1() -> Readers:
    """Rank 1 has promised its pages for the room; its worker's rank 0 has started again."""
    peer = Readers(tp=1)
    peer.greet(2)
    peer.on(add_room())
    assert bodies(peer.say(B, promise()), PromiseAck)
    assert not of(peer.say(PeerId("d", 6), hello(2, 0, PeerId("d", 6))), RoomEnded)
    return peer


def test_the_next_life_of_a_worker_shares_no_room_with_the_one_before() -> None:
    """Its rank 0 may draw the same ticket; its rank 1 never heard of these pages."""
    peer = claimed_by_rank_1()
    effects = peer.say(PeerId("d", 6), promise())
    assert not of(effects, Bootstrapped)
    ((to, refusal),) = bodies(effects, Outcome)
    assert (to, refusal.ok, refusal.drained) == (b"d", False, True)
    assert "another life's" in refusal.error


def test_the_next_life_of_a_worker_ends_no_room_of_the_one_before() -> None:
    peer = claimed_by_rank_1()
    effects = peer.say(PeerId("d", 6), ABORT)
    assert not of(effects, RoomEnded)
    assert [to for to, _ in bodies(effects, Drained)] == [b"d"], "nothing of ours goes there"


def rank_1_started_again() -> Readers:
    """Both ranks have promised their pages, a write to each is under way, and rank 1 is another
    process by now, of the same worker."""
    peer = Readers(tp=1)
    peer.on(add_room())
    for reader in peer.greet(2):
        peer.say(reader, promise())
    assert len(of(peer.chunk(0, [1, 2, 3]), WriteJob)) == 2
    assert of(peer.say(PeerId("d/1", 6), hello(2, 1, A)), RoomEnded)
    return peer


@pytest.mark.parametrize("word", ["promise", "abort"])
def test_another_process_of_a_rank_is_answered_for_itself(word: str) -> None:
    """What is under way goes to the pages of the process before it, so none of its own is at
    stake."""
    peer = rank_1_started_again()
    if word == "promise":
        ((to, refusal),) = bodies(peer.say(PeerId("d/1", 6), promise()), Outcome)
        assert (to, refusal.ok, refusal.drained) == (b"d/1", False, True)
    else:
        assert [to for to, _ in bodies(peer.say(PeerId("d/1", 6), ABORT), Drained)] == [b"d/1"]


def test_what_was_under_way_to_the_process_before_is_waited_for() -> None:
    peer = rank_1_started_again()
    peer.say(PeerId("d/1", 6), ABORT)
    assert not bodies(peer.say(A, ABORT), Drained)
    (first, second) = sorted(peer.control._rooms.jobs)
    assert not bodies(peer.ended(first), Drained)
    assert [to for to, _ in bodies(peer.ended(second), Drained)] == [b"d"]
    assert peer.control.num_rooms == 0


# --- what is said wrongly -------------------------------------------------------------------------

LEASE = 4 * BLOCK_BYTES  # one unit page of our part of the model, and as large as a slot
BAD_AREAS = {
    "no memory": (RelayArea(0, 2 * LEASE, LEASE), "is no memory"),
    "negative": (RelayArea(-BLOCK_BYTES, 2 * LEASE, LEASE), "is no memory"),
    "beyond all memory": (RelayArea(2**63 - 1, 2 * LEASE, LEASE), "is no memory"),
    "no bytes": (RelayArea(BLOCK_BYTES, 0, 0), "num_bytes is 0"),
    "an area of no whole blocks": (RelayArea(BLOCK_BYTES, 2 * LEASE + 1, LEASE), "num_bytes"),
    "leases of no whole blocks": (RelayArea(BLOCK_BYTES, 2 * LEASE, LEASE + 1), "lease_bytes"),
    "a lease larger than the area": (RelayArea(BLOCK_BYTES, LEASE, 2 * LEASE), "the area has"),
    "a unit that does not fit a lease": (
        RelayArea(BLOCK_BYTES, 2 * LEASE, BLOCK_BYTES),
        "cannot take one unit page",
    ),
    "a lease that does not fit a slot": (
        RelayArea(BLOCK_BYTES, 2**40, 2**40),
        "cannot take our section",
    ),
}


@pytest.mark.parametrize(("area", "text"), BAD_AREAS.values(), ids=BAD_AREAS)
def test_a_staging_area_that_cannot_be_is_refused_with_the_reason(
    area: RelayArea, text: str
) -> None:
    peer = Readers(page_size=16, staging=SLOTS)
    why = refused(peer.say(A, hello(2, 0, A, page_size=16, relay=area)))
    assert "staging" in why
    assert text in why
    assert peer.control.counters["handshakes_refused"] == 1
    fitting = RelayArea(BLOCK_BYTES, 2 * LEASE, LEASE)
    assert not refused(peer.say(A, hello(2, 0, A, page_size=16, relay=fitting)))


@pytest.mark.parametrize(
    ("tp", "slots", "area", "staged"),
    [(1, SLOTS, AREA, True), (1, None, AREA, False), (1, SLOTS, None, False),
     (2, SLOTS, AREA, False)],  # a whole rank needs no staging
)  # fmt: skip
def test_slices_are_staged_where_both_can(tp: int, slots: Any, area: Any, staged: bool) -> None:
    said = Readers(tp=tp, staging=slots).say(A, hello(2, 0, A, relay=area))
    (added,) = of(said, AddPeer)
    assert (added.relayed, bodies(said, HelloReply)[0][1].relayed) == (staged, staged)
    assert added.memory.relay == (area if staged else None)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("tp_size", {"tensor_parallel": 3}),
        ("num_kv_heads", {"tensor_parallel": 4}),
        ("num_layers", {"pipeline_parallel": 2}),
        ("stage_layers", {"stage_layers": (1, 5)}),
        ("page_size", {"page_size": 6}),
        ("layout", {"page_size": 8}),
        ("tp_size * pp_size", {"tensor_parallel": 2**30, "pipeline_parallel": 2**20}),
    ],
)
def test_layouts_that_do_not_divide_or_hold_another_share_are_refused(
    text: str, changes: dict[str, Any]
) -> None:
    good = hello(2, 0, A)
    topology = msgspec.structs.replace(good.topology, **changes)
    assert text in refused(Readers().say(A, msgspec.structs.replace(good, topology=topology)))


# --- what is staged -------------------------------------------------------------------------------


def staged() -> tuple[Readers, PeerId, PeerId]:
    """A room that two readers have promised and the engine has added; what goes to either is a
    slice."""
    peer = Readers(staging=SLOTS)
    a, b = peer.greet(2, relay=AREA)
    peer.on(add_room())
    for reader in (a, b):
        peer.say(reader, promise())
    return peer, a, b


def grant(piece: int = 0, lease_id: int = 1, offset: int = 0, ticket: int = 1) -> LeaseGrant:
    return LeaseGrant(*SENT.numbers, piece, lease_id, offset, ticket)


def gathered(peer: Readers, reader: PeerId, said: LeaseGrant) -> WriteJob:
    """This reader grants a lease, and the slot that is gathered for it is written."""
    (gather,) = peer.say(reader, said)
    (write,) = peer.on(CopyDone(gather.gather_id))
    assert isinstance(write, WriteJob)
    return write


def test_a_slice_is_asked_for_gathered_and_written_into_its_lease() -> None:
    peer, a, b = staged()
    ask = LeaseAsk(*SENT.numbers, 0, piece=0, first_unit=0, num_units=3, ticket=1)
    assert peer.chunk(0, [1, 2, 3]) == [(b"d", ask), (b"d/1", ask)]
    (gather,) = peer.say(b, grant(lease_id=5, offset=4 * BLOCK_BYTES))
    assert isinstance(gather, Gather)
    assert (gather.peer, gather.src_units.tolist()) == (b, [1, 2, 3])
    assert gather.num_bytes == 3 * 4096
    (write,) = peer.on(CopyDone(gather.gather_id))
    assert (write.peer, write.route, write.ready) == (b, "staging", None)
    assert write.src_pages.tolist() == [4 * gather.slot + block for block in range(3)]
    assert write.dst_pages.tolist() == [4, 5, 6]
    assert write.tag == ChunkTag(5, *SENT.numbers, rank=0, chunk=0, lease_id=5, ticket=1)
    assert peer.ended(write.job_id) == []
    peer.chunk(3, [], last=True)
    (ended, to_a, to_b, free) = peer.ended(gathered(peer, a, grant()).job_id)
    assert (ended, free) == (RoomEnded(SENT, KVPoll.SUCCESS), SourceFree(SENT))
    assert [(to, body.ok, body.num_pages) for to, body in (to_a, to_b)] == [
        (b"d", True, 3),
        (b"d/1", True, 3),
    ]


def test_an_ask_that_is_not_answered_is_repeated_and_wakes_us_for_it() -> None:
    peer, a, _ = staged()
    peer.chunk(0, [1, 2, 3])
    gathered(peer, a, grant())
    assert peer.control.wake_s <= peer.now_s + TIMING.resend_s
    assert [to for to, _ in bodies(peer.after(TIMING.resend_s), LeaseAsk)] == [b"d/1"]


def test_a_gather_that_fails_fails_the_room_and_nothing_else_of_it_is_posted() -> None:
    peer, a, b = staged()
    peer.chunk(0, [1, 2, 3])
    (first,), (second,) = peer.say(a, grant()), peer.say(b, grant())
    said = peer.on(CopyDone(first.gather_id, OSError("no such page")))
    (failed,) = of(said, RoomEnded)
    assert "no such page" in str(failed.error)
    assert isinstance(failed.error, TransferError)
    assert of(said, SourceFree) == [], "the other gather reads the source"
    said = peer.on(CopyDone(second.gather_id))
    assert of(said, WriteJob) == []
    assert of(said, SourceFree) == [SourceFree(SENT)]


def test_a_staged_write_that_failed_undrained_keeps_its_slot_and_drains_no_reader() -> None:
    peer, a, b = staged()
    peer.chunk(0, [1, 2, 3])
    write = gathered(peer, a, grant())
    said = peer.ended(write.job_id, OSError("reset"), drained=False)
    assert (len(of(said, RoomEnded)), len(of(said, Renew))) == (1, 1)
    assert of(said, SourceFree) == [SourceFree(SENT)], "it reads the slot, and not the pages"
    assert [body.drained for _, body in bodies(said, Outcome)] == [False, False]
    for reader in (a, b):
        assert bodies(peer.say(reader, Abort(*SENT.numbers, "no", 1)), Drained) == []
    assert len(peer.control.relay.free_slots) == 1
    drained = bodies(peer.on(WriteDrained(write.job_id)), Drained)
    assert [(to, body.settle) for to, body in drained] == [(b"d", True), (b"d/1", True)]
    assert len(peer.control.relay.free_slots) == 2


def test_a_room_that_is_over_is_forgotten_so_that_its_number_may_be_staged_again() -> None:
    peer, a, b = staged()
    for ticket in (1, 2):
        if ticket == 2:
            for reader in (a, b):
                peer.say(reader, promise(ticket=2))
            peer.on(add_room())
        assert len(bodies(peer.chunk(0, [1, 2, 3], last=True), LeaseAsk)) == 2
        for reader in (a, b):
            said = peer.ended(gathered(peer, reader, grant(ticket=ticket)).job_id)
        assert of(said, SourceFree) == [SourceFree(SENT)]


@pytest.mark.parametrize("how", ["fence", "farewell", "restart"])
def test_a_staged_reader_that_goes_takes_its_jobs_with_it(how: str) -> None:
    peer, a, b = staged()
    peer.chunk(0, [1, 2, 3])
    write = gathered(peer, a, grant())
    newer = PeerId(b.name, b.incarnation + 1)
    said = {
        "fence": lambda: peer.on(Fence(b)),
        "farewell": lambda: peer.say(b, Fenced()),
        "restart": lambda: peer.say(newer, hello(2, 1, a, relay=AREA)),
    }[how]()
    assert Cancel(write.job_id) in said
    assert RemovePeer(b) in said
    assert set(peer.control.relay.peers) == ({a, newer} if how == "restart" else {a})
    assert of(peer.ended(write.job_id, WHY), SourceFree) == [SourceFree(SENT)]
    assert len(peer.control.relay.jobs) == 0


def test_a_room_that_is_added_again_goes_on_with_what_is_staged_of_it() -> None:
    peer, a, b = staged()
    added_already = Alike(RequestError("room 7 generation 0 was added already"))
    refused = [RoomEnded(SENT, KVPoll.FAILED, added_already), SourceFree(SENT)]
    peer.chunk(0, [1, 2])
    assert peer.on(add_room()) == refused, "while leases are asked for"
    for reader in (a, b):
        peer.ended(gathered(peer, reader, grant()).job_id)
    assert peer.on(add_room()) == refused, "while nothing is under way"
    asks = [ask for _, ask in bodies(peer.chunk(2, [3], last=True), LeaseAsk)]
    assert [(ask.piece, ask.first_unit) for ask in asks] == [(1, 2)] * 2


ENOUGH = AbortRoom(KEY, "enough")


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


def staged_writers() -> Writers:
    return Writers(staging=AREA).opened(relayed=True)


def test_a_grant_goes_to_all_writers_and_a_lease_is_scattered_by_their_sections() -> None:
    pair = staged_writers()
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
    pair = staged_writers()
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
    pair = staged_writers()
    other = Promise(8, 0, 10, 0, promise().pages, 2)
    pair.open(other)
    said = asked(pair, 1, **bad)
    assert "piece" in str(ended(said).error)
    assert pair.control.counters["frames_dropped"] == 1
    assert len(list(pair.control.rooms())) == 2
    assert [machine.poll.ended for machine in pair.control.rooms()] == [True, False]


def test_asks_of_another_use_or_where_nothing_is_staged_are_dropped() -> None:
    pair = staged_writers()
    assert asked(pair, 0, ticket=2) == []
    assert pair.say(1, LeaseAsk(*KEY.numbers, 0, 0, 0, 1, 1)) == [], "in another rank's name"
    assert pair.control.counters["frames_dropped"] == 2
    plain = Writers().opened()
    assert asked(plain, 0) == []
    assert next(iter(plain.control.rooms())).poll is KVPoll.WAITING_FOR_INPUT
