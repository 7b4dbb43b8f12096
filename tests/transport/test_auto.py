"""Which of the two transports writes to a peer: shm where its memory can be mapped, else NIXL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError, ConfigError, HandshakeError
from prefixkv.transport import nixl_agent
from prefixkv.transport.base import PeerUnreachable, WriteDone, WriteFailed
from prefixkv.transport.offers import Offers, split_offers, usable
from prefixkv.transport.shm_copy import CopyPlan
from prefixkv.transport.shm_wire import MAGIC, Offer, pack_offer
from tests.models.patience import until
from tests.models.transport_driver import AutoDriver, NixlDriver, Node

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
    offer = msgspec.msgpack.decode(offers.shm[len(MAGIC) :], type=Offer)
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
    assert [end.job_id for end in writer.ends()] == list(range(5))
    assert all(isinstance(end, WriteDone) for end in writer.ends())
    assert target.pool.pages()[7:12] == writer.pool.pages()[:5]
    assert copies == []
    assert not writer.of(PeerUnreachable)


def test_shm_alone_is_refused_where_it_cannot_be_mapped(driver: AutoDriver) -> None:
    writer, target = driver.node("prefill"), driver.node("decode")
    alone = split_offers(changed(target, boot="another")).shm
    writer.transport.add_peer(target.me, alone, target.pool.layout)
    driver.until(lambda: writer.of(PeerUnreachable))
    writer.transport.write(writer.job(1, target, [1], [1]))
    driver.until(lambda: writer.ends(1))
    (failed,) = writer.ends(1)
    assert isinstance(failed, WriteFailed)
    assert failed.drained


def test_a_job_that_waits_for_the_way_can_be_cancelled(driver: AutoDriver) -> None:
    writer, target = driver.node("prefill"), driver.node("decode")
    before = target.pool.pages()
    shm = writer.transport._shm
    met, held = writer.transport._met, []
    shm._loop._met = lambda peer, error: held.append((peer, error)) or False
    writer.add(target)
    writer.transport.write(writer.job(1, target, [1], [1]))
    writer.transport.write(writer.job(2, target, [2], [2]))
    writer.transport.cancel(1)
    driver.until(lambda: writer.ends(1))
    (failed,) = writer.ends(1)
    assert isinstance(failed, WriteFailed)
    assert failed.drained
    assert isinstance(failed.error, AbortedError)
    until(lambda: held)
    assert not writer.ends(2)
    met(*held[0])
    driver.until(lambda: writer.ends(2))
    assert target.pool.pages() == [*before[:2], writer.pool.page(2), *before[3:]]


# --- offers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offers", [Offers(NIXL, b""), Offers(b"", SHM), Offers(NIXL, SHM)])
def test_offers_come_out_as_they_went_in(offers: Offers) -> None:
    assert split_offers(offers.join()) == offers
    assert Offers(NIXL, b"").join() == NIXL  # an older transport's metadata is what it was


@pytest.mark.parametrize(
    ("backend", "offers", "taken"),
    [
        ("nixl", Offers(NIXL, SHM), NIXL),
        ("shm", Offers(NIXL, SHM), SHM),
        ("auto", Offers(NIXL, b""), NIXL),
        ("auto", Offers(b"", SHM), SHM),
        ("auto", Offers(NIXL, SHM), Offers(NIXL, SHM).join()),
    ],
)
def test_a_side_takes_what_it_can(backend: str, offers: Offers, taken: bytes) -> None:
    assert usable(backend, offers) == taken  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "offers", "theirs"),
    [("nixl", Offers(b"", SHM), "shm"), ("shm", Offers(NIXL, b""), "nixl")],
)
def test_two_that_share_no_transport_are_told_so(backend: str, offers: Offers, theirs: str) -> None:
    with pytest.raises(HandshakeError, match="transport backend") as caught:
        usable(backend, offers)  # type: ignore[arg-type]
    assert (caught.value.ours, caught.value.theirs) == (backend, theirs)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("POSIX",), ("UCX", "UCX"), ["UCX"], ("UCX", 7)])
def test_backends_of_nixl_begin_with_ucx(names: object) -> None:
    with pytest.raises(ConfigError, match="nixl_backends"):
        TransportConfig(nixl_backends=names)  # type: ignore[arg-type]


def test_another_backend_is_an_error() -> None:
    with pytest.raises(ConfigError, match="backend"):
        TransportConfig(backend="tcp")  # type: ignore[arg-type]


def test_nixl_is_made_with_more_backends_than_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """POSIX registers the memory too, and the write goes by UCX as before."""
    made: list[str] = []
    create = nixl_agent.nixl_api.nixl_agent.create_backend

    def create_backend(agent: Any, name: str, options: Any) -> Any:
        made.append(name)
        return create(agent, name, options)

    monkeypatch.setattr(nixl_agent.nixl_api.nixl_agent, "create_backend", create_backend)
    driver = NixlDriver()
    try:
        writer, target = driver.pair(config=TransportConfig(nixl_backends=("UCX", "POSIX")))
        writer.transport.write(writer.job(1, target, [1], [2]))
        driver.until(lambda: writer.ends(1))
        assert made == ["UCX", "POSIX"] * 2
        assert isinstance(writer.ends(1)[0], WriteDone)
        assert target.pool.page(2) == writer.pool.page(1)
    finally:
        driver.close()
