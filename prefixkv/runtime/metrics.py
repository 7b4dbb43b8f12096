"""Prometheus metrics of nodes, read when scraped: `REGISTRY.register(NodeCollector(node, ...))`.

The scraper's thread reads single ints and copies that the interpreter makes in one step, so there
is no lock, and a stuck scheduler can be looked at. Figures of a scrape may be microseconds apart.
Labels are bounded to 64 namespaces and 64 peers, the rest are "other"; a request's id appears only
as the owner of a lock held for `NAME_AFTER_S`. Needs the extra `metrics`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from prefixkv.errors import ClosedError
from prefixkv.prefill.request import PrefillState
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.prefill_node import PrefillNode
from prefixkv.stats import Histogram, Journal

NAME_AFTER_S = 60.0  # seconds until the owner of a lock is named

Node = DecodeNode | PrefillNode
Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float | Histogram]]


class _Spec(NamedTuple):
    """One metric, and the function that reads its samples from a node: values of `labels` (besides
    `node`) and a number, or a Histogram. A name in its place is a key of `Node.figures`."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
    name: str
    text: str
    read: Callable[[Any], Samples] | str
    labels: Labels


def _rows(read: Callable[[Any], Mapping[str, float | Histogram]]) -> Callable[[Any], Samples]:
    return lambda node: [((name,), number) for name, number in read(node).items()]


def _ended(*outcomes: str) -> Callable[[Node], Samples]:
    return lambda node: [((outcome,), node.counters[outcome]) for outcome in outcomes]


def _tokens(column: int) -> Callable[[Node], Samples]:
    return lambda node: [((name,), row[column]) for name, row in node.journal.tokens.read().items()]


def _recent_ratio(node: Node) -> Samples:
    for name, row in node.journal.tokens.read().items():
        yield (name,), row[Journal.RECENT_HIT] / max(1.0, row[Journal.RECENT_PROMPT])


def _transfers(node: Node) -> Samples:
    for outcome, tally in node.journal.transfers.items():
        for peer, (count,) in tally.read().items():
            yield (peer, outcome), count


def _window_pages(node: Node) -> Samples:
    for group in node.pages.windows:
        for state, number in group.allocator.counts().items():
            yield (group.name, state), number


def _checkpoints(node: Node) -> Samples:
    if (points := node.pages.saves).num_slots:
        there = len(points)
        yield ("saved",), there
        yield ("other",), max(0, points.num_slots - there)


def _dropped_frames(node: Node) -> dict[str, int]:
    kinds = "dropped: ", "frames_not_sent: ", "frames_malformed"
    return {why: count for why, count in node.figures().items() if why.startswith(kinds)}


def _decode_queues(node: DecodeNode) -> Samples:
    # Each figure is read once. They may be of different moments, so differences are kept from
    # falling below 0.
    flights, complete = list(node.flights), len(node.flights.complete)
    compute = node.sources.get("computed")
    sent, local = len(node.prefill.open), 0 if compute is None else len(compute.open)
    yield ("pages",), len(node.waiting)
    yield ("transfer",), sent
    yield ("compute",), local
    loads = sum(one.source.brings_pages_only and one.is_open for one in flights)
    yield ("flight",), max(0, len(flights) - sent - loads - local - complete)
    yield ("commit",), complete
    yield ("device",), len(node.ledger.deferred)
    yield (
        ("running",),
        max(0, len(node.budget) - sum(flight.owner is not None for flight in flights)),
    )


def _host_pages(node: DecodeNode) -> Samples:
    if (host := node.tier) is not None:
        for state in ("free", "owned", "cached"):
            yield (state,), getattr(host.allocator, f"{state}_pages")


_PREFILL_QUEUES = {
    PrefillState.BOOTSTRAPPING: "decode", PrefillState.BOOTSTRAPPED: "pages",
    PrefillState.COMPUTING: "compute", PrefillState.SENDING: "send", PrefillState.SENT: "release",
    PrefillState.FAILED: "release",
}  # fmt: skip


def _prefill_queues(node: PrefillNode) -> Samples:
    # A copy in one step.
    counts = Counter(_PREFILL_QUEUES[req.state] for req in list(node.requests.values()))
    for queue in dict.fromkeys(_PREFILL_QUEUES.values()):
        yield (queue,), counts[queue]


