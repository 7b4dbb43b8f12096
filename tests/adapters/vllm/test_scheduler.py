"""What the scheduler's side decides by itself, without workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from prefixkv.engines.vllm.orders import WorkerReport
from prefixkv.engines.vllm.scheduler import SchedulerSide
from tests.adapters.vllm.standin import BLOCK, BlockPool, Request, options

PROMPT = list(range(30))


def side(hash_size: int = BLOCK) -> SchedulerSide:
    made = SchedulerSide(
        options("d"), BLOCK, is_producer=False, is_consumer=True, hash_size=hash_size
    )
    made.bind(BlockPool(64))
    return made


def load(rid: str, room: int, tokens: list[int] = PROMPT) -> Request:
    params = {"do_remote_prefill": True, "room": room, "prefill": "tcp://127.0.0.1:1"}
    return Request(rid, tokens, params)


def test_hashes_may_be_of_parts_of_blocks() -> None:
    """vLLM may hash finer than its blocks: a block is known by the hash at its end."""
    made = side(hash_size=BLOCK // 2)
    first, second = load("1", 1), load("2", 2)
    for request in (first, second):
        request.block_hashes = [hash(tuple(PROMPT[:end])) for end in range(2, 31, 2)]
        made.on_new_request(request)
    made.allocated(first, range(8), 30)
    assert len(made.flights) == 7
    assert made.count_loadable(second, 0) == (None, False)
    second.block_hashes[3] = 0  # the second block differs
    assert made.count_loadable(second, BLOCK) == (26, True)


@pytest.mark.parametrize("missing", [1, 2, 6])
@pytest.mark.parametrize("hash_size", [BLOCK, BLOCK // 2])
def test_the_last_blocks_may_have_no_hash(missing: int, hash_size: int) -> None:
    """As where vLLM hashes a block together with tokens behind it. Blocks without one are loaded,
    and nobody waits for them."""
    made, tokens = side(hash_size), PROMPT[: 6 * BLOCK]
    first, second = load("1", 1, tokens), load("2", 2, tokens)
    for request in (first, second):
        ends = range(hash_size, len(tokens) + 1, hash_size)
        request.block_hashes = [hash(tuple(tokens[:end])) for end in ends][:-missing]
        made.on_new_request(request)
    made.allocated(first, range(6), len(tokens))
    whole = len(first.block_hashes) * hash_size // BLOCK
    assert len(made.flights) == whole
    for block in range(6):
        missed = len(tokens) - block * BLOCK
        joins = block < whole
        assert made.count_loadable(second, block * BLOCK) == (
            (None, False) if joins else (missed, True)
        )


def test_the_block_that_is_partly_filled_flies_for_its_request_alone() -> None:
    made = side()
    first, second = load("1", 1), load("2", 2)
    for request in (first, second):
        made.on_new_request(request)
    made.allocated(first, range(8), 30)
    assert made.count_loadable(second, 28) == (2, True)
    made.allocated(second, range(8, 16), 2)
    made.take_reports(WorkerReport(settled=["1"]), ["1"])
    assert len(made.flights) == 0
    made.check_invariants()


def test_matching_changes_nothing() -> None:
    made = side()
    request = load("1", 1)
    made.on_new_request(request)
    for _ in range(3):
        assert made.count_loadable(request, 8) == (22, True)
    assert not made.orders(_nothing())
    made.finished(request, [])
    (refusal,) = made.orders(_nothing()).refusals
    assert (refusal.room, refusal.prefill) == (1, "tcp://127.0.0.1:1")


def _nothing() -> object:
    empty = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=empty, num_scheduled_tokens={}
    )
