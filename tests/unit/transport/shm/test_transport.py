"""What only the transport over shared memory can show: other processes that die or stand still,
writes that are cancelled half way, and peers that lie about their memory."""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError, HandshakeError
from prefixkv.memory.kv_pool import SharedBlock
from prefixkv.protocol.ids import ChunkTag, PeerId
from prefixkv.transport.base import PeerMemory, PeerUnreachable, RankMemory, WriteDone
from prefixkv.transport.shm import wire as shm_wire
from prefixkv.transport.shm.copy import CopyPlan
from prefixkv.transport.shm.loop import ShmTransport
from prefixkv.transport.shm.wire import MAX_OTHER_RANGES, pack_offer
from tests.support.patience import until
from tests.support.shm_liar import Liar, num_descriptors, num_mapped
from tests.support.transport_child import BIG, add_child, children
from tests.support.transport_driver import ShmDriver
from tests.support.transport_pools import make_pool, shared_zeros

# --- other processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_pages_reach_another_process_and_are_notified(driver: ShmDriver) -> None:
    writer = driver.node("prefill", "layer_major", TransportConfig(), num_pages=6, shape=BIG)
    with children(PeerId("decode", 5), shm=True) as (child,):
        to = add_child(writer, child)
        job = writer.job(1, to, [5, 0, 3], [1, 2, 0])
        writer.transport.write(job)
        driver.until(lambda: writer.ends(1))
        assert writer.ends(1) == [WriteDone(1, 3 * writer.pool.layout.page_bytes)]
        assert child.pages()[:3] == [writer.pool.page(page) for page in (3, 5, 0)]
        parts = -(-3 * writer.pool.layout.page_bytes // TransportConfig().post_bytes)
        until(lambda: len(child.tags()) >= parts)
        tags = sorted(ChunkTag.unpack(tag) for tag in child.tags())
        pages = len(job.dst_pages)
        assert tags == [
            job.tag._replace(part=n, num_parts=parts, num_pages=pages) for n in range(parts)
        ]


@pytest.mark.slow
def test_a_killed_peer_fails_its_own_jobs_only_and_its_memory_goes(driver: ShmDriver) -> None:
    before = num_mapped()
    writer = driver.node("prefill", "page_major", TransportConfig(), num_pages=4, shape=BIG)
    ours = num_mapped() - before
    with children(PeerId("decode", 5), PeerId("other", 6), shm=True) as (child, other):
        to, friend = add_child(writer, child), add_child(writer, other)
        writer.transport.write(writer.job(1, to, [0], [0]))
        writer.transport.write(writer.job(2, friend, [0], [0]))
        driver.until(lambda: len(writer.ends(1, 2)) == 2)
        assert num_mapped() - before == ours + 2
        child.kill()
        until(lambda: num_mapped() - before == ours + 1)
        assert not writer.of(PeerUnreachable)
        driver.end(writer, writer.job(3, to, [1], [1]))
        writer.drained(3)
        assert [event.peer for event in writer.of(PeerUnreachable)] == [child.me]
        driver.done(writer, writer.job(4, friend, [1], [1]))
        writer.transport.remove_peer(other.me)
        until(lambda: num_mapped() - before == ours)


def test_a_peer_that_stands_still_is_written_all_the_same_and_hears_of_it_later(
    driver: ShmDriver,
) -> None:
    """More tags than a socket holds: they wait here, and none is lost."""
    config = TransportConfig(post_bytes=1 << 20)  # a page
    writer = driver.node("prefill", "page_major", config, num_pages=4, shape=BIG)
    with children(PeerId("decode", 5), shm=True) as (child,):
        to = add_child(writer, child)
        driver.end(writer, writer.job(1000, to, [0], [0]))
        child.stop()
        for number in range(100):
            writer.transport.write(writer.job(number, to, [0, 1, 2, 3], [3, 2, 1, 0]))
        driver.until(lambda: len(writer.ends()) == 101)
        assert all(isinstance(end, WriteDone) for end in writer.ends())
        child.resume()
        until(lambda: len(child.tags()) >= 401)
        assert len(set(child.tags())) == len(child.tags()) == 401
        assert child.pages() == writer.pool.pages()[::-1]


# --- cancelling -----------------------------------------------------------------------------------


def test_a_job_is_cancelled_between_two_parts_and_nothing_lands_afterwards(
    driver: ShmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, target = driver.pair("page_major", "page_major", config=TransportConfig(post_bytes=512))
    copied: list[int] = []
    copy = CopyPlan.copy

    def counted(plan: CopyPlan, part: Any, src: Any, dst: Any) -> None:
        copy(plan, part, src, dst)
        copied.append(part.num_bytes)
        if len(copied) == 3:
            writer.transport.cancel(1)

    monkeypatch.setattr(CopyPlan, "copy", counted)
    page_bytes, before = writer.pool.layout.page_bytes, target.pool.pages()
    assert page_bytes % 512 == 0 or 512 % page_bytes == 0
    driver.end(writer, writer.job(1, target, list(range(20)), list(range(20))))
    writer.drained(1, error=AbortedError)
    whole = sum(copied) // page_bytes
    assert len(copied) == 3
    assert target.pool.pages() == writer.pool.pages()[:whole] + before[whole:]
    assert len(target.tags()) <= 3
    driver.end(writer, writer.job(2, target, [23], [23]))
    assert target.pool.pages()[whole:23] == before[whole:23]


@pytest.mark.slow
def test_close_leaves_nothing_behind(driver: ShmDriver) -> None:
    before = num_descriptors(), num_mapped()
    pools = [make_pool("page_major", 4, zeros=shared_zeros) for _ in range(2)]
    made = [
        ShmTransport(PeerId(name, 1), RankMemory(pool.layout), lambda event: None)
        for name, pool in zip("pd", pools, strict=True)
    ]
    made[0].add_peer(PeerId("d", 1), made[1].metadata, PeerMemory(pools[1].layout))
    until(lambda: num_mapped() - before[1] == 3)
    for transport in made:
        transport.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("prefixkv-shm")]
    assert num_mapped() - before[1] == 2
    del pools
    assert (num_descriptors(), num_mapped()) == before


def test_memory_that_is_not_shared_is_not_offered() -> None:
    pool = make_pool("layer_major", 4)
    transport = ShmTransport(PeerId("d", 1), RankMemory(pool.layout), lambda event: None)
    assert transport.metadata == b""
    transport.close()


# --- a peer that lies about its memory ------------------------------------------------------------


def memfd(num_bytes: int, seals: int = 0, flags: int = 0) -> int:
    fd = os.memfd_create("lie", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_pipe(num_bytes: int) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


HUGE = 1 << 30  # a multiple of every size of them
Fds = Callable[[SharedBlock], list[int]]
LIES: dict[str, tuple[Any, Any, Fds, str]] = {
    "not sealed": (None, None, lambda b: [memfd(b.num_bytes)], "shm seals"),
    "sealed against growing": (
        None, None, lambda b: [memfd(b.num_bytes, fcntl.F_SEAL_GROW)], "shm seals"
    ),
    "too short": (
        None, None, lambda b: [memfd(mmap.PAGESIZE // 2, fcntl.F_SEAL_SHRINK)], "shm file bytes"
    ),
    "too short by a byte": (
        None, None, lambda b: [memfd(b.num_bytes - 1, fcntl.F_SEAL_SHRINK)], "shm file bytes"
    ),
    "of huge pages": (
        None, None,
        lambda b: [memfd(-(-b.num_bytes // HUGE) * HUGE, fcntl.F_SEAL_SHRINK, os.MFD_HUGETLB)],
        "shm file's pages",
    ),
    "no memfd": (None, None, lambda b: [os.open("/dev/zero", os.O_RDWR)], "shm file"),
    "no file": (None, None, lambda b: [a_pipe(1)], "shm file"),
    "read only": (
        None, None, lambda b: [os.open(f"/proc/self/fd/{b.fd}", os.O_RDONLY)], "shm block"
    ),
    "the second not sealed": (
        lambda b: [b[:2], (b.address + b.num_bytes, b.num_bytes)], None,
        lambda b: [os.dup(b.fd), memfd(b.num_bytes)], "shm seals",
    ),
    "no descriptor": (None, None, lambda b: [], "shm descriptors"),
    "one too many": (None, None, lambda b: [os.dup(b.fd), os.dup(b.fd)], "shm descriptors"),
    "one too few": (
        lambda b: [b[:2], (b.address + b.num_bytes, b.num_bytes)], None,
        lambda b: [os.dup(b.fd)], "shm descriptors",
    ),
    "so many that they are cut off": (None, None, lambda b: [os.dup(b.fd)] * 100, "shm"),
    "nothing": ([], [], lambda b: [], "shm descriptors"),
    "more ranges than a Hello has": (
        None, lambda b: [(b.address, 1)] * (MAX_OTHER_RANGES + 2), lambda b: [os.dup(b.fd)],
        "shm ranges",
    ),
    "no words": ("what", 7, lambda b: [os.dup(b.fd)], "shm memory"),
    "a negative size": ([(4096, -1)], [], lambda b: [os.dup(b.fd)], "shm memory"),
    "an empty block": ([(4096, 0)], [], lambda b: [os.dup(b.fd)], "shm memory"),
    "an endless size": ([(4096, 2**63 - 1)], [], lambda b: [os.dup(b.fd)], "shm file bytes"),
    "elsewhere": ([(4096, 4096)], [(4096, 4096)], lambda b: [os.dup(b.fd)], "shared memory"),
    "ranges outside": (None, [(4096, 4096)], lambda b: [os.dup(b.fd)], "shm range"),
    "less than was named": (
        None, lambda b: [(b.address, 100)], lambda b: [os.dup(b.fd)], "shared memory"
    ),
    "twice the same": (
        lambda b: [b[:2], b[:2]], None, lambda b: [os.dup(b.fd), os.dup(b.fd)], "shm block"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "lie",
    [pytest.param(one, marks=() if one == "not sealed" else pytest.mark.slow) for one in LIES],
)
def test_a_peer_that_lies_is_unreachable_and_harms_nothing(
    driver: ShmDriver, liar: Liar, lie: str
) -> None:
    writer, target = driver.pair()
    driver.end(writer, writer.job(1, target, [0], [0]))
    before = num_descriptors(), num_mapped()
    blocks, ranges, make_fds, field = LIES[lie]
    blocks = [liar.block[:2]] if blocks is None else blocks
    ranges = [*liar.layout.regions] if ranges is None else ranges
    blocks, ranges = (of(liar.block) if callable(of) else of for of in (blocks, ranges))
    liar.greeted_by(writer)
    fds = make_fds(liar.block)
    link = liar.answer(blocks, ranges, fds)
    shm_wire.close_all(set(fds))
    event = driver.unreachable(writer)
    assert isinstance(event.error, HandshakeError)
    assert event.error.field == field
    link.close()
    assert (num_descriptors(), num_mapped()) == before
    driver.done(writer, writer.job(2, target, [1], [1]))


def test_the_truth_from_the_same_door_is_taken(driver: ShmDriver, liar: Liar) -> None:
    """What the lies differ from."""
    writer = liar.greeted_by(driver.node("prefill"))
    link = liar.answer_truly()
    driver.done(writer, writer.job(1, liar, [3], [2]))
    assert link.recv(1000) == writer.job(1, liar, [3], [2]).tag._replace(num_pages=1).pack()
    link.close()


def test_what_the_owner_punches_out_or_cuts_off_ends_no_process(
    driver: ShmDriver, liar: Liar
) -> None:
    writer = liar.greeted_by(driver.node("prefill"))
    link = liar.answer_truly()
    driver.end(writer, writer.job(1, liar, [3], [2]))
    with pytest.raises(PermissionError):
        os.ftruncate(liar.block.fd, 0)
    with mmap.mmap(liar.block.fd, liar.block.num_bytes) as theirs:
        theirs.madvise(mmap.MADV_REMOVE)
        assert not any(theirs[:])
        driver.done(writer, writer.job(2, liar, [1], [0]))
        assert theirs[: writer.pool.layout.page_bytes] == writer.pool.page(1)
    link.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "field"),
    [({"name": "other"}, "shm offer"), ({"incarnation": 8}, "shm offer"), ({"door": "none"}, "")],
    ids=str,
)
def test_an_offer_of_another_is_refused(
    driver: ShmDriver, liar: Liar, change: dict[str, Any], field: str
) -> None:
    writer = driver.node("prefill")
    before = num_descriptors()
    offer = msgspec.structs.replace(liar.offer, **change)
    writer.transport.add_peer(liar.me, pack_offer(offer), PeerMemory(liar.layout))
    event = driver.unreachable(writer)
    assert getattr(event.error, "field", "") == field
    assert num_descriptors() == before


def test_a_door_that_closes_instead_of_answering_is_a_refusal(
    driver: ShmDriver, liar: Liar
) -> None:
    writer = liar.greeted_by(driver.node("prefill"))
    liar.accept().close()
    event = driver.unreachable(writer)
    assert (event.error.field, event.error.theirs) == ("shm", "the end")
