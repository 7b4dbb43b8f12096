"""The sockets: frames as vLLM has them, repeats, snapshots, and subscribers that behave badly."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from prefixkv.cache.radix_cache import RadixCache
from prefixkv.config import KVEventsConfig
from prefixkv.errors import ConfigError
from prefixkv.kv_events import publisher as publisher_module
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.protocol.ids import PeerId
from tests.support.patience import NEVER_S, PATIENCE_S, lasting_address, until
from tests.unit.kv_events.follower import END, Subscriber

PAGE_SIZE = 4
FREE = "tcp://127.0.0.1:*"
NAMES = ("endpoint", "replay_endpoint", "snapshot_endpoint")
LIFE = 0x1234


class Worker:
    """A tree, its feed and its publisher."""

    def __init__(self, life: int = LIFE, **config: Any) -> None:
        config = {**dict.fromkeys(NAMES, FREE), "heartbeat_s": 0.05, **config}
        self.cache = RadixCache(page_size=PAGE_SIZE)
        self.publisher = KVEventPublisher(
            KVEventsConfig(**config), PeerId("decode-0", life), "llama", PAGE_SIZE
        )
        self.publisher.tiers[0].listen(self.cache)
        self.num_pages = 0

    def insert(self, seed: int, num_pages: int = 3) -> None:
        """A path of its own for each seed."""
        tokens = np.random.default_rng(seed).integers(0, 1000, num_pages * PAGE_SIZE)
        pages = np.arange(self.num_pages, self.num_pages + num_pages, dtype=np.int32)
        self.num_pages += num_pages
        self.cache.insert(tokens, pages)
        self.publisher.tiers[0].pass_on()

    def prompt(self, seed: int, num_pages: int = 3) -> Any:
        return np.random.default_rng(seed).integers(0, 1000, num_pages * PAGE_SIZE)

    def published(self) -> int:
        """The number of a batch that comes after all that was handed over."""
        until(lambda: self.publisher.idle)
        return self.publisher._stream.next_seq

    def close(self) -> None:
        self.publisher.close()


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """make(Worker, ...) and make(Subscriber, ...): closed at the end, the last first."""
    with ExitStack() as stack:

        def make(kind: Any, *args: Any, **more: Any) -> Any:
            return stack.enter_context(closing(kind(*args, **more)))

        yield make
    assert "prefixkv-kv-events" not in [thread.name for thread in threading.enumerate()]


def told(make: Make, **config: Any) -> tuple[Worker, Subscriber]:
    worker = make(Worker, **config)
    return worker, make(Subscriber, worker.publisher, PAGE_SIZE)


@contextmanager
def standing_still(worker: Worker, seed: int = 1_000, num_pages: int = 3) -> Iterator[None]:
    """The publisher's thread is in the midst of telling of an insertion, and stays there."""
    worker.published()
    held, release = threading.Event(), threading.Event()
    event = worker.publisher.blocks.event

    def stuck(*told: Any) -> Any:
        held.set()
        release.wait()
        return event(*told)

    worker.publisher.blocks.event = stuck
    try:
        worker.insert(seed, num_pages)
        assert held.wait(PATIENCE_S)
        yield
    finally:
        worker.publisher.blocks.event = event
        release.set()


def agrees(worker: Worker, subscriber: Subscriber, seeds: range) -> None:
    subscriber.follow_until(worker.published())
    follower = subscriber.follower
    assert len(follower.blocks) == worker.cache.num_pages
    for seed in seeds:
        tokens = worker.prompt(seed)
        assert follower.matched(tokens) == worker.cache.match_prefix(tokens).prefix_len


def test_events_have_three_frames_and_dense_numbers(make: Make) -> None:
    worker, subscriber = told(make)
    topic, before, _ = subscriber.event()  # a heartbeat, or the first
    assert topic == b"kv@decode-0@llama"
    worker.insert(1)
    seen = []
    while not seen or not msgspec.msgpack.decode(seen[-1][1])[1]:
        seen.append(subscriber.event()[1:])
    assert [seq for seq, _ in seen] == list(range(before + 1, before + 1 + len(seen)))


def test_a_router_that_starts_late_is_given_what_there_is(make: Make) -> None:
    worker = make(Worker)
    for seed in range(5):
        worker.insert(seed)
    worker.cache.evict(4)
    worker.publisher.tiers[0].pass_on()
    agrees(worker, make(Subscriber, worker.publisher, PAGE_SIZE), range(6))


