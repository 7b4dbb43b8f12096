"""What only real NIXL can show: other processes that die or stand still, and the end of an agent;
of staging, merged descriptors, lists that are released, agents that are replaced."""

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import (
    ClosedError,
    InternalError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
)
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.protocol.ids import ChunkTag, PeerId
from prefixkv.transport.base import (
    PeerMemory,
    PeerUnreachable,
    RankMemory,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
    WriteJob,
)
from prefixkv.transport.nixl import agent as nixl_agent
from prefixkv.transport.nixl import loop as nixl_loop
from prefixkv.transport.nixl.agent import loaded_libraries
from prefixkv.transport.nixl.loop import NixlTransport
from tests.support.gates import Gate
from tests.support.patience import until
from tests.support.processes import run_python
from tests.support.transport_child import BIG, Child, add_child, children
from tests.support.transport_driver import NixlDriver, Node
from tests.support.transport_pools import make_pool


def transport_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefixkv-transport")]


def write_until_failed(
    driver: NixlDriver, writer: Node, to: Node, first_job: int, pages: list[int]
) -> int:
    """Writes jobs until one fails; returns its id."""
    for job_id in range(first_job, first_job + 200):
        writer.transport.write(writer.job(job_id, to, pages, pages))
        driver.until(lambda n=job_id: writer.ends(n))
        if isinstance(writer.ends(job_id)[0], WriteFailed):
            return job_id
    raise AssertionError("no write failed")


def test_importing_the_package_loads_no_nixl() -> None:
    program = "import sys, prefixkv.transport; sys.exit('nixl' in sys.modules)"
    assert run_python(program).returncode == 0


def test_close_ends_the_thread_and_destroys_the_agent(nixl_driver: NixlDriver) -> None:
    writer, target = nixl_driver.pair()
    writer.transport.write(writer.job(1, target, [0], [0]))
    nixl_driver.until(writer.ends)
    assert len(transport_threads()) == 2
    writer.transport.close()  # raises if the agent outlives it
    target.transport.close()
    assert not transport_threads()


def test_close_says_so_when_the_agent_cannot_be_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else holds the agent: then its writes are not fenced, and no job is called
    drained."""
    held: list[Any] = []
    create = nixl_agent.nixl_api.nixl_agent

    def holding(*args: Any, **kwargs: Any) -> Any:
        agent = create(*args, **kwargs)
        held.append(agent.agent)
        return agent

    monkeypatch.setattr(nixl_agent.nixl_api, "nixl_agent", holding)
    driver = NixlDriver()
    writer, target = driver.pair()

    writer.transport.write(writer.job(1, target, [0], [0], ready=Gate()))
    with pytest.raises(InternalError, match="outlived"):
        writer.transport.close()
    (failed,) = writer.ends()
    assert isinstance(failed, WriteFailed)
    assert not failed.drained
    with pytest.raises(InternalError):
        target.transport.close()
    held.clear()
    gc.collect()
    assert not transport_threads()


def test_an_error_met_by_the_thread_does_not_keep_the_agent(nixl_driver: NixlDriver) -> None:
    """Errors go out in events, their tracebacks stay behind: a frame in one would hold the
    agent."""
    writer, target = nixl_driver.pair()
    writer.transport.add_peer(PeerId("garbage", 1), b"\x00", PeerMemory(target.pool.layout))
    named_right = writer.transport.metadata.replace(b"prefill", b"garbage")
    writer.transport.add_peer(
        PeerId("garbage", writer.me.incarnation), named_right, PeerMemory(target.pool.layout)
    )
    nixl_driver.until(lambda: len(writer.of(PeerUnreachable)) == 2)
    assert is_of_nixl(writer.of(PeerUnreachable)[1].error)
    writer.transport.close()


@pytest.mark.parametrize(
    ("error", "drained"), [("nixlInvalidParamError", True), ("nixlBackendError", False)]
)
def test_only_what_nixl_refuses_before_it_begins_is_drained(
    nixl_driver: NixlDriver, monkeypatch: pytest.MonkeyPatch, error: str, drained: bool
) -> None:
    def refuse(*args: Any) -> Any:
        raise getattr(nixl_agent.nixl_errors, error)("by the test")

    writer, target = nixl_driver.pair()
    monkeypatch.setattr(nixl_agent.nixl_api.nixl_agent, "transfer", refuse)
    end = nixl_driver.end(writer, writer.job(1, target, [0], [0]))
    assert isinstance(end, WriteFailed)
    assert end.drained == drained
    assert is_of_nixl(end.error)


def is_of_nixl(error: BaseException) -> bool:
    """An engine tells errors apart by ours: the library's own is the cause."""
    cause = error.__cause__
    return isinstance(error, TransferError) and type(cause).__module__.startswith("nixl")


