"""What decode's scheduler costs the engine's thread, call by call, with no network.

    python -m benchmarks sched --json benchmarks/results/sched.json
    python -m benchmarks sched --against 76518cc8

The control plane is played by hand: a room's success is told right after its promise was taken. The
pool is cut down to what each part needs by pages that a room holds, as after a failure. Times are
of single calls, the collector off: `us` on the wall, where a busy machine adds the turns of others,
and `cpu_us` of the thread alone.

A call is measured warm and cold. Before a cold call 8 MiB are copied on the same core, as a post or
a step of the model does it: that is how an engine calls.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

import prefixkv.assembly  # noqa: F401 - what a scheduler gets host memory from
from benchmarks.pair import turn_about
from benchmarks.radix import bushy
from benchmarks.replay import generated
from benchmarks.report import JsonFile, Row, check_outputs, told, write
from benchmarks.samples import COLD_BYTES, Samples, no_collector
from prefixkv.cache.radix_key import RadixKey
from prefixkv.cli.replay import replay_policy
from prefixkv.config import DecodeConfig, KVEventsConfig, PageOptions, PrefillConfig
from prefixkv.decode.host_tier import HostPages
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeParts, DecodeScheduler
from prefixkv.errors import ConfigError
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.events import Bootstrapped, HostCopyDone, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.request import Request
from prefixkv.spi import DEFAULT_POLICY

PAGE_SIZE, PROMPT_TOKENS, CACHED_TOKENS, SYSTEM_TOKENS = 16, 8192, 6144, 1024
MAX_NEW_TOKENS, OUTPUT_TOKENS = 256, 100  # of them a request has so many when it is finished
CONVERSATIONS, VOCABULARY = 16, 150_000
MOST_RUNNING, NUM_PAGES, MOST_PAGES = 1_100, 1 << 16, 1 << 14  # the last of one request
MATCHES, EVICTED_PAGES, LEAVES = 100, 16, 100_000
BATCHES = (1, 8, 64, 256)  # of running requests
POLICIES, BLOCKS = ("lru", "adaptive"), (1000, 3000)  # the pool of a replay, in blocks
CHUNK_TOKENS, PREFILL_PAGES, PREFILL_ROWS = 512, 1 << 15, 64
HOST_POOL, HOST_PAGES, HOST_OTHERS = 8192, 32768, 60
FEW_FREE = 200  # pages: for a request that fits
HOST_WAYS = {"no host": 0, "in the pool": 0, "half in host": 192, "in host": 384}

AIMS_US = {
    "admission": 60.0, "admission, pool full": 60.0, "commit": 80.0, "append_many, 256": 100.0,
    "append_many, all cross": 500.0, "pass in vain, 10,000 wait": 500.0,
}  # fmt: skip

# A subscriber in a process of its own.
_READER = """import sys, zmq
sock = zmq.Context().socket(zmq.SUB)
sock.subscribe("")
sock.connect(sys.argv[1])
while True:
    sock.recv_multipart()
