"""Prefill's peers and rooms opposite a hand-played decode worker."""

import dataclasses
from typing import Any

import msgspec
import pytest

from prefixkv.config import CurveConfig
from prefixkv.control.effects import (
    AddPeer,
    AgentDestroyed,
    Cancel,
    ConnectFailed,
    CopyDone,
    FrameFailed,
    FrameReceived,
    Reached,
    RemovePeer,
    Renew,
    SendFrame,
    Tick,
    Unreached,
)
from prefixkv.control.prefill.control import PrefillInput
from prefixkv.digest import prompt_digest
from prefixkv.errors import InternalError, PeerLostError, PromptMismatchError
from prefixkv.memory.kv_layout import Slab
from prefixkv.memory.mesh import Shard
from prefixkv.protocol import messages
from prefixkv.protocol.commands import (
    AbortRoom,
    DeclineRoom,
    Fence,
    MoveWeights,
    OfferRoom,
    OpenRoom,
)
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    FailureCode,
    Heartbeat,
    HelloReply,
    HelloWanted,
    Libraries,
    Outcome,
    OutcomeAck,
    ProcessLife,
    PromiseAck,
    Topology,
)
from prefixkv.transport.base import (
    Arrived,
    PeerMemory,
    PeerUnreachable,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
    WriteJob,
)
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    DIGEST,
    HELLO,
    LAYOUT,
    NUM_PAGES,
    PAGE_SIZE,
    PREFILL,
    ROUTE,
    SENT,
    TIMING,
    TOPOLOGY,
    WRITE_BYTES,
    Alike,
    DecodePeer,
    add_room,
    kinds,
    members,
    newer,
    of,
    of_another_version,
    promise,
    send_chunk,
)
from tests.unit.protocol.rooms import PROMPT

WELCOME = HelloReply(DIGEST, TOPOLOGY, (ADDRESS,))
OTHER = PeerId("decode-1", 1)
ENOUGH = AbortRoom(SENT, "enough")
ACK = PromiseAck(*SENT.numbers, 0)


def refusal(actions: list[Any]) -> str:
    """The reason of the one frame in `actions`, an outcome that proves its pages drained."""
    [outcome] = actions
    assert isinstance(outcome, Outcome)
    assert (outcome.ok, outcome.drained, outcome.num_pages) == (False, True, 0)
    return outcome.error


def test_the_path_of_one_room() -> None:
    peer = DecodePeer()
    assert peer.say(HELLO) == [
        AddPeer(
            peer=DECODE,
            metadata=b"agent",
            memory=PeerMemory(LAYOUT, (Shard.whole(LAYOUT),) * 2),
            unit_tokens=PAGE_SIZE,
        ),
        WELCOME,
    ]
    assert peer.say(promise()) == [ACK]
    assert peer.on(add_room()) == [Bootstrapped(SENT, DECODE, 4)]
    [post] = peer.chunk(1, [30, 31])
    assert (post.peer, post.route, post.ready) == (DECODE, "pages", None)
    assert (post.src_pages.tolist(), post.dst_pages.tolist()) == ([30, 31], [3, 9])
    assert post.tag == ChunkTag(PREFILL.incarnation, *SENT.numbers, rank=0, chunk=0)
    assert peer.chunk(3, [], last=True) == []
    outcome = Outcome(*SENT.numbers, 0, True, 1, 2, b"first", "", True, num_units=2)
    assert peer.ended(post.job_id) == [RoomEnded(SENT, KVPoll.SUCCESS), outcome, SourceFree(SENT)]
    assert peer.after(TIMING.resend_s) == [outcome], "until it is acknowledged"
    assert peer.say(OutcomeAck(*SENT.numbers, 0)) == []
    assert peer.control.num_rooms == 0
    assert peer.control.counters == {"writes_done": 1, "bytes_sent": WRITE_BYTES}


# --- introductions --------------------------------------------------------------------------------


def test_hello_said_again_is_answered_again_and_adds_no_peer_twice() -> None:
    peer = DecodePeer().known()
    assert peer.say(HELLO) == [WELCOME]
    assert peer.control.peers(peer.now_s) == {DECODE: "ready"}


