"""Decode's links and rooms opposite a hand-played prefill worker. Chunks with checksums: a chunk
counts as landed once its pages were looked at, and each page has to have one checksum."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.control.decode.control import DecodeInput
from prefixkv.control.decode.looks import LookAt, PagesLookedAt
from prefixkv.control.effects import (
    AgentDestroyed,
    Connect,
    ConnectFailed,
    CopyDone,
    Disconnect,
    Expect,
    FrameFailed,
    FrameReceived,
    Reached,
    SendFrame,
    Settle,
    Tick,
    Unreached,
)
from prefixkv.errors import (
    AbortedError,
    ChecksumError,
    HandshakeError,
    InternalError,
    PromptMismatchError,
    TransferError,
)
from prefixkv.protocol import messages
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    Fence,
    MeetPrefill,
    MoveWeights,
    OpenRoom,
    RefuseRoom,
)
from prefixkv.protocol.events import RoomDrained, RoomEnded
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    FailureCode,
    Heartbeat,
    Hello,
    HelloRefused,
    HelloWanted,
    Outcome,
    OutcomeAck,
    Promise,
    PromiseAck,
    Topology,
)
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
)
from tests.unit.control.wire import (
    ADDRESS,
    DIGEST,
    HELLO,
    KEY,
    PREFILL,
    TIMING,
    Alike,
    PrefillPeer,
    kinds,
    members,
    newer,
    of_another_version,
    promise,
)
from tests.unit.protocol.rooms import PROMPT

ACK = OutcomeAck(*KEY.numbers, 0)
ENOUGH, WHY = AbortRoom(KEY, "enough"), Alike(AbortedError("enough"))


def ends(actions: list[Any]) -> list[RoomEnded]:
    return [action for action in actions if isinstance(action, RoomEnded)]


def test_the_transport_looks_for_notifications_until_the_last_has_come() -> None:
    peer = PrefillPeer().opened()
    assert peer.expected == 1
    said = msgspec.structs.replace(peer.outcome(), num_units=2)
    effects = peer.control.on(FrameReceived(ADDRESS, peer.raw(said)), peer.now_s)
    assert kinds(effects) == ["SendFrame", "Expect"], "it is to look at once"
    assert effects[1] == Expect(1), "it would not poll for them any more"
    tag = ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, 0, num_pages=2)
    assert peer.on(Arrived(tag.pack())) == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")]
    assert peer.expected == 0


def test_the_path_of_one_room() -> None:
    peer = PrefillPeer()
    control = peer.control
    assert peer.open() == [Connect(ADDRESS), HELLO]
    assert peer.poll() is KVPoll.BOOTSTRAPPING
    assert peer.expected == 0, "no peer knows the pages yet"
    assert peer.greet() == [promise()]
    assert peer.expected == 1
    assert peer.open(promise(8, pages=(1, 2))) == [promise(8, pages=(1, 2))], (
        "known by now: promised at once"
    )
    assert peer.expected == 2
    peer.say(PromiseAck(*KEY.numbers, 0))
    assert peer.on(Arrived(ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, 0).pack())) == []
    assert peer.poll() is KVPoll.TRANSFERRING
    assert peer.say(peer.outcome()) == [ACK, RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")]
    assert (peer.poll(), control.num_rooms, peer.expected) == (None, 1, 1)
    assert peer.say(peer.outcome()) == [ACK], "our acknowledgement was lost: said again"
    assert not control.counters


def test_a_room_is_opened_once() -> None:
    peer = PrefillPeer().opened()
    with pytest.raises(InternalError, match="room 7 generation 0 is open already"):
        peer.open()
    assert (peer.poll(), peer.expected) == (KVPoll.WAITING_FOR_INPUT, 1), "it goes on"
    assert kinds(peer.open(promise(generation=1))) == ["Promise"]


def test_hello_is_said_again_until_answered_also_for_longer_than_a_heartbeat() -> None:
    peer = PrefillPeer()
    peer.open()
    start_s, times = peer.now_s, []
    for _ in range(4):
        peer.now_s = peer.control.wake_s
        times += [peer.now_s - start_s for body in peer.on(Tick()) if isinstance(body, Hello)]
    assert times == [0.5, 1.5, 3.5, 7.5], "and no wake-up is for nothing"
    assert kinds(peer.greet()) == ["Promise"]
    assert not any(isinstance(body, Hello) for body in peer.pass_time(3.0))


def test_a_room_whose_worker_never_answers_fails_and_the_link_is_forgotten() -> None:
    peer = PrefillPeer()
    peer.open()
    said = peer.pass_time(TIMING.bootstrap_timeout_s)
    assert kinds([action for action in said if not isinstance(action, Hello)]) == [
        "RoomEnded",
        "RoomDrained",
    ]
    assert peer.control.num_rooms == 0
    assert Disconnect(ADDRESS) in peer.pass_time(TIMING.forget_after_s)
    assert peer.control.peers(peer.now_s) == {}
    assert peer.control.wake_s == float("inf")


REFUSALS = {
    "another model": (
        {"digest": msgspec.structs.replace(DIGEST, kv_scales="2")},
        "kv_scales differs",
    ),
    "another page size": ({"topology": Topology(6)}, "page_size"),
    "refused by prefill": ({"refused": "no room"}, "no room"),
}


@pytest.mark.parametrize(("changes", "text"), REFUSALS.values(), ids=REFUSALS)
def test_two_that_do_not_fit_fail_the_rooms_and_name_the_field(
    changes: dict[str, Any], text: str
) -> None:
    peer = PrefillPeer()
    peer.open()
    actions = peer.greet(**changes)
    if "refused" not in changes:  # else prefill knows
        told = actions.pop(0)
        assert told == HelloRefused(PREFILL.incarnation, str(actions[0].error))
    assert kinds(actions) == ["RoomEnded", "RoomDrained", "Disconnect"]
    assert isinstance(actions[0].error, HandshakeError)
    assert text in str(actions[0].error)
    assert peer.control.counters["handshakes_refused"] == 1
    assert peer.control.num_rooms == 0


# --- what is dropped ------------------------------------------------------------------------------

BEFORE = PeerId(PREFILL.name, PREFILL.incarnation - 1)


@pytest.mark.parametrize(
    ("body", "by"),
    [
        (Outcome(*KEY.numbers, 0, True, 1, 2, b"", "", True), BEFORE),
        (Outcome(*KEY.numbers, 0, True, 1, 2, b"", "", True), PeerId("prefill-9", 5)),
        (HELLO, PREFILL),
        (promise(), PREFILL),
        (messages.Abort(7, 0, "no"), PREFILL),
        (ACK, PREFILL),
    ],
)
def test_what_is_old_foreign_or_not_for_decode_is_dropped(body: Any, by: PeerId) -> None:
    peer = PrefillPeer().opened()
    assert peer.say(body, by) == []
    assert peer.control.counters["frames_dropped"] == 1
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT
    assert peer.control.peers(peer.now_s) == {ADDRESS: (PREFILL, "ready")}


def test_a_frame_that_is_overtaken_or_repeated_is_dropped() -> None:
    peer = PrefillPeer().opened()
    early, late = peer.raw(peer.outcome()), peer.raw(Heartbeat())
    peer.on(FrameReceived(ADDRESS, late))
    for raw in (early, late):
        assert peer.on(FrameReceived(ADDRESS, raw)) == []
    assert peer.control.counters["frames_dropped"] == 2
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT


def test_a_frame_of_another_version_changes_nothing_for_a_worker_that_is_known() -> None:
    peer = PrefillPeer().opened()
    raw = of_another_version(peer.raw(peer.outcome()))
    assert peer.on(FrameReceived(ADDRESS, raw)) == []
    assert peer.control.counters == {"frames_dropped": 1, "dropped: VersionError": 1}
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT


def test_a_restarted_worker_counts_its_frames_from_one() -> None:
    peer = PrefillPeer().opened()
    reply = messages.HelloReply(DIGEST, Topology(4), ("",), known=PREFILL.incarnation)
    peer.on(FrameReceived(ADDRESS, peer.raw(reply, newer(PREFILL), seq=1)))
    assert peer.control.peers(peer.now_s) == {ADDRESS: (newer(PREFILL), "ready")}


def test_a_frame_on_a_link_that_is_closed_is_dropped() -> None:
    peer = PrefillPeer()
    assert peer.greet() == []
    assert peer.control.counters["frames_dropped"] == 1


@pytest.mark.parametrize(
    "tag",
    [
        b"junk",
        ChunkTag(PREFILL.incarnation - 1, *KEY.numbers, 0, 0).pack(),
        ChunkTag(PREFILL.incarnation, 8, 0, 0, 0).pack(),
        ChunkTag(PREFILL.incarnation, 7, 1, 0, 0).pack(),
    ],
)
def test_a_notification_of_something_else_is_dropped(tag: bytes) -> None:
    peer = PrefillPeer().opened()
    assert peer.on(Arrived(tag)) == []
    assert peer.control.counters["tags_dropped"] == 1
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT


# --- aborts and drains ----------------------------------------------------------------------------


def test_what_waits_for_a_worker_is_promised_in_the_order_in_which_it_was_opened() -> None:
    """Requests that share a prefix wait for the first of them."""
    peer = PrefillPeer()
    rooms = [17 * at % 101 for at in range(1, 40)]
    for room in rooms:
        peer.open(promise(room))
    peer.greet()
    assert [body.room for body in peer.take_said() if isinstance(body, Promise)] == rooms


def test_a_fence_drains_the_rooms_of_its_incarnation_only_and_bars_it() -> None:
    peer = PrefillPeer().opened()
    peer.on(Fence(BEFORE))
    peer.on(Fence(PeerId("prefill-9", PREFILL.incarnation)))
    assert peer.expected == 1
    actions = peer.on(Fence(PREFILL))
    assert kinds(actions) == ["RoomEnded", "Hello", "RoomDrained"]
    told = HelloRefused(PREFILL.incarnation, "prefill-0 life 5 was fenced", True)
    assert peer.greet() == [told], "a fenced incarnation is not met again, and hears so"
    assert peer.greet(refused="that is known") == [], "once it has said so, it is not answered"
    assert peer.control.counters["frames_dropped"] == 2
    peer.open(promise(8))
    assert kinds(peer.greet(newer(PREFILL))) == ["Promise"]


def test_a_worker_that_says_farewell_has_fenced_itself() -> None:
    peer = PrefillPeer().opened()
    peer.on(ENOUGH)
    peer.open(promise(8))
    actions = peer.say(messages.Fenced())
    assert [action for action in actions if isinstance(action, RoomDrained)] == [
        RoomDrained(KEY), RoomDrained(RoomKey(8, 0)),
    ]  # fmt: skip
    assert peer.control.num_rooms == 0
    assert peer.open(promise(9)) == [], "nothing is promised to it any more"


# --- workers that come and go ---------------------------------------------------------------------


def test_a_worker_that_does_not_know_us_is_greeted_again() -> None:
    peer = PrefillPeer().opened()
    assert peer.say(HelloWanted()) == [HELLO]
    assert peer.say(HelloWanted()) == [], "a hello is on its way already"
    assert peer.control.peers(peer.now_s)[ADDRESS] == (PREFILL, "connecting")
    assert peer.greet() == []
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT, "it is the same process: the room goes on"
    assert peer.control.peers(peer.now_s)[ADDRESS] == (PREFILL, "ready")


def test_a_hello_wanted_by_its_successor_ends_a_worker_for_good() -> None:
    peer = PrefillPeer().opened()
    assert peer.say(HelloWanted(), newer(PREFILL)) == [HELLO], "it may be late: it is asked"
    peer.open(promise(8))
    assert kinds(peer.greet(newer(PREFILL))) == ["RoomEnded", "Promise"]
    peer.open(promise(9))
    assert kinds(peer.greet(PREFILL)) == ["HelloRefused"], "of the old one; nothing is promised"
    assert peer.control.counters["dropped: FormerLifeError"] == 1


def test_a_worker_that_is_started_again_behind_the_clock_takes_its_place_at_once() -> None:
    peer = PrefillPeer().opened()
    assert kinds(peer.greet(BEFORE)) == ["RoomEnded"], "of what was promised to the one before"
    assert peer.control.peers(peer.now_s) == {ADDRESS: (BEFORE, "ready")}
    assert kinds(peer.greet(PREFILL)) == ["HelloRefused"]
    assert peer.control.peers(peer.now_s) == {ADDRESS: (BEFORE, "ready")}


def test_a_reply_that_answers_no_present_hello_takes_no_place() -> None:
    """It is of a process that came between two that are known here, and is gone."""
    peer = PrefillPeer().opened()
    late = msgspec.structs.replace(peer.reply, known=0)
    [hello] = peer.say(late, BEFORE)
    assert (hello, peer.known) == (HELLO, PREFILL.incarnation)
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT
    assert peer.say(late, BEFORE) == [], "a hello is on its way already"
    peer.greet()
    assert peer.control.peers(peer.now_s) == {ADDRESS: (PREFILL, "ready")}


def test_a_hello_says_the_nonce_that_was_wanted_last() -> None:
    peer = PrefillPeer()
    peer.open()
    for nonce in (77, 78):
        effects = peer.control.on(FrameReceived(ADDRESS, peer.raw(HelloWanted(nonce))), peer.now_s)
        assert messages.decode(effects[0].raw).body.nonce == nonce
    assert peer.say(HelloWanted()) == [], "from who could not read a frame: that one is on its way"


def test_a_room_whose_promise_may_be_out_is_listened_for_though_saying_it_raised() -> None:
    peer = PrefillPeer()
    peer.open()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    peer.control._links.send = broken  # type: ignore[method-assign]
    effects = peer.control.on(FrameReceived(ADDRESS, peer.raw(peer.reply)), peer.now_s)
    assert effects[-1] == Expect(1)


def test_a_silent_worker_is_suspect_gets_no_new_rooms_and_is_not_dead() -> None:
    peer = PrefillPeer().opened()
    peer.say(PromiseAck(*KEY.numbers, 0))
    assert peer.pass_time(TIMING.suspect_after_s + 0.5) == [Heartbeat()] * 3
    assert peer.control.peers(peer.now_s) == {ADDRESS: (PREFILL, "suspect")}
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT, "its rooms have their own deadlines"
    assert peer.open(promise(8)) == []
    assert peer.say(Heartbeat()) == [promise(8)], "it speaks: the room is promised"
    assert peer.say(peer.outcome())[-1] == RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")


def test_an_idle_worker_is_forgotten_only_when_it_is_silent_and_has_no_room() -> None:
    peer = PrefillPeer().opened()
    peer.on(ENOUGH)
    assert Disconnect(ADDRESS) not in peer.pass_time(2 * TIMING.forget_after_s), "it owes proof"
    peer.say(Drained(*KEY.numbers, 0))
    assert Disconnect(ADDRESS) not in peer.pass_time(TIMING.forget_after_s), "it has just spoken"
    assert Disconnect(ADDRESS) in peer.pass_time(2.0)
    assert kinds(peer.open(promise(8))) == ["Connect", "Hello"]


def test_a_refusal_later_on_fails_what_waits_and_still_drains_what_was_promised() -> None:
    peer = PrefillPeer().opened()
    peer.say(HelloWanted())
    peer.open(promise(8))
    actions = peer.greet(refused="too many")
    assert [ended.key for ended in ends(actions)] == [RoomKey(8, 0)]
    peer.take_said()
    peer.on(ENOUGH)
    assert peer.take_said() == [Abort(*KEY.numbers, "enough")]
    assert peer.say(Drained(*KEY.numbers, 0)) == [RoomDrained(KEY)]
    peer.open(promise(9))
    assert HELLO in peer.pass_time(5.0), "a later request tries again"
    assert kinds(peer.greet(refused="too many")) == ["RoomEnded", "RoomDrained", "Disconnect"]


def test_a_worker_that_holds_us_for_dead_has_ended_our_rooms_and_still_drains_them() -> None:
    """It takes no frame of ours, and answers none with the Hello's life."""
    peer = PrefillPeer().opened()
    said = peer.say(msgspec.structs.replace(peer.reply, refused="decode-0 was fenced", known=0))
    (ended,) = ends(said)
    assert (ended.key, ended.poll) == (KEY, KVPoll.FAILED)
    assert not any(isinstance(one, RoomDrained) for one in said), "its writes may still land"
    assert peer.expected == 1
    assert peer.control.peers(peer.now_s) == {ADDRESS: (PREFILL, "connecting")}
    assert peer.say(Drained(*KEY.numbers, 0)) == [RoomDrained(KEY)]


