"""Sockets that publish a worker's cache events, and the thread that serves them.

Frames follow vLLM: an event is [topic, number, payload], the number 8 bytes, big-endian. A request
for a repeat is ["", number], from a DEALER or REQ. Each batch from that number on is answered by
["", topic, number, payload], then the end by ["", "", -1, ""], with a text in its last frame if the
request could not be read.

A snapshot is requested by ["", "snapshot"] and answered by ["", number, life, payload]: the number
of the last batch that it contains, 16 bytes that name this life of the worker, and a batch. A
number of -2 says that the request could not be read.

Source: vLLM 0.32 `distributed/kv_events.py`; the snapshot, llm-d-router `pkg/kvevents/snapshot.go`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, deque
from functools import partial
from typing import Any, Final

import zmq

from prefixkv.cache.events import Change, ChangeLog, EventSource, Inserted
from prefixkv.cache.node import PAGE_ID_BYTES
from prefixkv.config import KVEventsConfig, is_loopback
from prefixkv.errors import ConfigError
from prefixkv.kv_events.stream import Batch, BlockEvents, EventStream, Keep
from prefixkv.protocol.ids import PeerId
from prefixkv.request import Request
from prefixkv.runtime.channel import Newcomers, set_bounds
from prefixkv.runtime.node import Node
from prefixkv.threads import Inbox, undoing

_log = logging.getLogger("prefixkv.kv_events")

SEQ_BYTES: Final = 8
EPOCH_BYTES: Final = 16
END: Final = (-1).to_bytes(SEQ_BYTES, signed=True)
UNREADABLE: Final = (-2).to_bytes(SEQ_BYTES, signed=True)
SNAPSHOT: Final = b"snapshot"

_PAUSE_S = 0.01  # between two looks at the queue while changes keep coming
_AWAKE_S = 0.1  # after this long without changes the thread sleeps; waking it costs 10 us
_LONGEST_S = 3600.0
_RETRY_S = 0.01  # until a client whose queue is full is looked at again
_REQUESTS_A_TURN = 64
_QUEUE_BATCHES = 10_000  # of a subscriber that does not read
_QUEUE_ANSWERS = 16  # a client; the rest is made when it has read
_MAX_CLIENTS = 256  # that subscribe, or have not asked yet, of a socket
_MAX_REQUEST_BYTES = 1024
_QUEUED_REQUESTS = 16  # per client
_QUEUED_SUBSCRIPTIONS = 1000  # per client, until the thread looks; libzmq handles them
_KERNEL_BYTES = 16 << 10  # receive buffer per client; the kernel takes twice as many
_REFUSED_LOG_S = 1.0
_LINGER_S = 0.2

_COUNTERS = (
    "batches", "bytes", "heartbeats", "overruns", "replays", "snapshots", "unreadable_requests",
)  # fmt: skip

_Socket = zmq.Socket[bytes]


def install(node: Node[Any, Any, Any], config: KVEventsConfig) -> None:
    """Publish the changes of the node's caches. Raises ConfigError as `KVEventPublisher`."""
    publisher = KVEventPublisher(
        config,
        node.peer_id,
        node.config.model.model,
        node.pool.layout.page_size,
        has_host=node.num_caches > 1,
        network_is_isolated=node.config.control.network_is_isolated,
    )
    node.on_close(publisher.close)

    def check(request: Request) -> None:
        if request.cacheable:
            publisher.blocks.check(request.key.namespace)

    node.checks.append(check)
    node.on_change(*publisher.tiers)
    node.kv_events = publisher


class _Tier:
    """The listener of a publisher to the cache in one kind of memory. Used by the cache's
    thread; O(changes), without hashing."""

    log: ChangeLog | None = None

    def __init__(self, publisher: KVEventPublisher, number: int) -> None:
        self._publisher = publisher
        self.number = number

    def listen(self, cache: EventSource) -> None:
        self.log = cache.record(self._publisher.config.max_backlog_pages)
        self.pass_on()

    def pass_on(self) -> None:
        """What a publisher that is busy does not take waits in the log."""
        if self.log is not None and self._publisher.takes and (changes := self.log.take()):
            self._publisher.hand(self, changes)


