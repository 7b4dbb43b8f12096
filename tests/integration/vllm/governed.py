"""Runs in vLLM's environment: a trace through vLLM's real `KVCacheManager`, with and without a
policy that names its victims. Prints one line of JSON for each.

    python governed.py POLICY ...     ("" is vLLM's own order)
"""

from __future__ import annotations

import json
import random
import sys
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
from prefixkv.engines.vllm.options import ConnectorOptions
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.shadow import GovernedQueue, Shadow

BLOCK, NUM_BLOCKS, ROUNDS = 16, 120, 600


def trace() -> list[list[int]]:
    """4 conversations that come back now and then, among prompts that are seen once."""
    random_ = random.Random(3)
    chats = [[random_.randrange(9999) for _ in range(10 * BLOCK)] for _ in range(4)]
    prompts = []
    for _ in range(ROUNDS):
        if random_.random() < 0.3:
            prompts.append([*random_.choice(chats), 1, 2, 3])
        else:
            prompts.append([random_.randrange(9999) for _ in range(10 * BLOCK + 3)])
    return prompts


def main(policy: str) -> None:
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    manager: Any = KVCacheManager(
        config,
        max_model_len=4096,
        enable_caching=True,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
    )
    pool = manager.block_pool
    now = SimpleNamespace(s=0.0)
    side = SchedulerSide(ConnectorOptions("d"), BLOCK, is_producer=False, is_consumer=True)
    shadow = None
    if policy:
        shadow = Shadow(BLOCK, policy, lambda: now.s)
        GovernedQueue.install(pool, shadow, side.counters)
    side.bind(pool, shadow)
    hasher = get_request_block_hasher(BLOCK, sha256)
    hits = total = 0
    running: list[Request] = []
    owner: dict[int, str] = {}  # of blocks that a running request computes
    for i, tokens in enumerate(trace()):
        now.s += 60.0
        request: Any = Request(
            request_id=str(i),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=hasher,
        )
        side.on_new_request(request)
        found, num_cached = manager.get_computed_blocks(request)[:2]
        new = manager.allocate_slots(
            request,
            len(tokens) - num_cached,
            num_new_computed_tokens=num_cached,
            new_computed_blocks=found,
        )
        assert new is not None
        (blocks,) = manager.get_block_ids(request.request_id)
        for block in blocks[num_cached // BLOCK :]:
            assert owner.setdefault(block, request.request_id) == request.request_id
        side.allocated(request, blocks, 0)
        request.num_computed_tokens = len(tokens)
        hits, total = hits + num_cached // BLOCK, total + len(tokens) // BLOCK
        running.append(request)
        if len(running) > 4:  # some are in use at any time
            ended: Any = running.pop(random.Random(i).randrange(len(running)))
            (pages,) = manager.get_block_ids(ended.request_id)
            side.finished(ended, pages)
            manager.free(ended)
            for page in pages:
                owner.pop(page, None)
        if shadow is not None:
            shadow.check_invariants()
    for ended in running:
        side.finished(ended, manager.get_block_ids(ended.request_id)[0])
        manager.free(ended)
    assert pool.get_num_free_blocks() == NUM_BLOCKS
    assert pool.reset_prefix_cache()
    print(json.dumps({"hits": hits, "total": total, **side.take_counts()}))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
