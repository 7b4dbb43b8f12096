"""The prefill scheduler, call by call: its queue of bootstrapped requests, and the journal of what
it writes down of each."""

import gc
import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.config import ControlConfig, PageOptions
from prefixkv.errors import (
    AbortedError,
    AuxTooLargeError,
    InternalError,
    RequestError,
    TransferError,
    TransferTimeoutError,
    WeightsVersionError,
)
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for
from prefixkv.prefill.request import PrefillRequest, PrefillState, timeline
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import AbortRoom, AddRoom, DeclineRoom, SendChunk
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest
from tests.support.gates import Gate
from tests.support.schedulers import prefill_scheduler

PAGE_SIZE = 4
BROKEN = TransferError("broken")


class Desk:
    """A prefill scheduler with the other side played by hand; all books are checked after each
    call."""

    def __init__(
        self,
        num_pages: int = 16,
        *,
        rows: int = 8,
        caching: bool = True,
        max_aux_bytes: int = 8,
        follow_s: float = 0.0,
    ) -> None:
        self.pages = PageManager(num_pages, PAGE_SIZE, rows, options=PageOptions(caching=caching))
        self.pages.hash_every_pages = 1
        self.scheduler = prefill_scheduler(
            self.pages, control=ControlConfig(max_aux_bytes=max_aux_bytes), follow_s=follow_s
        )
        self.num_rooms = 0

    def add(self, rid: str, tokens: int | list[int] = 10, **fields: Any) -> PrefillRequest:
        self.num_rooms += 1
        if isinstance(tokens, int):
            tokens = [ord(rid[0]) * 1000 + place for place in range(tokens)]
        return self._checked(
            self.scheduler.add(
                Request(rid, tokens, **{"room": self.num_rooms, "decode": "d", **fields})
            )
        )

    def promised(self, rid: str, tokens: int | list[int] = 10, **fields: Any) -> PrefillRequest:
        """Decode has promised its pages, and has none of it."""
        req = self.add(rid, tokens, **fields)
        self.scheduler.hear(Bootstrapped(req.room_key, PeerId("", 1), 0), 0.0)
        return req

    def bootstrap(self, req: PrefillRequest, decode_prefix_len: int = 0) -> list[str]:
        self.scheduler.hear(Bootstrapped(req.room_key, PeerId("", 1), decode_prefix_len), 0.0)
        return self._checked([popped.rid for popped in self.scheduler.pop_bootstrapped()])

    def computing(self, rid: str, tokens: int | list[int] = 10, decode_prefix_len: int = 0,
                  **fields: Any) -> PrefillRequest:  # fmt: skip
        req = self.add(rid, tokens, **fields)
        assert self.bootstrap(req, decode_prefix_len) == [rid]
        self.scheduler.take_commands()
        return req

    def sending(self, rid: str, tokens: int | list[int] = 10, **fields: Any) -> PrefillRequest:
        req = self.computing(rid, tokens, **fields)
        self.send(req, req.num_tokens, last=True)
        assert self.next_pass() == []
        return req

    def next_pass(self, **limit: int) -> list[str]:
        """What was computed goes to the tree, and what the engine may compute now comes."""
        popped = self.scheduler.pop_bootstrapped(**limit)
        return self._checked([req.rid for req in popped])

    def send(self, req: PrefillRequest, end: int, **how: Any) -> int:
        return self._checked(self.scheduler.send_chunk(req, end, **how))

    def end(self, req: PrefillRequest, *, ok: bool = True) -> None:
        poll, error = (KVPoll.SUCCESS, None) if ok else (KVPoll.FAILED, BROKEN)
        self._checked(self.scheduler.hear(RoomEnded(req.room_key, poll, error), 0.0))

    def source_free(self, req: PrefillRequest) -> None:
        self._checked(self.scheduler.hear(SourceFree(req.room_key), 0.0))

    def pop_sent(self) -> list[PrefillRequest]:
        return self._checked(self.scheduler.pop_sent())

    def pop_failed(self, after: Gate | None = None) -> list[PrefillRequest]:
        return self._checked(self.scheduler.pop_failed(after))

    def done(self, req: PrefillRequest) -> None:
        """From SENDING to the end."""
        self.end(req)
        self.source_free(req)
        assert self.pop_sent() == [req]

    def states(self) -> dict[str, int]:
        counts = {state.name: len(self.pages.allocator.pages_in(state)) for state in PageState}
        return {name: count for name, count in counts.items() if count}

    def _checked(self, result: Any) -> Any:
        self.scheduler.check_invariants()
        return result


