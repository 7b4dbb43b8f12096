"""What every transport keeps: the fake, NIXL in shared memory and over TCP, shm, both of them."""

import numpy as np
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError, ClosedError, HandshakeError, PeerLostError, TransferError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import (
    PeerMemory,
    PeerUnreachable,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
)
from tests.support.transport_driver import NUM_PAGES, Driver, Gate, Node
from tests.support.transport_pools import Shape

RNG = np.random.default_rng(7)


def expected(writer: Node, target: Node, src: list[int], dst: list[int]) -> list[bytes]:
    """The target's pages once pages `src` have been written to `dst`."""
    pages = target.pool.pages()
    for s, d in zip(src, dst, strict=True):
        pages[d] = writer.pool.page(s)
    return pages


def some_pages(count: int) -> list[int]:
    return [int(p) for p in RNG.permutation(NUM_PAGES)[:count]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("src_order", "dst_order"),
    [
        ("layer_major", "layer_major"),
        ("page_major", "page_major"),
        ("layer_major", "page_major"),
        ("page_major", "layer_major"),
        ("page_kv", "page_major"),
        ("heads_first", "layer_major"),
        ("padded", "padded"),
        ("tokens_outer", "page_major"),
    ],
)
@pytest.mark.parametrize("contiguous", [True, False])
def test_pages_arrive_whole_and_nothing_else_changes(
    driver: Driver, src_order: str, dst_order: str, contiguous: bool
) -> None:
    writer, target = driver.pair(src_order, dst_order)
    src, dst = (
        (list(range(3, 13)), list(range(8, 18))) if contiguous else (some_pages(10), some_pages(10))
    )
    after = expected(writer, target, src, dst)
    writer.transport.write(writer.job(1, target, src, dst))
    driver.until(writer.ends)
    assert writer.ends() == [WriteDone(1, 10 * writer.pool.layout.page_bytes)]
    assert target.pool.pages() == after


def test_every_part_notifies_with_its_tag(driver: Driver) -> None:
    writer, target = driver.pair(config=TransportConfig(post_bytes=128))
    job = writer.job(1, target, some_pages(20), some_pages(20))
    writer.transport.write(job)
    driver.until(lambda: writer.ends() and len(target.tags()) >= 40)
    tags = sorted(target.tags())
    assert len(tags) == 40  # 4 slabs x 20 blocks of 64 bytes, two a part
    assert tags == [job.tag._replace(part=part, num_parts=40, num_pages=20) for part in range(40)]


def test_many_jobs_each_end_once_with_their_bytes(driver: Driver) -> None:
    """Jobs of several rooms, several of one room, and of both directions, all under way at once."""
    config = TransportConfig(post_bytes=192, window=3)
    a, b = driver.pair("page_kv", "layer_major", config=config)
    b.add(a)
    a.transport.expect(1)
    source_a, source_b = (
        list(range(12)),
        list(range(12)),
    )  # each writes its lower half into the other's upper
    after_b = expected(a, b, source_a, [12 + p for p in source_a])
    after_a = expected(b, a, source_b, [12 + p for p in source_b])
    for n in range(12):
        a.transport.write(a.job(n, b, [n], [12 + n], room=n % 4))
        b.transport.write(b.job(n, a, [n], [12 + n], room=n % 3))
    driver.until(lambda: len(a.ends()) >= 12 and len(b.ends()) >= 12)
    for node in (a, b):
        assert sorted(e.job_id for e in node.ends()) == list(range(12))
        assert all(isinstance(e, WriteDone) for e in node.ends())
    assert b.pool.pages() == after_b
    assert a.pool.pages() == after_a