def test_late_words_of_an_earlier_use_of_a_room_number_are_nothing_to_the_next() -> None:
    """The room was used before (ticket 1), and is used again (ticket 2): only what bears ticket 2
    counts."""
    peer = PrefillPeer()
    peer.open(msgspec.structs.replace(promise(), ticket=2))
    peer.greet()
    old = msgspec.structs.replace(peer.outcome(aux=b"old"), ticket=1)
    assert peer.say(old) == [OutcomeAck(*KEY.numbers, 0, ticket=1)], (
        "so that prefill stops repeating it"
    )
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT
    assert ends(peer.on(ENOUGH))
    peer.say(Drained(*KEY.numbers, 0, ticket=1))
    assert peer.expected == 1, "nothing is proved of the new promise"
    assert RoomDrained(KEY) in peer.say(Drained(*KEY.numbers, 0, ticket=2))


SETTLING = dataclasses.replace(TIMING, fence_settle_s=0.5)


def test_a_drained_that_took_the_end_of_an_agent_waits_likewise() -> None:
    peer = PrefillPeer(SETTLING).opened()
    peer.say(peer.outcome(ok=False, drained=False))
    token = Drained(*KEY.numbers, 0, promise().ticket, settle=True)
    assert peer.say(Drained(*KEY.numbers, 0, settle=True)) == [Settle(token, 0.5)]
    assert peer.say(Drained(*KEY.numbers, 0, settle=True)) == []
    assert peer.expected == 1
    assert peer.on(Settled(token)) == [RoomDrained(KEY)]
    assert peer.on(Settled(token)) == []


