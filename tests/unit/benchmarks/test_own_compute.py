"""First tokens beside a replay's hits, each queue by hand; and what the rule is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.own_compute.queues import Queues, RequestTokens, Speeds
from benchmarks.own_compute.rule import Node
from prefixkv.cli.replay import Trace
from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Sources

SPEEDS = Speeds(
    prefill_tokens_per_s=1000, link_bytes_per_s=5000, host_bytes_per_s=20_000,
    own_tokens_per_s=100,
)  # fmt: skip
"""A second for a thousand tokens; with ten bytes a token two on the link, and half a second to load
them from the host."""
TRACE = Trace("t", [], page_size=1, block_tokens=100, bytes_per_token=10)


def first_tokens(
    *requests: tuple[float, int, int, int], speeds: Speeds = SPEEDS, own: bool = False
) -> tuple[list[float], Queues]:
    """Of requests of (time, tokens, found by the device, found by the host behind that): seconds
    from each one's time to its first token, and the queues behind them."""
    queues, waited_s = Queues(TRACE, speeds, 1), []
    for at_s, tokens, device, host in requests:
        one = RequestTokens(at_s, tokens, device, [host], counted=True)
        is_own = own and tokens - device - host <= 50
        waited_s.append(queues.serve(one, host, is_own, device).first_token_s - at_s)
    return waited_s, queues


def test_each_queue_is_first_come_first_served() -> None:
    """The second comes .1 s later: its link is free after 2 s, and ends after 4. A hit of 990
    passes both by own compute; where prefill computes it, it waits for the link behind them."""
    requests = ((0.0, 1000, 0, 0), (0.1, 1000, 0, 0), (0.2, 1000, 990, 0))
    speeds = replace(SPEEDS, prefill_tokens_per_s=100_000)
    waited_s, queues = first_tokens(*requests, speeds=speeds)
    assert waited_s[2] == pytest.approx(4.02 - 0.2)
    assert queues.link_s == pytest.approx(4.02)
    waited_s, queues = first_tokens(*requests, speeds=speeds, own=True)
    assert waited_s[2] == pytest.approx(0.1)
    assert queues.own_s == pytest.approx(0.1)


# --- the rule -------------------------------------------------------------------------------------


class Told(Sources):
    """The rule, and what it was told and when."""

    def __init__(self) -> None:
        super().__init__(ComputeConfig())
        self.calls: list[tuple[Any, ...]] = []

    def chunk(self, num_tokens: int, seconds: float, running: int, now_s: float, *_: Any) -> None:
        self.calls.append(("chunk", num_tokens, round(seconds, 6), round(now_s, 6)))
        super().chunk(num_tokens, seconds, running, now_s)

    def arrived(self, address: str, key: Any, num_tokens: int, now_s: float) -> None:
        self.calls.append(("arrived", num_tokens, round(now_s, 6)))
        super().arrived(address, key, num_tokens, now_s)


def test_the_rule_is_told_what_has_happened_and_nothing_else() -> None:
    """Decode computes 1,000 tokens a second. The first request is its own: there is nothing to
    choose by. The second goes to prefill, once something is known of the first."""
    speeds = Speeds(prefill_tokens_per_s=2000, link_bytes_per_s=1e9)
    trace = Trace("t", [], 1, 512, bytes_per_token=10)
    told = Told()
    node = Node(Queues(trace, speeds, 1), told)

    def serve(at_s: float, missing: int) -> int:
        return node.serve(RequestTokens(at_s, missing, 0, [0], counted=True), 0, 0).worker

    assert serve(0.0, 600) == -1
    assert told.calls == []
    # Half of it is done by now: of the chunks of 256 only one.
    assert serve(0.3, 700) == 0
    assert told.calls == [("chunk", 256, 0.256, 0.256)]
    # Of prefill nothing, before .65 s: 350 ms, and the last block's 5 us on the link.
    serve(0.6499, 64)
    assert told.calls[1:] == [("chunk", 256, 0.256, 0.512), ("chunk", 88, 0.088, 0.6)]
    serve(0.6501, 64)
    assert told.calls[3:] == [("arrived", 700, 0.650005)]
