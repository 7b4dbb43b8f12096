"""Several posting threads: what one of them waits for holds up its own rooms, and only all of them
make a fence."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import CallerError, InternalError
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.tags import ChunkTag
from prefixkv.transport import nixl_agent, nixl_loop
from prefixkv.transport.base import PeerUnreachable, WriteDone, WriteDrained, WriteFailed
from prefixkv.transport.metadata import nixl_name
from prefixkv.transport.nixl import NixlTransport
from prefixkv.transport.sharded import ShardedTransport, make_transport, shard_of
from tests.models.devices import TCP
from tests.models.patience import PATIENCE_S
from tests.models.transport_child import BIG, children
from tests.models.transport_driver import NixlDriver, Node
from tests.models.transport_pools import Shape, make_pool

THREADS = 3
CONFIG = TransportConfig(posting_threads=THREADS)
Api = nixl_agent.nixl_api


@pytest.fixture
def driver() -> Iterator[NixlDriver]:
    made = NixlDriver(THREADS)
    try:
        yield made
    finally:
        made.close()


def rooms_of(shard: int, count: int = 1) -> list[int]:
    return [room for room in range(1000) if shard_of(room, THREADS) == shard][:count]


def transport_threads() -> int:
    return sum(thread.name.startswith("prefixkv-transport") for thread in threading.enumerate())


def test_one_thread_is_the_plain_transport_and_more_have_agents_of_other_names(
    driver: NixlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    create = nixl_agent.NixlAgent.__init__

    def naming(agent: Any, name: str, *args: Any) -> None:
        names.append(name)
        create(agent, name, *args)

    monkeypatch.setattr(nixl_agent.NixlAgent, "__init__", naming)
    pool = make_pool("page_major", 4)
    plain = make_transport(PeerId("decode", 1), pool.layout, lambda event: None)
    assert isinstance(plain, NixlTransport)
    plain.close()
    node = driver.node("decode", config=CONFIG)
    assert isinstance(node.transport, ShardedTransport)
    assert len(names) == 1 + THREADS == len(set(names))
    assert names[1] == nixl_name(node.me)


def test_rooms_are_shared_out_and_a_thread_that_is_held_up_keeps_its_own_rooms_only(
    driver: NixlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long copy inside a post, that is: it holds its thread."""
    writer, target = driver.pair(config=CONFIG)
    (held,) = rooms_of(1)
    posting: dict[int, set[str]] = {shard: set() for shard in range(THREADS)}
    copying, copied = threading.Event(), threading.Event()
    transfer = Api.nixl_agent.transfer

    def post(agent: Any, handle: Any, tag: bytes) -> Any:
        room = ChunkTag.unpack(tag).room
        posting[shard_of(room, THREADS)].add(agent.name)
        if room == held:
            copying.set()
            assert copied.wait(PATIENCE_S)
        return transfer(agent, handle, tag)

    monkeypatch.setattr(Api.nixl_agent, "transfer", post)
    try:
        writer.transport.write(writer.job(0, target, [0], [0], room=held))
        assert copying.wait(PATIENCE_S)
        others = [room for shard in (0, 2) for room in rooms_of(shard, 5)]
        for number, room in enumerate(others, 1):
            writer.transport.write(writer.job(number, target, [number], [number], room=room))
        driver.until(lambda: len(writer.ends()) == len(others))
        assert not writer.ends(0)
    finally:
        copied.set()
    driver.until(lambda: writer.ends(0))
    assert all(isinstance(end, WriteDone) for end in writer.ends())
    assert sorted(len(names) for names in posting.values()) == [1] * THREADS
    assert len(set.union(*posting.values())) == THREADS
    assert [target.pool.page(page) for page in range(11)] == [
        writer.pool.page(page) for page in range(11)
    ]
    driver.until(lambda: len(target.tags()) == 11)


