"""Pairs of nodes with `TransportConfig(backend="auto")`: the handshake chooses the transport;
between whole workers of unequal meshes, one for each pair of ranks. Every byte of other meshes,
layouts and page sizes: test_checksums.py."""

from typing import Any

import pytest

from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.errors import HandshakeError
from prefixkv.memory.mesh import Mesh
from prefixkv.protocol.messages import Libraries
from prefixkv.runtime import decode_transfers, rank_spec
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.transport.nixl.loop import NixlLoop
from prefixkv.transport.shm import peer as shm_peer
from prefixkv.transport.shm.copy import CopyPlan
from prefixkv.transport.shm.loop import ShmTransport
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import NodePair, tokens_of
from tests.unit.runtime.conftest import MakePair

AUTO = {"transport": TransportConfig(backend="auto")}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The parts that each transport moves."""
    found = {"shm": 0, "nixl": 0}
    for way, kind, method in (("shm", CopyPlan, "copy"), ("nixl", NixlLoop, "_transfer")):
        real: Any = getattr(kind, method)

        def counted(*args: Any, way: str = way, real: Any = real) -> None:
            found[way] += 1
            real(*args)

        monkeypatch.setattr(kind, method, counted)
    return found


def made(make_pair: MakePair, shared: bool = True) -> NodePair:
    return make_pair(pool={"shared": shared}, decode=AUTO, prefill=AUTO)


def serve(pair: NodePair, *rids: str) -> None:
    for rid in rids:
        pair.submit(rid, tokens_of(ord(rid), 30))
        pair.run(rid)
        assert rid in pair.p.sent


def test_decode_is_written_by_shm_where_both_are_in_one_place(
    make_pair: MakePair, copies: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where their versions of NIXL differ."""
    monkeypatch.setattr(decode_transfers, "loaded_libraries", lambda: Libraries("0.1", "0.1"))
    serve(made(make_pair), "a", "b")
    assert copies["shm"] > 0 == copies["nixl"]


@pytest.mark.parametrize("why", ["another place", "memory of its own"])
def test_decode_is_written_by_nixl_where_shm_is_not_for_it(
    make_pair: MakePair, copies: dict[str, int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "another place":
        places = iter(["there", "here"])
        monkeypatch.setattr(rank_spec, "place_of", lambda: next(places))
    serve(made(make_pair, shared=why == "another place"), "a", "b")
    assert copies["nixl"] > 0 == copies["shm"]


def test_decode_whose_memory_cannot_be_mapped_is_written_by_nixl(
    make_pair: MakePair, copies: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(door: str) -> Any:
        raise HandshakeError("user", 1, 2)

    monkeypatch.setattr(shm_peer, "connect", refused)
    pair = made(make_pair)
    pair.submit("a", tokens_of(1, 30))  # it may fail: its writes meet the refusal
    pair.until(lambda: "a" in pair.d.ended)
    serve(pair, "b", "c")
    assert pair.prefill.stats()["peers_unreachable"] == 1
    assert copies["nixl"] > 0 == copies["shm"]


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


def serve_turns(pair: MeshPair) -> None:
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
        serve_turns(pair)
        assert (pair.prefill.stats()["staging_pieces_written"] > 0) == bool(num_bytes)
        ways = [
            way
            for node in (pair.prefill, *pair.prefill.others)
            for way in node.transfers.thread.transports._of.values()
        ]
        assert [isinstance(way, ShmTransport) for way in ways] == [rank < near for rank in range(4)]