STRIDED = msgspec.structs.replace(LAYOUT.slabs[0], page_stride=16)  # pages overlap
TWO_HEADS = msgspec.structs.replace(
    LAYOUT, num_kv_heads=2, slabs=(Slab(4096, 64, 16, 8), Slab(4096 + 64 * NUM_PAGES, 64, 16, 8)),
    regions=((4096, 128 * NUM_PAGES),),
)  # fmt: skip
REFUSALS = {
    "another model": ({"digest": msgspec.structs.replace(DIGEST, model="qwen")}, "model differs"),
    "another page size": ({"topology": Topology(6)}, "page_size"),
    "a rank that cannot be": ({"rank": 1}, "rank is 1"),
    "a layout outside its memory": (
        {"layout": msgspec.structs.replace(LAYOUT, num_pages=NUM_PAGES + 1)},
        "region",
    ),
    "a layout whose pages overlap": (
        {"layout": msgspec.structs.replace(LAYOUT, slabs=(STRIDED,) * 2)},
        "stride",
    ),
    "a layout of other pages": (
        {"layout": msgspec.structs.replace(LAYOUT, page_size=2)},
        "layout.page_size differs",
    ),
    "a layout of opaque pages": (
        {"layout": msgspec.structs.replace(LAYOUT, opaque="amx")},
        "layout.opaque differs: ours '', theirs 'amx'",
    ),
    "opaque pages, to plain ones": (
        {"digest": msgspec.structs.replace(HELLO.digest, opaque="amx")},
        "opaque differs: ours '', theirs 'amx'",
    ),
    "a layout of other heads": ({"layout": TWO_HEADS}, "layout.num_kv_heads"),
    "more unit pages than an int32 names": (
        {
            "topology": Topology(256 * PAGE_SIZE),
            "layout": msgspec.structs.replace(
                LAYOUT,
                page_size=256 * PAGE_SIZE,
                num_pages=2**24,
                slabs=tuple(Slab(base, 8192, 8, 8) for base in (2**40, 2**41)),
                regions=((2**40, 2**42),),
            ),
        },
        "units",
    ),
    "an unknown dtype": ({"layout": msgspec.structs.replace(LAYOUT, dtype="int3")}, "int3"),
}


@pytest.mark.parametrize(("changes", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_peer_that_does_not_fit_is_told_why_and_not_known(
    changes: dict[str, Any], text: str
) -> None:
    peer = DecodePeer()
    [reply] = peer.say(msgspec.structs.replace(HELLO, **changes))
    assert text in reply.refused
    assert peer.control.peers(peer.now_s) == {}
    assert peer.control.counters["handshakes_refused"] == 1


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (Libraries("1.5.1", "1.22.0"), "version of ucx differs: ours '1.23.0', theirs '1.22.0'"),
        (Libraries("1.6.0", "1.23.0"), "version of nixl differs: ours '1.5.1', theirs '1.6.0'"),
        (Libraries("1.5.1", ""), ""),  # unknown
        (Libraries("1.5.1", "1.23.0"), ""),
    ],
)
@pytest.mark.parametrize("writes_by_nixl", [True, False])
def test_other_versions_of_the_libraries_that_write_are_refused_by_name(
    theirs: Libraries, text: str, writes_by_nixl: bool
) -> None:
    """Where shm writes they do not matter, but then NIXL does not take its place."""
    place = "elsewhere" if writes_by_nixl else "here"
    hello = msgspec.structs.replace(HELLO, libraries=theirs, mapping=b"pkvshm1|", place=place)
    peer = DecodePeer(libraries=Libraries("1.5.1", "1.23.0"), backend="auto", place="here")
    [reply] = of(peer.say(hello), HelloReply)
    assert (text in reply.refused) if writes_by_nixl else not reply.refused
    assert bool(reply.refused) == (writes_by_nixl and text != "")
    if not writes_by_nixl:
        moved = peer.on(PeerUnreachable(DECODE, OSError("cannot be mapped")))
        assert bool(moved) == (text == "")


NIXL, SHM = HELLO.agent_metadata, b"pkvshm1|"


@pytest.mark.parametrize(
    ("backend", "nixl", "shm", "place", "way"),
    [
        ("nixl", NIXL, SHM, "here", "nixl"),
        ("shm", NIXL, SHM, "here", "shm"),
        ("auto", NIXL, b"", "elsewhere", "nixl"),
        ("auto", b"", SHM, "here", "shm"),
        ("auto", NIXL, SHM, "here", "shm"),
        ("auto", NIXL, SHM, "elsewhere", "nixl"),
        # Where a kernel tells no place, none is taken for the same.
        ("auto", NIXL, SHM, "", "nixl"),
        ("shm", NIXL, SHM, "", "shm"),
        ("nixl", b"", SHM, "here", "transport backend differs: ours 'nixl', theirs 'shm'"),
        ("shm", NIXL, b"", "here", "transport backend differs: ours 'shm', theirs 'nixl'"),
        ("auto", b"", b"", "here", "transport backend differs: ours 'auto', theirs 'none'"),
        ("shm", NIXL, SHM, "elsewhere", "place differs"),
        ("auto", b"", SHM, "elsewhere", "place differs"),
    ],
)
def test_a_peer_is_written_by_what_both_sides_have_or_told_what_they_lack(
    backend: Any, nixl: bytes, shm: bytes, place: str, way: str
) -> None:
    hello = msgspec.structs.replace(HELLO, agent_metadata=nixl, mapping=shm, place=place)
    said = DecodePeer(backend=backend, place="here" if place else "").say(hello)
    if " " in way:
        [reply] = of(said, HelloReply)
        assert way in reply.refused
    else:
        [added] = of(said, AddPeer)
        assert (added.way, added.metadata) == (way, nixl if way == "nixl" else shm)


