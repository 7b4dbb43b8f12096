"""Requests that need the same pages at the same time: sent once, whoever ends first and however."""

from collections.abc import Callable
from typing import Any

import pytest

from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import RequestError
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import Promise
from tests.unit.decode.desk import PAGE_SIZE, AbortRoom, Desk, OpenRoom

SYSTEM = list(range(8))  # two pages


def in_order(num_pages: int = 16, **settings: Any) -> Desk:
    """A desk that admits in the order of arrival."""
    return Desk(num_pages, **{"admission": "fifo", **settings})


def tokens(*suffix: int) -> list[int]:
    """The system prompt, then a page of each of these."""
    return SYSTEM + [token for one in suffix for token in [100 + one] * PAGE_SIZE]


def promises(desk: Desk) -> dict[RoomKey, Promise]:
    opened = [command.promise for command in desk.commands() if isinstance(command, OpenRoom)]
    return {RoomKey(promise.room, promise.generation): promise for promise in opened}


def aborted(desk: Desk) -> list[RoomKey]:
    return [command.key for command in desk.commands() if isinstance(command, AbortRoom)]


def burst(desk: Desk, *prompts: list[int], **fields: Any) -> list[DecodeRequest]:
    """These requests, all admitted in one pass, in their order."""
    reqs = [desk.add("abcdefgh"[at], prompt, **fields) for at, prompt in enumerate(prompts)]
    assert desk.admit() == [req.rid for req in reqs]
    return reqs


def trio(desk: Desk) -> list[DecodeRequest]:
    """An owner and two that wait for it: b for a, c for b."""
    reqs = burst(desk, tokens(1, 2), tokens(1, 3), tokens(1, 3, 4))
    desk.commands()
    return reqs


# --- sent once ------------------------------------------------------------------------------------


def test_what_is_on_its_way_is_promised_once() -> None:
    desk = in_order(32)
    a, b, c, other = burst(desk, tokens(1, 2), tokens(1, 3), tokens(1, 3, 4), tokens(9))
    sent = promises(desk)
    assert [sent[req.room_key].prefix_len for req in (a, b, c, other)] == [0, 12, 16, 8]
    assert [len(sent[req.room_key].page_ids()) for req in (a, b, c, other)] == [4, 1, 1, 1]
    assert desk.states() == {"FREE": 25, "OWNED": 7}
    assert a.pages[:3].tolist() == b.pages[:3].tolist() == c.pages[:3].tolist()
    assert b.pages[:4].tolist() == c.pages[:4].tolist()
    counters = desk.scheduler.counters
    assert (counters["shared_flights"], counters["shared_tokens"]) == (3, 12 + 16 + 8)
    assert counters["skipped_tokens"] == counters["shared_tokens"]
    assert a.hit_tokens + b.hit_tokens + c.hit_tokens == 0, "hits are of the cache alone"
    for req in (a, b, c, other):
        desk.succeed(req.room_key)
    assert desk.transferred() == ["a", "b", "d", "c"]
    assert desk.states() == {"FREE": 25, "CACHED": 7}


def test_samples_of_one_prompt_share_all_its_whole_pages() -> None:
    desk = in_order(32)
    prompt = [*tokens(1), 7, 7]
    reqs = burst(desk, prompt, prompt, prompt)
    sent = promises(desk)
    assert [len(sent[req.room_key].page_ids()) for req in reqs] == [4, 1, 1], (
        "and each has the partial page"
    )
    for at, req in enumerate(reqs):
        desk.succeed(req.room_key, b"first token of %d" % at)
    assert desk.transferred() == ["a", "b", "c"]
    assert [req.aux for req in reqs] == [b"first token of %d" % at for at in range(3)]
    assert desk.states() == {"FREE": 26, "CACHED": 3, "OWNED": 3}
    assert desk.pages.cache.protected_pages == 3


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_rooms_may_succeed_in_any_order_and_none_runs_before_all_its_pages_are_there(
    order: str,
) -> None:
    desk = in_order(32)
    reqs = {req.rid: req for req in trio(desk)}
    there: set[str] = set()
    ran: list[str] = []
    for rid in order:
        desk.succeed(reqs[rid].room_key, rid.encode())
        there.add(rid)
        assert desk.scheduler.has_results == any(
            {"a": 0, "b": 1, "c": 2}[rid] == len(ran) for rid in there - set(ran)
        )
        ran += desk.transferred()
        expected = [rid for at, rid in enumerate("abc") if {*"abc"[: at + 1]} <= there]
        assert ran == expected
    for rid, req in reqs.items():
        assert req.aux == rid.encode()
        assert desk.pages.cache.match_prefix(req.tokens).pages.tolist() == req.pages.tolist()


