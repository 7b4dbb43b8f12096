"""What becomes of peers: it is said for the log, an operator can list those that are lost, and
each side hears where the other does not work with it. Which lives are over: what is kept, what is
forgotten first, and what a Hello has to prove. When a control object wants to know whether a
peer's process has ended, and what it does then."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefixkv.config import ControlConfig
from prefixkv.control import lives as module
from prefixkv.control.effects import (
    ConnectFailed,
    Examine,
    FrameReceived,
    Reached,
    RemovePeer,
    Tick,
    Unreached,
)
from prefixkv.control.lives import (
    EXAMINE_S,
    IncarnationHistory,
    PeerChange,
    PeerChanges,
    merged_lost_peers,
    nonce,
)
from prefixkv.errors import ConfigError, FormerLifeError, PeerLostError
from prefixkv.protocol.commands import AbortRoom, Fence
from prefixkv.protocol.events import RoomDrained, RoomEnded, SourceFree, decode_error, encode_error
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.protocol.messages import (
    Fenced,
    Heartbeat,
    Hello,
    HelloRefused,
    HelloReply,
    HelloWanted,
    ProcessLife,
)
from prefixkv.ranks.leader import RankLeader
from prefixkv.transport.base import PeerUnreachable
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


LIFE = ProcessLife("boot", 1, 2, 4242, 17, "holder")
OTHER_LIFE = msgspec.structs.replace(LIFE, pid=4243)
GONE = Unreached(ADDRESS, "no answer")
ON = replace(TIMING, fence_settle_s=0.0)


class _Here:
    """The peer's words come from this machine."""

    is_local = True

    def on(self, what: Any) -> list[Any]:
        if isinstance(what, FrameReceived):
            what = msgspec.structs.replace(what, is_local=self.is_local)
        out: list[Any] = super().on(what)  # type: ignore[misc]
        return out


class LocalPrefill(_Here, PrefillPeer):
    def __init__(self, timing: ControlConfig = ON, life: ProcessLife | None = LIFE) -> None:
        super().__init__(timing)
        self.reply = msgspec.structs.replace(self.reply, life=life)


class LocalDecode(_Here, DecodePeer):
    def __init__(self, timing: ControlConfig = ON, life: ProcessLife | None = LIFE) -> None:
        super().__init__(timing, msgspec.structs.replace(HELLO, life=life))


def examined(effects: list[Any]) -> list[Examine]:
    return of(effects, Examine)


def looks(peer: PrefillPeer | DecodePeer, seconds: float) -> int:
    """How often something was to be looked at, the clock going on to each time that is wanted."""
    found, end_s = 0, peer.now_s + seconds
    while (wake_s := peer.control.wake_s) <= end_s:
        found += len(examined(peer.after(max(0.0, wake_s - peer.now_s))))
    peer.now_s = end_s
    return found


def begun(peer: Any) -> Any:
    """It is in a room."""
    return peer.opened() if isinstance(peer, PrefillPeer) else peer.bootstrapped()


def doubt(peer: Any) -> None:
    """It cannot be reached."""
    is_prefill = isinstance(peer, PrefillPeer)
    peer.on(GONE if is_prefill else PeerUnreachable(DECODE, OSError("the connection is reset")))


# --- either side's --------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("kind", [LocalPrefill, LocalDecode])


@BOTH
@pytest.mark.parametrize("how", ["unreachable", "silent"])
def test_a_peer_that_may_be_dead_is_looked_at_until_that_is_proved(kind: Any, how: str) -> None:
    peer = begun(kind())
    assert looks(peer, 1.0) == 0
    if how == "silent":
        peer.now_s += ON.suspect_after_s
    else:
        doubt(peer)
        assert peer.control.wake_s == peer.now_s, "at once"
    assert examined(peer.on(Tick())) == [Examine(peer.me, LIFE)]
    assert peer.control.wake_s <= peer.now_s + EXAMINE_S, "and again"
    assert examined(peer.on(Tick())) == [], "not more often"
    assert looks(peer, 1.0) == 4
    said = peer.on(Fence(peer.me, proved=True))
    [ended] = of(said, RoomEnded)
    assert ended.poll is KVPoll.FAILED
    assert isinstance(ended.error, PeerLostError)
    assert ended.error.peer == peer.me
    assert "proved dead" in str(ended.error)
    is_free = RoomDrained(KEY) if kind is LocalPrefill else SourceFree(SENT)
    assert of(said, RoomDrained | SourceFree) == [is_free]
    assert of(said, RemovePeer) == [RemovePeer(DECODE)] * (kind is LocalDecode)
    assert [news.why for news in peer.control.news.take() if news.kind == "over"] == [
        "was fenced, since it is proved dead"
    ]
    for _ in range(2):
        assert peer.control.counters["peers_proved_dead"] == 1, "another proof was on its way"
        peer.on(Fence(peer.me, proved=True))
    assert looks(peer, 30.0) == 0


@BOTH
def test_an_operators_fence_is_no_proof_and_ends_the_looking(kind: Any) -> None:
    peer = begun(kind())
    doubt(peer)
    peer.on(Fence(peer.me))
    peer.on(Fence(peer.me, proved=True))
    assert peer.control.counters["peers_proved_dead"] == 0
    assert looks(peer, 30.0) == 0
    assert "proved" not in str([news.why for news in peer.control.news.take()])


@BOTH
@pytest.mark.parametrize("why", ["not of this machine", "it says nothing"])
def test_what_is_no_evidence_is_not_looked_at(kind: Any, why: str) -> None:
    peer = kind(ON, None if why == "it says nothing" else LIFE)
    peer.is_local = why != "not of this machine"
    doubt(begun(peer))
    assert looks(peer, 30.0) == 0


