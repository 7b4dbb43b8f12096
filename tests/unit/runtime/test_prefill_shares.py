"""Two prefill workers over real NIXL, one of which takes promises and goes no further."""

from __future__ import annotations

from prefixkv import PrefillNode
from prefixkv.config import PrefillConfig
from tests.support.node_pair import PrefillDriver, make_pool, tokens_of
from tests.support.patience import until
from tests.unit.runtime.conftest import QUICK, MakePair

NUM_PAGES = 64


def test_a_worker_that_stalls_has_its_share_of_the_pool_and_another_serves(
    make_pair: MakePair,
) -> None:
    pair = make_pair(pool={"num_pages": NUM_PAGES}, decode={"reserve_tokens": 0})
    config = PrefillConfig(name="prefill-1", control=QUICK)
    with PrefillNode(make_pool(num_pages=NUM_PAGES), config) as node:
        other = PrefillDriver(node)

        def submit(rid: str, seed: int) -> None:
            req = pair.d.submit(rid, tokens_of(seed, 36), node.endpoint, tell=False)
            other.add(rid, tokens_of(seed, 36), req.room)

        def step() -> None:
            pair.step()
            other.step()

        def step_until(*rids: str) -> None:
            until(lambda: all(rid in pair.d.ended for rid in rids), step=step)

        pair.submit("first", tokens_of(1, 36))
        submit("second", 2)
        step_until("first", "second")
        pair.p.hold = True
        stalled = [f"a{i}" for i in range(6)]
        for i, rid in enumerate(stalled):
            pair.submit(rid, tokens_of(10 + i, 36))
        served = [f"b{i}" for i in range(3)]
        for i, rid in enumerate(served):
            submit(rid, 20 + i)
        step_until(*served)
        in_power = pair.decode.workers.of(pair.prefill.endpoint).num_pages
        assert 0 < in_power <= NUM_PAGES // 2
        assert pair.decode.waiting
        pair.p.hold = False
        step_until(*stalled)
        assert set(pair.d.ended.values()) == {None}
