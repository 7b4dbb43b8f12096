"""The decode scheduler, call by call, and the table of a request's states. Random orders of the
same calls are in `test_scheduler_fuzz.py`."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from prefixkv.cache.radix_key import RadixKey
from prefixkv.decode.request import DecodeRequest, DecodeState, PrefillAsk
from prefixkv.digest import prompt_digest
from prefixkv.errors import (
    AbortedError,
    CallerError,
    InternalError,
    OutOfPagesError,
    RequestError,
    TokenError,
    WeightsVersionError,
)
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.events import RoomOverdue
from prefixkv.protocol.ids import RoomKey
from prefixkv.request import Request
from tests.support.gates import Gate
from tests.unit.decode.desk import BROKEN, AbortRoom, Desk, RefuseRoom

# --- add ------------------------------------------------------------------------------------------


def test_what_cannot_be_taken_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(4)
    desk.scheduler.max_waiting = 3
    desk.add("a", 4, room=1)
    lost = desk.add("l", 4, room=2, max_new=1)
    assert desk.admit() == ["a", "l"]
    desk.abort(lost)
    desk.add("b", room=3)
    desk.add("c", room=4)
    refused = {
        "may need 5 pages": desk.request("x", 12, max_new=6),
        "'a' is here already": desk.request("a"),
        "room 1 is in use": desk.request("x", room=1),
        "room 2 is in use": desk.request("x", room=2),
        "no prefill worker": desk.request("x", prefill=""),
    }

    def refuse(request: Request, text: str) -> None:
        before = desk.snapshot()
        with pytest.raises(RequestError, match=text):
            desk.scheduler.add(request)
        assert desk.snapshot() == before

    for text, request in refused.items():
        refuse(request, text)
    with monkeypatch.context() as patch:
        patch.setattr("prefixkv.decode.scheduler.MAX_PAGES", 2)
        refuse(desk.request("x", 8, max_new=4), "may need 3 pages, a promise names at most 2")
    desk.add("d", room=5)
    refuse(desk.request("x"), "3 requests wait")
    desk.drain(RoomKey(2, 0))
    desk.abort(desk.scheduler.requests["b"])
    desk.add("x", room=2)


# --- aborts ---------------------------------------------------------------------------------------


def _resumed(desk: Desk) -> DecodeRequest:
    """A request back from retraction, not admitted again yet. An older one runs beside it."""
    desk.start("old", 4, outputs=1)
    req = desk.start("a", 8, outputs=1)
    desk.retract(req)
    return req


def _queued(desk: Desk) -> DecodeRequest:
    return desk.add("a")


def _preallocated(desk: Desk) -> DecodeRequest:
    return desk.admitted("a")


def _arrived(desk: Desk) -> DecodeRequest:
    req = _preallocated(desk)
    desk.succeed(req.room_key)
    return req


def _retry_queued(desk: Desk) -> DecodeRequest:
    req = _preallocated(desk)
    desk.fail(req.room_key)
    return req


def _retry_admitted(desk: Desk) -> DecodeRequest:
    req = _retry_queued(desk)
    desk.admit()
    return req


def _deferred_retraction(desk: Desk) -> DecodeRequest:
    desk.start("old", 4, outputs=1)
    req = desk.start("a", 8, outputs=1)
    desk.retract(req, after=Gate())
    return req


def _complete_without_transfer(desk: Desk) -> DecodeRequest:
    req = _resumed(desk)
    desk.admit()
    assert req.state is DecodeState.PREALLOCATED
    assert desk.scheduler.prefill.open == {}
    return req


PLACES: dict[
    str, tuple[Callable[[Desk], DecodeRequest], bool]
] = {  # and whether a peer may write its pages
    "queued": (_queued, False),
    "preallocated": (_preallocated, True),
    "arrived": (_arrived, False),
    "transferred": (lambda desk: desk.start("a"), False),
    "running": (lambda desk: desk.start("a", outputs=3), False),
    "retracted": (_resumed, False),
    "being retracted": (_deferred_retraction, False),
    "back without transfer": (_complete_without_transfer, False),
    "to be asked for again": (_retry_queued, False),
    "asked for again": (_retry_admitted, True),
}


@pytest.mark.parametrize(("place", "exposed"), PLACES.values(), ids=PLACES)
def test_an_abort_wherever_a_request_is_leaves_nothing(
    place: Callable[[Desk], DecodeRequest], exposed: bool
) -> None:
    desk = Desk(max_retries=1)
    req = place(desk)
    desk.commands()
    key = req.room_key
    assert desk.abort(req)
    assert not desk.abort(req), "a second abort does nothing"
    assert (req.state, type(req.error)) == (DecodeState.ABORTED, AbortedError)
    assert desk.pop_failed() == [req]
    assert desk.pop_failed() == []
    told = [AbortRoom(key, str(req.error))] if exposed else []
    if place is _queued:  # prefill may have it, and waits for a promise
        told = [RefuseRoom(key, 1, "p", str(req.error), req.request.digest)]
    assert desk.commands() == told
    assert ("HELD" in desk.states()) == (exposed or place is _retry_queued)
    for generation in range(key.generation + 1):
        desk.fail(RoomKey(key.room, generation), drained=True)
    for event, _ in list(desk.scheduler.ledger.deferred.values()):
        event.answer = True
    desk.admit()
    for other in list(desk.scheduler.requests.values()):
        assert other.rid == "old"
        desk.finish(other)
    assert desk.admit() == desk.transferred() == []


@pytest.mark.parametrize("end", ["success", "failure"])
def test_an_end_that_crosses_our_abort_drains_but_revives_nothing(end: str) -> None:
    desk = Desk(max_retries=1)
    req = _preallocated(desk)
    desk.abort(req)
    assert desk.states()["HELD"] == 2
    if end == "success":
        desk.succeed(req.room_key)
    else:
        desk.fail(req.room_key)
        assert desk.states()["HELD"] == 2
        desk.drain(req.room_key)
    assert req.state is DecodeState.ABORTED
    assert desk.transferred() == []


def test_an_abort_of_what_runs_waits_for_the_device() -> None:
    desk = Desk()
    req, event = desk.start("a", 9, outputs=2), Gate()
    desk.abort(req, after=event)
    assert desk.pop_failed() == [req]
    assert desk.states() == {"FREE": 13, "OWNED": 1, "CACHED": 2}
    desk.admit()
    assert len(desk.scheduler.ledger.deferred) == 1
    event.answer = True
    desk.admit()
    assert desk.states() == {"FREE": 14, "CACHED": 2}


def test_an_unknown_request_is_no_error() -> None:
    desk = Desk()
    desk.finish(desk.start("a"))
    desk.add("b")
    before = desk.snapshot()
    with pytest.raises(RequestError, match=r"rid is \['b'\]"):
        desk.scheduler.abort(["b"])  # type: ignore[arg-type]
    assert not desk.scheduler.abort("nobody")
    del desk.scheduler.counters["aborts_of_unknown"]
    assert desk.snapshot() == before
    assert not desk.scheduler.abort("a"), "it has finished"
    assert desk.scheduler.counters["aborts_of_unknown"] == 1


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_transfer_fails_its_request_and_holds_its_pages_until_drained() -> None:
    desk = Desk()
    req = _preallocated(desk)
    desk.commands()
    desk.fail(req.room_key)
    assert (req.state, req.error, desk.pop_failed()) == (DecodeState.FAILED, BROKEN, [req])
    assert desk.commands() == [], "the room has ended already"
    desk.scheduler.hear(RoomOverdue(req.room_key), desk.now_s)
    assert desk.states() == {"FREE": 14, "QUARANTINED": 2}
    assert desk.scheduler.counters["quarantined_pages"] == 2
    desk.drain(req.room_key)
    desk.drain(req.room_key)


def test_news_of_unknown_rooms_changes_nothing() -> None:
    desk = Desk()
    desk.start("a")
    desk.scheduler.counters += Counter()
    before = desk.snapshot()
    for key in (RoomKey(99, 0), RoomKey(1, 1)):
        desk.succeed(key)
        desk.fail(key, drained=True)
        desk.scheduler.hear(RoomOverdue(key), desk.now_s)
    desk.scheduler.counters += Counter()  # without what is zero
    assert desk.snapshot() == before


# --- running --------------------------------------------------------------------------------------


def test_a_request_from_arrival_to_the_cache() -> None:
    desk = Desk()
    req = desk.admitted("a", 7, max_new=3)
    assert req.kv_len == req.fill_len == 7
    desk.succeed(req.room_key, b"first")
    assert (desk.transferred(), req.aux, req.state) == (["a"], b"first", DecodeState.TRANSFERRED)
    assert desk.pages.cache.protected_pages == 1, (
        "the prompt's whole page is the tree's, under the request's lock"
    )
    desk.token(req, token=5)
    assert (req.state, req.kv_len, len(req.pages)) == (DecodeState.RUNNING, 7, 2)
    desk.token(req, token=6)
    assert (req.kv_len, len(req.pages)) == (8, 3), "the next step writes to a page that is there"
    desk.finish(req)
    assert desk.states() == {"FREE": 14, "CACHED": 2}
    assert desk.pages.cache.match_prefix(req.tokens).prefix_len == 8, (
        "the last token has no KV, and is not cached"
    )


@pytest.mark.parametrize("state", ["queued", "preallocated", "finished", "aborted"])
def test_only_what_runs_can_be_finished_retracted_or_get_tokens(state: str) -> None:
    desk = Desk()
    desk.start("old", 4)
    req = {"queued": _queued, "preallocated": _preallocated}.get(
        state, lambda desk: desk.start("a", outputs=1)
    )(desk)
    if state == "finished":
        desk.finish(req)
    elif state == "aborted":
        desk.abort(req)
    before = desk.snapshot()
    # A token for one that was aborted is dropped: the engine's step may have been under way.
    for act in (desk.finish, desk.retract, *([desk.token] if state != "aborted" else [])):
        with pytest.raises(RequestError):
            act(req)
    assert desk.snapshot() == before


def test_an_abort_while_it_is_being_retracted_waits_for_the_same_device() -> None:
    desk = Desk()
    req = _deferred_retraction(desk)
    before = desk.states()
    desk.abort(req)
    assert desk.states() == before
    next(iter(desk.scheduler.ledger.deferred.values()))[0].answer = True
    assert desk.admit() == [], "and it does not come back"
    assert desk.states() == {"FREE": 12, "CACHED": 3, "OWNED": 1}, (
        "the older one keeps the page it writes to"
    )


def test_append_is_all_or_nothing() -> None:
    desk = Desk()
    a, b = desk.start("a", 8, max_new=2, outputs=1), desk.start("b", 8, max_new=1, outputs=1)
    queued = desk.add("q")
    wrong: list[tuple[list[DecodeRequest], list[Any], type[CallerError], str]] = [
        ([a, b], [1, 1], RequestError, "'b' has its 1 tokens"),
        ([a, queued], [1, 1], RequestError, "'q' is queued"),
        ([a, a], [1, 1], RequestError, "twice"),
        ([a], [-1], TokenError, "-1"),
        ([a], [2**31], TokenError, "2147483648"),
        ([a], [1.5], TokenError, "1.5"),
        ([a], [True], TokenError, "bool"),
        ([a], [1, 2], RequestError, "2 tokens"),
        ([a], [], RequestError, "0 tokens"),
    ]
    before = desk.snapshot()
    for reqs, tokens, error, text in wrong:
        with pytest.raises(error, match=text):
            desk.scheduler.append_many(reqs, tokens)
        assert desk.snapshot() == before
    desk.token(a)
    with pytest.raises(RequestError, match="'a' has its 2 tokens"):
        desk.token(a)


def test_too_few_pages_name_whom_to_retract_and_never_the_oldest() -> None:
    desk = Desk(8)
    oldest = desk.start("a", 4, max_new=9, outputs=1)
    small = desk.start("b", 4, max_new=9, outputs=1)
    large = desk.start("c", 4, max_new=9, outputs=1)
    for _ in range(4):
        desk.token(large)
    moving = desk.admitted("m", 4, max_new=1)
    assert desk.states() == {"OWNED": 5, "CACHED": 3}
    for req in (oldest, small):
        for _ in range(3):
            desk.token(req)
    before = desk.snapshot()
    with pytest.raises(OutOfPagesError) as caught:
        desk.token(oldest, small)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (2, 0, 0)
    assert caught.value.retract == ("c",), "most pages first, and no more than are missing"
    assert desk.snapshot() == before
    with pytest.raises(RequestError, match="oldest"):
        desk.retract(oldest)
    for rid in caught.value.retract[:1]:
        desk.retract(desk.scheduler.requests[rid])
    desk.token(oldest, small)
    desk.abort(moving)
    assert desk.snapshot() != before


# --- retraction -----------------------------------------------------------------------------------


def test_whom_to_retract_goes_by_the_pages_that_this_frees_not_by_those_it_shares() -> None:
    desk = Desk(20)
    desk.finish(desk.start("x", list(range(24)), max_new=1))
    oldest = desk.start("o", 4, max_new=20)
    shares = desk.start("s", [*range(24), 7], max_new=20)
    own = desk.start("t", 13, max_new=20, cacheable=False)
    assert (len(shares.pages), len(own.pages)) == (7, 4)

    def grow() -> None:
        for _ in range(20):
            desk.token(oldest, shares, own)

    with pytest.raises(OutOfPagesError) as caught:
        grow()
    assert caught.value.retract == ("t",), "more of its pages are its own, though it has fewer"
    assert len(shares.pages) > len(own.pages)


def test_back_from_retraction_with_all_its_kv_nothing_is_transferred_or_sampled_again() -> None:
    desk = Desk()
    req = _resumed(desk)
    assert (req.state, req.generation, req.pages.tolist()) == (DecodeState.RETRACTED, 1, [])
    desk.commands()
    assert desk.admit() == ["a"]
    assert (desk.commands(), desk.scheduler.pop_needs_prefill()) == ([], [])
    assert desk.transferred() == ["a"]
    assert (req.resumed, req.output, req.kv_len, len(req.pages)) == (True, [1], 8, 3)
    desk.token(req)
    assert (req.output, req.kv_len) == ([1, 1], 9)


def test_what_is_asked_for_again_says_whose_cache_it_may_share() -> None:
    desk = Desk()
    for rid, options in (("a", {}), ("b", {"namespace": ("lora", 3), "cacheable": False})):
        request = Request(rid, range(8), max_new_tokens=2, room=1, prefill="tcp://p", **options)
        ask = PrefillAsk(DecodeRequest(request, desk.pages, now_s=0.0), "decode-0", 8)
        expected = (options.get("namespace"), options.get("cacheable", True))
        assert (ask.namespace, ask.cacheable) == expected


def test_back_from_retraction_a_lost_tail_page_is_asked_for_and_the_known_token_stands() -> None:
    """Nothing is evicted: whole pages went to the tree, the partial last one was given up."""
    desk = Desk()
    desk.start("old", 4, outputs=1)
    req = desk.start("a", 8, max_new=6, outputs=0)
    for token in (11, 12, 13):
        desk.token(req, token=token)
    desk.retract(req)
    assert desk.pages.cache.match_prefix(req.tokens).prefix_len == 8
    assert desk.admit() == ["a"]
    [ask] = desk.scheduler.pop_needs_prefill()
    assert (ask.tokens.tolist(), ask.known_token, ask.generation) == (
        req.tokens.tolist()[:-1],
        13,
        1,
    )
    promise = desk.commands()[-1].promise
    assert (promise.fill_len, promise.prefix_len, len(promise.page_ids())) == (10, 8, 1)
    desk.succeed(req.room_key, b"another first token")
    assert desk.transferred() == ["a"]
    assert (req.output, req.kv_len, req.resumed) == ([11, 12, 13], 10, True)
    desk.token(req, token=14)
    assert (req.output, req.kv_len) == ([11, 12, 13, 14], 11)


def test_a_promise_after_some_output_is_of_the_prompt_and_the_output() -> None:
    """The tree has hashes of the prompt's path, from which the digest of both is worked out."""
    desk = Desk(32)
    desk.start("old", 4, outputs=1)
    req = desk.start("a", 10, max_new=9, outputs=6)
    first = desk.commands()[-1]
    assert first.promise.digest == prompt_digest(req.request.key)
    desk.retract(req)
    assert desk.admit() == ["a"]
    again = desk.commands()[-1]
    assert again.promise.digest == prompt_digest(req.tokens[:-1])
    assert again.promise.digest != first.promise.digest
    match = desk.pages.match(req.key)
    assert match is not None
    assert desk.pages.cache.hashed(match) is not None