def test_the_versions_of_the_libraries_are_known_once_an_agent_is_there(
    nixl_driver: NixlDriver,
) -> None:
    nixl_driver.node("us")
    versions = loaded_libraries()
    assert versions.nixl.startswith("1.")
    assert versions.ucx.startswith("1.")


def test_memory_that_is_not_there_is_an_error_at_start() -> None:
    """The transport that does not start leaves no thread behind."""
    pool = make_pool("layer_major", 4)
    layout = msgspec.structs.replace(pool.layout, device="cuda:900")
    with pytest.raises(TransferError, match="NIXL") as caught:
        NixlTransport(PeerId("gpu", 1), RankMemory(layout), lambda e: None)
    assert is_of_nixl(caught.value)
    assert not transport_threads()


@pytest.mark.slow
def test_a_killed_peer_fails_its_own_jobs_only_and_may_come_back(nixl_driver: NixlDriver) -> None:
    """SIGKILL, then a restart under the same name, then one under the same identity with new
    metadata."""
    writer = nixl_driver.node("prefill", "page_major", TransportConfig(), num_pages=4, shape=BIG)
    friend = nixl_driver.node("friend", "page_major", num_pages=4, shape=BIG)
    writer.add(friend)
    friend.transport.expect(1)
    first, second = PeerId("decode", 1), PeerId("decode", 2)
    with children(first, second) as (victim, successor):
        to = add_child(writer, victim)
        nixl_driver.done(writer, writer.job(1, to, [0], [0]))

        victim.stop()  # so that something is surely under way or to be posted when it dies
        for job_id in range(100, 110):
            writer.transport.write(writer.job(job_id, to, [0, 1, 2, 3], [3, 2, 1, 0]))
            writer.transport.write(writer.job(job_id + 100, friend, [job_id % 4], [job_id % 4]))
        nixl_driver.until(
            lambda: len(writer.ends(*range(200, 210))) == 10
        )  # the stuck peer stalls nobody
        victim.kill()
        failed = write_until_failed(nixl_driver, writer, to, 1000, [0, 1])
        nixl_driver.until(lambda: len(writer.ends(*range(100, 110))) == 10)
        assert is_of_nixl(writer.ends(failed)[0].error)  # type: ignore[union-attr]
        assert {e.peer for e in writer.of(PeerUnreachable)} == {first}
        assert all(isinstance(e, WriteDone) for e in writer.ends(*range(200, 210)))
        assert friend.pool.pages() == writer.pool.pages()

        to = add_child(writer, successor)  # the name again, another incarnation
        writer.transport.remove_peer(first)
        nixl_driver.done(writer, writer.job(2, to, [1, 2], [2, 3]))
        assert successor.pages()[2:] == [writer.pool.page(1), writer.pool.page(2)]

        with children(first) as (reborn,):  # the very identity that was lost, without remove_peer
            writer.transport.add_peer(
                first, victim.metadata, PeerMemory(victim.layout)
            )  # as if nobody had noticed
            failed = write_until_failed(
                nixl_driver, writer, Node(first, writer.pool, None), 3000, [0]
            )
            assert failed == 3000
            to = add_child(writer, reborn)
            nixl_driver.done(writer, writer.job(4, to, [3], [0]))
            assert reborn.pages()[0] == writer.pool.page(3)


