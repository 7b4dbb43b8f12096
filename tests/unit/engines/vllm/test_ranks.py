"""Tensor parallel ranks: each worker has a share of every block; a request is over when all are."""

from __future__ import annotations

import pytest

from prefixkv.engines.vllm.options import ServerSetup
from prefixkv.engines.vllm.orders import WorkerReport
from tests.support.patience import lasting_address
from tests.unit.engines.vllm.conftest import MakeServers
from tests.unit.engines.vllm.standin import Request, side_of

PROMPT = list(range(18))  # 4 blocks and a half
NUM_BLOCKS = 16
SLOW = [
    pytest.param(ranks, sizes, True, marks=pytest.mark.slow)
    for ranks in ((1, 2), (2, 1), (1, 1))
    for sizes in ((4, 8), (8, 4), (4, 4))
]


@pytest.mark.parametrize(("ranks", "sizes", "plain"), [((2, 2), (4, 4), False), *SLOW])
def test_every_rank_gets_its_share(
    make_servers: MakeServers, ranks: tuple[int, int], sizes: tuple[int, int], plain: bool
) -> None:
    """Of (prefill, decode): ranks, and sizes of blocks, which may differ where blocks are plain.
    One port is told to prefill, for rank 0 alone. Host memory has a share of each rank as well."""
    servers = make_servers(
        decode={
            "num_ranks": ranks[1], "block_size": sizes[1], "plain": plain, "host_memory": "4x",
            "num_blocks": NUM_BLOCKS,
        },
        prefill={
            "num_ranks": ranks[0], "block_size": sizes[0], "plain": plain,
            "bind": lasting_address(),
        },
    )  # fmt: skip
    decode = servers.decode
    for rid, prompt, cached in (("1", PROMPT[:9], 0), ("2", PROMPT, 8)):
        load = servers.ask(rid, prompt)
        servers.until_ended(rid)
        assert (load.loaded_from, load.recomputed) == (cached, False)
        assert decode.wrong_tokens(load, len(prompt)) == 0
    servers.settle()
    decode.pool.evict([*decode.pool.cached])
    decode.memory.fill_(-1.0)
    decode.add(again := Request("3", PROMPT))
    servers.until_ended("3")
    assert (again.loaded_from, again.loaded_to) == (0, 16)
    assert decode.wrong_tokens(again, len(PROMPT)) == 0
    servers.settle()


def test_blocks_are_held_until_the_last_rank_has_its_proof() -> None:
    side, pool = side_of(ServerSetup(False, True, 2), num_blocks=NUM_BLOCKS)
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