def test_a_repeat_begins_where_it_was_asked_and_ends_with_a_mark(make: Make) -> None:
    worker, subscriber = told(make, heartbeat_s=NEVER_S)
    last = worker.published()
    for seed in range(5):
        worker.insert(seed)
        until(lambda: worker.publisher.idle)
    end = worker.published()
    assert end > last
    answers = subscriber.replay(last)
    assert [seq for seq, _ in answers] == list(range(last, end))
    assert subscriber.replay(end) == []
    assert [seq for seq, _ in subscriber.replay(end - 1)] == [end - 1]


def test_a_req_socket_is_answered_too(make: Make) -> None:
    worker = make(Worker, heartbeat_s=NEVER_S)
    end = worker.published()
    subscriber = make(Subscriber, worker.publisher, PAGE_SIZE)
    with subscriber.context.socket(zmq.REQ) as req:
        req.connect(worker.publisher.replay_endpoint)
        req.send(end.to_bytes(8))
        assert subscriber.receive(req) == [b"", END, b""]


def test_a_repeat_from_before_what_is_kept_is_a_snapshot(make: Make) -> None:
    worker, subscriber = told(make, keep_batches=2, heartbeat_s=NEVER_S)
    first = worker.published()
    for seed in range(6):
        worker.insert(seed)
        until(lambda: worker.publisher.idle)
    end = worker.published()
    [(seq, payload)] = subscriber.replay(first)
    assert seq == end - 1
    subscriber.follower.restart(seq, payload)
    assert len(subscriber.follower.blocks) == worker.cache.num_pages == 18


def test_a_snapshot_says_where_to_go_on(make: Make) -> None:
    """And the batches from there on lead to the tree as it is then."""
    worker, subscriber = told(make)
    subscriber.event()  # it is subscribed
    for seed in range(4):
        worker.insert(seed)
    number, life, payload = subscriber.snapshot()
    assert int.from_bytes(life) == LIFE
    assert len(life) == 16
    subscriber.follower.restart(number, payload)
    worker.cache.evict(5)
    worker.publisher.tiers[0].pass_on()
    worker.insert(7)
    agrees(worker, subscriber, range(8))
    assert subscriber.num_gaps == 0


def test_llm_d_s_frames_name_the_life(make: Make) -> None:
    _, subscriber = told(make, epoch_frames=True)
    _, number, _ = subscriber.receive(subscriber.sub)
    _, life, _ = subscriber.snapshot()
    assert number[8:] == life
    subscriber.dealer.send_multipart([b"", bytes(8)])
    assert subscriber.receive(subscriber.dealer)[2][8:] == life


GARBAGE = [
    [], [b""], [b"", b""], [b"", b"1234567"], [b"", b"123456789"], [b"x", b"y", b"z"],
    [b"snapshot"], [b"12345678"], [b"", bytes(8), b""],
]  # fmt: skip