def _oldest_lock_age(node: Node) -> Samples:
    lock = node.pages.cache.oldest_lock()
    yield (), 0.0 if lock is None else max(0.0, time.monotonic() - lock.taken_s)


def _oldest_lock_owner(node: Node) -> Samples:
    lock = node.pages.cache.oldest_lock()
    if lock is not None and time.monotonic() - lock.taken_s >= NAME_AFTER_S:
        owners = (name for name, pages in node.holders() if pages.lock is lock)
        yield (next(owners, "unknown"),), 1


def _peers(node: Node) -> Samples:
    """Nothing of a node that has closed meanwhile."""
    try:
        answers = node.peers().values()
    except ClosedError:
        return
    # Decode's are with the identity of each.
    states = Counter(answer if isinstance(answer, str) else answer[1] for answer in answers)
    for state in ("ready", "suspect", "connecting"):
        yield (state,), states[state]


def _received_bytes(node: DecodeNode) -> Samples:
    yield (), node.journal.pages_received * node.pool.layout.page_bytes


def _decode_skipped_bytes(node: DecodeNode) -> Samples:
    layout, rows = node.pool.layout, node.journal.tokens.read().values()
    tokens = sum(row[Journal.HIT] + row[Journal.SHARED] for row in rows)
    yield (), tokens // layout.page_size * layout.page_bytes


def _prefill_skipped_bytes(node: PrefillNode) -> Samples:
    layout = node.pool.layout
    yield (), node.counters["decode_hit_tokens"] // layout.page_size * layout.page_bytes


def _counter(name: str, text: str, read: Any = "", *labels: str) -> _Spec:
    return _Spec(CounterMetricFamily, name, text, read or name, labels)


def _gauge(name: str, text: str, read: Any = "", *labels: str) -> _Spec:
    return _Spec(GaugeMetricFamily, name, text, read or name, labels)


_HIT_RATIO = "Hit tokens by prompt tokens, a mean that fades over about a hundred requests."
_ON_THEIR_WAY = "Tokens of prompts that were on their way for another request already."
_QUARANTINED = "Pages that went into quarantine; `pages` has those still there."
_DECLINED = "Requests within DecodeConfig.compute.below that prefill computed, by the rule."
_HOST_MISSED = "Pages that were needed for others before they were copied to host memory."
_CUT = "Cached prompt tokens that were computed again; if it grows, raise `checkpoints`."
_ASIDE = "Requests that wait and hold up no others, by what is missing."
_STEPPED_ASIDE = "How often a request began to wait aside."
_WAITS = "How long requests waited, by what for; first_token is all of it."
_MISMATCHES = "Requests with a page of other bytes than prefill had: TransportConfig.checksums."
_OWNER = f"The request that holds the oldest lock, once that is {NAME_AFTER_S:g} s old."

