"""Tensor parallel ranks: each worker has a share of every block; a request is over when all are."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from prefixkv.config import ModelConfig
from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.layout import pool_of
from prefixkv.engines.vllm.options import ServerSetup
from prefixkv.engines.vllm.orders import StepOrders, WorkerReport
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.worker import Results, WorkerSide
from tests.support.patience import PATIENCE_S, lasting_address, until
from tests.unit.engines.vllm.standin import (
    BLOCK,
    CONTENT,
    BlockPool,
    Request,
    kv_cache_config,
    options,
    side_of,
    step_of,
)

NUM_RANKS, NUM_BLOCKS, NUM_HEADS = 2, 16, 4
PROMPT = list(range(18))  # 4 blocks and a half


class Gathering:
    """`worker.Gather` between threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=PATIENCE_S)
        self._given: list[object] = [None] * num_ranks

    def of(self, rank: int) -> Any:
        def gather(given: object) -> list[object]:
            self._given[rank] = given
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()
            return found

        return gather


class Server:
    """A scheduler's side and two workers' sides, with what vLLM does between them."""

    def __init__(
        self,
        name: str,
        *,
        producer: bool,
        num_ranks: int = NUM_RANKS,
        block_size: int = BLOCK,
        plain: bool = False,
        **more: Any,
    ) -> None:
        setup = ServerSetup(producer, not producer, num_ranks)
        # One port for rank 0 alone: the others take free ones.
        self.options = options(name, **(more | {"bind": lasting_address()} if producer else more))
        self.num_ranks = num_ranks
        self.pool = BlockPool(NUM_BLOCKS)
        self.scheduler = SchedulerSide(self.options, setup, BlockGroups(block_size))
        self.scheduler.bind(self.pool)
        gathering, heads = Gathering(num_ranks), NUM_HEADS // num_ranks
        self.memory = [
            torch.zeros(2, NUM_BLOCKS, heads, block_size, CONTENT) for _ in range(num_ranks)
        ]

        def worker(rank: int) -> WorkerSide:
            made = WorkerSide(
                self.options, setup, ModelConfig(model="m"), rank, NUM_HEADS, gathering.of(rank)
            )
            caches = {f"layer.{i}": self.memory[rank][i] for i in range(2)}
            config = kv_cache_config(NUM_BLOCKS, block_size, heads)
            made.register(pool_of(caches, config, "stand-in", plain=plain))
            return made

        with ThreadPoolExecutor(num_ranks) as threads:
            self.workers = list(threads.map(worker, range(num_ranks)))
        self._left: dict[str, int] = {}
        self.received: list[str] = []
        self.failed: set[str] = set()

    def step(self, step: Any = None) -> None:
        orders = self.scheduler.orders(step or step_of())
        for worker in self.workers:
            worker.before_forward(orders)
            worker.after_forward(orders)
        self.hear(orders)

    def hear(self, orders: StepOrders) -> None:
        received, news = [], None
        for worker in self.workers:
            results: Results = worker.take_results()
            self.failed |= results.failed
            for rid in results.received:
                self._left[rid] = self._left.get(rid, self.num_ranks) - 1
                if not self._left[rid]:
                    received.append(rid)
            said: WorkerReport | None = worker.take_report()
            news = said if news is None else news if said is None else news.aggregate(said)
        self.received += received
        self.scheduler.take_reports(news, received)
        self.scheduler.check_invariants()

    def close(self) -> None:
        for worker in reversed(self.workers):
            worker.close()


def admit(prefill: Server, decode: Server, sending: Request, source: list[int]) -> None:
    """Prefill has heard decode's promise from every rank, and gives the request its blocks."""

    def allowed() -> bool:
        decode.step()
        prefill.step()
        return prefill.scheduler.count_loadable(sending, 0) == (0, False)

    until(allowed)
    prefill.scheduler.allocated(sending, (source,), 0)


SLOW = [
    pytest.param(ranks, sizes, True, marks=pytest.mark.slow)
    for ranks in ((1, 2), (2, 1), (1, 1))
    for sizes in ((4, 8), (8, 4), (4, 4))
]


