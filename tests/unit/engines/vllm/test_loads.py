"""Decode's loads, turns and rests, each without the rest of the scheduler's side."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from prefixkv.engines.vllm.asks import LoadAsk
from prefixkv.engines.vllm.blocks import Ledger
from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.loads import ScheduledLoads
from prefixkv.engines.vllm.orders import WorkerReport
from prefixkv.engines.vllm.wakeup import QUIET_STEPS, Rest
from prefixkv.errors import CallerError, RequestError
from tests.unit.engines.vllm.standin import BLOCK, BlockPool, Request

PROMPT = list(range(30))
NUM_BLOCKS = 8


class Case:
    """Two ranks; `orders` are those of the step."""

    def __init__(self, most_blocks: int | None = None, num_blocks: int = 32) -> None:
        self.pool, ledger = BlockPool(num_blocks), Ledger(BlockGroups(BLOCK), num_ranks=2)
        ledger.holds.pool = self.pool
        self.holds, self.orders = ledger.holds, ledger.orders
        self.loads = ScheduledLoads(ledger, most_blocks)

    def begin(self, rid: str, room: int, tokens: list[int] = PROMPT, **more: Any) -> Request:
        request = Request(rid, tokens, **more)
        self.loads.begin(request, LoadAsk(room, "p:1", ""))
        self.loads.check_invariants()
        return request

    def load(self, rid: str, room: int, num_sent: int = 30) -> Request:
        request = self.begin(rid, room)
        wanted = self.loads.wanted.pop(rid)
        blocks = self.pool.new_blocks(NUM_BLOCKS)
        assert blocks is not None
        pages = [block.block_id for block in blocks]
        self.loads.open(request, wanted, num_sent, (pages,))
        self.loads.check_invariants()
        return request

    def received(self, rid: str) -> Any:
        """As vLLM does: it takes a failed load's blocks at once."""
        load = self.loads.received(rid)
        if load is not None and load.error and load.unsettled > 0:
            self.holds.take(rid, load.pages)
        return load


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
        case.loads.begin(embeds, LoadAsk(1, "p:1", ""))
    assert not case.orders.refusals, "the room is the first one's"
    assert list(case.loads.wanted) == ["a"]


def test_a_prompt_that_is_not_loaded_is_refused_unless_its_room_is_another_s() -> None:
    case = Case()
    embeds = Request("a", PROMPT)
    embeds.prompt_token_ids = None
    with pytest.raises(CallerError, match="embeddings"):
        case.loads.begin(embeds, LoadAsk(7, "p:1", ""))
    case.load("b", 1)
    with pytest.raises(RequestError, match="still being transferred"):
        case.begin("b", 2)
    assert [refusal.room for refusal in case.orders.refusals] == [7, 2]
    assert not case.loads.wanted
    assert list(case.loads.pending) == ["b"]


def test_a_proof_that_is_overdue_is_not_waited_for() -> None:
    case = Case()
    case.load("a", 1)
    assert case.loads.any_under_way
    assert not case.loads.any_expected, "vLLM waits for its end itself"
    case.loads.take(WorkerReport(failed={"a": "lost"}))
    case.received("a")
    assert case.loads.any_expected
    case.loads.take(WorkerReport(overdue=["a", "unknown"]))
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
    case.loads.flush()
    assert not case.orders.abort_loads, "it is over"


# --- rests ----------------------------------------------------------------------------------------


def test_the_engine_rests_once_every_worker_wakes_it_and_all_is_quiet() -> None:
    rest = Rest(num_ranks=2)
    assert rest.bell == ""
    rest.listener = listener = Mock(address="here", num_senders=0)
    for _ in range(QUIET_STEPS):
        rest.stepped(is_quiet=True)
    listener.num_senders += 1
    assert rest.bell == "here", "a worker has not answered"
    assert rest.seconds(None) == 0.0
    listener.num_senders += 1
    assert (rest.bell, rest.has_wakeups) == ("", True)
    # Until an offer's grace ends; where it has ended, a request makes use of it.
    for left_s, rest_s in ((None, 60.0), (5.0, 5.0), (61.0, 60.0), (0.0, 60.0), (-1.0, 60.0)):
        assert rest.seconds(left_s) == rest_s
    rest.stepped(is_quiet=False)
    for _ in range(QUIET_STEPS):
        assert rest.seconds(None) == 0.0
        rest.stepped(is_quiet=True)
    assert rest.seconds(None) > 0.0


def test_the_end_of_all_loads_at_once_costs_what_each_costs() -> None:
    """As where a prefill server is lost: all ranks name all of them in one report."""
    compared = 0

    class Rid(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    rids = [Rid(number) for number in range(100)]
    case = Case(num_blocks=len(rids) * NUM_BLOCKS + 1)
    for room, rid in enumerate(rids):
        case.load(rid, room)
    compared = 0
    case.loads.take(WorkerReport(dict.fromkeys(rids, "lost"), settled=2 * rids, overdue=rids))
    assert compared <= 3 * len(rids)
    for rid in rids:
        assert case.received(rid).error == "lost"
        case.loads.settle(rid)
    case.loads.check_invariants()
    assert not case.loads.pending
    assert not case.holds.num_blocks
