"""Decode's scheduler with host memory, everything around it played from a list of integers, against
a naive model: the KV of a token follows from its namespace, the weights, and all tokens before it.

Pools on both sides are arrays of such values, one per rank. What prefill, the engine's device and
the copies do is done to them a piece at a time, in any order, late, or wrong where an error says
so. Whatever is read is compared with the model: what a request continues, what it runs on, and all
that both trees have. After every step all laws are checked; at the end nothing may be left.

With windows, states or both beside the pages, prefill sends these with each room, and no copy has
them: the KV of a token is that of the window layers too, and a state that of the last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.admission import admission_names
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cache.node import Root
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.config import ComputeConfig
from prefixkv.decode.host_tier import load_key
from prefixkv.decode.inflight import Flight
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.request import CAN_RUN, DecodeRequest
from prefixkv.decode.sources import Source, Sources
from prefixkv.errors import OutOfPagesError, RequestError, TransferError
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.pages.windows import WindowSpec
from prefixkv.protocol.commands import AbortRoom, MeetPrefill, OpenRoom, RefuseRoom
from prefixkv.protocol.host_copy import HostCopy, HostCopyDone
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.copies import RankCopies
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest
from tests.support.spelled import Event, Spelled
from tests.support.timed import DecodeScheduler

PAGE_SIZE = 2
ROWS = 6
GARBAGE = -1
KINDS = ("pages", "windows", "states", "both")
WINDOW = 5  # tokens; one request has three pages of it at most
WINDOW_PAGES = 13
NUM_SLOTS = 5
_MODEL: dict[tuple[int, int], int] = {}

Values = npt.NDArray[np.int64]


def kv_after(before: int, token: int) -> int:
    """The KV of a token behind one with this KV."""
    return _MODEL.setdefault((before, token), len(_MODEL) + 1)


def kv_before(namespace: Hashable, weights: int) -> int:
    """What the KV of a first token follows."""
    return -10 - 1000 * weights - [None, "lora"].index(namespace)  # type: ignore[list-item]


def kv_of(namespace: Hashable, weights: int, tokens: Sequence[int]) -> Values:
    """The KV of these tokens, one value each."""
    values, last = np.empty(len(tokens), np.int64), kv_before(namespace, weights)
    for place, token in enumerate(tokens):
        values[place] = last = kv_after(last, token)
    return values


@dataclass(eq=False)
class Room:
    """A room that prefill writes into: what it has to send, and how much it has sent."""

    key: RoomKey
    prefill: str
    pages: list[int]
    values: Values  # of the tokens in these pages
    last_pages: list[int]  # of the window group
    last_values: Values  # from the first token of these on
    state_slot: int
    num_sent: int = 0
    has_sent_rest: bool = False  # window and state
    is_over: bool = False  # prefill has sent all of it, or has failed


@dataclass(eq=False)
class RankCopy:
    """A copy on one rank."""

    order: HostCopy
    rank: int
    num_done: int = -1  # it has not begun


class ChosenSources(Sources):
    """Sources that chance chooses between, of those that the bounds leave."""

    def __init__(self, machine: HostMachine, config: ComputeConfig, fails_over: bool) -> None:
        super().__init__(config, fails_over)
        self._chance = machine.chance

    def choose(self, missing: int, *args: Any, **more: Any) -> Source:
        chosen = super().choose(missing, *args, **more)
        return Source.PREFILL if self._chance.randrange(4) == 3 else chosen


class HostMachine:
    """See the module's text. `setup` spells pools, policies and the number of ranks. `kind`: of
    `KINDS`."""

    def __init__(self, setup: int, kind: str = "pages") -> None:
        self.has_windows, self.has_states = kind in ("windows", "both"), kind in ("states", "both")
        chance = self.chance = Spelled()
        chance.spell(setup)
        self.num_pages = chance.choice([12, 9, 16, 26])
        self.host_pages = chance.choice([40, 60, 12, 5, 2])
        self.num_ranks = chance.choice([1, 2, 3])
        spare_rows = chance.choice([3, 1, 8])
        policies = ["lru", *policy_names()]
        policy, host_policy = chance.choice(policies), chance.choice(policies)
        is_ready = chance.randrange(3) < 2
        self.num_ready = self.host_pages if is_ready else 0
        below = chance.choice([None, 4, 100])
        fails_over = bool(chance.randrange(2))
        self.pace = chance.choice([0.05, 0.0, 0.5])  # 0: the clock stands still
        self.fail = chance.choice([0.05, 0.0, 0.3])  # of a copy, on one rank
        self.slow_rank = chance.randrange(self.num_ranks) if chance.randrange(2) else -1
        gated = bool(chance.randrange(2))
        self.spared = {what for what in _SPARED if chance.randrange(2)}
        # Few requests come back where the host is small, so that it is more than a place to pass.
        self.is_talk = chance.randrange(6) > 0
        pages = PageManager(
            self.num_pages, PAGE_SIZE, ROWS, policy=policy, spare_rows=spare_rows,
            num_slots=NUM_SLOTS if self.has_states else 0,
            windows=[WindowSpec("w", WINDOW, WINDOW_PAGES, 1)] if self.has_windows else [],
        )  # fmt: skip
        pages.hash_every_pages = 1
        config = None if below is None else ComputeConfig(below=below, chunk_tokens=4)
        admission, retries = chance.choice(["fifo", *admission_names()]), chance.choice([0, 2])
        self.scheduler = DecodeScheduler(
            pages,
            reserve_tokens=chance.choice([0, 3]),
            max_retries=retries,
            admission=admission,
            patience_s=chance.choice([5.0, 0.0]),
            lanes=Lanes(gated),
            sources=Sources(loads=chance.randrange(2) > 0)
            if config is None
            else ChosenSources(self, config, fails_over),
            host=(self.host_pages, host_policy, is_ready),
        )
        assert self.scheduler.host is not None
        self.host = self.scheduler.host
        self.pages, self.now_s = pages, 0.0
        shape = self.num_ranks, self.num_pages, PAGE_SIZE
        self.device = np.full(shape, GARBAGE, np.int64)
        self.memory = np.full((self.num_ranks, self.host_pages, PAGE_SIZE), GARBAGE, np.int64)
        self.last = np.full((self.num_ranks, WINDOW_PAGES, PAGE_SIZE), GARBAGE, np.int64)
        self.states = np.full((self.num_ranks, NUM_SLOTS), GARBAGE, np.int64)
        self.state_at: dict[DecodeRequest, int] = {}  # tokens, of those that run
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.rooms: dict[RoomKey, Room] = {}
        self.undrained: list[Room] = []  # over, or aborted: prefill may still write them
        self.computing: dict[DecodeRequest, int] = {}  # tokens with KV
        self.running: list[DecodeRequest] = []
        self.weights = 0
        self.weights_of: dict[DecodeRequest, int] = {}  # of its KV since its last admission
        self.version = 0
        self.copies: list[RankCopy] = []
        self.joined = RankCopies(self.num_ranks)
        self.ends: list[tuple[int, HostCopyDone]] = []
        self.events: list[tuple[Event, Callable[[], None]]] = []
        self.past: list[tuple[list[int], Hashable]] = []
        self.may_not_load: set[DecodeRequest] = set()  # a load of theirs has failed
        self.away: set[str] = set()
        self.added: set[str] = set()
        self.ended: set[str] = set()
        self._num_requests = 0
        self.calm = False

    # --- a step -----------------------------------------------------------------------------------

    def spell(self, value: int) -> None:
        """Let one thing happen, then look at everything."""
        self.chance.spell(value)
        name = _WHEEL[self.chance._randbelow(len(_WHEEL))]
        if name in self.spared or not getattr(self, name)():
            name = self._progress()
        self.trace.append(name)
        self.counts["steps"] += 1
        self._after()

    def _progress(self) -> str:
        """One of the things that go on by themselves; else somebody comes."""
        start = self.chance.randrange(len(_ONWARD))
        for name in _ONWARD[start:] + _ONWARD[:start]:
            if getattr(self, name)():
                return name
        for name in ("device_is_done", "pop_failed", "host_is_ready", "arrive"):
            if getattr(self, name)():
                return name
        return "nothing"

    def _after(self) -> None:
        """Take what the scheduler wants, and check all that there is."""
        for order in self.scheduler.take_copies():
            self._ordered(order)
        for command in self.scheduler.take_commands():
            if isinstance(command, OpenRoom):
                self._opened(command)
            elif isinstance(command, AbortRoom):
                self._over(command.key)
            elif isinstance(command, MeetPrefill):
                if command.address not in self.away:
                    self.scheduler.prefill_ready(command.address, 0, self.now_s)
                else:
                    self.scheduler.prefill_away(command.address, self.now_s)
            elif isinstance(command, RefuseRoom):
                # Prefill has written nothing for it.
                nothing = kv_of(None, 0, [])
                self.undrained.append(
                    Room(command.key, command.address, [], nothing, [], nothing, -1)
                )
        self.scheduler.check_invariants()
        assert not (self.scheduler.idle and (self.copies or self.ends)), "it is idle beside copies"
        self._check_tree(self.pages.cache, self.device)
        self._check_tree(self.host.cache, self.memory)

    def _check_tree(self, cache: RadixCache, memory: Values) -> None:
        """Law 8 and T3: whatever can be found has the KV of its path, on every rank."""
        above: dict[object, int] = {}
        for node in cache.nodes():
            parent = node.parent
            if isinstance(parent, Root):
                last = kv_before(parent.namespace, self.weights)
            else:
                last = above[parent]
            tokens = np.frombuffer(bytes(node.key), "<i4").tolist()
            values = []
            for token in tokens:
                last = kv_after(last, token)
                values.append(last)
            above[node] = last
            ids = np.frombuffer(bytes(node.pages), "<i4")
            found = memory[:, ids].reshape(self.num_ranks, -1)
            assert (found == self._of_ranks(np.array(values, np.int64))).all(), (
                f"law 8: {'host' if memory is self.memory else 'device'} pages {ids.tolist()} have "
                f"other KV than {tokens} behind {parent}"
            )

    def _of_ranks(self, values: Values) -> Values:
        """These values as each rank has its part of them."""
        return values + 1_000_000_000 * np.arange(self.num_ranks, dtype=np.int64)[:, None]

    # --- the KV of a request ----------------------------------------------------------------------

    def _kv(self, req: DecodeRequest, end: int) -> Values:
        """What the model says of the first `end` tokens of a request."""
        tokens = req.tokens[:end].tolist()
        return kv_of(req.request.key.namespace, self.weights_of[req], tokens)

    def _check_kv(self, req: DecodeRequest, end: int) -> None:
        found = self.device[:, req.pages].reshape(self.num_ranks, -1)[:, :end]
        assert (found == self._of_ranks(self._kv(req, end))).all(), (
            f"law 8: {req.rid} reads other KV than that of its {end} tokens"
        )

    def _write_kv(self, req: DecodeRequest, start: int, end: int) -> None:
        """The engine's device writes the KV of tokens [start, end) of a request."""
        self._put(req.pages, start, self._kv(req, end)[start:])

    def _put(self, pages: Sequence[int], start: int, values: Values) -> None:
        """Write values into the slots of these device pages, from slot `start` on."""
        slots = np.arange(start, start + len(values))
        ids = np.asarray(pages, np.int32)[slots // PAGE_SIZE]
        self.device[:, ids, slots % PAGE_SIZE] = self._of_ranks(values)

    # --- windows and states -----------------------------------------------------------------------

    def _check_rest(self, req: DecodeRequest, end: int) -> None:
        """Law 8: behind `end` tokens a request has its window, and its state."""
        values = self._kv(req, end)
        if self.has_windows:
            first, ids = req.window_pages("w")
            start = max(0, end + 1 - WINDOW)
            slots = np.arange(start, end)
            found = self.last[:, ids[slots // PAGE_SIZE - first], slots % PAGE_SIZE]
            assert (found == self._of_ranks(values[start:])).all(), (
                f"law 8: {req.rid} has another window behind {end} tokens"
            )
        if self.has_states:
            found = self.states[:, req.state_slot]
            assert (found == self._of_ranks(values[-1:])[:, 0]).all(), (
                f"law 8: {req.rid} has another state than behind {end} tokens"
            )

    def _write_rest(self, req: DecodeRequest, at: int) -> None:
        """The engine's step writes the window's KV of token `at`, and replaces the state."""
        value = self._of_ranks(self._kv(req, at + 1)[-1:])[:, 0]
        if self.has_windows:
            first, ids = req.window_pages("w")
            self.last[:, ids[at // PAGE_SIZE - first], at % PAGE_SIZE] = value
        if self.has_states:
            self.states[:, req.state_slot] = value

    def _put_rest(self, room: Room, is_good: bool) -> None:
        """Prefill's write of window and state lands."""
        if room.last_pages:
            slots = np.arange(len(room.last_values))
            ids = np.asarray(room.last_pages, np.int32)[slots // PAGE_SIZE]
            values = self._of_ranks(room.last_values)
            self.last[:, ids, slots % PAGE_SIZE] = values if is_good else GARBAGE - 2
        if room.state_slot >= 0:
            values = self._of_ranks(room.last_values[-1:])[:, 0]
            self.states[:, room.state_slot] = values if is_good else GARBAGE - 2

    def _spoil_rest(self, req: DecodeRequest) -> Callable[[], None]:
        """The last writes to the window and the state of one that has ended."""
        ids = req.window_pages("w").ids.tolist() if self.has_windows else []
        slots = [req.state_slot] if self.has_states else []

        def write() -> None:
            self.last[:, ids] = GARBAGE - 4
            self.states[:, slots] = GARBAGE - 4

        return write

    # --- requests ---------------------------------------------------------------------------------

    def arrive(self, copies: int = 1) -> bool:
        """A conversation goes on, or one begins like others."""
        chance = self.chance
        if self.past and self.is_talk and chance.randrange(8):
            tokens, namespace = chance.choice(self.past)
            if chance.randrange(4) == 0:
                tokens = tokens[: chance.randint(1, len(tokens))]
        else:
            tokens, namespace = [1, 2, 3], chance.choice([None, None, "lora"])
        tokens = tokens + [chance.randrange(2) for _ in range(chance.choice([1, 2, 3, 5, 8, 0]))]
        for _ in range(copies):
            self._submit(tokens, namespace)
        return True

    def burst(self) -> bool:
        return self.arrive(copies=self.chance.randint(2, 3))

    def _submit(self, tokens: list[int], namespace: Hashable) -> None:
        if len(self.scheduler.requests) > 7:
            return
        chance = self.chance
        self._num_requests += 1
        request = Request(
            f"r{self._num_requests}", tokens, max_new_tokens=chance.randint(1, 8),
            room=self._num_requests, prefill=chance.choice(_PREFILLS), namespace=namespace,
            cacheable=chance.randrange(10) > 0, priority=chance.choice([0, 5]),
            deadline_s=chance.choice([None, None, None, 1.0]),
        )  # fmt: skip
        try:
            self.scheduler.add(request, self.now_s)
        except RequestError:
            return
        self.added.add(request.rid)

    def admit(self) -> bool:
        scheduler = self.scheduler
        waits = scheduler.waiting.may_admit or self.host.has_due or scheduler.num_deferred
        if not waits and scheduler.wake_s > self.now_s:
            return False
        for req in scheduler.pop_preallocated(self.now_s):
            self.weights_of[req] = self.weights
            assert req.pages_held is not None
            lock = req.pages_held.lock
            self._check_kv(req, 0 if lock is None else lock.prefix_len)
            assert not (req in self.may_not_load and self._loads_for(req)), f"{req} loads again"
            self.counts["admitted"] += 1
        return True

    def _loads_for(self, req: DecodeRequest) -> list[Flight]:
        """The loads that were begun for a request."""
        flights = self.scheduler.flights
        return [one for one in flights if one.is_load and one.request is req.request]

    def commit(self) -> bool:
        if not self.scheduler.arriving.num_complete:
            return False
        for req in self.scheduler.pop_transferred(self.now_s):
            self._check_kv(req, req.fill_len)
            self._check_rest(req, req.fill_len)
            self.state_at[req] = req.fill_len
            self.counts["committed"] += 1
            self.counts["from host"] += req.host_tokens > 0
            self.running.append(req)
        return True

    def begin_computing(self) -> bool:
        found = self.scheduler.pop_local(self.now_s)
        for req in found:
            self._check_kv(req, req.prefix_len)
            self.computing[req] = req.prefix_len
        return bool(found)

    def compute(self) -> bool:
        """A chunk of a prompt: it reads what is before, and writes what is its own."""
        if not self.computing:
            return False
        req = self.chance.choice(list(self.computing))
        done = self.computing[req]
        if req.state.ended:
            del self.computing[req]
            self.scheduler.computed(req, done + 1, self.now_s)
            return True
        end = min(req.fill_len, done + self.chance.choice([4, 1, 100]))
        self._check_kv(req, done)
        self._write_kv(req, done, end)
        self.computing[req] = end
        if end == req.fill_len:
            del self.computing[req]
        self.scheduler.computed(req, end, self.now_s)
        self.counts["chunks"] += 1
        return True

    def step(self) -> bool:
        """The engine's batch, or a part of it, goes on; what has all its tokens ends."""
        batch = [req for req in self.running if self.calm or self.chance.randrange(4)]
        if not batch:
            return False
        for req in batch:
            # The step reads all that is there, and writes the KV of the token sampled last.
            if req.output:
                self._write_kv(req, req.kv_len, req.kv_len + 1)
            # A step whose tokens found no page is made once.
            if self.state_at[req] < len(req.tokens):
                self._check_rest(req, req.kv_len)
                self._write_rest(req, req.kv_len)
                self.state_at[req] += 1
            self._check_kv(req, len(req.tokens))
            self._check_rest(req, len(req.tokens))
        sampled = {req: self.chance.randrange(2) for req in batch}
        while True:
            try:
                self.scheduler.append_many(list(sampled), list(sampled.values()), self.now_s)
                break
            except OutOfPagesError as error:
                # It keeps what is sampled, retracts, and calls again at once.
                missing = error.needed - error.free - error.evictable
                assert not error.retract or missing > self._coming_pages(), (
                    f"{error.retract} are retracted for {missing} pages that copies give back"
                )
                for rid in error.retract:
                    req = self.scheduler.requests[str(rid)]
                    self._retract(req)
                    sampled.pop(req, None)
                self.counts["full"] += 1
                if not error.retract or not sampled:
                    return bool(error.retract)
                self._after()
        for req in sampled:
            if len(req.output) >= req.max_new_tokens or self.chance.randrange(8) == 7:
                self._finish(req)
        return True

    def _coming_pages(self) -> int:
        """Device pages that nothing but copies keeps."""
        pins, kept = self.host.pins, set[int]()
        for lock in self.pages.cache.locks - pins:
            kept.update(lock.pages.tolist())
        pinned = {page for lock in pins for page in lock.pages.tolist()}
        held = [self.pages.allocator.held_by(key) for key in self.host.held_by]
        return len(pinned - kept) + sum(map(len, held))

    def _finish(self, req: DecodeRequest) -> None:
        chance = self.chance
        keep = chance.choice([None, None, None, req.prompt_len, max(0, req.kv_len - 1)])
        self.running.remove(req)
        tokens, namespace = req.tokens.tolist(), req.request.key.namespace
        after = self._device_goes_on(req)
        self.scheduler.finish(
            req, self.now_s, after, chance.choice([None, None, True, False]), keep
        )
        self.ended.add(req.rid)
        self.counts["finished"] += 1
        if len(tokens) < 1.5 * self.num_pages:
            self.past = [*self.past[-11:], (tokens, namespace)]

    def _retract(self, req: DecodeRequest) -> None:
        after = self._device_goes_on(req)
        self.scheduler.retract(req.rid, self.now_s, after)
        self.running.remove(req)
        self.counts["retracted"] += 1

    def retract(self) -> bool:
        running = [req for req in self.scheduler.requests.values() if req.state in CAN_RUN]
        if len(running) < 2:
            return False
        self._retract(self.chance.choice(running[1:]))
        return True

    def abort(self) -> bool:
        if not self.scheduler.requests:
            return False
        live = list(self.scheduler.requests.values())
        loading = [
            waiter.owner
            for flight in self.scheduler.flights
            if flight.is_load
            for waiter in flight.waiters
            if waiter.owner is not None
        ]
        req = self.chance.choice(self.chance.choice([loading, live]) or live)
        self.counts["aborted while loading"] += req in loading
        after = None
        if req in self.running:
            after = self._device_goes_on(req)
            self.running.remove(req)
        elif req in self.computing:
            after = self._chunk_goes_on(req)
        assert self.scheduler.abort(req.rid, self.now_s, after=after)
        return True

    def pop_failed(self) -> bool:
        """What has ended comes out; a chunk of it may still be under way."""
        left, writes = self.scheduler.computing.left, []
        for req in left:
            if req.pages_held is not None:
                writes.append(self._late_writes(req, self.computing.pop(req, req.prefix_len)))
        after = Event() if writes and self.chance.randrange(2) else None
        for write in writes:
            write()  # until now nothing has said that the device is done
        if after is not None:
            self.events.append((after, lambda: [write() for write in writes] and None))
        failed = self.scheduler.pop_failed(after)
        for req in failed:
            assert req.rid not in self.ended, f"law 7: {req.rid} ends twice"
            self.ended.add(req.rid)
            self.counts[req.state.value] += 1
            self.computing.pop(req, None)
        self.running = [req for req in self.running if req.state in CAN_RUN]
        self.scheduler.pop_needs_prefill()
        return bool(failed)

    # --- the device -------------------------------------------------------------------------------

    def _device_goes_on(self, req: DecodeRequest) -> Event | None:
        """The device may still write the KV of the token before the last of one that ran."""
        if self.calm or self.chance.randrange(3):
            return None
        start = max(req.fill_len, req.kv_len - 1)
        right, event = self._kv(req, req.kv_len)[start:], Event()
        pages, spoil = req.pages.tolist(), self._spoil_rest(req)
        self._put(pages, start, np.full(len(right), GARBAGE, np.int64))

        def write() -> None:
            self._put(pages, start, right)
            spoil()

        self.events.append((event, write))
        return event

    def _late_writes(self, req: DecodeRequest, start: int) -> Callable[[], None]:
        """A chunk of one that has ended: it writes what nothing reads any more."""
        pages, left = req.pages.tolist(), req.fill_len - start
        return lambda: self._put(pages, start, np.full(left, GARBAGE, np.int64))

    def _chunk_goes_on(self, req: DecodeRequest) -> Event | None:
        write, event = self._late_writes(req, self.computing.pop(req)), Event()
        if self.chance.randrange(2):
            return None
        self.events.append((event, write))
        return event

    def device_is_done(self) -> bool:
        if not self.events:
            return False
        event, write = self.events.pop(self.chance.randrange(len(self.events)))
        write()
        event.done = True
        if self.calm or self.chance.randrange(2):
            self.scheduler.release_deferred(self.now_s)
        return True

    def scribble(self) -> bool:
        """Overwrite all free pages, so that one freed too early shows."""
        self.device[:, self.pages.allocator.pages_in(PageState.FREE)] = GARBAGE - 1
        self.memory[:, self.host.allocator.pages_in(PageState.FREE)] = GARBAGE - 1
        for group in self.pages.windows:
            self.last[:, group.allocator.pages_in(PageState.FREE)] = GARBAGE - 1
        if self.pages.slots is not None:
            self.states[:, self.pages.slots.pages_in(PageState.FREE)] = GARBAGE - 1
        return True

    # --- prefill ----------------------------------------------------------------------------------

    def _opened(self, command: OpenRoom) -> None:
        """Prefill is promised a prefix: it sends what follows, of the weights of today."""
        promise = command.promise
        key = RoomKey(promise.room, promise.generation)
        flight = self.scheduler.arriving.get(key)
        assert flight is not None
        assert flight.owner is not None
        req = flight.owner
        values = kv_of(flight.key.namespace, self.weights, req.tokens[: promise.fill_len].tolist())
        first, last_pages = 0, list[int]()
        for group, ids in zip(self.pages.windows, promise.window_ids(), strict=True):
            first, last_pages = group.first_page(promise.fill_len), ids.tolist()
        self.rooms[key] = Room(
            key, command.address, promise.page_ids().tolist(), values[promise.prefix_len :],
            last_pages, values[first * PAGE_SIZE :], promise.state_slot,
            has_sent_rest=not (self.has_windows or self.has_states),
        )  # fmt: skip

    def prefill_writes(self) -> bool:
        rooms = [
            room for room in self.rooms.values()
            if room.num_sent < len(room.values) or not room.has_sent_rest
        ]  # fmt: skip
        if not rooms:
            return False
        room = self.chance.choice(rooms)
        if not room.has_sent_rest and (
            room.num_sent == len(room.values) or not self.chance.randrange(2)
        ):
            self._put_rest(room, is_good=True)
            room.has_sent_rest = True
            return True
        start, end = room.num_sent, room.num_sent + self.chance.choice([100, 2, 1])
        self._put(room.pages, start, room.values[start:end])
        room.num_sent = min(end, len(room.values))
        return True

    def prefill_succeeds(self) -> bool:
        rooms = [
            room for room in self.rooms.values()
            if room.num_sent == len(room.values) and room.has_sent_rest
        ]  # fmt: skip
        if not rooms:
            return False
        room = self.chance.choice(rooms)
        del self.rooms[room.key]
        self.scheduler.room_ended(room.key, KVPoll.SUCCESS, None, b"", self.now_s)
        return True

    def prefill_fails(self) -> bool:
        if not self.rooms:
            return False
        room = self.chance.choice(list(self.rooms.values()))
        self._over(room.key)
        error = TransferError("fails on purpose")
        self.scheduler.room_ended(room.key, KVPoll.FAILED, error, b"", self.now_s)
        self.counts["rooms failed"] += 1
        return True

    def _over(self, key: RoomKey) -> None:
        """A room ends without its KV; prefill may write it until that is proved."""
        if (room := self.rooms.pop(key, None)) is not None:
            self.undrained.append(room)

    def prefill_is_late(self) -> bool:
        """What was posted for a room that is over lands."""
        if not self.undrained:
            return False
        room = self.chance.choice(self.undrained)
        self._put(room.pages, 0, np.full(len(room.values), GARBAGE - 2, np.int64))
        self._put_rest(room, is_good=False)
        return True

    def drain(self) -> bool:
        if not self.undrained:
            return False
        room = self.undrained.pop(self.chance.randrange(len(self.undrained)))
        self.scheduler.room_drained(room.key)
        return True

    def overdue(self) -> bool:
        if not self.undrained:
            return False
        self.scheduler.room_overdue(self.chance.choice(self.undrained).key)
        return True

    def come_and_go(self) -> bool:
        """A prefill worker does not answer for a while."""
        address = self.chance.choice(_PREFILLS)
        if address in self.away:
            self.away.remove(address)
            self.scheduler.prefill_ready(address, 0, self.now_s)
        else:
            self.away.add(address)
            self.scheduler.prefill_away(address, self.now_s)
        return True

    # --- host memory ------------------------------------------------------------------------------

    def _ordered(self, order: HostCopy) -> None:
        """A copy is ordered: of pages whose KV is there, on every rank (T8)."""
        copy = self.host._copies[order.number]
        tokens = np.frombuffer(copy.key.data, "<i4").tolist()
        values = kv_of(copy.key.namespace, self.weights, tokens)[copy.start * PAGE_SIZE :]
        memory, ids = (self.memory, order.host_pages) if order.is_load else (
            self.device, order.device_pages
        )  # fmt: skip
        found = memory[:, ids].reshape(self.num_ranks, -1)
        assert (found == self._of_ranks(values)).all(), f"T8: {order} copies what is not there"
        self.copies += [RankCopy(order, rank) for rank in range(self.num_ranks)]
        self.counts["loads" if order.is_load else "writes"] += 1

    def copy_step(self) -> bool:
        """A copy begins on a rank, or ends there, well or not."""
        copies = [
            copy for copy in self.copies
            if self.calm or copy.rank != self.slow_rank or self.chance.randrange(4) == 3
        ]  # fmt: skip
        if not copies:
            return False
        copy = self.chance.choice(copies)
        num_pages = len(copy.order.host_pages)
        if copy.num_done < 0:
            copy.num_done = self.chance.randint(0, num_pages)
            self._move(copy, 0, copy.num_done)
            return True
        self.copies.remove(copy)
        error = None
        if not self.calm and self.chance.random() < self.fail:
            error = OSError("a copy that fails on purpose")
            self._move(copy, copy.num_done, num_pages, is_good=False)
            self.counts["copies failed"] += 1
        else:
            self._move(copy, copy.num_done, num_pages)
        self.ends.append((copy.rank, HostCopyDone(copy.order.number, error, 1, self._seconds())))
        return True

    def _seconds(self) -> float:
        """How long a copy took; where it is long, prefill may be the better source."""
        return self.chance.choice([1e-6, 1e-6, 0.1, 3.0])

    def _move(self, copy: RankCopy, start: int, end: int, is_good: bool = True) -> None:
        order, rank = copy.order, copy.rank
        host, device = order.host_pages[start:end], order.device_pages[start:end]
        if order.is_load:
            self.device[rank, device] = self.memory[rank, host] if is_good else GARBAGE - 3
        else:
            self.memory[rank, host] = self.device[rank, device] if is_good else GARBAGE - 3

    def copy_is_heard(self) -> bool:
        if not self.ends:
            return False
        rank, done = self.ends.pop(self.chance.randrange(len(self.ends)))
        joined = self.joined.on(rank, done)
        if joined is not None:
            flight = self.scheduler.arriving.get_load(load_key(done.number))
            if joined.error is not None and flight is not None:
                waiting = self.scheduler.flights.waiting_for(flight)
                self.may_not_load |= {one.owner for one in waiting if one.owner is not None}
            self.scheduler.copy_ended(joined, self.now_s)
        return True

    def evict(self) -> bool:
        """Others have needed pages meanwhile."""
        most = self.pages.cache.evictable_pages
        if not most:
            return False
        freed = self.pages.cache.evict(self.chance.choice([most, most, 1, 2]), self.now_s)
        self.pages.allocator.uncache(freed)
        self.pages.allocator.free(freed)
        self.pages.version += 1
        return True

    def host_is_ready(self) -> bool:
        if self.num_ready == self.host_pages:
            return False
        self.num_ready = self.chance.randint(self.num_ready, self.host_pages)
        self.scheduler.host_ready(self.num_ready)
        return True

    # --- all of it --------------------------------------------------------------------------------

    def flush(self) -> bool:
        """The cache is emptied: what is computed from now on is of other weights."""
        self.counts["flushed with copies"] += bool(len(self.host))
        self.weights += 1
        self.scheduler.flush()
        return True

    def move_weights(self) -> bool:
        """New weights: what runs ends."""
        self.version += 1
        after = None
        for req in list(self.running):
            event = self._device_goes_on(req)
            if event is not None and after is None:
                after = event
            elif event is not None:
                # One event stands for all of them.
                _, write = self.events.pop()
                write()
        for req in list(self.computing):
            del self.computing[req]
        self.scheduler.move_weights(str(self.version), self.now_s, after)
        self.running.clear()
        return self.flush()

    def pass_time(self) -> bool:
        self.now_s += self.pace
        return self.pace > 0

    def nothing(self) -> bool:
        return True

    # --- the end ----------------------------------------------------------------------------------

    def settle(self, max_rounds: int = 400) -> None:
        """No more faults: all that lives ends, and nothing is left."""
        self.chance.spell(1)
        self.calm = True
        for address in sorted(self.away):
            self.away.remove(address)
            self.scheduler.prefill_ready(address, 0, self.now_s)
        for _ in range(max_rounds):
            acted = False
            for name in (*_ONWARD, "device_is_done", "pop_failed", "host_is_ready"):
                if getattr(self, name)():
                    acted = True
                    self._after()
            if not acted and self.scheduler.idle:
                break
            self.now_s += 0.01
        if not self.scheduler.idle:
            waiting = [(req, self.scheduler.waiting.why(req, self.now_s))
                       for req in self.scheduler.waiting]  # fmt: skip
            raise AssertionError(f"it does not end: {self.scheduler.requests}, {waiting}")
        self.pop_failed()
        assert self.added == self.ended, f"law 7: {self.added ^ self.ended} have not ended"
        assert not self.copies
        assert not len(self.joined)
        assert_at_rest(self.scheduler)
        assert not self.host.has_due
        assert not self.scheduler.num_deferred
        assert self.scheduler.budget.active == 0
        for group in self.pages.windows:
            assert group.allocator.free_pages == WINDOW_PAGES
        assert self.pages.slots is None or self.pages.slots.free_pages == NUM_SLOTS
        self.counts.update(
            {name: count for name, count in self.scheduler.counters.items() if name in _TOLD}
        )


_PREFILLS = ("p", "q")
_ONWARD = (
    "admit", "prefill_writes", "prefill_succeeds", "begin_computing", "compute", "commit", "step",
    "copy_step", "copy_is_heard", "drain",
)  # fmt: skip
_WEIGHTS = {
    "nothing": 1, "arrive": 10, "burst": 2, "admit": 12, "prefill_writes": 8, "prefill_succeeds": 8,
    "begin_computing": 4, "compute": 6, "commit": 10, "step": 16, "copy_step": 9,
    "copy_is_heard": 5, "evict": 9, "device_is_done": 4, "pop_failed": 3, "scribble": 4, "drain": 3,
    "prefill_is_late": 1.5, "prefill_fails": 1, "overdue": 0.3, "come_and_go": 0.3, "abort": 2.5,
    "retract": 1.5, "flush": 0.5, "move_weights": 0.2, "host_is_ready": 1, "pass_time": 4,
}  # fmt: skip
_SPARED = ("abort", "retract", "flush", "move_weights", "prefill_fails", "come_and_go")
_WHEEL: Sequence[str] = [
    name for name, weight in _WEIGHTS.items() for _ in range(round(10 * weight))
]
_TOLD = (
    "host_written_pages", "host_missed_pages", "host_loaded_pages", "shared_flights",
    "flights_adopted", "flight_fallbacks", "computed_tokens",
)  # fmt: skip


def run(setup: int, steps: Sequence[int], kind: str = "pages") -> HostMachine:
    """One run, whole. Its trace goes with what it finds."""
    machine = HostMachine(setup, kind)
    try:
        for value in steps:
            machine.spell(value)
        machine.settle()
    except BaseException as error:
        error.add_note(
            f"{machine.num_ranks} ranks, {machine.num_pages} pages, {machine.host_pages} host"
        )
        error.add_note(f"steps: {' '.join(machine.trace)}")
        raise
    return machine
