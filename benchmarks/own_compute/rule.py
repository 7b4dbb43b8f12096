"""Claim: the rule by which decode computes what a request lacks, or asks prefill, finds first
tokens at least as soon as the best fixed number of tokens would, without being told the speeds.

    python -m benchmarks own_compute AGENTS CONVERSATION --json benchmarks/results/rule.json

A model of queues (`queues.py`) on the hits of a real tree.
The rule is `prefixkv.decode.sources.Sources` itself, and is told what a node would measure: its
chunks, its promises, what arrives, its own queues. A fixed number of tokens computes every request
here that lacks at most that many. A ratio is the rule's by the best of five fixed numbers, which
is another one from row to row.

Rows with a host tier: what the host has is always loaded. `rule, all known`: prefill's seconds are
those that the model will give, which no node knows; so no estimate could do better.

Held out: rows that no constant of the rule was chosen by. `mix` is the conversation, with the
agents' second half beside it. Deterministic: no time is looked at.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.own_compute.queues import Queues, RequestTokens, Served, Speeds, prefill_workers
from benchmarks.report import tell, told, write
from benchmarks.workloads import mix
from prefixkv.cli.replay import RequestHits, Trace, read_trace, replay_policy
from prefixkv.cli.replay.trace import footprint
from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Sources
from prefixkv.errors import ConfigError

TOKEN_BYTES = 160 * 1024
FIXED = (512, 1024, 2048, 4096, 8192)
HOST_TIMES = 4
CHUNK_TOKENS = 256
WARM = 0.5


class Case(NamedTuple):
    """One row: a pool of decode in blocks of 512 tokens, a prefill worker's cache and speed, and
    the link."""

    trace: str
    capacity: int
    prefill: str  # "as pool" or "keeps all"
    tokens_per_s: float
    link_gbit: int


TUNED = (
    Case("agents", 1000, "as pool", 20e3, 25), Case("agents", 1000, "as pool", 20e3, 100),
    Case("agents", 1000, "as pool", 20e3, 400), Case("agents", 1000, "keeps all", 20e3, 25),
    Case("agents", 1000, "keeps all", 20e3, 100), Case("agents", 1000, "keeps all", 20e3, 400),
    Case("agents", 1000, "keeps all", 5e3, 100), Case("agents", 3000, "as pool", 20e3, 100),
    Case("agents", 3000, "keeps all", 20e3, 100),
)  # fmt: skip
HELD_OUT = (
    Case("conversation", 1000, "as pool", 20e3, 100),
    Case("conversation", 3000, "as pool", 20e3, 100),
    Case("mix", 1000, "as pool", 20e3, 100),
    Case("mix", 1000, "as pool", 20e3, 400),
)

Serve = Callable[[RequestTokens, int, int], Served]
"""Takes a request through the queues, with the tokens that the host tier has of it, and those that
prefill's cache has."""


class Hits(NamedTuple):
    """What was found of each request, and what a prefill worker's cache would find."""

    requests: list[RequestTokens]
    as_pool: list[int]
    keeps_all: list[int]


_TRACES: dict[str, Trace] = {}


@cache
def hits(name: str, capacity: int) -> Hits:
    """Replay a trace on a pool of decode with a host tier behind it, and on one that keeps all."""
    trace = _TRACES[name]
    found: list[RequestTokens] = []
    kept: list[int] = []
    size = HOST_TIMES * capacity

    def note(one: RequestHits) -> None:
        host = [one.host_hit_tokens[size]]
        found.append(RequestTokens(one.time_s, one.tokens, one.hit_tokens, host, one.counted))

    replay_policy(trace, "adaptive", capacity, WARM, running=0, hosts=[size], each=note)
    replay_policy(
        trace, "lru", footprint(trace), running=0, each=lambda one: kept.append(one.hit_tokens)
    )
    return Hits(found, [one.device_tokens for one in found], kept)


class Knowing(Sources):
    """The rule with prefill's seconds as the model will give them, instead of an estimate."""

    takes_s: float

    def _sent_s(self, *_: Any) -> float:
        return self.takes_s


class Node:
    """Decode's side of the model: the rule, and what it is told by the time of each request.

    Args:
        queues: of the model. Those of decode are its own; of prefill's it knows nothing.
        sources: the rule.
    """

    def __init__(self, queues: Queues, sources: Sources) -> None:
        self._queues, self._sources = queues, sources
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = self._due = 0

    def serve(self, one: RequestTokens, host_tokens: int, cached: int) -> Served:
        """Let the rule choose by what was measured before a request, and serve it.

        Args:
            host_tokens: that the host tier has.
            cached: of its prompt, that prefill's cache has.
        """
        while self._events and self._events[0][0] <= one.time_s:
            at_s, _, note = heapq.heappop(self._events)
            note(at_s)
        missing = one.tokens - one.device_tokens - host_tokens
        address = str(self._queues.next_worker)
        if isinstance(self._sources, Knowing):
            self._sources.takes_s = (
                self._queues.copy().serve(one, host_tokens, False, cached).first_token_s
                - one.time_s
            )
        is_here = self._sources.is_here(missing, self._due, 0, address, one.time_s)
        served = self._queues.serve(one, host_tokens, is_here, cached)
        if is_here:
            self._compute(max(1, missing), served.first_token_s)
        else:
            room = self._sources.promised(address, one.time_s, missing)
            self._later(served.arrived_s, partial(self._sources.arrived, room))
        return served

    def _compute(self, tokens: int, end_s: float) -> None:
        """Let the chunks of a prompt that decode computes until `end_s` be measured, each when it
        ends."""
        self._due += tokens
        for left in range(tokens, 0, -CHUNK_TOKENS):
            num = min(CHUNK_TOKENS, left)
            self._later(end_s - (left - num) / self._queues.own_rate, partial(self._chunk, num))

    def _chunk(self, num: int, now_s: float) -> None:
        """Tell the rule of a chunk that decode has computed."""
        self._sources.chunk(num, num / self._queues.own_rate, 0)
        self._due -= num

    def _later(self, at_s: float, note: Callable[[float], None]) -> None:
        """Call `note` with the time when it is `at_s`, before the next request after it."""
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, note))


