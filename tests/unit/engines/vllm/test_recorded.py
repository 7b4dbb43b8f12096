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


# --- what the stand-in (standin.py) takes for granted ---------------------------------------------


def of(name: str, rid: str) -> list[str]:
    """The calls that name a request, in order."""
    return [
        call["call"]
        for call in RECORDED[name]
        if rid in (call.get("rid"), call.get("request_id")) or rid in call.get("received", ())
    ]


def rids(name: str, room: int) -> list[str]:
    return [
        call["request_id"]
        for call in RECORDED[name]
        if call["call"] == "new" and (call["kv_transfer_params"] or {}).get("room") == room
    ]


def test_a_load_is_admitted_heard_of_and_admitted_again() -> None:
    (rid,) = rids("decode-0", 1)
    assert of("decode-0", rid) == ["new", "matched", "allocated", "heard", "allocated", "finished"]


def test_the_second_turn_finds_the_first_in_vllms_own_cache() -> None:
    (rid,) = rids("decode-0", 2)
    matched = [c for c in RECORDED["decode-0"] if c["call"] == "matched" and c["rid"] == rid]
    assert matched[0]["computed"] == 150 // BLOCK * BLOCK
    assert matched[0]["result"] == [190 - 150 // BLOCK * BLOCK, True]


def test_a_failed_load_starts_over_with_other_blocks() -> None:
    (rid,) = rids("decode-0", 6)
    calls = [c for c in RECORDED["decode-0"] if c["call"] == "allocated" and c["rid"] == rid]
    assert len(calls) == 2
    assert calls[1]["external"] == 0
    assert of("decode-0", rid)[:4] == ["new", "matched", "allocated", "heard"]


def test_a_request_that_is_told_to_wait_is_asked_again_and_again() -> None:
    waiting = [
        call
        for call in RECORDED["decode-0"]
        if call["call"] == "matched" and call["result"] == [None, False]
    ]
    assert len(waiting) > 2


def test_an_abort_ends_a_request_before_its_load() -> None:
    rid, notice = rids("decode-0", 8)
    assert of("decode-0", rid) == ["new", "matched", "allocated", "finished", "heard"]
    # Its parameters come again, for a connector that has not heard of them: nothing is done.
    assert of("decode-0", notice) == ["new", "finished"]
    ends = [c for c in RECORDED["decode-0"] if c["call"] == "finished" and c["rid"] == notice]
    assert ends[0]["result"] is None
