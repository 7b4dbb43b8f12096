"""Decode's loads, turns and rests, each without the rest of the scheduler's side."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from prefixkv.engines.vllm.asks import LoadAsk
from prefixkv.engines.vllm.blocks import Holds
from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.loads import ScheduledLoads
from prefixkv.engines.vllm.orders import StepOrders
from prefixkv.engines.vllm.rest import LONGEST_REST_S, QUIET_STEPS, Rest
from prefixkv.engines.vllm.stats import Counters
from prefixkv.engines.vllm.turns import Turns
from prefixkv.spi import CallerError, RequestError
from tests.unit.engines.vllm.standin import BLOCK, BlockPool, Request

PROMPT = list(range(30))
NUM_BLOCKS = 8


class Case:
    """Two ranks; `orders` are those of the step."""

    def __init__(self, most_blocks: int | None = None) -> None:
        self.pool, self.orders = BlockPool(32), StepOrders()
        self.holds = Holds(self.pool)
        tickets = count(1)
        self.loads = ScheduledLoads(
            BlockGroups(BLOCK), 2, BLOCK, Counters(), lambda: next(tickets), lambda: 5.0,
            most_blocks,
        )  # fmt: skip

    def begin(self, rid: str, room: int, tokens: list[int] = PROMPT, **more: Any) -> Request:
        request = Request(rid, tokens, **more)
        self.loads.begin(request, LoadAsk(room, "p:1", ""), self.orders)
        self.loads.check_invariants()
        return request

    def load(self, rid: str, room: int, num_sent: int = 30) -> Request:
        request = self.begin(rid, room)
        wanted = self.loads.wanted.pop(rid)
        blocks = self.pool.new_blocks(NUM_BLOCKS)
        assert blocks is not None
        pages = [block.block_id for block in blocks]
        self.loads.open(request, wanted, num_sent, pages, (), self.orders)
        self.loads.check_invariants()
        return request

    def received(self, rid: str) -> Any:
        """As vLLM does: it takes a failed load's blocks at once."""
        load = self.loads.received(rid)
        if load is not None and load.error and load.unsettled > 0:
            self.holds.take(rid, load.pages)
        return load


def test_a_load_names_the_blocks_behind_the_prefix_that_is_here() -> None:
    case = Case()
    case.load("a", 1, num_sent=22)
    (opened,) = case.orders.opens
    assert (opened.num_tokens, opened.prefix_len, opened.pages) == (30, 8, tuple(range(2, 8)))
    assert case.loads.pending["a"].num_blocks == NUM_BLOCKS
    assert case.loads.waiting_since() == [5.0]


def test_a_room_is_one_prompt_s() -> None:
    case = Case()
    case.begin("a", 1)
    case.begin("b", 1)
    assert case.loads.followers == {"b"}, "another choice of it"
    with pytest.raises(RequestError, match="room 1 is in use by another request"):
        case.begin("c", 1, PROMPT[1:])
    embeds = Request("d", PROMPT)
    embeds.prompt_token_ids = None
    with pytest.raises(CallerError, match="embeddings"):
        case.loads.begin(embeds, LoadAsk(1, "p:1", ""), case.orders)
    assert not case.orders.refusals, "the room is the first one's"
    assert list(case.loads.wanted) == ["a"]


def test_a_prompt_that_is_not_loaded_is_refused_unless_its_room_is_another_s() -> None:
    case = Case()
    embeds = Request("a", PROMPT)
    embeds.prompt_token_ids = None
    with pytest.raises(CallerError, match="embeddings"):
        case.loads.begin(embeds, LoadAsk(7, "p:1", ""), case.orders)
    case.load("b", 1)
    with pytest.raises(RequestError, match="still being transferred"):
        case.begin("b", 2)
    assert [refusal.room for refusal in case.orders.refusals] == [7, 2]
    assert not case.loads.wanted
    assert list(case.loads.rooms) == [1]


def test_one_that_ends_before_its_admission_is_refused() -> None:
    case = Case()
    case.begin("a", 1)
    case.begin("b", 1)
    assert not case.loads.finished("a", case.orders)
    assert not case.loads.finished("b", case.orders)
    assert [refusal.room for refusal in case.orders.refusals] == [1]
    assert not any((case.loads.rooms, case.loads.wanted, case.loads.followers))


