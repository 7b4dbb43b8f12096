"""`python -m benchmarks sched`: what the decode scheduler costs the engine's thread, call by call,
with no network.

The control plane is played by hand: a room's success is told right after its promise was taken. The
pool is cut down to what each case needs by pages that a room holds, as after a failure. Times are
of single calls, the collector off: `us` on the wall, where a busy machine adds the turns of others,
and `cpu_us` of the thread alone.

An admission is measured with the tree as it was when the request came, so that what `add` found
still holds, and with pages gone since, so that it is matched again. `admit_floor` is what no
admission of this size gets by without, at the same point of the same life. `yardstick` is two fixed
loops, to compare machines by.

Each row comes twice. `cold` is with 8 MiB copied on the same core before each call, as a post or a
step of the model does it: that is how an engine calls. The warm one says what the code itself does.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from benchmarks.samples import COLD_BYTES, Row, Samples
from benchmarks.sched_prefill import CHUNK_TOKENS, chunks
from benchmarks.yardsticks import LeastAdmission, no_collector, numpy_loop, python_loop
from prefixkv.cache.events import EventFeed
from prefixkv.cache.eviction.policy import DEFAULT_POLICY
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import DecodeConfig, KVEventsConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.digest import prompt_digest
from prefixkv.errors import ConfigError
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.pages.allocator import PageAllocator
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for, whole_pages
from prefixkv.protocol.commands import DecodeCommand, OpenRoom
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.request import Request

PAGE_SIZE = 16
PROMPT_TOKENS = 8192
CACHED_TOKENS = 6144
SYSTEM_TOKENS = 1024
MAX_NEW_TOKENS = 256
OUTPUT_TOKENS = 100  # that a request has when it is finished
CONVERSATIONS = 16
VOCABULARY = 150_000
MOST_RUNNING = 1_100
NUM_PAGES = 1 << 16
MOST_PAGES = 1 << 14  # of one request
BATCH = 256
OLD = 50  # an eviction of the allocator's case picks among this many of the oldest

_encode = msgspec.msgpack.Encoder().encode
# A subscriber in a process of its own.
_READER = """import sys, zmq
sock = zmq.Context().socket(zmq.SUB)
sock.subscribe("")
sock.connect(sys.argv[1])
while True:
    sock.recv_multipart()
