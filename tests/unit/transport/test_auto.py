"""Which of the two transports writes to a peer: shm where its memory can be mapped, else NIXL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import (
    AbortedError,
    CallerError,
    ClosedError,
    ConfigError,
    HandshakeError,
    InternalError,
    PeerLostError,
)
from prefixkv.memory.mesh import Shard
from prefixkv.protocol.ids import PeerId
from prefixkv.transport import auto
from prefixkv.transport.base import PeerUnreachable, Settled, WriteDone, WriteFailed
from prefixkv.transport.offers import MetadataOffers, split_offers, usable
from prefixkv.transport.shm.copy import CopyPlan
from prefixkv.transport.shm.wire import MAGIC, ShmOffer, pack_offer
from tests.support.patience import until
from tests.support.transport_driver import AutoDriver, Node
from tests.support.transport_pools import make_pool

NIXL, SHM = b"nixlSerDes|x", MAGIC + b"y"


@pytest.fixture
def driver() -> Iterator[AutoDriver]:
    made = AutoDriver(shared=True)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each part that shm copies."""
    found: list[int] = []
    copy = CopyPlan.copy

    def counted(plan, part, src, dst):  # type: ignore[no-untyped-def]
        found.append(part.num_bytes)
        copy(plan, part, src, dst)

    monkeypatch.setattr(CopyPlan, "copy", counted)
    return found


def changed(target: Node, **fields: object) -> bytes:
    """The target's metadata, with another offer of shm."""
    offers = split_offers(target.transport.metadata)
    offer = msgspec.msgpack.decode(offers.shm[len(MAGIC) :], type=ShmOffer)
    return offers._replace(shm=pack_offer(msgspec.structs.replace(offer, **fields))).join()


def test_shm_is_taken_where_both_can(driver: AutoDriver, copies: list[int]) -> None:
    writer, target = driver.pair()
    writer.transport.write(writer.job(1, target, [1, 2], [3, 4]))
    driver.until(lambda: writer.ends(1) and target.tags())
    assert writer.ends(1) == [WriteDone(1, 2 * writer.pool.layout.page_bytes)]
    assert sum(copies) == 2 * writer.pool.layout.page_bytes


@pytest.mark.parametrize("fields", [{"boot": "another"}, {"door": "nobody"}, {"token": bytes(32)}])
def test_nixl_is_taken_where_the_memory_cannot_be_mapped(
    driver: AutoDriver, copies: list[int], fields: dict[str, object]
) -> None:
    writer, target = driver.node("prefill"), driver.node("decode")
    target.transport.expect(1)
    writer.transport.add_peer(target.me, changed(target, **fields), target.pool.layout)
    for number in range(5):
        job = writer.job(number, target, [number], [number + 7], room=1)
        writer.transport.write(job)
    driver.until(lambda: len(writer.ends()) == 5 and target.tags())
    assert sorted(end.job_id for end in writer.ends()) == list(range(5))
    assert all(isinstance(end, WriteDone) for end in writer.ends())
    assert target.pool.pages()[7:12] == writer.pool.pages()[:5]
    assert copies == []
    assert not writer.of(PeerUnreachable)


def test_shm_alone_is_refused_where_it_cannot_be_mapped(driver: AutoDriver) -> None:
    writer, target = driver.node("prefill"), driver.node("decode")
    alone = split_offers(changed(target, boot="another")).shm
    writer.transport.add_peer(target.me, alone, target.pool.layout)
    driver.until(lambda: writer.of(PeerUnreachable))
    (event,) = writer.of(PeerUnreachable)
    assert event.error.field == "boot"
    writer.transport.write(writer.job(1, target, [1], [1]))
    driver.until(lambda: writer.ends(1))
    (failed,) = writer.ends(1)
    assert isinstance(failed, WriteFailed)
    assert failed.drained