def num_requests() -> int:
    """Requests that anything holds."""
    gc.collect()
    return sum(type(one) is PrefillRequest for one in gc.get_objects())


# --- the table ------------------------------------------------------------------------------------


def test_every_state_has_a_row_and_only_what_is_in_it_happens() -> None:
    assert set(PrefillRequest.TRANSITIONS) == set(PrefillState)
    for before, after in product(PrefillState, PrefillState):
        req = PrefillRequest(Request("a", [1], room=1), PageManager(1, 1, 1), 0.0)
        req.state = before
        if after in PrefillRequest.TRANSITIONS[before]:
            req.become(after)
        else:
            with pytest.raises(InternalError, match=f"from {before.value} to {after.value}"):
                req.become(after)
        assert before.ended == (not PrefillRequest.TRANSITIONS[before])
        assert before.ended or PrefillState.FAILED in PrefillRequest.TRANSITIONS[before]


# --- the path of a request ------------------------------------------------------------------------


def test_a_request_from_arrival_to_sent() -> None:
    desk = Desk()
    req = desk.add("a", 10, room=70, generation=3)
    key = RoomKey(70, 3, "d")
    assert desk.scheduler.take_commands() == [AddRoom(key, 10, req.request.digest)]
    assert desk.bootstrap(req, 4) == ["a"]
    assert (req.state, req.decode_prefix_len, req.prefix_len, len(req.pages)) == (
        PrefillState.COMPUTING,
        4,
        0,
        3,
    )
    row, ready = req.pages.tolist(), Gate()
    assert [desk.send(req, 3), desk.send(req, 9, ready=ready)] == [0, 1]
    assert desk.send(req, 10, last=True, aux=b"first") == 1
    chunk, last = desk.scheduler.take_commands()
    assert (chunk.key, chunk.first_page, chunk.src_pages.tolist()) == (key, 1, row[1:2])
    assert (chunk.last, chunk.aux, chunk.ready) == (False, b"", ready)
    assert (last.first_page, last.src_pages.tolist(), last.last, last.aux) == (
        2,
        row[2:],
        True,
        b"first",
    )
    assert (req.state, desk.pop_sent()) == (PrefillState.SENDING, [])
    desk.end(req)
    assert (req.state, desk.pop_sent(), desk.pop_sent()) == (PrefillState.SENT, [req], [])
    desk.source_free(req)
    assert desk.states() == {"FREE": 14, "CACHED": 2}
    assert desk.scheduler.counters["decode_hit_tokens"] == 4
    assert_at_rest(desk.scheduler)


def test_the_last_token_is_always_computed_also_when_all_is_cached() -> None:
    for num_tokens, prefix_len in ((8, 4), (9, 8), (4, 0)):
        desk = Desk()
        desk.done(desk.sending("a", list(range(12))))
        req = desk.computing("b", list(range(num_tokens)))
        assert (req.prefix_len, len(req.pages)) == (prefix_len, pages_for(num_tokens, PAGE_SIZE))


def test_a_full_hit_on_decode_still_sends_the_outcome() -> None:
    desk = Desk()
    req = desk.computing("a", 8, decode_prefix_len=8)
    assert desk.send(req, 8, last=True, aux=b"first") == 0
    [last] = desk.scheduler.take_commands()
    assert (last.src_pages.tolist(), last.last, last.aux) == ([], True, b"first")


