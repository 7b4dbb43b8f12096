"""`python -m benchmarks router`: block hit ratio and balance of several decode workers under each
way to route, simulated.

Each worker is a real `RadixCache` with the default policy. A request of the trace is matched and
locked where it was sent; its prompt is in the tree once the blocks that were missing have been
computed, and is held until its output is generated; then what is over the capacity is evicted.
Workers never queue: the model gives times, not throughput. Cache events travel as in life, encoded,
and at once.

Ways to route: `bounded` (BoundedAffinityRouter), `longest` (the longest match, ties to the least in
progress), `round_robin`, `least_loaded` (fewest blocks in progress). The last two show what balance
the trace allows.

What turns do to it: a request carries the whole conversation before it, and its blocks are on the
one worker that had the turn before; the first block (a system prompt) is in every conversation. A
router that does not look finds one in 16 of the conversations. About two thirds of the requests
begin one: for them all workers that hold the first block are as good, and by longest match the few
that hold a little more get them all, grow too busy, and evict what would have been asked for.
Discounting what others hold too sends them to the least loaded instead, which alone keeps the
balance here: the bound is hardly ever reached (`overflowed`), it is there for a document that all
clients ask about.
"""

from __future__ import annotations

import heapq
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from prefixkv.cache.events import EventBatch, EventFeed, page_keys
from prefixkv.cache.eviction.policy import DEFAULT_POLICY, make_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.results import PrefixLock
from prefixkv.cli.replay import Trace, TraceRequest, read_trace
from prefixkv.errors import ConfigError, TraceError
from prefixkv.serving.router import BoundedAffinityRouter, Route

ROUTERS = ("bounded", "longest", "least_loaded", "round_robin")
VARIANTS: tuple[dict[str, float], ...] = (
    {"min_worth": 0}, {"min_worth": 0.1}, {"expect_s": 0}, {"bound": 1.05}, {"slack": 0},
    {"fade_s": 60},
)  # fmt: skip
WINDOWS_S = (60.0, 600.0)


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """How long a request takes: missing tokens are computed first, then the output comes a token a
    step."""

    prefill_tokens_s: float = 20_000.0
    step_s: float = 0.03


@dataclass(frozen=True, slots=True)
class RouterResult:
    """`load_*` are max over mean of the workers. Work is prompt blocks sent to a worker; in
    progress, until the end."""

    router: str
    settings: dict[str, float]  # of a bounded one, other than the defaults
    workers: int
    capacity_blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    load_routed: float  # all work of the run
    load_in_progress: float  # blocks in progress, averaged over time
    load_window_p50: dict[str, float]  # work within windows, by their seconds
    load_window_p99: dict[str, float]
    evicted_blocks: int
    stats: dict[str, int]


class CacheWorker:
    """One decode worker's cache of `capacity` blocks."""

    def __init__(self, name: str, capacity: int, block_tokens: int) -> None:
        policy = make_policy(DEFAULT_POLICY)
        policy.token_scale = block_tokens
        self.name = name
        self.cache = RadixCache(page_size=1, policy=policy)
        self.feed = EventFeed(self.cache, name, 1)
        self.open_blocks = 0
        self._capacity = capacity
        self._free: list[int] = []
        self._fresh = count()

    def arrive(self, request: TraceRequest) -> PrefixLock:
        return self.cache.lock(self.cache.match_prefix(request.whole_key), request.time_s)

    def store(self, request: TraceRequest, lock: PrefixLock, now_s: float) -> PrefixLock:
        """The prompt is complete: it is cached, and held by another lock."""
        match = self.cache.match_prefix(request.whole_key)
        missing = len(request.whole_key) - match.prefix_len
        while len(self._free) < missing:
            self._free.append(next(self._fresh))
        cut = len(self._free) - missing
        pages = np.array([*match.pages.tolist(), *self._free[cut:]], np.int32)
        del self._free[cut:]
        held = self.cache.lock(self.cache.insert(request.whole_key, pages, now_s=now_s), now_s)
        self.cache.unlock(lock)
        self._shrink(now_s)
        return held

    def end(self, lock: PrefixLock, now_s: float) -> None:
        self.cache.unlock(lock)
        self._shrink(now_s)

    def _shrink(self, now_s: float) -> None:
        self._free += self.cache.evict(
            max(0, self.cache.num_pages - self._capacity), now_s
        ).tolist()


