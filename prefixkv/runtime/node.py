"""What decode's and prefill's node share: one scheduler, one manager with its threads, and the way
between them."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from prefixkv.cache.events import EventBatch, EventFeed
from prefixkv.config import DecodeConfig, PrefillConfig, check_version
from prefixkv.control.effects import To
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.errors import InternalError
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.state_pool import StatePool
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.events import RoomEvent
from prefixkv.protocol.ids import PeerId
from prefixkv.request import Request
from prefixkv.runtime.closing import Closing
from prefixkv.runtime.request_log import RequestLog
from prefixkv.runtime.transfers import Transfers
from prefixkv.settings import at_least
from prefixkv.stats import Histogram

C = TypeVar("C")  # the scheduler's commands
E = TypeVar("E", bound=RoomEvent)  # and what it is told

COUNTERS = (
    "aborts_of_unknown", "control_errors", "failed", "frames_dropped", "frames_failed",
    "handshakes_refused", "peers_proved_dead", "peers_unreachable", "prompt_tokens",
)  # fmt: skip


class Node(Closing, Generic[C, To, E]):
    """See DecodeNode and PrefillNode. Used from one thread."""

    transfers: Transfers[C, To, E]
    scheduler: DecodeScheduler | PrefillScheduler
    peer_id: PeerId
    evictions: Histogram  # seconds that making room took
    kv_events: KVEventPublisher | None = None
    _counters: tuple[str, ...]

    def __init__(self, pool: KVPool, state: StatePool | None) -> None:
        self.pool, self.state = pool, state

    def _observe(self, timeline: Callable[[Any, int, int], dict[str, Any]]) -> None:
        """Let the scheduler's journal write to the request log, and put a clock around eviction."""
        layout, books = self.pool.layout, self.scheduler.books
        log = RequestLog(
            self.peer_id, lambda req: timeline(req, layout.page_bytes, layout.page_size)
        )
        self.scheduler.journal.on_ended = log
        books.clock, self.evictions = time.perf_counter, books.evictions
        self._feed = EventFeed(books.cache, *self.peer_id)

    def _publish_events(self, config: DecodeConfig | PrefillConfig) -> None:
        """Publish cache events, if that is asked for; the last thing that is set up. Raises
        ConfigError, with the node closed."""
        if config.kv_events is None:
            return
        page_size = self.pool.layout.page_size
        try:
            self.kv_events = KVEventPublisher(
                config.kv_events, self.peer_id, config.model.model, page_size
            )
        except BaseException:
            self.close()
            raise
        self._feed.listen(self.kv_events)

    def _check_namespace(self, request: Request) -> None:
        """Raises RequestError, where events are published, for one that they have no words for."""
        if self.kv_events is not None and request.cacheable:
            self.kv_events.dialect.check(request.key.namespace)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a `pop_*` may have something for the engine, at most `timeout_s`. True if one
        may."""
        self._check_open()
        if self.kv_events is not None:
            self._feed.pass_on()
        return self.scheduler.has_news or self._wait(self.transfers.wait, timeout_s)

    def _wait(self, wait: Callable[[float | None], bool], timeout_s: float | None) -> bool:
        """`wait`, but not beyond the time when a request may fail for having waited."""
        left_s = self.scheduler.wake_s - time.monotonic()
        if left_s < (math.inf if timeout_s is None else timeout_s):
            return wait(left_s) or self.scheduler.wake_s <= time.monotonic()
        return wait(timeout_s)

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no new requests from now on (`add` raises DrainingError), and say whether all that
        lived has ended.

        True once no request lives, nothing is left to pop, and no peer may still write here or read
        from here: then `close` harms nobody. Waits for that up to `timeout_s`, but not while a
        `pop_*` has something: the engine's loop goes on, and asks again. Pages in quarantine
        (`stats`) keep it from being True until they are fenced.
        """
        at_least(-math.inf, timeout_s=timeout_s)  # before anything changes
        self._check_open()
        end_s = time.monotonic() + timeout_s
        self.scheduler.draining = True
        while True:
            now_s = self._pump()
            if self.scheduler.idle and not self.transfers.num_rooms:
                return True
            if self.scheduler.has_news or now_s >= end_s:
                return False
            # Also a look now and then: when a room that has ended is forgotten, no event says so.
            self.transfers.wait(min(end_s - now_s, 0.05))

    def fileno(self) -> int:
        """A descriptor that is readable while a `pop_*` may have something, for the engine's own
        poller.

        Now and then it is readable once more when all has been popped already. That a request has
        waited too long it does not say: call `pop_preallocated` from time to time.
        """
        return self.transfers.fileno()

    @property
    def weights_version(self) -> str:
        """The version of the weights that KV is computed with and cached for:
        `ModelConfig.weights_version`, until `flush` moves it."""
        return self.scheduler.weights_version

    @abstractmethod
    def flush(self, weights_version: str | None = None) -> int:
        """Empty the prefix cache. Returns the pages freed at once."""

    def _flush(self, weights_version: str | None, move: Callable[[str, float], None]) -> int:
        """`move` is called where the version is another than before."""
        if weights_version is not None:
            check_version(weights_version)
        now_s = self._pump()
        if weights_version not in (None, self.weights_version):
            move(weights_version, now_s)
        freed = self.scheduler.flush()
        self._tell()
        return freed

    def audit(self) -> None:
        """Check every law of tree, allocator, page table and requests. Slow. Raises
        InternalError."""
        self._pump()
        self.scheduler.check_invariants()

    def take_cache_events(self, afresh: bool = False) -> EventBatch:
        """What the prefix cache stored and removed since the last call, for a router
        (`BoundedAffinityRouter.apply`).

        The first batch, and one `afresh`, gives all that is there. Before the first call nothing is
        recorded.
        """
        self._pump()
        return self._feed.take(afresh)

    @property
    def closed(self) -> bool:
        return self.transfers.closed

    @property
    def num_rooms(self) -> int:
        """Rooms that are open, or not drained yet. Any thread may ask."""
        return self.transfers.num_rooms

    def stats(self) -> dict[str, int]:
        """Counters, and how many pages are in each state. All keys are there from the start, but
        for `dropped: ...` and what is odd in staging.
        """
        self._pump()
        books = self.scheduler.books
        pages, slots = books.allocator, books.slots
        return {
            **dict.fromkeys(self._counters, 0),
            **self.scheduler.counters,
            **self.transfers.stats(),
            "pages_free": pages.free_pages,
            "pages_owned": pages.owned_pages,
            "pages_cached": pages.cached_pages,
            "pages_held": pages.held_pages,
            "pages_quarantined": pages.quarantined_pages,
            "locks": books.cache.stats().num_locks,
            "protected_pages": books.cache.protected_pages,
            "evictable_pages": books.cache.evictable_pages,
            "evicted_pages": books.evicted_pages,
            "requests": len(self.scheduler.requests),
            "user_errors": books.errors.num,
            "slots_free": slots.free_pages if slots is not None else 0,
            "slots_held": slots.held_pages + slots.quarantined_pages if slots is not None else 0,
        }

    def close(self) -> None:
        """Destroy the transport's agent, tell the peers, join every thread. Again: no-op.

        A peer that is writing into this pool over shared memory is not stopped by it: keep the
        pool's memory until its requests have ended there. Raises InternalError, with the threads
        joined, if the agent could not be destroyed.
        """
        try:
            self.transfers.close()
        finally:
            if self.kv_events is not None:
                self.kv_events.close()

    def _pump(self) -> float:
        """Take in what the control thread has to tell; returns the time."""
        now_s = time.monotonic()
        if self.kv_events is not None:
            self._feed.pass_on()
        if not self.transfers.pending:
            self._check_open()
            return now_s
        events, failed = self.transfers.take_raw()
        for event in events:
            self._take(event, now_s)
        self._tell()
        if failed is not None:
            raise InternalError(f"in the control thread: {failed!r}") from failed
        return now_s

    def _tell(self) -> None:
        """Hand the scheduler's commands to the control thread, and let the engine know what is left
        for it.

        Any call takes in what has happened, but only some pop it: the descriptor has been read by
        then.
        """
        for command in self._take_commands():
            self._command(command)
        if self.scheduler.has_news:
            self.transfers.rouse()
        if self.kv_events is not None:
            self._feed.pass_on()

    def _check_open(self) -> None:
        self.transfers.check_open()

    def _command(self, command: C) -> None:
        self.transfers.submit(command)

    @abstractmethod
    def _take_commands(self) -> list[C]:
        """What the scheduler asks."""

    @abstractmethod
    def _take(self, event: E, now_s: float) -> None:
        """Tell the scheduler what became of a room."""
