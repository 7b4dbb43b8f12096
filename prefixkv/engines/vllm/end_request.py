"""The end of requests within a step: a connector by itself can only say "not yet" of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prefixkv.engines.vllm.compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    RequestStatus,
    get_block_hash,
)


def end_request(scheduler: Any, rid: str, params: dict[str, Any], outputs: Any) -> None:
    """End a request as if its client had left, and answer it."""
    for request in scheduler.finish_requests([rid], RequestStatus.FINISHED_ABORTED):
        answer(request, params, outputs)


def answer(request: Any, params: dict[str, Any], outputs: Any) -> None:
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


def fail_requests(
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
