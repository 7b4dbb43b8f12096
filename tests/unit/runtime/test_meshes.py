"""Whole workers of unequal meshes over real NIXL: every byte on every rank, whatever the meshes,
layouts, page sizes, and whether slices are staged or written one by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefixkv.config import Backend, DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.memory.mesh import Mesh
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.transport.shm.loop import ShmTransport
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import tokens_of

LAYERS, HEADS, HEAD_DIM = 4, 4, 16
# A unit page of 4 tokens has 4 * 2 kinds * 32 B a head and layer; a lease takes a few of them.
LEASE = 16 << 10


def mesh(tp: int, pp: int = 1, attention: str = "mha", stages: tuple[int, ...] = ()) -> Mesh:
    return Mesh(LAYERS, 1 if attention == "mla" else HEADS, tp, pp, stages)


def staging(num_bytes: int, name: Backend = "nixl") -> dict[str, object]:
    transport = TransportConfig(backend=name, staging_bytes=num_bytes, lease_bytes=LEASE)
    return {
        "prefill_config": PrefillConfig(transport=transport),
        "decode_config": DecodeConfig(transport=transport),
    }


def serve(pair: MeshPair, turns: int = 2) -> None:
    """Conversations side by side; each turn finds the one before in decode's cache."""
    for turn, length in enumerate([30, 61, 97][:turns]):
        prompts = {f"{seed}.{turn}": tokens_of(seed, length + seed) for seed in range(3)}
        pair.serve(1 + 3 * turn, prompts)
        assert all((pair.prefix_lens[rid] > 0) == (turn > 0) for rid in prompts)
    assert not pair.failed
    assert pair.mismatches == 0
    pair.decode.audit()
    pair.prefill.audit()


SIZES = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sliced", "staged", "staged, 1.5 leases", "shm"])
@pytest.mark.parametrize("attention", ["mha", "mla"])
@pytest.mark.parametrize("sizes", SIZES, ids=[f"{p}x{d}" for p, d in SIZES])
def test_every_byte_arrives_on_every_rank(
    sizes: tuple[int, int], attention: str, mode: str
) -> None:
    orders = ("layer_major", "page_major") if sum(sizes) % 2 else ("page_major", "layer_major")
    options = {
        "sliced": {},
        "staged": staging(8 * LEASE),
        "staged, 1.5 leases": staging(LEASE * 3 // 2),
        "shm": staging(8 * LEASE, "shm"),  # which has no use for the staging memory
    }[mode]
    prefill, decode = (mesh(size, attention=attention) for size in sizes)
    with MeshPair(prefill, decode, attention=attention, orders=orders, **options) as pair:  # type: ignore[arg-type]
        serve(pair)
        staged = attention == "mha" and sizes[0] != sizes[1] and mode.startswith("staged")
        assert (pair.prefill.stats()["staging_pieces_written"] > 0) == staged


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
    options: Any = staging(num_bytes, "auto")
    with MeshPair(mesh(4), mesh(1), **options) as pair:
        serve(pair)
        assert (pair.prefill.stats()["staging_pieces_written"] > 0) == bool(num_bytes)
        ways = [
            way
            for node in (pair.prefill, *pair.prefill.others)
            for way in node.transfers.thread.transports._of.values()
        ]
        assert [isinstance(way, ShmTransport) for way in ways] == [rank < near for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sliced", "staged", "shm"])
@pytest.mark.parametrize("page_sizes", [(4, 16), (16, 4)])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 4)], ids=str)
def test_page_sizes_may_differ_by_a_whole_factor(
    sizes: tuple[int, int], page_sizes: tuple[int, int], mode: str
) -> None:
    options = {"sliced": {}, "staged": staging(8 * LEASE), "shm": staging(0, "shm")}[mode]
    with MeshPair(
        mesh(sizes[0]), mesh(sizes[1]), page_sizes=page_sizes, chunk=32, num_pages=128, **options
    ) as pair:  # type: ignore[arg-type]
        serve(pair, turns=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sliced", "staged"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (mesh(1, 2), mesh(1)),
        (mesh(2, 2, stages=(1, 3)), mesh(1, 2)),
        (mesh(1), mesh(2, 2, stages=(3, 1))),
    ],
    ids=["stages to one", "uneven stages", "one to uneven stages"],
)
def test_pipeline_stages_may_differ(prefill: Mesh, decode: Mesh, mode: str) -> None:
    options = staging(8 * LEASE) if mode == "staged" else {}
    with MeshPair(prefill, decode, **options) as pair:  # type: ignore[arg-type]
        serve(pair)


def test_meshes_that_cannot_work_together_say_why() -> None:
    with MeshPair(replace(mesh(1), num_kv_heads=6, tp_size=3), Mesh(LAYERS, 6, 2)) as pair:
        pair.submit("r", tokens_of(0, 10), room=1)
        pair.until(lambda: "r" in pair.failed)
        assert "tp_size" in str(pair.failed["r"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(mesh(2), mesh(2)), (mesh(2, 2), mesh(2)), (mesh(1), mesh(1, 2, stages=(1, 3)))],
    ids=["equal", "stages to one", "one to uneven stages"],
)
def test_opaque_pages_move_whole_between_ranks_of_equal_shares(prefill: Mesh, decode: Mesh) -> None:
    with MeshPair(prefill, decode, opaque="amx", **staging(8 * LEASE)) as pair:  # type: ignore[arg-type]
        serve(pair)
        assert pair.prefill.stats()["staging_pieces_written"] == 0
