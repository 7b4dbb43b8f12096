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
from typing import NamedTuple

from prefixkv.cli.replay.trace import Trace

MOST_BUSY = 0.7
"""As many prefill workers are taken as keep them this busy at most, with decode's pool alone."""


class Speeds(NamedTuple):
    """Of one prefill worker; from prefill to decode, all workers together; from host memory to the
    device."""

    prefill_tokens_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float = 25e9


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
    worker: int  # of prefill; -1: decode has computed it
    arrived_s: float  # when the KV from prefill was there, or was computed


class Queues:
    """The four queues of one case, with so many `workers` of prefill, and the time that two of them
    have worked. Requests come in order of time. Decode computes at `own_rate`, half of prefill's,
    since its batch goes on beside it."""

    def __init__(self, trace: Trace, speeds: Speeds, workers: int) -> None:
        self._speeds, self._token_bytes = speeds, trace.bytes_per_token
        self._block_tokens = trace.block_tokens
        self.own_rate = speeds.prefill_tokens_per_s / 2
        # When each is free again, and of prefill's workers the number.
        self._workers_free_s = [(0.0, number) for number in range(workers)]
        self._link_free_s = self._host_free_s = self._own_free_s = 0.0
        self.prefill_s = self.link_s = 0.0

    def copy(self) -> Queues:
        """Return a copy, to see what a request would take."""
        found = copy(self)
        found._workers_free_s = self._workers_free_s.copy()
        return found

    @property
    def next_worker(self) -> int:
        """Number of the prefill worker that is free first: the next prompt is its."""
        return self._workers_free_s[0][1]

    def serve(
        self, one: RequestTokens, host_tokens: int, is_own: bool, prefill_tokens: int
    ) -> Served:
        """Take one request through the queues: `host_tokens` of its prompt are loaded from the host
        tier, `prefill_tokens` are in prefill's cache. `is_own`: decode computes what is missing."""
        speeds, missing = self._speeds, one.tokens - one.device_tokens - host_tokens
        # 1. What the host has. Nothing waits for it but the first token, and own compute.
        loaded_s = one.time_s
        if host_tokens:
            took_s = host_tokens * self._token_bytes / speeds.host_bytes_per_s
            self._host_free_s = loaded_s = max(self._host_free_s, one.time_s) + took_s
        # 2. Decode computes it, behind what it loads.
        if is_own:
            begin_s = max(loaded_s, self._own_free_s)
            self._own_free_s = end_s = begin_s + max(1, missing) / self.own_rate
            return Served(end_s, -1, end_s)
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
        return Served(max(arrived_s, loaded_s), worker, arrived_s)


def prefill_workers(work_tokens: int, span_s: float, rate: float, requests: int) -> int:
    """Return how many prefill workers a replay's work keeps `MOST_BUSY` at most: `work_tokens` in
    `span_s` seconds, at `rate` tokens per second each. More than there are requests have nothing to
    do, however short the time is."""
    return max(1, math.ceil(min(requests, work_tokens / rate / span_s / MOST_BUSY)))