def test_a_peer_whose_memory_cannot_be_mapped_is_written_by_nixl_from_then_on() -> None:
    peer = DecodePeer(backend="auto", place="here")
    hello = msgspec.structs.replace(HELLO, mapping=SHM, place="here")
    [added] = of(peer.say(hello), AddPeer)
    lost = PeerUnreachable(DECODE, OSError("cannot be mapped"))
    assert peer.on(PeerUnreachable(OTHER, lost.error)) == []
    assert peer.on(PeerUnreachable(DECODE, lost.error, was_reached=True)) == [], "it was mapped"
    [moved] = peer.on(lost)
    assert moved == msgspec.structs.replace(added, way="nixl", metadata=NIXL)
    assert peer.on(lost) == [], "by NIXL it is tried again there"


def test_a_hello_that_is_repeated_by_the_network_is_dropped() -> None:
    peer = DecodePeer()
    [wanted] = peer.on(FrameReceived(ROUTE, peer.raw(HELLO)))
    raw = peer.raw(msgspec.structs.replace(HELLO, nonce=wanted.nonce))
    answers = [kinds(peer.on(FrameReceived(ROUTE, raw))) for _ in range(2)]
    assert answers == [["AddPeer", "HelloReply"], []]


def test_a_hello_of_a_dead_process_that_comes_late_takes_no_place() -> None:
    """Its process had been given a nonce, and never came to use it before the next one did."""
    peer = DecodePeer()
    old, new = newer(DECODE), DECODE
    [wanted] = peer.on(FrameReceived(ROUTE, peer.raw(HELLO, old)))
    late = peer.raw(msgspec.structs.replace(HELLO, nonce=wanted.nonce), old)
    peer.say(HELLO, new)
    [again] = peer.on(FrameReceived(ROUTE, late))
    assert again.nonce != wanted.nonce, "it would have to answer this, if it lived"
    assert peer.control.peers(peer.now_s) == {new: "ready"}


def test_a_worker_that_is_started_again_behind_the_clock_takes_its_place_at_once() -> None:
    """Lives are random: that of the new process may be the smaller number."""
    peer = DecodePeer().bootstrapped()
    again = PeerId(DECODE.name, DECODE.incarnation - 1)
    assert peer.say(HELLO, again)[-1].refused == ""
    assert peer.control.peers(peer.now_s) == {again: "ready"}
    assert peer.say(promise(8), again) == [PromiseAck(8, 0, 0)]


@pytest.mark.parametrize("how", ["superseded", "fenced", "left", "silent, then superseded"])
def test_a_life_that_is_over_never_comes_back_and_is_told_by_name(how: str) -> None:
    peer = DecodePeer().known()
    if how == "fenced":
        peer.on(Fence(DECODE))
    elif how == "left":
        peer.say(messages.Fenced())
    elif how == "silent, then superseded":
        peer.after(TIMING.forget_after_s + 1.0)
        assert peer.control.peers(peer.now_s) == {}
    if how.endswith("superseded"):
        peer.say(HELLO, newer(DECODE))
    known = peer.control.peers(peer.now_s)
    why = {
        "fenced": "decode-0 life 5 was fenced", "left": "decode-0 life 5 has left",
    }.get(how, "decode-0 life 5 was superseded by life 6")  # fmt: skip
    if how.endswith("superseded"):
        taken = "by another process (life 6), which prefill met 0 s ago"
        why += f": the name 'decode-0' is taken {taken}; each worker needs a name of its own"
    for body in (HELLO, Heartbeat(), promise(9)):
        assert [reply.refused for reply in peer.say(body)] == [why]
    assert peer.control.peers(peer.now_s) == known
    assert peer.control.counters["dropped: FormerLifeError"] == 3


@pytest.mark.parametrize(
    ("boot", "opened_ns", "is_refused"),
    [("here", 99, True), ("here", 100, False), ("here", 0, False), ("there", 99, False)],
)
def test_a_life_that_was_made_before_the_one_that_has_its_name_does_not_take_its_place(
    boot: str, opened_ns: int, is_refused: bool
) -> None:
    """Prefill is started while two processes of one name live: a stopped one goes on, and greets
    it after the one that was started in its place."""
    life = ProcessLife("here", 1, 2, 4242, 17, "holder", 100)
    peer = DecodePeer(hello=msgspec.structs.replace(HELLO, life=life)).known()
    other = msgspec.structs.replace(life, pid=77, boot=boot, opened_ns=opened_ns)
    reply = peer.say(msgspec.structs.replace(HELLO, life=other), newer(DECODE))[-1]
    if not is_refused:
        assert not reply.refused
        assert peer.control.peers(peer.now_s) == {newer(DECODE): "ready"}
        return
    assert "decode-0 life 6 was made before decode-0 life 5: the name 'decode-0'" in reply.refused
    assert "is taken by process 4242 on another machine (life 5)" in reply.refused
    assert peer.control.peers(peer.now_s) == {DECODE: "ready"}
    assert kinds(peer.say(promise(8))) == ["PromiseAck"]


