"""The whole decode side under fire, one to four ranks of it, with and without extra state, windows,
own compute and host memory: `EngineSim` with every fault as a step of its own.

A run is a list of integers, so that hypothesis can draw it and shrink it: each spells one step
(`Spelled`). The laws are audited after each; when the list ends, everybody goes on without faults
until all is quiet, and nothing may be held then. Ranks above 0 follow rank 0's log, each as late as
chance has it, and must end equal to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

import benchmarks.policies.gittins  # noqa: F401
from benchmarks.policies.gated import Gated
from prefixkv.cache.eviction.policy import register_policy
from prefixkv.config import ComputeConfig, DecodeConfig, HostConfig
from prefixkv.decode.host_tier import HostPages
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.rooms import Workers
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.decode.sources import Sources
from prefixkv.errors import NotFiniteError, PrefixKVError
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.row_log import RankSizes
from prefixkv.request import Hints, Request
from tests.laws.auditor import assert_at_rest, audit_decode, audit_prefill
from tests.support.fabric import Hold
from tests.support.gates import Gate
from tests.support.schedulers import decode_scheduler, host_of, timed_by
from tests.support.sim import SINGLE, Storm
from tests.support.sim_engines import PAGE_SIZE, ROWS, SPOILT, DecodeEngine, EngineSim, FollowedLog
from tests.support.sim_memory import Memory, SimHost
from tests.support.sim_rank import TIMING, SimRank
from tests.support.spelled import Spelled

# What an action says: nothing to do; done; and whose books it touched.
_IDLE, _DONE, _DECODE, _PREFILL = 0, 1, 2, 4


# Names and not what is registered: a run follows from its integers, whatever else was imported.
POLICIES = (
    "gated-quick", "adaptive", "fifo", "filo", "gated", "gittins", "lfu", "lru", "mru", "priority",
    "slru",
)  # fmt: skip
ADMISSIONS = "hit_aware", "fifo", "priority"


@register_policy
class QuickGated(Gated):
    """Pages are overdue within the seconds that a run takes, so that the time decides many
    evictions."""

    name = "gated-quick"

    def __init__(self) -> None:
        super().__init__(fresh_s=1.0, known_s=3.0, short_tokens=3 * PAGE_SIZE)


class ChosenSources(Sources):
    """Sources that chance chooses between, of those that the bounds leave: so near requests are
    computed on both sides, and join each other."""

    def __init__(self, sim: SchedulerSim) -> None:
        super().__init__(sim.compute, sim.fails_over)
        self._sim = sim

    def is_here(self, missing: int, *args: Any, **more: Any) -> bool:
        is_here = super().is_here(missing, *args, **more)
        return self._sim.random.randrange(4) != 3 and is_here


class Engine(DecodeEngine):
    """A decode engine whose device is late at times, and whose ranks follow."""

    sim: SchedulerSim

    def __init__(self, sim: SchedulerSim) -> None:
        self.added: list[str] = []
        self.late: set[DecodeRequest] = set()  # past their deadlines, after the last pass
        # Chunks of prompts that are computed here: until the event is done, the device may write
        # these pages.
        self.unwritten: list[tuple[Gate, DecodeRequest, set[int]]] = []
        super().__init__(sim)

    def computed(self, req: DecodeRequest, start: int, end: int, aux: bytes = b"") -> None:
        flights = (one for one in self.scheduler.flights if one.request is req.request)
        assert not any(one.source.brings_pages_only for one in flights), (
            f"{req} is computed, and loads"
        )
        after = self.sim.device_work()
        if after is not None and not req.state.ended:
            pages = req.pages[start // PAGE_SIZE : pages_for(end, PAGE_SIZE)]
            self.unwritten.append((after, req, set(pages.tolist())))
        self.scheduler.computed(req, end, aux, after)

    def check_unwritten(self) -> None:
        """What the device may still write is its request's, or in the tree, and not read."""
        self.unwritten = [one for one in self.unwritten if not one[0].answer]
        pages = self.scheduler.pages
        read = {
            page
            for order in self.sim.copies.ordered
            if not order.is_load
            for page in order.device_pages.tolist()
        }
        for _, req, unwritten in self.unwritten:
            for page in unwritten - set(req.pages.tolist()):
                state = pages.allocator.state(page)
                assert state is PageState.CACHED, f"law 9: {req}'s page {page} is {state.name}"
            assert not read & unwritten, f"law 9: {req}'s pages are copied before they are written"

    def _is_sampled_from(self, req: DecodeRequest) -> None:
        """Its tokens are known, so the device is done with its chunks."""
        for event, one, _ in self.unwritten:
            if one is req and not event.answer:
                event.answer = True
                self.sim.events.remove(event)

    def finish(self, req: DecodeRequest) -> None:
        self._is_sampled_from(req)
        continues = self.sim.random.choice([None, None, True, False])
        keep = self.sim.random.choice([None, None, req.prompt_len, req.kv_len - 1])
        self.scheduler.finish(req, self.sim.device_work(), continues, keep)

    def retract(self, rid: str) -> None:
        self._is_sampled_from(self.scheduler.requests[rid])
        self.scheduler.retract(rid, self.sim.device_work())

    def pop_failed(self) -> list[DecodeRequest]:
        # What is complete just then is committed, or it is found that it waits for the device.
        before, self.late = (
            self.late,
            {
                req
                for req in self.scheduler.requests.values()
                if req.state is DecodeState.PREALLOCATED
                and req.committed_s is None  # else it was retracted
                and req.arrived_s + (req.request.deadline_s or math.inf) <= self.sim.now_s
            },
        )
        assert not before & self.late, f"{before & self.late} wait past their deadlines"
        return self.scheduler.pop_failed(self.sim.device_work())