def measure(case: Case, with_host: bool) -> dict[str, Any]:
    """Play one row: with each fixed number of tokens, and with the rule."""
    trace, found = _TRACES[case.trace], hits(case.trace, case.capacity)
    cached = found.keeps_all if case.prefill == "keeps all" else found.as_pool
    requests = found.requests
    speeds = Speeds(case.tokens_per_s, case.link_gbit * 1e9 / 8)
    work = sum(max(1, one.tokens - known) for one, known in zip(requests, cached, strict=True))
    span_s = requests[-1].time_s - requests[0].time_s
    workers = prefill_workers(work, span_s, case.tokens_per_s, len(requests))

    def play(serve: Callable[[Queues], Serve]) -> dict[str, float]:
        queues = Queues(trace, speeds, workers)
        one_by_one = serve(queues)
        ttfts_s, here = [], 0
        for one, known in zip(requests, cached, strict=True):
            served = one_by_one(one, one.host_tokens[0] if with_host else 0, known)
            if one.counted:
                ttfts_s.append(served.first_token_s - one.time_s)
                here += served.worker < 0
        p50, p99 = (round(float(one), 4) for one in np.percentile(ttfts_s, [50, 99]))
        return {
            "ttft_s_p50": p50, "ttft_s_p99": p99, "here": round(here / len(ttfts_s), 3),
            "link_busy": round(queues.link_s / span_s, 3),
            "prefill_busy": round(queues.prefill_s / span_s / workers, 3),
        }  # fmt: skip

    def fixed(most: int) -> Callable[[Queues], Serve]:
        def serve(queues: Queues) -> Serve:
            return lambda one, host, known: queues.serve(
                one, host, one.tokens - one.device_tokens - host <= most, known
            )

        return serve

    rules: dict[str, Callable[[Queues], Serve]] = {
        "rule": lambda queues: Node(queues, Sources(ComputeConfig())).serve,
        "rule, all known": lambda queues: Node(queues, Knowing(ComputeConfig())).serve,
    }
    by_number = {most: play(fixed(most)) for most in FIXED}
    best = {
        key: min(one[key] for one in by_number.values()) for key in ("ttft_s_p50", "ttft_s_p99")
    }
    row: dict[str, Any] = {
        **case._asdict(), "host_times": HOST_TIMES if with_host else 0,
        "prefill_workers": workers, "fixed": by_number,
    }  # fmt: skip
    for name, rule in rules.items():
        row[name] = play(rule)
        for key, least in best.items():
            row[name][f"{key}_by_best_fixed"] = round(row[name][key] / least, 3)
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians and the largest of the rows' ratios, by what they are of."""
    found: dict[str, Any] = {"rows": len(rows)}
    for name in ("rule", "rule, all known"):
        for key in ("ttft_s_p50_by_best_fixed", "ttft_s_p99_by_best_fixed"):
            ratios = [row[name][key] for row in rows]
            found.setdefault(name, {})[key] = {
                "median": round(statistics.median(ratios), 3), "most": max(ratios)
            }  # fmt: skip
    return found


def play_traces(paths: Sequence[Path], json_file: Path | None) -> None:
    """Play all rows of a trace of coding agents and one of conversations. Raises ConfigError for
    another number of traces."""
    if len(paths) != 2:
        raise ConfigError("two traces are needed: AGENTS CONVERSATION")
    for name, path in zip(("agents", "conversation"), paths, strict=True):
        _TRACES[name] = replace(read_trace(path), bytes_per_token=TOKEN_BYTES)
    _TRACES["mix"] = _mixed(_TRACES["conversation"], _TRACES["agents"])
    rows = told(
        {"held_out": is_held_out, **measure(case, with_host)}
        for is_held_out, cases in ((False, TUNED), (True, HELD_OUT))
        for case, with_host in product(cases, (False, True))
    )
    kinds = {
        "agents": [row for row in rows if not row["held_out"]],
        "held out": [row for row in rows if row["held_out"]],
    }
    found = {name: summary(some) for name, some in kinds.items()}
    tell(found)
    write(
        json_file, f"own_compute {' '.join(path.name for path in paths)}", rows, ratios=found,
        ttft="of the last half of the requests, seconds",
        host=f"{HOST_TIMES} times the pool, 25 GB/s", token_bytes=TOKEN_BYTES,
        own_tokens_per_s="half of prefill's",
        prefill_workers="as few as are busy at most 70% of the time without own compute",
    )  # fmt: skip


def _mixed(conversation: Trace, agents: Trace) -> Trace:
    """Merge conversations and, from their beginning on, the second half of an agents' trace."""
    begin_s = agents.requests[len(agents.requests) // 2].time_s
    end_s = begin_s + conversation.requests[-1].time_s
    later = [
        replace(one, time_s=one.time_s - begin_s)
        for one in agents.requests
        if begin_s <= one.time_s < end_s
    ]
    return mix([conversation, replace(agents, requests=later)])