def test_what_cannot_be_taken_is_refused_and_changes_nothing() -> None:
    desk = Desk(4)
    desk.add("a", 4, room=1)
    desk.scheduler.take_commands()
    for text, request in {
        "needs 5 pages": Request("x", range(17), room=2, decode="d"),
        "'a' is here already": Request("a", [1], room=2, decode="d"),
        "room 1 generation 0 of 'd' is in use": Request("x", [1], room=1, decode="d"),
        "names no decode worker": Request("x", [1], room=2),
    }.items():
        with pytest.raises(RequestError, match=text):
            desk.scheduler.add(request)
    assert list(desk.scheduler.requests) == ["a"]
    declined = desk.scheduler.take_commands()
    assert {command.key for command in declined} == {RoomKey(2, 0, "d")}, "no room that is in use"
    assert [command.reason for command in declined] == [
        "request 'x' needs 5 pages, 4 is the most there is",
        "request 'a' is here already",
    ]
    desk.add("b", 4, room=1, generation=1)


def test_a_refusal_is_told_and_harms_no_room_that_is_in_use() -> None:
    desk = Desk(4)
    desk.add("a", 4, room=1)
    desk.scheduler.take_commands()
    refused = Request("x", [1], room=2, decode="d")
    desk.scheduler.refuse(refused, "no")
    told = DeclineRoom(RoomKey(2, 0, "d"), "no", refused.digest)
    assert desk.scheduler.take_commands() == [told]
    for text, request in {
        "room 1 generation 0 of 'd' is in use": Request("x", [1], room=1, decode="d"),
        "names no decode worker": Request("x", [1], room=2),
    }.items():
        with pytest.raises(RequestError, match=text):
            desk.scheduler.refuse(request, "no")
    assert (list(desk.scheduler.requests), desk.scheduler.take_commands()) == (["a"], [])
    assert desk.scheduler.idle is False


