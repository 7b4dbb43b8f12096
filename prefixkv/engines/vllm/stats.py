"""Counters and gauges of the connector, for vLLM's log and for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

METRICS: Final = {
    "loads_done": "Requests on decode whose KV has arrived.",
    "loads_failed": "Requests on decode whose KV has not arrived.",
    "loads_refused": "Requests on decode that needed no KV, or ended before they were admitted.",
    "computed_requests": "Of these, those whose missing tokens decode computes itself.",
    "computed_tokens": "Tokens of prompts that these lacked.",
    "compute_declined": "Requests on decode within compute_below that were asked of prefill.",
    "blocks_loaded": "Blocks that have arrived, of each rank.",
    "window_blocks_loaded": "Of these, those of layers that keep a window or a state.",
    "flights_joined": "Requests on decode that waited for another's load of the same blocks.",
    "sends_over": "Requests on prefill whose blocks are free.",
    "sends_failed": "Requests on prefill whose KV was not sent whole.",
    "bytes_sent": "KV written to decode servers, bytes of all ranks.",
    "offers": "Prompts on prefill that were computed in rooms of its own, for any decode server.",
    "offers_failed": "Of these, those that no decode server opened in time, or that were not sent.",
    "offers_withdrawn": "Of these, those whose blocks prefill needed before they were opened.",
    "requests_ended": "Requests on prefill that were not computed, since decode did not want them.",
    "requests_in_error": "Requests whose transfer failed, or whose parameters were refused.",
    "host_loads": "Requests on decode whose first missing blocks came from host memory.",
    "host_loaded_blocks": "Blocks that were loaded from host memory for these.",
    "host_written_blocks": "Blocks that were written to host memory.",
    "host_missed_blocks": "Blocks that vLLM has evicted before they were written there.",
    "host_copies_failed": "Loads and writes of host memory that the system broke off.",
    "evicted_by_policy": "Cached blocks that the policy named for eviction.",
    "evicted_in_order": "Cached blocks that vLLM's own order named, where the policy named none.",
}
"""Texts of the counters, by name without the prefix `vllm:prefixkv_` and the suffix `_total`."""


GAUGES: Final = {
    "loads_waiting": "Rooms on decode whose KV is on its way, or is still to be computed.",
    "oldest_load_timestamp_seconds": "When the oldest of these was promised, 0 without one.",
    "loads_unsettled": "Loads that are over and whose blocks a peer may still write.",
    "sends_open": "Rooms on prefill: promised or not, computed, offered, being sent.",
    "sends_unpromised": "Requests on prefill that wait for decode's promise and hold nothing.",
    "oldest_unpromised_timestamp_seconds": "When the oldest of these came, 0 without one.",
    "offers_open": "Computed prompts on prefill that wait for a decode server, or are being sent.",
    "oldest_offer_timestamp_seconds": "When the oldest of these was computed, 0 without one.",
    "host_blocks": "Blocks whose KV is in host memory.",
    "host_copies": "Loads and writes of host memory that are under way.",
    "held_blocks": "Blocks that are not free since a peer, or a copy, may still use them.",
}
"""Texts of the gauges, by name without the prefix. Times are seconds since the epoch, not ages, so
that they stay true while the engine rests."""


class Counters:
    """Counts since the last `take`, by the names of `METRICS`."""

    def __init__(self) -> None:
        self._new: dict[str, int] = {}

    def add(self, name: str, number: int = 1) -> None:
        """A counter that stays 0 is not reported."""
        assert name in METRICS, name
        if number:
            self._new[name] = self._new.get(name, 0) + number

    def take(self) -> dict[str, int]:
        new, self._new = self._new, {}
        return new


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return two stats together: counters are added, the gauges of `other` are the later ones.

    >>> added({"a": 1, "b": 2, "held_blocks": 7}, {"b": 3, "held_blocks": 5})
    {'a': 1, 'b': 5, 'held_blocks': 5}
    """
    both = (one.keys() & other.keys()) - GAUGES.keys()
    return {**one, **other, **{name: one[name] + other[name] for name in both}}


def share_log() -> None:
    """Give prefixkv's logger the handlers of vLLM's, unless it has some already."""
    ours = logging.getLogger("prefixkv")
    if not ours.hasHandlers():
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
