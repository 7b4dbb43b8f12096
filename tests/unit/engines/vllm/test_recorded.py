"""The scheduler's side against calls that vLLM 0.32.0 made (`recorded.json`, from two real servers
by `tests/integration/vllm/record.py`): it answers each as it did there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixkv.engines.vllm.orders import WorkerReport
from prefixkv.engines.vllm.scheduler import SchedulerSide
from tests.unit.engines.vllm.standin import Block, options

BLOCK = 32  # tokens, of the servers that were recorded
RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("recorded.json").read_text(encoding="utf-8")
)


class Pool:
    """References only: ours must never go below zero, and end at zero."""

    def __init__(self) -> None:
        self.blocks = [Block(i) for i in range(256)]

    def get_num_free_blocks(self) -> int:
        return 256  # the pool was never full when this was recorded

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterator[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0


def request_of(call: dict[str, Any]) -> Any:
    more = {
        "prompt_embeds": None, "resumable": False, "skip_reading_prefix_cache": False,
        "lora_request": None, "mm_features": [],
    }  # fmt: skip
    more["all_token_ids"] = call["prompt_token_ids"]
    return SimpleNamespace(**{key: call[key] for key in call if key != "call"}, **more)


def said(value: Any) -> Any:
    """As it was written down, but for the tickets, which are drawn at random, and without what only
    models with windows have."""
    for kind in ("opens", "chunks", "offers"):
        assert not any(one.pop("windows") for one in value[kind])
    return untold(json.loads(json.dumps(value, default=lambda raw: raw.hex())))


def untold(orders: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [{**one, "ticket": one["ticket"] > 0} for one in value]
        if key in ("opens", "refusals")
        else value
        for key, value in orders.items()
    }


class Replay:
    def __init__(self, side: SchedulerSide) -> None:
        self.side = side
        self.pool = Pool()
        side.bind(self.pool)
        self.requests: dict[str, Any] = {}

    def play(self, call: dict[str, Any]) -> None:
        side, rid = self.side, call.get("rid", "")
        match call["call"]:
            case "new":
                self.requests[call["request_id"]] = request_of(call)
                side.on_new_request(self.requests[call["request_id"]])
            case "matched":
                self.requests[rid].num_computed_tokens = 0  # else vLLM does not ask
                result = side.count_loadable(self.requests[rid], call["computed"])
                assert list(result) == call["result"]
            case "allocated":
                side.allocated(self.requests[rid], call["pages"], call["external"])
            case "orders":
                result = said(asdict(side.orders(self.step(call))))
                # There was no host memory, and no NaN.
                assert (result.pop("copies"), result.pop("cleared")) == ([], [])
                assert result == untold(call["result"])
            case "heard":
                side.take_reports(
                    None if call["news"] is None else WorkerReport(**call["news"]), call["received"]
                )
            case "finished":
                assert side.finished(self.requests[rid], call["pages"]) == call["result"]
                assert side.busy == call["busy"]
            case other:
                raise AssertionError(other)
        side.check_invariants()

    def step(self, call: dict[str, Any]) -> Any:
        again, tables = call["again"], call["tables"]
        for rid, computed in [*call["new"], *again]:
            self.requests[rid].num_computed_tokens = computed + call["scheduled"][rid]
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=rid, num_computed_tokens=computed)
                for rid, computed in call["new"]
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[rid for rid, _ in again],
                num_computed_tokens=[computed for _, computed in again],
            ),
            num_scheduled_tokens=call["scheduled"],
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda rid: (tables[rid],)),
        )


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_each_call_of_vllm_is_answered_as_it_was(name: str) -> None:
    roles = {"is_producer": name == "prefill-0", "is_consumer": name == "decode-0"}
    replay = Replay(SchedulerSide(options(name), BLOCK, **roles))
    replay.side.set_wakeup_address(
        next(c["result"]["bell"] for c in RECORDED[name] if c["call"] == "orders")
    )
    for call in RECORDED[name]:
        replay.play(call)
    gauges = replay.side.gauges()
    assert (gauges["loads_waiting"], gauges["held_blocks"]) == (0, 0)
    assert all(block.ref_cnt == 0 for block in replay.pool.blocks)