def test_the_oldest_keeps_its_age_through_a_retraction() -> None:
    desk = Desk()
    first, second = desk.start("a", 8, outputs=1), desk.start("b", 4, outputs=2)
    third = desk.start("c", 4, outputs=1)
    desk.retract(second)
    desk.finish(first)
    desk.admit()
    desk.transferred()
    assert second.state is DecodeState.PREALLOCATED, "it waits for a transfer"
    with pytest.raises(RequestError, match="oldest"):
        desk.retract(third)
    desk.succeed(second.room_key)
    desk.transferred()
    with pytest.raises(RequestError, match="oldest"):
        desk.retract(second)
    desk.retract(third)


# --- what waits for the device --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["finish", "retract"])
def test_nothing_is_released_before_the_device_is_done(how: str) -> None:
    desk = Desk()
    desk.start("old", 4)
    req, event = desk.start("a", 8, outputs=1), Gate()
    before = desk.states()
    getattr(desk, how)(req, after=event)
    for _ in range(2):
        assert desk.admit() == []
        assert desk.states() == before
    assert len(desk.scheduler.ledger.deferred) == 1
    event.answer = True
    assert desk.admit() == (["a"] if how == "retract" else [])
    assert len(desk.scheduler.ledger.deferred) == 0


# --- the cache ------------------------------------------------------------------------------------


