"""Runs in vLLM's environment: a workload of `vllm_sets` through vLLM's real `KVCacheManager` and
the scheduler's side of our connector, without a model, on a clock of its own. Prints one line of
JSON for each policy; "" is vLLM's own order.

    python -m benchmarks.vllm_pool KIND REQUESTS BLOCK SEED POLICY ...

KIND is one of `vllm_sets.KINDS`, or the file of a recorded trace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

import benchmarks.policies.gated  # noqa: F401  makes it known by name
from benchmarks.vllm_sets import (
    KINDS,
    TRACE_BLOCK,
    Recorded,
    Workload,
    drawn,
    pool_blocks,
    workload,
)
from prefixkv.cache.eviction.policy import make_policy
from prefixkv.engines.vllm.options import ConnectorOptions
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.shadow import GovernedQueue, Shadow

RUNNING = 2
"""Requests that are decoded at any time."""


def made(kind: str, requests: int, block: int, seed: int) -> Workload | Recorded:
    if kind in KINDS:
        return workload(kind, requests, seed)
    return Recorded(Path(kind), block, requests)


def replay(kind: str, requests: int, block: int, seed: int, name: str) -> dict[str, Any]:
    blocks = pool_blocks(made(kind, requests, block, seed), block)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    manager: Any = KVCacheManager(
        config,
        max_model_len=1 << 20,
        enable_caching=True,
        scheduler_block_size=block,
        hash_block_size=block,
    )
    now = SimpleNamespace(s=0.0)
    side = SchedulerSide(ConnectorOptions("d"), block, is_producer=False, is_consumer=True)
    shadow = None
    if name:
        policy = make_policy(name)
        if kind not in KINDS:
            policy.token_scale = TRACE_BLOCK // block
        shadow = Shadow(block, policy, lambda: now.s)
        GovernedQueue.install(manager.block_pool, shadow, side.counters)
    side.bind(manager.block_pool, shadow)
    hasher = get_request_block_hasher(block, sha256)
    found: list[tuple[int, int]] = []
    running: list[Request] = []

    def end() -> None:
        ended: Any = running.pop(0)
        side.finished(ended, manager.get_block_ids(ended.request_id)[0])
        manager.free(ended)

    asks = made(kind, requests, block, seed)
    for i, ask in enumerate(asks):
        now.s = ask.now_s
        request: Any = Request(
            request_id=str(i),
            prompt_token_ids=ask.prompt,
            sampling_params=SamplingParams(max_tokens=ask.num_tokens),
            pooling_params=None,
            block_hasher=hasher,
        )
        side.on_new_request(request)
        cached, num_cached = manager.get_computed_blocks(request)[:2]
        num_prompt = len(ask.prompt)
        while manager.allocate_slots(
            request, num_prompt - num_cached,
            num_new_computed_tokens=num_cached, new_computed_blocks=cached,
        ) is None:  # fmt: skip
            end()
        side.allocated(request, manager.get_block_ids(request.request_id)[0], 0)
        answer = drawn(10_000_000 + i, ask.num_tokens)
        request.num_computed_tokens = num_prompt
        for token in answer:  # the KV of the last is never computed
            request.append_output_token_ids(token)
            while manager.allocate_slots(request, 1) is None:
                end()
            request.num_computed_tokens += 1
        found.append((num_cached // block, num_prompt // block))
        running.append(request)
        asks.answered(ask, answer)
        while len(running) > RUNNING:
            end()
    half = found[len(found) // 2 :]
    hits, asked = sum(one[0] for one in half), sum(one[1] for one in half)
    return {
        "kind": Path(kind).stem, "policy": name, "blocks": blocks, "requests": len(found),
        "hit_ratio": round(hits / asked, 4), **side.take_counts(),
    }  # fmt: skip


def main() -> None:
    init_none_hash(sha256)
    kind, requests, block, seed, *policies = sys.argv[1:]
    for policy in policies:
        print(json.dumps(replay(kind, int(requests), int(block), int(seed), policy)), flush=True)


if __name__ == "__main__":
    main()
