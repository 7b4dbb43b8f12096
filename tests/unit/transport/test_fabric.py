"""What the fake promises to the tests that are built on it."""

import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import InternalError, TransferError
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Arrived, RankMemory, WriteDone, WriteFailed
from tests.support.fabric import FakeFabric
from tests.support.transport_driver import Node, Staging
from tests.support.transport_pools import Shape, make_pool

CONFIG = TransportConfig(post_bytes=256, window=4)  # a page a part


SHAPE = Shape()


def make_node(
    fabric: FakeFabric,
    name: str,
    order: str = "page_major",
    incarnation: int = 1,
    shape: Shape = SHAPE,
) -> Node:
    me = PeerId(name, incarnation)
    pool = make_pool(order, 16, shape)
    pool.fill(len(name))
    node = Node(me, pool, None)
    node.transport = fabric.transport(me, RankMemory(pool.layout), node.events.append, CONFIG, pool)
    return node


def make_pair(fabric: FakeFabric) -> tuple[Node, Node]:
    writer, target = make_node(fabric, "prefill"), make_node(fabric, "decode", "layer_major")
    writer.add(target)
    target.transport.expect(1)
    return writer, target


def test_a_failed_write_may_still_land_with_the_bytes_of_that_moment() -> None:
    fabric = FakeFabric(1, fail_at_check=1.0, lands_late=1.0)
    writer, target = make_pair(fabric)
    hold = fabric.hold(lambda a: a.kind == "land")
    writer.transport.write(writer.job(1, target, [3], [4]))
    fabric.run()
    (end,) = writer.ends()
    assert isinstance(end, WriteFailed)
    assert not end.drained
    assert isinstance(end.error, TransferError)
    writer.pool.fill(77)
    assert target.pool.page(4) != writer.pool.page(3)
    hold.release()
    fabric.run()
    assert target.pool.page(4) == writer.pool.page(3)
    assert not target.of(Arrived)


def test_closing_the_writer_is_a_fence_and_closing_the_target_is_none() -> None:
    fabric = FakeFabric(1)
    writer, target = make_pair(fabric)
    other = make_node(fabric, "prefill-2")
    other.add(target)
    hold = fabric.hold(lambda a: a.kind == "land")
    writer.transport.write(writer.job(1, target, [3], [4]))
    other.transport.write(other.job(1, target, [3], [5]))
    fabric.run()
    before = target.pool.page(4)
    writer.transport.close()
    target.transport.close()
    hold.release()
    fabric.run()
    assert target.pool.page(4) == before
    assert target.pool.page(5) == other.pool.page(3)
    assert other.ends() == [WriteDone(1, 256)]
    assert not target.events


# --- staged writes --------------------------------------------------------------------------------


def staged_pair(fabric: FakeFabric) -> tuple[Node, Node]:
    nodes = []
    for name in ("prefill", "decode"):
        me, pool, staging = PeerId(name, 1), make_pool("page_major", 16), Staging(8, len(name))
        node = Node(me, pool, None, staging=staging)
        config = TransportConfig(post_bytes=2 * BLOCK_BYTES)
        node.transport = fabric.transport(
            me, RankMemory(pool.layout, staging.area), node.events.append, config, node
        )
        nodes.append(node)
    nodes[0].add(nodes[1])
    nodes[1].transport.expect(1)
    return nodes[0], nodes[1]


@pytest.mark.parametrize("wrong", ["area", "block"])
def test_a_staged_write_that_lands_where_it_must_not_fails_the_run(wrong: str) -> None:
    fabric = FakeFabric(1)
    writer, target = staged_pair(fabric)
    hold = fabric.hold(lambda a: a.kind == "land")
    job = writer.job(1, target, [1], [2], route="staging")
    writer.transport.write(job)
    fabric.run()
    hold.release()
    if wrong == "block":
        job.dst_pages[0] = 3
    else:
        target.transport.memory = RankMemory(target.pool.layout)
    with pytest.raises(InternalError, match="lands at"):
        fabric.run()


def test_pages_are_named_to_the_guard_as_their_owner_counts_them() -> None:
    """Not as units of the smaller pages on the other side."""
    landed: set[int] = set()
    fabric = FakeFabric(1, guard=lambda peer, route, tag, pages: landed.update(pages.tolist()))
    writer, target = (
        make_node(fabric, "prefill"),
        make_node(fabric, "decode", shape=Shape(page_size=8)),
    )
    writer.add(target)
    writer.transport.write(writer.job(1, target, [0, 1, 2], [6, 7, 21]))  # two units a page
    fabric.run()
    assert isinstance(writer.ends()[0], WriteDone)
    assert landed == {3, 10}
    assert target.pool.page(3)[:32] == writer.pool.page(0)[:32]