def test_other_weights_end_what_has_output_or_is_on_its_way_and_leave_what_only_waits() -> None:
    desk = Desk()
    desk.start("runs", 8, outputs=1)
    back = desk.start("back", 8, outputs=2)
    desk.add("way", 8)
    assert desk.admit() == ["way"]
    desk.retract(back)
    desk.add("new", 8)
    desk.scheduler.flush("v2")
    failed = {req.rid: type(req.error) for req in desk.pop_failed()}
    assert failed == dict.fromkeys(["runs", "back", "way"], WeightsVersionError)
    assert desk.admit() == ["new"]


@pytest.mark.parametrize("place", ["preallocated", "running", "being retracted"])
def test_a_flush_lets_what_runs_finish_and_keeps_none_of_it(place: str) -> None:
    desk = Desk()
    desk.finish(desk.start("c", 8))
    req = PLACES[place][0](desk)
    desk.scheduler.flush()
    desk.scheduler.check_invariants()
    if place == "preallocated":
        desk.succeed(req.room_key)
        desk.transferred()
    if place == "being retracted":
        next(iter(desk.scheduler.ledger.deferred.values()))[0].answer = True
        assert desk.admit() == ["a"]
        [ask] = desk.scheduler.pop_needs_prefill()
        assert (len(ask.tokens), req.prefix_len) == (8, 0)
        desk.abort(req)
        desk.carry_out_aborts()
        desk.finish(desk.scheduler.requests["old"])
    else:
        desk.finish(req)
    assert desk.states() == {"FREE": 16}