@pytest.mark.parametrize("frames", GARBAGE)
def test_garbage_on_the_replay_socket_is_answered_with_an_error(
    make: Make, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    worker, subscriber = told(make, heartbeat_s=NEVER_S)
    subscriber.dealer.send_multipart(frames or [b""])
    *_, number, text = subscriber.receive(subscriber.dealer)
    assert number == END
    assert b"needed is" in text, "an end without a text says that nothing is missing"
    assert worker.publisher.stats()["unreadable_requests"] == 1
    assert "is refused" in caplog.text
    assert subscriber.replay(worker.published()) == []


def test_each_of_many_requests_is_answered_where_a_turn_takes_but_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They came in one turn, so nothing wakes the thread for those that it has left there."""
    monkeypatch.setattr(publisher_module, "_REQUESTS_A_TURN", 1)
    monkeypatch.setattr(publisher_module, "_AWAKE_S", 0.0)
    worker, subscriber = told(make, heartbeat_s=NEVER_S)
    assert subscriber.replay(worker.published()) == []  # it is connected
    with standing_still(worker):
        for _ in range(10):
            subscriber.dealer.send_multipart([b"", b"12", b"3456"])
        time.sleep(0.2)  # they come; fewer at once prove less, and are answered too
    for _ in range(10):
        assert b"frames of [0, 2, 4] bytes" in subscriber.receive(subscriber.dealer)[-1]
    assert worker.publisher.stats()["unreadable_requests"] == 10


def test_garbage_on_the_snapshot_socket_is_answered_with_an_error(make: Make) -> None:
    _, subscriber = told(make)
    subscriber.req.send(b"everything")
    number, life, text = subscriber.receive(subscriber.req)
    assert int.from_bytes(number, signed=True) == -2
    assert b"needed is" in text
    assert subscriber.snapshot()[1] == life


def test_a_request_that_is_too_long_ends_its_connection_alone(make: Make) -> None:
    worker, subscriber = told(make)
    other = make(Subscriber, worker.publisher, PAGE_SIZE)
    other.dealer.send_multipart([b"", bytes(1 << 20)])
    worker.insert(1)
    agrees(worker, subscriber, range(2))


@pytest.mark.parametrize("name", NAMES)
def test_a_port_in_use_is_named_and_nothing_is_left_open(make: Make, name: str) -> None:
    first = make(Worker)
    address = getattr(first.publisher, name)
    with pytest.raises(ConfigError, match=rf"kv_events: {name} is '{address}'.* in use"):
        Worker(**{name: address})
    # The ports that it did bind are free again.
    others = {one: getattr(first.publisher, one) for one in NAMES}
    first.close()
    with pytest.raises(ConfigError, match="in use"), closing(make(Worker, **others)):
        Worker(**others)
    again = make(Worker, **{name: others[name]})
    again.insert(1)


def test_a_thread_that_cannot_be_started_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    context = zmq.Context

    def note() -> Any:
        made.append(context())
        return made[-1]

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(zmq, "Context", note)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        KVEventPublisher(KVEventsConfig(), PeerId("d", 1), "m", 4)
    assert [one.closed for one in made] == [True]


def test_a_name_that_makes_no_topic_is_refused() -> None:
    config = KVEventsConfig(FREE, FREE, FREE)
    for worker, model in (("a@b", "m"), ("a", "m@1")):
        with pytest.raises(ConfigError, match="topic"):
            KVEventPublisher(config, PeerId(worker, 1), model, 4)


@pytest.mark.parametrize("name", NAMES)
def test_an_address_that_others_may_reach_needs_an_isolated_network(name: str) -> None:
    threads = threading.active_count()
    config = KVEventsConfig(**{**dict.fromkeys(NAMES, FREE), name: "tcp://0.0.0.0:*"})
    what = config, PeerId("decode-0", LIFE), "llama", PAGE_SIZE
    with pytest.raises(ConfigError, match=f"{name} is 'tcp://0.0.0.0:.*network_is_isolated"):
        KVEventPublisher(*what)
    assert threading.active_count() == threads
    KVEventPublisher(*what, network_is_isolated=True).close()


# --- those who do not read, come back, or have gone -----------------------------------------------


def test_without_the_other_two_sockets_events_are_published_all_the_same(make: Make) -> None:
    worker = make(Worker, replay_endpoint="", snapshot_endpoint="")
    assert worker.publisher.replay_endpoint == worker.publisher.snapshot_endpoint == ""
    worker.insert(1)
    assert worker.published()


@pytest.mark.slow
def test_a_subscriber_that_does_not_read_misses_events_and_sees_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_QUEUE_BATCHES", 1)
    worker = make(Worker, keep_batches=3)
    slow = make(Subscriber, worker.publisher, PAGE_SIZE, queue=1)
    quick = make(Subscriber, worker.publisher, PAGE_SIZE)
    slow.event()
    quick.event()
    # Until more was published than sockets and kernels hold.
    for seed in range(60):
        worker.insert(seed, num_pages=5_000)
        until(lambda: worker.publisher.idle)
    worker.cache.evict(100_000)
    worker.publisher.tiers[0].pass_on()
    agrees(worker, slow, range(0))
    assert slow.num_gaps >= 1


def test_no_more_clients_wait_than_a_bound_and_the_oldest_one_makes_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make(Worker, heartbeat_s=NEVER_S)
    publisher, first = worker.publisher, worker.published()
    for seed in range(60):
        worker.insert(seed, num_pages=4_000)  # 80 KB a batch: beyond what the kernel holds
        until(lambda: publisher.idle)
    monkeypatch.setattr(publisher_module, "_MAX_CLIENTS", 1)
    with ExitStack() as stack:
        for number in range(5):
            client = stack.enter_context(closing(zmq.Context.instance().socket(zmq.DEALER)))
            client.setsockopt(zmq.LINGER, 0)
            client.setsockopt(zmq.RCVHWM, 1)
            client.setsockopt(zmq.RCVBUF, 4096)
            client.setsockopt(zmq.ROUTING_ID, b"%d" % number)
            client.connect(publisher.replay_endpoint)
            client.send_multipart([b"", first.to_bytes(8)])
            until(lambda number=number: publisher.stats()["replays"] == number + 1)
        until(lambda: [client for _, client in list(publisher._waiting)] == [b"3", b"4"])
    # Those that have left wait no more, and others are answered.
    subscriber = make(Subscriber, publisher, PAGE_SIZE)
    assert subscriber.replay(worker.published()) == []
    until(lambda: not publisher._waiting)


@pytest.mark.parametrize("name", NAMES)
def test_connections_that_ask_nothing_are_bounded_on_each_socket(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_CLIENTS", 16)
    publisher = make(Worker).publisher
    host, _, port = getattr(publisher, name).removeprefix("tcp://").rpartition(":")
    for _ in range(17):
        make(socket.create_connection, (host, int(port)), timeout=PATIENCE_S)
    until(lambda: publisher.counters["connections_cut"])


def test_a_publisher_with_nothing_to_do_sleeps(make: Make) -> None:
    """And ends with its process, where nothing closes it."""
    worker = make(Worker, heartbeat_s=NEVER_S)
    publisher, turns = worker.publisher, []
    assert publisher._thread.daemon
    drain = publisher._bell.drain

    def counted() -> Any:
        turns.append(None)
        return drain()

    publisher._bell.drain = counted
    worker.insert(1)
    until(lambda: publisher.idle and publisher._asleep)
    before = len(turns)
    assert before
    time.sleep(0.2)
    assert len(turns) == before
    worker.insert(2)  # wakes it
    until(lambda: publisher.idle)


def test_a_worker_that_comes_back_is_heard_as_a_new_one(make: Make) -> None:
    where = {name: lasting_address() for name in NAMES}
    worker, subscriber = told(make, life=1, **where)
    for seed in range(4):
        worker.insert(seed)
    agrees(worker, subscriber, range(5))
    # As if it was killed: not a word. Its port is free when its thread is gone.
    worker.publisher._publish = lambda lists: None
    worker.close()
    after = make(Worker, life=2, **where)
    after.insert(9)
    agrees(after, subscriber, range(10))


def test_a_worker_that_leaves_says_that_nothing_is_held(make: Make) -> None:
    worker, subscriber = told(make)
    worker.insert(1)
    agrees(worker, subscriber, range(2))
    worker.close()
    worker.close()
    while subscriber.follower.blocks:
        subscriber.follow()


def test_the_last_events_cannot_be_missed_unseen(make: Make) -> None:
    """After them come batches without events, which have numbers too."""
    worker, subscriber = told(make)
    before = subscriber.event()[1]
    assert [subscriber.event()[1] for _ in range(3)] == [before + 1, before + 2, before + 3]
    # A batch is counted after it is sent.
    until(lambda: worker.publisher.stats()["heartbeats"] >= 3)


# --- the scheduler's side -------------------------------------------------------------------------


def test_a_publisher_too_far_behind_restarts_with_a_snapshot(make: Make) -> None:
    worker, subscriber = told(make, max_backlog_pages=5)
    for number in range(1, 4):  # and again
        seed = 10 * number
        with standing_still(worker, seed, num_pages=5):
            worker.insert(seed + 1)  # does not wait
            worker.insert(seed + 2)  # stays in the log
            assert worker.publisher.stats()["overruns"] == number - 1
            worker.insert(seed + 3)  # too much for it
            assert worker.publisher.stats()["overruns"] == number
        until(lambda: worker.publisher.idle)
        worker.insert(seed + 4)
        agrees(worker, subscriber, range(seed, seed + 5))


def test_a_defect_in_making_events_is_no_lie(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is held from then on, and nothing more is published."""
    worker, subscriber = told(make)
    worker.insert(1)
    agrees(worker, subscriber, range(2))

    def broken(*told: Any) -> Any:
        raise ZeroDivisionError

    worker.publisher.blocks.event = broken
    worker.insert(2)
    until(lambda: not worker.publisher.takes)
    worker.insert(3)
    subscriber.follow_until(worker.publisher._stream.next_seq)
    assert not subscriber.follower.blocks
    assert "ZeroDivisionError" in caplog.text
    assert not worker.publisher.idle
