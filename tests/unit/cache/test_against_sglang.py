"""The same inserts and matches as SGLang's Python tree, no eviction: equal lengths. Where that can
be imported.

Set PEER_SGLANG to the folder of the unpacked wheel, and PEER_STUBS to that of the stubs for what it
imports.
"""

from __future__ import annotations

import os
import random
import sys
from array import array

import pytest

from prefixkv.cache.radix_cache import RadixCache

pytestmark = [
    pytest.mark.skipif(
        not {"PEER_SGLANG", "PEER_STUBS"} <= set(os.environ), reason="the peer is not there"
    ),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_matched_lengths_are_equal(page_size, monkeypatch):
    monkeypatch.syspath_prepend(os.environ["PEER_STUBS"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import sgl_stub
    import torch

    sgl_stub.install()
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache as PeerCache
    from sglang.srt.mem_cache.radix_cache import RadixKey as PeerKey

    peer = PeerCache.create_simulated(page_size=page_size)
    ours = RadixCache(page_size=page_size)
    rng = random.Random(page_size)
    page = 0
    hits = 0
    for _ in range(1500):
        run = [
            token
            for _ in range(rng.randrange(1, 12))
            for token in [rng.randrange(3)] * rng.choice((1, page_size))
        ]
        theirs = peer.match_prefix(MatchPrefixParams(key=PeerKey(array("q", run), None)))
        match = ours.match_prefix(run)
        assert match.prefix_len == theirs.device_prefix_len
        hits += match.prefix_len > 0
        if rng.random() < 0.5:
            peer.insert(
                InsertParams(key=PeerKey(array("q", run), None), value=torch.arange(len(run)))
            )
            num_pages = len(run) // page_size
            ours.insert(run, range(page, page + num_pages))
            page += num_pages
    assert hits > 300