@pytest.mark.parametrize("continues", [None, True, False])
def test_the_hint_about_the_conversation_reaches_the_tree(
    continues: bool | None, monkeypatch: Any
) -> None:
    desk = Desk()
    hints: list[Any] = []
    monkeypatch.setattr(
        desk.pages.cache,
        "hint",
        lambda lock, continues, **_: hints.append((lock.node.end, continues)),
    )
    desk.finish(desk.start("a", 8), continues=continues)
    assert hints == ([] if continues is None else [(2, continues)])


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("keep", "cached"), [(None, 4), (20, 4), (13, 3), (12, 3), (11, 2), (8, 2), (0, 2)]
)
def test_what_will_not_be_asked_again_is_freed_and_not_cached(
    keep: int | None, cached: int, deferred: bool
) -> None:
    desk, event = Desk(), Gate()
    req = desk.start("a", 8, 9, outputs=9)  # two pages of prompt, 16 tokens with KV
    desk.finish(req, after=event if deferred else None, keep_tokens=keep)
    event.answer = True
    desk.scheduler.release_deferred(1.0)
    assert desk.states() == {"FREE": 16 - cached, "CACHED": cached}
    assert desk.pages.match(req.key).prefix_len == 4 * cached


@pytest.mark.parametrize("fields", [{"cacheable": False}, {}])
def test_warm_ups_never_enter_the_tree_and_with_the_cache_off_nothing_does(
    fields: dict[str, Any],
) -> None:
    desk = Desk(caching=bool(fields))
    old = desk.start("old", 4, **fields)
    req = desk.start("a", 8, outputs=1, **fields)
    again = desk.admitted("a2", 8, **fields)
    assert again.prefix_len == 0
    desk.retract(req)
    assert desk.admit() == ["a"]
    assert req.prefix_len == 0
    desk.succeed(req.room_key)
    desk.succeed(again.room_key)
    desk.transferred()
    for other in (old, req, again):
        desk.finish(other)
    assert desk.states() == {"FREE": 16}


