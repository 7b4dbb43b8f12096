"""Decode's links and rooms opposite a hand-played prefill worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from prefixkv.control.decode import Connect, Disconnect, RankDrained, Settle
from prefixkv.errors import AbortedError, HandshakeError, PeerLostError, RequestError, TransferError
from prefixkv.protocol import messages
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Heartbeat,
    Hello,
    HelloWanted,
    Outcome,
    OutcomeAck,
    Promise,
    PromiseAck,
    Topology,
)
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.tags import ChunkTag
from tests.control.wire import (
    ADDRESS,
    DIGEST,
    HELLO,
    KEY,
    PREFILL,
    TIMING,
    PrefillPeer,
    kinds,
    newer,
    promise,
)

ACK = OutcomeAck(*KEY, 0)
WHY = AbortedError("enough")


def ends(actions: list[Any]) -> list[RoomEnded]:
    return [action for action in actions if isinstance(action, RoomEnded)]


def test_the_path_of_one_room() -> None:
    peer = PrefillPeer()
    endpoint = peer.endpoint
    assert peer.open() == [Connect(ADDRESS), HELLO]
    assert endpoint.poll(KEY) is KVPoll.BOOTSTRAPPING
    assert endpoint.num_expected == 0, "nobody knows the pages yet"
    assert peer.greet() == [promise()]
    assert endpoint.num_expected == 1
    assert peer.open(promise(8, pages=(1, 2))) == [promise(8, pages=(1, 2))], (
        "known by now: promised at once"
    )
    assert endpoint.num_expected == 2
    peer.say(PromiseAck(*KEY, 0))
    assert peer.call("on_arrival", ChunkTag(PREFILL.incarnation, *KEY, 0, 0).pack()) == []
    assert endpoint.poll(KEY) is KVPoll.TRANSFERRING
    assert peer.say(peer.outcome()) == [ACK, RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")]
    assert (endpoint.poll(KEY), endpoint.num_rooms, endpoint.num_expected) == (None, 1, 1)
    assert peer.say(peer.outcome()) == [ACK], "our acknowledgement was lost: said again"
    assert not endpoint.counters


def test_a_room_is_opened_once() -> None:
    peer = PrefillPeer().opened()
    with pytest.raises(RequestError, match="room 7 generation 0"):
        peer.open()
    assert kinds(peer.open(promise(generation=1))) == ["Promise"]


def test_hello_is_said_again_until_answered_also_for_longer_than_a_heartbeat() -> None:
    peer = PrefillPeer()
    peer.open()
    start_s, times = peer.now_s, []
    for _ in range(4):
        peer.now_s = peer.endpoint.wake_s
        times += [peer.now_s - start_s for body in peer.call("tick") if isinstance(body, Hello)]
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
    assert peer.endpoint.num_rooms == 0
    assert Disconnect(ADDRESS) in peer.pass_time(TIMING.forget_after_s)
    assert peer.endpoint.peers(peer.now_s) == {}
    assert peer.endpoint.wake_s == float("inf")


REFUSALS = {
    "another model": (
        {"digest": msgspec.structs.replace(DIGEST, weights_version="2")},
        "weights_version differs",
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
    assert kinds(actions) == ["RoomEnded", "RoomDrained", "Disconnect"]
    assert isinstance(actions[0].error, HandshakeError)
    assert text in str(actions[0].error)
    assert peer.endpoint.counters["handshakes_refused"] == 1
    assert peer.endpoint.num_rooms == 0


def test_an_address_that_does_not_exist_fails_its_rooms() -> None:
    peer = PrefillPeer()
    peer.open()
    error = TransferError("no such address")
    assert kinds(peer.call("unreachable", ADDRESS, error)) == [
        "RoomEnded",
        "RoomDrained",
        "Disconnect",
    ]
    assert peer.call("unreachable", ADDRESS, error) == []


# --- what is dropped ------------------------------------------------------------------------------

BEFORE = PeerId(PREFILL.name, PREFILL.incarnation - 1)


@pytest.mark.parametrize(
    ("body", "by"),
    [
        (Outcome(*KEY, 0, True, 1, 2, b"", "", True), BEFORE),
        (Outcome(*KEY, 0, True, 1, 2, b"", "", True), PeerId("prefill-9", 5)),
        (messages.HelloReply(DIGEST, Topology(4), ()), BEFORE),
        (HelloWanted(), BEFORE),
        (HELLO, PREFILL),
        (promise(), PREFILL),
        (messages.Abort(7, 0, "no"), PREFILL),
        (ACK, PREFILL),
    ],
)
def test_what_is_old_foreign_or_not_for_decode_is_dropped(body: Any, by: PeerId) -> None:
    peer = PrefillPeer().opened()
    assert peer.say(body, by) == []
    assert peer.endpoint.counters["frames_dropped"] == 1
    assert peer.endpoint.poll(KEY) is KVPoll.WAITING_FOR_INPUT
    assert peer.endpoint.peers(peer.now_s) == {ADDRESS: (PREFILL, "ready")}


def test_a_frame_that_is_overtaken_or_repeated_is_dropped() -> None:
    peer = PrefillPeer().opened()
    early, late = peer.raw(peer.outcome()), peer.raw(Heartbeat())
    peer.call("on_frame", ADDRESS, late)
    for raw in (early, late):
        assert peer.call("on_frame", ADDRESS, raw) == []
    assert peer.endpoint.counters["frames_dropped"] == 2
    assert peer.endpoint.poll(KEY) is KVPoll.WAITING_FOR_INPUT


def test_a_restarted_worker_counts_its_frames_from_one() -> None:
    peer = PrefillPeer().opened()
    reply = messages.HelloReply(DIGEST, Topology(4), ("",))
    peer.call("on_frame", ADDRESS, peer.raw(reply, newer(PREFILL), seq=1))
    assert peer.endpoint.peers(peer.now_s) == {ADDRESS: (newer(PREFILL), "ready")}


def test_a_frame_on_a_link_that_is_closed_is_dropped() -> None:
    peer = PrefillPeer()
    assert peer.greet() == []
    assert peer.endpoint.counters["frames_dropped"] == 1


@pytest.mark.parametrize(
    "tag",
    [
        b"junk",
        ChunkTag(PREFILL.incarnation - 1, *KEY, 0, 0).pack(),
        ChunkTag(PREFILL.incarnation, 8, 0, 0, 0).pack(),
        ChunkTag(PREFILL.incarnation, 7, 1, 0, 0).pack(),
    ],
)
def test_a_notification_of_something_else_is_dropped(tag: bytes) -> None:
    peer = PrefillPeer().opened()
    assert peer.call("on_arrival", tag) == []
    assert peer.endpoint.counters["tags_dropped"] == 1
    assert peer.endpoint.poll(KEY) is KVPoll.WAITING_FOR_INPUT


# --- aborts and drains ----------------------------------------------------------------------------


def test_an_abort_before_the_promise_needs_no_proof() -> None:
    peer = PrefillPeer()
    peer.open()
    assert peer.call("abort", KEY, WHY) == [RoomEnded(KEY, KVPoll.FAILED, WHY), RoomDrained(KEY)]
    assert peer.call("abort", KEY, WHY) == []
    assert kinds(peer.greet()) == ["Abort"], (
        "the promise is not made any more, and prefill need not wait for it"
    )


def test_an_abort_after_the_promise_is_repeated_until_drained() -> None:
    peer = PrefillPeer().opened()
    assert peer.call("abort", KEY, WHY) == [
        RoomEnded(KEY, KVPoll.FAILED, WHY),
        Abort(*KEY, "enough"),
    ]
    assert peer.endpoint.num_expected == 1
    said = peer.pass_time(TIMING.drain_timeout_s)
    assert said.count(Abort(*KEY, "enough")) == 3
    assert said.count(RoomOverdue(KEY)) == 1, "after its deadline it is reported"
    assert peer.endpoint.num_expected == 1, "and still not drained"
    assert peer.say(Drained(*KEY, 0)) == [RoomDrained(KEY)]
    assert (peer.endpoint.num_expected, peer.endpoint.num_rooms) == (0, 0)
    assert Abort(*KEY, "enough") not in peer.pass_time(20.0)


def test_a_failed_outcome_says_whether_it_is_drained() -> None:
    for drained in (True, False):
        peer = PrefillPeer().opened()
        actions = peer.say(peer.outcome(ok=False, drained=drained))
        assert kinds(actions) == ["OutcomeAck", "RoomEnded", "RoomDrained" if drained else "Abort"]


@pytest.mark.parametrize("ok", [True, False])
def test_an_outcome_that_crosses_our_abort_changes_no_end_but_drains(ok: bool) -> None:
    peer = PrefillPeer().opened()
    peer.call("abort", KEY, WHY)
    assert peer.say(peer.outcome(ok)) == [ACK, RoomDrained(KEY)]


def test_drained_of_an_older_incarnation_proves_nothing() -> None:
    peer = PrefillPeer().opened()
    peer.call("abort", KEY, WHY)
    peer.greet(newer(PREFILL))
    for by in (PREFILL, newer(PREFILL)):
        assert peer.say(Drained(*KEY, 0), by) == []
    assert peer.endpoint.num_expected == 1
    assert peer.call("fence", PREFILL) == [RoomDrained(KEY)]


def test_a_restarted_worker_ends_the_rooms_of_the_one_before_and_waits_for_a_fence() -> None:
    peer = PrefillPeer().opened()
    [ended] = ends(peer.greet(newer(PREFILL)))
    assert isinstance(ended.error, PeerLostError)
    assert peer.take_said() == [], "nobody is left to be told"
    assert peer.endpoint.num_expected == 1
    said = peer.pass_time(TIMING.drain_timeout_s)
    assert RoomOverdue(KEY) in said
    assert not any(isinstance(body, Abort) for body in said)
    peer.say(Heartbeat(), newer(PREFILL))
    assert kinds(peer.open(promise(8))) == ["Promise"], "the new one is worked with"
    assert peer.call("fence", PREFILL) == [RoomDrained(KEY)]


def test_what_waits_for_a_worker_is_promised_to_the_one_that_takes_its_place() -> None:
    peer = PrefillPeer().opened()
    peer.say(HelloWanted())
    peer.open(promise(8))
    ended, promised = peer.greet(newer(PREFILL))
    assert (ended.key, promised) == (KEY, promise(8))


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
    peer.call("fence", BEFORE)
    peer.call("fence", PeerId("prefill-9", PREFILL.incarnation))
    assert peer.endpoint.num_expected == 1
    actions = peer.call("fence", PREFILL)
    assert kinds(actions) == ["RoomEnded", "Hello", "RoomDrained"]
    assert peer.greet() == [], "a fenced incarnation is not met again"
    assert peer.endpoint.counters["frames_dropped"] == 1
    peer.open(promise(8))
    assert kinds(peer.greet(newer(PREFILL))) == ["Promise"]


def test_a_worker_that_says_farewell_has_fenced_itself() -> None:
    peer = PrefillPeer().opened()
    peer.call("abort", KEY, WHY)
    peer.open(promise(8))
    actions = peer.say(messages.Fenced())
    assert [action for action in actions if isinstance(action, RoomDrained)] == [
        RoomDrained(KEY), RoomDrained(RoomKey(8, 0)),
    ]  # fmt: skip
    assert peer.endpoint.num_rooms == 0


# --- who is there ---------------------------------------------------------------------------------


def test_a_worker_that_does_not_know_us_is_greeted_again() -> None:
    peer = PrefillPeer().opened()
    assert peer.say(HelloWanted()) == [HELLO]
    assert peer.say(HelloWanted()) == [], "a hello is on its way already"
    assert peer.endpoint.peers(peer.now_s)[ADDRESS] == (PREFILL, "connecting")
    assert peer.greet() == []
    assert peer.endpoint.poll(KEY) is KVPoll.WAITING_FOR_INPUT, (
        "it is the same process: the room goes on"
    )
    assert peer.endpoint.peers(peer.now_s)[ADDRESS] == (PREFILL, "ready")


def test_a_hello_wanted_by_its_successor_ends_a_worker_for_good() -> None:
    peer = PrefillPeer().opened()
    actions = peer.say(HelloWanted(), newer(PREFILL))
    assert kinds(actions) == ["RoomEnded", "Hello"]
    peer.open(promise(8))
    assert peer.greet(PREFILL) == [], "a late reply of the old one promises nothing to it"
    assert kinds(peer.greet(newer(PREFILL))) == ["Promise"]


def test_a_silent_worker_is_suspect_gets_no_new_rooms_and_is_not_dead() -> None:
    peer = PrefillPeer().opened()
    peer.say(PromiseAck(*KEY, 0))
    assert peer.pass_time(TIMING.suspect_after_s + 0.5) == [Heartbeat()] * 3
    assert peer.endpoint.peers(peer.now_s) == {ADDRESS: (PREFILL, "suspect")}
    assert peer.endpoint.poll(KEY) is KVPoll.WAITING_FOR_INPUT, "its rooms have their own deadlines"
    assert peer.open(promise(8)) == []
    assert peer.say(Heartbeat()) == [promise(8)], "it speaks: the room is promised"
    assert peer.say(peer.outcome())[-1] == RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")


def test_an_idle_worker_is_forgotten_only_when_it_is_silent_and_has_no_room() -> None:
    peer = PrefillPeer().opened()
    peer.call("abort", KEY, WHY)
    assert Disconnect(ADDRESS) not in peer.pass_time(2 * TIMING.forget_after_s), "it owes proof"
    peer.say(Drained(*KEY, 0))
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
    peer.call("abort", KEY, WHY)
    assert peer.take_said() == [Abort(*KEY, "enough")]
    assert peer.say(Drained(*KEY, 0)) == [RoomDrained(KEY)]
    peer.open(promise(9))
    assert HELLO in peer.pass_time(5.0), "a later request tries again"
    assert kinds(peer.greet(refused="too many")) == ["RoomEnded", "RoomDrained", "Disconnect"]


def test_farewell_is_said_to_whoever_is_known() -> None:
    peer = PrefillPeer().opened()
    peer.open(promise(8), "tcp://nobody")
    [frame] = peer.endpoint.farewell()
    assert (frame.address, messages.decode(frame.raw).body) == (ADDRESS, messages.Fenced())


def test_what_is_sent_is_numbered_upwards_under_our_name() -> None:
    peer = PrefillPeer()
    frames = [
        action for action in peer.endpoint.open(promise(), ADDRESS, 0.0) if hasattr(action, "raw")
    ]
    for seconds in (1.0, 2.0, 4.0, 8.0):
        frames += [action for action in peer.endpoint.tick(seconds) if hasattr(action, "raw")]
    numbers = [messages.decode(frame.raw).seq for frame in frames]
    assert len(numbers) == 5
    assert numbers == sorted(set(numbers))
    assert {messages.decode(frame.raw).sender for frame in frames} == {peer.endpoint.me}


def test_promise_is_what_was_opened() -> None:
    peer = PrefillPeer().opened()
    [machine] = peer.endpoint.rooms()
    assert isinstance(machine.promise, Promise)
    assert machine.promise == promise()


def test_late_words_of_an_earlier_use_of_a_room_number_are_nothing_to_the_next() -> None:
    """The room was used before (ticket 1), and is used again (ticket 2): only what bears ticket 2
    counts."""
    peer = PrefillPeer()
    peer.open(msgspec.structs.replace(promise(), ticket=2))
    peer.greet()
    old = msgspec.structs.replace(peer.outcome(aux=b"old"), ticket=1)
    assert peer.say(old) == [OutcomeAck(*KEY, 0, ticket=1)], "so that prefill stops repeating it"
    assert peer.endpoint.poll(KEY) is KVPoll.WAITING_FOR_INPUT
    assert ends(peer.call("abort", KEY, WHY))
    peer.say(Drained(*KEY, 0, ticket=1))
    assert peer.endpoint.num_expected == 1, "nothing is proved of the new promise"
    assert RoomDrained(KEY) in peer.say(Drained(*KEY, 0, ticket=2))


SETTLING = dataclasses.replace(TIMING, fence_settle_s=0.5)


def test_after_a_fence_pages_wait_until_what_the_kernel_holds_has_been_read() -> None:
    peer = PrefillPeer(SETTLING).opened()
    actions = peer.call("fence", PREFILL)
    assert ends(actions)
    assert actions.count(Settle(PREFILL)) == 1
    assert Settle(PREFILL) not in peer.call("fence", PREFILL), "it is at that already"
    assert "RoomDrained" not in kinds(peer.after(100.0)), (
        "time alone proves nothing: nobody may have read"
    )
    assert peer.endpoint.num_expected == 1, "the transport goes on polling"
    assert peer.call("settled", PREFILL) == [RoomDrained(KEY)]


def test_a_drained_that_took_the_end_of_an_agent_waits_likewise() -> None:
    peer = PrefillPeer(SETTLING).opened()
    peer.say(peer.outcome(ok=False, drained=False))
    token = RankDrained(KEY, 0, promise().ticket)
    assert peer.say(Drained(*KEY, 0, settle=True)) == [Settle(token)]
    assert peer.say(Drained(*KEY, 0, settle=True)) == []
    assert peer.endpoint.num_expected == 1
    assert peer.call("settled", token) == [RoomDrained(KEY)]
    assert peer.call("settled", token) == []


def test_what_has_settled_is_nothing_to_another_use_of_the_room_number() -> None:
    peer = PrefillPeer(SETTLING).opened()
    assert ends(peer.call("abort", KEY, WHY))
    assert peer.say(Drained(*KEY, 0, settle=True)) == [Settle(RankDrained(KEY, 0, 0))]
    assert RoomDrained(KEY) in peer.say(Drained(*KEY, 0)), "another word of it may be proof at once"
    peer.open(msgspec.structs.replace(promise(), ticket=1))
    assert ends(peer.call("abort", KEY, WHY))
    assert peer.call("settled", RankDrained(KEY, 0, 0)) == []
    assert peer.endpoint.num_expected == 1