def test_more_peers_than_the_limit_are_refused() -> None:
    peer = DecodePeer().known()
    peer.say(HELLO, OTHER)
    [reply] = peer.say(HELLO, PeerId("decode-2", 1))
    assert "max_peers" in reply.refused
    assert kinds(peer.say(HELLO, newer(DECODE))) == ["RemovePeer", "AddPeer", "HelloReply"], (
        "a restart takes its place"
    )


@pytest.mark.parametrize(
    "body",
    [
        promise(),
        Abort(*SENT.numbers, ""),
        Heartbeat(),
        OutcomeAck(*SENT.numbers, 0),
        messages.Fenced(),
    ],
)
def test_a_peer_that_has_not_introduced_itself_is_asked_to(body: Any) -> None:
    peer = DecodePeer()
    assert kinds(peer.say(body)) == ["HelloWanted"]
    peer.known()
    assert kinds(peer.say(body, newer(DECODE))) == ["HelloWanted"], "nor has its next incarnation"
    assert peer.control.num_rooms == 0
    assert peer.control.counters["frames_dropped"] == 2


def test_a_name_stays_with_the_key_that_used_it_first() -> None:
    peer = DecodePeer()
    peer.say(HELLO, credential="key a")
    for by in (DECODE, newer(DECODE)):
        (reply,) = peer.say(HELLO, by, credential="key b")
        assert "key of 'decode-0' is not the one that it was met with" in reply.refused
    assert peer.say(promise(), credential="key b") == []
    assert peer.say(promise(), credential="key a") == [ACK]
    raw = peer.raw(Abort(*SENT.numbers, "enough"))
    assert peer.on(FrameFailed(FrameReceived(ROUTE, raw, "key b"), OSError("broken"))) == []
    assert peer.control.counters["frames_dropped"] == 3


def test_with_an_allow_list_a_key_speaks_under_its_own_name_only() -> None:
    curve = CurveConfig(
        "p" * 40, "s" * 40, allowed_clients={"key a": "decode-0", "key b": "decode-1"}
    )
    peer = DecodePeer(dataclasses.replace(TIMING, curve=curve))
    for credential, listed in (("key b", "decode-1"), ("key c", ""), ("", "")):
        (reply,) = peer.say(HELLO, credential=credential)
        assert reply.refused == (
            "name is not the one that prefill's allowed_clients has for its key "
            f"'{credential}...' (change one of the two): ours {listed!r}, theirs 'decode-0'"
        )
        assert peer.say(promise(), credential=credential) == []
    assert [news.kind for news in peer.control.news.take()] == ["shut out"] * 3
    assert peer.control.counters["handshakes_refused"] == 3
    assert kinds(peer.say(HELLO, credential="key a")) == ["AddPeer", "HelloReply"]
    assert kinds(peer.say(HELLO, OTHER, credential="key b")) == ["AddPeer", "HelloReply"]


# --- what is dropped ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        WELCOME,
        HelloWanted(),
        ACK,
        Drained(*SENT.numbers, 0),
        Outcome(*SENT.numbers, 0, True, 1, 2, b"", "", True),
    ],
)
def test_what_is_not_for_prefill_is_dropped(body: Any) -> None:
    peer = DecodePeer().bootstrapped()
    assert peer.say(body) == []
    assert peer.control.counters["frames_dropped"] == 1
    assert [machine.poll for machine in peer.control.rooms()] == [KVPoll.WAITING_FOR_INPUT]


def test_a_restarted_peer_counts_its_frames_from_one() -> None:
    peer = DecodePeer().bootstrapped()
    [wanted] = peer.on(FrameReceived(ROUTE, peer.raw(HELLO, newer(DECODE), 1)))
    hello = msgspec.structs.replace(HELLO, nonce=wanted.nonce)
    for seq, body in enumerate((hello, promise(8)), start=2):
        peer.on(FrameReceived(ROUTE, peer.raw(body, newer(DECODE), seq)))
    assert peer.said[-1] == PromiseAck(8, 0, 0)


def test_a_frame_of_another_version_is_dropped_and_answered_so_that_decode_sees_ours() -> None:
    peer = DecodePeer().bootstrapped()
    raw = of_another_version(peer.raw(Abort(*SENT.numbers, "")))
    assert peer.on(FrameReceived(ROUTE, raw)) == [HelloWanted()]
    assert peer.control.counters == {"frames_dropped": 1, "dropped: VersionError": 1}
    assert [machine.poll for machine in peer.control.rooms()] == [KVPoll.WAITING_FOR_INPUT]


# --- promises -------------------------------------------------------------------------------------