def test_priority_reaches_the_tree() -> None:
    desk = Desk(policy="priority")
    desk.finish(desk.start("a", 8, priority=3))
    assert [node.mark[0] for node in desk.pages.cache.nodes()] == [3]


def test_the_token_of_a_request_that_was_aborted_is_dropped() -> None:
    desk = Desk()
    first, second = desk.start("a"), desk.start("b", outputs=1)
    desk.abort(second)
    desk.token(first, second, token=7)
    assert (first.output, second.output) == ([7], [1])
    desk.token(second)  # alone
    desk.finish(first)
    with pytest.raises(RequestError, match="'a' is finished"):
        desk.token(first)


class LostEvent:
    """An event that can be asked once; then the device is lost, for some time."""

    def __init__(self) -> None:
        self.num_asked, self.lost = 0, True

    def query(self) -> bool:
        self.num_asked += 1
        if self.num_asked > 1 and self.lost:
            raise OSError("device lost")
        return not self.lost


@pytest.mark.parametrize("how", ["finish", "retract", "abort"])
def test_an_event_that_raises_later_keeps_its_pages_and_stops_nothing_else(how: str) -> None:
    """It has proved nothing. What it raises is raised once, all else goes on."""
    desk, event = Desk(24), LostEvent()
    desk.start("oldest", 4)
    req = desk.start("a", 8)
    getattr(desk, how)(req, after=event)
    other = desk.add("b", 4)
    with pytest.raises(OSError, match="device lost"):
        desk.admit()
    assert desk.admit() == ["b"]
    assert other.state is DecodeState.PREALLOCATED
    for _ in range(4):
        desk.admit()
    assert (len(desk.scheduler.ledger.deferred), desk.pages.errors.num) == (1, 1)
    assert event.num_asked > 4, "it is asked again"
    event.lost = False
    desk.admit()
    assert len(desk.scheduler.ledger.deferred) == 0


