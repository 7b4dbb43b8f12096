"""Workers of two ranks whose other rank's process is dead: it is waited for until it is fenced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.errors import CallerError, DrainingError, PeerLostError
from prefixkv.memory.mesh import Mesh
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import Request
from prefixkv.spi import DecodeGroup, DecodeRank, PrefillRank
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.node_process import EVENTS
from tests.support.patience import until
from tests.support.patterns import make_pools
from tests.support.processes import Child, children, obey
from tests.unit.runtime.conftest import QUICK

MESH = Mesh(2, 2, tp_size=2)


def test_a_decode_rank_whose_process_is_dead_is_waited_for_until_it_is_fenced() -> None:
    config = DecodeConfig(control=QUICK, reserve_tokens=0, max_running=2)
    with (
        PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(make_pool(num_kv_heads=1), config, RankLog(), MESH) as decode,
        DecodeRank(make_pool(num_kv_heads=1), config, MESH, 1, decode.peer_id) as other,
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
        late = [b""]
        until(lambda: late.append(other.take_rank_events()) or late[-1])
        decode.apply_rank_events(late[-1])  # what it said before its end is left out
        assert decode.drain()


def serve_rank(pipe: Any, config: PrefillConfig) -> None:
    """In the child: prefill's rank 1, which obeys calls. Its chunks never leave: it waits for its
    device."""
    rank = PrefillRank(make_pools(PREFILL, *SIZES)[1], config, PREFILL, 1)
    pipe.send((rank.peer_id, rank.endpoint))
    apply, never = rank.apply, EVENTS["never"]
    rank.apply = lambda raw: apply(raw, never)  # type: ignore[assignment, method-assign]
    obey(pipe, rank)


# Each of both writers has half of each reader's heads.
PREFILL, DECODE = Mesh(4, 4, tp_size=2), Mesh(4, 4, pp_size=2)
SIZES = 64, 4, 16
LEASE = 16 << 10
STAGED = TransportConfig(staging_bytes=LEASE * 3 // 2, lease_bytes=LEASE)


@pytest.mark.parametrize(
    "proves", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fenced", "proved dead"]
)
def test_a_prefill_rank_whose_process_is_dead_is_waited_for_until_it_is_fenced(
    proves: bool,
) -> None:
    control = replace(QUICK, prove_death=proves)
    config = PrefillConfig(control=control, transport=STAGED)
    receives = DecodeConfig(control=control, transport=STAGED, reserve_tokens=0)
    pools, targets = make_pools(PREFILL, *SIZES), make_pools(DECODE, *SIZES)
    with children(Child) as start:
        other = start(serve_rank, config)
        its_id, endpoint = other.hello
        with (
            PrefillNode(pools[0], config, PREFILL, ranks=RankLog([endpoint])) as prefill,
            DecodeGroup(targets, receives, DECODE) as decode,
        ):
            computing: dict[str, Any] = {}
            failed: set[str] = set()

            def step() -> None:
                decode.pop_preallocated()
                failed.update(req.rid for req in decode.pop_failed())
                computing.update({req.rid: req for req in prefill.pop_bootstrapped()})

            def exchange() -> None:
                step()
                other.call("apply", prefill.take_log())
                prefill.apply_rank_events(other.call("take_rank_events"))

            for room, rid in enumerate(("given up", "cut")):
                where = {"prefill": prefill.endpoint, "decode": "decode-0"}
                request = Request(rid, tokens_of(room, 24), 2, room=room, **where)
                prefill.add(request)
                decode.add(request)
            until(lambda: len(computing) == 2, step=exchange)
            prefill.send_chunk(computing["cut"], 12)
            exchange()
            # From here on nothing comes of rank 1. What has ended on rank 0 waits for its word.
            other.kill()
            prefill.abort("given up")
            assert [req.rid for req in prefill.pop_failed()] == ["given up"]
            until(lambda: prefill.awaited_ranks() == {1: 1}, step=prefill.pop_sent)
            assert prefill.stats()["pages_owned"] > 0
            prefill.fence_rank(1)
            (cut,) = prefill.pop_failed()
            assert isinstance(cut.error, PeerLostError)
            assert "prefill rank 1: its process is dead" in str(cut.error)
            # Decode hears of it from rank 0. What rank 1 may still write is proved, or told.
            until(lambda: failed == {"given up", "cut"}, step=step)
            if not proves:
                assert decode.stats()["pages_held"] > 0
                decode.fence(*its_id)
            until(lambda: prefill.drain() and decode.drain(), step=step)
            for node in (prefill, decode):
                node.audit()
                assert node.stats()["pages_owned"] == node.stats()["pages_held"] == 0
