"""Extra state of requests over real NIXL: it arrives on every rank, and no prefix hit is served
without it."""

from __future__ import annotations

import pytest

from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.errors import RequestError
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import tokens_of
from tests.support.state_memory import StateMemory
from tests.support.state_workers import StatePair, owner_of
from tests.unit.runtime.conftest import QUICK

ONE = Mesh(4, 4)
QUICKLY = {
    "prefill_config": PrefillConfig(control=QUICK),
    "decode_config": DecodeConfig(control=QUICK),
}


def mesh(tp: int, pp: int = 1) -> Mesh:
    return Mesh(4, 4, tp, pp)


def staging() -> dict[str, object]:
    transport = TransportConfig(staging_bytes=24 << 10, lease_bytes=16 << 10)
    return {
        "prefill_config": PrefillConfig(transport=transport, control=QUICK),
        "decode_config": DecodeConfig(transport=transport, control=QUICK),
    }


def turns(pair: StatePair, rooms: int = 3) -> None:
    """Conversations of two turns, and the second once more: a full hit of whole pages."""
    room = 0
    for turn, length in enumerate((30, 64, 64)):
        rids = [f"{seed}.{turn}" for seed in range(rooms)]
        for seed, rid in enumerate(rids):
            room += 1
            pair.submit(rid, tokens_of(seed, length), room)
        pair.until(lambda rids=rids: set(rids) <= pair.arrived.keys() | pair.failed.keys())
        assert not pair.failed
        assert [pair.prefix_lens[rid] for rid in rids] == [(0, 28, 64)[turn]] * rooms
        for rid in rids:
            pair.finish(rid)
        pair.until(lambda rids=rids: set(rids) <= set(pair.sent))
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sliced", "staged"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (2, 2)], ids=str)
def test_state_arrives_with_the_last_chunk_on_every_rank(sizes: tuple[int, int], mode: str) -> None:
    options = staging() if mode == "staged" else QUICKLY
    with StatePair(mesh(sizes[0]), mesh(sizes[1]), **options) as pair:
        turns(pair)


def test_prefill_goes_on_from_its_own_prefix_only_as_far_as_the_engine_has_the_state() -> None:
    with StatePair(ONE, ONE, usable=True, decode_config=DecodeConfig(cache=False, control=QUICK),
                   prefill_config=PrefillConfig(control=QUICK)) as pair:  # fmt: skip
        tokens = tokens_of(1, 60)
        for number, known in enumerate([[], [], [22], [22, 40]]):
            pair.snapshots.update(owner_of(tokens[:end]) for end in known)
            if 22 in known:
                pair.snapshots.add(
                    owner_of(tokens[:20])
                )  # an engine that rounds to pages has this one
            rid = str(number)
            pair.submit(rid, tokens, room=number + 1)
            pair.until(lambda rid=rid: rid in pair.arrived)
            pair.finish(rid)
            pair.until(lambda rid=rid: rid in pair.sent)
        assert [pair.starts[str(number)] for number in range(4)] == [0, 0, 20, 40]
        pair.check()


def test_a_slot_goes_with_the_last_chunk_and_with_no_other() -> None:
    with StatePair(ONE, ONE, **QUICKLY) as pair:
        pair.hold = True
        pair.submit("r", tokens_of(1, 30), room=1)
        pair.until(lambda: "r" in pair.computing)
        node, req = pair.prefill, pair.on_prefill("r")
        for end, last, slot in [(12, False, 0), (30, True, -1), (30, True, 6), (30, True, -2)]:
            with pytest.raises(RequestError, match=f"state.slot (is )?{slot}"):
                node.send_chunk(req, end, last, state_slot=slot)
        pair.hold = False
        pair.until(lambda: "r" in pair.arrived)
        pair.finish("r")
        pair.check()


def test_heads_that_would_come_from_ranks_that_send_no_kv_are_refused() -> None:
    meshes = Mesh(2, 1, 2), Mesh(2, 1)
    tensors = (StateTensor("conv", 0, 2, (4,)),)
    states = [
        [StateMemory(tensors, 2, m, rank).pool() for rank in range(m.num_ranks)] for m in meshes
    ]
    more = {"prefill_more": {"states": states[0]}, "decode_more": {"states": states[1]}}
    with MeshPair(*meshes, attention="mla", device="cpu", **QUICKLY, **more) as pair:  # type: ignore[arg-type]
        pair.submit("r", tokens_of(0, 10), room=1)
        pair.until(lambda: "r" in pair.failed)
        assert "send no KV" in str(pair.failed["r"])
