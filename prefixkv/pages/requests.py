"""The parts that both sides share: a request that holds pages, and its scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np

from prefixkv.cache.events import EventFeed
from prefixkv.cache.results import MatchResult
from prefixkv.config import check_version
from prefixkv.digest import prompt_digest
from prefixkv.errors import (
    CallerError,
    DrainingError,
    InternalError,
    NotFiniteError,
    PrefixKVError,
    RequestError,
    UserErrors,
    WeightsVersionError,
    travels,
)
from prefixkv.pages.groups import GroupPages
from prefixkv.pages.manager import KeptHash, PageManager, RequestPages
from prefixkv.paging import Pages
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.timers import Timers
from prefixkv.request import DeviceEvent, Request
from prefixkv.stats import Journal, namespace_label

State = TypeVar("State", bound=Enum)

MAX_REASON_CHARS: Final = 1000


def reason_of(error: BaseException | str) -> str:
    """Return an error's text for a peer, shortened. Never raises: it runs in the middle of a
    change, and the error may be of the user's own class. An engine's is named: the peer knows its
    class by nothing else."""
    try:
        text = str(error)
        if isinstance(error, NotFiniteError) or not isinstance(error, PrefixKVError | str):
            text = f"{type(error).__name__}: {text}"
        # Without unpaired surrogates, which no frame carries.
        return text[:MAX_REASON_CHARS].encode("utf-8", "replace").decode()
    except Exception:
        return type(error).__name__


def check_reason(reason: object) -> None:
    """Raise RequestError for a reason that no frame can carry."""
    if not isinstance(reason, str):
        raise RequestError(f"reason is a {type(reason).__name__}, a string is needed")
    if not travels(reason):
        raise RequestError(f"reason cannot be encoded: {reason!r} has no bytes in UTF-8")


def check_failure(error: object) -> None:
    """Raise CallerError for what is no exception, with which an engine fails a request."""
    if not isinstance(error, Exception):
        raise CallerError(f"error is a {type(error).__name__}, an exception is needed")


class PagedRequest(Generic[State]):
    """A request as a scheduler sees it: its state, its error, its pages.

    `TRANSITIONS` has for each state those that may follow; `TIMES` names the fields with times.
    """

    __slots__ = (
        "arrived_s", "checkpoint_slot", "ended_s", "error", "fill_len", "generation", "hashes",
        "max_pages", "page_manager", "pages_held", "prefix_len", "request", "rid", "room", "saves",
        "state", "stops",
    )  # fmt: skip

    TRANSITIONS: ClassVar[Mapping[Any, Set[Any]]]
    TIMES: ClassVar[tuple[str, ...]]

    def __init__(self, request: Request, pages: PageManager, state: State, now_s: float) -> None:
        self.request = request
        self.rid = request.rid
        self.room, self.generation = request.room, request.generation
        self.state = state
        self.error: Exception | None = None
        # Set by admission, and None again once the pages were dropped or held for a peer. Only the
        # scheduler's thread writes it; `holders` reads it from any.
        self.pages_held: RequestPages | None = None
        self.arrived_s = now_s
        self.ended_s: float | None = None
        self.max_pages = 0  # that it may come to need
        self.page_manager = pages  # of the node that took the request in
        self.hashes: list[KeptHash] = []  # of its prompt, to be kept once its pages are in the tree
        self.prefix_len = 0  # tokens found here by the latest admission
        self.fill_len = len(request.key)  # whose KV is needed before the next token is sampled
        # The slot of the state that it goes on from, -1 without; where it saves others, in tokens,
        # ascending; and what it has of them, the saving part's.
        self.checkpoint_slot = -1
        self.stops: list[int] = []
        self.saves: Any = None

    def name_prompt(self, match: MatchResult | None) -> None:
        """Work out the prompt's digest from what the tree knows of its match."""
        digest, self.hashes = self.page_manager.digest(self.request.key, match)
        self.request.know_digest(digest)

    def opened(self, pages: RequestPages, prefix_len: int) -> None:
        """Note its pages; the hashes of its prompt are kept where the tree has its path."""
        self.pages_held, self.prefix_len = pages, prefix_len
        if self.hashes:
            pages.hashes, self.hashes = self.hashes, []
            self.page_manager.keep_hashes(pages)

    @property
    def is_named_right(self) -> bool:
        """True unless the digest is another prompt's, for audits. O(tokens)."""
        return self.request.digest == prompt_digest(self.request.key)

    def become(self, state: State) -> None:
        """Raises InternalError if `TRANSITIONS` does not allow it."""
        if state not in self.TRANSITIONS[self.state]:
            raise InternalError(
                f"request {self.rid!r} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

    def check_state(self, allowed: Set[State], why: str) -> None:
        """Raise RequestError in another state than these; `why`: what it does not do there."""
        if self.state not in allowed:
            raise RequestError(f"request {self.rid!r} is {self.state.value}, it {why}")

    @property
    def room_key(self) -> RoomKey:
        """Room and generation: one attempt at the transfer."""
        return RoomKey(self.room, self.generation)

    @property
    def pages(self) -> Pages:
        """Page ids in order, int32; a read-only view, valid until the next call on the node."""
        if self.pages_held is None:
            return np.empty(0, dtype=np.int32)
        return self.page_manager.table.pages(self.pages_held.row)

    def window_pages(self, name: str) -> GroupPages:
        """Return what it has in a window group: a read-only view, valid until the next call on the
        node. Raises CallerError for a group that there is not."""
        group = self.page_manager.windows.named(name)
        if self.pages_held is None:
            return GroupPages(0, np.empty(0, dtype=np.int32))
        return group.row(self.pages_held.row)

    @property
    def row(self) -> int:
        return -1 if self.pages_held is None else self.pages_held.row

    def timeline(self, side: str, outcome: str, peer: str, **found: int) -> dict[str, Any]:
        """Return a request's history for a log, as JSON can hold it; `found` adds fields. The log
        adds `node`, `incarnation` and `arrived_at`.

        Fields that end in `_s` are seconds since the request arrived, of the first time that it
        happened; None: it did not.

        - `node`: Name of the worker that writes the record.
        - `incarnation`: Which process of that name: a random number, in hexadecimal in
          texts ("d0 life 3f2a"). `fence` takes the number.
        - `side`: `decode` or `prefill`.
        - `rid`: The engine's name for the request.
        - `room`: The transfer's number.
        - `generation`: Which attempt at that room.
        - `namespace`: Its first 64 characters; empty for the default namespace. A digest stands
          for a `Namespace`'s salt, and for bytes and tuples.
        - `outcome`: Decode: `finished`, `failed`, `aborted`. Prefill: `sent`, `failed`,
          `aborted`.
        - `error`: Class and text; null if there is none.
        - `peer`: Decode: the prefill worker's address. Prefill: the decode worker's name.
        - `prompt_tokens`: Tokens of the prompt.
        - `hit_tokens`: Prompt tokens that were cached on this side.
        - `skipped_bytes`: KV that was not sent.
        - `arrived_at`: Seconds since 1970, when `add` was called.
        - `ended_s`: When it ended.
        """
        times = {name: getattr(self, name) for name in self.TIMES}
        return {
            "side": side,
            "rid": self.rid,
            "room": self.room,
            "generation": self.generation,
            "namespace": namespace_label(self.request.key.namespace),
            "outcome": outcome,
            "error": None
            if self.error is None
            else f"{type(self.error).__name__}: {reason_of(self.error)}",
            "peer": peer,
            **found,
            **{
                name: None if when_s is None else round(when_s - self.arrived_s, 6)
                for name, when_s in times.items()
            },
        }


def check_own(req: object, kind: type[PagedRequest[Any]], pages: PageManager) -> None:
    """Raise RequestError for what is no request of this kind, or another node's, which its id may
    not show."""
    if not isinstance(req, kind):
        raise RequestError(f"req is a {type(req).__name__}, a {kind.__name__} is needed")
    if req.page_manager is not pages:
        raise RequestError(f"request {req.rid!r} is another node's")


def holding(reqs: Iterable[PagedRequest[Any]]) -> list[tuple[str, RequestPages]]:
    """Return (request id, pages) of those that hold pages. Any thread may call it."""
    # A copy first: the scheduler may add and remove requests meanwhile. Each request's field is
    # read once, since it may become None.
    held = [(req.rid, req.pages_held) for req in list(reqs)]
    return [(rid, pages) for rid, pages in held if pages is not None]


Req = TypeVar("Req", bound=PagedRequest[Any])
Command = TypeVar("Command")


class BrokenEvent:
    """An event that has raised `error` once. Later exceptions of it are not reported again."""

    def __init__(self, event: DeviceEvent, error: Exception) -> None:
        self._event, self.error = event, error

    def query(self) -> bool:
        """False if the event, which has raised before, raises again."""
        try:
            return self._event.query()
        except Exception:
            return False


class AllOf:
    """Events that count as one, which is done when each of them is."""

    def __init__(self, *events: DeviceEvent) -> None:
        self._events: list[DeviceEvent] = []
        for event in events:
            self._events += event._events if isinstance(event, AllOf) else [event]

    def query(self) -> bool:
        while self._events and self._events[-1].query():
            self._events.pop()
        return not self._events


def not_done(after: DeviceEvent | None) -> DeviceEvent | None:
    """Return the event to wait for; None if it is done. Called before changes: `query` may
    raise."""
    return None if after is None or after.query() else after


def still_pending(event: DeviceEvent, errors: UserErrors) -> DeviceEvent | None:
    """Return None once the device is done, else the event to query next time. An event that raises
    has proved nothing, so its pages stay where they are."""
    try:
        return None if event.query() else event
    except Exception as error:
        # Report the first exception only: it is queried on every pass.
        errors.caught(error)
        return event if isinstance(event, BrokenEvent) else BrokenEvent(event, error)


class PagedScheduler(ABC, Generic[Req, Command]):
    """The live requests of one side, as its engine calls them, and the commands for its control
    plane.

    A call of the engine's takes in events by `_pump`, and hands its commands on by `_tell`; a node
    overrides both. By itself a scheduler has neither clock nor control plane: its owner sets
    `now_s` before a call, and takes the commands after it.
    """

    now_s = 0.0

    def __init__(self, pages: PageManager, journal: Journal, weights_version: str = "") -> None:
        self.pages = pages
        # Of the KV that is computed and cached now: `ModelConfig.weights_version`, until `flush`
        # moves it.
        self.weights_version = weights_version
        self.requests: dict[str, Req] = {}  # all that live, by rid, oldest first
        self.draining = False  # takes no new requests
        self.journal = journal
        self.counters = journal.counters
        # What `on_ended` raises is reported together with the errors of the policy.
        journal.errors = pages.errors
        # Collected during a call: requests that failed, and commands not taken yet, in order. The
        # second list stays the same one, since parts of a scheduler append to it.
        self._failed: list[Req] = []
        self._commands: list[Command] = []
        self._deadlines: Timers[Req] = Timers()  # the requests' own

    def _pump(self) -> float:
        """Take in what has happened; return the time."""
        return self.now_s

    def _tell(self) -> None:
        """Hand on the commands."""

    @property
    @abstractmethod
    def has_results(self) -> bool:
        """True if a `pop_*` call returns something, or may. O(1)."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """True if no request lives, nothing is to be popped, and no page waits. O(1)."""

    @property
    @abstractmethod
    def wake_s(self) -> float:
        """Time at which a `pop_*` call may return something though nothing has happened."""

    @abstractmethod
    def hear(self, event: Any, now_s: float) -> None:
        """Take what became of a room on all ranks."""

    @abstractmethod
    def feeds(self, worker: PeerId) -> list[EventFeed]:
        """Return the feeds of its caches, that of the pages first."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Check every part, and the parts against each other. Raises InternalError."""

    def _note_deadline(self, req: Req) -> None:
        if req.request.deadline_s is not None:
            self._deadlines.wake(req, req.arrived_s + req.request.deadline_s)

    def take_commands(self) -> list[Command]:
        """Return the commands for the control plane, in order, and forget them."""
        commands = [*self._commands]
        del self._commands[:]
        return commands

    def _flush(self, weights_version: str | None, after: DeviceEvent | None = None) -> int:
        # The version is checked before anything changes; events that have come are taken in under
        # the old one.
        if weights_version is not None:
            check_version(weights_version)
        now_s = self._pump()
        if weights_version is not None and weights_version != self.weights_version:
            after = not_done(after)
            error = WeightsVersionError(self.weights_version, weights_version)
            self.weights_version = weights_version
            self._move_weights(error, now_s, after)
        freed = self._empty()
        self._tell()
        return freed

    @abstractmethod
    def _move_weights(self, error: Exception, now_s: float, after: DeviceEvent | None) -> None:
        """End what has KV of the former weights."""

    def _empty(self) -> int:
        return self.pages.flush()

    def holders(self) -> list[tuple[str, RequestPages]]:
        """Return (request id, pages) of all requests that hold pages. Any thread may call it."""
        return holding(self.requests.values())

    def _check_new(self, request: Request, num_pages: int, needs: str) -> None:
        """Raise RequestError for a request that cannot be accepted. `num_pages` it may need in all;
        `needs` says so in words, with {} for the number."""
        rid, limit = request.rid, min(self.pages.num_pages, self.pages.table.array.shape[1])
        if self.draining:
            raise DrainingError(f"request {rid!r} comes too late: this node is being drained")
        if num_pages > limit:
            needed = needs.format(num_pages)
            raise RequestError(f"request {rid!r} {needed}, {limit} is the most there is")
        if rid in self.requests:
            raise RequestError(f"request {rid!r} is here already")