def test_two_peers_get_their_own(driver: Driver) -> None:
    writer, one = driver.pair()
    two = driver.node("decode-2", "heads_first")
    writer.add(two)
    two.transport.expect(1)
    after_one, after_two = (
        expected(writer, one, [1, 2], [5, 6]),
        expected(writer, two, [3, 2], [5, 6]),
    )
    writer.transport.write(writer.job(1, one, [1, 2], [5, 6]))
    writer.transport.write(writer.job(2, two, [3, 2], [5, 6]))
    driver.until(lambda: len(writer.ends()) == 2 and one.tags() and two.tags())
    assert (one.pool.pages(), two.pool.pages()) == (after_one, after_two)
    assert ({t.room for t in one.tags()}, {t.room for t in two.tags()}) == ({1}, {2})


def test_nothing_is_posted_before_ready_and_other_rooms_go_on(driver: Driver) -> None:
    writer, target = driver.pair()
    gate = Gate(driver)
    before = target.pool.pages()
    writer.transport.write(writer.job(1, target, [1], [2], room=1, ready=gate))
    writer.transport.write(
        writer.job(2, target, [1], [3], room=1)
    )  # behind it: a room's jobs go in order
    writer.transport.write(writer.job(3, target, [4], [5], room=2))
    driver.until(lambda: writer.ends(3) and gate.queries > 2)
    assert not writer.ends(1, 2)
    assert [target.pool.page(2), target.pool.page(3)] == [before[2], before[3]]
    gate.answer = True
    driver.until(lambda: len(writer.ends()) == 3)
    assert target.pool.page(2) == target.pool.page(3) == writer.pool.page(1)
    asked = gate.queries
    driver.end(writer, writer.job(4, target, [1], [2]))
    assert gate.queries == asked  # once ready, never asked again


def test_an_error_in_ready_fails_its_job_only(driver: Driver) -> None:
    writer, target = driver.pair()
    gate = Gate(driver)
    gate.answer = ZeroDivisionError("a broken event")
    writer.transport.write(writer.job(1, target, [1], [2], ready=gate))
    writer.transport.write(writer.job(2, target, [3], [4]))
    driver.until(lambda: len(writer.ends()) == 2)
    failed = writer.drained(1, error=TransferError)
    assert isinstance(failed.error.__cause__, ZeroDivisionError)
    assert isinstance(writer.ends(2)[0], WriteDone)
    assert gate.queries == 1


def test_a_write_to_an_unknown_peer_fails_drained(driver: Driver) -> None:
    writer, target = driver.pair()
    stranger = Node(PeerId("nobody", 1), target.pool, None)
    driver.end(writer, writer.job(1, stranger, [0], [0]))
    writer.drained(error=PeerLostError)


def test_cancelled_before_its_post_a_job_ends_drained(driver: Driver) -> None:
    writer, target = driver.pair()
    gate = Gate(driver)
    before = target.pool.pages()
    writer.transport.write(writer.job(1, target, [0], [0], ready=gate))
    driver.until(lambda: gate.queries or driver_is_quiet(driver))
    writer.transport.cancel(1)
    writer.transport.cancel(99)
    driver.until(writer.ends)
    gate.answer = True
    driver.end(writer, writer.job(2, target, [1], [1]))
    writer.transport.cancel(2)  # ended: nothing happens
    driver.end(writer, writer.job(3, target, [2], [2]))
    writer.drained(1, error=AbortedError)
    assert len(writer.ends()) == 3
    assert target.pool.page(0) == before[0]


def driver_is_quiet(driver: Driver) -> bool:
    fabric = getattr(driver, "fabric", None)
    return fabric is not None and not fabric.pending()


def test_a_removed_peer_gets_nothing_more_until_it_is_added_again(driver: Driver) -> None:
    writer, target = driver.pair()
    gate = Gate(driver)
    writer.transport.write(writer.job(1, target, [0], [0], ready=gate))
    writer.transport.remove_peer(target.me)
    writer.transport.remove_peer(target.me)
    writer.transport.remove_peer(PeerId("nobody", 1))
    writer.transport.write(writer.job(2, target, [1], [1]))
    driver.until(lambda: len(writer.ends()) == 2)
    errors = {e.job_id: e.error for e in writer.ends() if isinstance(e, WriteFailed) and e.drained}
    assert isinstance(errors[1], AbortedError)
    assert isinstance(errors[2], PeerLostError)
    writer.add(target)
    after = expected(writer, target, [2], [3])
    driver.end(writer, writer.job(3, target, [2], [3]))
    assert target.pool.pages() == after
    assert not writer.of(PeerUnreachable)


