"""Parts of pools, through `add_peer(parts=...)` on every transport."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.memory.mesh import Shard
from prefixkv.transport.base import PeerUnreachable, WriteDone
from tests.support.transport_driver import Driver


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
