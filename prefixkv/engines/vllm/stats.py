"""What the connector counts, for vLLM's log and for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

METRICS: Final = {
    "loads_done": "Requests on decode whose KV has arrived.",
    "loads_failed": "Requests on decode whose KV has not arrived.",
    "loads_refused": "Requests on decode that needed no KV, or ended before they were admitted.",
    "blocks_loaded": "Blocks that have arrived, of each rank.",
    "flights_joined": "Requests on decode that waited for another's load of the same blocks.",
    "sends_over": "Requests on prefill whose blocks are free.",
    "sends_failed": "Requests on prefill whose KV was not sent whole.",
    "bytes_sent": "KV written to decode servers, bytes of all ranks.",
    "requests_in_error": "Requests whose transfer failed, or whose parameters were refused.",
    "evicted_by_policy": "Cached blocks that the policy named for eviction.",
    "evicted_in_order": "Cached blocks that vLLM's own order named, where the policy named none.",
}
"""Counters, by the end of their names: `vllm:prefixkv_` comes before, `_total` behind."""


class Counters:
    """Numbers since the last `take`."""

    def __init__(self) -> None:
        self._new: dict[str, int] = {}

    def add(self, name: str, number: int = 1) -> None:
        assert name in METRICS, name
        if number:
            self._new[name] = self._new.get(name, 0) + number

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        new, self._new = self._new, {}
        return new


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Both together.

    >>> added({"a": 1, "b": 2}, {"b": 3})
    {'a': 1, 'b': 5}
    """
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
