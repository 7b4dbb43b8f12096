"""The sockets that a worker's cache events leave by, and the thread that serves them.

Frames, vLLM's: an event is [topic, number, payload], the number 8 bytes, big-endian. A request for
a repeat is ["", number], from a DEALER or REQ; each batch from there on is answered as ["", topic,
number, payload], then comes the end ["", "", -1, ""]. The end has a text in place of the last frame
where the request could not be read. SGLang's answers have no topic.

A snapshot is asked for by ["", "snapshot"] and answered by ["", number, life, payload]: the number
of the last batch that it contains, 16 bytes that name this life of the worker, and a batch. A
number of -2 says that the request could not be read.

Source: vLLM 0.32 `distributed/kv_events.py`; the snapshot, llm-d-router `pkg/kvevents/snapshot.go`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from typing import Final

import zmq

from prefixkv.addresses import is_loopback
from prefixkv.cache.events import Change, Cleared, stored_pages
from prefixkv.config import KVEventsConfig
from prefixkv.errors import ConfigError
from prefixkv.kv_events.dialects import DIALECTS
from prefixkv.kv_events.stream import Batch, EventStream
from prefixkv.protocol.ids import PeerId
from prefixkv.wakeups import Inbox

_log = logging.getLogger("prefixkv.kv_events")

SEQ_BYTES: Final = 8
EPOCH_BYTES: Final = 16
END: Final = (-1).to_bytes(SEQ_BYTES, signed=True)
UNREADABLE: Final = (-2).to_bytes(SEQ_BYTES, signed=True)
SNAPSHOT: Final = b"snapshot"

_PAUSE_S = 0.01  # between two looks at what was handed over, while something is
_AWAKE_S = 0.1  # after that long without, the thread sleeps, and has to be woken: 10 us
_LONGEST_S = 3600.0
_RETRY_S = 0.01  # until a client whose queue is full is looked at again
_REQUESTS_A_TURN = 64
_QUEUE_ANSWERS = 16  # a client; the rest is made when it has read
_MAX_CLIENTS = 256  # that answers wait for
_MAX_REQUEST_BYTES = 1024
_FAILURES = 3  # in making batches, each a defect, until it is given up
_LINGER_S = 0.2

_COUNTERS = (
    "batches", "bytes", "events_lost", "heartbeats", "overruns", "replays", "snapshots",
    "unreadable_requests",
)  # fmt: skip

_Socket = zmq.Socket[bytes]


class KVEventPublisher:
    """See the module's text. `hand_over` and `idle` are the scheduler's thread's; the rest happens
    in a thread of its own.

    Args:
        config: see there.
        worker: whose cache it is.
        model: `ModelConfig.model`, for the topic.
        page_size: tokens a page.
    Raises:
        ConfigError: an address that cannot be bound, or a name that makes no topic. Nothing is left
            open.
    """

    def __init__(self, config: KVEventsConfig, worker: PeerId, model: str, page_size: int) -> None:
        self.config = config
        self.counters = Counter(dict.fromkeys(_COUNTERS, 0))
        self.topic = config.topic or default_topic(worker.name, model)
        self.dialect = DIALECTS[config.dialect](page_size, config.medium)
        # Microseconds: no life publishes a million batches a second, so the next begins above this.
        first_seq = time.time_ns() // 1000
        self._stream = EventStream(
            page_size, self.dialect, config.dp_rank, first_seq,
            config.keep_batches, config.keep_bytes,
        )  # fmt: skip
        self._epoch = worker.incarnation.to_bytes(EPOCH_BYTES)
        self._topic_frame = self.topic.encode()
        self._handed: deque[list[Change]] = deque()
        self._asleep = False  # `hand_over` has to wake the thread
        self._bell: Inbox[None] = Inbox()
        self._handed_lists = self._handed_pages = 0  # written by the scheduler's thread alone
        self._done_lists = self._done_pages = 0  # by this object's
        self._max_behind_pages = config.max_behind_pages
        self._lost = False
        self._deaf = False  # until a list begins with Cleared
        self._num_failures = 0
        self._closing = False
        self._waiting: dict[tuple[_Socket, bytes], int] = {}  # clients: the number they go on with
        self._context: zmq.Context[_Socket] = zmq.Context()
        try:
            pub = self._bound(zmq.PUB, "endpoint", config.queue_batches)
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
        except BaseException:
            self._context.destroy(linger=0)
            self._bell.close()
            raise

    # --- the scheduler's thread -------------------------------------------------------------------

    def hand_over(self, changes: list[Change]) -> bool:
        """See `Listener`. Under 5 us a change."""
        if type(changes[0]) is Cleared:
            self._lost = False
        elif self._lost:
            return False
        if self._handed_pages - self._done_pages > self._max_behind_pages:
            self.counters["overruns"] += 1
            self._lost = True
            return False
        self._handed_pages += stored_pages(changes)
        self._handed_lists += 1
        self._handed.append(changes)
        if self._asleep:
            self._bell.rouse()
        return True

    @property
    def idle(self) -> bool:
        """See `Listener`."""
        return self._handed_lists == self._done_lists and self._num_failures < _FAILURES

    def stats(self) -> dict[str, int]:
        """What was published and answered, and what went wrong. Any thread may ask."""
        return dict(self.counters)

    def close(self) -> None:
        """Say that nothing is held any more, and end the thread. Again: no-op."""
        if not self._closing:
            self._closing = True
            self._bell.rouse()
            self._thread.join()
            self._bell.close()

    # --- its own thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("cache events are published no more")
        finally:
            self._context.destroy(linger=int(_LINGER_S * 1000))

    def _serve(self) -> None:
        poller = zmq.Poller()
        for sock in (self._bell.fd, self._replay, self._snapshots):
            if sock is not None:
                poller.register(sock, zmq.POLLIN)
        heartbeat_s = self.config.heartbeat_s
        beat_s = time.monotonic() + heartbeat_s
        sleep_s = 0.0  # when it may
        while not self._closing:
            now_s = time.monotonic()
            # Said before it is looked whether something has come: `hand_over` does it in the other
            # order, so one of the two sees the other's.
            self._asleep = now_s >= sleep_s
            wait_s = min(
                _PAUSE_S if self._handed or not self._asleep else _LONGEST_S, beat_s - now_s
            )
            if self._waiting:
                wait_s = min(wait_s, _RETRY_S)
            ready = dict(poller.poll(math.ceil(max(0.0, wait_s) * 1000)))
            self._asleep = False
            self._bell.drain()
            now_s = time.monotonic()
            if self._handed:
                self._publish([self._handed.popleft() for _ in range(len(self._handed))])
                beat_s, sleep_s = now_s + heartbeat_s, now_s + _AWAKE_S
            elif now_s >= beat_s:
                self._send(self._stream.heartbeat(time.time()))
                self.counters["heartbeats"] += 1
                beat_s = now_s + heartbeat_s
            for sock in (self._replay, self._snapshots):
                if sock is not None and sock in ready:
                    self._read_requests(sock)
            for client in list(self._waiting):
                self._answer(*client)
        self._publish([*self._handed, [Cleared()]])

    def _publish(self, lists: list[list[Change]]) -> None:
        for changes in lists:
            if type(changes[0]) is Cleared:
                self._deaf = False
            if not self._deaf:
                try:
                    for batch in self._stream.publish(changes, time.time()):
                        self._send(batch)
                except Exception:
                    self._failed()
            if self._deaf:
                self.counters["events_lost"] += len(changes)
            self._done_pages += stored_pages(changes)
            self._done_lists += 1

    def _failed(self) -> None:
        """A defect: what is known may be wrong, so nothing is held until all is told afresh."""
        self._num_failures += 1
        _log.exception("cache events could not be made; nothing is held, until all is told afresh")
        self._deaf = self._lost = True
        for batch in self._stream.publish([Cleared()], time.time()):
            self._send(batch)

    def _send(self, batch: Batch) -> None:
        self._pub.send_multipart((self._topic_frame, self._number(batch.seq), batch.payload))
        self.counters["batches"] += 1
        self.counters["bytes"] += len(batch.payload)

    def _number(self, seq: int) -> bytes:
        number = seq.to_bytes(SEQ_BYTES)
        return number + self._epoch if self.config.epoch_frames else number

    # --- answers ----------------------------------------------------------------------------------

    def _read_requests(self, sock: _Socket) -> None:
        for _ in range(_REQUESTS_A_TURN):
            try:
                client, *frames = sock.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if sock is self._replay and len(frames) == 2 and len(frames[1]) == SEQ_BYTES:
                self._waiting[sock, client] = int.from_bytes(frames[1])
                self.counters["replays"] += 1
            elif sock is self._snapshots and frames == [b"", SNAPSHOT]:
                self._waiting[sock, client] = 0
                self.counters["snapshots"] += 1
            else:
                self._refuse(sock, client, frames)
            if len(self._waiting) > _MAX_CLIENTS:
                del self._waiting[next(iter(self._waiting))]

    def _refuse(self, sock: _Socket, client: bytes, frames: list[bytes]) -> None:
        """Answer so that it is taken for no answer."""
        self.counters["unreadable_requests"] += 1
        sizes = [len(frame) for frame in frames]
        if sock is self._replay:
            want = f'["", number], the number {SEQ_BYTES} bytes'
        else:
            want = f'["", "{SNAPSHOT.decode()}"]'
        text = f"frames of {sizes} bytes, needed is {want}"
        _log.warning("a request for cache events is refused: %s", text)
        if sock is self._replay:
            answer = [*([b""] if self.dialect.topic_in_replay else []), END, text.encode()]
        else:
            answer = [UNREADABLE, self._epoch, text.encode()]
        self._send_to(sock, client, answer)

    def _answer(self, sock: _Socket, client: bytes) -> None:
        """Send a client what it waits for, as far as its queue takes it."""
        now_s = time.time()
        topic = [self._topic_frame] if self.dialect.topic_in_replay else []
        end = [b"", END, b""] if self.dialect.topic_in_replay else [END, b""]
        while (sock, client) in self._waiting:
            seq = self._waiting[sock, client]
            if sock is self._snapshots:
                batch: Batch | None = self._stream.snapshot(now_s)
                assert batch is not None
                number = batch.seq.to_bytes(SEQ_BYTES)
                answer, last = [number, self._epoch, batch.payload], True
            elif (batch := self._stream.since(seq, now_s)) is None:
                answer, last = end, True
            else:
                answer, last = [*topic, self._number(batch.seq), batch.payload], False
            sent = self._send_to(sock, client, answer)
            if sent is None:
                return  # its queue is full: later
            if last or not sent:
                del self._waiting[sock, client]
            elif batch is not None:
                self._waiting[sock, client] = batch.seq + 1

    def _send_to(self, sock: _Socket, client: bytes, frames: list[bytes]) -> bool | None:
        """False: it is gone. None: its queue is full."""
        try:
            sock.send_multipart([client, b"", *frames], zmq.DONTWAIT)
        except zmq.Again:
            return None
        except zmq.ZMQError:
            return False
        return True

    def _bound(self, kind: int, name: str, queue: int) -> _Socket | None:
        address = getattr(self.config, name)
        if not address:
            return None
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.IPV6, "[" in address)
        sock.setsockopt(zmq.LINGER, int(_LINGER_S * 1000))
        sock.setsockopt(zmq.SNDHWM, queue)
        sock.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        if kind == zmq.ROUTER:
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            sock.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events: {name} is {address!r}, which cannot be bound: {error}"
            ) from error
        if not is_loopback(address):
            _log.warning(
                "cache events carry the tokens of prompts, and leave by %s without encryption or "
                "authentication: that network has to be isolated",
                address,
            )
        return sock


def default_topic(worker: str, model: str) -> str:
    """The topic where the config names none. Raises ConfigError for a name with an "@"."""
    for what, name in (("the worker's name", worker), ("the model's name", model)):
        if "@" in name:
            raise ConfigError(
                f'kv_events: {what} is {name!r}; routers part a topic at "@": give a topic'
            )
    return f"kv@{worker}@{model}"


def _address(sock: _Socket | None) -> str:
    return "" if sock is None else sock.getsockopt_string(zmq.LAST_ENDPOINT)
