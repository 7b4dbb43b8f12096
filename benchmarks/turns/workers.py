"""The stand-in's two workers, each a process: passes over a workload, with new nodes over the same
pools in each. Between the two lies one pipe, the router's: decode's client tells prefill of each
prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from benchmarks.pair import Watch
from benchmarks.turns.options import RESERVE_TOKENS, PassPlan, StandInOptions
from benchmarks.turns.report import Measured
from benchmarks.turns.workload import Clients, arrival_times
from prefixkv.cli.policies import policy_of

if TYPE_CHECKING:
    from prefixkv import KVPool, Mesh
    from prefixkv.spi import DecodeGroup, PrefillGroup

SWITCH_INTERVAL_S: Final = 0.0005
_SETTLE_S: Final = 10.0  # for acknowledgements under way when the last answer is complete

RunPass = Callable[[PassPlan], Measured]


def _make_pools(options: StandInOptions, mesh: Mesh, num_pages: int, order: str) -> list[KVPool]:
    from tests.support.patterns import make_pools

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return make_pools(
        mesh, num_pages, options.page_size, options.dim, dtype=options.dtype,
        attention=options.attention, order=order,
    )  # fmt: skip


def prefill_side(pipe: Connection, _watch: Watch, options: StandInOptions, _play: Any) -> None:
    mesh = options.mesh(options.prefill_tp)
    pools = _make_pools(options, mesh, options.prefill_pages, options.prefill_layout)
    from benchmarks.turns.engine import PrefillEngine
    from prefixkv.config import PrefillConfig
    from prefixkv.spi import PrefillGroup
    from tests.support.patterns import make_patterns

    plan: PassPlan
    while (plan := pipe.recv()) is not None:
        config = PrefillConfig(
            name="prefill-0", max_running=options.concurrency, transport=options.transport(),
            policy=policy_of(options.policy),
        )  # fmt: skip
        with PrefillGroup(pools, config, mesh) as node:
            pipe.send(node.endpoint)
            engine = PrefillEngine(
                node, make_patterns(pools, mesh, plan.salt), options.chunk_tokens, pipe
            )
            engine.run()
            measured = {
                "prefill_prompt_tokens": engine.prompt_tokens,
                "prefill_hit_tokens": engine.hit_tokens,
                "bytes_sent": engine.bytes_sent,
                "left": _left(node, "prefill"),
            }
        pipe.send(measured)


def decode_side(
    pipe: Connection, _watch: Watch, options: StandInOptions, play: Callable[[RunPass], Any]
) -> Any:
    """Returns what `play` makes of the passes that it runs."""
    mesh, workload = options.mesh(options.decode_tp), options.workload()
    pools = _make_pools(options, mesh, options.decode_pages, options.decode_layout)
    from benchmarks.turns.engine import END_OF_PASS, DecodeEngine
    from prefixkv.config import DecodeConfig
    from prefixkv.spi import DecodeGroup
    from tests.support.patterns import make_patterns

    def run_pass(plan: PassPlan) -> Measured:
        pipe.send(plan)
        endpoint = pipe.recv()
        config = DecodeConfig(
            name="decode-0", max_running=options.concurrency, reserve_tokens=RESERVE_TOKENS,
            cache=plan.cache, transport=options.transport(), policy=policy_of(options.policy),
        )  # fmt: skip
        due = arrival_times(workload, options.seed, plan.rate)
        with DecodeGroup(pools, config, mesh) as node:
            engine = DecodeEngine(
                node, make_patterns(pools, mesh, plan.salt), options.step_ms * 1e-3,
                Clients(workload, due, options.concurrency), pipe, endpoint, plan.verify,
            )  # fmt: skip
            engine.warm_up()
            measured = engine.run()
            pipe.send(END_OF_PASS)
            measured.left = _left(node, "decode")
            measured.evicted_pages = node.stats()["evicted_pages"]
            node.audit()
        measured.bytes_skipped = measured.hit_tokens * sum(
            pool.layout.kv_bytes_per_token for pool in pools
        )
        found = pipe.recv()
        measured.left |= found.pop("left")
        return replace(measured, **found)

    played = play(run_pass)
    pipe.send(None)
    return played


def _left(node: DecodeGroup | PrefillGroup, side: str) -> dict[str, int]:
    """What is locked or held once nothing is any more, or after `_SETTLE_S`."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        stats = node.stats()
        left = {f"{side} locks left": stats["locks"]}
        for state in ("owned", "held", "quarantined"):
            left[f"{side} pages left {state}"] = stats[f"pages_{state}"]
        if not any(left.values()) or time.monotonic() > deadline_s:
            return left
        node.wait(0.02)