"""

T = TypeVar("T")

Tokens = npt.NDArray[np.int32]


class Worker:
    """A decode scheduler and the other side, played by hand."""

    def __init__(
        self, seed: int, config: DecodeConfig, rows: int = MOST_RUNNING, **more: Any
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self.pages = PageManager(
            NUM_PAGES, PAGE_SIZE, rows, MOST_PAGES, **config.for_page_manager(NUM_PAGES)
        )
        self.scheduler = DecodeScheduler(
            self.pages,
            reserve_tokens=PAGE_SIZE,
            admission=config.admission,
            patience_s=config.patience_s,
            **more,
        )
        self._num_requests = 0
        self._now_s = 0.0
        self.system = self.tokens(SYSTEM_TOKENS)

    def tokens(self, num_tokens: int) -> Tokens:
        return self._rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)

    def request(self, tokens: Any, max_new_tokens: int = MAX_NEW_TOKENS, **fields: Any) -> Request:
        self._num_requests += 1
        number = self._num_requests
        where = "tcp://127.0.0.1:1"
        return Request(str(number), tokens, max_new_tokens, room=number, prefill=where, **fields)

    def add(self, tokens: Any, now_s: float) -> DecodeRequest:
        return self.scheduler.add(self.request(tokens), now_s)

    @property
    def now_s(self) -> float:
        self._now_s += 1e-3
        return self._now_s

    def admit(self, now_s: float) -> tuple[list[DecodeRequest], list[DecodeCommand]]:
        return self.scheduler.pop_preallocated(now_s), self.scheduler.take_commands()

    def run(self, requests: list[Request]) -> list[DecodeRequest]:
        """These requests up to where they run, with a first token."""
        for request in requests:
            self.scheduler.add(request, self.now_s)
        admitted, _ = self.admit(self.now_s)
        assert len(admitted) == len(requests), "the pool is too small for this case"
        for req in admitted:
            self.succeed(req)
        running = self.scheduler.pop_transferred(self.now_s)
        self.scheduler.append_many(running, [1] * len(running), self.now_s)
        return running

    def succeed(self, req: DecodeRequest) -> None:
        self.scheduler.room_ended(req.room_key, KVPoll.SUCCESS, None, b"", self.now_s)

    def generate(self, reqs: list[DecodeRequest], num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.scheduler.append_many(reqs, [7] * len(reqs), self.now_s)

    def fill_cache(self) -> list[Tokens]:
        """The pasts of some conversations, cached: `CACHED_TOKENS` each, with one system prompt."""
        pasts = []
        for _ in range(CONVERSATIONS):
            past = np.concatenate([self.system, self.tokens(CACHED_TOKENS - SYSTEM_TOKENS)])
            for req in self.run([self.request(past)]):
                self.scheduler.finish(req, self.now_s)
            pasts.append(past)
        return pasts

    def drop_cached(self, num_pages: int) -> None:
        """Evict, and let the pages be free."""
        pages = self.pages.cache.evict(num_pages)
        self.pages.allocator.uncache(pages)
        self.pages.allocator.free(pages)

    def leave_free(self, num_pages: int) -> None:
        """Let a room hold the free pages beyond `num_pages`."""
        allocator = self.pages.allocator
        allocator.hold(allocator.alloc(max(0, allocator.free_pages - num_pages)), "ballast")

    def put_first(self, req: DecodeRequest) -> None:
        """Move a request that waits to the front, where one goes that comes back."""
        self.scheduler.waiting.remove(req)
        self.scheduler.waiting.add(req, first=True)


class Bench:
    """One run. `rows` grows as it goes on; `tell` is called with each row."""

    def __init__(self, seed: int, quick: bool, policy: str, tell: Callable[[Row], None]) -> None:
        self._seed = seed
        self._quick = quick
        self._config = DecodeConfig(policy=policy, evict_reserve=0.0)
        self._tell = tell
        self.rows: list[Row] = []

    def run(self) -> None:
        """All rows, warm and cold."""
        self._half()
        with Samples.all_cold():
            self._half()

    def _half(self) -> None:
        self.life()
        self.life(changed=True)
        self.life(full=True)
        self.life(full=True, evict_reserve=DecodeConfig().evict_reserve)
        sizes = [(10, 10), (10_000, 10), (10, 1_000), (10_000, 1_000)]
        took = [
            self.life(waiting=waiting, running=running)["cpu_us_p50"] for waiting, running in sizes
        ]
        ratio = round(max(took) / took[0], 2)
        self._tell(
            row := {
                "name": "admit_ratio",
                "cold": Samples.cold,
                "sizes": sizes,
                "ratio": ratio,
                "target": 1.3,
                "met": ratio <= 1.3,
            }
        )
        self.rows.append(row)
        self.publishing()
        for admission in ("hit_aware", "fifo", "priority"):
            self.blocked_pass(admission)
        self.append()
        self.abort()
        self.allocator()
        self.send_chunk()
        self.digest()
        self.yardstick()

    def _add(
        self,
        name: str,
        samples: Samples,
        p50: float | None = None,
        p99: float | None = None,
        **more: Any,
    ) -> Row:
        row: Row = {"name": name, "cold": Samples.cold, **more, **samples.figures()}
        if Samples.cold:
            p50 = p99 = None  # the aims are warm
        if p50 is not None:
            row |= {"target_us_p50": p50, "met": row["us_p50"] <= p50}
        if p99 is not None:
            row |= {"target_us_p99": p99, "met": row["met"] and row["us_p99"] <= p99}
        self.rows.append(row)
        self._tell(row)
        return row

    def _rounds(self, many: int) -> int:
        if Samples.cold:
            many = max(20, many // 4)  # a copy takes longer than what is measured
        return max(20, many // 10) if self._quick else many

    def yardstick(self) -> None:
        """Fixed loops, to compare machines by."""
        with no_collector():
            for loop in (python_loop, numpy_loop):
                times = Samples()
                for _ in range(self._rounds(1_000)):
                    times.take(loop)
                self._add("yardstick", times, of=str(loop.__doc__))

    def life(
        self,
        *,
        full: bool = False,
        changed: bool = False,
        waiting: int = 0,
        running: int = 0,
        evict_reserve: float = 0.0,
    ) -> Row:
        """One request after the other through all of its life; its prompt is cached up to
        `CACHED_TOKENS`.

        `full`: no page is free, so that an admission evicts what it takes, or, with a reserve, one
        of several does. `changed`: a page that is not in use leaves the tree between the request's
        arrival and its admission. None of those that wait fits.
        """
        worker = Worker(self._seed, replace(self._config, evict_reserve=evict_reserve))
        scheduler, pages = worker.scheduler, worker.pages
        pasts = worker.fill_cache()
        worker.run([worker.request(worker.tokens(20)) for _ in range(running)])
        add, admit, encode, commit, finish, floor = samples = [Samples() for _ in range(6)]
        least = LeastAdmission(worker.tokens(PROMPT_TOKENS), CACHED_TOKENS, PAGE_SIZE, NUM_PAGES)

        def one_life(past: Tokens, changed: bool = False) -> int:
            """Returns how many pages it left in the tree."""
            tokens = np.concatenate([past, worker.tokens(PROMPT_TOKENS - CACHED_TOKENS)])
            now_s = worker.now_s
            req = add.take(worker.add, tokens, now_s)
            if waiting:
                worker.put_first(req)
            if changed:
                worker.drop_cached(1)
                floor.take(least.make)
            _, [command] = admit.take(worker.admit, now_s)
            assert isinstance(command, OpenRoom)
            assert req.prefix_len == CACHED_TOKENS
            encode.take(_encode, command.promise)
            worker.succeed(req)
            commit.take(scheduler.pop_transferred, now_s)
            worker.generate([req], OUTPUT_TOKENS)
            left = whole_pages(req.kv_len - CACHED_TOKENS, PAGE_SIZE)
            finish.take(scheduler.finish, req, now_s)
            return left

        for past in pasts * (
            4 if evict_reserve else 1
        ):  # so that a batch finds enough that no request comes back to
            one_life(past)
        worker.leave_free(0 if full else 2 * MOST_RUNNING)
        too_long = RadixKey(worker.tokens(PROMPT_TOKENS))
        for _ in range(waiting):
            scheduler.add(
                worker.request(too_long, MOST_PAGES * PAGE_SIZE - PROMPT_TOKENS), worker.now_s
            )
        assert not worker.scheduler.pop_preallocated(worker.now_s)
        for kind in samples:
            kind.clear()
        with no_collector():
            for number in range(self._rounds(1_000)):
                evicted = pages.evicted_pages
                left = one_life(pasts[number % len(pasts)], changed)
                assert evict_reserve or (pages.evicted_pages > evicted) == full
                if not full:
                    worker.drop_cached(left - changed)
        tree = "changed since add" if changed else "as at add"
        where: Row = {
            "waiting": waiting,
            "running": running,
            "full": full,
            "evict_reserve": evict_reserve,
        }
        where["tree"] = tree
        if changed:
            self._add("admit_floor", floor, of=str(LeastAdmission.__doc__))
            return self._add("admit", admit, 60.0, 150.0, **where)
        if waiting:
            return self._add("admit", admit, **where)
        self._add("encode_promise", encode, **where)
        self._add("commit", commit, 80.0, **where)
        self._add("finish", finish, **where)
        self._add("add", add, **where)
        return self._add("admit", admit, 60.0, 150.0, **where)

    def publishing(self) -> None:
        """Lives of two workers by turns, of which one publishes cache events; a subscriber in
        another process reads them. Then the other publishes, since no two workers are equally fast.
        `hand_over` is what the publisher's part of a call costs."""
        free = "tcp://127.0.0.1:*"
        config = KVEventsConfig(free, free, free)
        for full in (False, True):
            admit, finish = (Samples(), Samples()), (Samples(), Samples())
            handed = Samples()
            for which in (0, 1, 1, 0):
                workers = [Worker(self._seed, self._config) for _ in range(2)]
                pasts = [worker.fill_cache() for worker in workers]
                publisher = KVEventPublisher(config, PeerId("decode-0", 1), "model", PAGE_SIZE)
                feed = EventFeed(workers[which].pages.cache, "decode-0", 1)
                feed.listen(publisher)
                feeds = [feed if at == which else None for at in range(2)]
                reader = subprocess.Popen([sys.executable, "-c", _READER, publisher.endpoint])
                try:
                    self._by_turns(workers, pasts, feeds, full, admit, finish, handed)
                finally:
                    reader.kill()
                    reader.wait()
                    publisher.close()
            for name, pair in (("admit", admit), ("finish", finish)):
                rows = [
                    self._add(name, pair[at], full=full, publishing=bool(at), by_turns=True)
                    for at in (0, 1)
                ]
                ratio = round(rows[1]["cpu_us_p50"] / rows[0]["cpu_us_p50"], 3)
                row: Row = {"name": f"{name}_publishing_ratio", "cold": Samples.cold}
                row |= {"full": full, "ratio": ratio}
                if name == "admit":
                    row |= {"target": 1.03, "met": ratio <= 1.03}
                self.rows.append(row)
                self._tell(row)
            if not full:
                self._add("hand_over", handed, 5.0, of="one list of changes, after a life")

    def _by_turns(
        self,
        workers: list[Worker],
        pasts: list[list[Tokens]],
        feeds: list[EventFeed | None],
        full: bool,
        admit: tuple[Samples, Samples],
        finish: tuple[Samples, Samples],
        handed: Samples,
    ) -> None:
        """Of `admit` and `finish` the second is what the worker with a feed took."""

        def calls(at: int, samples: tuple[Samples, Samples], call: Callable[[], T]) -> T:
            """As a node makes them: the feed passes on what changed, before and after."""
            feed = feeds[at]

            def passing_on() -> T:
                if feed is not None:
                    feed.pass_on()
                result = call()
                if feed is not None:
                    feed.pass_on()
                return result

            return samples[feed is not None].take(passing_on) if measured else passing_on()

        def one_life(at: int, past: Tokens) -> None:
            worker = workers[at]
            now_s = worker.now_s
            tokens = np.concatenate([past, worker.tokens(PROMPT_TOKENS - CACHED_TOKENS)])
            req = worker.add(tokens, now_s)
            calls(at, admit, lambda: worker.admit(now_s))
            worker.succeed(req)
            worker.scheduler.pop_transferred(now_s)
            worker.generate([req], OUTPUT_TOKENS)
            left = whole_pages(req.kv_len - CACHED_TOKENS, PAGE_SIZE)
            calls(at, finish, lambda: worker.scheduler.finish(req, now_s))
            if not full:
                worker.drop_cached(left)
            if (feed := feeds[at]) is not None and measured:
                handed.take(feed.pass_on)  # one change, where the cache was cut back

        measured = False
        for at, worker in enumerate(workers):
            worker.leave_free(0 if full else 2 * MOST_RUNNING)
            one_life(at, pasts[at][0])
        measured = True
        with no_collector():
            for number in range(2 * self._rounds(500)):
                at = (number + number // 2) % 2  # 0 1 1 0: neither always follows the other
                one_life(at, pasts[at][number // 2 % CONVERSATIONS])

    def blocked_pass(self, admission: str) -> None:
        """A pass over 10,000 that wait and do not fit, after one page was freed; none is
        overdue."""
        worker = Worker(self._seed, replace(self._config, admission=admission, patience_s=1e9))
        pasts = worker.fill_cache()
        worker.leave_free(100)
        for number in range(10_000):
            key = RadixKey(pasts[number % len(pasts)])
            worker.scheduler.add(
                worker.request(key, MOST_PAGES * PAGE_SIZE - CACHED_TOKENS), worker.now_s
            )
        assert not worker.scheduler.pop_preallocated(worker.now_s)
        blocked, unchanged, nothing = Samples(), Samples(), RadixKey()
        with no_collector():
            for _ in range(self._rounds(1_000)):
                pages, now_s = worker.pages, worker.now_s
                pages.drop(pages.open(nothing, None, 1, now_s))
                assert not blocked.take(worker.scheduler.pop_preallocated, now_s)
                assert not unchanged.take(worker.scheduler.pop_preallocated, now_s)
        self._add("blocked_pass", blocked, 500.0, waiting=10_000, admission=admission)
        self._add("blocked_pass_nothing_new", unchanged, waiting=10_000, admission=admission)

    def append(self) -> None:
        """Many requests of one length grow together: each sixteenth step takes a page for every one
        of them."""
        inside, crossing, evicting = Samples(), Samples(), Samples()
        for full in (False, True):
            num_tokens = 300 if full else 2_000
            for _ in range(self._rounds(5) // 4):
                worker = Worker(self._seed, self._config)
                worker.fill_cache()
                if full:
                    worker.leave_free(BATCH)
                reqs = worker.run(
                    [worker.request(worker.tokens(4), num_tokens + 1) for _ in range(BATCH)]
                )
                with no_collector():
                    for step in range(num_tokens):
                        now_s, free, tokens = (
                            worker.now_s,
                            worker.pages.allocator.free_pages,
                            [step] * BATCH,
                        )
                        crosses = len(reqs[0].tokens) % PAGE_SIZE == 0
                        kind = inside if not crosses else crossing if free >= BATCH else evicting
                        kind.take(worker.scheduler.append_many, reqs, tokens, now_s)
                # No KV of the last token is written, so that one needs no page.
                assert all(len(req.pages) == pages_for(req.kv_len, PAGE_SIZE) for req in reqs)
        self._add("append_many", inside, 100.0, requests=BATCH, crossing=0)
        self._add("append_many", crossing, 500.0, requests=BATCH, crossing=BATCH, evicting=False)
        self._add("append_many", evicting, 500.0, requests=BATCH, crossing=BATCH, evicting=True)

    def abort(self) -> None:
        """Aborts of any of 10,000 that wait behind one that does not fit."""
        worker = Worker(self._seed, self._config)
        key = RadixKey(worker.tokens(PROMPT_TOKENS))
        worker.leave_free(100)
        rids = [worker.scheduler.add(worker.request(key), worker.now_s).rid for _ in range(10_000)]
        assert not worker.scheduler.pop_preallocated(worker.now_s)
        times = Samples()
        with no_collector():
            for rid in (
                np.random.default_rng(self._seed).permutation(rids)[: self._rounds(1_000)].tolist()
            ):
                assert times.take(worker.scheduler.abort, rid, worker.now_s)
        self._add("abort", times, waiting=10_000)

    def allocator(self) -> None:
        """100 pages there and back, after a full pool has seen 100,000 random allocations, each
        with what was missing for it taken exactly off the tails of old ones.
        """
        random, allocator = np.random.default_rng(self._seed), PageAllocator(NUM_PAGES)
        live: deque[npt.NDArray[np.int32]] = deque()

        def take(num_pages: int) -> npt.NDArray[np.int32]:
            while (missing := num_pages - allocator.free_pages) > 0:
                at = int(random.integers(0, min(len(live), OLD)))
                allocator.free(live[at][-missing:])
                if len(live[at]) > missing:
                    live[at] = live[at][:-missing]
                else:
                    del live[at]
            return allocator.alloc(num_pages)

        for size in random.integers(1, 201, self._rounds(100_000)).tolist():
            live.append(take(size))
        allocator.free(take(100))
        times, runs = Samples(), []

        def there_and_back() -> npt.NDArray[np.int32]:
            pages = allocator.alloc(100)
            allocator.free(pages)
            return pages

        with no_collector():
            for _ in range(self._rounds(5_000)):
                runs.append(1 + int(np.count_nonzero(np.diff(times.take(there_and_back)) != 1)))
        self._add("alloc_free_100", times, 50.0, runs_a_request=round(float(np.mean(runs)), 1))

    def digest(self) -> None:
        """The digest of a prompt whose beginning is cached, by how much is new; and as a whole."""
        worker = Worker(self._seed, self._config)
        past = worker.fill_cache()[0]
        for new in (0, 100, 512, PROMPT_TOKENS - CACHED_TOKENS):
            known, whole = Samples(), Samples()
            key = RadixKey(np.concatenate([past, worker.tokens(new)]))
            match = worker.pages.match(key)
            with no_collector():
                for _ in range(self._rounds(1_000)):
                    digest, _ = known.take(worker.pages.digest, key, match)
                    assert digest == whole.take(prompt_digest, key)
            self._add("digest", known, 0.5 if not new else None, new_tokens=new)
            self._add("digest", whole, new_tokens=len(key))

    def send_chunk(self) -> None:
        """On prefill; `sched_prefill.py`."""
        prompt = np.random.default_rng(self._seed).integers(0, VOCABULARY, PROMPT_TOKENS, np.int32)
        with no_collector():
            found = chunks(prompt, CACHED_TOKENS, PAGE_SIZE, self._rounds(200))
        for which, times in found.items():
            self._add("send_chunk", times, which=which, tokens=CHUNK_TOKENS)


def sched(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write recipe and rows there.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the tokens.")] = 0,
    policy: Annotated[str, typer.Option(help="Of eviction.")] = DEFAULT_POLICY,
    quick: Annotated[bool, typer.Option(help="A tenth of the rounds.")] = False,
    publishing: Annotated[
        bool, typer.Option(help="Only what publishing cache events costs.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Compare with a commit, turn about, pairs included."),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="With --against: only this; may be given again.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --against, of each part.")] = 24,
    starts: Annotated[
        int, typer.Option(min=1, help="With --against: of all processes, to share the rounds.")
    ] = 3,
    demo: Annotated[
        bool, typer.Option(help="With --against: first tokens of the stand-in engine, too.")
    ] = False,
    cpu: Annotated[
        bool,
        typer.Option(help="With --against: processor time, for a machine with other work."),
    ] = False,
) -> None:
    """What decode's scheduler costs the engine's thread: admission, commit, growth, end, abort."""
    console = Console()

    def tell(row: Row) -> None:
        console.print(
            "  ".join(f"{name}={value}" for name, value in row.items()),
            highlight=False,
            soft_wrap=True,
        )

    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json is {json_file}, there is no such folder")
    if against is not None:
        from benchmarks.against import Plan, against_command, parts_of

        parts = parts_of(part or [], demo)
        calls = 20 if quick else Plan(parts).calls
        plan = Plan(parts, rounds, starts, calls, seed, policy, quick, cpu)
        against_command(against, plan, json_file, console)
        return
    load_before = os.getloadavg()[0]
    bench = Bench(seed, quick, policy, tell)
    if publishing:
        bench.publishing()
        with Samples.all_cold():
            bench.publishing()
    else:
        bench.run()
    if json_file is not None:
        recipe = {
            "command": f"python -m benchmarks sched{' --publishing' if publishing else ''}",
            "seed": seed,
            "quick": quick,
            "policy": policy,
            "statistic": "percentiles of single calls, collector off; us: wall clock, cpu_us: the "
            "thread's own time",
            "request": f"{PROMPT_TOKENS} tokens, {CACHED_TOKENS} cached, page {PAGE_SIZE}, "
            f"{OUTPUT_TOKENS} generated",
            "pool": f"{NUM_PAGES} pages",
            "cold": f"{COLD_BYTES >> 20} MiB copied on the same core before each call",
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "load": {"before": round(load_before, 1), "after": round(os.getloadavg()[0], 1)},
            "python": platform.python_version(),
            "numpy": np.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        json_file.write_text(
            json.dumps({"recipe": recipe, "rows": bench.rows}, indent=1) + "\n", encoding="utf-8"
        )