# Three tables: metrics of both kinds of nodes, of decode's alone, of prefill's alone. A name may
# stand in both of the latter, with different texts.
BOTH = (
    _counter("prompt_tokens", "Tokens of admitted prompts.", _tokens(Journal.PROMPT), "namespace"),
    _counter("hit_tokens", "Prompt tokens cached on this side.", _tokens(Journal.HIT), "namespace"),
    _gauge("recent_hit_ratio", _HIT_RATIO, _recent_ratio, "namespace"),
    _counter("transfers", "Transfers by how they ended.", _transfers, "peer", "outcome"),
    _gauge(
        "pages", "Pages of the pool by state.",
        _rows(lambda node: node.pages.allocator.counts()), "state",
    ),
    _gauge("window_pages", "Pages of window groups by state.", _window_pages, "group", "state"),
    _gauge("evictable_pages", "Cached pages that no lock covers."),
    _gauge("protected_pages", "Cached pages that a lock covers."),
    _counter("evicted_pages", "Cached pages given to requests."),
    _gauge("locks", "Prefixes held in the tree."),
    _gauge("oldest_lock_age_seconds", "Age of the oldest lock, 0: none.", _oldest_lock_age),
    _gauge("oldest_lock_info", _OWNER, _oldest_lock_owner, "rid"),
    _gauge("rooms", "Rooms open, or not drained yet."),
    _gauge("peers", "Peers by state.", _peers, "state"),
    _counter("dropped_frames", "Control frames dropped, by why.", _rows(_dropped_frames), "reason"),
    _gauge("checkpoints", "Slots of checkpoints by state.", _checkpoints, "state"),
    _counter("checkpoints_evicted", "Checkpoints given up for others."),
)  # fmt: skip
DECODE = (
    _counter("shared_tokens", _ON_THEIR_WAY, _tokens(Journal.SHARED), "namespace"),
    _counter("shared_flights", "Requests that joined another's flight."),
    _counter("checksum_mismatches", _MISMATCHES),
    _counter("received_bytes", "KV that prefill has written here.", _received_bytes),
    _counter("skipped_bytes", "KV of prompts that was not asked for.", _decode_skipped_bytes),
    _gauge(
        "queue_requests", "Requests by what they wait for, and those that run.", _decode_queues,
        "queue",
    ),
    _gauge("aside_requests", _ASIDE, _rows(lambda node: node.waiting.aside()), "reason"),
    _counter(
        "stepped_aside", _STEPPED_ASIDE, _rows(lambda node: node.waiting.stepped_aside), "reason"
    ),
    _counter(
        "requests", "Requests that ended.", _ended("finished", "failed", "aborted"), "outcome"
    ),
    _counter("retractions", "Running requests whose pages were taken back.", "retracted"),
    _counter("retries", "Requests asked for again after a failed transfer."),
    _counter("computed_requests", "Requests whose missing part this worker computed itself."),
    _counter("computed_tokens", "Tokens of prompts computed here."),
    _counter("compute_declined", _DECLINED),
    _counter("failovers", "Requests that went on without their prefill worker."),
    _counter("cut_tokens", _CUT),
    _counter("host_hit_tokens", "Tokens of admitted prompts that were loaded from host memory."),
    _counter("host_loads", "Loads from host memory."),
    _counter("host_loaded_pages", "Pages loaded from host memory."),
    _counter("host_written_pages", "Pages copied to host memory."),
    _counter("host_missed_pages", _HOST_MISSED),
    _counter("host_copies_failed", "Copies of these that failed."),
    _gauge("host_pages", "Pages of host memory by state.", _host_pages, "state"),
    _counter("quarantined_pages", _QUARANTINED),
)  # fmt: skip
PREFILL = (
    _counter("sent_bytes", "KV written to decode workers.", "bytes_sent"),
    _counter("skipped_bytes", "KV that decode had already.", _prefill_skipped_bytes),
    _counter("cut_tokens", _CUT),
    _gauge("queue_requests", "Requests by what they wait for.", _prefill_queues, "queue"),
    _counter("requests", "Requests that ended.", _ended("sent", "failed"), "outcome"),
)
HISTOGRAMS = (
    _Spec(
        HistogramMetricFamily, "wait_seconds", _WAITS, _rows(lambda node: node.journal.waits),
        ("reason",),
    ),
    _Spec(
        HistogramMetricFamily, "eviction_seconds", "How long making room took.",
        lambda node: [((), node.evictions)], (),
    ),
)  # fmt: skip


class NodeCollector(Collector):
    """The metrics of all nodes of a process, labelled with their names. Closed nodes have none."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        """Yield the Prometheus metrics of all open nodes; called by the scraper's thread."""
        # A closed node's memory and threads are gone: it is left out, not reported as 0.
        nodes = [(node, node.figures()) for node in self._nodes if not node.closed]
        families: dict[str, Metric] = {}
        for specs, kind in ((BOTH, Node), (DECODE, DecodeNode), (PREFILL, PrefillNode),
                            (HISTOGRAMS, Node)):  # fmt: skip
            for spec, (node, figures) in product(specs, nodes):
                if not isinstance(node, kind):
                    continue
                labels = ("node", *spec.labels)
                family: Any = families.setdefault(
                    # One family per name: both kinds of nodes add their samples to it.
                    spec.name,
                    spec.family(f"prefixkv_{spec.name}", spec.text, labels=labels),
                )
                read = spec.read
                samples = [((), figures[read])] if isinstance(read, str) else read(node)
                for values, sample in samples:
                    name: Labels = (node.peer_id.name, *values)
                    if isinstance(sample, Histogram):
                        bounds = [*map(floatToGoString, sample.bounds), "+Inf"]
                        total, counts = sample.total, sample.cumulative()
                        family.add_metric(name, [*zip(bounds, counts, strict=True)], total)
                    else:
                        family.add_metric(name, sample)
        yield from families.values()
