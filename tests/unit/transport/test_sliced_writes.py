"""Pairs of ranks with unequal shares, through `add_peer(parts=...)` on every transport: every byte
of every rank's memory is as a copy element by element leaves it, canaries included.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.memory.mesh import Mesh, Shard
from prefixkv.paging import page_floor, unit_pages
from prefixkv.transport.base import PeerUnreachable, WriteDone
from tests.support.mesh_pools import Side, moved, routes
from tests.support.transport_driver import Driver, Node

PAGES = {2: (3, 4, 5, 0, 7, 1, 6), 4: (1, 2, 4, 0), 8: (2, 0)}  # of a request of 13 tokens
FILL = 13
CONFIG = TransportConfig(post_bytes=64)


def ranks(driver: Driver, name: str, side: Side) -> list[Node]:
    """A node a rank, whose pool is that rank's memory."""
    side.memory[:] = [driver.own(memory) for memory in side.memory]
    return [
        driver.node_of(
            f"{name}-{rank}",
            SimpleNamespace(layout=moved(layout, memory.ctypes.data), memory=memory),
            CONFIG,
        )
        for rank, (layout, memory) in enumerate(zip(side.layouts, side.memory, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("orders", "sizes", "attention"),
    [
        (("layer_major", "layer_major"), (2, 2), "mha"),
        (("layer_major", "page_major"), (2, 8), "mha"),
        (("page_major", "layer_major"), (8, 2), "mha"),
        (("page_major", "page_major"), (4, 4), "mha"),
        (("layer_major", "page_major"), (8, 2), "mla"),
        (("page_major", "layer_major"), (2, 8), "mla"),
    ],
)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 1), (1, 4)])
def test_slices_of_all_writers_make_up_every_reader(
    driver: Driver,
    src_tp: int,
    dst_tp: int,
    orders: tuple[str, str],
    sizes: tuple[int, int],
    attention: str,
) -> None:
    num_heads = 4 if attention == "mha" else 1
    meshes = Mesh(2, num_heads, src_tp), Mesh(2, num_heads, dst_tp)
    unit, prefix = min(sizes), page_floor(9, max(sizes))
    stop = -(-FILL // unit) * unit  # the last unit page is copied whole
    kv = np.random.default_rng(1).integers(
        0, 256, (2, 2 if attention == "mha" else 1, stop, num_heads, 2), np.uint8
    )
    src, dst = (
        Side.make(mesh, order, size, PAGES[size], attention, seed)
        for mesh, order, size, seed in zip(meshes, orders, sizes, (2, 3), strict=True)
    )
    src.put(kv, 0)
    expected = [memory.copy() for memory in dst.memory]
    dst.put(kv, prefix, expected)

    writers, readers = ranks(driver, "prefill", src), ranks(driver, "decode", dst)
    src_pages, dst_pages = (
        unit_pages(np.array(PAGES[size], np.int32), size // unit, prefix // unit, stop // unit)
        for size in sizes
    )
    jobs: list[tuple[Node, int, int]] = []
    for number, reader in enumerate(readers):
        reader.transport.expect(1)
        for rank, *parts in routes(*meshes, number):
            writers[rank].add(reader, parts=(parts[0], parts[1]))
            writers[rank].transport.write(
                writers[rank].job(number, reader, src_pages, dst_pages, room=1)
            )
            num_bytes = (
                dst.layouts[number].kv_bytes_per_token
                * (stop - prefix)
                // len(routes(*meshes, number))
            )
            jobs.append((writers[rank], number, num_bytes))
    assert len(jobs) == 4 if attention == "mha" else dst_tp
    driver.until(lambda: all(writer.ends(job) for writer, job, _ in jobs))
    assert [writer.ends(job) for writer, job, _ in jobs] == [
        [WriteDone(job, size)] for _, job, size in jobs
    ]
    for number in range(dst_tp):
        assert np.array_equal(dst.memory[number], expected[number]), number


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((Shard(0, 2, 0, 1), Shard(0, 2, 0, 2)), HandshakeError),
        ((Shard(0, 2, 1, 2), Shard(0, 2, 0, 2)), ConfigError),
        ((Shard(0, 2, 0, 1), Shard(1, 2, 0, 1)), ConfigError),
    ],
)
def test_parts_that_do_not_pair_make_the_peer_unreachable(
    driver: Driver, parts: tuple[Shard, Shard], error: type[Exception]
) -> None:
    writer, target = driver.pair()
    before = target.pool.pages()
    writer.add(target, parts=parts)
    writer.transport.write(writer.job(1, target, [0], [0]))
    driver.until(lambda: writer.ends() and writer.of(PeerUnreachable))
    writer.drained(error=error)
    assert target.pool.pages() == before
    half = Shard(0, 2, 1, 1)
    writer.add(target, parts=(half, half))
    driver.end(writer, writer.job(2, target, [0], [0]))
    assert writer.ends(2) == [WriteDone(2, writer.pool.layout.page_bytes // 2)]
    mine, theirs = writer.pool.views[0], target.pool.views[0]
    assert np.array_equal(theirs[0, :, 1], mine[0, :, 1])
    assert not np.array_equal(theirs[0, :, 0], mine[0, :, 0])
