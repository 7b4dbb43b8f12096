"""What becomes of peers: it is said for the log, an operator can list those that are lost, and
each side hears where the other does not work with it. Which lives are over: what is kept, what is
forgotten first, and what a Hello has to prove."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefixkv.control import lives as module
from prefixkv.control.effects import ConnectFailed, FrameReceived, RemovePeer, Unreached
from prefixkv.control.lives import (
    IncarnationHistory,
    PeerChange,
    PeerChanges,
    merged_lost_peers,
    nonce,
)
from prefixkv.errors import ConfigError, FormerLifeError, PeerLostError
from prefixkv.protocol.commands import AbortRoom, Fence
from prefixkv.protocol.events import RoomEnded, decode_error, encode_error
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.protocol.messages import (
    Fenced,
    Heartbeat,
    Hello,
    HelloRefused,
    HelloReply,
    HelloWanted,
)
from prefixkv.ranks.leader import RankLeader
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    DIGEST,
    HELLO,
    KEY,
    PREFILL,
    ROUTE,
    SENT,
    TIMING,
    DecodePeer,
    PrefillPeer,
    kinds,
    newer,
    of,
    promise,
)

ANOTHER = msgspec.structs.replace(DIGEST, kv_scales="2")


def news(peer: PrefillPeer | DecodePeer) -> list[tuple[str, Any]]:
    return [(one.kind, one.peer) for one in peer.control.news.take()]


# --- decode ---------------------------------------------------------------------------------------


def test_decode_says_whom_it_meets_and_what_takes_its_place() -> None:
    peer = PrefillPeer().opened()
    assert peer.control.news.take() == [PeerChange("met", PREFILL, f"at {ADDRESS}")]
    peer.say(HelloWanted())
    peer.greet()
    assert news(peer) == [], "it is the same one"
    peer.greet(newer(PREFILL))
    assert news(peer) == [("over", PREFILL), ("met", newer(PREFILL))]
    peer.greet(PeerId("other", 1))
    assert peer.control.news.take()[0] == PeerChange(
        "over", newer(PREFILL), "was replaced by other life 1"
    )


def test_decode_says_what_it_refuses_and_why() -> None:
    peer = PrefillPeer()
    peer.open()
    peer.greet(digest=ANOTHER)
    [refused] = peer.control.news.take()
    assert (refused.kind, refused.peer) == ("refused", PREFILL)
    assert "kv_scales differs" in refused.why
    peer.open()
    peer.on(ConnectFailed(ADDRESS, ConfigError("no such address")))
    assert peer.control.news.take() == [PeerChange("refused", ADDRESS, "no such address")]
    peer.open()
    peer.on(Unreached(ADDRESS, "no answer"))
    peer.pass_time(TIMING.connect_timeout_s + 0.5)
    assert news(peer) == [("lost", ADDRESS)]


def test_decode_says_once_that_a_worker_is_silent_and_that_it_is_heard_again() -> None:
    peer = PrefillPeer().opened()
    peer.control.news.take()
    peer.pass_time(TIMING.suspect_after_s + 3.0)
    assert news(peer) == [("silent", PREFILL)]
    peer.say(Heartbeat())
    peer.pass_time(2.0)
    assert news(peer) == [("heard", PREFILL)]


def test_decode_says_what_is_fenced_forgotten_and_in_quarantine() -> None:
    peer = PrefillPeer().opened()
    peer.control.news.take()
    peer.on(AbortRoom(KEY, "enough"))
    peer.pass_time(TIMING.drain_timeout_s + 0.5)
    said = peer.control.news.take()
    overdue = [one for one in said if one.kind == "quarantined"]
    text = "has not proved that 2 pages of room 7 generation 0 are free"
    assert overdue == [PeerChange("quarantined", PREFILL, text)]
    peer.on(Fence(PREFILL))
    peer.on(Fence(PREFILL))
    assert peer.control.news.take() == [PeerChange("over", PREFILL, "was fenced")]
    peer.greet()
    text = f"still speaks at {ADDRESS}: prefill-0 life 5 was fenced"
    assert peer.control.news.take() == [PeerChange("refused", PREFILL, text)]
    peer.pass_time(TIMING.forget_after_s + 1.0)
    assert news(peer) == [("forgotten", ADDRESS)]


def test_nothing_answers_where_a_worker_was_closed_and_that_is_no_loss() -> None:
    peer = PrefillPeer().opened()
    peer.say(Fenced())
    peer.control.news.take()
    peer.on(Unreached(ADDRESS, "connection refused"))
    peer.pass_time(2 * TIMING.connect_timeout_s)
    assert news(peer) == [("left", ADDRESS)]


def test_decode_lists_what_is_lost_with_the_pages_that_it_may_still_write() -> None:
    peer = PrefillPeer().opened()
    peer.open(promise(8))
    lost = peer.control.lost_peers
    assert lost(peer.now_s) == {}, "it is well"
    peer.now_s += TIMING.suspect_after_s + 0.5
    assert lost(peer.now_s) == {PREFILL: ("suspect", 4)}
    peer.greet(newer(PREFILL))
    assert lost(peer.now_s) == {PREFILL: ("was superseded by life 6", 4)}
    peer.greet(PeerId("other", 1))
    assert lost(peer.now_s) == {PREFILL: ("was superseded by life 6", 4)}
    peer.on(Fence(PREFILL))
    assert lost(peer.now_s) == {}, "it holds nothing any more"


ENDS: dict[str, tuple[Callable[[PrefillPeer], Any], str]] = {
    "fenced": (lambda peer: peer.on(Fence(PREFILL)), "was fenced"),
    "left": (lambda peer: peer.say(Fenced()), "has left"),
    "replaced": (lambda peer: peer.greet(PeerId("other", 1)), "was replaced"),
}


@pytest.mark.parametrize(("end", "how"), ENDS.values(), ids=ENDS)
def test_pages_that_settle_or_are_not_proved_are_listed_by_how_their_writer_ended(
    end: Callable[[PrefillPeer], Any], how: str
) -> None:
    peer = PrefillPeer(replace(TIMING, fence_settle_s=0.5)).opened()
    peer.control.news.take()
    (ended,) = of(end(peer), RoomEnded)
    assert how in str(ended.error)
    assert how in peer.control.news.take()[0].why
    assert peer.control.lost_peers(peer.now_s) == {PREFILL: (how, 2)}


def test_a_lost_peer_is_named_on_every_rank() -> None:
    """Errors travel to rank 0 as text, and with them which peer it was."""
    lost = PeerLostError("gone", PREFILL)
    assert decode_error(Exception, encode_error(lost)).peer == PREFILL  # type: ignore[attr-defined]
    heard: list[RoomEnded] = []
    leader = RankLeader[object]("decode", 2, None, print, lambda event, _: heard.append(event))
    leader.on(1, RoomEnded(KEY, KVPoll.FAILED, lost), 0.0)
    assert heard[0].error.peer == PREFILL  # type: ignore[union-attr]


def test_ranks_have_the_same_pages() -> None:
    a, b = PeerId("p", 1), PeerId("p/1", 1)
    ranks = [{a: ("suspect", 5)}, {a: ("suspect", 2), b: ("was fenced", 1)}]
    assert merged_lost_peers(ranks) == {a: ("suspect", 5), b: ("was fenced", 1)}


# --- prefill --------------------------------------------------------------------------------------


def test_prefill_says_whom_it_meets_and_what_takes_its_place() -> None:
    peer = DecodePeer().known()
    peer.say(HELLO)
    assert news(peer) == [("met", DECODE)]
    peer.say(HELLO, newer(DECODE))
    assert news(peer) == [("over", DECODE), ("met", newer(DECODE))]
    peer.say(Fenced(), newer(DECODE))
    assert peer.control.news.take() == [PeerChange("left", newer(DECODE), "has left")]


def test_prefill_says_what_it_refuses_and_why() -> None:
    peer = DecodePeer()
    peer.say(msgspec.structs.replace(HELLO, digest=ANOTHER))
    [refused] = peer.control.news.take()
    assert (refused.kind, refused.peer) == ("refused", DECODE)
    assert "kv_scales differs" in refused.why


def test_prefill_says_which_peers_are_silent_heard_again_and_forgotten() -> None:
    peer = DecodePeer().known()
    peer.control.news.take()
    for _ in range(8):
        peer.after(1.0)
    assert news(peer) == [("silent", DECODE)]
    peer.say(Heartbeat())
    peer.after(1.0)
    assert news(peer) == [("heard", DECODE)]
    for _ in range(int(TIMING.forget_after_s) + 2):
        peer.after(1.0)
    assert news(peer) == [("silent", DECODE), ("forgotten", DECODE)]


def test_prefill_lists_what_is_lost_with_the_rooms_that_it_is_still_in() -> None:
    peer = DecodePeer().bootstrapped()
    peer.chunk(1, [30])
    lost = peer.control.lost_peers
    assert lost(peer.now_s) == {}
    late_s = peer.now_s + TIMING.suspect_after_s + 1.0
    assert lost(late_s) == {DECODE: ("suspect", 1)}
    peer.say(promise(8))
    assert lost(late_s) == {DECODE: ("suspect", 2)}
    peer.on(Fence(DECODE))
    assert lost(peer.now_s) == {DECODE: ("was fenced", 1)}, "a write of it is under way"
    peer.ended(1)
    assert lost(peer.now_s) == {}


# --- prefill hears that it is refused -------------------------------------------------------------

NO = HelloRefused(PREFILL.incarnation, "kv_scales differs")
DEAD = HelloRefused(PREFILL.incarnation, "prefill-0 life 5 was fenced", True)


def test_a_prefill_worker_that_is_refused_forgets_decode_if_nothing_was_promised() -> None:
    peer = DecodePeer().known()
    peer.control.news.take()
    assert peer.say(NO) == [RemovePeer(DECODE)]
    assert peer.control.peers(peer.now_s) == {}
    assert peer.control.counters["refused_by_peers"] == 1
    assert peer.control.news.take() == [
        PeerChange("refused", DECODE, "refuses us: kv_scales differs")
    ]
    assert kinds(peer.say(HELLO)) == ["AddPeer", "HelloReply"], "it may try again"


def test_a_refusal_ends_no_room_that_was_promised() -> None:
    peer = DecodePeer().bootstrapped()
    raw = peer.raw(NO)
    for _ in range(2):  # repeated by the network: it counts once
        assert peer.on(FrameReceived(ROUTE, raw)) == []
    assert peer.control.counters["refused_by_peers"] == 1
    assert peer.control.peers(peer.now_s) == {DECODE: "ready"}
    assert kinds(peer.chunk(1, [30])) == ["WriteJob"]


def test_a_prefill_worker_that_was_fenced_and_lives_stops_writing_there() -> None:
    peer = DecodePeer().bootstrapped()
    peer.chunk(1, [30])
    said = peer.say(DEAD)
    assert kinds(said) == ["RoomEnded", "Cancel", "RemovePeer"]
    assert (said[0].key, said[0].poll) == (SENT, KVPoll.FAILED)
    [reply] = peer.say(HELLO)
    assert isinstance(reply, HelloReply)
    assert reply.refused == f"{DECODE} holds this process for dead", "it is not met again"


@pytest.mark.parametrize("word", [NO, DEAD])
@pytest.mark.parametrize("known", [True, False])
def test_a_refusal_of_another_life_or_of_a_stranger_does_nothing(
    word: HelloRefused, known: bool
) -> None:
    peer = DecodePeer()
    if known:
        peer.bootstrapped()
    assert peer.say(msgspec.structs.replace(word, life=4)) == []
    assert peer.control.counters["refused_by_peers"] == 0
    stranger = PeerId("decode-9", 1)
    assert peer.say(word, stranger) == [], "it is not even answered"
    assert peer.say(word, newer(DECODE)) == []
    assert peer.control.peers(peer.now_s) == ({DECODE: "ready"} if known else {})
    for name in (DECODE, stranger, newer(DECODE)):
        peer.control._peers.lives.check(name)


def test_a_fenced_worker_and_decode_do_not_go_on_telling_each_other() -> None:
    """Played to the end: decode greets, prefill answers, and is told; then each is silent."""
    decode, prefill = PrefillPeer().opened(), DecodePeer().known()
    [_, hello, *_] = decode.on(Fence(PREFILL))
    words, said = [hello], 0
    while words and said < 20:
        word = words.pop()
        said += 1
        if isinstance(word, Hello | HelloRefused):
            word = msgspec.structs.replace(word, nonce=0) if isinstance(word, Hello) else word
            words += [w for w in prefill.say(word) if isinstance(w, HelloReply | HelloWanted)]
        else:
            words += [w for w in decode.say(word) if isinstance(w, Hello | HelloRefused)]
    assert not words
    assert said <= 4
    assert prefill.control.counters["refused_by_peers"] == 1
    assert prefill.control.peers(0.0) == {}


# --- what is kept ---------------------------------------------------------------------------------


def test_news_that_are_not_taken_are_bounded_and_the_oldest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KEPT", 2)
    kept = PeerChanges()
    for number in range(3):
        kept.say("met", PeerId("p", number))
    assert [one.peer for one in kept.take()] == [PeerId("p", 1), PeerId("p", 2)]
    assert kept.take() == []


def test_silence_is_forgotten_with_the_peer() -> None:
    kept = PeerChanges()
    kept.silent(PREFILL, True)
    kept.silent(PREFILL, True)
    kept.forget(PREFILL)
    kept.silent(PREFILL, False)
    kept.silent(PREFILL, True)
    assert [one.kind for one in kept.take()] == ["silent", "silent"]


A, B, C = PeerId("d0", 0x3F2A), PeerId("d0", 0x77B1), PeerId("d0", 0x1)
OTHER = PeerId("d1", 0x3F2A)


def over(lives: IncarnationHistory, life: PeerId) -> bool:
    try:
        lives.check(life)
    except FormerLifeError:
        return True
    return False


def test_how_a_life_ended_first_is_what_is_said_of_it() -> None:
    lives = IncarnationHistory()
    lives.end(A, "was fenced")
    lives.supersede(A, B)
    with pytest.raises(FormerLifeError, match="was fenced"):
        lives.check(A)


def test_of_a_name_the_lives_heard_of_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PER_NAME", 2)
    lives = IncarnationHistory()
    lives.end(A, "has left")
    lives.end(B, "has left")
    assert over(lives, A), "it speaks, so it is kept"
    lives.end(C, "has left")
    assert [over(lives, life) for life in (A, B, C)] == [True, False, True]


def test_the_names_heard_of_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    lives = IncarnationHistory()
    names = [PeerId(name, 1) for name in "abc"]
    for life in names[:2]:
        lives.end(life, "has left")
    assert over(lives, names[0])
    lives.end(names[2], "has left")
    assert [over(lives, life) for life in names] == [True, False, True]
    for life in names:
        lives.silent(life)
    assert [lives.last_silent(name) for name in "abc"] == [None, *names[1:]]


def test_a_life_that_was_silent_may_come_back_until_another_comes() -> None:
    lives = IncarnationHistory()
    lives.silent(A)
    lives.begin(A)
    assert not over(lives, A)
    lives.silent(A)
    lives.begin(B)
    assert over(lives, A)
    assert lives.last_silent("d0") is None


def test_a_nonce_is_of_two_lives_and_of_the_one_that_is_known() -> None:
    all_lives = (A, B, C)
    nonces = {
        nonce(me, them, known) for me in all_lives for them in all_lives
        for known in (None, *all_lives)
    }  # fmt: skip
    assert len(nonces) == 36
    assert all(0 < number < 2**64 for number in nonces)
    assert nonce(A, B, None) == nonce(A, B, None)