def test_what_has_settled_is_nothing_to_another_use_of_the_room_number() -> None:
    peer = PrefillPeer(SETTLING).opened()
    assert ends(peer.on(ENOUGH))
    word = Drained(*KEY.numbers, 0, settle=True)
    assert peer.say(word) == [Settle(word, 0.5)]
    assert RoomDrained(KEY) in peer.say(Drained(*KEY.numbers, 0)), (
        "another word of it may be proof at once"
    )
    peer.open(msgspec.structs.replace(promise(), ticket=1))
    assert ends(peer.on(ENOUGH))
    assert peer.on(Settled(word)) == []
    assert peer.expected == 1


# --- rooms that decode does not open: prefill is told until it answers ----------------------------

NO_ROOM = "no room for it"
TOLD = Abort(*KEY.numbers, NO_ROOM, 9)


def refuse(peer: PrefillPeer, key: RoomKey = KEY, ticket: int = 9) -> list[Any]:
    return peer.on(RefuseRoom(key, ticket, ADDRESS, NO_ROOM))


def test_prefill_is_told_as_soon_as_it_is_there_and_its_answer_frees_the_number() -> None:
    peer = PrefillPeer()
    assert refuse(peer) == [Connect(ADDRESS), HELLO]
    with pytest.raises(InternalError, match="room 7 generation 0 is open already"):
        peer.open()
    assert peer.greet() == [TOLD]
    assert peer.expected == 0, "no page of ours is known there"
    assert peer.say(Drained(*KEY.numbers, 0, 9)) == [RoomDrained(KEY)]
    assert peer.control.num_rooms == 0
    assert kinds(peer.open()) == ["Promise"]