"""

Tokens = npt.NDArray[np.int32]
Times = dict[str, Samples]
Take = Callable[..., Any]
"""Makes a call, as `Samples.take` does."""


def just(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


class Endless(DecodeConfig):
    """No request waits too long: no call has a timer to set."""

    @property
    def admission_wait_s(self) -> float:
        return math.inf


class Size(NamedTuple):
    """How much is measured of each part."""

    calls: int = 1000
    seed: int = 0
    policy: str = DEFAULT_POLICY
    quick: bool = False

    @property
    def config(self) -> DecodeConfig:
        return Endless(policy=self.policy, evict_reserve=0.0)


class Worker:
    """A decode scheduler and the other side, played by hand."""

    def __init__(self, seed: int, config: DecodeConfig) -> None:
        self._rng = np.random.default_rng(seed)
        self.pages = PageManager(
            NUM_PAGES, PAGE_SIZE, MOST_RUNNING, MOST_PAGES, config.for_page_manager(NUM_PAGES)
        )
        self.scheduler = DecodeScheduler(self.pages, replace(config, reserve_tokens=PAGE_SIZE))
        self._num_requests = 0
        self.system = self.tokens(SYSTEM_TOKENS)

    def tokens(self, num_tokens: int) -> Tokens:
        return self._rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)

    def request(self, tokens: Any, max_new_tokens: int = MAX_NEW_TOKENS) -> Request:
        self._num_requests += 1
        number = self._num_requests
        where = "tcp://127.0.0.1:1"
        return Request(str(number), tokens, max_new_tokens, room=number, prefill=where)

    def add(self, tokens: Any) -> DecodeRequest:
        return self.scheduler.add(self.request(tokens))

    def tick(self) -> float:
        """A millisecond passes; return the time."""
        self.scheduler.now_s += 1e-3
        return self.scheduler.now_s

    def admit(self) -> tuple[list[DecodeRequest], list[Any]]:
        return self.scheduler.pop_preallocated(), self.scheduler.take_commands()

    def run(self, requests: list[Request]) -> list[DecodeRequest]:
        """Bring these requests up to where they run, with a first token."""
        for request in requests:
            self.scheduler.add(request)
        admitted, _ = self.admit()
        assert len(admitted) == len(requests), "the pool is too small for this part"
        for req in admitted:
            self.succeed(req)
        running = self.scheduler.pop_transferred()
        self.scheduler.append_many(running, [1] * len(running))
        return running

    def succeed(self, req: DecodeRequest) -> None:
        self.scheduler.hear(RoomEnded(req.room_key, KVPoll.SUCCESS, None, b""), self.tick())

    def generate(self, reqs: list[DecodeRequest], num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.scheduler.append_many(reqs, [7] * len(reqs))

    def life(
        self, past: Tokens, add: Take = just, admit: Take = just, commit: Take = just,
        finish: Take = just,
    ) -> tuple[int, int]:  # fmt: skip
        """One request behind a past, from its arrival to its end; returns how many tokens were
        cached, and how many pages it left in the tree. The calls are made by those given."""
        tokens = np.concatenate([past, self.tokens(PROMPT_TOKENS - CACHED_TOKENS)])
        self.tick()
        req = add(self.add, tokens)
        admitted, _ = admit(self.admit)
        assert admitted == [req]
        cached = req.prefix_len
        self.succeed(req)
        commit(self.scheduler.pop_transferred)
        self.generate([req], OUTPUT_TOKENS)
        left = (req.kv_len - CACHED_TOKENS) // PAGE_SIZE
        finish(self.scheduler.finish, req)
        return cached, left

    def fill_cache(self) -> list[Tokens]:
        """Cache the pasts of some conversations, `CACHED_TOKENS` each, with one system prompt."""
        pasts = []
        for _ in range(CONVERSATIONS):
            past = np.concatenate([self.system, self.tokens(CACHED_TOKENS - SYSTEM_TOKENS)])
            for req in self.run([self.request(past)]):
                self.scheduler.finish(req)
            pasts.append(past)
        return pasts

    def evict(self, num_pages: int) -> None:
        """Evict, and let the pages be free."""
        self.free(self.pages.cache.evict(num_pages))

    def free(self, pages: Any) -> None:
        self.pages.allocator.uncache(pages)
        self.pages.allocator.free(pages)

    def leave_free(self, num_pages: int) -> None:
        """Let a room hold the free pages beyond `num_pages`."""
        allocator = self.pages.allocator
        allocator.hold(allocator.alloc(max(0, allocator.free_pages - num_pages)), "ballast")


class HostWorker(Worker):
    """A scheduler with or without host memory, whose other side and whose copies answer at once."""

    def __init__(self, has_host: bool) -> None:
        self.pages = PageManager(
            HOST_POOL, PAGE_SIZE, 64, options=PageOptions(spare_rows=8 if has_host else 0)
        )
        organs = {"host_memory": HostPages(HOST_PAGES, "adaptive")} if has_host else {}
        parts = DecodeParts(organs=organs)
        self.scheduler = DecodeScheduler(self.pages, Endless(reserve_tokens=0), parts)
        self._num_requests = 0
        self.others: list[Tokens] = []

    def serve(self, tokens: Tokens, num_lost: int = 0, admit: Take = just) -> None:
        """Serve a prompt, then let the pool lose its last `num_lost` pages. `admit` makes the
        admission's call."""
        scheduler = self.scheduler
        scheduler.now_s += 1.0
        req = scheduler.add(self.request(tokens, 1))
        assert admit(scheduler.pop_preallocated) == [req]
        self._copy()
        self.succeed(req)
        assert scheduler.pop_transferred() == [req]
        scheduler.append_many([req], [0])
        scheduler.finish(req)
        self._copy()
        scheduler.take_commands()
        if num_lost:
            self._lose(tokens, num_lost)

    def forget(self) -> None:
        self.free(self.pages.cache.evict(HOST_POOL, self.scheduler.now_s))

    def _copy(self) -> None:
        while orders := self.scheduler.take_orders():
            for order in orders:
                self.scheduler.hear(HostCopyDone(order.number, None, 1, 1e-6), self.tick())

    def _lose(self, tokens: Tokens, num_pages: int) -> None:
        """Evict the last pages of a path: all else is held meanwhile."""
        cache = self.pages.cache
        kept = tokens[: len(tokens) - num_pages * PAGE_SIZE]
        locks = [cache.pin(cache.match_prefix(other)) for other in (*self.others, kept)]
        freed = cache.evict(num_pages, self.scheduler.now_s)
        for lock in locks:
            cache.unlock(lock)
        self.free(freed)


