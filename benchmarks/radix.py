"""What the radix cache costs, beside SGLang's tree with its compiled core where `--peer` is given.

Both sides run in one process, turn about, on the same tokens, the collector off; figures are
medians. `python -m benchmarks env sglang-trees` builds the interpreter that `--peer` needs.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.report import JsonFile, Row, check_outputs, told, write
from benchmarks.samples import no_collector
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.errors import ConfigError
from prefixkv.spi import DEFAULT_POLICY

LEAF_TOKENS = 64
VOCABULARY = 150_000
POOL_TOKENS = 1 << 18  # of the peer

Call = Callable[[], Any]


# --- measuring ------------------------------------------------------------------------------------


def _time_us(call: Call) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


def _turn_about(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median microseconds of each call; in every round each is called three times in a row."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with no_collector():
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name] += [_time_us(call) for _ in range(3)]
    return {name: median(values) for name, values in samples.items()}


# --- the other side -------------------------------------------------------------------------------


class Peer:
    """SGLang's tree with its compiled core, as its server runs it; nothing of it is part of this
    project."""

    def __init__(self) -> None:
        inside = "sglang.srt.mem_cache"
        self._desk, self._base, self._keys = of_sglang(
            "tests.integration.sglang.inside.desk", f"{inside}.base_prefix_cache",
            f"{inside}.radix_cache",
        )  # fmt: skip

    def cache(self, page_size: int) -> Any:
        return self._desk.Desk("unified-rust", page_size, POOL_TOKENS, keep_kv=False).cache

    def _key(self, tokens: Any) -> Any:
        return self._keys.RadixKey(tokens, None)

    def match(self, cache: Any, tokens: Any) -> Any:
        return cache.match_prefix(self._base.MatchPrefixParams(key=self._key(tokens)))

    def insert(self, cache: Any, tokens: Any, slots: Any) -> Any:
        return cache.insert(self._base.InsertParams(key=self._key(tokens), value=slots))


def of_sglang(*names: str) -> list[Any]:
    """Import modules that need SGLang, over the tests' stubs. Raises ConfigError."""
    try:
        import_module("tests.integration.sglang.stubs").install()
        return [import_module(name) for name in names]
    except Exception as error:  # whatever another project's import may raise
        raise ConfigError(
            f"SGLang's trees cannot be imported by {sys.executable}: {error!r}; "
            "`python -m benchmarks env sglang-trees` builds an environment that can"
        ) from error


# --- what is measured -----------------------------------------------------------------------------