def test_it_is_told_again_until_it_answers() -> None:
    peer = PrefillPeer().opened()
    assert refuse(peer, RoomKey(8, 0)) == [Abort(8, 0, "no room for it", 9)]
    again = [body for body in peer.pass_time(3.0) if isinstance(body, Abort)]
    assert len(again) >= 2
    assert peer.say(Drained(8, 0, 0, 8)) == [], "an answer to an earlier use of the number"
    assert peer.say(Drained(8, 0, 0, 9)) == [RoomDrained(RoomKey(8, 0))]
    assert not [body for body in peer.pass_time(3.0) if isinstance(body, Abort)]


@pytest.mark.parametrize("end", ["time", "no such address", "another model", "replaced", "fenced"])
def test_a_worker_that_cannot_answer_is_not_waited_for_long(end: str) -> None:
    peer = PrefillPeer()
    refuse(peer)
    if end in ("time", "replaced", "fenced"):
        peer.greet()
    said = {
        "time": lambda: peer.pass_time(TIMING.bootstrap_timeout_s),
        "no such address": lambda: peer.on(ConnectFailed(ADDRESS, TransferError("not found"))),
        "another model": lambda: peer.greet(refused="another model"),
        "replaced": lambda: peer.greet(by=newer(PREFILL)),
        "fenced": lambda: peer.on(Fence(PREFILL)),
    }[end]()
    assert [action for action in said if isinstance(action, RoomDrained)] == [RoomDrained(KEY)]
    assert peer.control.num_rooms == 0


