"""The thread of a transport: where it does not start, what its sink does, how it ends; how long it
sleeps between polls that found nothing, and what leaves when at a rate of bytes."""

import os
import threading
import time
from typing import Any

import msgspec
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import (
    AbortedError,
    CallerError,
    ConfigError,
    InternalError,
    TransferError,
    TransferTimeoutError,
)
from prefixkv.memory.kv_layout import RelayArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.transport import loop as transport_loop
from prefixkv.transport.base import RankMemory, Settled, WriteDone, WriteFailed
from prefixkv.transport.loop import Pace
from prefixkv.transport.nixl.loop import NixlTransport, pause_s
from prefixkv.transport.shm.loop import ShmTransport
from tests.support.patience import PATIENCE_S, until
from tests.support.transport_driver import NUM_PAGES, Driver, FakeDriver
from tests.support.transport_pools import Shape, make_pool, shared_zeros

Kind = type[NixlTransport | ShmTransport]
kinds = pytest.mark.parametrize("kind", [NixlTransport, ShmTransport])


def a_memory() -> RankMemory:
    pool = make_pool("layer_major", 4, zeros=shared_zeros)
    memories.append(pool)  # a layout is addresses only
    return RankMemory(pool.layout)


memories: list[Any] = []


@kinds
def test_a_sink_that_raises_hears_what_comes_later_and_may_not_close(kind: Kind) -> None:
    errors: list[Exception] = []
    heard: list[Any] = []

    def careless(event: Any) -> None:
        heard.append(event)
        try:
            transport.close()
        except CallerError as error:
            errors.append(error)
        raise SystemExit("a broken sink")

    transport = kind(PeerId("careless", 1), a_memory(), careless)
    for token in "ab":
        transport.settle(token, 0.0)
        until(lambda token=token: Settled(token) in heard)
    assert len(errors) == 2
    transport.close()


def test_a_thread_that_does_not_end_is_said_and_closed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_loop, "CLOSE_TIMEOUT_S", 0.05)
    inside, go_on = threading.Event(), threading.Event()

    def sink(event: Any) -> None:
        inside.set()
        go_on.wait(PATIENCE_S)

    transport = ShmTransport(PeerId("slow", 1), a_memory(), sink)
    transport.settle("a", 0.0)
    assert inside.wait(PATIENCE_S)
    with pytest.raises(InternalError, match="has not ended"):
        transport.close()
    go_on.set()
    monkeypatch.setattr(transport_loop, "CLOSE_TIMEOUT_S", PATIENCE_S)
    transport.close()


@kinds
@pytest.mark.parametrize("what", ["layout", "relay", "state"])
def test_memory_that_breaks_its_laws_is_refused(kind: Kind, what: str) -> None:
    good = a_memory()
    wrong: dict[str, Any] = {
        "layout": msgspec.structs.replace(good.layout, num_pages=5),
        "relay": RelayArea(4096, 4096, 4097),
        "state": StateLayout(0, (), ()),
    }
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        kind(PeerId("d", 1), good._replace(**{what: wrong[what]}), lambda event: None)
    assert set(os.listdir("/proc/self/fd")) == before


@kinds
def test_a_thread_that_cannot_be_made_leaves_no_descriptor(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = a_memory()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="new thread"):
        kind(PeerId("threadless", 1), memory, lambda event: None)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_nixl_thread_that_starts_too_late_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_loop, "_START_TIMEOUT_S", 0.0)
    with pytest.raises(TransferTimeoutError, match="did not start"):
        NixlTransport(PeerId("late", 1), a_memory(), lambda event: None)
    until(lambda: not [one for one in threading.enumerate() if one.name.endswith("-late")])