class KVEventPublisher:
    """Publisher of one worker's cache events. The scheduler's thread uses the `tiers`, which listen
    to a cache each; the rest happens in a thread of its own.

    `model` is `ModelConfig.model`, for the topic. With `has_host`, the second tier takes the
    changes of a cache in host memory.

    Raises ConfigError, with nothing left open: an address that cannot be bound, or that other
    machines reach on a network that is not isolated; a name that makes no topic, or `medium` of
    host memory.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        worker: PeerId,
        model: str,
        page_size: int,
        has_host: bool = False,
        network_is_isolated: bool = False,
    ) -> None:
        self.config = config
        self._is_isolated = network_is_isolated
        self.counters = Counter(dict.fromkeys(_COUNTERS, 0))
        self.topic = config.topic or default_topic(worker.name, model)
        if has_host and config.medium == BlockEvents.host_medium:
            raise ConfigError(
                f"kv_events: medium is {config.medium!r}, which is the word for host memory, where "
                "this worker keeps pages too: name another one"
            )
        self.blocks = BlockEvents(page_size, config.medium, config.checkpoint_blocks)
        self.tiers = [_Tier(self, number) for number in range(1 + has_host)]
        # In microseconds: no life publishes a million batches per second, so the next begins above.
        first_seq = time.time_ns() // 1000
        host = None
        if has_host:
            host = BlockEvents(page_size, BlockEvents.host_medium, config.checkpoint_blocks)
        self._stream = EventStream(
            page_size, self.blocks, config.dp_rank, first_seq,
            Keep(config.keep_batches, config.keep_bytes), host,
        )  # fmt: skip
        self._epoch = worker.incarnation.to_bytes(EPOCH_BYTES)
        self._topic_frame = self.topic.encode()
        # Lists of changes on their way to the thread: appended by the scheduler, taken by the
        # thread.
        self._handed: deque[tuple[_Tier, list[Change], int]] = deque()
        self._asleep = False  # set by the thread: `hand` must wake it
        self._bell: Inbox[None] = Inbox()
        self._handed_lists = self._handed_pages = 0  # written by the scheduler's thread alone
        self._done_lists = self._done_pages = 0  # by this object's
        self._has_failed = False
        self._closing = False
        self._pid = os.getpid()
        self._waiting: dict[tuple[_Socket, bytes], int] = {}  # clients: the batch to send next
        self._refused_log_s = -_REFUSED_LOG_S
        self._newcomers: dict[_Socket, Newcomers] = {}
        self._context: zmq.Context[_Socket] = zmq.Context()
        with undoing(self._bell.close), undoing(partial(self._close_sockets, linger_s=0)):
            pub = self._bound(zmq.PUB, "endpoint", _QUEUE_BATCHES)
            assert pub is not None  # the config has an address for it
            self._pub = pub
            self._replay = self._bound(zmq.ROUTER, "replay_endpoint", _QUEUE_ANSWERS)
            self._snapshots = self._bound(zmq.ROUTER, "snapshot_endpoint", _QUEUE_ANSWERS)
            self.endpoint = _address(self._pub)
            self.replay_endpoint = _address(self._replay)
            self.snapshot_endpoint = _address(self._snapshots)
            self._thread = threading.Thread(
                target=self._run, name="prefixkv-kv-events", daemon=True
            )
            self._thread.start()

    # --- the scheduler's thread -------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """False while the thread is too far behind, and after a defect."""
        return (
            self._handed_pages - self._done_pages <= self.config.max_backlog_pages
            and not self._has_failed
        )

    def hand(self, tier: _Tier, changes: list[Change]) -> None:
        num_pages = sum(len(c.pages) for c in changes if type(c) is Inserted) // PAGE_ID_BYTES
        self._handed_pages += num_pages
        self._handed_lists += 1
        self._handed.append((tier, changes, num_pages))
        # After the append: the thread says that it sleeps before it looks at the queue, so at least
        # one of the two sees the other.
        if self._asleep:
            self._bell.notify()

    @property
    def idle(self) -> bool:
        """True if all handed over was dealt with. False for good after a defect."""
        return self._handed_lists == self._done_lists and not self._has_failed

    def stats(self) -> dict[str, int]:
        """Return counts of what was published, answered and lost. Any thread may call."""
        logs = [tier.log for tier in self.tiers if tier.log is not None]
        return {**self.counters, "overruns": sum(log.overruns for log in logs)}

    def close(self) -> None:
        """Publish that the cache is empty, and end the thread. Idempotent."""
        # The bell of a fork is its parent's.
        if not self._closing and os.getpid() == self._pid:
            self._closing = True
            self._bell.notify()
            self._thread.join()
            self._bell.close()

    # --- its own thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("the publisher of cache events has ended")
        finally:
            self._close_sockets(_LINGER_S)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        routers = [sock for sock in (self._replay, self._snapshots) if sock is not None]
        for sock in (*routers, *(one.monitor for one in self._newcomers.values())):
            poller.register(sock, zmq.POLLIN)
        heartbeat_s = self.config.heartbeat_s
        beat_s = time.monotonic() + heartbeat_s
        sleep_s = 0.0  # from then on the thread may sleep
        while not self._closing:
            now_s = time.monotonic()
            # Set before the queue is looked at: `hand` appends first and reads this after,
            # so one of the two sees the other.
            self._asleep = now_s >= sleep_s
            wait_s = min(
                _PAUSE_S if self._handed or not self._asleep else _LONGEST_S, beat_s - now_s
            )
            # Answers wait for room in a client's queue, which no descriptor reports.
            if self._waiting:
                wait_s = min(wait_s, _RETRY_S)
            ready = {one for one, _ in poller.poll(math.ceil(max(0.0, wait_s) * 1000))}
            self._asleep = False
            self._bell.drain()
            now_s = time.monotonic()
            if self._handed:
                # Events before answers: a repeat requested now includes what was just published.
                self._publish([self._handed.popleft() for _ in range(len(self._handed))])
                beat_s, sleep_s = now_s + heartbeat_s, now_s + _AWAKE_S
            elif now_s >= beat_s:
                self._send(self._stream.heartbeat(time.time()))
                self.counters["heartbeats"] += 1
                beat_s = now_s + heartbeat_s
            # Before requests, so that a connection is known by the time that it asks.
            for newcomers in self._newcomers.values():
                if newcomers.monitor in ready:
                    newcomers.read()
            for sock in routers:
                if sock in ready:
                    self._read_requests(sock)
            for client in list(self._waiting):
                self._answer(*client)
        # A worker that ends holds nothing: routers that hear this send it no requests for its
        # cache.
        self._publish(list(self._handed))
        self._send(self._stream.clear(time.time()))

    def _publish(self, lists: list[tuple[_Tier, list[Change], int]]) -> None:
        for tier, changes, num_pages in lists:
            try:
                if not self._has_failed:
                    for batch in self._stream.publish(changes, time.time(), tier.number):
                        self._send(batch)
            except Exception:
                # What routers know may be wrong: from here on nothing is held.
                _log.exception("cache events could not be made: none is published any more")
                self._has_failed = True
                self._send(self._stream.clear(time.time()))
            # Pages before lists, and both after sending: `idle` is true only when all has left.
            self._done_pages += num_pages
            self._done_lists += 1

    def _send(self, batch: Batch) -> None:
        frames = self._topic_frame, self._number(batch.seq), batch.payload
        self._pub.send_multipart(frames)
        self.counters["batches"] += 1
        self.counters["bytes"] += len(batch.payload)

    def _number(self, seq: int) -> bytes:
        number = seq.to_bytes(SEQ_BYTES)
        return number + self._epoch if self.config.epoch_frames else number

    # --- answers ----------------------------------------------------------------------------------

    def _read_requests(self, sock: _Socket) -> None:
        for _ in range(_REQUESTS_A_TURN):
            try:
                parts = sock.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._newcomers[sock].heard(parts[-1])
            client, *frames = [part.bytes for part in parts]
            if sock is self._replay and len(frames) == 2 and len(frames[1]) == SEQ_BYTES:
                # A client has one place: a new request replaces the one before, so it cannot pile
                # them up.
                self._waiting[sock, client] = int.from_bytes(frames[1])
                self.counters["replays"] += 1
            elif sock is self._snapshots and frames == [b"", SNAPSHOT]:
                self._waiting[sock, client] = 0
                self.counters["snapshots"] += 1
            else:
                self._refuse(sock, client, frames)
            # Clients that were gone before their answer: the oldest entry makes room.
            if len(self._waiting) > 2 * _MAX_CLIENTS:
                del self._waiting[next(iter(self._waiting))]

    def _refuse(self, sock: _Socket, client: bytes, frames: list[bytes]) -> None:
        self.counters["unreadable_requests"] += 1
        is_replay = sock is self._replay
        want = f"number], the number {SEQ_BYTES} bytes" if is_replay else f'"{SNAPSHOT.decode()}"]'
        text = f'frames of {list(map(len, frames))} bytes, needed is ["", {want}'
        now_s = time.monotonic()
        if now_s - self._refused_log_s >= _REFUSED_LOG_S:
            self._refused_log_s = now_s
            _log.warning("a request for cache events is refused: %s", text)
        start = [b"", END] if is_replay else [UNREADABLE, self._epoch]
        self._send_to(sock, client, [*start, text.encode()])

    def _answer(self, sock: _Socket, client: bytes) -> None:
        now_s = time.time()
        while (sock, client) in self._waiting:
            seq = self._waiting[sock, client]
            # 1. A snapshot: one answer.
            # 2. Nothing is missing any more: the end of a repeat.
            # 3. The next batch of a repeat, or a snapshot in its place; then go on behind it.
            if sock is self._snapshots:
                batch: Batch | None = self._stream.snapshot(now_s)
                assert batch is not None
                number = batch.seq.to_bytes(SEQ_BYTES)
                answer, last = [number, self._epoch, batch.payload], True
            elif (batch := self._stream.since(seq, now_s)) is None:
                answer, last = [b"", END, b""], True
            else:
                answer, last = [self._topic_frame, self._number(batch.seq), batch.payload], False
            sent = self._send_to(sock, client, answer)
            if sent is None:
                return  # its queue is full: later
            if last or not sent:
                del self._waiting[sock, client]
            elif batch is not None:
                self._waiting[sock, client] = batch.seq + 1

    def _send_to(self, sock: _Socket, client: bytes, frames: list[bytes]) -> bool | None:
        """True if sent, False if the client is gone, None if it has no room."""
        try:
            sock.send_multipart([client, b"", *frames], zmq.DONTWAIT)
        except zmq.Again:
            return None
        except zmq.ZMQError:
            return False
        return True

    def _close_sockets(self, linger_s: float) -> None:
        """What is queued gets `linger_s` to leave."""
        for newcomers in self._newcomers.values():
            newcomers.close()
        self._context.destroy(linger=int(linger_s * 1000))

    def _bound(self, kind: int, name: str, queue: int) -> _Socket | None:
        """None without an address in setting `name`. Raises ConfigError."""
        address = getattr(self.config, name)
        if not address:
            return None
        if not (self._is_isolated or is_loopback(address)):
            raise ConfigError(
                f"kv_events: {name} is {address!r}, which other machines may reach, and events "
                "carry the tokens of prompts unencrypted: set control.network_is_isolated if only "
                "workers and routers are on that network"
            )
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.IPV6, "[" in address)
        sock.setsockopt(zmq.LINGER, int(_LINGER_S * 1000))
        sock.setsockopt(zmq.SNDHWM, queue)
        is_read = kind == zmq.ROUTER
        # A ROUTER would drop answers to a client that is gone, or full, without a sign.
        if is_read:
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        queued = _QUEUED_REQUESTS if is_read else _QUEUED_SUBSCRIPTIONS
        set_bounds(sock, _MAX_REQUEST_BYTES, queued, _KERNEL_BYTES)
        # Before it is bound, so that no connection is missed.
        self._newcomers[sock] = Newcomers(sock, _MAX_CLIENTS, self.counters)
        try:
            sock.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events: {name} is {address!r}, which cannot be bound: {error}"
            ) from error
        return sock


def default_topic(worker: str, model: str) -> str:
    """Return the topic if the config names none. Raises ConfigError for a name with an "@"."""
    for whose, name in (("the worker's name", worker), ("the model's name", model)):
        if "@" in name:
            raise ConfigError(
                f'kv_events: {whose} is {name!r}; routers part a topic at "@": give a topic'
            )
    return f"kv@{worker}@{model}"


def _address(sock: _Socket | None) -> str:
    return "" if sock is None else sock.getsockopt_string(zmq.LAST_ENDPOINT)