def test_a_job_that_waits_for_its_transport_can_be_cancelled(driver: AutoDriver) -> None:
    writer, target = driver.node("prefill"), driver.node("decode")
    before = target.pool.pages()
    reports = driver.halves(writer).reports
    reports.keep = True
    writer.add(target)
    writer.transport.write(writer.job(1, target, [1], [1]))
    writer.transport.write(writer.job(2, target, [2], [2]))
    writer.transport.cancel(1)
    driver.until(lambda: writer.ends(1))
    (failed,) = writer.ends(1)
    assert isinstance(failed, WriteFailed)
    assert failed.drained
    assert isinstance(failed.error, AbortedError)
    until(lambda: reports.all)
    assert not writer.ends(2)
    reports.pass_on(*reports.all[0])
    driver.until(lambda: writer.ends(2))
    assert target.pool.pages() == [*before[:2], writer.pool.page(2), *before[3:]]


@pytest.fixture
def unmet(driver: AutoDriver) -> tuple[Node, Node, list[Any], Any]:
    """Writer, target, and what shm has to say of the target, which the writer is told only by a
    call of the last."""
    writer, target = driver.node("prefill"), driver.node("decode")
    reports = driver.halves(writer).reports
    reports.keep = True
    writer.add(target)
    return writer, target, reports.all, reports.pass_on


def test_a_job_that_waits_for_its_transport_ends_with_its_peer(
    driver: AutoDriver, unmet: tuple[Node, Node, list[Any], Any]
) -> None:
    writer, target, held, met = unmet
    before = target.pool.pages()
    until(lambda: held)
    writer.transport.write(writer.job(1, target, [1], [1]))
    writer.transport.remove_peer(target.me)
    driver.until(lambda: writer.ends(1))
    assert [(type(end.error), end.drained) for end in writer.ends(1)] == [(AbortedError, True)]
    assert met(*held[0]) is False
    assert target.pool.pages() == before