def test_a_cut_connection_is_reopened_at_the_next_write(tcp_driver: NixlDriver) -> None:
    """The peer lives on, with the very metadata; without removing it first NIXL would go on
    failing."""
    writer = tcp_driver.node("prefill", "page_major", TransportConfig(), num_pages=4, shape=BIG)
    with children(PeerId("decode", 5)) as (child,):
        to = add_child(writer, child)
        tcp_driver.end(writer, writer.job(1, to, [0], [0]))
        assert child.cut_connections() > 0
        failed = write_until_failed(tcp_driver, writer, to, 10, [1])
        tcp_driver.until(lambda: writer.of(PeerUnreachable))
        tcp_driver.end(writer, writer.job(1000, to, [2, 3], [3, 2]))
        assert writer.ends(1000) == [WriteDone(1000, 2 * writer.pool.layout.page_bytes)]
        assert child.pages()[2:] == [writer.pool.page(3), writer.pool.page(2)]
        assert len(writer.ends(failed)) == 1


def test_a_peer_that_stands_still_holds_up_its_own_window_alone(
    tcp_driver: NixlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tcp_driver.node(
        "prefill", "page_major", TransportConfig(window=3, post_bytes=2 << 20), num_pages=16,
        shape=BIG
    )  # fmt: skip
    friend = tcp_driver.node("friend", "page_major", num_pages=16, shape=BIG)
    writer.add(friend)
    friend.transport.expect(1)
    with children(PeerId("decode", 6), num_pages=16) as (child,):
        to = add_child(writer, child)
        tcp_driver.end(writer, writer.job(1, to, [0], [0]))

        posts: list[bytes] = []
        post = nixl_agent.nixl_api.nixl_agent.transfer

        def counting(agent: Any, handle: Any, tag: bytes) -> Any:
            posts.append(tag)
            return post(agent, handle, tag)

        monkeypatch.setattr(nixl_agent.nixl_api.nixl_agent, "transfer", counting)
        child.stop()
        pages = list(range(16))
        writer.transport.write(writer.job(2, to, pages, pages))
        for n in range(20):
            writer.transport.write(writer.job(100 + n, friend, [n % 16], [n % 16]))
        tcp_driver.until(lambda: len(writer.ends(*range(100, 120))) == 20)
        assert sum(ChunkTag.unpack(tag).room == 2 for tag in posts) == 3
        assert not writer.ends(2)
        child.resume()
        tcp_driver.until(lambda: writer.ends(2))
        assert isinstance(writer.ends(2)[0], WriteDone)
        assert child.pages() == writer.pool.pages()


@pytest.mark.slow
def test_a_peer_that_takes_no_connections_holds_up_nobody(tcp_driver: NixlDriver) -> None:
    """As one whose machine is gone: nothing answers, so the kernel tries for two minutes."""
    writer = tcp_driver.node("prefill", "page_major", TransportConfig(), num_pages=4, shape=BIG)
    friend = tcp_driver.node("friend", "page_major", num_pages=4, shape=BIG)
    writer.add(friend)
    friend.transport.expect(1)
    with children(PeerId("decode", 7)) as (child,), ExitStack() as waiting:
        to = add_child(writer, child)
        addresses = child.narrow()
        child.stop()
        for address in addresses:
            waiting.enter_context(socket.create_connection(address))
        writer.transport.write(writer.job(1, to, [0], [3]))
        tcp_driver.done(writer, writer.job(2, friend, [1], [2]))
        assert not writer.ends(1)
        child.resume()
        tcp_driver.until(lambda: writer.ends(1))
        assert writer.ends(1) == [WriteDone(1, writer.pool.layout.page_bytes)]
        assert child.pages()[3] == writer.pool.page(0)


def test_close_is_a_fence_for_what_a_stopped_peer_has_not_got(nixl_driver: NixlDriver) -> None:
    """The writer is closed with posts under way; what it changes in its source afterwards never
    arrives.

    Bytes that the kernel holds already may: over TCP they land when the target polls again.
    """
    writer = nixl_driver.node("prefill", "page_major", TransportConfig(), num_pages=16, shape=BIG)
    with children(PeerId("decode", 3), num_pages=16) as (child,):
        to = add_child(writer, child)
        nixl_driver.end(writer, writer.job(1, to, [0], [0]))
        child.stop()
        pages = np.arange(16, dtype=np.int32)
        begun = Gate(True)
        writer.transport.write(writer.job(2, to, pages, pages, ready=begun))
        until(lambda: begun.queries)  # the post follows at once
        writer.transport.close()
        (end,) = writer.ends(2)
        assert isinstance(end, WriteDone) or (isinstance(end.error, ClosedError) and end.drained)
        old = [np.frombuffer(page, np.uint8) for page in writer.pool.pages()]
        for memory in writer.pool.memory:
            np.invert(memory, out=memory)
        child.resume()
        for page, before in zip(child.pages(), old, strict=True):
            now = np.frombuffer(page, np.uint8)
            assert ((now == before) | (now == 0)).all()


# --- another agent in place of one whose writes failed --------------------------------------------


class Renewal:
    """A writer with a job that failed undrained, a peer that stands still with posts under way, and
    a friend."""

    def __init__(self, driver: NixlDriver, cut: Child, stuck: Child, grace_s: float) -> None:
        config = TransportConfig(
            renew_grace_s=grace_s, post_bytes=32 << 20
        )  # job 4 is posted whole, by one agent
        self.driver = driver
        self.writer = driver.node("prefill", "page_major", config, num_pages=16, shape=BIG)
        self.friend = driver.node("friend", "page_major", num_pages=16, shape=BIG)
        self.writer.add(self.friend)
        self.friend.transport.expect(1)
        self.to_stuck, self.to_cut = add_child(self.writer, stuck), add_child(self.writer, cut)
        for job_id, to in ((1, self.to_stuck), (2, self.to_cut), (3, self.friend)):
            self.write(job_id, to, [0])
            self.until_done(job_id)
        stuck.stop()
        self.write(4, self.to_stuck, list(range(16)))
        self.write(5, self.friend, [1])  # posted behind it
        self.until_done(5)
        assert cut.cut_connections() > 0
        failed = write_until_failed(driver, self.writer, self.to_cut, 100, [1])
        (self.failed,) = self.writer.ends(failed)
        assert isinstance(self.failed, WriteFailed)
        assert not self.failed.drained

    def write(self, job_id: int, to: Node, pages: list[int]) -> None:
        self.writer.transport.write(self.writer.job(job_id, to, pages, pages))

    def until_done(self, job_id: int) -> None:
        self.driver.until(lambda: self.writer.ends(job_id))
        assert isinstance(self.writer.ends(job_id)[0], WriteDone), self.writer.ends(job_id)

    @property
    def drained(self) -> list[int]:
        return [event.job_id for event in self.writer.of(WriteDrained)]


@pytest.fixture
def two_children() -> Iterator[list[Child]]:
    with children(PeerId("cut", 1), PeerId("stuck", 1), num_pages=16) as both:
        yield list(both)


def test_a_renewed_agent_writes_at_once_and_the_former_ends_what_it_has_posted(
    tcp_driver: NixlDriver, two_children: list[Child]
) -> None:
    cut, stuck = two_children
    there = Renewal(tcp_driver, cut, stuck, grace_s=600.0)
    there.writer.transport.renew()
    there.write(6, there.friend, [2])
    there.write(7, there.to_cut, [3])
    there.until_done(6)
    there.until_done(7)
    assert cut.pages()[3] == there.writer.pool.page(3)
    assert not there.drained, "the agent that posted it lives, for the sake of its other posts"
    stuck.resume()
    there.until_done(4)
    tcp_driver.until(lambda: there.drained)
    assert there.drained == [there.failed.job_id]
    assert stuck.pages() == there.writer.pool.pages()
    there.write(8, there.to_stuck, [5])
    there.until_done(8)


def test_what_a_former_agent_has_not_ended_in_time_never_lands(
    tcp_driver: NixlDriver, two_children: list[Child]
) -> None:
    """Bytes that the kernel holds already may, so it is the old ones or none; and the job says that
    it is drained."""
    cut, stuck = two_children
    there = Renewal(tcp_driver, cut, stuck, grace_s=0.0)
    before = stuck.layout.num_pages
    there.writer.transport.renew()
    tcp_driver.until(lambda: there.drained and there.writer.ends(4))
    assert there.drained == [there.failed.job_id]
    (end,) = there.writer.ends(4)
    assert isinstance(end, WriteFailed)
    assert isinstance(end.error, TransferTimeoutError)
    assert end.drained
    old = [np.frombuffer(page, np.uint8) for page in there.writer.pool.pages()]
    for memory in there.writer.pool.memory:
        np.invert(memory, out=memory)
    stuck.resume()
    pages = [np.frombuffer(page, np.uint8) for page in stuck.pages()]
    assert len(pages) == before
    assert all(((now == was) | (now == 0)).all() for now, was in zip(pages, old, strict=True))
    there.write(6, there.to_stuck, [7])
    there.until_done(6)
    assert stuck.pages()[7] == there.writer.pool.page(7)


def test_renewals_that_are_asked_for_meanwhile_are_made_up_for(
    tcp_driver: NixlDriver, two_children: list[Child]
) -> None:
    cut, stuck = two_children
    there = Renewal(tcp_driver, cut, stuck, grace_s=600.0)
    there.writer.transport.renew()
    there.write(6, there.to_cut, [3])
    there.until_done(6)
    assert cut.cut_connections() > 0
    second = write_until_failed(tcp_driver, there.writer, there.to_cut, 1000, [1])
    there.writer.transport.renew()
    there.write(7, there.friend, [3])
    there.until_done(7)
    assert not there.drained
    stuck.resume()
    tcp_driver.until(lambda: len(there.drained) == 2)
    assert there.drained == [there.failed.job_id, second]


def test_an_agent_that_cannot_be_destroyed_proves_nothing(
    tcp_driver: NixlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tcp_driver.node("prefill", "page_major", TransportConfig(), num_pages=4, shape=BIG)
    agents: list[nixl_agent.NixlAgent] = []
    held: list[Any] = []
    destroy = nixl_agent.NixlAgent.destroy

    def holding(agent: nixl_agent.NixlAgent) -> bool:
        if not agents:
            held.append(agent.api.agent)
        agents.append(agent)
        return destroy(agent)

    monkeypatch.setattr(nixl_agent.NixlAgent, "destroy", holding)
    with children(PeerId("decode", 8)) as (child,):
        to = add_child(writer, child)
        tcp_driver.end(writer, writer.job(1, to, [0], [0]))
        assert child.cut_connections() > 0
        write_until_failed(tcp_driver, writer, to, 10, [1])
        writer.transport.renew()
        tcp_driver.end(writer, writer.job(1000, to, [2], [2]))
        until(lambda: agents)
        assert isinstance(writer.ends(1000)[0], WriteDone)
        assert not writer.of(WriteDrained)
    with pytest.raises(InternalError, match="outlived"):
        writer.transport.close()
    assert not writer.of(WriteDrained)
    held.clear()
    gc.collect()
    tcp_driver.nodes.remove(writer)


def test_only_time_spent_polling_lets_what_the_kernels_hold_settle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that was stopped, or kept from its processor, has read nothing meanwhile."""
    now_s = [100.0]
    events: list[object] = []
    layout = make_pool("layer_major", 4).layout
    agent = nixl_loop.NixlLoop(
        PeerId("decode", 9), RankMemory(layout), events.append, TransportConfig()
    )
    monkeypatch.setattr(nixl_loop.time, "monotonic", lambda: now_s[0])

    def poll_after(seconds: float) -> None:
        now_s[0] += seconds
        agent._progress()

    agent.settle("proof", 0.010)
    poll_after(0.0)
    poll_after(1000.0)
    poll_after(1000.0)
    for _ in range(3):
        poll_after(0.001)
    assert not events, "of its 10 ms each of three gaps counts for 2, and each short one for 1"
    for _ in range(2):
        poll_after(0.001)
    assert events == [Settled("proof")]
    assert agent._wait_s(None) is None, "nothing is left to poll for"
    assert agent.destroy() is None


def test_between_posts_that_end_at_once_notifications_are_polled_every_5_ms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Posts make NIXL progress, so most polls would be in vain; but what comes meanwhile is not
    late."""
    now_s, polled_s = [100.0], [100.0]
    layout = make_pool("layer_major", 4).layout
    loop = nixl_loop.NixlLoop(
        PeerId("decode", 9), RankMemory(layout), lambda event: None, TransportConfig()
    )
    monkeypatch.setattr(nixl_loop.time, "monotonic", lambda: now_s[0])
    poll = loop._poll_notifications

    def polled() -> bool:
        polled_s.append(now_s[0])
        return poll()

    def post(peer: object, at_s: float) -> bool:
        """Post a part, which ends at once."""
        loop._linger_until = at_s + nixl_loop._LINGER_S
        return True

    # In place of a job that has parts left.
    monkeypatch.setattr(loop, "_jobs", ["job"])
    monkeypatch.setattr(loop, "_peers", {"peer": SimpleNamespace(outbox=["job"])})
    monkeypatch.setattr(loop, "_serve_peer", post)
    monkeypatch.setattr(loop, "_poll_notifications", polled)
    poll()
    for _ in range(200):
        now_s[0] += 0.0005
        loop._progress()
    gaps_s = np.diff(polled_s)
    assert gaps_s.min() >= 0.005 - 1e-9
    assert gaps_s.max() <= 0.0055 + 1e-9
    assert len(gaps_s) >= 18, "of 100 ms"
    # Where a step posts nothing, or rooms are expected, each one polls.
    before = len(polled_s)
    monkeypatch.setattr(loop, "_serve_peer", lambda peer, at_s: False)
    loop._progress()
    monkeypatch.setattr(loop, "_serve_peer", post)
    loop.expect(1)
    loop._progress()
    assert len(polled_s) == before + 2
    monkeypatch.undo()
    assert loop.destroy() is None


Api = nixl_agent.nixl_api


def staged_job(
    writer: Node, job_id: int, target: Node, src: list[int], dst: list[int], **more: Any
) -> WriteJob:
    return writer.job(job_id, target, src, dst, route="staging", **more)


def num_lists() -> int:
    """Prepared descriptor lists of this process that are not released."""
    kind = Api.nixl_prepped_dlist_handle
    return sum(type(found) is kind and not found._released for found in gc.get_objects())


def wrap_posts(monkeypatch: pytest.MonkeyPatch, post: Callable[..., Any]) -> None:
    """`post(transfer, agent, handle, tag)` in place of every agent's `transfer`."""
    transfer = Api.nixl_agent.transfer
    monkeypatch.setattr(Api.nixl_agent, "transfer", lambda *args: post(transfer, *args))


def written(driver: NixlDriver, job_id: int, writer: Node, target: Node, staged: bool) -> None:
    """Write two pages or blocks, and see that they arrive."""
    writer.transport.write(
        writer.job(job_id, target, [2, 3], [3, 1], route="staging" if staged else "pages")
    )
    driver.until(lambda: writer.ends(job_id))
    assert isinstance(writer.ends(job_id)[0], WriteDone), writer.ends(job_id)
    if staged:
        assert np.array_equal(target.staging.blocks[[3, 1]], writer.staging.blocks[[2, 3]])
    else:
        assert [target.pool.page(3), target.pool.page(1)] == [
            writer.pool.page(2),
            writer.pool.page(3),
        ]


@pytest.mark.parametrize(
    ("src", "dst", "descriptors"),
    [
        (list(range(10)), list(range(10, 20)), [1, 1, 1]),
        ([0, 1, 2, 3, 8, 9, 10, 11, 16, 17], list(range(10)), [1, 1, 1]),
        ([0, 1, 5, 6], [4, 5, 6, 7], [2]),
        ([3, 2, 1, 0], [0, 1, 2, 3], [2, 2]),
    ],
)
def test_neighbouring_blocks_reach_nixl_as_one_descriptor(
    nixl_driver: NixlDriver,
    monkeypatch: pytest.MonkeyPatch,
    src: list[int],
    dst: list[int],
    descriptors: list[int],
) -> None:
    """And are counted as one: a part holds as many bytes as `post_bytes` allows, in at most
    `post_descriptors`."""
    counted: list[int] = []

    def counting(transfer: Any, agent: Any, handle: Any, tag: bytes) -> Any:
        state = transfer(agent, handle, tag)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        counted.append(agent.get_xfer_telemetry(handle).descCount)
        return state

    config = Api.nixl_agent_config
    monkeypatch.setattr(
        Api, "nixl_agent_config", lambda **more: config(capture_telemetry=True, **more)
    )
    wrap_posts(monkeypatch, counting)
    writer, target = nixl_driver.pair(
        config=TransportConfig(post_bytes=4 * BLOCK_BYTES, post_descriptors=2), num_blocks=20
    )
    writer.transport.write(staged_job(writer, 1, target, src, dst))
    nixl_driver.until(writer.ends)
    assert writer.ends() == [WriteDone(1, len(src) * BLOCK_BYTES)]
    assert counted == descriptors
    assert np.array_equal(target.staging.blocks[dst], writer.staging.blocks[src])


@pytest.mark.slow
def test_both_pairs_of_lists_go_with_their_peer(nixl_driver: NixlDriver) -> None:
    assert num_lists() == 0
    writer, target = nixl_driver.pair(num_blocks=8)
    other = nixl_driver.node("other", num_blocks=8)
    other.transport.expect(1)
    until(lambda: num_lists() == 4)
    writer.add(other)
    written(nixl_driver, 1, writer, other, staged=True)
    assert num_lists() == 8
    layout = target.pool.layout
    writer.transport.add_peer(
        target.me, target.transport.metadata, PeerMemory(layout)
    )  # without its area
    written(nixl_driver, 2, writer, target, staged=False)
    assert num_lists() == 6
    writer.add(target)
    written(nixl_driver, 3, writer, target, staged=True)
    assert num_lists() == 8
    writer.transport.remove_peer(target.me)
    until(lambda: num_lists() == 4)
    writer.transport.remove_peer(other.me)
    until(lambda: num_lists() == 0)


@pytest.mark.slow
@pytest.mark.parametrize("staged", [True, False])
def test_a_lost_peer_and_a_renewed_agent_have_staging_again(
    nixl_driver: NixlDriver, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    broken: list[bool] = []

    def breaking(transfer: Any, agent: Any, handle: Any, tag: bytes) -> Any:
        if broken:
            broken.pop()
            raise nixl_agent.nixl_errors.nixlRemoteDisconnectError("cut by the test")
        return transfer(agent, handle, tag)

    wrap_posts(monkeypatch, breaking)
    writer, target = nixl_driver.pair(num_blocks=8)
    until(lambda: num_lists() == 4)

    broken.append(True)
    writer.transport.write(writer.job(1, target, [0], [0], route="staging" if staged else "pages"))
    nixl_driver.until(lambda: writer.ends(1) and writer.of(PeerUnreachable))
    (failed,) = writer.ends(1)
    assert isinstance(failed, WriteFailed)
    assert isinstance(failed.error, PeerLostError)
    assert failed.error.peer == target.me
    assert not failed.drained
    written(nixl_driver, 2, writer, target, staged=True)
    written(nixl_driver, 3, writer, target, staged=False)
    assert num_lists() == 4

    writer.transport.renew()
    nixl_driver.until(lambda: writer.of(WriteDrained))
    assert writer.of(WriteDrained) == [WriteDrained(1)]
    assert num_lists() == 0
    written(nixl_driver, 4, writer, target, staged=True)
    written(nixl_driver, 5, writer, target, staged=False)
    assert num_lists() == 4
    writer.transport.close()
    assert num_lists() == 0
