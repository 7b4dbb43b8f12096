"""The common part of both nodes: a scheduler, a transfer side with its threads."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from prefixkv.cache.events import EventBatch, Listener
from prefixkv.config import DecodeConfig, PageOptions, PrefillConfig, organs_of
from prefixkv.errors import CallerError, ConfigError, UserErrors, shown
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import Command, PagedScheduler, Req
from prefixkv.protocol.commands import Fence
from prefixkv.protocol.events import HostCopy, RoomEvent
from prefixkv.protocol.ids import PeerId
from prefixkv.request import Request
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.runtime.transfers import OfTransfers, Transfers, peer_id
from prefixkv.settings import at_least, check_flag, check_timeout
from prefixkv.stats import Histogram

_log = logging.getLogger("prefixkv.cache")
_request_log = logging.getLogger("prefixkv.requests")

Config: TypeAlias = DecodeConfig | PrefillConfig
E = TypeVar("E", bound=RoomEvent)  # events of rooms, for the scheduler

COUNTERS = (
    "aborts_of_unknown", "control_errors", "failed", "frames_dropped", "frames_failed",
    "handshakes_refused", "peers_proved_dead", "peers_unreachable", "prompt_tokens",
)  # fmt: skip


class Ranks(Protocol):
    """`ranks=` of a node: what it says to the other ranks of its worker, a RankLog."""

    endpoints: Sequence[str]  # of the other ranks of a prefill worker, in order

    def take(self, pages: PageManager, requests: Iterable[Any]) -> bytes: ...

    def has_news(self, pages: PageManager) -> bool: ...

    def copy(self, order: HostCopy) -> None: ...


class OneRank:
    """Link between a scheduler and the control objects of all ranks of its worker, which has one.
    Where there are several, `Node.lead` puts a leader with the same calls in its place."""

    def __init__(self, submit: Callable[[Any], None], hear: Callable[[Any, float], None]) -> None:
        self.command, self._hear = submit, hear

    def on(self, rank: int, event: Any, now_s: float) -> None:
        self._hear(event, now_s)

    def on_rank_events(self, raw: bytes, now_s: float) -> None:
        if raw != b"":
            raise CallerError("events of another rank, and this worker has only one")

    def awaited(self) -> dict[int, int]:
        return {}

    def fence(self, rank: int, now_s: float, end_all: Callable[[Exception], None]) -> None:
        raise CallerError(f"rank is {shown(rank)}: this worker has only one rank")


class Node(OfTransfers, PagedScheduler[Req, Command], Generic[Req, Command, E]):
    """A scheduler with threads: the base of DecodeNode and PrefillNode. Used from one thread: the
    engine's scheduler thread owns tree, allocator and requests."""

    any_thread = frozenset({"figures", "fileno", "holders", "lost_peers", "peers"})

    side: ClassVar[str]
    config: Config
    pool: KVPool
    state: StatePool | None
    transfers: Transfers[Command, E]
    peer_id: PeerId
    evictions: Histogram  # seconds that making room took
    kv_events: Any = None  # the publisher of cache events, if there is one
    # By setting, what puts in the part of a node that the setting asks for (`assembly.py`).
    installers: ClassVar[dict[str, Callable[[Any, Any], None]]] = {}
    # The same for `ranks=`: the check of it, and what makes this rank 0 of several.
    lead: ClassVar[tuple[Callable[[object], None], Callable[..., None]] | None] = None
    leader: OneRank
    _logged: Iterable[Any] = ()  # prefill's requests
    _command: Callable[[Command | Fence], None]  # to the control objects of all ranks
    # Keys that `stats` has from the start, at 0.
    _counters: tuple[str, ...]

    def _spec(
        self, pool: KVPool, config: Config, mesh: Mesh | None, state: StatePool | None,
        ranks: Ranks | None,
    ) -> RankSpec:  # fmt: skip
        """Remember these; raise ConfigError for what does not fit together."""
        self.pool, self.state, self.config, self._ranks = pool, state, config, ranks
        self._closing = ExitStack()
        self.checks: list[Callable[[Request], object]] = []  # of a request that is added
        self.more_stats: list[Callable[[], dict[str, int]]] = []
        self._listeners: Sequence[Listener] = ()
        spec = RankSpec(pool, mesh, state=state)
        self.num_ranks = spec.mesh.num_ranks
        if ranks is not None:
            if self.lead is None:
                raise ConfigError("ranks: this installation has no part for several")
            self.lead[0](ranks)
        elif spec.mesh.num_ranks > 1:
            raise ConfigError(f"a mesh of {spec.mesh.num_ranks} ranks needs a RankLog")
        spec.check_own_memory()
        return spec

    def _make_pages(self, spec: RankSpec, options: PageOptions) -> PageManager:
        layout = spec.layout
        sizes = layout.num_pages, layout.page_size, self.config.max_running
        return PageManager(*sizes, options=options._replace(windows=spec.windows))

    def _observe(self, timeline: Callable[[Any, int, int], dict[str, Any]]) -> None:
        layout, pages = self.pool.layout, self.pages
        errors, sizes = pages.errors, (layout.page_bytes, layout.page_size)
        errors.say = _log.error
        self._request_log = RequestLog(self.peer_id, errors, lambda req: timeline(req, *sizes))
        self.journal.on_ended.append(self._request_log)
        # A scheduler by itself, and pages, have no clock.
        pages.clock, self.evictions = time.perf_counter, pages.evictions
        self._feeds = self.feeds(self.peer_id)
        # Last of all, what the config asks for besides.
        for setting, value in organs_of(self.config):
            if setting not in self.installers:
                raise ConfigError(f"{setting}: this installation has no part for it")
            self.installers[setting](self, value)

    def on_ended(self, listener: Callable[[dict[str, Any], float], object]) -> None:
        """Have the node call `listener(record, arrived_s)` for each request that ends from now on.

        It is called on the node's thread, in the middle of the request's end: it must be quick, and
        call nothing of the node. What it raises comes out of a later call of the engine's, and is
        counted as `user_errors`. `record` is as the request log has it, whether that is on or not;
        `arrived_s` the `time.monotonic` at which the request arrived.
        """
        if not callable(listener):
            raise CallerError(f"{shown(listener)} cannot be called")
        self._request_log.listeners.append(listener)

    def on_change(self, *listeners: Listener) -> None:
        """Hand the changes of each cache to a listener: of the pages, then of those behind them."""
        self._listeners = listeners
        for feed, listener in zip(self._feeds, listeners, strict=True):
            listener.listen(feed.cache)

    @property
    def num_caches(self) -> int:
        return len(self._feeds)

    def on_close(self, close: Callable[[], object]) -> None:
        """Call `close` once the transfer side has closed; what came last is called first."""
        self._closing.callback(close)

    def _check_new(self, request: Request, num_pages: int, needs: str) -> None:
        for check in self.checks:
            check(request)
        super()._check_new(request, num_pages, needs)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a `pop_*` may have something, at most `timeout_s`. Returns whether."""
        check_timeout(timeout_s)
        self.transfers.check_open()
        for listener in self._listeners:
            listener.pass_on()
        if self.has_results:
            return True
        left_s = self.wake_s - time.monotonic()
        # No event comes for a deadline of the scheduler's, so the wait has to end at it.
        if left_s < (math.inf if timeout_s is None else timeout_s):
            return self._sleep(left_s) or self.wake_s <= time.monotonic()
        return self._sleep(timeout_s)

    def _sleep(self, timeout_s: float | None) -> bool:
        return self.transfers.wait(timeout_s)

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no new requests (`add` raises DrainingError); return True once all have ended.

        True once no request lives, nothing is left to pop, and no peer may still write here or read
        from here: then `close` harms nothing. Waits for that up to `timeout_s`, but not while a
        `pop_*` has something: the engine's loop goes on, and asks again. Pages in quarantine
        (`stats`) keep it from being True until they are fenced.
        """
        at_least(-math.inf, timeout_s=timeout_s)  # before anything changes
        check_timeout(timeout_s)
        self.transfers.check_open()
        end_s = time.monotonic() + timeout_s
        # Before the first look: what is added after it would not be seen.
        self.draining = True
        while True:
            now_s = self._pump()
            # Rooms as well as requests: a room outlives its request until it is drained.
            if self.idle and not self.transfers.num_rooms:
                return True
            if self.has_results or now_s >= end_s:
                return False
            # Also a look now and then: when a room that has ended is forgotten, no event says so.
            self.transfers.wait(min(end_s - now_s, 0.05))

    def audit(self) -> None:
        """Check every law: tree, allocator, page table and requests. Slow. Raises InternalError."""
        self._pump()
        self.check_invariants()

    def take_cache_events(self, snapshot: bool = False) -> EventBatch:
        """Return what the cache, and behind it host memory, stored and removed since the last call,
        for a router (`BoundedAffinityRouter.apply`).

        The first batch, and one with `snapshot`, gives the whole content. Before the first call
        nothing is recorded.
        """
        check_flag("snapshot", snapshot)
        self._pump()
        batch, *behind = [feed.take(snapshot) for feed in self._feeds]
        for more in behind:
            batch = msgspec.structs.replace(batch, events=batch.events + more.events)
        return batch

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self.transfers.closed

    def stats(self) -> dict[str, int]:
        """Return the node's counters, and how many pages are in each state.

        All keys are there from the start, but for those of the second list.

        - `prompt_tokens`: Tokens admitted. On decode, admissions after a retraction count
          again.
        - `requests`: Requests that live now.
        - `user_errors`: What admission policies, log handlers and events of the engine's
          raised; the first is raised by the next `pop_preallocated` or `pop_bootstrapped`. An
          eviction policy that raises is counted and logged once: its cache goes on with `lru`.
        - `rooms`: Rooms that are open, or not drained yet.
        - `failed`: Requests that failed; on prefill aborted ones too.
        - `aborts_of_unknown`: `abort` of a request that is not here, or has ended.
        - `pages_free`, `pages_owned`, `pages_cached`, `pages_held`, `pages_quarantined`:
          Pages by state, now.
        - `locks`, `protected_pages`, `evictable_pages`: Locked prefixes, cached pages under
          a lock and not, now.
        - `evicted_pages`: Cached pages that were given to requests.
        - `slots_free`, `slots_held`: Slots of extra state, now; held: of rooms that are not
          drained. 0 without a state pool.
        - `window_pages_free`, `window_pages_owned`, `window_pages_cached`,
          `window_pages_held`: Pages of all window groups by state, now; cached: kept by
          checkpoints, on prefill; held: of rooms that are not drained, or overdue. 0
          without such groups.
        - `frames_dropped`: Control frames that were received and dropped.
        - `frames_failed`: Control frames that raised an exception here; the room that each
          named has ended. The log has it: report it.
        - `handshakes_refused`: Peers that do not fit.
        - `peers_proved_dead`: Peers that were fenced since they are proved dead.
        - `peers_unreachable`: Peers that a transport could not reach.
        - `log_errors`: What handlers of the logs of peers and frames have raised.
        - `control_errors`: Steps of the control thread that failed. The next call raises
          `InternalError`: report it.
        - `cut_tokens`: Prompt tokens whose KV was cached and that were computed again,
          since no checkpoint lay behind them.
        - `checkpoints`, `checkpoint_slots`, `checkpoints_evicted`: Checkpoints that are
          kept now, how many there may be, and how many were given up for others.

        Keys that are there once it happens:

        - `dropped: CLASS`: Frames received and dropped, by error.
        - `frames_not_sent: WHY`, `frames_malformed`: Frames that found no open queue; frames
          that prefixkv never sends.
        - `connections_cut`: Connections that were ended since too many had begun and sent
          no message.
        - `staging_asks_of_no_room`, `staging_asked_again`, `staging_arrivals_of_no_lease`,
          `staging_arrivals_not_awaited`, `staging_arrivals_that_disagree`: Words on staging
          that came late or twice. They do no harm; many of them mean that a peer is slow or
          wrong.
        - `staging_grants_not_awaited`, `staging_grants_outside`, `staging_pieces_asked`,
          `staging_asks_repeated`: On prefill: late or repeated grants; leases asked for.
        """
        self._pump()
        return self.figures()

    def figures(self) -> dict[str, int]:
        """Return `stats` as of the last call. Any thread may ask."""
        page_manager, states = self.pages, self.pages.allocator.counts()
        slots, saves = page_manager.slots, page_manager.saves
        stats = {
            **dict.fromkeys(self._counters, 0),
            **self.counters,
            **self.transfers.stats(),
            **{f"pages_{state}": number for state, number in states.items()},
            "locks": page_manager.cache.num_locks,
            "protected_pages": page_manager.cache.protected_pages,
            "evictable_pages": page_manager.cache.evictable_pages,
            "evicted_pages": page_manager.evicted_pages,
            "requests": len(self.requests),
            "user_errors": page_manager.errors.num,
            "slots_free": slots.free_pages if slots is not None else 0,
            "slots_held": slots.held_pages + slots.quarantined_pages if slots is not None else 0,
            **page_manager.windows.counts(),
            "cut_tokens": saves.cut_tokens,
            "checkpoints": len(saves),
            "checkpoint_slots": saves.num_slots,
            "checkpoints_evicted": saves.evicted,
        }
        for more in self.more_stats:
            stats |= more()
        return stats

    def close(self) -> None:
        """Destroy the transport's agent, tell the peers, join every thread. Idempotent.

        A peer that is writing into this pool over shared memory is not stopped by it: keep the
        pool's memory until its requests have ended there. Raises InternalError if the agent could
        not be destroyed; the threads are joined all the same.
        """
        try:
            self.transfers.close()
        finally:
            self._closing.close()

    def _pump(self) -> float:
        """Take in what the control thread has to say; return the time. Every call of the engine
        begins with this. Raises InternalError for an exception there; the next call goes on."""
        now_s = self.now_s = time.monotonic()
        for listener in self._listeners:
            listener.pass_on()
        if not self.transfers.pending:  # the usual case: nothing has come
            self.transfers.check_open()
            return now_s
        for event in self.transfers.take_events():
            self.leader.on(0, event, now_s)
        self._tell()
        return now_s

    def _tell(self) -> None:
        """Hand commands to the control thread, and mark what is left for the engine: any call takes
        in what has happened, but only some pop it, so the descriptor is made readable again."""
        # 1. Commands first: the control thread works on them while the rest is done here.
        if self._commands:
            for command in self.take_commands():
                self._command(command)
        if self.has_results:
            # 2. The engine's poller comes back for what only a `pop_*` takes.
            self.transfers.thread.events.notify()
        for listener in self._listeners:
            listener.pass_on()

    def fence(self, peer: str, incarnation: int) -> None:
        """Take the caller's word that this process of the other side is dead: its rooms end, and
        what they hold comes back."""
        self.transfers.check_open()
        self._command(Fence(peer_id(peer, incarnation)))

    def _lead(self, spec: RankSpec, tier_pages: int = 0) -> None:
        self.peer_id = self.transfers.peer_id
        self.leader = OneRank(self.transfers.thread.submit, self.hear)
        if self._ranks is not None and self.lead is not None:
            self.lead[1](self, spec, self._ranks, tier_pages)
        self._command = self.leader.command

    @property
    def _log(self) -> Ranks:
        if self._ranks is None:
            raise CallerError("this node was built without ranks=RankLog()")
        return self._ranks

    def take_log(self) -> bytes:
        """Return what the other ranks have to apply, to be broadcast once a pass: before they
        compute, and on prefill once its chunks were handed over. Raises CallerError without
        `ranks`."""
        return self._log.take(self.pages, self._logged)

    def apply_rank_events(self, raw: bytes) -> None:
        """Take the events of another rank of this worker (its `take_rank_events`); b"" is nothing.
        Raises CallerError if a batch of this rank is missing or doubled: each has to come, in
        order."""
        self.leader.on_rank_events(raw, self._pump())
        self._tell()

    def awaited_ranks(self) -> dict[int, int]:
        """Return, by rank, how many rooms wait for what it alone has not said. A rank that stays
        there is dead (`fence_rank`), or a peer that it sends to or gets from (its `lost_peers`)."""
        return self.leader.awaited()