def test_a_log_handler_that_raises_costs_no_page() -> None:
    def broken(req: DecodeRequest, now_s: float) -> None:
        raise OSError("disk full")

    desk = Desk()
    req, queued = desk.start("a"), desk.add("b")
    desk.scheduler.journal.on_ended = [broken]
    desk.finish(req)
    desk.abort(queued)
    desk.carry_out_aborts()
    assert [ended.rid for ended in desk.pop_failed()] == ["b"]
    with pytest.raises(OSError, match="disk full"):
        desk.admit()
    assert desk.pages.errors.num == 2


def test_the_audit_sees_a_lock_and_a_row_that_are_of_no_request() -> None:
    desk = Desk()
    desk.finish(desk.start("a"))
    desk.start("b", 4)  # so that something may be locked
    lock = desk.pages.cache.lock(
        desk.pages.match(RadixKey([ord("a") * 1000 + i for i in range(8)]))
    )
    with pytest.raises(InternalError, match="every lock is a request's"):
        desk.scheduler.check_invariants()
    desk.pages.cache.unlock(lock)
    desk.scheduler.check_invariants()
    desk.pages.table.alloc_row()
    with pytest.raises(InternalError, match="every row is a request's"):
        desk.scheduler.check_invariants()
    Desk.made.remove(desk)  # it cannot settle