def test_a_peer_of_another_model_is_unreachable(driver: Driver) -> None:
    writer, target = driver.pair()
    other = driver.node("other", shape=Shape(head_dim=16))
    writer.add(other)
    event = driver.unreachable(writer)
    assert event.peer == other.me
    assert isinstance(event.error, HandshakeError)
    assert event.error.field == "head_dim"
    writer.transport.write(writer.job(1, other, [0], [0]))
    writer.transport.write(writer.job(2, target, [0], [0]))
    driver.until(lambda: len(writer.ends()) == 2)
    writer.drained(1, error=HandshakeError)
    assert isinstance(writer.ends(2)[0], WriteDone)


def test_metadata_of_another_peer_does_no_harm(driver: Driver) -> None:
    writer, target = driver.pair()
    liar = driver.node("liar")
    driver.end(writer, writer.job(1, target, [0], [0]))
    writer.transport.add_peer(liar.me, target.transport.metadata, PeerMemory(liar.pool.layout))
    writer.transport.add_peer(PeerId("garbage", 1), b"\x00garbage", PeerMemory(liar.pool.layout))
    # NIXL would forget the peer whose name such metadata carries
    writer.transport.add_peer(
        PeerId("cut", 1), target.transport.metadata[:-10], PeerMemory(liar.pool.layout)
    )
    driver.until(lambda: len(writer.of(PeerUnreachable)) == 3)
    assert {e.peer.name for e in writer.of(PeerUnreachable)} == {"liar", "garbage", "cut"}
    after = expected(writer, target, [4], [5])
    driver.done(writer, writer.job(2, target, [4], [5]))
    assert target.pool.pages() == after
    assert len(writer.of(PeerUnreachable)) == 3
    writer.add(liar)  # with its own metadata it is welcome
    liar.transport.expect(1)
    driver.end(writer, writer.job(3, liar, [4], [5]))
    assert liar.pool.page(5) == writer.pool.page(4)


def test_settle_is_answered_with_its_token_also_when_nothing_is_expected(driver: Driver) -> None:
    writer, target = driver.pair()
    target.transport.expect(0)
    for node in (writer, target):
        node.transport.settle(("a", 1), 0.001)
        node.transport.settle("b", 0.0)
    driver.until(lambda: all(len(node.of(Settled)) == 2 for node in (writer, target)))
    assert {event.token for event in target.of(Settled)} == {("a", 1), "b"}


def test_a_renewal_that_nothing_calls_for_changes_nothing(driver: Driver) -> None:
    writer, target = driver.pair()
    writer.transport.renew()
    for job_id in (1, 2):
        writer.transport.write(writer.job(job_id, target, [job_id], [job_id]))
        driver.until(lambda n=job_id: writer.ends(n))
        assert isinstance(writer.ends(job_id)[0], WriteDone)
        writer.transport.renew()
    assert not writer.of(WriteDrained)


def test_close_ends_what_is_left_and_may_be_called_again(driver: Driver) -> None:
    writer, target = driver.pair()
    gate = Gate(driver)
    writer.transport.write(writer.job(1, target, [0], [0], ready=gate))
    writer.transport.close()
    writer.drained(error=ClosedError)
    writer.transport.close()
    with pytest.raises(ClosedError):
        writer.transport.write(writer.job(2, target, [0], [0]))
    with pytest.raises(ClosedError):
        writer.transport.expect(1)
    with pytest.raises(ClosedError):
        writer.add(target)
    writer.transport.cancel(1)
    writer.transport.remove_peer(target.me)
    assert len(writer.events) == 1