@BOTH
def test_a_peer_that_has_left_is_not_looked_at(kind: Any) -> None:
    peer = begun(kind())
    doubt(peer)
    peer.say(Fenced())
    assert looks(peer, 30.0) == 0
    peer.on(Fence(peer.me, proved=True))
    assert peer.control.counters["peers_proved_dead"] == 0


# --- decode's -------------------------------------------------------------------------------------


def test_a_silent_prefill_is_looked_at_and_one_that_speaks_again_is_not() -> None:
    peer = LocalPrefill().opened()
    assert looks(peer, ON.suspect_after_s - 0.1) == 0
    assert looks(peer, 2.0) > 4
    peer.say(Heartbeat())
    looks(peer, ON.suspect_after_s)  # for as long as it may be silent
    for _ in range(20):
        peer.say(Heartbeat())
        assert looks(peer, 1.0) == 0
    assert peer.control.lost_peers(peer.now_s) == {}


def test_pages_held_for_a_former_life_are_why_it_is_looked_at() -> None:
    """Its successor is met at once; the proof is about the former."""
    peer = LocalPrefill().opened()
    successor = newer(PREFILL)
    peer.greet(successor, life=OTHER_LIFE)
    assert examined(peer.on(Tick())) == [Examine(PREFILL, LIFE)]
    for _ in range(30):  # well beyond the doubt
        peer.say(Heartbeat(), successor)
        assert looks(peer, 1.0) == 4
    assert of(peer.on(Fence(PREFILL, proved=True)), RoomDrained) == [RoomDrained(KEY)]
    for _ in range(10):
        peer.say(Heartbeat(), successor)
        assert looks(peer, 1.0) == 0
    assert peer.control.peers(peer.now_s)[ADDRESS] == (successor, "ready")


@pytest.mark.parametrize("first", [LIFE, None])
def test_a_prefill_that_has_said_two_things_is_not_looked_at(first: ProcessLife | None) -> None:
    peer = LocalPrefill(ON, first).opened()
    for _ in range(2):
        peer.greet(life=OTHER_LIFE)
    doubt(peer)
    assert looks(peer, 30.0) == 0


def test_one_at_another_address_cannot_have_a_prefill_fenced_by_lying() -> None:
    """It says that it is that prefill, and names a process that is dead."""
    peer = LocalPrefill().opened()
    elsewhere = "tcp://elsewhere:1"
    peer.open(msgspec.structs.replace(promise(), room=8), elsewhere)
    lie = msgspec.structs.replace(peer.reply, life=OTHER_LIFE, known=0)
    peer.on(FrameReceived(elsewhere, peer.raw(lie, PREFILL)))
    assert peer.control.peers(peer.now_s)[elsewhere][0] == PREFILL
    for address in (ADDRESS, elsewhere):
        peer.on(Unreached(address, "no answer"))
    assert looks(peer, 30.0) == 0


def test_a_connection_that_comes_back_ends_it() -> None:
    peer = LocalPrefill().opened()
    peer.on(GONE)
    assert looks(peer, 0.5) > 0
    peer.on(Reached(ADDRESS))
    peer.say(Heartbeat())
    looks(peer, ON.suspect_after_s)
    peer.say(Heartbeat())
    assert looks(peer, 1.0) == 0


def test_lives_that_are_of_no_use_are_forgotten() -> None:
    peer = LocalPrefill()
    peer.open()
    life = PREFILL
    for number in range(100):
        peer.greet(life, life=msgspec.structs.replace(LIFE, pid=number))
        peer.on(Fence(life))
        looks(peer, 1.0)
        life = newer(life)
    assert len(peer.control._links.watch._lives) <= 2


# --- prefill's ------------------------------------------------------------------------------------


def test_a_decode_worker_that_was_replaced_holds_nothing_here() -> None:
    peer = LocalDecode().bootstrapped()
    peer.say(msgspec.structs.replace(HELLO, life=OTHER_LIFE), newer(DECODE))
    peer.on(PeerUnreachable(DECODE, OSError("late")))
    assert looks(peer, 1.0) == 0
    peer.on(PeerUnreachable(newer(DECODE), OSError("now")))
    assert examined(peer.on(Tick())) == [Examine(newer(DECODE), OTHER_LIFE)]


def test_a_life_is_of_a_peer_that_was_let_in() -> None:
    """A Hello that is refused says nothing of the process that has the name."""
    peer = LocalDecode().bootstrapped()
    stranger = PeerId("d9", 9)
    refused = msgspec.structs.replace(HELLO, life=OTHER_LIFE, digest=msgspec.structs.replace(
        HELLO.digest, model="another"))  # fmt: skip
    peer.say(refused, stranger)
    assert set(peer.control._peers.watch._lives) == {DECODE}


def test_what_one_has_said_is_kept_while_others_come_and_go() -> None:
    peer = LocalDecode().bootstrapped()
    other = PeerId("d9", 9)
    peer.say(msgspec.structs.replace(HELLO, life=OTHER_LIFE), other)
    peer.on(PeerUnreachable(other, OSError("the connection is reset")))
    assert examined(peer.on(Tick())) == [Examine(other, OTHER_LIFE)]
    peer.on(Fence(other, proved=True))
    assert looks(peer, 3.0) == 0
    peer.on(PeerUnreachable(DECODE, OSError("the connection is reset")))
    assert examined(peer.on(Tick())) == [Examine(DECODE, LIFE)]