def test_a_peer_that_stands_still_stalls_no_room_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP, with posts to it under way on every thread."""
    monkeypatch.setenv("UCX_TLS", TCP)
    driver = NixlDriver(THREADS)
    rooms = [room for shard in range(THREADS) for room in rooms_of(shard, 4)]
    try:
        writer = driver.node(
            "prefill", "page_major", TransportConfig(window=2), num_pages=16, shape=BIG
        )
        friend = driver.node("friend", "page_major", num_pages=16, shape=BIG)
        writer.add(friend)
        friend.transport.expect(1)
        with children(PeerId("decode", 1), num_pages=16) as (child,):
            writer.transport.add_peer(child.me, child.metadata, child.layout)
            to = Node(child.me, writer.pool, None)
            for job_id, room in enumerate(rooms):  # every thread is connected to both
                writer.transport.write(writer.job(job_id, to, [0], [0], room=room))
                writer.transport.write(writer.job(100 + job_id, friend, [0], [0], room=room))
            driver.until(lambda: len(writer.ends()) == 2 * len(rooms))
            child.stop()
            pages = list(range(16))
            for number, room in enumerate(rooms):
                writer.transport.write(writer.job(200 + number, to, pages, pages, room=room))
            for number, room in enumerate(rooms):
                writer.transport.write(
                    writer.job(300 + number, friend, [number], [number], room=room)
                )
            driver.until(lambda: len(writer.ends(*range(300, 400))) == len(rooms))
            assert not writer.ends(*range(200, 300))
            child.resume()
            driver.until(lambda: len(writer.ends(*range(200, 300))) == len(rooms))
            assert all(isinstance(end, WriteDone) for end in writer.ends())
            assert child.pages() == writer.pool.pages()
    finally:
        driver.close()


def test_every_thread_says_that_a_peer_is_unreachable_when_it_finds_out(driver: NixlDriver) -> None:
    writer = driver.node("prefill", config=CONFIG)
    other = driver.node("other", config=CONFIG, shape=Shape(head_dim=16))
    writer.add(other)
    driver.until(lambda: len(writer.of(PeerUnreachable)) == 1)
    for shard in (1, 2):
        writer.transport.write(writer.job(shard, other, [0], [0], room=rooms_of(shard)[0]))
        driver.until(lambda n=shard: writer.ends(n))  # type: ignore[misc]
    driver.until(lambda: len(writer.of(PeerUnreachable)) == THREADS)
    assert {event.peer for event in writer.of(PeerUnreachable)} == {other.me}


def test_jobs_that_failed_on_any_thread_are_drained_by_a_renewal(
    driver: NixlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, target = driver.pair(config=CONFIG)
    transfer = Api.nixl_agent.transfer

    def post(agent: Any, handle: Any, tag: bytes) -> Any:
        if ChunkTag.unpack(tag).chunk == 13:
            raise nixl_agent.nixl_errors.nixlRemoteDisconnectError("cut by the test")
        return transfer(agent, handle, tag)

    def write(job_id: int, room: int, chunk: int) -> None:
        job = writer.job(job_id, target, [0], [0], room=room)
        writer.transport.write(dataclasses.replace(job, tag=job.tag._replace(chunk=chunk)))
        driver.until(lambda: writer.ends(job_id))

    monkeypatch.setattr(Api.nixl_agent, "transfer", post)
    rooms = [rooms_of(shard)[0] for shard in range(THREADS)]
    for shard in (0, 2):
        write(shard, rooms[shard], chunk=13)
        (failed,) = writer.ends(shard)
        assert isinstance(failed, WriteFailed)
        assert not failed.drained
    writer.transport.renew()
    driver.until(lambda: len(writer.of(WriteDrained)) == 2)
    assert {event.job_id for event in writer.of(WriteDrained)} == {0, 2}
    for shard, room in enumerate(rooms):
        write(10 + shard, room, chunk=1)
        assert isinstance(writer.ends(10 + shard)[0], WriteDone)


def test_close_ends_every_thread_and_is_a_fence_only_if_every_agent_is_gone(
    driver: NixlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = driver.node("prefill", config=CONFIG)
    assert transport_threads() == THREADS
    node.transport.close()
    node.transport.close()
    assert not transport_threads()

    held: list[Any] = []
    create = Api.nixl_agent

    def holding(name: str, *args: Any) -> Any:
        agent = create(name, *args)
        if name.endswith("+1"):
            held.append(agent.agent)
        return agent

    monkeypatch.setattr(Api, "nixl_agent", holding)
    node = driver.node("prefill", config=CONFIG)
    driver.nodes.remove(node)
    for _ in range(2):
        with pytest.raises(InternalError, match="outlived"):
            node.transport.close()
        assert not transport_threads()
    held.clear()
    gc.collect()


def test_close_from_the_sink_of_any_thread_is_refused(driver: NixlDriver) -> None:
    caught: list[str] = []
    done = threading.Event()

    def sink(event: object) -> None:
        try:
            transport.close()
        except CallerError:
            caught.append(threading.current_thread().name)
        if len(caught) == THREADS:
            done.set()

    pool = make_pool("page_major", 4)
    me = PeerId("careless", 3)
    transport = make_transport(me, pool.layout, sink, CONFIG)
    node = Node(me, pool, transport)
    driver.nodes.append(node)
    for shard in range(THREADS):
        transport.write(node.job(shard, node, [0], [0], room=rooms_of(shard)[0]))  # to nobody
    assert done.wait(PATIENCE_S)


def test_a_thread_that_does_not_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    create = nixl_agent.NixlAgent

    def failing(name: str, *args: Any) -> Any:
        if name.endswith("+2"):
            raise ZeroDivisionError("no agent")
        return create(name, *args)

    monkeypatch.setattr(nixl_loop, "NixlAgent", failing)
    with pytest.raises(ZeroDivisionError):
        make_transport(
            PeerId("decode", 1), make_pool("page_major", 4).layout, lambda event: None, CONFIG
        )
    assert not transport_threads()