class RouterSimulation:
    """One run of one way to route; `settings` are the bounded router's."""

    def __init__(
        self,
        trace: Trace,
        outputs: list[int],
        num_workers: int,
        capacity: int,
        times: ServiceTimes,
        settings: dict[str, float] | None = None,
    ) -> None:
        self.trace = trace
        self.outputs = outputs
        self.workers = [
            CacheWorker(f"decode-{i}", capacity, trace.block_tokens) for i in range(num_workers)
        ]
        self.settings = settings or {}
        self.router = BoundedAffinityRouter(**self.settings)  # type: ignore[arg-type]
        for worker in self.workers:
            self.router.add_worker(worker.name)
        self.work: list[tuple[float, int, int]] = []  # when, worker, blocks
        self.progress = np.zeros(num_workers)  # block seconds
        self._capacity = capacity
        self._times = times
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._tickets = count()
        self._now_s = 0.0

    def run(self, name: str) -> RouterResult:
        by_prefix = name == "bounded"
        hit_blocks = hit_tokens = 0
        for number, request in enumerate(self.trace.requests):
            self._advance(request.time_s)
            route = None
            if by_prefix:
                route = self.router.route(
                    page_keys(request.whole_key.data, 1), request.time_s, work=len(request.key)
                )
                chosen = int(route.worker.rpartition("-")[2])
            else:
                chosen = self._choose(name, number, request)
            worker = self.workers[chosen]
            lock = worker.arrive(request)
            known = lock.prefix_len
            hit_blocks += known
            hit_tokens += min(known * self.trace.block_tokens, request.num_tokens)
            worker.open_blocks += len(request.key)
            self.work.append((request.time_s, chosen, len(request.key)))
            missing_tokens = (len(request.key) - known) * self.trace.block_tokens
            ready_s = request.time_s + missing_tokens / self._times.prefill_tokens_s
            self._at(ready_s, self._storing(worker, request, lock, route, self.outputs[number]))
        while self._due:
            self._advance(self._due[0][0])
        return self._result(name, hit_blocks, hit_tokens)

    def _choose(self, name: str, number: int, request: TraceRequest) -> int:
        if name == "round_robin":
            return number % len(self.workers)
        among = range(len(self.workers))
        if name == "longest":
            depths = [
                worker.cache.match_prefix(request.whole_key).prefix_len for worker in self.workers
            ]
            among = [i for i in among if depths[i] == max(depths)]  # type: ignore[assignment]
        return min(among, key=lambda i: self.workers[i].open_blocks)

    def _storing(
        self,
        worker: CacheWorker,
        request: TraceRequest,
        lock: PrefixLock,
        route: Route | None,
        output: int,
    ) -> Callable[[float], None]:
        def store(now_s: float) -> None:
            held = worker.store(request, lock, now_s)
            self._tell(worker, route)
            self._at(now_s + output * self._times.step_s, lambda end_s: end(held, end_s))

        def end(held: PrefixLock, now_s: float) -> None:
            worker.end(held, now_s)
            worker.open_blocks -= len(request.key)
            if route is not None:
                self.router.ended(route, now_s)
            self._tell(worker, route)

        return store

    def _tell(self, worker: CacheWorker, route: Route | None) -> None:
        if route is not None and not self.router.apply(
            EventBatch.decode(worker.feed.take().encode())
        ):
            raise AssertionError(f"{worker.name} is out of sync")

    def _at(self, when_s: float, then: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._tickets), then))

    def _advance(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            when_s, _, then = heapq.heappop(self._due)
            self._pass(when_s)
            then(when_s)
        self._pass(now_s)

    def _pass(self, now_s: float) -> None:
        self.progress += [worker.open_blocks * (now_s - self._now_s) for worker in self.workers]
        self._now_s = now_s

    def _result(self, name: str, hit_blocks: int, hit_tokens: int) -> RouterResult:
        requests = self.trace.requests
        windows = {
            f"{width:g}": _windows(self.work, width, len(self.workers)) for width in WINDOWS_S
        }
        return RouterResult(
            router=name,
            settings=self.settings,
            workers=len(self.workers),
            capacity_blocks=self._capacity,
            block_hit_ratio=round(
                hit_blocks / max(1, sum(len(request.key) for request in requests)), 4
            ),
            token_hit_ratio=round(
                hit_tokens / max(1, sum(request.num_tokens for request in requests)), 4
            ),
            load_routed=_max_over_mean(_sums(self.work, len(self.workers))),
            load_in_progress=_max_over_mean(self.progress),
            load_window_p50={
                width: round(float(np.percentile(loads, 50)), 3) for width, loads in windows.items()
            },
            load_window_p99={
                width: round(float(np.percentile(loads, 99)), 3) for width, loads in windows.items()
            },
            evicted_blocks=sum(worker.cache.stats().evicted_pages for worker in self.workers),
            stats=self.router.stats() if name == "bounded" else {},
        )


def _sums(work: list[tuple[float, int, int]], num_workers: int) -> npt.NDArray[np.float64]:
    return np.bincount(
        [at for _, at, _ in work], [blocks for *_, blocks in work], num_workers
    ).astype(np.float64)


def _max_over_mean(loads: npt.NDArray[np.float64]) -> float:
    return round(float(loads.max() / loads.mean()), 3) if loads.any() else 1.0


def _windows(work: list[tuple[float, int, int]], width_s: float, num_workers: int) -> list[float]:
    """Max over mean of the work that came within each window."""
    parts: dict[int, list[tuple[float, int, int]]] = {}
    for entry in work:
        parts.setdefault(int(entry[0] // width_s), []).append(entry)
    return [_max_over_mean(_sums(part, num_workers)) for part in parts.values()]


def output_lengths(path: Path, limit: int | None = None) -> list[int]:
    """`output_length` of each line of a Mooncake trace. Raises TraceError."""
    outputs: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(outputs) == limit:
                break
            if line.strip():
                entry = json.loads(line)
                length = entry.get("output_length") if isinstance(entry, dict) else None
                if type(length) is not int or length < 0:
                    raise TraceError(f"{path}:{number}: output_length is {length!r}")
                outputs.append(length)
    return outputs


def decision_times_us(
    num_workers: int = 16, known_pages: int = 100_000, decisions: int = 2000
) -> dict[str, Any]:
    """What a decision about an 8k-token prompt of 512 pages costs; a worker holds `known_pages`
    pages of 6k chats."""
    rng = np.random.default_rng(1)
    router = BoundedAffinityRouter(expect_s=0)
    chats: list[bytes] = []
    for number in range(num_workers):
        cache = RadixCache(page_size=16)
        feed = EventFeed(cache, f"decode-{number}", 1)
        router.add_worker(f"decode-{number}")
        for chat in range(known_pages // 384):
            tokens = rng.integers(0, 50_000, 8192, dtype=np.int32)
            tokens[:2048] = np.arange(2048)  # the system prompt of all
            cache.insert(
                tokens[: 384 * 16], np.arange(chat * 384, (chat + 1) * 384, dtype=np.int32)
            )
            if len(chats) < decisions and chat < decisions // num_workers:
                chats.append(tokens.tobytes())
        router.apply(feed.take())
    hashed_s, routed_s = [], []
    for at, data in enumerate(chats):
        began_s = time.perf_counter()
        keys = page_keys(data, 16)
        hashed_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        route = router.route(keys, at * 0.01)
        routed_s.append(time.perf_counter() - began_s)
        router.ended(route, at * 0.01)
    stats = router.stats()
    return {
        "workers": num_workers,
        "known_pages": stats["known_pages"],
        "prompt_pages": 512,
        "route_us": {f"p{q}": round(float(np.percentile(routed_s, q)) * 1e6, 1) for q in (50, 99)},
        "page_keys_us": {
            f"p{q}": round(float(np.percentile(hashed_s, q)) * 1e6, 1) for q in (50, 99)
        },
    }


def router(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL.")],
    workers: Annotated[int, typer.Option(help="Decode workers.")] = 16,
    capacity: Annotated[int, typer.Option(help="Blocks a worker.")] = 2500,
    names: Annotated[str, typer.Option("--router", help="Names, by commas.")] = ",".join(ROUTERS),
    prefill_tokens_s: Annotated[
        float, typer.Option(help="Missing tokens computed a second.")
    ] = 20_000.0,
    step_ms: Annotated[float, typer.Option(help="A decode step.")] = 30.0,
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write recipe and results there.")
    ] = None,
) -> None:
    """Where requests go: how often 16 workers' caches hit, and how even their load is, by way to
    route."""
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in ROUTERS:
            raise ConfigError(f"--router {name!r} is not one of {', '.join(ROUTERS)}")
    for setting, value in (
        ("--workers", workers),
        ("--capacity", capacity),
        ("--prefill-tokens-s", prefill_tokens_s),
    ):
        if not value > 0:
            raise ConfigError(f"{setting} is {value}, it has to be above 0")
    if not step_ms >= 0:
        raise ConfigError(f"--step-ms is {step_ms}, at least 0 is needed")
    loaded, outputs = read_trace(trace, limit=requests), output_lengths(trace, requests)
    times = ServiceTimes(prefill_tokens_s, step_ms / 1000)
    console = Console()
    layout = "{:<22} {:>7} {:>7} {:>9} {:>12} {:>12} {:>12}"
    head = ("router", "block", "token", "max/mean", "in progress", "60 s p50/99", "600 s p50/99")
    console.print(layout.format(*head), style="bold")
    results = []
    runs: list[tuple[str, dict[str, float]]] = [(name, {}) for name in chosen]
    if json_file is not None and "bounded" in chosen:
        runs += [("bounded", settings) for settings in VARIANTS]
    for name, settings in runs:
        result = RouterSimulation(loaded, outputs, workers, capacity, times, settings).run(name)
        label = " ".join([name, *(f"{setting}={value:g}" for setting, value in settings.items())])
        figures = (
            result.block_hit_ratio,
            result.token_hit_ratio,
            result.load_routed,
            result.load_in_progress,
        )
        spread = [
            f"{result.load_window_p50[w]:.2f}/{result.load_window_p99[w]:.2f}"
            for w in ("60", "600")
        ]
        console.print(
            layout.format(label, *(f"{figure:.3f}" for figure in figures), *spread), highlight=False
        )
        results.append(asdict(result))
    decision = decision_times_us(workers)
    console.print(f"one decision: {decision}", highlight=False)
    if json_file is not None:
        recipe = {
            "command": f"python -m benchmarks router {trace.name}",
            "trace": f"{trace.name}: {len(loaded.requests)} requests, {loaded.block_tokens}-token "
            "blocks, no warm-up",
            "seed": "none: nothing is drawn but the decision benchmark's tokens (1)",
            "service_times": asdict(times),
            "block_hit_ratio": "blocks found where sent / all hash ids, the partial last block "
            "included",
            "policy": DEFAULT_POLICY,
            "load": "max / mean over the workers: load_routed, prompt blocks sent to them in the "
            "whole run; "
            "load_in_progress, blocks of requests in progress, averaged over time (rests on "
            "output lengths, which no "
            "router knows); load_window, prompt blocks sent within each window",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
            "load_average": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
        text = json.dumps({"recipe": recipe, "results": results, "decision": decision}, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