def test_a_long_chain_is_committed_in_one_call() -> None:
    length = 600
    desk = in_order(2 * length, rows=length)
    prompts = [
        [at // PAGE_SIZE for at in range(PAGE_SIZE * (number + 1))] for number in range(length)
    ]
    reqs = [desk.scheduler.add(desk.request(f"r{at}", prompt)) for at, prompt in enumerate(prompts)]
    assert len(desk.admit()) == length
    for req in reversed(reqs):
        desk.scheduler.hear(RoomEnded(req.room_key, KVPoll.SUCCESS, None, b""), 0.0)
    assert desk.transferred() == [req.rid for req in reqs]
    assert desk.states() == {"FREE": length, "CACHED": length}


def test_pages_that_the_tree_has_by_now_are_repointed_for_all_that_joined() -> None:
    """Another request may finish with the same tokens before the owner's pages are committed."""
    desk = in_order(32)
    runs = desk.start("r", SYSTEM[:4], max_new=12, outputs=0)
    a, b = burst(desk, SYSTEM[:4] + [1] * 8, SYSTEM[:4] + [1] * 8 + [2] * 4)
    theirs = a.pages[1:3].tolist()
    assert b.pages[:3].tolist() == a.pages[:3].tolist()
    for _ in range(9):
        desk.token(runs, token=1)
    desk.finish(runs)
    cached = desk.pages.cache.match_prefix(a.tokens).pages.tolist()
    assert len(cached) == 3
    assert set(cached).isdisjoint(theirs)
    desk.succeed(b.room_key)
    desk.succeed(a.room_key)
    assert desk.transferred() == ["a", "b"]
    assert a.pages[:3].tolist() == b.pages[:3].tolist() == cached
    assert all(desk.pages.allocator.state(page) == 0 for page in theirs)


@pytest.mark.parametrize("how", ["not cacheable", "cache off", "namespaces"])
def test_what_may_not_be_shared_is_not(how: str) -> None:
    desk = in_order(caching=how != "cache off")
    fields: dict[str, Any] = {"not cacheable": {"cacheable": False}, "cache off": {}}.get(
        how, {"namespace": "lora"}
    )
    a = desk.add("a", tokens())
    b = desk.add("b", tokens(), **fields)
    again = desk.add("c", tokens(1), **fields)
    desk.admit()
    assert (a.prefix_len, b.prefix_len) == (0, 0)
    assert again.prefix_len == (8 if how == "namespaces" else 0)
    assert set(a.pages.tolist()).isdisjoint(b.pages.tolist())


# --- the owner goes -------------------------------------------------------------------------------


def _open(desk: Desk, req: DecodeRequest) -> None:
    pass


def _arrived(desk: Desk, req: DecodeRequest) -> None:
    desk.succeed(req.room_key)


ROOMS: dict[str, Callable[[Desk, DecodeRequest], None]] = {"open": _open, "arrived": _arrived}


@pytest.mark.parametrize("theirs", ROOMS)
@pytest.mark.parametrize("own", ROOMS)
def test_an_aborted_owner_ends_at_once_and_its_room_goes_on_for_the_others(
    own: str, theirs: str
) -> None:
    desk = in_order(32)
    a, b, _c = trio(desk)
    ROOMS[own](desk, a)
    ROOMS[theirs](desk, b)
    key = a.room_key
    assert desk.abort(a)
    assert desk.pop_failed() == [a]
    assert (a.pages.tolist(), a.state, desk.commands()) == ([], DecodeState.ABORTED, [])
    assert desk.scheduler.counters["flights_adopted"] == 1
    if own == "open":
        with pytest.raises(RequestError, match=f"room {key.room} is in use"):
            desk.add("x", room=key.room)
        desk.succeed(key)
        desk.drain(key)  # says nothing new
    desk.add("a", tokens(9), room=key.room)
    ran = desk.transferred()
    assert ran == (["b"] if theirs == "arrived" else []), "what nobody owns is for the tree"
    assert desk.pages.cache.match_prefix(tokens(1, 2)).prefix_len == 16
    assert (b.pages_held.num_locked, b.pages_held.num_joined) == (
        (4, 0) if theirs == "arrived" else (3, 0)
    )
    desk.admit()


@pytest.mark.parametrize("theirs", ROOMS)
def test_when_the_last_that_waits_has_gone_a_room_without_an_owner_is_aborted(theirs: str) -> None:
    desk = in_order(32)
    a, b, c = trio(desk)
    for req in (b, c):
        ROOMS[theirs](desk, req)
    desk.abort(a)
    desk.abort(b)
    assert aborted(desk) == [], "c still waits for both"
    assert desk.scheduler.counters["flights_adopted"] == 2
    desk.abort(c)
    gone = aborted(desk)
    assert set(gone) == ({a.room_key, b.room_key, c.room_key} if theirs == "open" else {a.room_key})
    assert desk.states()["HELD"] == (6 if theirs == "open" else 4)
    for key in gone:
        desk.fail(key, drained=True)
    assert desk.states() == {"FREE": 32}
    assert desk.transferred() == []


# --- the flight fails -----------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", ROOMS)
@pytest.mark.parametrize("owned", [True, False])
def test_those_that_wait_for_what_fails_ask_again_in_their_order_and_share_again(
    theirs: str, owned: bool
) -> None:
    desk = in_order(32)
    a, b, c = trio(desk)
    d = desk.admitted("d", tokens(5))
    desk.commands()
    for req in (b, c, d):
        ROOMS[theirs](desk, req)
    if not owned:
        desk.abort(a)
    desk.fail(a.room_key)
    assert a.state is (DecodeState.FAILED if owned else DecodeState.ABORTED)
    assert [req.state for req in (b, c, d)] == [DecodeState.RETRACTED] * 3
    assert [req.rid for req in desk.scheduler.waiting] == ["b", "c", "d"]
    assert desk.scheduler.counters["flight_fallbacks"] == 3
    was = [RoomKey(req.room, 0) for req in (b, c, d)]
    assert set(aborted(desk)) == (set(was) if theirs == "open" else set())
    assert desk.states()["HELD"] == (7 if theirs == "open" else 4), (
        "what had arrived is free, nobody writes it"
    )
    assert desk.admit() == ["b", "c", "d"]
    asks = desk.scheduler.pop_needs_prefill()
    assert [(ask.rid, ask.generation, len(ask.tokens)) for ask in asks] == [
        ("b", 1, 16),
        ("c", 1, 20),
        ("d", 1, 12),
    ]
    sent = promises(desk)
    assert [sent[req.room_key].prefix_len for req in (b, c, d)] == [0, 16, 8], (
        "the first brings it, the others join"
    )
    assert [req.retries for req in (b, c, d)] == [0, 0, 0]
    for key in (a.room_key, *(was if theirs == "open" else [])):
        desk.fail(key, drained=True)
    assert "HELD" not in desk.states()


def test_one_that_comes_back_waits_for_a_flight_that_brings_all_it_has_lost_without_a_room() -> (
    None
):
    desk = in_order(32)
    desk.start("old", 4)
    req = desk.start("r", SYSTEM[:4], max_new=12)
    for token in (4, 5, 6, 7, 8):
        desk.token(req, token=token)
    assert req.kv_len == 8
    other = desk.admitted("o", [*SYSTEM, 1])
    assert other.prefix_len == 4
    desk.retract(req)
    desk.evict(1)
    desk.commands()
    assert desk.admit() == ["r"]
    assert (req.prefix_len, req.fill_len, desk.commands()) == (8, 8, [])
    assert desk.scheduler.pop_needs_prefill() == []
    assert desk.transferred() == []
    desk.fail(other.room_key, drained=True)
    assert (req.state, req.generation) == (DecodeState.RETRACTED, 2)
    assert aborted(desk) == [], "it had no room"
    assert desk.admit() == ["r"]
    [ask] = desk.scheduler.pop_needs_prefill()
    assert (ask.tokens.tolist(), ask.known_token) == (SYSTEM, 8)
    desk.arrive(req)
    assert req.output == [4, 5, 6, 7, 8]


# --- a flush --------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", ROOMS)
@pytest.mark.parametrize("owned", [True, False])
def test_a_flush_sends_those_that_wait_to_ask_for_kv_of_the_new_weights(
    theirs: str, owned: bool
) -> None:
    desk = in_order(32)
    a, b, c = trio(desk)
    for req in (b, c):
        ROOMS[theirs](desk, req)
    if not owned:
        desk.abort(a)
    desk.scheduler.flush()
    desk.scheduler.check_invariants()
    was = [a.room_key] if not owned else []
    was += [RoomKey(req.room, 0) for req in (b, c)] if theirs == "open" else []
    assert set(aborted(desk)) == set(was)
    assert [req.state for req in (b, c)] == [DecodeState.RETRACTED] * 2
    late = desk.add("l", tokens(1, 2))
    assert desk.admit() == ["b", "c", "l"]
    assert [req.prefix_len for req in (b, c, late)] == [0, 16, 12], (
        "nobody joins what is on its way from before"
    )
    assert desk.scheduler.counters["flight_fallbacks"] == 2
    for key in was:
        desk.drain(key)
    if owned:
        desk.arrive(a)
        assert desk.pages.cache.num_pages == 0
        desk.finish(a)
