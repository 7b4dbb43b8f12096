"""`prefixkv replay`: how often would this cache have hit, by policy and capacity, and how often
could any have.

The traces run through the real `RadixCache`: each request is matched and locked, room is made for
the rest, and the rest is inserted. A block of a Mooncake trace becomes a page of one token, its id;
the policies are told how many tokens it stands for. Every id counts, the partial block at a
prompt's end included, as in published figures.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from prefixkv.cache.eviction.policy import make_policy, policy_names
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import TOKEN_LIMIT, RadixKey
from prefixkv.cli.outputs import check_writable, write_text, writing
from prefixkv.cli.traces import blocks_in, number_in, read_lines
from prefixkv.errors import ConfigError, check_range

OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its blocks as one token each, or its tokens."""

    time_s: float
    key: RadixKey
    whole_key: RadixKey  # without the partial block
    num_tokens: int  # of the prompt, the partial block included


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: list[TraceRequest]
    page_size: int  # tokens of a key a page
    block_tokens: int  # prompt tokens a page


@dataclass(frozen=True, slots=True)
class ReplayResult:
    trace: str
    policy: str
    capacity_blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    requests: int  # counted ones, after the warm-up
    evicted_pages: int
    us_per_request: float


# --- reading --------------------------------------------------------------------------------------


def read_trace(
    path: Path, page_size: int = 16, block_tokens: int = 512, limit: int | None = None
) -> Trace:
    """A Mooncake JSONL trace, or a JSONL of token lists ([..] or {"tokens": [..], "timestamp":
    ms}).

    Args:
        page_size: tokens a page, for token lists.
        block_tokens: tokens a hash id stands for, for Mooncake.
        limit: read so many requests only.
    Raises:
        TraceError: names the file and the line.
    """
    names: dict[int, int] = {}  # hash id: token; dense, whatever the trace's ids are
    requests: list[TraceRequest] = []
    kinds: set[bool] = set()  # whether it is Mooncake's; all lines are or none is

    def parse(entry: Any) -> None:
        request, is_mooncake = _parse(entry, len(requests), names, block_tokens)
        kinds.add(is_mooncake)
        if len(kinds) > 1:
            raise TypeError("hash ids and tokens in one trace")
        requests.append(request)

    read_lines(path, limit, parse, place="{path}:{number}")
    if True in kinds:
        return Trace(path.stem, requests, 1, block_tokens)
    return Trace(path.stem, requests, page_size, page_size)