@dataclass
class Bench:
    """One run, beside the peer if there is one."""

    seed: int
    quick: bool
    peer: Peer | None

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def rows(self) -> Iterator[Row]:
        sizes = (32_768, 1), (32_768, 32), (131_072, 64)
        for page_size, (num_tokens, depth) in product((1, 16, 64), sizes):
            yield self.match(num_tokens, depth, page_size)
        for page_size in (1, 16, 64):
            yield self.insert(page_size)
        for depth in (1, 64):
            yield self.lock(depth)

    def _rounds(self, many: int) -> int:
        return max(5, many // 10) if self.quick else many

    def _tokens(self, num_tokens: int) -> Any:
        return self._rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)

    def match(self, num_tokens: int, depth: int, page_size: int) -> Row:
        """Everything cached, along `depth` nodes; locks keep ours apart."""
        tokens = self._tokens(num_tokens)
        ends = [num_tokens * at // depth // page_size * page_size for at in range(1, depth + 1)]
        cache = RadixCache(page_size, DEFAULT_POLICY)
        for end in ends:
            cache.lock(cache.insert(tokens[:end], np.arange(end // page_size)))
        assert cache.match_prefix(tokens).prefix_len == num_tokens
        assert cache.num_nodes == depth
        calls: dict[str, Call] = {"ours": lambda: cache.match_prefix(tokens)}
        if (peer := self.peer) is not None:
            theirs = peer.cache(page_size)
            words, slots = array("q", tokens.tolist()), torch.arange(num_tokens)
            for end in ends:
                peer.insert(theirs, words[:end], slots[:end])
            calls["peer"] = lambda: peer.match(theirs, words)
        took = _turn_about(calls, self._rounds(100))
        where = {"tokens": num_tokens, "nodes": depth, "page_size": page_size}
        return _row("match_prefix", took, 0.5, where)

    def insert(self, page_size: int) -> Row:
        """A new leaf of 32,768 tokens."""
        num_tokens = 32_768
        runs = [self._tokens(num_tokens) for _ in range(self._rounds(60))]
        pages = np.arange(num_tokens // page_size, dtype=np.int32)
        cache = RadixCache(page_size, DEFAULT_POLICY)
        calls: dict[str, list[Call]] = {"ours": [partial(cache.insert, run, pages) for run in runs]}
        if self.peer is not None:
            theirs, slots = self.peer.cache(page_size), torch.arange(num_tokens)
            words = [array("q", run.tolist()) for run in runs]
            calls["peer"] = [partial(self.peer.insert, theirs, run, slots) for run in words]
        took: dict[str, list[float]] = {name: [] for name in calls}
        with no_collector():
            for insertions in zip(*calls.values(), strict=True):
                for name, call in zip(calls, insertions, strict=True):
                    took[name].append(_time_us(call))
        medians = {name: median(values) for name, values in took.items()}
        return _row("insert_new_leaf", medians, 0.5, {"tokens": num_tokens, "page_size": page_size})

    def lock(self, depth: int) -> Row:
        """Lock and unlock the end of a path of nodes that branches keep apart."""
        page_size, run_tokens = 16, 64
        run = self._tokens(depth * run_tokens)
        cache = RadixCache(page_size, DEFAULT_POLICY)
        cuts = [run[: at * run_tokens] for at in range(1, depth + 1)]
        ends = [*cuts, *(np.append(cut, np.full(page_size, 1, np.int32)) for cut in cuts),
                np.append(run, np.full(page_size, 2, np.int32))]  # fmt: skip
        for at, end in enumerate(ends):
            cache.insert(end, np.arange(at * 10_000, at * 10_000 + len(end) // page_size))
        match = cache.match_prefix(run)
        calls: dict[str, Call] = {"ours": lambda: cache.unlock(cache.lock(match))}
        if (peer := self.peer) is not None:
            theirs = peer.cache(page_size)
            for end in ends:
                peer.insert(theirs, array("q", end.tolist()), torch.arange(len(end)))
            node = peer.match(theirs, array("q", run.tolist())).last_device_node
            calls["peer"] = lambda: theirs.unlock(theirs.lock(node))
        return _row("lock_unlock", _turn_about(calls, self._rounds(500)), 1.0, {"depth": depth})


def _row(name: str, took_us: dict[str, float], aim: float, where: Row) -> Row:
    """`aim`: of the peer's time, that ours is to be within."""
    us, peer_us = took_us["ours"], took_us.get("peer")
    row: Row = {"name": name, **where, "us": round(us, 3)}
    if peer_us is not None:
        row |= {
            "peer_us": round(peer_us, 3), "ratio_to_peer": round(us / peer_us, 3),
            "target_us": round(aim * peer_us, 3), "met": us <= aim * peer_us,
        }  # fmt: skip
    return row


def bushy(leaves: int, policy: str) -> RadixCache:
    """So many leaves of 64 tokens, page 16, under one root."""
    cache = RadixCache(16, policy)
    pages = LEAF_TOKENS // 16
    for at in range(leaves):
        cache.insert(
            np.full(LEAF_TOKENS, at, np.int32),
            np.arange(at * pages, (at + 1) * pages, dtype=np.int32),
        )
    return cache


def radix(
    json_file: JsonFile = None,
    peer: Annotated[bool, typer.Option("--peer", help="Beside SGLang's tree.")] = False,
    seed: Annotated[int, typer.Option(help="Of the tokens.")] = 0,
    quick: Annotated[bool, typer.Option(help="A tenth of the rounds.")] = False,
) -> None:
    """What the radix cache's calls cost, beside SGLang's tree."""
    check_outputs(json_file)
    rows = told(Bench(seed, quick, Peer() if peer else None).rows())
    write(
        json_file, "radix" + " --peer" * peer + " --quick" * quick, rows, seed=seed,
        statistic="median of all calls, three in a row each round; collector off; turn about with "
        "the peer", default_policy=DEFAULT_POLICY,
        peer="SGLang 0.5.23 UnifiedRadixCache, compiled core" if peer else None,
    )  # fmt: skip