# --- the parts ------------------------------------------------------------------------------------


def life(size: Size) -> Times:
    """Arrival, admission, commit and end of one request after the other, whose prompt is cached up
    to `CACHED_TOKENS`."""
    return _warm_and_cold(lambda: _lives(size, is_full=False))


def full_pool(size: Size) -> Times:
    """The same where each admission evicts what it takes."""
    return _warm_and_cold(lambda: _lives(size, is_full=True))


def _lives(size: Size, is_full: bool) -> Times:
    worker = Worker(size.seed, size.config)
    pages, pasts = worker.pages, worker.fill_cache()
    more = ", pool full" if is_full else ""
    times = {name + more: Samples() for name in ("add", "admission", "commit", "finish")}

    def one_life(past: Tokens) -> int:
        cached, left = worker.life(past, *(kind.take for kind in times.values()))
        assert cached == CACHED_TOKENS
        return left

    for past in pasts:
        one_life(past)
    worker.leave_free(0 if is_full else 2 * MOST_RUNNING)
    assert not worker.scheduler.pop_preallocated()
    for kind in times.values():
        kind.clear()
    with no_collector():
        for number in range(size.calls):
            evicted = pages.evicted_pages
            left = one_life(pasts[number % len(pasts)])
            assert (pages.evicted_pages > evicted) == is_full
            if not is_full:
                worker.evict(left)
    return times


def append_many(size: Size) -> Times:
    """Steps of batches that need no page then. Of the largest batch also the steps in which each
    request needs a page, and evicts it."""
    times: Times = {}
    for batch in BATCHES:
        inside, cross, _ = _steps(size, batch, is_full=False, num_steps=320)
        times[f"append_many, {batch}"] = inside
    times["append_many, all cross"] = cross
    *_, evicting = _steps(size, BATCHES[-1], is_full=True, num_steps=160)
    return times | {"append_many, all cross, evicting": evicting}


def _steps(size: Size, batch: int, is_full: bool, num_steps: int) -> tuple[Samples, ...]:
    """Steps that lie inside a page, that each take a page, and that evict it for that."""
    inside, cross, evicting = Samples(), Samples(), Samples()
    worker = Worker(size.seed, size.config)
    worker.fill_cache()
    if is_full:
        worker.leave_free(batch)
    prompts = [worker.tokens(4) for _ in range(batch)]
    reqs = worker.run([worker.request(prompt, 2 * num_steps) for prompt in prompts])
    with no_collector():
        for _ in range(num_steps):
            worker.tick()
            free = worker.pages.allocator.free_pages
            crosses = len(reqs[0].tokens) % PAGE_SIZE == 0
            kind = inside if not crosses else cross if free >= batch else evicting
            kind.take(worker.scheduler.append_many, reqs, [7] * batch)
    return inside, cross, evicting


