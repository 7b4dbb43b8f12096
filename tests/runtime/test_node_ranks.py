"""A decode node as rank 0 of two: another rank's page table names the same pages, whatever the node
goes through."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import CallerError, RequestError
from prefixkv.ranks.replica import DecodeReplica, RankLog, digests
from prefixkv.request import Request
from prefixkv.runtime.nodes import DecodeNode, PrefillNode
from tests.models.node_pair import NodePair, make_pool, tokens_of
from tests.runtime.conftest import QUICK


def test_another_rank_reads_the_same_pages() -> None:
    config = DecodeConfig(control=QUICK, reserve_tokens=0, max_running=6)
    with (
        PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(make_pool(num_pages=30), config, RankLog(digest_every=1)) as decode,
    ):
        pair = NodePair(decode, prefill)
        replica = DecodeReplica(30, 4, config)
        rows_compared = 0

        def follow() -> None:
            nonlocal rows_compared
            replica.apply(decode.take_log())
            for req in pair.d.running.values():
                assert replica.pages(req.row).tolist() == req.pages.tolist()
                rows_compared += 1

        rids = [f"r{i}" for i in range(12)]
        for i, rid in enumerate(rids):
            pair.submit(
                rid,
                np.concatenate([tokens_of(1, 16), tokens_of(50 + i % 3, 3 + i)]),
                max_new_tokens=12,
            )
        decode.abort(rids[3])

        def ended() -> bool:
            follow()
            return all(rid in pair.d.ended for rid in rids)

        pair.until(ended)
        decode.flush()
        pair.settle()
        follow()
        assert rows_compared > 20
        assert digests(replica.page_manager) == digests(decode.scheduler.pages)
        replica.audit()
        with pytest.raises(RequestError, match="namespace"):
            decode.add(Request("x", [1], room=1, prefill=prefill.endpoint, namespace=1.5))
        pair.check_at_rest()


def test_a_node_of_one_rank_has_no_log() -> None:
    with DecodeNode(make_pool()) as node, pytest.raises(CallerError, match="RankLog"):
        node.take_log()