def test_an_abort_before_prefill_is_there_frees_the_pages_at_once_and_is_told_later() -> None:
    peer = PrefillPeer()
    peer.open()
    assert kinds(peer.on(ENOUGH)) == ["RoomEnded", "RoomDrained"]
    assert peer.on(ENOUGH) == [], "again: no-op; the refusal goes on"
    assert peer.greet() == [Abort(*KEY.numbers, "enough", promise().ticket)]
    assert peer.on(ENOUGH) == []
    assert peer.control.num_rooms == 1, "it waits for the answer"
    assert peer.say(Drained(*KEY.numbers, 0, promise().ticket)) == [], (
        "which is no news: the number was free already"
    )
    assert peer.control.num_rooms == 0


def test_a_number_that_is_used_again_before_that_is_not_refused_any_more() -> None:
    peer = PrefillPeer()
    peer.open()
    peer.on(ENOUGH)
    assert [body for body in peer.open() if not isinstance(body, Hello)] == []
    assert peer.greet() == [promise()]
    assert peer.control.num_rooms == 1


# --- all that is taken ----------------------------------------------------------------------------


def _frame(body: Any, by: PeerId = PREFILL) -> FrameReceived[str]:
    return FrameReceived(ADDRESS, messages.encode(by, 99, body))


INPUTS: dict[str, tuple[Any, list[str]]] = {
    "a room to open": (OpenRoom(promise(8), ADDRESS), ["Promise"]),
    "a worker to meet": (MeetPrefill(ADDRESS), ["PrefillReady"]),
    "a room to refuse": (RefuseRoom(RoomKey(8, 0), 9, ADDRESS, "no room"), ["Abort"]),
    "a room to end": (ENOUGH, ["RoomEnded", "Abort"]),
    "other weights": (MoveWeights("v2"), ["RoomEnded", "Abort"]),
    "a fence": (Fence(PREFILL), ["RoomEnded", "Hello", "RoomDrained"]),
    "a frame": (FrameReceived(ADDRESS, b"junk"), []),
    "a frame that raised": (
        FrameFailed(_frame(PromiseAck(*KEY.numbers, 0)), OSError("on purpose")),
        ["RoomEnded", "Abort"],
    ),
    "a frame that raised, of another life": (
        FrameFailed(_frame(PromiseAck(*KEY.numbers, 0), BEFORE), OSError("on purpose")),
        [],
    ),
    "a notification": (Arrived(b"junk"), []),
    "a transport that has settled": (Settled(BEFORE), []),
    "a peer that is unreachable": (PeerUnreachable(PREFILL, OSError("reset")), []),
    "a copy of no staging": (CopyDone(1), []),
    "an address that cannot be": (ConnectFailed("tcp://other", OSError("no such")), []),
    "a connection": (Reached(ADDRESS), []),
    "a connection that broke": (Unreached(ADDRESS, "gone"), []),
    "time": (Tick(), []),
    "the end of our agent": (AgentDestroyed(), ["Fenced"]),
}