def match(size: Size) -> Times:
    """The walk of a prompt whose past is cached."""
    worker = Worker(size.seed, size.config)
    pasts = worker.fill_cache()
    ends = worker.tokens(PROMPT_TOKENS - CACHED_TOKENS)
    prompts = [RadixKey(np.concatenate([past, ends])) for past in pasts]

    def measure() -> Times:
        times = Samples()
        with no_collector():
            for number in range(MATCHES):
                hit = times.take(worker.pages.match, prompts[number % len(prompts)])
                assert hit is not None
                assert hit.prefix_len == CACHED_TOKENS
        return {"match": times}

    return _warm_and_cold(measure)


def evict(size: Size) -> Times:
    """Evictions of a few pages each, from a tree of conversations."""

    def measure() -> Times:
        worker, times = Worker(size.seed, size.config), Samples()
        worker.fill_cache()
        with no_collector():
            for _ in range(min(size.calls, 300)):
                pages = times.take(worker.pages.cache.evict, EVICTED_PAGES)
                assert len(pages) == EVICTED_PAGES
                worker.free(pages)
        return {"evict": times}

    return _warm_and_cold(measure)


def prefill(size: Size) -> Times:
    """`send_chunk`, and the `pop_bootstrapped` that takes a prompt's pages."""
    prompt = np.random.default_rng(size.seed).integers(0, VOCABULARY, PROMPT_TOKENS, np.int32)
    requests = min(size.calls, 60)  # beyond that the pool is full

    def measure() -> Times:
        with no_collector():
            return _sends(prompt, requests, is_whole=False) | _sends(prompt, requests, True)

    return _warm_and_cold(measure)


def _sends(prompt: Tokens, requests: int, is_whole: bool) -> Times:
    """Chunks of some requests, decode played by hand. `is_whole`: a prompt is one chunk, and only
    its start is measured."""
    manager = PageManager(PREFILL_PAGES, PAGE_SIZE, PREFILL_ROWS)
    scheduler = PrefillScheduler(manager, PrefillConfig())
    pop, inner, last = Samples(), Samples(), Samples()
    for room in range(1, requests + 1):
        tokens = (prompt + room) % (1 << 30)
        req = scheduler.add(Request(f"r{room}", tokens, room=room, decode="d"))
        scheduler.hear(Bootstrapped(req.room_key, PeerId("", 1), CACHED_TOKENS), 0.0)
        assert pop.take(scheduler.pop_bootstrapped) == [req]
        if is_whole:
            scheduler.send_chunk(req, len(tokens), last=True, aux=b"token")
            scheduler.take_commands()
        for end in range(CACHED_TOKENS + CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS):
            if is_whole:
                break
            send = partial(scheduler.send_chunk, req, end)
            if end < len(prompt):
                inner.take(send)
            else:
                last.take(partial(send, last=True, aux=b"token"))
            scheduler.take_commands()
            scheduler.pop_bootstrapped()  # what was computed goes to the tree
        scheduler.hear(RoomEnded(req.room_key, KVPoll.SUCCESS, None), 0.0)
        scheduler.hear(SourceFree(req.room_key), 0.0)
        assert scheduler.pop_sent() == [req]
    if is_whole:
        return {"pop_bootstrapped": pop}
    return {"send_chunk, inner": inner, "send_chunk, last": last}


def evict_all(size: Size) -> Times:
    """The eviction of all pages but one of a tree with many leaves, so that the policy's order
    counts; a leaf's share of it."""
    leaves = LEAVES // 10 if size.quick else LEAVES
    found: Times = {}
    for policy in POLICIES:
        tree, times = bushy(leaves, policy), Samples()
        with no_collector():
            times.take(tree.evict, tree.num_pages - 1)
        found[f"evict all, {policy}"] = times.shared_by(leaves)
    return found


