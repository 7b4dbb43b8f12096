"""Whole workers of unequal meshes whose ranks are reached by several transports. Every byte of
other meshes, layouts and page sizes: test_checksums.py."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.memory.mesh import Mesh
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.transport.shm.loop import ShmTransport
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import tokens_of

LAYERS, HEADS, HEAD_DIM = 4, 4, 16
# A unit page of 4 tokens has 4 * 2 kinds * 32 B a head and layer; a lease takes a few of them.
LEASE = 16 << 10


def mesh(tp: int) -> Mesh:
    return Mesh(LAYERS, HEADS, tp)


def staging(num_bytes: int) -> dict[str, object]:
    transport = TransportConfig(backend="auto", staging_bytes=num_bytes, lease_bytes=LEASE)
    return {
        "prefill_config": PrefillConfig(transport=transport),
        "decode_config": DecodeConfig(transport=transport),
    }


def serve(pair: MeshPair) -> None:
    """Conversations side by side; each turn finds the one before in decode's cache."""
    for turn, length in enumerate([30, 61]):
        prompts = {f"{seed}.{turn}": tokens_of(seed, length + seed) for seed in range(3)}
        pair.serve(1 + 3 * turn, prompts)
        assert all((pair.d.prefix_lens[rid][0] > 0) == (turn > 0) for rid in prompts)
    assert not pair.failed
    pair.check_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [0, 8 * LEASE], ids=["sliced", "staged"])
@pytest.mark.parametrize("near", [4, 2, 0])
def test_auto_takes_a_transport_for_each_rank_and_stages_by_both(
    num_bytes: int, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging memory is shared too."""

    def place(spec: RankSpec) -> str:
        return "near" if spec.mesh.num_ranks == 1 or spec.rank < near else "far"

    monkeypatch.setattr(RankSpec, "place", property(place))
    options: Any = staging(num_bytes)
    with MeshPair(mesh(4), mesh(1), **options) as pair:
        serve(pair)
        assert (pair.prefill.stats()["staging_pieces_written"] > 0) == bool(num_bytes)
        ways = [
            way
            for node in (pair.prefill, *pair.prefill.others)
            for way in node.transfers.thread.transports._of.values()
        ]
        assert [isinstance(way, ShmTransport) for way in ways] == [rank < near for rank in range(4)]
