"""What the shm transport makes of its peers: in what order it copies and tells, and what becomes of
jobs when a peer is another, does not answer, or does not read."""

import ctypes
import dataclasses
import errno
import fcntl
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import HandshakeError, PeerLostError, TransferError, TransferTimeoutError
from prefixkv.memory.kv_pool import SEALS
from prefixkv.protocol.ids import ChunkTag
from prefixkv.transport.base import (
    Arrived,
    PeerMemory,
    PeerUnreachable,
    RankMemory,
    Settled,
    WriteDone,
    WriteFailed,
)
from prefixkv.transport.loop import RECONNECT_S
from prefixkv.transport.shm import peer as shm_peer
from prefixkv.transport.shm.copy import CopyPlan
from prefixkv.transport.shm.loop import ShmTransport
from prefixkv.transport.shm.peer import ShmLink
from prefixkv.transport.shm.wire import listen, pack_offer, tags_of
from tests.support.patience import until
from tests.support.shm_liar import Liar, num_descriptors
from tests.support.transport_driver import Gate, Node, ShmDriver
from tests.support.transport_pools import Shape, make_pool

SMALL = TransportConfig(post_bytes=128)  # two blocks of 64 bytes a part


def loop_of(node: Node) -> Any:
    found: list[Any] = []
    node.transport._call(found.append)
    until(lambda: found)
    return found[0]


def link_to(writer: Node, target: Any) -> Any:
    return loop_of(writer)._peers[target.me].link


def is_connected(writer: Node, target: Node) -> bool:
    peer = loop_of(writer)._peers.get(target.me)
    return peer is not None and peer.routes is not None


def waiting_job(driver: ShmDriver, liar: Liar) -> tuple[Node, Gate, socket.socket]:
    """A writer that is connected to the liar, whose job 1 waits for a gate; and the liar's end."""
    writer, gate = liar.greeted_by(driver.node("prefill")), Gate(driver)
    link = liar.answer_truly()
    until(lambda: is_connected(writer, liar))
    writer.transport.write(writer.job(1, liar, [1], [2], ready=gate))
    driver.until(lambda: gate.queries)
    return writer, gate, link


@contextmanager
def own_link(liar: Liar) -> Iterator[ShmLink]:
    """A connection to the liar that no transport drives."""
    with select.epoll() as epoll:
        link = ShmLink(liar.me, pack_offer(liar.offer), PeerMemory(liar.layout), epoll)
        yield link
        link.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events that links were told of."""
    noted: list[int] = []
    on_ready = ShmLink.on_ready

    def counted(link: ShmLink, events: int) -> None:
        noted.append(events)
        on_ready(link, events)

    monkeypatch.setattr(ShmLink, "on_ready", counted)
    return noted


# --- order ----------------------------------------------------------------------------------------


def test_a_part_is_copied_then_told_and_the_job_ends_after_its_last_tag(
    driver: ShmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, target = driver.pair(config=SMALL)
    steps: list[str] = []
    copy, tell = CopyPlan.copy, ShmLink.tell

    def copied(plan: CopyPlan, *args: Any) -> None:
        copy(plan, *args)
        steps.append("copied")

    def told(link: ShmLink, tag: bytes) -> None:
        tell(link, tag)
        steps.append(f"told, {len(writer.ends())} ended")

    monkeypatch.setattr(CopyPlan, "copy", copied)
    monkeypatch.setattr(ShmLink, "tell", told)
    driver.end(writer, writer.job(1, target, [0, 2], [1, 5]))
    assert steps == ["copied", "told, 0 ended"] * 4


def test_peers_take_turns_part_by_part(driver: ShmDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rooms are ready: commands are obeyed between two parts."""
    writer, one = driver.pair(config=SMALL)
    two = driver.node("decode-2")
    writer.add(two)
    until(lambda: is_connected(writer, one) and is_connected(writer, two))
    gate = Gate(driver)
    order: list[int] = []
    tell = ShmLink.tell

    def told(link: ShmLink, tag: bytes) -> None:
        order.append(link.fd)
        tell(link, tag)

    monkeypatch.setattr(ShmLink, "tell", told)
    pages = list(range(20))
    for number, target in enumerate((one, two, one, two)):  # two rooms each
        writer.transport.write(writer.job(number, target, pages, pages, ready=gate))
    driver.until(lambda: gate.queries > 4)
    gate.answer = True
    driver.until(lambda: len(writer.ends()) == 4)
    turns = order[1:-1]
    assert len(set(turns)) == 2
    assert all(first != second for first, second in itertools.pairwise(turns))


