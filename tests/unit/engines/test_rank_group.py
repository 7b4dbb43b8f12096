"""Ranks that cannot gather at the start leave nothing open."""

import pytest

from prefixkv import DecodeConfig, Mesh, PrefillConfig
from prefixkv.engines.rank_group import decode_transfers, prefill_transfers
from tests.support.node_pair import make_pool
from tests.unit.runtime.conftest import node_threads


def test_a_rank_that_hears_of_no_other_is_closed() -> None:
    def gather(_: object) -> list[object]:
        raise RuntimeError("a rank has gone")

    half = make_pool(num_kv_heads=1)
    with pytest.raises(RuntimeError, match="has gone"):
        decode_transfers(make_pool(), DecodeConfig(), None, 0, gather)
    with pytest.raises(RuntimeError, match="has gone"):
        prefill_transfers(half, PrefillConfig(), Mesh(2, 2, tp_size=2), 1, gather)
    assert not node_threads()
