"""Extra state: which rank holds and sends what of it, by brute force; and descriptions that cannot
be."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.memory.mesh import Mesh, check_meshes, sent_share
from prefixkv.memory.state_layout import (
    StateEntry,
    StateLayout,
    StateTensor,
    check_state_pairs,
    state_blocks,
)
from prefixkv.memory.state_pool import StatePool
from tests.support.state_memory import TENSORS, StateMemory

SIZES = (1, 2, 3, 4, 6, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 6, 12])
def test_every_byte_of_a_slot_comes_once_and_only_from_ranks_that_send_kv(kv_heads: int) -> None:
    """Or the pair of meshes is refused. Of those with no more heads than the KV has, only uneven
    ones are."""
    taken = 0
    for num_heads in (1, 2, 3, 4, 6, 8, 12):
        tensors = (
            StateTensor("a", 0, num_heads, (3,), "uint8"),
            StateTensor("b", 2, 1, (5,), "uint8"),
        )
        for p, d in ((p, d) for p in SIZES for d in SIZES):
            writers, readers = Mesh(3, kv_heads, p, 2), Mesh(3, kv_heads, d, 3)
            try:
                check_meshes(writers, readers)
                writers.validate()
            except (ConfigError, HandshakeError):
                continue
            refused = False
            try:
                check_state_pairs(tensors, writers, readers)
            except ConfigError:
                continue  # the heads cannot be shared out at all
            except HandshakeError:
                refused = True
            taken += not refused
            stray = False
            for reader in range(readers.num_ranks):
                came: Counter[tuple[int, int]] = Counter()
                for writer in range(writers.num_ranks):
                    blocks = state_blocks(tensors, writers, writer, readers, reader)
                    stray |= bool(blocks) and sent_share(writers, writer, readers, reader) is None
                    for block in blocks:
                        came.update(
                            (block.dst_entry, block.dst_offset + i) for i in range(block.num_bytes)
                        )
                shards = [tensor.shard(readers, reader) for tensor in tensors]
                sizes = [
                    t.head_bytes * s.num_heads
                    for t, s in zip(tensors, shards, strict=True)
                    if s is not None
                ]
                assert came == {
                    (entry, i): 1 for entry, size in enumerate(sizes) for i in range(size)
                }
            assert refused == stray, (kv_heads, num_heads, p, d)
    assert taken > 40


def test_a_peer_s_layout_is_checked() -> None:
    memory = StateMemory(TENSORS, 3, Mesh(2, 4))
    good = memory.layout
    good.validate()
    first, rest = good.entries[0], good.entries[1:]

    def with_first(**fields: int) -> StateLayout:
        return StateLayout(3, (msgspec.structs.replace(first, **fields), *rest), good.regions)

    bad = {
        "num_slots": StateLayout(0, good.entries, good.regions),
        "not inside": StateLayout(4, good.entries, good.regions),
        "2 state regions": StateLayout(3, good.entries[:1], good.regions[:2]),
        "region address is -1": StateLayout(3, good.entries, ((-1, 5),)),
        "bytes a slot": with_first(num_bytes=0),
        " apart": with_first(slot_stride=first.num_bytes - 1),
        "one region": with_first(base=5),
        "overlap": StateLayout(3, (first, *good.entries), good.regions),
        "overlap ": StateLayout(
            3, (first, msgspec.structs.replace(first, base=first.base + 1), *rest), good.regions
        ),
    }
    for words, layout in bad.items():
        with pytest.raises(ConfigError, match=words.strip()):
            layout.validate()


def test_entries_may_interleave_with_one_stride() -> None:
    regions = ((1000, 400),)
    StateLayout(4, (StateEntry(1000, 100, 60), StateEntry(1060, 100, 40)), regions).validate()
    for entry in (StateEntry(1060, 100, 41), StateEntry(1059, 100, 41), StateEntry(1060, 50, 40)):
        with pytest.raises(ConfigError, match=r"overlap|inside"):
            StateLayout(4, (StateEntry(1000, 100, 60), entry), regions).validate()


def test_what_a_rank_holds_is_checked() -> None:
    mesh = Mesh(2, 4, 2)
    layout = StateMemory(TENSORS, 3, mesh, 1).layout
    layout.check_holds(TENSORS, mesh, 1)
    with pytest.raises(HandshakeError, match="state bytes of a slot are not the share of rank 0"):
        layout.check_holds(TENSORS, replace(mesh, tp_size=1), 0)


def test_a_pool_is_on_one_device() -> None:
    pool = StatePool.create(TENSORS, 3)
    assert pool.device == "cpu"
    nowhere = StatePool.create(TENSORS, 3, Mesh(4, 4, 1, 2), rank=1)  # its stage has no tensor
    assert nowhere.device is None


def test_a_pool_of_our_own_and_of_an_engine_s_tensors() -> None:
    pool = StatePool.create(TENSORS, 3, Mesh(2, 4, 2), rank=1)
    assert pool.num_slots == 3
    view = pool.view("conv", 0)
    assert tuple(view.shape) == (3, 2, 3, 5)
    assert not view.any()
    again = StatePool(TENSORS, [pool.view(t.name, t.layer) for t in TENSORS], Mesh(2, 4, 2), 1)
    assert again.layout == pool.layout