def test_all_tags_that_were_sent_are_heard_before_settled(driver: ShmDriver) -> None:
    """More of them than are read in a turn, while the target's thread is held up."""
    held, go_on = threading.Event(), threading.Event()
    writer, target = driver.pair(config=SMALL)
    until(lambda: is_connected(writer, target))
    sink = loop_of(target)._sink

    def slow(event: Any) -> None:
        if event == Settled("hold"):
            held.set()
            go_on.wait(60)
        sink(event)

    loop_of(target)._sink = slow
    target.transport._call(
        lambda loop: loop.emit(Settled("hold"))
    )  # a settle would read what came while it was held
    assert held.wait(60)
    for number in range(5):
        pages = list(range(20))
        writer.transport.write(writer.job(number, target, pages, pages))
    driver.until(lambda: len(writer.ends()) == 5)
    target.transport.settle("after", 0.0)
    go_on.set()
    driver.until(lambda: Settled("after") in target.events)
    before = target.events[: target.events.index(Settled("after"))]
    assert sum(isinstance(event, Arrived) for event in before) == 5 * 40


def test_a_copy_that_fails_fails_its_job_drained_and_nothing_else(
    driver: ShmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, target = driver.pair()
    driver.end(writer, writer.job(1, target, [0], [0]))
    link = link_to(writer, target)

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patched:
        patched.setattr(CopyPlan, "copy", broken)
        driver.end(writer, writer.job(2, target, [1], [1]))
    writer.drained(2, error=TransferError)
    driver.done(writer, writer.job(3, target, [1], [1]))
    assert link_to(writer, target) is link
    assert not writer.of(PeerUnreachable)


def test_a_peer_that_was_connected_once_is_said_to_have_been(driver: ShmDriver) -> None:
    """Else it would be taken for one whose memory cannot be mapped."""
    writer, target = driver.pair()
    until(lambda: is_connected(writer, target))
    target.transport.close()
    driver.end(writer, writer.job(1, target, [1], [1]))
    writer.drained(1, error=TransferError)
    driver.until(lambda: writer.of(PeerUnreachable))
    assert all(event.was_reached for event in writer.of(PeerUnreachable))


def test_a_peer_found_lost_by_a_tag_is_connected_again(
    driver: ShmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, target = driver.pair()
    until(lambda: is_connected(writer, target))

    def gone(*args: Any) -> None:
        raise PeerLostError("it is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ShmLink, "tell", gone)
        driver.end(writer, writer.job(1, target, [0], [0]))
        until(lambda: link_to(writer, target) is None)
    assert [(type(end.error), end.drained) for end in writer.ends(1)] == [(PeerLostError, True)]
    driver.done(writer, writer.job(2, target, [1], [1]))


# --- a peer that is added again -------------------------------------------------------------------


def test_a_peer_that_is_added_again_as_it_is_keeps_its_connection(driver: ShmDriver) -> None:
    writer, target = driver.pair()
    until(lambda: is_connected(writer, target))
    link = link_to(writer, target)
    writer.add(target)
    driver.end(writer, writer.job(1, target, [0], [0]))
    assert link_to(writer, target) is link


def test_a_removed_peers_memory_is_given_back_with_its_job_waiting(driver: ShmDriver) -> None:
    writer, target = driver.pair()
    until(lambda: is_connected(writer, target))
    peer = loop_of(writer)._peers[target.me]
    gate, before = Gate(driver), num_descriptors()
    writer.transport.write(writer.job(1, target, [0], [0], ready=gate))
    driver.until(lambda: gate.queries > 300)  # it is asked far more often than once a second
    writer.transport.remove_peer(target.me)
    driver.until(lambda: writer.ends(1))
    assert isinstance(writer.ends(1)[0], WriteFailed)
    until(lambda: num_descriptors() == before - 3)  # the connection's ends, and the memory
    assert not loop_of(writer)._peers
    assert (peer.link, peer.routes, peer.plans) == (None, None, {})


def test_jobs_go_on_where_the_same_memory_has_another_door(driver: ShmDriver, liar: Liar) -> None:
    writer, gate, first = waiting_job(driver, liar)
    door = f"{liar.offer.door}-again"
    with listen(door) as listener, first:
        offer = msgspec.structs.replace(liar.offer, door=door)
        writer.transport.add_peer(liar.me, pack_offer(offer), PeerMemory(liar.layout))
        with dataclasses.replace(liar, listener=listener, offer=offer).answer_truly() as link:
            gate.answer = True
            driver.until(lambda: writer.ends(1))
            assert isinstance(writer.ends(1)[0], WriteDone)
            assert link.recv(1000) == writer.job(1, liar, [1], [2]).tag._replace(num_pages=1).pack()
            assert first.recv(1000) == b""


# --- a peer that does not answer, or does not read ------------------------------------------------


def test_a_door_that_does_not_answer_is_given_up(
    driver: ShmDriver, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_peer, "GREETING_S", 0.05)
    writer = liar.greeted_by(driver.node("prefill"))
    with liar.accept():
        event = driver.unreachable(writer)
    assert isinstance(event.error, TransferTimeoutError)


def test_a_door_that_is_shut_is_not_tried_at_every_write(
    driver: ShmDriver, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    connect = shm_peer.connect

    def counted(door: str) -> Any:
        tried.append(time.monotonic())
        return connect(door)

    monkeypatch.setattr(shm_peer, "connect", counted)
    liar.listener.close()
    writer = liar.greeted_by(driver.node("prefill"))
    for number in range(3):
        writer.transport.write(writer.job(number, liar, [0], [0]))
        driver.until(lambda n=number: writer.ends(n))
    assert all(isinstance(end, WriteFailed) and end.drained for end in writer.ends())
    gaps = [later - sooner for sooner, later in itertools.pairwise(tried)]
    assert gaps
    assert min(gaps) >= RECONNECT_S


def test_writes_to_a_peer_that_does_not_read_its_tags_fail_beyond_a_bound(
    driver: ShmDriver, liar: Liar, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    monkeypatch.setattr(shm_peer, "_MAX_UNSENT_TAGS", 50)
    writer = liar.greeted_by(driver.node("prefill", config=SMALL))
    link = liar.answer_truly()
    pages = list(range(5))
    driver.done(writer, writer.job(0, liar, pages, pages))
    for number in range(1, 200):
        writer.transport.write(writer.job(number, liar, pages, pages))
    driver.until(lambda: len(writer.ends()) == 200)
    failed = [end for end in writer.ends() if isinstance(end, WriteFailed)]
    assert failed
    assert all(end.drained and "does not read" in str(end.error) for end in failed)
    assert len(link_to(writer, liar)._unsent) == 50
    link.setblocking(False)
    read: list[bytes] = []

    def all_read() -> bool:
        with suppress(BlockingIOError):
            while True:
                read.append(link.recv(1 << 16))
        return not link_to(writer, liar)._unsent

    until(all_read)  # what waited is sent
    heard = len(calls)
    for _ in range(20):
        loop_of(writer)  # a turn of its thread
    assert len(calls) <= heard + 1, "and a socket that takes more keeps no writer awake"
    tags = [ChunkTag.unpack(tag) for packet in read for tag in tags_of(packet)]
    assert len(tags) > 50
    assert len(set(tags)) == len(tags)
    link.close()


# --- memory that is not there -----------------------------------------------------------------


def test_a_file_with_a_hole_is_refused_before_a_page_is_touched(
    driver: ShmDriver, liar: Liar
) -> None:
    """What its Hello names is not there: a page that this process touched would be new memory."""
    writer = driver.node("prefill")
    with sparse(liar.block.num_bytes) as fd:
        liar.greeted_by(writer)
        with liar.answer([liar.block[:2]], [*liar.layout.regions], [fd]):
            event = driver.unreachable(writer)
        assert (event.error.field, event.error.reason) == ("shm pages", "are there, then a hole")
        assert os.fstat(fd).st_blocks == 0


def test_no_more_is_touched_than_the_hello_names(driver: ShmDriver, liar: Liar) -> None:
    """Whatever the file has, and whatever is handed over beside it."""
    writer = driver.node("prefill")
    address, num_bytes, fd = liar.block
    most = 1 << 32
    with sparse(most) as large:
        liar.greeted_by(writer)
        blocks = [(address, num_bytes), (address + num_bytes, most)]
        ranges = [*liar.layout.regions, (address + num_bytes, most)]
        with liar.answer(blocks, ranges, [fd, large]):
            until(lambda: is_connected(writer, liar))
        assert os.fstat(large).st_blocks == 0


@contextmanager
def sparse(num_bytes: int) -> Iterator[int]:
    """A sealed file without a page."""
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        yield fd
    finally:
        os.close(fd)


# --- memory that cannot be had --------------------------------------------------------------------


def test_all_of_the_peers_pages_are_here_before_the_first_copy(
    driver: ShmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    populate, copy = ShmLink.populate, CopyPlan.copy
    monkeypatch.setattr(shm_peer, "_POPULATED_BYTES", 4096)
    monkeypatch.setattr(ShmLink, "populate", lambda link: (steps.append("page"), populate(link))[1])
    monkeypatch.setattr(
        CopyPlan, "copy", lambda plan, *args: (steps.append("copy"), copy(plan, *args))[1]
    )
    writer, target = driver.pair()
    driver.end(writer, writer.job(1, target, [0], [0]))
    num_bytes = sum(size for _, size in target.pool.layout.regions)
    assert steps[: -(-num_bytes // 4096)] == ["page"] * -(-num_bytes // 4096)
    assert "copy" in steps


def test_memory_that_the_kernel_does_not_give_is_a_refusal(
    driver: ShmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernel:
        @staticmethod
        def madvise(*args: Any) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(shm_peer, "_libc", Kernel)
    writer, target = driver.pair()
    event = driver.unreachable(writer)
    assert isinstance(event.error, HandshakeError)
    assert event.error.field == "shm pages"
    assert not writer.of(WriteDone)
    assert link_to(writer, target) is None


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN, errno.EINVAL])
def test_a_kernel_that_is_interrupted_is_asked_again_and_an_old_one_is_not(
    liar: Liar, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    class Kernel:
        @staticmethod
        def madvise(address: int, num_bytes: int, advice: int) -> int:
            asked.append((address, num_bytes))
            if len(asked) % 2 == 0:
                return 0
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(shm_peer, "_libc", Kernel)
    monkeypatch.setattr(shm_peer, "_POPULATED_BYTES", 4096)
    with own_link(liar) as link:
        blocks = [liar.block[:2], (liar.block.address + liar.block.num_bytes, liar.block.num_bytes)]
        with liar.answer(blocks, [], [liar.block.fd] * 2):
            link.on_ready(select.EPOLLIN)
            turns = 0
            while not link.is_whole and turns < 1000:
                link.populate()
                turns += 1
        assert not link._files
    num_pages = liar.block.num_bytes // 4096  # the second block is not in the Hello
    if number == errno.EINVAL:
        assert turns == 1
    else:
        assert turns == 2 * num_pages
        assert asked[::2] == asked[1::2]
        assert len(set(asked)) == num_pages


def test_ranges_are_found_in_the_block_that_each_lies_in(liar: Liar) -> None:
    with own_link(liar) as link:
        address, num_bytes, fd = liar.block
        blocks = [(address + num_bytes, num_bytes), (address, num_bytes)]
        ranges = [(address + 8, 8), (address + num_bytes + 16, 8)]
        with liar.answer(blocks, ranges, [fd, fd]):
            link.on_ready(select.EPOLLIN)
        bases = [ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in link._maps]
        assert [one[:2] for one in link.mapped] == ranges
        assert [one.here for one in link.mapped] == [bases[0] + 8, bases[1] + 16]


def test_only_pools_on_the_cpu_are_offered_and_written(driver: ShmDriver) -> None:
    writer, target = driver.pair()
    on_gpu = msgspec.structs.replace(target.pool.layout, device="cuda:0")
    transport = ShmTransport(target.me, RankMemory(on_gpu), lambda event: None)
    assert transport.metadata == b""
    transport.close()
    writer.transport.add_peer(target.me, target.transport.metadata, PeerMemory(on_gpu))
    event = driver.unreachable(writer)
    assert "CPU" in str(event.error)
    events: list[Any] = []
    transport = ShmTransport(writer.me, RankMemory(on_gpu), events.append)
    transport.add_peer(target.me, target.transport.metadata, PeerMemory(target.pool.layout))
    until(lambda: events)
    transport.close()
    assert isinstance(events[0], PeerUnreachable)
    assert "CPU" in str(events[0].error)


def test_a_peer_of_another_model_is_told_so_also_where_its_door_is_shut(
    driver: ShmDriver, liar: Liar
) -> None:
    writer = driver.node("prefill")
    liar.listener.close()
    other = make_pool("page_major", 6, Shape(head_dim=16)).layout
    writer.transport.add_peer(liar.me, pack_offer(liar.offer), PeerMemory(other))
    event = driver.unreachable(writer)
    assert isinstance(event.error, HandshakeError)
    assert event.error.field == "head_dim"


def test_what_a_peer_says_behind_its_answer_keeps_no_writer_awake(
    driver: ShmDriver, liar: Liar, calls: list[int]
) -> None:
    writer = liar.greeted_by(driver.node("prefill"))
    with liar.answer_truly() as link:
        until(lambda: (of_liar := link_to(writer, liar)) is not None and of_liar.answered)
        heard = len(calls)
        link.send(b"more")
        for _ in range(20):
            loop_of(writer)  # a turn of its thread
        assert len(calls) <= heard + 1


def test_a_peer_that_is_lost_while_a_job_waits_is_said(driver: ShmDriver, liar: Liar) -> None:
    writer, _, link = waiting_job(driver, liar)
    link.close()
    driver.until(lambda: writer.ends(1) and writer.of(PeerUnreachable))
    assert [(type(end.error), end.drained) for end in writer.ends(1)] == [(PeerLostError, True)]
    assert [(one.peer, one.was_reached) for one in writer.of(PeerUnreachable)] == [(liar.me, True)]


def test_a_tag_for_a_peer_that_is_gone_says_so(liar: Liar) -> None:
    with own_link(liar) as link:
        liar.answer_truly().close()
        link.on_ready(select.EPOLLIN)
        with pytest.raises(PeerLostError, match="is gone"):
            link.tell(b"a tag")


def test_a_connection_that_cannot_be_watched_is_closed(liar: Liar) -> None:
    before = num_descriptors()
    epoll = select.epoll()
    epoll.close()
    with pytest.raises(ValueError, match="closed epoll"):
        ShmLink(liar.me, pack_offer(liar.offer), PeerMemory(liar.layout, None, None, None), epoll)
    assert num_descriptors() == before
