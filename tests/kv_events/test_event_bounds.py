"""What those who reach the ports of cache events can make a worker hold. A publisher in a process
of its own is attacked, and its memory is read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tests.kv_events.follower import Subscriber
from tests.models.patience import PATIENCE_S, until
from tests.models.processes import Child, children, obey
from tests.models.strangers import EMPTY_PART, Memory, flood, many_descriptors, part, stranger

MIB = 1 << 20
PAGE_SIZE = 4
QUEUE_BYTES = 16 * MIB
MOST_PAGES = 60_000
NAMES = ("endpoint", "replay_endpoint", "snapshot_endpoint")


class _Served:
    """What a call on the pipe may call, in the child."""

    def __init__(self) -> None:
        from tests.kv_events.test_publisher import Worker

        self.worker = Worker(queue_bytes=QUEUE_BYTES, keep_bytes=MIB)
        self._seeds = itertools.count()
        self.closed = False

    def insert(self, num_pages: int) -> None:
        """Pages that take the place of others."""
        self.worker.insert(next(self._seeds), num_pages)
        self.worker.cache.evict(max(0, self.worker.cache.num_pages - MOST_PAGES))
        self.worker.feed.pass_on()
        self.worker.published()

    def num_pages(self) -> int:
        return int(self.worker.cache.num_pages)

    def stats(self) -> dict[str, int]:
        return dict(self.worker.publisher.stats())

    def close(self) -> None:
        self.worker.close()
        self.closed = True


def _serve(pipe: Any) -> None:
    served = _Served()
    pipe.send({name: getattr(served.worker.publisher, name) for name in NAMES})
    obey(pipe, served)


class Publishing(Child):
    """The test's end."""

    def __init__(self) -> None:
        super().__init__(_serve)
        self.ports = SimpleNamespace(**self.hello)

    def follows(self) -> None:
        """One that comes new is given all there is, and what comes then."""
        with closing(Subscriber(self.ports, PAGE_SIZE)) as subscriber:
            subscriber.event()
            number, _, payload = subscriber.snapshot()
            subscriber.follower.restart(number, payload)
            assert len(subscriber.follower.blocks) == self.call("num_pages")

    def cuts(self, why: str = "") -> int:
        stats = self.call("stats").items()
        return sum(num for name, num in stats if name.startswith(f"connections_cut: {why}"))


@pytest.fixture(scope="module")
def publishing() -> Iterator[Publishing]:
    with children(Publishing) as start:
        made = start()
        made.call("insert", 100)
        made.follows()
        yield made
        made.call("close")


def subscription(size: int, number: int) -> bytes:
    raw = b"\x01" + number.to_bytes(8) * (size // 8)
    return bytes([2]) + len(raw).to_bytes(8) + raw


@pytest.mark.parametrize(
    "chunk",
    [
        b"".join(subscription(904, number) for number in range(100)),
        b"".join(bytes([0, 5, 1]) + number.to_bytes(4) for number in range(20_000)),
        EMPTY_PART * 50_000,
        part(900),
    ],
    ids=["long", "short", "empty parts", "an endless message"],
)
@pytest.mark.parametrize("num", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_subscriptions(publishing: Publishing, chunk: bytes, num: int) -> None:
    memory = Memory(publishing.pid)
    with flood(lambda: stranger(publishing.ports.endpoint, b"SUB"), chunk, num) as attack:
        time.sleep(1.0)
        publishing.follows()
        # How soon a bound is reached depends on what else the machine does.
        until(lambda: attack.num_cut, pause_s=0.05)
    assert memory.grown() < 96 * MIB
    publishing.follows()


@pytest.mark.slow
def test_subscriptions_of_many_that_stay(publishing: Publishing) -> None:
    many_descriptors(4096)
    memory, before = Memory(publishing.pid), publishing.cuts()
    few = b"".join(subscription(904, number) for number in range(30))
    with ExitStack() as stack:
        for _ in range(400):
            sock = stack.enter_context(stranger(publishing.ports.endpoint, b"SUB"))
            sock.sendall(few)
        publishing.follows()
        until(lambda: publishing.cuts() > before, pause_s=0.05)
        assert memory.grown() < 128 * MIB


@pytest.mark.parametrize("name", [NAMES[1], pytest.param(NAMES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [EMPTY_PART * 50_000, part(900)], ids=["empty parts", "parts"])
def test_requests_that_never_end(publishing: Publishing, name: str, chunk: bytes) -> None:
    memory = Memory(publishing.pid)
    with flood(lambda: stranger(getattr(publishing.ports, name)), chunk, 4) as attack:
        time.sleep(1.0)
        publishing.follows()
        until(lambda: attack.num_cut, pause_s=0.05)
    assert memory.grown() < 96 * MIB


def deaf(address: str, stack: ExitStack) -> zmq.Socket[bytes]:
    """A client that takes nothing from its kernel beyond a message."""
    sock = stack.enter_context(zmq.Context()).socket(zmq.DEALER)
    stack.callback(sock.close, linger=0)
    sock.setsockopt(zmq.RCVHWM, 1)
    sock.setsockopt(zmq.RCVBUF, 4096)
    sock.connect(address)
    return sock


@pytest.mark.slow
def test_snapshots_that_are_not_read(publishing: Publishing) -> None:
    publishing.call("insert", MOST_PAGES)  # a snapshot of megabytes
    memory = Memory(publishing.pid)
    with ExitStack() as stack:
        clients = [deaf(publishing.ports.snapshot_endpoint, stack) for _ in range(20)]
        for _ in range(20):
            for client in clients:
                client.send_multipart([b"", b"snapshot"])
            publishing.call("insert", 1)  # so that the next is another one
        time.sleep(1.0)
        assert memory.grown() < QUEUE_BYTES + 64 * MIB
        publishing.follows()  # when those that do not read have been cut


@pytest.mark.slow
def test_a_subscriber_that_does_not_read(publishing: Publishing) -> None:
    memory, cuts = Memory(publishing.pid), publishing.cuts("does not read")
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        sub = context.socket(zmq.SUB)
        stack.callback(sub.close, linger=0)
        sub.setsockopt(zmq.RCVHWM, 1)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(publishing.ports.endpoint)
        assert sub.poll(PATIENCE_S * 1000)
        before = publishing.call("stats")["bytes"]
        while publishing.call("stats")["bytes"] < before + 4 * QUEUE_BYTES:
            publishing.call("insert", MOST_PAGES)
        until(lambda: publishing.cuts("does not read") > cuts, pause_s=0.05)
    assert memory.grown() < 8 * QUEUE_BYTES  # with what making a batch takes
    publishing.follows()