@pytest.mark.parametrize("settles_first", [False, True])
def test_blocks_of_a_failed_load_are_held_until_every_rank_has_settled(
    settles_first: bool,
) -> None:
    case = Case()
    case.load("a", 1)
    assert case.loads.finished("a", case.orders), "it was loading"
    assert case.orders.abort_loads == {"a": "decode's request ended"}
    assert case.loads.failed("a", "lost", refused=False)
    assert not case.loads.failed("unknown", "lost", refused=False)
    ranks = ["a", "a"]
    if settles_first:
        case.loads.settled(ranks)
        case.loads.settle("a", case.holds)
        assert case.loads.rooms, "vLLM has not heard of its end"
    case.received("a")
    assert case.holds.num_blocks == (0 if settles_first else NUM_BLOCKS)
    for rid in () if settles_first else ranks:
        assert case.loads.any_expected
        case.loads.settle(rid, case.holds)
        assert case.loads.rooms, "a peer may still write"
        case.loads.settled([rid])
    case.loads.settle("a", case.holds)
    assert case.holds.num_blocks == 0
    assert not any((case.loads.rooms, case.loads.pending, case.loads.any_expected))
    assert case.received("a") is None


def test_a_proof_that_is_overdue_is_not_waited_for() -> None:
    case = Case()
    case.load("a", 1)
    assert case.loads.any_under_way
    assert not case.loads.any_expected, "vLLM waits for its end itself"
    case.loads.failed("a", "lost", refused=False)
    case.received("a")
    case.loads.overdue(["a", "unknown"])
    assert not case.loads.any_under_way
    assert not case.loads.any_expected


def test_loads_leave_blocks_to_compute_with() -> None:
    case = Case(most_blocks=20)
    assert not case.loads.could_fit(21)
    assert case.loads.fits(20)
    case.load("a", 1)
    assert case.loads.fits(12)
    assert not case.loads.fits(13)
    assert case.loads.could_fit(13)
    case.received("a")
    assert not case.loads.fits(13), "a rank may still write its blocks"
    case.loads.flush(case.orders)
    assert not case.orders.abort_loads, "it is over"


# --- turns ----------------------------------------------------------------------------------------


def test_what_lacks_blocks_lets_promised_sends_go_first_while_loads_have_them() -> None:
    case, sends = Case(), SimpleNamespace(has_promised_uncomputed=True)
    turns = Turns(case.loads, sends, has_windows=False)  # type: ignore[arg-type]
    assert not turns.must_yield(3), "no load has blocks"
    case.load("a", 1)
    assert not turns.must_yield(0), "it lacks none"
    sends.has_promised_uncomputed = False
    assert not turns.must_yield(3)
    sends.has_promised_uncomputed = True
    assert turns.must_yield(3)
    assert turns.must_yield(0), "all behind it keep their order"
    assert turns.is_changed
    turns.next_step()
    assert not turns.must_yield(0)


@pytest.mark.parametrize("is_loading", [False, True])
def test_one_whose_load_failed_lets_those_go_first_that_have_blocks_of_loads(
    is_loading: bool,
) -> None:
    case, sends = Case(), SimpleNamespace(has_promised_uncomputed=False)
    turns = Turns(case.loads, sends, has_windows=True)  # type: ignore[arg-type]
    turns.received("lost", is_failed=True)
    assert not turns.steps_back("lost", 3), "nothing else has blocks"
    if is_loading:
        case.load("a", 1)
    else:
        turns.received("a", is_failed=False)
    assert not turns.steps_back("lost", 0), "it lacks none"
    assert not turns.steps_back("other", 3), "its load has not failed"
    assert turns.steps_back("lost", 3)
    assert turns.steps_back("other", 0), "no other may take the blocks"
    turns.next_step()
    assert not turns.steps_back("other", 0)
    turns.ended("lost")
    assert not turns.steps_back("lost", 3)
    without = Turns(case.loads, sends, has_windows=False)  # type: ignore[arg-type]
    without.received("lost", is_failed=True)
    assert not any((without.failed, without.landed))


# --- rests ----------------------------------------------------------------------------------------


def test_the_engine_rests_once_every_worker_wakes_it_and_all_is_quiet() -> None:
    rest = Rest(num_ranks=2)
    assert rest.bell == ""
    rest.set_address("here")
    for _ in range(QUIET_STEPS):
        rest.stepped(is_quiet=True)
    rest.sent_by(1)
    assert rest.bell == "here", "a worker has not answered"
    assert not rest.may_rest
    rest.sent_by(1)
    assert (rest.bell, rest.has_wakeups, rest.may_rest) == ("", True, True)
    rest.stepped(is_quiet=False)
    for _ in range(QUIET_STEPS):
        assert not rest.may_rest
        rest.stepped(is_quiet=True)
    assert rest.may_rest


@pytest.mark.parametrize(
    ("left_s", "rest_s"),
    [
        (None, LONGEST_REST_S),
        (5.0, 5.0),
        (LONGEST_REST_S + 1, LONGEST_REST_S),
        (0.0, LONGEST_REST_S),  # it has happened, and a request makes use of it
        (-1.0, LONGEST_REST_S),
    ],
)
def test_a_rest_ends(left_s: float | None, rest_s: float) -> None:
    assert Rest.limited(left_s) == rest_s
