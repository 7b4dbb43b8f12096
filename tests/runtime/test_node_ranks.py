"""A decode node as rank 0 of two: another rank's page table names the same pages, whatever the node
goes through."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import CallerError, DrainingError, PeerLostError, RequestError
from prefixkv.memory.mesh import Mesh
from prefixkv.ranks.replica import DecodeReplica, RankLog, digests
from prefixkv.request import Request
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.decode_rank import DecodeRank
from prefixkv.runtime.prefill_node import PrefillNode
from tests.models.node_pair import NodePair, make_pool, tokens_of
from tests.models.patience import until
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


def test_a_decode_rank_whose_process_is_dead_is_waited_for_until_it_is_fenced() -> None:
    mesh = Mesh(2, 2, tp_size=2)
    config = DecodeConfig(control=QUICK, reserve_tokens=0, max_running=2)
    with (
        PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(make_pool(num_kv_heads=1), config, RankLog(), mesh) as decode,
        DecodeRank(make_pool(num_kv_heads=1), config, mesh, 1, decode.peer_id) as other,
    ):
        pair = NodePair(decode, prefill)

        def exchange() -> None:
            other.apply(decode.take_log())
            decode.apply_rank_events(other.take_rank_events())

        def reached(found: Callable[[], object]) -> None:
            pair.until(lambda: exchange() or found())

        pair.d.hold_running = True
        pair.submit("runs", tokens_of(1, 10))
        reached(lambda: "runs" in pair.d.running)
        pair.p.hold = True
        pair.submit("comes", tokens_of(2, 12))
        reached(lambda: "comes" in pair.p.computing)
        pair.submit("waits", tokens_of(3, 9))
        # From here on nothing comes of rank 1, and nothing goes there.
        decode.abort("comes")
        pair.until(lambda: decode.awaited_ranks() == {1: 1})
        assert decode.stats()["pages_held"] == 3
        for bad in (0, 2, "1"):
            with pytest.raises(CallerError, match="rank"):
                decode.fence_rank(bad)  # type: ignore[arg-type]
        assert "runs" in pair.d.running
        decode.fence_rank(1)
        failed = {req.rid: req.error for req in decode.pop_failed()}
        assert failed.keys() == {"runs", "waits"}
        assert all(isinstance(error, PeerLostError) for error in failed.values())
        until(lambda: decode.drain(0.05))
        assert decode.awaited_ranks() == {}
        decode.audit()
        stats = decode.stats()
        assert (stats["pages_held"], stats["pages_owned"]) == (0, 0)
        with pytest.raises(DrainingError):
            decode.add(Request("late", [1, 2], room=9, prefill=prefill.endpoint))
        decode.apply_rank_events(late := other.take_rank_events())
        assert late, "what it said before its end is left out"
        assert decode.drain()