BAD_PROMISES = {
    "a page beyond the pool": (promise(pages=(3, NUM_PAGES)), "page ids 3 to 16, the pool has 16"),
    "a negative page": (promise(pages=(3, -1)), "page ids -1 to 3"),
    "a page twice": (promise(pages=(3, 3)), "twice"),
    "too few pages": (promise(pages=(3,)), "1 pages where 2 are needed"),
    "too many pages": (promise(pages=(3, 4, 5)), "3 pages where 2 are needed"),
    "pages for what is cached": (promise(prefix_len=8, pages=(3, 4)), "2 pages where 1 are needed"),
    "half a page cached": (promise(prefix_len=6), "prefix of 6"),
    "more cached than there is": (
        promise(fill_len=4, prefix_len=8, pages=()),
        "prefix of 8 tokens of 4",
    ),
    "half a page id": (msgspec.structs.replace(promise(), pages=b"\x03\x00\x00"), "3 bytes"),
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("bad", "text"), BAD_PROMISES.values(), ids=BAD_PROMISES)
def test_a_bad_promise_is_refused_and_writes_nothing(
    bad: messages.Promise, text: str, added: bool
) -> None:
    peer = DecodePeer().known()
    if added:
        peer.on(add_room())
    assert text in refusal(peer.say(bad))
    assert peer.control.counters["dropped: ProtocolError"] == 1
    assert peer.control.num_rooms == added
    assert all(not machine.readers for machine in peer.control.rooms()), (
        "the room is of no worker yet"
    )
    assert peer.chunk(1, [30, 31], last=True, clip=True) == []


@pytest.mark.parametrize(
    "other",
    [
        promise(pages=(4, 9)),
        promise(fill_len=11),
        promise(prefix_len=0, pages=(1, 2, 3)),
        msgspec.structs.replace(promise(), digest=prompt_digest([*range(9), 10])),
    ],
)
def test_within_a_generation_the_promise_stands(other: messages.Promise) -> None:
    for parked in (True, False):
        peer = DecodePeer().known()
        peer.say(promise())
        if not parked:
            peer.on(add_room())
        assert peer.say(other) == []
        assert peer.say(promise()) == [ACK], "the first one stands"
        if parked:
            peer.on(add_room())
        [post] = peer.chunk(1, [30, 31])
        assert post.dst_pages.tolist() == [3, 9]
        assert peer.control.counters["frames_dropped"] == 1


def test_a_word_on_a_room_counts_only_from_the_worker_that_it_is_for() -> None:
    peer = DecodePeer().bootstrapped()
    peer.say(HELLO, OTHER)
    [post] = peer.chunk(1, [30, 31], last=True)
    assert peer.say(Abort(*SENT.numbers, "mine"), OTHER) == [Drained(*SENT.numbers, 0)], (
        "nothing of it can land in *its* pages"
    )
    other = msgspec.structs.replace(promise(), ticket=1)
    acked = msgspec.structs.replace(ACK, ticket=1)
    assert peer.say(other, OTHER) == [acked], "a room of its own"
    [_, outcome, _] = peer.ended(post.job_id)
    assert outcome.ok
    assert peer.say(OutcomeAck(*SENT.numbers, 0), OTHER) == []
    assert peer.control.num_rooms == 2, "another's acknowledgement is none"


@pytest.mark.parametrize("how", ["promise", "abort", "both"])
def test_a_word_before_the_worker_that_a_room_is_for_takes_nothing_from_it(how: str) -> None:
    """As a stranger would, who guesses the numbers that come."""
    peer = DecodePeer(dataclasses.replace(TIMING, max_parked_per_peer=100)).known()
    peer.say(HELLO, OTHER)
    for room in range(20):
        if how != "abort":
            peer.say(promise(room), OTHER)
        if how != "promise":
            peer.say(Abort(room, 0, "mine"), OTHER)
    for room in range(20):
        key = RoomKey(room, 0, DECODE.name)
        assert peer.on(add_room(key)) == []
        assert peer.say(promise(room)) == [Bootstrapped(key, DECODE, 4)]
        [post] = peer.chunk(1, [30, 31], last=True, key=key)
        assert post.peer == DECODE
        assert peer.ended(post.job_id)[0] == RoomEnded(key, KVPoll.SUCCESS)


# --- the same tokens ------------------------------------------------------------------------------


ANOTHER = {
    "other tokens": prompt_digest([*range(9), 10]),
    "another namespace": prompt_digest(range(10), "lora"),
}


@pytest.mark.parametrize("promised_first", [True, False])
@pytest.mark.parametrize("digest", ANOTHER.values(), ids=ANOTHER)
def test_another_prompt_of_the_same_length_fails_on_both_sides_before_a_byte_moves(
    digest: bytes, promised_first: bool
) -> None:
    peer = DecodePeer().known()
    both = [lambda: peer.say(promise()), lambda: peer.on(add_room(SENT, 10, digest))]
    first, second = both if promised_first else both[::-1]
    first()
    if not promised_first:
        kept = peer.chunk(1, [30, 31], last=True, clip=True)
        assert kept == []
    effects = second()
    [ended], [outcome] = of(effects, RoomEnded), of(effects, Outcome)
    assert isinstance(ended.error, PromptMismatchError)
    assert "other tokens, or another namespace" in outcome.error
    assert (outcome.ok, outcome.drained) == (False, True)
    assert outcome.code is FailureCode.PROMPT_MISMATCH
    assert of(effects, SourceFree) == [SourceFree(SENT)]
    assert peer.chunk(1, [30, 31], last=True) == [], "it takes no pages any more"
    assert not of(effects, WriteJob)
    peer.say(OutcomeAck(*SENT.numbers, 0))
    assert peer.control.num_rooms == 0
    [again] = peer.say(promise())
    assert again.code is FailureCode.PROMPT_MISMATCH, "whoever repeats it hears the same"


