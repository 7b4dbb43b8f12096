"""Whole workers of unequal meshes over real NIXL: every byte on every rank, whatever the meshes,
layouts, page sizes, and whether slices are staged or written one by one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
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


MODES: dict[str, Any] = {
    "sliced": {},
    "staged": staging(8 * LEASE),
    "staged, 1.5 leases": staging(LEASE * 3 // 2),
    "shm": staging(8 * LEASE, "shm"),  # which has no use for the staging memory
}
SIZES = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4)]
CASES = {
    **{f"{p}x{d} {attention}": ((mesh(p, attention=attention), mesh(d, attention=attention)),
                                {"attention": attention}, [*MODES])
       for (p, d), attention in product(SIZES, ("mha", "mla"))},
    **{f"{p}x{d} pages of {sizes}": ((mesh(p), mesh(d)),
                                     {"page_sizes": sizes, "chunk": 32, "num_pages": 128},
                                     ["sliced", "staged", "shm"])
       for (p, d), sizes in product([(1, 1), (2, 1), (2, 4)], [(4, 16), (16, 4)])},
    "stages to one": ((mesh(1, 2), mesh(1)), {}, ["sliced", "staged"]),
    "uneven stages": ((mesh(2, 2, stages=(1, 3)), mesh(1, 2)), {}, ["sliced", "staged"]),
    "one to uneven": ((mesh(1), mesh(2, 2, stages=(3, 1))), {}, ["sliced", "staged"]),
    "opaque": ((mesh(2), mesh(2)), {"opaque": "amx"}, ["staged"]),
    "opaque, stages to one": ((mesh(2, 2), mesh(2)), {"opaque": "amx"}, ["staged"]),
    "opaque to uneven": ((mesh(1), mesh(1, 2, stages=(1, 3))), {"opaque": "amx"}, ["staged"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mode"), [(case, mode) for case, (*_, modes) in CASES.items() for mode in modes]
)
def test_every_byte_arrives_on_every_rank(case: str, mode: str) -> None:
    meshes, options, _ = CASES[case]
    orders = ("layer_major", "page_major")[:: 1 if len(case) % 2 else -1]
    with MeshPair(*meshes, orders=orders, **options, **MODES[mode]) as pair:
        serve(pair, turns=3 if "page_sizes" in options else 2)
        cut = meshes[0].tp_size != meshes[1].tp_size and options.get("attention") != "mla"
        staged = cut and mode.startswith("staged")
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


def test_meshes_that_cannot_work_together_say_why() -> None:
    with MeshPair(replace(mesh(1), num_kv_heads=6, tp_size=3), Mesh(LAYERS, 6, 2)) as pair:
        pair.submit("r", tokens_of(0, 10), room=1)
        pair.until(lambda: "r" in pair.failed)
        assert "tp_size" in str(pair.failed["r"])
