"""Pairs of nodes with `TransportConfig(backend="auto")`: the handshake chooses the transport."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import HandshakeError
from prefixkv.protocol.messages import Libraries
from prefixkv.runtime import decode_transfers, rank_spec
from prefixkv.transport.nixl.loop import NixlLoop
from prefixkv.transport.shm import peer as shm_peer
from prefixkv.transport.shm.copy import CopyPlan
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