def test_a_start_that_is_interrupted_ends_at_once_and_its_thread_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(transport_loop.Future[bytes]):
        def result(self, timeout: float | None = None) -> bytes:
            super().result(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr(transport_loop, "CLOSE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(transport_loop, "Future", Interrupted)
    memory, before = a_memory(), set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        ShmTransport(PeerId("stopped", 1), memory, lambda event: None)
    assert not [one for one in threading.enumerate() if one.name.endswith("-stopped")]
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_loop_that_says_a_timeout_has_not_started_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*args: Any) -> Any:
        raise TimeoutError("the card does not answer")

    monkeypatch.setattr(ShmTransport, "loop_type", late)
    memory, before = a_memory(), set(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError, match="TimeoutError: the card"):
        ShmTransport(PeerId("d", 1), memory, lambda event: None)
    assert set(os.listdir("/proc/self/fd")) == before


CONFIG = TransportConfig(polling=5)  # 250 us, 150 us, 1 ms


@pytest.mark.parametrize(
    ("quiet_s", "sending", "receiving"),
    [
        (0.0, 0.0, 0.0),
        (0.0002, 0.0, 0.0),
        (0.0015, 0.00015, 0.00015),
        (0.016, 0.001, 0.001),
        (0.064, 0.001, 0.002),
        (0.8, 0.001, 0.025),
        (10.24, 0.01, 0.025),
        (60.0, 0.025, 0.025),
    ],
)
def test_it_sleeps_longer_the_longer_it_is_quiet_and_sooner_where_it_only_receives(
    quiet_s, sending, receiving
):
    assert pause_s(CONFIG, quiet_s, sending=True) == pytest.approx(sending)
    assert pause_s(CONFIG, quiet_s, sending=False) == pytest.approx(receiving)


def test_polling_of_0_never_sleeps():
    config = TransportConfig(polling=0)
    assert pause_s(config, 60.0, sending=False) == 0.0


RATE = 4 << 20  # bytes a second; a slice is 64 KiB
SLICE = 64 << 10
LARGE = Shape(head_dim=1024)


@pytest.fixture
def paced(driver: Driver) -> Driver:
    """The fake has no time, so it has no rate."""
    if isinstance(driver, FakeDriver):
        pytest.skip("the fake has no rate")
    return driver


def test_without_a_rate_everything_may_go() -> None:
    pace = Pace(0)
    assert pace.part_bytes(8 << 20) == 8 << 20
    pace.spend(1 << 40, 1.0)
    assert pace.wait_s(1.0) == 0.0


def test_the_mean_is_the_rate_whatever_the_parts() -> None:
    """Parts go as soon as they may: what has gone by any time is the rate's, a slice and a part."""
    for part in (1, 1000, SLICE, 10 * SLICE):
        pace, now, sent = Pace(RATE), 5.0, 0
        begun = now
        for _ in range(200):
            now += pace.wait_s(now)
            pace.spend(part, now)
            sent += part
            assert sent <= RATE * (now - begun) + SLICE + part + 1
        # Nor is it slower than that: the debt is paid at the rate.
        assert sent >= RATE * (now - begun)


def test_quiet_time_is_saved_up_as_one_slice_only() -> None:
    pace = Pace(RATE)
    pace.spend(SLICE, 0.0)
    assert pace.wait_s(0.0) == 0.0  # the bucket is empty, not in debt
    pace.spend(SLICE, 1000.0)
    pace.spend(SLICE, 1000.0)
    assert pace.wait_s(1000.0) == pytest.approx(SLICE / RATE)


def test_parts_are_as_large_as_a_slice_at_most() -> None:
    assert Pace(RATE).part_bytes(8 << 20) == SLICE
    assert Pace(RATE).part_bytes(1000) == 1000
    assert Pace(10**9).part_bytes(8 << 20) == 2 * 10**6


def test_no_byte_leaves_before_the_rate_allows_it(paced: Driver) -> None:
    writer, target = paced.pair(shape=LARGE, config=TransportConfig(max_bytes_per_s=RATE))
    pages = list(range(20))
    after = [writer.pool.page(page) for page in pages]
    begun = time.monotonic()
    writer.transport.write(writer.job(1, target, pages, pages))
    paced.until(writer.ends)
    took_s = time.monotonic() - begun
    num_bytes = len(pages) * writer.pool.layout.page_bytes
    assert writer.ends() == [WriteDone(1, num_bytes)]
    assert [target.pool.page(page) for page in pages] == after
    part = SLICE + writer.pool.layout.page_bytes
    assert num_bytes > 4 * part  # else the next line says nothing
    assert took_s >= (num_bytes - SLICE - part) / RATE


@pytest.mark.slow
def test_peers_take_turns_at_a_rate(paced: Driver) -> None:
    """Both have parts left all the time, so neither may be a few parts ahead."""
    writer, one = paced.pair(shape=LARGE, config=TransportConfig(max_bytes_per_s=RATE))
    two = paced.node("decode-2", "heads_first", shape=LARGE)
    writer.add(two)
    two.transport.expect(1)
    for number, target in ((1, one), (2, two)):  # connected both, from here on
        writer.transport.write(writer.job(number, target, [0], [0]))
    paced.until(lambda: len(writer.ends()) == 2)
    pages = list(range(NUM_PAGES))
    for number, target in ((3, one), (4, two)):
        writer.transport.write(writer.job(number, target, pages, pages))
    paced.until(lambda: writer.ends(3, 4))
    (first,) = writer.ends(3, 4)[:1]
    behind, room = (two, 4) if first.job_id == 3 else (one, 3)
    arrived = [tag for tag in behind.tags() if tag.room == room]
    # A peer that was served only once the other had no parts left would have one or none of 12.
    assert len(arrived) >= 6
    paced.until(lambda: len(writer.ends()) == 4)


def test_a_job_that_waits_for_the_rate_is_cancelled_at_once(paced: Driver) -> None:
    """At one byte a second its second part would go in a day."""
    writer, target = paced.pair(shape=LARGE, config=TransportConfig(max_bytes_per_s=1))
    pages = list(range(20))
    writer.transport.write(writer.job(1, target, pages, pages))
    writer.transport.write(writer.job(2, target, pages, pages, room=2))
    paced.until(lambda: target.tags())
    writer.transport.cancel(1)
    writer.transport.cancel(2)
    paced.until(lambda: len(writer.ends()) == 2)
    for end in writer.ends():
        assert isinstance(end, WriteFailed)
        assert isinstance(end.error, AbortedError)
        assert end.drained
    # Closing does not wait for the rate either: the fixture does it.