@pytest.mark.parametrize(("what", "follows"), INPUTS.values(), ids=INPUTS)
def test_what_follows_from_each_input(what: Any, follows: list[str]) -> None:
    peer = PrefillPeer().opened()
    peer.say(PromiseAck(*KEY.numbers, 0))
    assert kinds(peer.on(what)) == follows


def test_these_are_all_inputs_there_are_and_any_other_raises() -> None:
    writes = WriteDone(1, 64), WriteFailed(1, OSError("reset"), drained=False), WriteDrained(1)
    taken = members(DecodeInput) - set(map(type, writes))
    assert {type(what) for what, _ in INPUTS.values()} == taken
    for other in (*writes, AddRoom(KEY, 10, PROMPT), RoomDrained(KEY), promise(), KEY, None):
        with pytest.raises(InternalError, match="takes no"):
            PrefillPeer().on(other)  # type: ignore[arg-type]


# --- the same tokens ------------------------------------------------------------------------------


def test_a_promise_and_an_abort_name_the_prompt_and_the_process_that_they_are_said_to() -> None:
    peer = PrefillPeer()
    peer.open(msgspec.structs.replace(promise(), life=77))
    sent: list[Any] = []
    on = peer.control.on

    def heard(what: Any, now_s: float) -> list[Any]:
        effects = on(what, now_s)
        frames = [effect.raw for effect in effects if isinstance(effect, SendFrame)]
        sent.extend(messages.decode(raw).body for raw in frames)
        return effects

    peer.control.on = heard  # type: ignore[method-assign]
    peer.greet()
    peer.after(TIMING.resend_s)
    peer.on(AbortRoom(KEY, "test"))
    words = [body for body in sent if isinstance(body, Promise | messages.Abort)]
    assert [type(word) for word in words] == [Promise, Promise, messages.Abort]
    assert {(word.digest, word.life) for word in words} == {(PROMPT, PREFILL.incarnation)}