def _parse(
    entry: Any, number: int, names: dict[int, int], block_tokens: int
) -> tuple[TraceRequest, bool]:
    """The request, and whether it is one of Mooncake's."""
    if isinstance(entry, list):
        entry = {"tokens": entry}
    if not isinstance(entry, dict):
        raise TypeError("neither an object nor a list of tokens")
    stamp = number_in(
        {"timestamp": number * 1000} | entry, "timestamp", 0, 10**15 - 1, (int, float)
    )
    if "tokens" in entry:
        key = RadixKey(entry["tokens"])
        key.check()
        return TraceRequest(stamp / 1000, key, key, len(key)), False
    length = number_in(entry, "input_length", 0, TOKEN_LIMIT - 1)
    ids = blocks_in(entry, length, block_tokens)
    blocks = [names.setdefault(name, len(names)) for name in ids]
    key, whole_key = RadixKey(blocks), RadixKey(blocks[: length // block_tokens])
    return TraceRequest(stamp / 1000, key, whole_key, length), True


class _Hits:
    """What a replay counts: from a share of the requests on, which warm the cache."""

    def __init__(self, trace: Trace, warm: float) -> None:
        self._trace = trace
        self._from = int(warm * len(trace.requests))
        self._hit_blocks = self._hit_tokens = self._blocks = self._tokens = 0
        self._begin_s = time.perf_counter()

    def add(self, at: int, known: int) -> None:
        """Request number `at` found so many blocks."""
        if at < self._from:
            return
        request, block_tokens = self._trace.requests[at], self._trace.block_tokens
        self._hit_blocks += known
        self._hit_tokens += min(known * block_tokens, request.num_tokens)
        self._blocks += len(request.key) // self._trace.page_size
        self._tokens += request.num_tokens

    def result(self, policy: str, capacity: int, evicted: int) -> ReplayResult:
        count = len(self._trace.requests)
        return ReplayResult(
            trace=self._trace.name,
            policy=policy,
            capacity_blocks=capacity,
            block_hit_ratio=self._hit_blocks / max(1, self._blocks),
            token_hit_ratio=self._hit_tokens / max(1, self._tokens),
            requests=count - self._from,
            evicted_pages=evicted,
            us_per_request=(time.perf_counter() - self._begin_s) / count * 1e6,
        )


# --- running --------------------------------------------------------------------------------------


def replay_policy(
    trace: Trace,
    policy: str,
    capacity: int,
    warm: float = 0.0,
    queue: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """One policy at one capacity (blocks). Cost: some ten microseconds a request."""
    chosen = make_policy(policy)
    chosen.token_scale = trace.block_tokens // trace.page_size
    cache = RadixCache(page_size=trace.page_size, policy=chosen)
    requests = trace.requests
    next_page = 0
    free: list[int] = []
    for waiting in requests[:queue]:
        cache.wanted(waiting.key, +1)
    hits = _Hits(trace, warm)
    for at, request in enumerate(requests):
        if queue:
            cache.wanted(request.key, -1)
            if at + queue < len(requests):
                cache.wanted(requests[at + queue].key, +1)
        key = request.key if chosen.keeps_partial_blocks else request.whole_key
        total = len(key) // trace.page_size
        with cache.lock(cache.match_prefix(key), request.time_s) as lock:
            known = lock.prefix_len // trace.page_size
            while len(free) < total - known:
                free.append(next_page)
                next_page += 1
            cut = len(free) - total + known
            pages = np.array([*lock.pages.tolist(), *free[cut:]], np.int32)
            cache.insert(key, pages, now_s=request.time_s)
            del free[cut:]
        # What a request computed may go at once, as the optimum's may.
        if cache.num_pages > capacity:
            free += cache.evict(cache.num_pages - capacity, request.time_s).tolist()
        hits.add(at, known)
        if progress is not None and at % 256 == 0:
            progress(at)
    return hits.result(policy, capacity, cache.stats().evicted_pages)


def replay_optimum(trace: Trace, capacity: int, warm: float = 0.0) -> ReplayResult:
    """Furthest next use, where a block may also be dropped at once: no cache with this capacity
    hits more often.

    A block's next use is never later than that of the blocks after it, so what is kept is prefixes.
    """
    hits = _Hits(trace, warm)
    paths = [_block_names(request.key, trace) for request in trace.requests]
    never = len(paths)
    # of each block of each request: the next request with it
    next_uses: list[list[int]] = [[] for _ in paths]
    seen: dict[Any, int] = {}
    for at in range(len(paths) - 1, -1, -1):
        next_uses[at] = [seen.get(name, never) for name in paths[at]]
        for name in paths[at]:
            seen[name] = at
    kept: dict[Any, int] = {}  # block: its next use
    furthest: list[tuple[int, int, Any]] = []  # (-next use, -depth, block), lazily
    evicted = 0
    for at, path in enumerate(paths):
        known = 0
        while known < len(path) and path[known] in kept:
            known += 1
        for depth, (name, then) in enumerate(zip(path, next_uses[at], strict=True)):
            kept[name] = then
            heapq.heappush(furthest, (-then, -depth, name))
        while len(kept) > capacity:
            then, _, name = heapq.heappop(furthest)
            if kept.get(name) == -then:
                del kept[name]
                evicted += 1
        hits.add(at, known)
    return hits.result(OPTIMUM, capacity, evicted)


def _block_names(key: RadixKey, trace: Trace) -> list[Any]:
    """What stands for each whole block together with all before it."""
    names = []
    above = 0
    size = 4 * trace.page_size
    for at in range(len(key) // trace.page_size):
        above = hash((above, key.data[at * size : (at + 1) * size]))
        names.append(above)
    return names


# --- the command ----------------------------------------------------------------------------------


def replay(
    traces: Annotated[
        list[Path], typer.Argument(help="Mooncake JSONL, or a JSONL of token lists.")
    ],
    policy: Annotated[
        str, typer.Option(help="Names, by commas; all: every registered one and the optimum.")
    ] = "all",
    capacity: Annotated[
        str, typer.Option(help="Blocks, by commas.")
    ] = "1000,3000,6000,10000,20000,50000",
    warm: Annotated[
        float, typer.Option(help="Count hits after this share of the requests only.")
    ] = 0.0,
    queue: Annotated[int, typer.Option(help="So many next requests count as waiting.")] = 0,
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens a block, for token lists.")] = 16,
    block_tokens: Annotated[int, typer.Option(help="Tokens a hash id stands for.")] = 512,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a list of results there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw miss-ratio curves there (needs matplotlib).")
    ] = None,
) -> None:
    """How often the cache would have hit, by policy and capacity, and how often any cache could
    have."""
    policies = _policies(policy)
    capacities = _capacities(capacity)
    for setting, value, low, high in (
        ("--warm", warm, 0, 0.99), ("--queue", queue, 0, 1_000_000),
        ("--page-size", page_size, 1, 65_536), ("--block-tokens", block_tokens, 1, 1_048_576),
        ("--requests", 1 if requests is None else requests, 1, 10**9),
    ):  # fmt: skip
        check_range(setting, value, low, high)
    check_writable("--json", json_file)
    check_writable("--plot", plot)
    console = Console()
    results: list[ReplayResult] = []
    layout = "{:<22.22} {:<9} {:>7} {:>7} {:>7} {:>8} {:>7}"
    heads = ("trace", "policy", "blocks", "block", "token", "evicted", "us/req")
    loaded = [read_trace(path, page_size, block_tokens, requests) for path in traces]
    console.print(layout.format(*heads), style="bold")
    columns = ("{task.description}", BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for trace, size, name in product(loaded, capacities, policies):
            task = progress.add_task(f"{trace.name} {name} {size}", total=len(trace.requests))

            def step(at: int, task: Any = task) -> None:
                progress.update(task, completed=at)

            if name == OPTIMUM:
                result = replay_optimum(trace, size, warm)
            else:
                result = replay_policy(trace, name, size, warm, queue, step)
            progress.remove_task(task)
            results.append(result)
            row = layout.format(
                trace.name, name, size, f"{result.block_hit_ratio:.4f}",
                f"{result.token_hit_ratio:.4f}", result.evicted_pages,
                f"{result.us_per_request:.1f}",
            )  # fmt: skip
            progress.console.print(row, highlight=False)
    if json_file is not None:
        text = json.dumps([asdict(result) for result in results], indent=1)
        write_text("--json", json_file, text + "\n")
    if plot is not None:
        with writing("--plot", plot):
            draw(results, plot)


def draw(results: list[ReplayResult], path: Path) -> None:
    """Miss ratio by capacity, a curve a policy, a panel a trace. Raises ConfigError without
    matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'prefixkv[plot]'") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.trace for result in results))
    figure, panels = plt.subplots(1, len(names), figsize=(7 * len(names), 4), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for policy in dict.fromkeys(result.policy for result in results):
            mine = [result for result in results if (result.trace, result.policy) == (name, policy)]
            style = {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {}
            capacities = [result.capacity_blocks for result in mine]
            misses = [1 - result.block_hit_ratio for result in mine]
            panel.plot(capacities, misses, marker=".", label=policy, **style)
        panel.set(title=name, xlabel="capacity (blocks)", ylabel="block miss ratio", xscale="log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _policies(names: str) -> list[str]:
    if names == "all":
        return [*policy_names(), OPTIMUM]
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    known = [*policy_names(), OPTIMUM]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--policy {name!r} is not one of {', '.join(known)}")
    if not chosen:
        raise ConfigError("--policy names no policy")
    return chosen


def _capacities(sizes: str) -> list[int]:
    try:
        capacities = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--capacity {sizes!r} is not a list of integers") from None
    for size in capacities:
        check_range("--capacity", size, 1, 10**8)
    return capacities