@pytest.mark.parametrize(
    "digest",
    [b"", PROMPT[:-1], PROMPT + b"\0", bytes(32)],
    ids=["none", "a part", "more", "another"],
)
def test_a_promise_without_the_digest_of_the_prompt_is_for_another(digest: bytes) -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    said = peer.say(msgspec.structs.replace(promise(), digest=digest))
    [outcome] = of(said, Outcome)
    assert outcome.code is FailureCode.PROMPT_MISMATCH


@pytest.mark.parametrize("how", ["its request has ended", "it is of other weights"])
def test_a_promise_that_crosses_what_ends_it_is_answered_and_counts_as_no_dropped_frame(
    how: str,
) -> None:
    peer, said = DecodePeer().known(), promise()
    if how == "its request has ended":
        peer.on(add_room())
        peer.on(ENOUGH)
    else:
        said = msgspec.structs.replace(said, weights_version="step 2")
    assert refusal(peer.say(said))
    assert peer.control.counters["frames_dropped"] == 0


def test_a_promise_that_contradicts_one_that_waits_counts_as_a_dropped_frame() -> None:
    """Also where it is of other weights: it has crossed nothing, and gets no answer."""
    peer = DecodePeer().known()
    assert kinds(peer.say(promise())) == ["PromiseAck"]
    assert peer.say(msgspec.structs.replace(promise(), weights_version="step 2")) == []
    assert peer.control.counters["frames_dropped"] == 1


@pytest.mark.parametrize("life", [PREFILL.incarnation - 1, PREFILL.incarnation + 1])
def test_what_is_said_to_another_life_of_prefill_is_dropped(life: int) -> None:
    """A promise that is late: its pages may be drained."""
    peer = DecodePeer().known()
    peer.on(add_room())
    for word in (promise(), messages.Abort(*SENT.numbers, "test")):
        assert peer.say(msgspec.structs.replace(word, life=life)) == []
    assert peer.control.counters["dropped: ProtocolError"] == 2
    assert kinds(peer.say(promise())) == ["Bootstrapped"]


# --- parking --------------------------------------------------------------------------------------


def test_promises_are_parked_up_to_a_limit_a_peer() -> None:
    peer = DecodePeer().known()
    peer.say(HELLO, OTHER)
    for room in range(TIMING.max_parked_per_peer):
        assert kinds(peer.say(promise(room))) == ["PromiseAck"]
    assert "limit" in refusal(peer.say(promise(99)))
    assert kinds(peer.say(promise(99), OTHER)) == ["PromiseAck"], "the limit is each peer's own"
    assert kinds(peer.say(promise(0))) == ["PromiseAck"], "one that is parked is answered"
    peer.on(add_room(RoomKey(98, 0, SENT.decode)))
    assert kinds(peer.say(promise(98))) == ["Bootstrapped"], "one that was waited for"
    peer.on(add_room(RoomKey(0, 0, SENT.decode)))
    assert kinds(peer.say(promise(100))) == ["PromiseAck"], "one that was taken leaves its place"
    peer.say(Abort(1, 0, "enough"))
    assert kinds(peer.say(promise(101))) == ["PromiseAck"], "so does one that was aborted"
    assert "limit" in refusal(peer.say(promise(102)))


# --- aborts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parked", [False, True])
def test_an_abort_before_the_request_is_drained_and_remembered_for_a_while(parked: bool) -> None:
    for seconds, failed in ((0.0, True), (TIMING.parked_timeout_s, False)):
        peer = DecodePeer().known()
        if parked:
            peer.say(promise())
        assert peer.say(Abort(*SENT.numbers, "enough")) == [Drained(*SENT.numbers, 0)]
        peer.after(seconds)
        assert kinds(peer.on(add_room())) == (["RoomEnded", "SourceFree"] if failed else [])
        assert peer.control.num_rooms == (not failed)


def test_aborts_of_unknown_rooms_are_remembered_up_to_a_limit() -> None:
    peer = DecodePeer().known()
    for room in range(10):
        assert peer.say(Abort(room, 0, "enough")) == [Drained(room, 0, 0)]
    failed = [room for room in range(10) if peer.on(add_room(RoomKey(room, 0, SENT.decode)))]
    assert failed == list(range(10 - TIMING.max_parked_per_peer, 10)), "the oldest are forgotten"