def policies(size: Size) -> Times:
    """Replays of generated agents under two policies; a request's share of it."""
    trace = generated("agents", 500 if size.quick else None)
    found: Times = {}
    for blocks in BLOCKS:
        for policy in POLICIES:
            times = Samples()
            times.take(partial(replay_policy, trace, policy, blocks))
            found[f"replay, {policy}, {blocks}"] = times.shared_by(len(trace.requests))
    return found


def host_admission(size: Size) -> Times:
    """Admissions without host memory, and with it by what of the prompt only it has."""
    chance = np.random.default_rng(size.seed)

    def tokens(count: int) -> Tokens:
        return chance.integers(0, 99_000, count, dtype=np.int32)

    others = [tokens(2048) for _ in range(HOST_OTHERS)]
    workers = {name: HostWorker(name != "no host") for name in HOST_WAYS}
    times = {name: Samples() for name in HOST_WAYS}
    for worker in workers.values():
        for other in others:
            worker.serve(other)
        worker.others = others
    with no_collector():
        for at in range(min(size.calls, 300)):
            prompt = tokens(PROMPT_TOKENS)
            for name in turn_about(list(HOST_WAYS), at):
                worker = workers[name]
                worker.serve(prompt[:CACHED_TOKENS], HOST_WAYS[name])
                worker.serve(prompt, admit=times[name].take)
                worker.forget()  # all kinds go on with as many pages
                for other in others if at % 20 == 0 else ():
                    worker.serve(other)
    return {f"admission, host: {name}": kind for name, kind in times.items()}


def waiting(size: Size) -> Times:
    """A pass over 10,000 requests that wait and do not fit, after one page was freed; and aborts of
    some of them."""
    worker = Worker(size.seed, size.config)
    pasts = worker.fill_cache()
    worker.leave_free(100)
    scheduler, passes, aborts, rids = worker.scheduler, Samples(), Samples(), []
    for number in range(10_000):
        key = RadixKey(pasts[number % len(pasts)])
        request = worker.request(key, MOST_PAGES * PAGE_SIZE - CACHED_TOKENS)
        rids.append(scheduler.add(request).rid)
    assert not scheduler.pop_preallocated()
    with no_collector():
        for _ in range(size.calls):
            pages = worker.pages
            pages.drop(pages.open(None, 1, worker.tick()))
            assert not passes.take(scheduler.pop_preallocated)
        for rid in np.random.default_rng(size.seed).permutation(rids)[: size.calls].tolist():
            assert aborts.take(scheduler.abort, rid)
    return {"pass in vain, 10,000 wait": passes, "abort, 10,000 wait": aborts}


def crowd(size: Size) -> Times:
    """Admissions of requests that fit, each beside 2,000 that wait and do not."""
    worker, times = Worker(size.seed, size.config), Samples()
    pasts = worker.fill_cache()
    worker.leave_free(FEW_FREE)
    for number in range(2_000):
        key = RadixKey(pasts[number % len(pasts)])
        worker.scheduler.add(worker.request(key, MOST_PAGES * PAGE_SIZE - CACHED_TOKENS))
    assert not worker.scheduler.pop_preallocated()
    with no_collector():
        for number in range(size.calls):
            worker.evict(worker.life(pasts[number % CONVERSATIONS], admit=times.take)[1])
    return {"admission, 2,000 wait": times}


