"""Three methods of vLLM that are wrapped, since its connector interface lacks the hook.

`Scheduler.update_from_output` says when a step's result has come, and ends requests that are not to
be computed, or whose logits have NaN. `EngineCoreProc._process_engine_step` waits for a request or
a ring, where vLLM would sleep and step again. `EngineCore.set_weight_version` passes the version
on. What wraps them adds nothing for another connector, or behind `MultiConnector`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from prefixkv.engines.vllm.compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    RequestStatus,
    get_block_hash,
    unwatched,
)
from prefixkv.engines.vllm.scheduler import SchedulerSide


def install(scheduler: Any, core: Any, process: Any) -> None:
    """Wrap the methods, once a process."""
    for owner, around in (
        (scheduler, update_from_output), (core, set_weight_version), (process, _process_engine_step)
    ):  # fmt: skip
        name = around.__name__
        if not hasattr(getattr(owner, name), "prefixkv"):
            setattr(owner, name, wrapped(getattr(owner, name), around))


def wrapped(original: Any, around: Any) -> Any:
    """Return a method that calls `around(side, original, self, ...)`, where there is a side."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        connector = getattr(getattr(self, "scheduler", self), "connector", None)
        if not getattr(connector, "is_prefixkv", False):
            return original(self, *args, **kwargs)
        return around(connector.scheduler, original, self, *args, **kwargs)  # type: ignore[union-attr]

    method.prefixkv = True  # type: ignore[attr-defined]
    return method


def update_from_output(
    side: SchedulerSide, original: Any, scheduler: Any, step: Any, result: Any, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    # Before vLLM's own work: a step ends when its result comes, and a token that was drawn from
    # NaN is never an answer's.
    side.compute.step_ended()
    errors, ended_hashes = side.take_logits(step, result.num_nans_in_logits or {})
    failed: list[Any] = []
    if errors:
        failed, blocks = _fail_requests(scheduler, errors, ended_hashes)
        side.spoilt(blocks)
    # After it: the report that decode has refused a request was taken in there.
    outputs = original(scheduler, step, result, *args, **kwargs)
    for request in failed:
        _answer(request, {"prefixkv": {"error": errors[request.request_id]}}, outputs)
    # Only now is it known that this scheduler passes here: from the first call on `ScheduledSends`
    # keeps such requests waiting until they are ended, instead of computing them.
    side.sends.can_end = True
    for rid, params in side.take_ended().items():
        # As if its client had left.
        for request in scheduler.finish_requests([rid], RequestStatus.FINISHED_ABORTED):
            _answer(request, params, outputs)
    side.clear_spoilt()
    return outputs


def _answer(request: Any, params: dict[str, Any], outputs: Any) -> None:
    """Answer a request that was ended here, with no token: vLLM answers only what it has computed.
    `outputs` maps each client to its outputs of this step."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        kv_transfer_params=params,
        trace_headers=request.trace_headers,
    )
    outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)


def _fail_requests(
    scheduler: Any, rids: Iterable[str], ended_hashes: set[Any]
) -> tuple[list[Any], set[int]]:
    """End live requests with an error, and take all blocks of their tokens out of the prefix cache,
    with those of `ended_hashes`. All, their hits too: a block that was wrong before must not spoil
    every request that finds it. Returns the requests that were ended, and these blocks."""
    manager = scheduler.kv_cache_manager
    live = [scheduler.requests[rid] for rid in rids if rid in scheduler.requests]
    # By hash: vLLM has taken back the blocks of a request that is preempted, and those that a
    # window has left behind, and may still find them.
    hashes = ended_hashes.union(*(request.block_hashes for request in live))
    blocks = {
        block.block_id
        for block in manager.block_pool.blocks
        if block.block_hash is not None and get_block_hash(block.block_hash) in hashes
    }
    for request in live:
        blocks.update(*manager.get_block_ids(request.request_id))
    manager.block_pool.evict_blocks(blocks)
    rids = [request.request_id for request in live]
    return scheduler.finish_requests(rids, RequestStatus.FINISHED_ERROR), blocks


def set_weight_version(
    side: SchedulerSide, original: Any, core: Any, weight_version: str, *args: Any, **kwargs: Any
) -> Any:
    side.move_weights(weight_version)  # first, since it raises for what is no version
    return original(core, weight_version, *args, **kwargs)


def _process_engine_step(side: SchedulerSide, original: Any, engine: Any) -> Any:
    executed = original(engine)
    # After it, so that its orders and reports are out before the engine sleeps.
    if not executed and _may_rest(engine) and (timeout_s := side.rest_s()):
        with unwatched():
            engine.scheduler.connector.wakeups.rest(engine.input_queue, timeout_s)
    return executed


def _may_rest(engine: Any) -> bool:
    # Each line is something that only a further step moves on, and for which no wakeup is sent.
    # Data parallel engines step together, so none of them may rest alone.
    scheduler, compiling = engine.scheduler, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return (
        engine.is_running()
        and engine.vllm_config.parallel_config.data_parallel_size == 1
        and not engine.batch_queue
        and not scheduler.running
        and not scheduler.finished_req_ids
        and scheduler.ec_connector is None
        and all(request.status != compiling for request in scheduler.requests.values())
    )