def test_a_write_that_proves_nothing_is_not_acknowledged_before_its_agent_is_destroyed() -> None:
    peer = DecodePeer().bootstrapped()
    [post] = peer.chunk(1, [30, 31])
    [ended, outcome, _, renew] = peer.ended(post.job_id, OSError("reset"), drained=False)
    assert renew == Renew()
    assert ended.poll is KVPoll.FAILED
    assert not outcome.drained
    assert peer.say(OutcomeAck(*SENT.numbers, 0)) == []
    for _ in range(3):
        assert peer.say(Abort(*SENT.numbers, "enough")) == []
        assert set(kinds(peer.after(100.0))) <= {"Heartbeat"}
    assert peer.control.num_rooms == 1
    assert peer.on(WriteDrained(post.job_id)) == [Drained(*SENT.numbers, 0, settle=True)]
    assert peer.control.num_rooms == 0
    assert peer.on(WriteDrained(post.job_id)) == []
    assert peer.say(Abort(*SENT.numbers, "enough")) == [Drained(*SENT.numbers, 0, settle=True)], (
        "that it was lost is no reason to hurry"
    )
    (refused,) = peer.say(promise())
    assert (refused.ok, refused.drained) == (False, False), "nor is a repeat of the promise"


# --- peers that go --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["farewell", "restart"])
def test_a_peer_that_goes_ends_its_rooms_and_its_writes_are_waited_for(how: str) -> None:
    peer = DecodePeer().bootstrapped()
    [post] = peer.chunk(1, [30, 31])
    peer.say(promise(8))
    actions = peer.say(messages.Fenced()) if how == "farewell" else peer.say(HELLO, newer(DECODE))
    assert isinstance(actions[0].error, PeerLostError)
    wanted = ["RoomEnded", "Cancel", "RemovePeer"]
    assert kinds(actions) == wanted + (["AddPeer", "HelloReply"] if how == "restart" else [])
    assert peer.control.num_rooms == 1, "what was parked is gone"
    assert peer.ended(post.job_id, OSError("reset"), drained=False) == [SourceFree(SENT), Renew()]
    assert peer.control.num_rooms == 0
    assert peer.control.peers(peer.now_s) == ({newer(DECODE): "ready"} if how == "restart" else {})


def test_a_fence_ends_the_rooms_of_its_incarnation_and_forgets_it() -> None:
    peer = DecodePeer().bootstrapped()
    [post] = peer.chunk(1, [30, 31])
    peer.say(promise(8))
    before = PeerId(DECODE.name, DECODE.incarnation - 1)
    for other in (before, newer(DECODE), OTHER):
        assert peer.on(Fence(other)) == [], "another life, or another name"
    assert peer.control.num_rooms == 2
    lost = Alike(PeerLostError(f"{DECODE} was fenced", DECODE))
    assert peer.on(Fence(DECODE)) == [
        RoomEnded(SENT, KVPoll.FAILED, lost),
        Cancel(post.job_id),
        RemovePeer(DECODE),
    ]
    assert (peer.control.peers(peer.now_s), peer.control.num_rooms) == ({}, 1), "what was parked is"
    assert peer.on(Fence(DECODE)) == [], "again: no-op"
    assert peer.ended(post.job_id) == [SourceFree(SENT)], "its writes are waited for"
    assert peer.control.num_rooms == 0
    assert [reply.refused for reply in peer.say(Heartbeat())] == [f"{DECODE} was fenced"]
    assert peer.after(TIMING.forget_after_s) == []
    assert peer.control.wake_s == float("inf")


def test_a_silent_peer_is_suspect_and_forgotten_when_it_has_no_room() -> None:
    peer = DecodePeer().known()
    peer.say(promise())
    assert Heartbeat() in peer.after(TIMING.heartbeat_s)
    peer.after(TIMING.suspect_after_s)
    assert peer.control.peers(peer.now_s) == {DECODE: "suspect"}
    peer.say(Abort(*SENT.numbers, ""))
    assert peer.control.peers(peer.now_s) == {DECODE: "ready"}
    assert RemovePeer(DECODE) not in peer.after(TIMING.forget_after_s)
    assert RemovePeer(DECODE) in peer.after(TIMING.heartbeat_s)
    assert kinds(peer.say(Heartbeat())) == ["HelloWanted"]
    assert peer.control.wake_s == float("inf")


def test_heartbeats_come_when_nothing_else_was_said() -> None:
    peer = DecodePeer().known()
    beats = []
    for _ in range(40):
        peer.now_s = peer.control.wake_s
        beats += [peer.now_s for body in peer.on(Tick()) if isinstance(body, Heartbeat)]
    assert len(beats) == 40, "each wake-up is for a heartbeat, none is early"
    assert beats[0] == 100.0 + TIMING.heartbeat_s


@pytest.mark.parametrize("word", [Heartbeat(), HELLO])
def test_answers_go_where_the_peer_spoke_from_last(word: Any) -> None:
    peer = DecodePeer().bootstrapped()
    peer.say(word, route=b"elsewhere")
    effects = peer.control.on(ENOUGH, peer.now_s)
    frames = [effect for effect in effects if isinstance(effect, SendFrame)]
    assert [frame.to for frame in frames] == [b"elsewhere"]


