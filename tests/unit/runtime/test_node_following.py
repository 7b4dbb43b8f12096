"""A burst behind one new prefix, on real nodes: prefill computes it once, and those that wait for
it are woken."""

from __future__ import annotations

import select

import numpy as np
import pytest

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.memory.mesh import Mesh
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import NodePair, tokens_of
from tests.unit.runtime.conftest import MakePair

PAGE_SIZE = 4
SYSTEM_TOKENS, SUFFIX_TOKENS = 32, 7
RIDS = [f"r{at}" for at in range(8)]


def submit_burst(pair: NodePair) -> None:
    system = tokens_of(1, SYSTEM_TOKENS)
    for at, rid in enumerate(RIDS):
        pair.submit(rid, np.concatenate([system, tokens_of(100 + at, SUFFIX_TOKENS)]))


def computed(pair: NodePair) -> int:
    """Tokens, of the requests that prefill's engine was handed."""
    stats = pair.prefill.stats()
    return stats["prompt_tokens"] - stats["hit_tokens"]


@pytest.fixture
def pair(make_pair: MakePair) -> NodePair:
    """Prefill's engine has the first of the burst, and computes nothing yet."""
    pair = make_pair(pool={"num_pages": 256}, prefill={"follow_s": 600.0})
    pair.p.hold = True
    submit_burst(pair)
    pair.until(lambda: pair.prefill.stats()["followed"] == len(RIDS) - 1)
    assert list(pair.p.computing) == ["r0"]
    return pair


def test_a_burst_is_computed_once(pair: NodePair) -> None:
    pair.p.hold = False
    pair.run(*RIDS)
    assert all(pair.d.ended[rid] is None for rid in RIDS)
    assert computed(pair) == SYSTEM_TOKENS + len(RIDS) * SUFFIX_TOKENS
    assert pair.prefill.stats()["overtaken"] == 0


def test_the_engine_sleeps_while_one_waits_and_wakes_when_the_prefix_is_there(
    pair: NodePair,
) -> None:
    node = pair.prefill
    node.pop_bootstrapped()
    poller = select.poll()
    poller.register(node.fileno(), select.POLLIN)
    first = pair.p.computing["r0"]
    while node.wait(0.0) or poller.poll(0):  # heartbeats and the like
        node.pop_bootstrapped()
    for _ in range(SYSTEM_TOKENS // pair.p.chunk):
        pair.p.compute(first)
    assert poller.poll(0)
    assert node.wait(0.0)
    ready = node.pop_bootstrapped(limit=3)
    assert [req.prefix_len for req in ready] == [SYSTEM_TOKENS] * 3
    assert node.wait(0.0), "there is more"
    assert poller.poll(0)
    rest = node.pop_bootstrapped()
    assert len(rest) == len(RIDS) - 4
    for req in [*ready, *rest]:
        pair.p.computing[req.rid], pair.p.computed[req.rid] = req, req.prefix_len
        pair.p.chunks[req.rid] = 0
    pair.p.hold = False
    pair.run(*RIDS)


def test_several_ranks_compute_a_burst_once_and_what_the_limit_left_is_news() -> None:
    meshes = Mesh(num_layers=2, num_kv_heads=2, tp_size=2), Mesh(num_layers=2, num_kv_heads=2)
    system = tokens_of(1, SYSTEM_TOKENS)
    config = PrefillConfig(follow_s=600.0)
    with MeshPair(*meshes, prefill_config=config, decode_config=DecodeConfig()) as pair:
        for at, rid in enumerate(RIDS):
            pair.submit(rid, np.concatenate([system, tokens_of(100 + at, 7)]), room=at)
        pair.until(lambda: len(pair.arrived) == len(RIDS))
        assert pair.mismatches == 0
        stats = pair.prefill.stats()
        most = SYSTEM_TOKENS + len(RIDS) * SUFFIX_TOKENS
        assert stats["prompt_tokens"] - stats["hit_tokens"] == most
        for rid in RIDS:
            pair.finish(rid)
        for at in range(2):
            pair.submit(f"n{at}", tokens_of(200 + at, 9), room=100 + at)
        popped: list[str] = []
        while len(popped) < 2:
            pair.decode.pop_preallocated()
            popped += [req.rid for req in pair.prefill.pop_bootstrapped(limit=0)]
            if len(pair.prefill.bootstrapped) == 2 or popped:
                assert pair.prefill.wait(0.0)
                popped += [req.rid for req in pair.prefill.pop_bootstrapped(limit=1)]
        for rid in popped:
            pair.computing[rid] = 0
        pair.until(lambda: len(pair.arrived) == 2)
        for rid in popped:
            pair.finish(rid)
        pair.until(pair.at_rest)
