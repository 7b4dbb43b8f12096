"""What own compute's rule is told."""

from __future__ import annotations

from typing import Any

from benchmarks.own_compute.queues import Queues, RequestTokens, Speeds
from benchmarks.own_compute.rule import Node
from prefixkv.cli.replay import Trace
from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Sources

# --- the rule -------------------------------------------------------------------------------------


class Told(Sources):
    """The rule, and what it was told and when."""

    def __init__(self) -> None:
        super().__init__(ComputeConfig())
        self.calls: list[tuple[Any, ...]] = []

    def chunk(self, num_tokens: int, seconds: float, running: int, goes_on: bool = False) -> None:
        self.calls.append(("chunk", num_tokens, round(seconds, 6)))
        super().chunk(num_tokens, seconds, running, goes_on)

    def arrived(self, room: Any, now_s: float) -> None:
        self.calls.append(("arrived", round(now_s, 6)))
        super().arrived(room, now_s)


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
    assert told.calls == [("chunk", 256, 0.256)]
    # Of prefill nothing, before .65 s: 350 ms, and the last block's 5 us on the link.
    serve(0.6499, 64)
    assert told.calls[1:] == [("chunk", 256, 0.256), ("chunk", 88, 0.088)]
    serve(0.6501, 64)
    assert told.calls[3:] == [("arrived", 0.650005)]