def publishing(size: Size) -> Times:
    """Admissions and ends of two workers turn about, of which one publishes cache events that a
    process reads. Then the other publishes, since no two workers are equally fast."""
    times = {
        f"{name}, events {'on' if on else 'off'}": Samples()
        for name in ("admission", "finish") for on in (False, True)
    }  # fmt: skip
    free = "tcp://127.0.0.1:*"
    for which in (0, 1, 1, 0):
        workers = [Worker(size.seed, size.config) for _ in range(2)]
        pasts = [worker.fill_cache() for worker in workers]
        publisher = KVEventPublisher(
            KVEventsConfig(free, free, free), PeerId("decode-0", 1), "model", PAGE_SIZE
        )
        [tier] = publisher.tiers
        tier.listen(workers[which].pages.cache)
        reader = subprocess.Popen([sys.executable, "-c", _READER, publisher.endpoint])

        try:
            for worker in workers:
                worker.leave_free(2 * MOST_RUNNING)
            with no_collector():
                for number in range(size.calls // 2):
                    at = (number + number // 2) % 2  # 0 1 1 0: neither always follows the other
                    worker, past = workers[at], pasts[at][number // 2 % CONVERSATIONS]
                    on = "on" if at == which else "off"
                    takes: list[Take] = [
                        times[f"{name}, events {on}"].take for name in ("admission", "finish")
                    ]
                    if at == which:
                        takes = [partial(take, _passed_on, tier) for take in takes]
                    admit, finish = takes
                    worker.evict(worker.life(past, admit=admit, finish=finish)[1])
                    if at == which:
                        tier.pass_on()
        finally:
            reader.kill()
            reader.wait()
            publisher.close()
    return times


def _passed_on(tier: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """As a node makes a call: the publisher takes what changed, before and after."""
    tier.pass_on()
    result = call(*arguments)
    tier.pass_on()
    return result


def _warm_and_cold(measure: Callable[[], Times]) -> Times:
    found = measure()
    with Samples.all_cold():
        return found | {f"{name}, cold": times for name, times in measure().items()}


PARTS = {
    part.__name__: part
    for part in (
        life, full_pool, match, evict, append_many, prefill, evict_all, policies, host_admission,
        waiting, crowd, publishing
    )
}  # fmt: skip


# --- the command ----------------------------------------------------------------------------------


def rows_of(times: Times) -> Iterator[Row]:
    for call, samples in times.items():
        row = {"call": call, **samples.figures()}
        if call in AIMS_US:
            row |= {"aim_us": AIMS_US[call], "met": row["us_p50"] <= AIMS_US[call]}
        yield row


def sched(
    json_file: JsonFile = None,
    seed: Annotated[int, typer.Option(help="Of the tokens.")] = 0,
    policy: Annotated[str, typer.Option(help="Of eviction.")] = DEFAULT_POLICY,
    quick: Annotated[bool, typer.Option(help="A tenth of the calls.")] = False,
    part: Annotated[list[str] | None, typer.Option(help="Only this; may be given again.")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Compare with a commit, turn about, pairs included."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --against, of each part.")] = 24,
    starts: Annotated[
        int, typer.Option(min=1, help="With --against: of all processes, to share the rounds.")
    ] = 3,
    cpu: Annotated[
        bool, typer.Option(help="With --against: processor time, for a machine with other work.")
    ] = False,
) -> None:
    """What decode's scheduler costs the engine's thread: admission, commit, growth, end, abort."""
    check_outputs(json_file)
    if against is not None:
        from benchmarks.against import Plan, against_command, parts_of

        parts = parts_of(part or [])
        calls = 20 if quick else Plan(parts).calls
        plan = Plan(parts, rounds, starts, calls, seed, policy, quick, cpu)
        against_command(against, plan, json_file)
        return
    if unknown := set(part or []) - set(PARTS):
        raise ConfigError(f"--part is {min(unknown)!r}, the parts are {', '.join(PARTS)}")
    size = Size(100 if quick else 1000, seed, policy, quick)
    size.config  # noqa: B018  an unknown policy is refused here
    rows = told(row for name in part or PARTS for row in rows_of(PARTS[name](size)))
    write(
        json_file, "sched" + " --quick" * quick, rows, seed=seed, policy=policy,
        statistic="percentiles of single calls, collector off; us: wall clock, cpu_us: the "
        "thread's own time; a tree's eviction and a replay: the share of a leaf, of a request",
        request=f"{PROMPT_TOKENS} tokens, {CACHED_TOKENS} cached, page {PAGE_SIZE}, "
        f"{OUTPUT_TOKENS} generated", pool=f"{NUM_PAGES} pages",
        cold=f"{COLD_BYTES >> 20} MiB copied on the same core before each call",
    )  # fmt: skip