@pytest.mark.parametrize(("ranks", "sizes", "plain"), [((2, 2), (4, 4), False), *SLOW])
def test_every_rank_gets_its_share(
    ranks: tuple[int, int], sizes: tuple[int, int], plain: bool
) -> None:
    """Of (prefill, decode): ranks, and sizes of blocks, which may differ where blocks are plain.
    Every token and head is looked at, K and V."""
    prefill, decode = (
        Server(name, producer=i == 0, num_ranks=ranks[i], block_size=sizes[i], plain=plain)
        for i, name in enumerate(("prefill-0", "decode-0"))
    )
    try:
        source = [block.block_id for block in prefill.pool.new_blocks(9) or ()][2:]
        target = [block.block_id for block in decode.pool.new_blocks(8) or ()][1:]
        fill(prefill, source, sizes[0])
        where = prefill.workers[0].prefill.endpoint
        load = {"do_remote_prefill": True, "room": 1, "prefill": where}
        send = {"do_remote_decode": True, "room": 1, "decode": "decode-0"}
        sending, loading = Request("1", PROMPT, send), Request("1", PROMPT, load)
        prefill.scheduler.on_new_request(sending)
        decode.scheduler.on_new_request(loading)
        decode.scheduler.allocated(loading, (target,), 18 - 8)  # decode has 8 tokens
        assert prefill.scheduler.count_loadable(sending, 0) == (None, False)
        admit(prefill, decode, sending, source)
        prefill.step(step_of({"1": (0, 11)}, source))
        prefill.step(step_of({"1": (0, 18)}, source))
        prefill.scheduler.finished(sending, source)
        assert prefill.scheduler.gauges()["held_blocks"] > 0

        def both() -> bool:
            prefill.step()
            decode.step()
            return decode.received == ["1"] and not prefill.scheduler.busy

        until(both)
        assert decode.failed == set()
        assert prefill.scheduler.gauges()["held_blocks"] == 0
        assert not decode.scheduler.busy
        assert wrong(decode, target, sizes[1]) == list(range(8))
    finally:
        decode.close()
        prefill.close()


def places(server: Server, blocks: list[int], block_size: int, token: int) -> Any:
    """Of each head of the model: its K and V at that token, in both layers."""
    block, slot = blocks[token // block_size], token % block_size
    for rank, memory in enumerate(server.memory):
        heads = NUM_HEADS // server.num_ranks
        for head in range(heads):
            yield rank * heads + head, memory[:, block, head, slot]


def fill(server: Server, blocks: list[int], block_size: int) -> None:
    for token in range(len(PROMPT)):
        for head, place in places(server, blocks, block_size, token):
            place[:] = torch.arange(CONTENT) + 100 * head + 1000 * (token + 1)


def wrong(server: Server, blocks: list[int], block_size: int) -> list[int]:
    """Tokens whose KV is not as `fill` writes it."""
    return [
        token
        for token in range(len(PROMPT))
        if not all(
            (place == torch.arange(CONTENT) + 100 * head + 1000 * (token + 1)).all()
            for head, place in places(server, blocks, block_size, token)
        )
    ]


def test_blocks_are_held_until_the_last_rank_has_its_proof() -> None:
    side, pool = side_of(ServerSetup(False, True, NUM_RANKS), num_blocks=NUM_BLOCKS)
    request = Request("1", PROMPT, {"do_remote_prefill": True, "room": 1, "prefill": "tcp://a:1"})
    side.on_new_request(request)
    blocks = pool.new_blocks(5) or []
    side.allocated(request, ([block.block_id for block in blocks],), 18)
    side.take_reports(WorkerReport(failed={"1": "lost"}, settled=["1"]), ["1"])
    pool.free_blocks(blocks)  # vLLM's own reference
    assert side.gauges()["held_blocks"] == 5
    assert len(pool.free) == NUM_BLOCKS - 5
    side.take_reports(WorkerReport(settled=["1"]), ())
    assert len(pool.free) == NUM_BLOCKS
    side.check_invariants()