class SchedulerSim(EngineSim):
    """See the module's text. `setup` spells pools, policies and the number of ranks; `has_host`:
    surely with host memory."""

    def __init__(self, setup: int, has_host: bool = False) -> None:
        chance = Spelled()
        chance.spell(setup)
        self.events: list[Gate] = []
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self.config = DecodeConfig(
            max_running=ROWS,
            policy=chance.choice(POLICIES),
            admission=chance.choice(ADMISSIONS),
            evict_reserve=chance.choice([0.0, 0.2]),
            cache=chance.randrange(8) < 7 or has_host,
        )
        sizes = [24, 6, 60] if has_host else [0, 24, 6, 60]
        self.host_pages = chance.choice(sizes) if self.config.cache else 0
        if self.host_pages:
            policy = chance.choice(("lru", *POLICIES))
            host = HostConfig(num_pages=self.host_pages, policy=policy)
            self.config = replace(self.config, host_memory=host)
        self.is_ready = chance.randrange(3) < 2
        self.num_ranks = chance.choice([2, 1, 3, 4])
        below, ask = chance.choice([None, 4, 12, 0, 100]), chance.choice(["both", "late"])
        self.compute = None if below is None else ComputeConfig(below=below, ask=ask)
        self.fails_over = bool(chance.randrange(2))
        rows = chance.choice([ROWS, 2, 3, 4])
        self.config = replace(self.config, max_running=rows)
        self.spared = {fault for fault in _FAULTS if chance.randrange(2)}
        self.is_quiet = is_quiet = bool(self.host_pages) and chance.randrange(4) > 0
        if is_quiet:  # the network is well: more is finished, written and loaded again
            self.spared |= set(_FAULTS) - {"abort", "retract", "flush", "reorder"}
        self.lost: list[PeerId] = []
        self.past: list[tuple[list[int], object]] = []  # conversations that may go on
        self.stalls: list[Hold] = []
        num_slots = chance.choice([0, 8, 3])
        window = chance.choice([0, 5, 9])
        # Where decode computes, with extra state or a window, it needs checkpoints.
        is_computed = self.compute is not None and (num_slots or window)
        self.num_checkpoints = chance.choice([3, 1, 8, 0]) if is_computed else 0
        super().__init__(
            seed=0,
            shape=SINGLE,
            storm=Storm(
                **{fault: chance.choice([0.0] if is_quiet else [0.0, 0.05, 0.2])
                   for fault in ("fail_at_post", "fail_at_check")},
                lose_notification=chance.choice([0.0] if is_quiet else [0.0, 0.01, 0.05]),
            ),
            decode_pages=chance.choice([13, 11, 12, 18, 30]),
            prefill_pages=chance.choice([32, 14]),
            failure_policy=chance.choice(["fail", "retry"]),
            num_slots=num_slots,
            window=window,
            window_pages=(48, chance.choice([30, 12, 60])),
            checkpoints=chance.choice([0, 3]) if window and not num_slots else 0,
            decode_step=2 * PAGE_SIZE,
            chance=chance,
        )  # fmt: skip

    # --- what is built ----------------------------------------------------------------------------

    def new_decode(self) -> Engine:
        engine = Engine(self)
        # A life that ends takes its host memory, and the copies that run, with it.
        side = self.sides[1]
        sizes = max(1, self.host_pages), side.page_size, side.attention, side.head_bytes
        memory = Memory(side.mesh, 0, side.order, *sizes)
        self.copies = SimHost(self.readers[0].memory, memory, self.random)
        return engine

    def decode_scheduler(self) -> DecodeScheduler:
        num_pages = self.decode_pages
        windows = () if (last := self.sides[1].last) is None else (last,)
        options = self.config.for_page_manager(num_pages)._replace(
            num_slots=self.num_slots, num_saved=self.num_checkpoints, windows=windows
        )
        rows = self.config.max_running
        pages = PageManager(num_pages, PAGE_SIZE, rows, options=options)
        pages.hash_every_pages = 1
        sizes = RankSizes("decode", num_pages, PAGE_SIZE, rows, self.num_slots, windows=windows)
        self.logged = FollowedLog(sizes, self.num_ranks)
        return decode_scheduler(
            pages,
            timed_by(self, DecodeScheduler),
            reserve_tokens=self.random.choice([0, 4]),
            max_retries=int(self.failure_policy == "retry"),
            admission=self.config.admission,
            patience_s=self.random.choice([5.0, 0.0, 0.5]),
            waiting_timeout_s=self.random.choice([16.0, 2.0]),
            name=self.readers[0].me.name,
            workers=Workers(True, TIMING.bootstrap_timeout_s),
            sources=ChosenSources(self) if self.compute is not None else Sources(),
            host=None
            if self.config.host_memory is None or self.config.host_memory.policy is None
            else HostPages(
                self.host_pages, self.config.host_memory.policy, None if self.is_ready else int
            ),
        )

    def device_work(self) -> Gate | None:
        if self.calm or self.random.randrange(4):
            return None
        self.events.append(Gate())
        return self.events[-1]

    # --- a step -----------------------------------------------------------------------------------

    def spell(self, value: int) -> None:
        """Let one thing happen, then audit what it touched."""
        self.random.spell(value)
        name = _WHEEL[self.random._randbelow(len(_WHEEL))]
        touched = _IDLE if name in self.spared else getattr(self, name)()
        if touched == _IDLE:
            name, touched = self._progress()
        self.trace.append(name)
        self._audit(touched)

    def _progress(self) -> tuple[str, int]:
        """One of the things that go on by themselves."""
        start = self.random.randrange(len(_ONWARD))
        for name in _ONWARD[start:] + _ONWARD[:start]:
            if touched := getattr(self, name)():
                return name, touched
        if len(self.decode.scheduler.requests) < 6:
            return "arrive", self.arrive()
        return "deadline", self.deadline()

    def _audit(self, touched: int) -> None:
        self.decode.tell()
        self.copies.order(self.decode.scheduler, self.decode.hashes)
        if self.host_pages:
            self.copies.check(self.decode.scheduler, self.decode.hashes)
        self.prefill.tell()
        self.decode.check_unwritten()
        if touched & _DECODE:
            audit_decode(self.decode.scheduler, self.readers[0].control)
        if touched & _PREFILL:
            audit_prefill(self.prefill.scheduler)
        self.audit_outcomes()

    # --- what goes on by itself -------------------------------------------------------------------

    def nothing(self) -> int:
        return _DONE

    def pass_time(self) -> int:
        self.now_s += self.random.choice([0.01, 0.05, 0.2])
        return _DONE

    def fabric_step(self) -> int:
        return _DONE if self.fabric.step() else _IDLE

    def deliver_one(self, at: int = 0) -> int:
        if not self.wire:
            return _IDLE
        to = self.wire[at][1]
        self.hand_over(at)
        return _PREFILL if isinstance(to, str) else _DECODE

    def decode_work(self) -> int:
        return self._work(self.readers[0], _DECODE)

    def prefill_work(self) -> int:
        return self._work(self.writers[0], _PREFILL)

    def _work(self, rank: SimRank, touched: int) -> int:
        if not rank.inbox and rank.control.wake_s > self.now_s:
            return _IDLE
        rank.work()
        return touched

    def copy_step(self) -> int:
        return _DONE if self.copies.step(self.calm) else _IDLE

    def copy_is_heard(self) -> int:
        return _DECODE if self.copies.hear(self.decode.scheduler, self.now_s) else _IDLE

    def evict(self) -> int:
        """Others have needed pages meanwhile, which come back from host memory."""
        pages = self.decode.scheduler.pages
        if not self.host_pages or not (most := pages.cache.evictable_pages):
            return _IDLE
        freed = pages._evict(self.random.choice([most, most, 1]), self.now_s)
        pages.allocator.uncache(freed)
        pages.allocator.free(freed)
        pages.version += 1
        # One of them says that it comes back: it is loaded ahead.
        for session in ("s1", "s2"):
            self.decode.scheduler.announce(session, self.random.choice([None, "lora"]))
        return _DECODE

    def host_is_ready(self) -> int:
        host = host_of(self.decode.scheduler)
        if host is None or host.num_ready == self.host_pages:
            return _IDLE
        host_of(self.decode.scheduler).ready(self.random.randint(host.num_ready, self.host_pages))
        return _DECODE

    def decode_schedule(self) -> int:
        side = self.decode
        if not (
            side.ranks[0].events
            or side.running
            or side.local
            or side.scheduler.has_results
            or side.scheduler.waiting.wake_s <= self.now_s
        ):
            return _IDLE
        side.schedule()
        for req in list(side.running.values()) if self.random.randrange(2) else ():
            if req.rid in side.running:
                side._step(req)
        self._publish()
        return _DECODE

    def prefill_schedule(self) -> int:
        side = self.prefill
        if not (side.ranks[0].events or side.computing or side.scheduler.has_results):
            return _IDLE
        side.schedule()
        return _PREFILL

    def submit_next(self) -> int:
        if not self._to_submit:
            return _IDLE
        self.submit_one()
        return _PREFILL

    def device_is_done(self) -> int:
        if not self.events:
            return _IDLE
        self.events.pop(self.random.randrange(len(self.events))).answer = True
        self.decode.scheduler.release_deferred(self.now_s)
        return _DECODE

    # --- the other ranks --------------------------------------------------------------------------

    def _publish(self) -> None:
        """The pass is over. Some engines take several passes together."""
        if self.logged.followers and (self.calm or self.random.randrange(3)):
            self.logged.publish(self.decode.scheduler.pages)

    def follow(self) -> int:
        """A rank reads some of what it has been sent."""
        if not (late := self.logged.late):
            return _IDLE
        at = self.random.choice(late)
        for _ in range(self.random.randint(1, 3)):
            if at in self.logged.late:
                self.logged.read(at)
        return _DONE

    def _compare_ranks(self) -> None:
        """All that was published is read: every rank is what rank 0 is."""
        if self.logged.followers:
            self.logged.publish(self.decode.scheduler.pages)
            while late := self.logged.late:
                self.logged.read(late[0])
            self.logged.check(self.decode.scheduler.pages)

    # --- requests ---------------------------------------------------------------------------------

    def arrive(self, copies: int = 1) -> int:
        """Prompts that begin alike, branch, and may be equal; in one namespace or another."""
        namespace = self.random.choice([None, None, None, "lora", ("tenant", 1)])
        length = self.random.randint(1, 14)
        tokens = [1] * 6 + [self.random.randint(0, 1) for _ in range(length)]
        if self.past and self.host_pages and self.random.randrange(8):
            # Somebody comes back whose pages the pool may have forgotten.
            tokens, namespace = self.random.choice(self.past)
            tokens = tokens + [self.random.randint(0, 1) for _ in range(length // 4)]
        for _ in range(copies):
            self._submit(tokens, namespace)
        return _DECODE

    def burst(self) -> int:
        return self.arrive(copies=self.random.randint(2, 5))

    def _submit(self, tokens: list[int], namespace: object = None) -> None:
        if len(self.decode.scheduler.requests) > 12:
            return
        rid, room = f"r{self._next_room}", self._room_number()
        cacheable = self.random.random() < 0.9
        names_none = self.compute is not None and self.fails_over and not self.random.randrange(3)
        hints = Hints(
            session=self.random.choice(["", "s1", "s2"]), ends=not self.random.randrange(5),
            shared=not self.random.randrange(5),
        )  # fmt: skip
        if not hints.ends:
            hints = structs.replace(hints, returns_after=self.random.choice([None, 30, 120, 120]))
        request = Request(
            rid, tokens, room=room, hints=hints,
            max_new_tokens=self.random.randint(1, 6 if self.is_quiet else 24),
            prefill="" if names_none else self.addresses[0],
            decode=self.readers[0].me.name,
            cacheable=cacheable, namespace=namespace, priority=self.random.choice([0, 5]),
            deadline_s=self.random.choice([None, None, None if self.is_quiet else 1.0]),
        )  # fmt: skip
        try:
            self.decode.scheduler.add(request)
        except PrefixKVError:
            return
        self.decode.added.append(rid)
        if names_none or (self.compute is not None and self.compute.ask == "late"):
            return
        self.submit(
            Request(
                rid,
                tokens,
                room=room,
                decode=request.decode,
                cacheable=cacheable,
                namespace=namespace,
            )
        )

    def continue_conversation(self, req: DecodeRequest) -> None:
        self.finished += 1
        if len(req.tokens) < 30:
            self.past = [*self.past[-7:], (req.tokens.tolist(), req.request.key.namespace)]
        if len(req.tokens) < 40 and not self.calm and self.random.randrange(2):
            more = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 6))]
            self._submit(req.tokens.tolist() + more, req.request.key.namespace)

    def abort(self) -> int:
        """Anybody; but those that run, and those that others wait for, more often than they are
        there."""
        live, flights = self.decode.scheduler.requests, self.decode.scheduler.flights
        waited_for = [
            req.rid
            for req in live.values()
            if (flight := flights.by_owner.get(req)) is not None and flight.waiters
        ]
        groups = [group for group in (list(self.decode.running), waited_for, list(live)) if group]
        if not groups:
            return _IDLE
        rid = self.random.choice(self.random.choice(groups))
        assert self.decode.scheduler.abort(rid, after=self.device_work())
        assert not self.decode.scheduler.abort(rid), "a second abort is a no-op"
        self.decode.running.pop(rid, None)
        return _DECODE

    def fail_late(self) -> int:
        """The engine finds that what it has computed of a request since its commit is spoilt."""
        side, flights = self.decode, self.decode.scheduler.flights
        spoilt = {req: (req.fill_len, req.kv_len) for req in side.running.values()}
        spoilt |= {req: (req.prefix_len, end) for req, end in side.local.items()}
        for flight in flights:
            is_local = flight.source.name == "computed"
            if flight.owner is not None and is_local and not flight.is_open:
                spoilt[flight.owner] = flight.owner.prefix_len, flight.owner.fill_len
        spoilt = {req: range_ for req, range_ in spoilt.items() if not req.state.ended}
        if not spoilt:
            return _IDLE
        req = self.random.choice(list(spoilt))
        start, end = spoilt[req]
        hashes = side.hashes(req.tokens[:end]) ^ SPOILT
        self.readers[0].fill(req.pages, start, hashes)
        error = NotFiniteError("spoilt")
        assert side.scheduler.fail(req.rid, error, after=self.device_work())
        assert not side.scheduler.fail(req.rid, error), "a second one is a no-op"
        side.running.pop(req.rid, None)
        side.local.pop(req, None)
        return _DECODE

    def abort_at_prefill(self) -> int:
        if not self.prefill.scheduler.requests:
            return _IDLE
        rid = self.random.choice(list(self.prefill.scheduler.requests))
        self.prefill.abort(rid)
        return _PREFILL

    def retract(self) -> int:
        running = self.decode.running
        if len(running) < 2:
            return _IDLE
        try:
            self.decode._retract(self.random.choice(list(running)))
        except PrefixKVError:  # the oldest is never retracted
            return _IDLE
        return _DECODE

    def send_to_prefill(self) -> int:
        """A request that names no prefill worker goes to that which there is."""
        live = self.decode.scheduler.requests.values()
        for req in live:
            if not req.prefill and req.state is not DecodeState.PREALLOCATED:
                self.decode.scheduler.retarget(req.rid, self.addresses[0])
                return _DECODE
        return _IDLE

    def flush(self) -> int:
        scheduler = self.decode.scheduler
        scheduler.flush()
        assert not scheduler.pages.cache.num_pages
        assert host_of(scheduler) is None or not host_of(scheduler).cache.num_pages, "T3"
        return _DECODE

    def flush_prefill(self) -> int:
        self.prefill.flush()
        return _PREFILL

    def listen(self) -> int:
        """A router reads rank 0's cache events; the other ranks have no listener."""
        self.decode.scheduler.pages.cache.record().take()
        return _DECODE

    def scribble(self) -> int:
        """Overwrite all free pages, so that one freed too early shows."""
        self.decode.scribble()
        self.prefill.scribble()
        self.copies.scribble(self.decode.scheduler)
        return _DONE

    # --- faults -----------------------------------------------------------------------------------

    def send(self, source: SimRank, to: str | bytes, raw: bytes) -> None:
        if source.alive:
            self.wire.append((source, to, raw))

    def reorder(self) -> int:
        return (
            self.deliver_one(self.random.randrange(len(self.wire))) if len(self.wire) > 1 else _IDLE
        )

    def drop(self) -> int:
        if not self.wire:
            return _IDLE
        del self.wire[self.random.randrange(len(self.wire)) :][:1]
        return _DONE

    def cut(self) -> int:
        """The connection breaks: what is under way is lost."""
        self.wire.clear()
        return _DONE

    def duplicate(self) -> int:
        if not self.wire:
            return _IDLE
        self.wire.append(self.random.choice(self.wire))
        return _DONE

    def junk(self) -> int:
        if not self.wire:
            return _IDLE
        source, to, raw = self.wire[0]
        spoilt = bytearray(raw[: self.random.randint(1, len(raw))])
        spoilt[self.random.randrange(len(spoilt))] ^= 1 << self.random.randrange(8)
        self.wire[0] = (source, to, bytes(spoilt))
        return self.deliver_one()

    def deadline(self) -> int:
        """Time passes until the next deadline or repeat, or far beyond."""
        self.now_s = max(self.now_s, min(self._next_s(), self.now_s + 5.0))
        return _DONE

    def _next_s(self) -> float:
        return min(
            self.readers[0].control.wake_s,
            self.writers[0].control.wake_s,
            self.decode.scheduler.waiting.wake_s,
        )

    def silence(self) -> int:
        """Long enough for any deadline to pass."""
        self.now_s += self.random.choice([1.0, 5.0, 30.0])
        return _DONE

    def lose_peer(self) -> int:
        """Writes to decode fail for a while, and may land all the same."""
        if self.lost:
            self.fabric.restore(self.lost.pop())
        else:
            self.lost.append(self.readers[0].me)
            self.fabric.lose(self.readers[0].me)
        return _DONE

    def stall(self) -> int:
        """What is posted neither lands nor is known to have ended, until the next of these."""
        if not self._go_on():
            self.stalls.append(
                self.fabric.hold(lambda action: action.kind in ("land", "complete", "fail"))
            )
        return _DONE

    def _go_on(self) -> bool:
        for stall in self.stalls:
            stall.release()
        was_stalled = bool(self.stalls)
        self.stalls.clear()
        return was_stalled

    def restart_prefill_dead(self) -> int:
        self.restart_prefill("killed")
        return _PREFILL

    def restart_prefill_stopped(self) -> int:
        self.restart_prefill("stopped")
        return _PREFILL

    def fence_dead(self) -> int:
        while self.to_fence:
            self.fence()
        return _DECODE

    def fence_living(self) -> int:
        """Pages whose write failed after posting come back only when the writer's agent ends."""
        self.restart_prefill("killed")
        return self.fence_dead() | _PREFILL

    def restart_decode_dead(self) -> int:
        self._compare_ranks()
        if self.lost:
            self.fabric.restore(self.lost.pop())
        self.restart_decode()
        self.events.clear()
        return _DECODE

    # --- the end ----------------------------------------------------------------------------------

    def settle(self, max_rounds: int = 3000) -> None:
        """No more faults: all that lives ends, and nothing is left."""
        self.random.spell(1)
        self.calm = True
        self.fabric.fail_at_post = self.fabric.fail_at_check = self.fabric.lose_notification = 0.0
        if self.lost:
            self.fabric.restore(self.lost.pop())
        while self.events:
            self.device_is_done()
        if self.host_pages:
            host_of(self.decode.scheduler).ready(self.host_pages)
        started_s, fenced = self.now_s, 0
        for _ in range(max_rounds):
            if not self._round():
                is_quiet = self.quiet() and not self.decode.scheduler.ledger.deferred
                is_quiet = is_quiet and not self.copies.busy
                if (is_quiet or self.now_s - started_s > 60.0) and self._go_on():
                    continue  # writes that stood still land long after every deadline
                host = host_of(self.decode.scheduler)
                loads = self.decode.scheduler.wake_s <= self.now_s or len(
                    self.decode.scheduler.flights
                )
                if is_quiet and host is not None and (host.due or len(host) or loads):
                    # A write may wait for the next pass, or a load ahead of its request.
                    self.decode.schedule()
                    self._audit(_DECODE)
                    continue
                if is_quiet:
                    break
                self.now_s = max(self.now_s + 0.01, min(self._next_s(), self.now_s + 10.0))
            if self.now_s - started_s > 100.0 * (fenced + 1) and fenced < 2:
                # Every deadline has passed by now: what is left is held for want of proof, which a
                # fence gives.
                (self.fence_dead, self.fence_living)[fenced]()
                fenced += 1
        self._assert_nothing_is_left()

    def _round(self) -> bool:
        """Whatever can go on goes on, each once. False if nothing could."""
        acted = False
        for name in _ONWARD:
            while touched := getattr(self, name)():
                acted = True
                self.counts["steps"] += 1
                self._audit(touched)
                if name in _ONCE:
                    break
        return acted

    def _assert_nothing_is_left(self) -> None:
        for side in (self.decode, self.prefill):
            side.schedule()
        self._compare_ranks()
        assert_at_rest(self.decode.scheduler)
        assert_at_rest(self.prefill.scheduler)
        assert self.readers[0].control.num_rooms == 0, list(self.readers[0].control.rooms())
        assert not self.decode.scheduler.ledger.deferred
        assert not self.decode.scheduler.rooms.undrained()
        assert not len(self.decode.scheduler.budget)
        assert not len(self.decode.scheduler.waiting)
        assert not len(self.decode.scheduler.flights)
        assert self.decode.scheduler.idle
        unended = set(self.decode.added) ^ set(self.decode.outcomes)
        assert not unended, f"law 7: {unended} have not ended, or ended unknown"