def test_decode_hears_prefill_at_each_of_two_addresses() -> None:
    """Where no request comes nothing else would be said there, and one would be suspect."""
    peer = DecodePeer().known()
    peer.say(HELLO, route=b"other")

    def answers(route: bytes) -> list[tuple[bytes, Any]]:
        frame = FrameReceived(route, peer.raw(Heartbeat()))
        effects = peer.control.on(frame, peer.now_s)
        sent = [effect for effect in effects if isinstance(effect, SendFrame)]
        return [(one.to, messages.decode(one.raw).body) for one in sent]

    for route in (ROUTE, b"other", ROUTE):
        assert answers(route) == [(route, Heartbeat())]
    assert answers(ROUTE) == [], "for one alone the timer is enough"


def test_farewell_is_said_to_all() -> None:
    peer = DecodePeer().known()
    peer.say(HELLO, OTHER, route=b"other")
    frames = peer.control.on(AgentDestroyed(), peer.now_s)
    said = [(frame.to, messages.decode(frame.raw).body) for frame in frames]
    assert said == [(ROUTE, messages.Fenced()), (b"other", messages.Fenced())]


# --- all that is taken ----------------------------------------------------------------------------


def _frame(body: Any, by: PeerId = DECODE) -> FrameReceived[bytes]:
    return FrameReceived(ROUTE, messages.encode(by, 99, body))


INPUTS: dict[str, tuple[Any, list[str]]] = {
    "a request": (add_room(RoomKey(8, 0, SENT.decode)), []),
    "pages": (send_chunk(SENT, 2, [31], False, b""), ["WriteJob"]),
    "a prompt whose room the engine has drawn": (OfferRoom(RoomKey(8, 0), 10, PROMPT, 30.0), []),
    "an offer that stands no more": (AbortRoom(RoomKey(8, 0), "needed elsewhere"), []),
    "a request that is not taken": (DeclineRoom(RoomKey(8, 0, SENT.decode), "no"), []),
    "a room to end": (ENOUGH, ["RoomEnded", "Cancel", "Outcome"]),
    "other weights": (MoveWeights("v2"), ["RoomEnded", "Cancel", "Outcome"]),
    "a fence": (Fence(DECODE), ["RoomEnded", "Cancel", "RemovePeer"]),
    "a frame": (FrameReceived(ROUTE, b"junk"), []),
    "a frame that raised": (
        FrameFailed(_frame(OutcomeAck(*SENT.numbers, 0)), OSError("on purpose")),
        ["RoomEnded", "Cancel", "Outcome"],
    ),
    "a frame that raised, of another peer": (
        FrameFailed(_frame(OutcomeAck(*SENT.numbers, 0), OTHER), OSError("on purpose")),
        [],
    ),
    "a frame that raised and names no room": (
        FrameFailed(_frame(Heartbeat()), OSError("on purpose")),
        [],
    ),
    "a write": (WriteDone(1, WRITE_BYTES), []),
    "a write that failed": (
        WriteFailed(1, OSError("reset"), drained=True),
        ["RoomEnded", "Outcome", "SourceFree"],
    ),
    "a write that is drained": (WriteDrained(1), []),
    "a notification": (Arrived(b"junk"), []),
    "a transport that has settled": (Settled(DECODE), []),
    "a peer that is unreachable": (PeerUnreachable(DECODE, OSError("reset")), []),
    "a copy of no staging": (CopyDone(1), []),
    "an address that cannot be": (ConnectFailed(ADDRESS, OSError("no such")), []),
    "a connection": (Reached(ADDRESS), []),
    "a connection that broke": (Unreached(ADDRESS, "gone"), []),
    "time": (Tick(), []),
    "the end of our agent": (AgentDestroyed(), ["Fenced"]),
}


@pytest.mark.parametrize(("what", "follows"), INPUTS.values(), ids=INPUTS)
def test_what_follows_from_each_input(what: Any, follows: list[str]) -> None:
    peer = DecodePeer().bootstrapped()
    [post] = peer.chunk(1, [30])
    assert post.job_id == 1
    assert kinds(peer.on(what)) == follows


def test_these_are_all_inputs_there_are_and_any_other_raises() -> None:
    assert {type(what) for what, _ in INPUTS.values()} == members(PrefillInput)
    for other in (OpenRoom(promise(), ADDRESS), SourceFree(SENT), promise(), SENT, None):
        with pytest.raises(InternalError, match="takes no"):
            DecodePeer().on(other)  # type: ignore[arg-type]


def test_a_write_that_failed_undrained_asks_for_another_agent_each_time() -> None:
    peer = DecodePeer().bootstrapped()
    [first], [second] = peer.chunk(1, [30]), peer.chunk(2, [31])
    assert Renew() not in peer.ended(first.job_id, OSError("reset"), drained=True)
    assert peer.ended(second.job_id, OSError("reset"), drained=False) == [SourceFree(SENT), Renew()]
    assert peer.ended(99, OSError("reset"), drained=False) == [Renew()], "also of no room any more"