def test_a_chunk_that_cannot_be_is_refused_and_changes_nothing() -> None:
    desk = Desk()
    waiting, req, sending = desk.add("w"), desk.computing("a"), desk.sending("s")
    desk.send(req, 6)
    desk.scheduler.take_commands()
    before = (req.state, req.plan.computed, desk.states(), desk.pages.version)
    for text, call in {
        "bootstrapping": lambda: desk.send(waiting, 4),
        "sending": lambda: desk.send(sending, 10),
        r"\[6, 10\]": lambda: desk.send(req, 5),
        r"last chunk .* \[10, 10\]": lambda: desk.send(req, 9, last=True),
        "travels with the last chunk": lambda: desk.send(req, 8, aux=b"x"),
    }.items():
        with pytest.raises(RequestError, match=text):
            call()
    with pytest.raises(AuxTooLargeError) as caught:
        desk.send(req, 10, last=True, aux=b"x" * 9)
    assert str(caught.value) == "aux payload of 9 bytes, the limit is 8"
    assert (req.state, req.plan.computed, desk.states(), desk.pages.version) == before
    assert desk.scheduler.take_commands() == []
    assert desk.send(req, 10, last=True, aux=b"x" * 8) == 2


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=16),
            st.integers(0, 16),
            st.integers(1, 8),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_decode_gets_each_page_it_lacks_once_from_the_pages_the_engine_computed(
    prompts: list[tuple[list[int], int, int]],
) -> None:
    """Also when the request's own pages turn out to be duplicates on the way."""
    desk = Desk(30)
    reqs = []
    for number, (tokens, decode_tokens, step) in enumerate(prompts):
        decode_prefix_len = min(decode_tokens, len(tokens))  # it may have a page in part
        req = desk.computing(f"r{number}", tokens, decode_prefix_len)
        reqs.append((req, req.pages.tolist(), decode_prefix_len, step))
    for req, row, decode_prefix_len, step in reqs:
        for end in range(0, req.num_tokens, step):
            first = decode_prefix_len // PAGE_SIZE
            whole = max(0, end // PAGE_SIZE - max(first, (end - step) // PAGE_SIZE))
            assert desk.send(req, end) == whole, "all that is whole, nothing else"
        desk.send(req, req.num_tokens, last=True)
        chunks = [
            command for command in desk.scheduler.take_commands() if isinstance(command, SendChunk)
        ]
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        sent = [page for chunk in chunks for page in chunk.src_pages.tolist()]
        assert sent == row[decode_prefix_len // PAGE_SIZE :]
        places = [chunk.first_page + i for chunk in chunks for i in range(len(chunk.src_pages))]
        assert places == list(range(decode_prefix_len // PAGE_SIZE, len(row)))
        for other, other_row, *_ in reqs:
            if not other.state.ended:
                busy = {desk.pages.allocator.state(page) for page in other_row}
                assert PageState.FREE not in busy, "a page that a write may read is free"
    for req, *_ in reqs:
        desk.done(req)
    assert_at_rest(desk.scheduler)


# --- the queue ------------------------------------------------------------------------------------


def test_first_promised_first_opened_and_a_blocked_head_is_not_matched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(4)
    running, big, small = desk.computing("r", 8), desk.add("b", 16), desk.add("s", 4)
    looks: list[Any] = []
    match = desk.pages.match
    monkeypatch.setattr(desk.pages, "match", lambda *args: looks.append(args) or match(*args))
    assert desk.bootstrap(big) == desk.bootstrap(small) == []
    assert not desk.scheduler.bootstrapped.may_open
    assert len(looks) == 1
    desk.scheduler.abort("b")
    assert desk.bootstrap(small) == ["s"]
    desk.scheduler.abort("r")
    assert (running.state, running.pages.size) == (PrefillState.FAILED, 2)


@pytest.mark.parametrize("has_leader", [False, True])
def test_what_ends_while_it_waits_is_forgotten(has_leader: bool) -> None:
    """For its leader, or behind a blocked head."""
    desk = Desk(64, follow_s=1.0) if has_leader else Desk(4)
    first = desk.computing("r", 8)
    if not has_leader:
        assert desk.bootstrap(desk.add("b", 16)) == []
    live = desk.add("r live", 9) if has_leader else desk.add("live", 4)
    assert desk.bootstrap(live) == []
    num_waiting, before = len(desk.scheduler.bootstrapped), num_requests()
    for _ in range(500):
        req = desk.add("r more", 10)
        assert desk.bootstrap(req) == []
        desk.scheduler.abort("r more")
        assert desk.pop_failed() == [req]
        desk.source_free(req)
        desk.scheduler.take_commands()
    assert len(desk.scheduler.bootstrapped) == num_waiting == 2 - has_leader
    assert num_requests() - before < 100
    if has_leader:
        desk.send(first, 8, last=True)
    else:
        desk.scheduler.abort("b")
    assert desk.next_pass() == [live.rid]


# --- pages that writes may read -------------------------------------------------------------------


@pytest.mark.parametrize("order", [["free", "pop"], ["pop", "free"]])
@pytest.mark.parametrize("ok", [True, False])
def test_pages_stay_until_the_source_is_free_and_the_engine_knows(
    order: list[str], ok: bool
) -> None:
    desk = Desk()
    req = desk.sending("a", 10)
    desk.end(req, ok=ok)
    for step in order:
        assert desk.pages.cache.protected_pages == 2, step
        assert desk.states() == {"FREE": 13, "CACHED": 2, "OWNED": 1}
        assert "a" in desk.scheduler.requests
        if step == "free":
            desk.source_free(req)
        else:
            assert (desk.pop_sent() if ok else desk.pop_failed()) == [req]
    assert desk.states() == {"FREE": 14, "CACHED": 2}
    assert_at_rest(desk.scheduler)


def test_a_number_is_used_again_once_its_source_is_free_though_its_end_is_not_popped() -> None:
    desk = Desk()
    first = desk.sending("a", room=7)
    desk.end(first)
    with pytest.raises(RequestError, match="in use"):
        desk.add("b", room=7)
    desk.source_free(first)
    second = desk.add("b", room=7)
    assert desk.pop_sent() == [first]
    assert desk.bootstrap(second) == ["b"], "its room is known still"


def test_duplicates_that_are_being_read_are_not_freed_early() -> None:
    desk = Desk()
    first, second = desk.computing("a", list(range(10))), desk.computing("b", list(range(10)))
    own = second.pages.tolist()
    desk.send(first, 10, last=True)
    desk.send(second, 10, last=True)
    [chunk] = [
        command for command in desk.scheduler.take_commands() if command.key == second.room_key
    ]
    assert chunk.src_pages.tolist() == own, "the writes read its own pages"
    assert desk.next_pass() == []
    assert second.pages.tolist() == first.pages.tolist()[:2] + own[2:], "its row reads the tree's"
    assert [desk.pages.allocator.state(page) for page in own] == [PageState.OWNED] * 3
    desk.end(second)
    desk.pop_sent()
    assert [desk.pages.allocator.state(page) for page in own] == [PageState.OWNED] * 3
    desk.source_free(second)
    assert [desk.pages.allocator.state(page) for page in own] == [PageState.FREE] * 3
    desk.done(first)
    assert_at_rest(desk.scheduler)


def test_other_weights_end_what_decode_has_promised_and_leave_what_waits_for_that() -> None:
    desk = Desk()
    desk.send(desk.computing("a"), 4)
    desk.promised("b")
    waits = desk.add("c")
    desk.scheduler.flush("v2")
    failed = {req.rid: type(req.error) for req in desk.pop_failed()}
    assert failed == dict.fromkeys(["a", "b"], WeightsVersionError)
    assert desk.bootstrap(waits) == ["c"]


# --- ends -----------------------------------------------------------------------------------------


PLACES = {
    "bootstrapping": lambda desk: desk.add("a"),
    "bootstrapped": lambda desk: (desk.add("a"), desk.bootstrap(desk.scheduler.requests["a"]))[0],
    "computing": lambda desk: desk.computing("a"),
    "computed in part": lambda desk: (
        desk.computing("a"),
        desk.send(desk.scheduler.requests["a"], 5),
    )[0],
    "sending": lambda desk: desk.sending("a"),
}


@pytest.mark.parametrize("how", ["abort", "failure", "abort, then success"])
@pytest.mark.parametrize("place", PLACES)
def test_an_end_wherever_a_request_is_leaves_nothing(place: str, how: str) -> None:
    desk = Desk(3) if place != "bootstrapped" else Desk(3, rows=1)
    if place == "bootstrapped":
        other = desk.computing("o", 4)
    req = PLACES[place](desk)
    desk.scheduler.take_commands()
    if how == "failure":
        desk.end(req, ok=False)
        assert desk.scheduler.take_commands() == []
    else:
        assert desk.scheduler.abort("a")
        (command,) = desk.scheduler.take_commands()
        assert isinstance(command, AbortRoom)
        assert command.key == req.room_key
        assert (req.error is None) == (place == "sending")
        if req.error is not None:
            assert isinstance(req.error, AbortedError)
            assert command.reason == str(req.error)
        succeeds = how != "abort"
        desk.end(req, ok=succeeds)
        if (
            place == "sending" and succeeds
        ):  # the abort came too late: decode has the KV, so both say success
            assert (desk.pop_sent(), desk.pop_failed()) == ([req], [])
            desk.source_free(req)
            assert_at_rest(desk.scheduler)
            return
    assert not desk.scheduler.abort("a"), "a second abort does nothing"
    assert req.state is PrefillState.FAILED
    assert desk.send(req, 10, last=True) == 0, "the engine may not know yet"
    assert desk.scheduler.take_commands() == []
    assert (desk.pop_failed(), desk.pop_failed(), desk.pop_sent()) == ([req], [], [])
    desk.source_free(req)
    assert req.rid not in desk.scheduler.requests
    if place == "bootstrapped":
        desk.send(other, 4, last=True)
        desk.done(other)
    assert_at_rest(desk.scheduler)
    # What was computed is good prefix, unless this engine has ended it before that was cached.
    cached = {"computing": 2, "computed in part": 2, "sending": 2, "bootstrapped": 1}
    if how != "failure":
        cached |= {"computing": 0, "computed in part": 0}
    assert desk.states().get("CACHED", 0) == cached.get(place, 0)


def test_pages_of_a_failed_request_wait_for_the_device() -> None:
    desk = Desk()
    req, event = desk.computing("a", 8), Gate()
    desk.send(req, 4)
    desk.end(req, ok=False)
    desk.source_free(req)
    assert desk.pop_failed(event) == [req]
    for _ in range(2):
        assert desk.next_pass() == []
        assert desk.states() == {"FREE": 14, "CACHED": 1, "OWNED": 1}
        assert desk.pages.cache.protected_pages == 1
    event.answer = True
    desk.scheduler.pop_bootstrapped()
    assert desk.states() == {"FREE": 15, "CACHED": 1}
    assert_at_rest(desk.scheduler)


def test_warm_ups_never_enter_the_tree_and_with_the_cache_off_nothing_does() -> None:
    for caching, cacheable in ((True, False), (False, True)):
        desk = Desk(caching=caching)
        for rid in "ab":
            req = desk.sending(rid, list(range(8)), cacheable=cacheable)
            assert req.prefix_len == 0
            desk.done(req)
        assert desk.states() == {"FREE": 16}


def test_news_of_unknown_rooms_changes_nothing() -> None:
    desk = Desk()
    req = desk.sending("a")
    key = RoomKey(99, 0)
    desk.scheduler.hear(RoomEnded(key, KVPoll.FAILED, BROKEN), 0.0)
    desk.scheduler.hear(SourceFree(key), 0.0)
    assert not desk.scheduler.abort("nobody")
    assert (req.state, desk.pop_failed(), desk.scheduler.counters["aborts_of_unknown"]) == (
        PrefillState.SENDING,
        [],
        1,
    )


# --- what is the user's, and raises ---------------------------------------------------------------


def test_the_audit_sees_a_lock_that_is_of_no_request() -> None:
    desk = Desk()
    first = desk.computing("a", list(range(8)))
    desk.scheduler.send_chunk(first, 8, last=True)
    match = desk.pages.match(first.key)
    assert match is not None
    desk.pages.cache.lock(match)
    with pytest.raises(InternalError, match="every lock is a request's"):
        desk.scheduler.check_invariants()


def test_a_request_that_is_not_sent_by_its_own_deadline_fails_and_decode_is_told() -> None:
    desk = Desk()
    late = desk.add("L", deadline_s=5.0)
    done = desk.sending("s", deadline_s=5.0)
    desk.scheduler.hear(RoomEnded(done.room_key, KVPoll.SUCCESS, None), 1.0)
    desk.scheduler.take_commands()
    desk.scheduler.now_s = 4.9
    assert desk.scheduler.pop_bootstrapped() == []
    assert (desk.scheduler.pop_failed(), desk.scheduler.wake_s) == ([], 5.0)
    desk.scheduler.now_s = 5.0
    assert desk.scheduler.pop_bootstrapped() == []
    assert desk.scheduler.pop_failed() == [late]
    assert isinstance(late.error, TransferTimeoutError)
    assert desk.scheduler.take_commands() == [AbortRoom(late.room_key, str(late.error))]
    assert desk.scheduler.counters["aborts_of_unknown"] == 0, "what has ended is left alone"
    assert desk.scheduler.wake_s == float("inf")


def test_the_deadline_of_a_request_that_was_sent_is_forgotten() -> None:
    desk = Desk()
    req = desk.sending("s", deadline_s=5.0)
    assert desk.scheduler.wake_s == 5.0
    desk.done(req)
    assert len(desk.scheduler._deadlines) == 0


PAGE_BYTES = 100


@pytest.fixture
def ended() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def scheduler(ended: list[dict[str, Any]]) -> PrefillScheduler:
    scheduler = prefill_scheduler(PageManager(16, 4, 8))

    def write(req: PrefillRequest, now_s: float) -> None:
        ended.append(json.loads(json.dumps(timeline(req, PAGE_BYTES, 4))))

    scheduler.journal.on_ended = [write]
    return scheduler


def test_a_request_is_written_down_from_arrival_to_sent(
    scheduler: PrefillScheduler, ended: list[dict[str, Any]]
) -> None:
    scheduler.now_s = 5.0
    req = scheduler.add(Request("a", list(range(10)), room=3, decode="decode-1", namespace="lora"))
    scheduler.hear(Bootstrapped(req.room_key, PeerId("decode-1", 1), 4), 6.0)
    scheduler.now_s = 8.0
    scheduler.pop_bootstrapped()
    scheduler.now_s = 9.0
    scheduler.send_chunk(req, 4)
    scheduler.now_s = 11.0
    scheduler.send_chunk(req, 10, last=True)
    scheduler.hear(RoomEnded(req.room_key, KVPoll.SUCCESS, None), 15.0)
    assert ended == [
        {
            "side": "prefill",
            "rid": "a",
            "room": 3,
            "generation": 0,
            "namespace": "lora",
            "outcome": "sent",
            "error": None,
            "peer": "decode-1",
            "prompt_tokens": 10,
            "hit_tokens": 0,
            "decode_hit_tokens": 4,
            "chunks": 2,
            "sent_bytes": 2 * PAGE_BYTES,
            "skipped_bytes": PAGE_BYTES,
            "promised_s": 1.0,
            "started_s": 3.0,
            "computed_s": 6.0,
            "ended_s": 10.0,
        }
    ]
    journal = scheduler.journal
    assert {reason: waits.total for reason, waits in journal.waits.items()} == {
        "decode": 1.0, "pages": 2.0, "compute": 3.0, "send": 4.0,
    }  # fmt: skip
    assert journal.transfers["success"].read() == {"decode-1": [1]}
    assert journal.tokens.read()["lora"][:2] == [10, 0]
    assert [name for name, _ in scheduler.holders()] == ["a"]


def test_what_fails_or_is_aborted_is_written_down_once(
    scheduler: PrefillScheduler, ended: list[dict[str, Any]]
) -> None:
    first = scheduler.add(Request("a", list(range(10)), room=1, decode="d"))
    scheduler.add(Request("b", list(range(10)), room=2, decode="d"))
    scheduler.hear(Bootstrapped(first.room_key, PeerId("d", 1), 0), 1.0)
    scheduler.hear(RoomEnded(first.room_key, KVPoll.FAILED, TransferError("broken")), 2.0)
    scheduler.hear(RoomEnded(first.room_key, KVPoll.FAILED, TransferError("again")), 3.0)
    scheduler.now_s = 4.0
    scheduler.abort("b")
    assert [
        (record["rid"], record["outcome"], record["error"], record["ended_s"]) for record in ended
    ] == [
        ("a", "failed", "TransferError: broken", 2.0),
        ("b", "aborted", "AbortedError: request 'b' was aborted", 4.0),
    ]
    transfers = {name: tally.read() for name, tally in scheduler.journal.transfers.items()}
    assert transfers == {
        "success": {},
        "failed": {"d": [1]},
        "aborted": {},
    }  # the other had met no peer
