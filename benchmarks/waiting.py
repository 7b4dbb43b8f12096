"""Claim: what waits for pages keeps its prefix cached, so a pool under pressure hits more often,
and an admission costs at most a twentieth more.

    python -m benchmarks waiting CONVERSATION AGENTS --json benchmarks/results/waiting.json

The decode scheduler alone, in simulated time, on recorded traces; a block is a page. As many
requests wait as are asked for: a session begins when fewer do, in the order of the trace. Its later
turns come as long after the end of the turn before as they did in the trace. Prefill sends the
blocks that are missing, one request after the other; then the answer is generated, in as long as
its length takes. What a client waits for its first token is counted from its arrival.

What it costs is measured with two schedulers turn about, one of which protects what waits: a
request comes, one that waits is admitted, and evicts.
"""

from __future__ import annotations

import heapq
import json
import os
import platform
from collections import deque
from dataclasses import asdict, dataclass
from itertools import count, product
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.samples import Samples
from benchmarks.sched import CACHED_TOKENS, PAGE_SIZE, PROMPT_TOKENS, Worker
from benchmarks.yardsticks import no_collector
from prefixkv.cache.eviction.policy import DEFAULT_POLICY, make_policy
from prefixkv.cli.replay import Trace, read_trace
from prefixkv.cli.replay.trace import block_names
from prefixkv.config import DecodeConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.ids import KVPoll
from prefixkv.request import Request

WAITING = (8, 32, 128)
ADMISSIONS = ("hit_aware", "fifo")
BLOCK_S = 0.0125
"""What prefill needs for a block of 512 tokens: 40,000 tokens a second, all workers together."""
ANSWER_S = 7.0
"""350 tokens at 20 ms each."""
RUNNING = 64
COST_ROUNDS = 1500


@dataclass(frozen=True, slots=True)
class Row:
    trace: str
    blocks: int  # of the pool
    admission: str
    waiting: int  # asked for
    waited: float  # on average
    protect: bool
    requests: int  # counted: the second half
    block_hit_ratio: float
    ttft_s_mean: float
    ttft_s_p50: float
    requests_a_second: float


def sessions(trace: Trace) -> tuple[list[int], dict[int, list[int]]]:
    """Requests that begin a session, and of each request those that go on from it: their prompts
    begin with all whole blocks of it, and none between has more of them."""
    ends: dict[Any, int] = {}  # the last block of a prompt: the latest request with it
    begins: list[int] = []
    after: dict[int, list[int]] = {}
    for at, request in enumerate(trace.requests):
        names = block_names(request.whole_key, trace.page_size)
        before = next((ends[name] for name in reversed(names) if name in ends), None)
        if before is None or len(trace.requests[before].whole_key) < 2 * trace.page_size:
            begins.append(at)
        else:
            after.setdefault(before, []).append(at)
        if names:
            ends[names[-1]] = at
    return begins, after


