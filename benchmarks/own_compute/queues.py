"""First tokens beside a replay's hits, by a model of queues: to compare rules by; no forecast.

A request's KV comes from four places, each with one queue, first come, first served:

    prefill   computes what its own cache lacks; that finds what decode's pool finds
    link      sends what decode lacks, from when prefill begins; the last block when it has ended
    host      copies what the host tier has, behind what the device has
    decode    computes what is missing itself, where that is little: then prefill is not asked

Requests come when the trace says. Left out: a pool that is full, steps of the running batch,
retries.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from prefixkv.cli.replay.trace import Trace
from prefixkv.errors import check_range

MOST_BUSY = 0.7
"""As many prefill workers are taken as keep them this busy at most, with decode's pool alone."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a replay's latencies are worked out with.

    Args:
        prefill_tokens_per_s: of one prefill worker.
        link_bytes_per_s: from prefill to decode, all workers together.
        host_bytes_per_s: from host memory to the device.
        own_tokens_per_s: at which decode computes a prompt itself; 0: half of prefill's, since its
            batch goes on beside it.
    Raises:
        ConfigError: a value out of its range.
    """

    prefill_tokens_per_s: float
    link_bytes_per_s: float = 12.5e9
    host_bytes_per_s: float = 25e9
    own_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("prefill_tokens_per_s", 1, 1e9), ("link_bytes_per_s", 1, 1e15),
            ("host_bytes_per_s", 1, 1e15), ("own_tokens_per_s", 0, 1e9),
        ):  # fmt: skip
            check_range(name, getattr(self, name), low, high)


class RequestTokens(NamedTuple):
    """What is known of one request of a replay."""

    time_s: float
    tokens: int  # of the prompt
    device_tokens: int  # found by the device
    host_tokens: Sequence[int]  # behind those, by host tier
    counted: bool


class Served(NamedTuple):
    """What the queues did for one request: times in seconds."""

    first_token_s: float
    loaded_s: float  # when the device has what the host had
    worker: int  # of prefill; -1: decode has computed it
    arrived_s: float  # when the KV from prefill was there, or was computed


class Queues:
    """The four queues of one case, and the time that three of them have worked. Requests come in
    order of time.

    `own_rate` is decode's, in tokens per second.

    Args:
        workers: of prefill, at least 1.
    """

    def __init__(self, trace: Trace, speeds: Speeds, workers: int) -> None:
        self._speeds, self._token_bytes = speeds, trace.bytes_per_token
        self._block_tokens = trace.block_tokens
        self.own_rate = speeds.own_tokens_per_s or speeds.prefill_tokens_per_s / 2
        # When each is free again, and of prefill's workers the number.
        self._workers_free_s = [(0.0, number) for number in range(workers)]
        self._link_free_s = self._host_free_s = self._own_free_s = 0.0
        self.prefill_s = self.link_s = self.own_s = 0.0

    def copy(self) -> Queues:
        """Return a copy, to see what a request would take."""
        found = copy(self)
        found._workers_free_s = self._workers_free_s.copy()
        return found

    @property
    def next_worker(self) -> int:
        """Number of the prefill worker that is free first: the next prompt is its."""
        return self._workers_free_s[0][1]

    def load_s(self, host_tokens: int, time_s: float) -> float:
        """Return the seconds until this many tokens of a request are loaded from the host tier."""
        if not host_tokens:
            return 0.0
        took_s = host_tokens * self._token_bytes / self._speeds.host_bytes_per_s
        return max(0.0, self._host_free_s - time_s) + took_s

    def serve(
        self, one: RequestTokens, host_tokens: int, is_own: bool, prefill_tokens: int
    ) -> Served:
        """Take one request through the queues.

        Args:
            host_tokens: that are loaded from the host tier, behind those that the device has.
            is_own: decode computes what is missing.
            prefill_tokens: of the prompt, that prefill's cache has.
        """
        speeds, missing = self._speeds, one.tokens - one.device_tokens - host_tokens
        # 1. What the host has. Nothing waits for it but the first token, and own compute.
        loaded_s = one.time_s + self.load_s(host_tokens, one.time_s)
        if host_tokens:
            self._host_free_s = loaded_s
        # 2. Decode computes it, behind what it loads.
        if is_own:
            begin_s = max(loaded_s, self._own_free_s)
            took_s = max(1, missing) / self.own_rate
            self.own_s += took_s
            self._own_free_s = end_s = begin_s + took_s
            return Served(end_s, loaded_s, -1, end_s)
        # 3. Prefill, at the worker that is free first.
        free_s, worker = heapq.heappop(self._workers_free_s)
        begin_s = max(one.time_s, free_s)
        took_s = max(1, one.tokens - prefill_tokens) / speeds.prefill_tokens_per_s
        end_s = begin_s + took_s
        heapq.heappush(self._workers_free_s, (end_s, worker))
        self.prefill_s += took_s
        # 4. The link: what prefill has goes at once, and what it computes as it comes; the last
        #    block only when all is computed.
        sent_s = missing * self._token_bytes / speeds.link_bytes_per_s
        self.link_s += sent_s
        self._link_free_s = max(begin_s, self._link_free_s) + sent_s
        last = min(missing, self._block_tokens)
        last_s = end_s + last * self._token_bytes / speeds.link_bytes_per_s
        arrived_s = max(last_s, self._link_free_s)
        return Served(max(arrived_s, loaded_s), loaded_s, worker, arrived_s)


def prefill_workers(work_tokens: int, span_s: float, rate: float, requests: int) -> int:
    """Return how many prefill workers a replay's work keeps `MOST_BUSY` at most.

    Args:
        work_tokens: that prefill computes in all, in `span_s` seconds.
        rate: tokens per second of one.
        requests: more workers than that have nothing to do, however short the time is.
    """
    return max(1, math.ceil(min(requests, work_tokens / rate / span_s / MOST_BUSY)))