_ONWARD = (
    "fabric_step",
    "deliver_one",
    "decode_work",
    "prefill_work",
    "decode_schedule",
    "prefill_schedule",
    "submit_next",
    "follow",
    "copy_step",
    "copy_is_heard",
)
_ONCE = ("decode_schedule", "prefill_schedule")
_WEIGHTS = {
    "nothing": 1, "arrive": 4, "burst": 2, "submit_next": 5, "deliver_one": 14, "fabric_step": 16,
    "decode_work": 8, "prefill_work": 8, "decode_schedule": 14, "prefill_schedule": 10, "follow": 4,
    "pass_time": 4, "device_is_done": 2, "scribble": 3, "reorder": 3, "duplicate": 2, "junk": 1,
    "drop": 1, "cut": 0.15, "deadline": 1, "silence": 0.1, "abort": 1.5, "abort_at_prefill": 0.3,
    "fail_late": 2, "retract": 2, "send_to_prefill": 1, "flush": 0.4, "flush_prefill": 0.2,
    "listen": 0.4, "lose_peer": 0.2, "stall": 0.3,
    "restart_prefill_dead": 0.15, "restart_prefill_stopped": 0.15, "fence_dead": 0.25,
    "copy_step": 10, "copy_is_heard": 6, "evict": 14, "host_is_ready": 1,
    "fence_living": 0.1, "restart_decode_dead": 0.15,
}  # fmt: skip
_FAULTS = (  # each is spared in half of the runs
    "reorder", "duplicate", "junk", "drop", "cut", "silence", "abort", "abort_at_prefill",
    "retract", "send_to_prefill", "flush", "lose_peer", "stall", "restart_prefill_dead",
    "restart_prefill_stopped", "fence_living", "restart_decode_dead", "fail_late",
)  # fmt: skip
_WHEEL: Sequence[str] = [
    name for name, weight in _WEIGHTS.items() for _ in range(round(20 * weight))
]


def run(setup: int, steps: Sequence[int], has_host: bool = False) -> SchedulerSim:
    """One run, whole. Its trace goes with what it finds."""
    sim = SchedulerSim(setup, has_host)
    try:
        for value in steps:
            sim.counts["steps"] += 1
            sim.spell(value)
        sim.settle()
    except BaseException as error:
        error.add_note(
            f"{sim.num_ranks} ranks, {sim.decode_pages} pages, {sim.failure_policy}, {sim.config}"
        )
        error.add_note(f"steps: {' '.join(name for name in sim.trace if name != 'nothing')}")
        raise
    return sim