class Play:
    """One run of the decode scheduler over a trace, in simulated time."""

    def __init__(
        self,
        trace: Trace,
        blocks: int,
        admission: str,
        waiting: int,
        protect: bool,
        policy: str,
        seed: int = 0,
        pause_more_s: float = 0.0,
    ) -> None:
        """With a `seed` above 0 sessions begin in another order, and each pause is drawn from .9 to
        1.1 of the trace's; `pause_more_s` is added to every pause."""
        chosen = make_policy(policy)
        chosen.token_scale = trace.token_scale
        longest = blocks * 3 // 4
        self._pages = PageManager(blocks, trace.page_size, RUNNING, policy=chosen)
        self._scheduler = DecodeScheduler(
            self._pages,
            reserve_tokens=0,
            admission=admission,
            protect_waiting=protect,
            patience_s=DecodeConfig().patience_s,
        )
        self._requests = trace.requests
        begins, self._after = sessions(trace)
        # Drawn per request of the trace, not as events come: with one seed all cases have the same
        # sessions and pauses.
        random = Random(seed)
        self._pauses = [random.uniform(0.9, 1.1) if seed else 1.0 for _ in trace.requests]
        self._pause_more_s = pause_more_s
        if seed:
            random.shuffle(begins)
        self._begins = deque(begins)
        self._short = [0 < len(one.whole_key) <= longest for one in trace.requests]
        self._most_waiting = waiting
        self._numbers = count()
        self._due: list[tuple[float, int, str, Any]] = []  # a heap of what happens when
        self._prefill_free_s = 0.0
        self.arrived: dict[str, tuple[float, int]] = {}
        self.served: list[tuple[int, int, float, float]] = []  # hit, asked, TTFT, end

    def run(self) -> list[tuple[float, int]]:
        """Until all requests have ended; returns (seconds, how many waited) for each pass."""
        lengths, now_s = [], 0.0
        scheduler = self._scheduler
        while True:
            while self._begins and len(scheduler.waiting) < self._most_waiting:
                self._arrive(self._begins.popleft(), now_s)
            self._admit(now_s)
            if self._begins and len(scheduler.waiting) < self._most_waiting:
                continue
            if not self._due:
                break
            lengths.append((-now_s, len(scheduler.waiting)))
            now_s, _, what, of = heapq.heappop(self._due)
            lengths[-1] = (lengths[-1][0] + now_s, lengths[-1][1])
            if what == "arrives":
                self._arrive(of, now_s)
            elif what == "is here":
                scheduler.room_ended(of.room_key, KVPoll.SUCCESS, None, b"", now_s)
                for req in scheduler.pop_transferred(now_s):
                    self._say_ttft(req, now_s)
                    self._later(now_s + ANSWER_S, "ends", req)
            else:
                scheduler.finish(of, now_s)
                self._go_on(int(of.rid), now_s)
        scheduler.check_invariants()
        assert len(self.served) == sum(self._short)
        return lengths

    def _later(self, when_s: float, what: str, of: Any) -> None:
        heapq.heappush(self._due, (when_s, next(self._numbers), what, of))

    def _arrive(self, at: int, now_s: float) -> None:
        if not self._short[at]:  # it has no whole block, or could never be admitted
            self._go_on(at, now_s)
            return
        key = self._requests[at].whole_key
        self._scheduler.add(
            Request(str(at), key, 1, room=at + 1, prefill="tcp://127.0.0.1:1"), now_s
        )
        self.arrived[str(at)] = now_s, len(key)

    def _admit(self, now_s: float) -> None:
        admitted = self._scheduler.pop_preallocated(now_s)
        self._scheduler.take_commands()
        for req in admitted:
            missing = req.fill_len - req.prefix_len
            self._prefill_free_s = max(now_s, self._prefill_free_s) + missing * BLOCK_S
            self._later(self._prefill_free_s, "is here", req)

    def _say_ttft(self, req: DecodeRequest, now_s: float) -> None:
        arrived_s, blocks = self.arrived[req.rid]
        self.served.append((req.prefix_len, blocks, now_s - arrived_s, now_s))

    def _go_on(self, at: int, now_s: float) -> None:
        for then in self._after.get(at, ()):
            pause_s = self._requests[then].time_s - self._requests[at].time_s - ANSWER_S
            pause_s = max(1.0, pause_s * self._pauses[then]) + self._pause_more_s
            self._later(now_s + pause_s, "arrives", then)