class RequestLog:
    """The `on_ended` of a journal. Costs little while the logger is off, and nothing listens.

    Logger `prefixkv.requests` has a record per request that has ended, level INFO, a JSON object:

        {"side": "decode", "rid": "r1", "room": 7, ..., "hit_tokens": 6144,
         "arrived_at": 1763740000.1, "admitted_s": 0.0021, ..., "ended_s": 2.5}

    Times are seconds since the arrival. `room` and `generation` join decode's record to prefill's.
    `decode/request.py` and `prefill/request.py` say what each field is. The log record has it as
    `request`.

    Each of `listeners` gets a copy of every record, and when its request arrived, by
    `time.monotonic`. `errors` takes what a listener raises.
    """

    def __init__(
        self, me: PeerId, errors: UserErrors, timeline: Callable[[Any], dict[str, Any]]
    ) -> None:
        self._me, self._errors, self._timeline = me, errors, timeline
        self.listeners: list[Callable[[dict[str, Any], float], object]] = []

    def __call__(self, req: Any, now_s: float) -> None:
        # Before anything is computed: this runs on the scheduler's thread, for each request.
        is_logged = _request_log.isEnabledFor(logging.INFO)
        if not is_logged and not self.listeners:
            return
        record = {
            "node": self._me.name,
            "incarnation": self._me.incarnation,
            **self._timeline(req),
            # Requests have the monotonic clock; an operator wants the time of day.
            "arrived_at": round(time.time() - (now_s - req.arrived_s), 6),
        }
        # A listener that changes its record, or raises, takes nothing from those behind it. Last
        # the logger: its handlers are the user's, too, and may raise.
        for listener in self.listeners:
            try:
                listener(record.copy(), req.arrived_s)
            except Exception as error:
                self._errors.caught(error)
        if is_logged:
            _request_log.info("%s", json.dumps(record), extra={"request": record})


def check_windows(pages: PageManager) -> None:
    """Raise ConfigError for a window group in which not even one request has room."""
    for group in pages.windows:
        if (has := group.allocator.num_pages) < group.most_pages:
            raise ConfigError(
                f"group {group.name!r} has {has} pages; one request may need {group.most_pages} of "
                f"{group.page_size} tokens: window {group.window}, step_tokens {group.step_tokens}"
            )