@pytest.mark.parametrize("how", ["finish", "retract", "abort"])
def test_an_event_that_cannot_be_asked_changes_nothing(how: str) -> None:
    class Broken:
        def query(self) -> bool:
            raise OSError("device lost")

    desk = Desk()
    desk.start("oldest", list(range(4)))
    req = desk.start("a", list(range(8)))
    state, owned = req.state, desk.scheduler.pages.allocator.owned_pages
    who = req if how == "finish" else "a"
    with pytest.raises(OSError, match="device lost"):
        getattr(desk.scheduler, how)(who, after=Broken())
    assert (req.state, desk.scheduler.pages.allocator.owned_pages) == (state, owned)
    assert desk.scheduler.requests["a"] is req
    desk.scheduler.check_invariants()


def new() -> DecodeRequest:
    request = Request(
        "a", [1, 2, 3, 4, 5], max_new_tokens=4, room=9, generation=2, prefill="p", namespace="lora"
    )
    return DecodeRequest(request, PageManager(8, 4, 2), 1.0)


def test_every_state_has_a_row_and_the_ended_ones_lead_nowhere() -> None:
    assert set(DecodeRequest.TRANSITIONS) == set(DecodeState)
    for state, nexts in DecodeRequest.TRANSITIONS.items():
        assert state.ended == (not nexts)
        assert state.ended or DecodeState.ABORTED in nexts, (
            "an abort is possible wherever a request is"
        )


@pytest.mark.parametrize(("before", "after"), list(product(DecodeState, DecodeState)))
def test_only_what_is_in_the_table_happens(before: DecodeState, after: DecodeState) -> None:
    req = new()
    req.state = before
    if after in DecodeRequest.TRANSITIONS[before]:
        req.become(after)
        assert req.state is after
    else:
        with pytest.raises(
            InternalError, match=f"'a' cannot go from {before.value} to {after.value}"
        ):
            req.become(after)
        assert req.state is before


def test_a_new_request_counts_its_tokens_and_holds_no_pages() -> None:
    req = new()
    assert (req.prompt_len, req.kv_len, req.fill_len, req.max_pages) == (5, 5, 5, 2)
    assert (req.pages.tolist(), req.row, req.resumed, req.room_key) == (
        [],
        -1,
        False,
        RoomKey(9, 2),
    )
    assert req.key.namespace == "lora"
    req.key.append(6)
    assert len(req.request.key) == 5, "its key is its own"
    req.output += [6, 7]
    tokens = req.tokens
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tokens.dtype == np.int32
    assert req.resumed