def play(
    trace: Trace, blocks: int, admission: str, waiting: int, protect: bool, policy: str
) -> Row:
    run = Play(trace, blocks, admission, waiting, protect, policy)
    lengths = np.array(run.run())
    half = run.served[len(run.served) // 2 :]
    hit, asked, ttft_s, end_s = (np.array(column) for column in zip(*half, strict=True))
    return Row(
        trace=trace.name, blocks=blocks, admission=admission, waiting=waiting, protect=protect,
        waited=round(float(np.average(lengths[:, 1], weights=lengths[:, 0])), 1),
        requests=len(half), block_hit_ratio=round(float(hit.sum() / asked.sum()), 4),
        ttft_s_mean=round(float(ttft_s.mean()), 2),
        ttft_s_p50=round(float(np.median(ttft_s)), 2),
        requests_a_second=round(len(half) / float(end_s[-1] - end_s[0]), 3),
    )  # fmt: skip


def cost(waiting: int, rounds: int, policy: str) -> dict[str, Any]:
    """Microseconds of the thread for a request that comes, and one that is admitted in the pass
    after it, turn about without and with protection; the pool is full, and every admission
    evicts."""
    config = DecodeConfig(policy=policy, evict_reserve=0.0)
    workers = []
    for protect in (False, True):
        # Rows, not pages, let requests wait; what is admitted evicts all the same.
        worker = Worker(1, config, rows=1, protect_waiting=protect)
        pasts = worker.fill_cache()
        for past in pasts * 2:  # what no request comes back to, to be evicted
            (req,) = worker.run([worker.request(_longer(worker, past))])
            worker.scheduler.finish(req, worker.now_s)
        worker.leave_free(0)
        workers.append((worker, pasts, deque[DecodeRequest]()))
    samples = Samples(), Samples()

    def turn(at: int, number: int) -> None:
        worker, pasts, running = workers[at]
        request = worker.request(_longer(worker, pasts[number % len(pasts)]))
        if running:
            worker.scheduler.finish(running.popleft(), worker.now_s)
        now_s = worker.now_s

        def come_and_admit() -> list[DecodeRequest]:
            worker.scheduler.add(request, now_s)
            return worker.scheduler.pop_preallocated(now_s)

        admitted = samples[at].take(come_and_admit)
        worker.scheduler.take_commands()
        for req in admitted:
            worker.succeed(req)
        running.extend(worker.scheduler.pop_transferred(now_s))

    for at, (worker, pasts, _) in enumerate(workers):
        for number in range(waiting):
            worker.add(_longer(worker, pasts[number % len(pasts)]), worker.now_s)
        for number in range(waiting):
            turn(at, number)
    for part in samples:
        part.clear()
    with no_collector():
        for number in range(rounds):
            for at in (0, 1) if number % 2 else (1, 0):
                turn(at, number)
    before, after = (part.figures() for part in samples)
    for worker, _, _ in workers:
        assert len(worker.scheduler.waiting) == waiting
    return {
        "waiting": waiting,
        "cpu_us_p50": [before["cpu_us_p50"], after["cpu_us_p50"]],
        "cpu_us_p99": [before["cpu_us_p99"], after["cpu_us_p99"]],
        "evicted_pages": [worker.pages.evicted_pages for worker, _, _ in workers],
        "ratio": round(after["cpu_us_p50"] / before["cpu_us_p50"], 3),
    }


def _longer(worker: Worker, past: Any) -> Any:
    return np.concatenate([past, worker.tokens(PROMPT_TOKENS - CACHED_TOKENS)])


def waiting(
    paths: Annotated[list[Path], typer.Argument(metavar="TRACES", help="As `prefixkv replay`.")],
    blocks: Annotated[str, typer.Option(help="Of the pool, 512 tokens each, by commas.")] = (
        "3000,8000"
    ),
    policy: Annotated[str, typer.Option(help="Of eviction.")] = DEFAULT_POLICY,
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """What it brings, and what it costs, to evict last what waiting requests have cached."""
    costs = [cost(number, COST_ROUNDS if requests is None else 50, policy) for number in WAITING]
    for row in costs:
        print(row, flush=True)
    rows = []
    for path in paths:
        trace = read_trace(path, limit=requests)
        for size, admission, number, protect in product(
            map(int, blocks.split(",")), ADMISSIONS, WAITING, (False, True)
        ):
            rows.append(play(trace, size, admission, number, protect, policy))
            print(rows[-1], flush=True)
    if json_file is not None:
        recipe = {
            "command": "python -m benchmarks waiting "
            + " ".join(path.name for path in paths) + " --json " + json_file.name,
            "policy": policy,
            "simulated": f"prefill {BLOCK_S} s a missing block, one request after the other; an "
            f"answer {ANSWER_S} s; at most {RUNNING} at once",
            "counted": "the second half of the requests to get their first token",
            "cost": f"{COST_ROUNDS} rounds turn about, thread time of add and a pass, collector "
            f"off; prompts of {PROMPT_TOKENS} tokens, {CACHED_TOKENS} cached, pages of {PAGE_SIZE}",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
            "python": platform.python_version(),
        }  # fmt: skip
        text = {"recipe": recipe, "rows": [asdict(row) for row in rows], "costs": costs}
        json_file.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