def test_a_job_that_waits_for_its_transport_fails_where_the_memory_has_changed(
    driver: AutoDriver, unmet: tuple[Node, Node, list[Any], Any]
) -> None:
    writer, target, held, met = unmet
    until(lambda: held)
    writer.transport.write(writer.job(1, target, [1], [1]))
    half = Shard(0, 1, 0, 2)
    writer.add(target, parts=(half, half))
    driver.until(lambda: writer.ends(1))
    assert [(type(end.error), end.drained) for end in writer.ends(1)] == [(PeerLostError, True)]
    until(lambda: len(held) == 2)
    met(*held[1])
    writer.transport.write(writer.job(2, target, [1], [1]))
    driver.until(lambda: writer.ends(2))
    assert writer.ends(2) == [WriteDone(2, writer.pool.layout.page_bytes // 2)]


def test_a_job_that_waits_for_its_transport_goes_on_with_new_metadata(
    driver: AutoDriver, unmet: tuple[Node, Node, list[Any], Any]
) -> None:
    writer, target, held, met = unmet
    target.transport.expect(1)  # NIXL's own connection needs both sides to be at it
    writer.transport.write(writer.job(1, target, [1], [1]))
    until(lambda: held)
    writer.transport.add_peer(target.me, changed(target, door="nobody"), target.pool.layout)
    until(lambda: len(held) == 2)
    assert not writer.ends()
    assert met(*held[1]) is True
    driver.until(lambda: writer.ends(1))
    assert writer.ends(1) == [WriteDone(1, writer.pool.layout.page_bytes)]
    assert target.pool.page(1) == writer.pool.page(1)


def test_a_job_that_waits_for_its_transport_ends_when_that_closes(
    unmet: tuple[Node, Node, list[Any], Any],
) -> None:
    writer, target, _, _ = unmet
    writer.transport.write(writer.job(1, target, [1], [1]))
    writer.transport.close()
    assert [(type(end.error), end.drained) for end in writer.ends(1)] == [(ClosedError, True)]
    assert not [t.name for t in threading.enumerate() if t.name.endswith(f"-{writer.me.name}")]


def test_a_removed_peers_memory_is_given_back(driver: AutoDriver) -> None:
    writer, target = driver.pair()
    writer.transport.write(writer.job(1, target, [1], [1]))
    driver.until(lambda: writer.ends(1))
    mapped = num_mappings()
    writer.transport.remove_peer(target.me)
    until(lambda: num_mappings() < mapped)
    writer.transport.write(writer.job(2, target, [2], [2]))
    driver.until(lambda: writer.ends(2))
    assert [(type(end.error), end.drained) for end in writer.ends(2)] == [(PeerLostError, True)]


def num_mappings() -> int:
    """How many blocks of shared memory are mapped in this process, those of both sides."""
    return Path("/proc/self/maps").read_text().count("memfd:prefixkv")


@pytest.mark.parametrize("end", ["settled", "closed"])
def test_what_is_settled_or_closed_is_not_settled_again(
    unmet: tuple[Node, Node, list[Any], Any], end: str
) -> None:
    """Also where shm cannot reach the peer again: it stays with its way."""
    writer, target, held, met = unmet
    until(lambda: held)
    if end == "settled":
        assert met(target.me, None) is False
        assert met(target.me, OSError("gone")) is False
        assert writer.transport._peers[target.me].backend == "shm"
    else:
        writer.transport.close()
        assert met(target.me, OSError("gone")) is False
        assert writer.transport._peers[target.me].backend is None


def test_where_shm_does_not_end_nixl_is_closed_and_a_job_ends_once(
    driver: AutoDriver, unmet: tuple[Node, Node, list[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, target, _, _ = unmet
    writer.transport.write(writer.job(1, target, [1], [1]))

    def stuck() -> None:
        raise InternalError("still in a copy")

    with monkeypatch.context() as patched:
        patched.setattr(driver.halves(writer).shm, "close", stuck)
        for _ in range(2):
            with pytest.raises(InternalError, match="still in a copy"):
                writer.transport.close()
    with pytest.raises(ClosedError):
        driver.halves(writer).nixl.expect(1)
    writer.transport.close()
    assert [type(end.error) for end in writer.ends(1)] == [ClosedError]


def test_a_peer_keeps_its_transport(driver: AutoDriver, copies: list[int]) -> None:
    writer, target = driver.node("prefill"), driver.node("decode")
    target.transport.expect(1)
    writer.transport.add_peer(target.me, changed(target, door="nobody"), target.pool.layout)
    writer.transport.write(writer.job(1, target, [1], [1]))
    driver.until(lambda: writer.ends(1))
    writer.add(target)
    writer.transport.write(writer.job(2, target, [2], [2]))
    driver.until(lambda: writer.ends(2))
    assert len(driver.halves(writer).reports.all) == 1, "shm does not try again"
    assert isinstance(writer.ends(2)[0], WriteDone)
    assert copies == []


def test_settled_is_said_when_both_have(driver: AutoDriver) -> None:
    target = driver.node("decode")
    asked: list[str] = []
    for name in ("shm", "nixl"):
        transport = getattr(driver.halves(target), name)
        settle = transport.settle

        def told(*args: Any, name: str = name, settle: Any = settle) -> None:
            asked.append(name)
            settle(*args)

        transport.settle = told
    began_s = time.monotonic()
    target.transport.settle("a", 0.05)
    driver.until(lambda: target.of(Settled))
    assert target.of(Settled) == [Settled("a")]
    assert time.monotonic() - began_s >= 0.04  # what NIXL polls for, but for a gap before it
    assert asked == ["shm", "nixl"]


def test_the_sink_is_called_by_one_thread_at_a_time(driver: AutoDriver) -> None:
    target = driver.node("decode")
    inside, twice = threading.Lock(), []

    def sink(event: Any) -> None:
        if not inside.acquire(blocking=False):
            twice.append(event)
            return
        time.sleep(1e-4)
        inside.release()
        target.events.append(event)

    target.hear = sink
    halves = driver.halves(target)
    for number in range(200):
        halves.shm.say(Settled(number))
        halves.nixl.settle(number, 0.0)
    until(lambda: len(target.events) + len(twice) == 400)
    assert twice == []


@pytest.mark.parametrize("by", ["shm", "nixl"])
def test_close_from_the_sink_is_refused_and_the_transport_goes_on(
    driver: AutoDriver, by: str
) -> None:
    writer, target = driver.pair()
    hear, errors = writer.hear, []

    def closing(event: Any) -> None:
        if event == Settled("x"):
            try:
                writer.transport.close()
            except CallerError as error:
                errors.append(error)
        hear(event)

    writer.hear = closing
    if by == "shm":
        driver.halves(writer).shm.say(Settled("x"))
    else:
        driver.halves(writer).nixl.settle("x", 0.0)
    driver.until(lambda: writer.of(Settled))
    assert len(errors) == 1
    until(lambda: writer.transport._sink_thread is None)
    writer.transport.write(writer.job(1, target, [1], [1]))
    driver.until(lambda: writer.ends(1))
    assert isinstance(writer.ends(1)[0], WriteDone)


def test_renew_is_nixls(driver: AutoDriver) -> None:
    """No write of shm ends undrained."""
    node, asked = driver.node("prefill"), []
    driver.halves(node).nixl.renew = lambda: asked.append("renew")
    node.transport.renew()
    assert asked == ["renew"]


def test_where_shm_cannot_start_nixl_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoShm:
        def __init__(self, *args: Any, **more: Any) -> None:
            raise ConfigError("no such sockets")

    monkeypatch.setattr(auto, "ShmTransport", NoShm)
    pool = make_pool("layer_major", 4)
    with pytest.raises(ConfigError, match="no such sockets"):
        auto.AutoTransport(PeerId("unlucky", 1), pool.layout, lambda event: None)
    assert not [t.name for t in threading.enumerate() if t.name.endswith("-unlucky")]


# --- offers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offers", [MetadataOffers(NIXL, b""), MetadataOffers(b"", SHM), MetadataOffers(NIXL, SHM)]
)
def test_offers_come_out_as_they_went_in(offers: MetadataOffers) -> None:
    assert split_offers(offers.join()) == offers
    assert MetadataOffers(NIXL, b"").join() == NIXL  # an older transport's metadata is what it was


@pytest.mark.parametrize(
    ("backend", "offers", "taken"),
    [
        ("nixl", MetadataOffers(NIXL, SHM), NIXL),
        ("shm", MetadataOffers(NIXL, SHM), SHM),
        ("auto", MetadataOffers(NIXL, b""), NIXL),
        ("auto", MetadataOffers(b"", SHM), SHM),
        ("auto", MetadataOffers(NIXL, SHM), MetadataOffers(NIXL, SHM).join()),
    ],
)
def test_a_side_takes_what_it_can(backend: str, offers: MetadataOffers, taken: bytes) -> None:
    assert usable(backend, offers) == taken  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "offers", "theirs"),
    [("nixl", MetadataOffers(b"", SHM), "shm"), ("shm", MetadataOffers(NIXL, b""), "nixl")],
)
def test_two_that_share_no_transport_are_told_so(
    backend: str, offers: MetadataOffers, theirs: str
) -> None:
    with pytest.raises(HandshakeError, match="transport backend") as caught:
        usable(backend, offers)  # type: ignore[arg-type]
    assert (caught.value.ours, caught.value.theirs) == (backend, theirs)


# --- settings -------------------------------------------------------------------------------------


def test_another_backend_is_an_error() -> None:
    with pytest.raises(ConfigError, match="backend"):
        TransportConfig(backend="tcp")  # type: ignore[arg-type]
