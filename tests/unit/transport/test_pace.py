"""A transport that sends at most so many bytes a second: what leaves when, and who is next."""

from __future__ import annotations

import time

import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError
from prefixkv.transport.base import WriteDone, WriteFailed
from prefixkv.transport.loop import Pace
from tests.support.transport_driver import NUM_PAGES, Driver, FakeDriver
from tests.support.transport_pools import Shape

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