def test_prefills_other_prompt_is_known_for_what_it_is_and_the_pages_are_free_at_once() -> None:
    peer = PrefillPeer().opened()
    why = "decode waits for other tokens"
    no = messages.Outcome(7, 0, 0, False, 0, 0, b"", why, True, 0, FailureCode.PROMPT_MISMATCH)
    ended, drained = [effect for effect in peer.say(no) if not isinstance(effect, OutcomeAck)]
    assert (type(ended.error), drained) == (PromptMismatchError, RoomDrained(KEY))
    assert why in str(ended.error)
    assert peer.expected == 0


PROMISE = promise(fill_len=20, pages=(5, 3, 9, 7))
WHAT = "room 7 generation 0, chunk 0 of prefill rank 0"


class Looker(PrefillPeer):
    """Four pages are promised to a prefill rank that sends checksums."""

    def __init__(self) -> None:
        super().__init__(hello=msgspec.structs.replace(HELLO, checksums=("xxh3", "crc32")))
        self.reply = msgspec.structs.replace(self.reply, checksum="crc32")
        self.open(PROMISE)
        self.greet()
        self.take_said()

    def lands(self, chunk: int, first: int, *sums: int, **fields: Any) -> list[Any]:
        raw = np.array(sums, "<u4").tobytes()
        fields = {"num_pages": len(sums), **fields}
        tag = ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, chunk, first=first, sums=raw, **fields)
        return self.on(Arrived(tag.pack()))


def test_a_chunk_has_landed_when_its_pages_have_passed() -> None:
    peer = Looker()
    (first,) = peer.lands(0, 0, 11, 12, part=0, num_parts=1)
    assert peer.lands(1, 2, 13, part=0, num_parts=2, num_pages=2) == [], "the other part is to come"
    assert peer.lands(1, 2, 13, part=0, num_parts=2, num_pages=2) == []
    (second,) = peer.lands(1, 3, 14, part=1, num_parts=2, num_pages=2)
    assert kinds([first, second]) == ["LookAt"] * 2
    assert (first.plan.algorithm, first.what) == ("crc32", WHAT)
    spans = [*first.spans, *second.spans]
    assert [page for span in spans for page in span.pages.tolist()] == [5, 3, 9, 7]
    assert np.frombuffer(b"".join(span.sums for span in spans), "<u4").tolist() == [11, 12, 13, 14]
    outcome = msgspec.structs.replace(peer.outcome(num_pages=4), num_chunks=2, num_units=4)
    assert kinds(peer.say(outcome)) == ["OutcomeAck"], "its word is not enough"
    assert peer.on(PagesLookedAt(second.look_id)) == []
    assert peer.lands(0, 0, 11, 12) == [], "repeated"
    assert peer.on(PagesLookedAt(first.look_id)) == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")]
    assert peer.control.counters == {"checksums": 7}


def test_a_page_that_differs_ends_the_room_and_prefill_hears_why() -> None:
    peer = Looker()
    (look,) = peer.lands(0, 0, 11, 12, 13, 14)
    error = ChecksumError(f"{WHAT}: page 3 does not hold what was written")
    ended, abort = peer.on(PagesLookedAt(look.look_id, error))
    assert ended == RoomEnded(KEY, KVPoll.FAILED, error)
    assert (abort.code, abort.reason) == (FailureCode.CHECKSUM, str(error))
    assert peer.on(PagesLookedAt(look.look_id, error)) == []
    assert peer.control.counters["checksum_mismatches"] == 1


def test_a_look_that_ends_behind_its_room_changes_nothing() -> None:
    peer = Looker()
    (look,) = peer.lands(0, 0, 11, 12, 13, 14)
    peer.say(peer.outcome(ok=False))
    assert peer.poll() is None
    peer.open(msgspec.structs.replace(PROMISE, ticket=2))
    assert peer.on(PagesLookedAt(look.look_id, ChecksumError("late"))) == []
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize(
    ("tags", "why"),
    [
        ([(0, 0, 11, 12), (1, 0, 11, 12)], "pages 0 to 2 of group -1 come twice"),
        ([(0, 2, 11, 12, 13)], "units 2 to 5 of 4 pages"),
        ([(0, 0)], "0 checksums for 2 pages"),
        ([(0, 0, 11)], "1 checksums for 2 pages"),
        ([(0, 0, 11, 12, {"group": 0})], "out of range"),
    ],
    ids=str,
)
def test_each_page_has_one_checksum_of_each_writer(tags: list[Any], why: str) -> None:
    peer = Looker()
    for chunk, first, *sums in tags:
        more = sums.pop() if sums and isinstance(sums[-1], dict) else {}
        more = more if len(sums) > 1 else {"num_pages": 2, **more}
        out = peer.lands(chunk, first, *sums, **more)
    assert kinds(out) == ["RoomEnded", "Abort"]
    assert isinstance(out[0].error, ChecksumError)
    assert why in str(out[0].error)


def test_where_nothing_is_agreed_a_chunk_lands_at_once() -> None:
    peer = PrefillPeer().opened()
    peer.on(Arrived(ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, 0, num_pages=2).pack()))
    assert peer.poll() is KVPoll.TRANSFERRING


def test_an_algorithm_that_was_not_offered_is_refused() -> None:
    peer = PrefillPeer()
    peer.open()
    refused = peer.greet(checksum="crc32")
    assert kinds(refused)[0] == "HelloRefused"
    assert "checksums" in refused[0].reason
    assert not any(isinstance(one, LookAt) for one in refused)
