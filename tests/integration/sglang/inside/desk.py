"""What SGLang's scheduler does with a tree cache, without a scheduler: requests of our own make, on
SGLang's own pools, allocators and functions, over SGLang's tree or ours.

The KV of a slot is a number that stands for all tokens up to its own, so it is seen at once when a
request is given a slot that holds another prefix.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    evict_from_tree_cache,
    match_kv_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from prefixkv.engines.sglang.cache import PrefixKVCache
from prefixkv.engines.sglang.waiting import RankClock
from tests.integration.sglang.inside.gpu import on_host

MODULUS = (1 << 61) - 1


class FINISH_ABORT:  # noqa: N801  SGLang's name, which counts
    """Why a request has ended."""


@dataclass
class Kv:
    """What SGLang's `ReqKvInfo` says of a request's KV."""

    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    cache_inserted_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    swa_evict_floor: int = 0

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None

    holds_mamba = False

    @property
    def is_kv_released(self) -> bool:
        return self.kv_allocated_len == 0

    def swa_dead_lo(self, page_size: int) -> int:
        return self.cache_protected_len

    def get_evicted_seqlen(self, component: Any) -> int:
        return 0

    def mark_kv_released(self) -> None:
        self.kv_allocated_len = 0


@dataclass(eq=False)
class Request:
    """The part of SGLang's `Req` that caches and the functions around them read."""

    rid: str
    origin_input_ids: array[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    full_untruncated_fill_ids: array[int] = field(default_factory=lambda: array("q"))
    kv: Kv = field(default_factory=Kv)
    finished_reason: Any = None
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    extend_end: int = 0
    session: Any = None
    session_id: str | None = None
    kv_hints: Any = None
    kv_rotation_base: int | None = None
    finished_len: int | None = None
    skip_radix_cache_insert = False
    mamba_branching_seqlen: int | None = None
    swa_branching_seqlen: int | None = None

    def finished(self) -> bool:
        return self.finished_reason is not None

    def owned_kv_len(self) -> int:
        return self.kv.kv_committed_len

    def refresh_fill_ids(self) -> None:
        have = len(self.full_untruncated_fill_ids) - len(self.origin_input_ids)
        if 0 <= have <= len(self.output_ids) and len(self.full_untruncated_fill_ids):
            self.full_untruncated_fill_ids.extend(self.output_ids[have:])
        else:
            self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def _compute_max_prefix_len(self, input_len: int) -> int:
        return max(input_len - 1, 0)

    @property
    def tokens(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]


def contents(tokens: list[int], extra_key: str | None, salt: str | None) -> list[int]:
    """Of each token the KV that its slot holds: it depends on all before, and the namespace."""
    value = hash((extra_key, salt or None)) % MODULUS
    found = []
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % MODULUS
        found.append(value)
    return found


class Desk:
    """One cache, its pools, and the requests that run.

    Args:
        kind: `prefixkv`, or `unified-rust` or `unified-python` of SGLang.
        pool_tokens: the size of the pool, whole pages.
        keep_kv: whether slots hold anything; without, nothing is looked into.
        device: of the pools; one that is not the CPU is `gpu.py`'s.
    """

    def __init__(
        self,
        kind: str,
        page_size: int,
        pool_tokens: int,
        eagle: bool = False,
        events: bool = False,
        policy: str = "lru",
        max_requests: int = 64,
        dynamo_events: bool = False,
        context_len: int = 4096,
        keep_kv: bool = True,
        device: str = "cpu",
    ) -> None:
        self.page_size, self.pool_tokens, self.eagle = page_size, pool_tokens, eagle
        self.keep_kv = keep_kv
        self.pool = ReqToTokenPool(max_requests, context_len, device, False)
        fixed: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "kvcache": None}
        fixed["need_sort"] = True  # as a prefill or a decode server has it
        self.allocator = (
            TokenToKVPoolAllocator(pool_tokens, **fixed)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(pool_tokens, page_size, **fixed)
        )
        self.clock = RankClock()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            is_eagle=eagle,
            enable_kv_cache_events=events,
            dynamo_kv_event_format=dynamo_events,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=kind.removeprefix("unified-"),
        )
        self.params = params
        self.cache: Any = (
            PrefixKVCache(params, policy, self.clock)
            if kind == "prefixkv"
            else UnifiedRadixCache(params)
        )
        self.kv = np.zeros(pool_tokens + page_size, np.int64)
        self.running: dict[str, Request] = {}

    # --- a request's way --------------------------------------------------------------------------

    def match(self, req: Request, tokens: array[int] | None = None) -> int:
        """Look a request up as SGLang does, and see that every slot has the right KV."""
        req.refresh_fill_ids()
        tokens = req.full_untruncated_fill_ids if tokens is None else tokens
        match_kv_cache(req, self.cache, tokens, max_prefix_len=len(tokens) - 1)
        if not self.keep_kv:
            return req.prefix_len
        slots = on_host(self.cache.path_device_indices(req.last_node)[: req.prefix_len])
        assert len(slots) == req.prefix_len
        assert req.prefix_len % self.page_size == 0
        expected = contents(list(tokens), req.extra_key, req.cache_salt)[: req.prefix_len]
        assert self.kv[slots].tolist() == expected
        return req.prefix_len

    def blocked(self, req: Request) -> None:
        """The head of decode's queue at each tick, while it does not fit."""
        self.match(req)
        req.lock = self.cache.lock(req.last_node)
        if req.prefix_len:
            self.cache.unlock(req.lock)
            req.lock = None

    def admit(self, req: Request, first_chunk: int | None = None) -> bool:
        """Match, lock, make room, allocate, compute; False where a pool is too small."""
        if not self.pool.available_size():
            return False
        self.match(req)
        req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        end = len(req.full_untruncated_fill_ids)
        if first_chunk is not None:
            end = min(end, max(req.prefix_len + first_chunk, 1))
        need = -(-end // self.page_size) * self.page_size - req.prefix_len
        evict_from_tree_cache(self.cache, need)
        if self.allocator.available_size() < need:
            self.cache.unlock(req.lock)
            req.lock = None
            return False
        self.pool.alloc([req])
        held = self.cache.prefix_device_indices(req)
        self.pool.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), held)
        self._compute(req, req.prefix_len, end)
        self.cache.maybe_hand_to_session(req)
        self.running[req.rid] = req
        return True

    def extend(self, req: Request, chunk: int) -> bool:
        """The next chunk of a prompt, after a checkpoint; False where there is no room."""
        start = req.extend_end
        end = min(len(req.full_untruncated_fill_ids), start + chunk)
        need = -(-end // self.page_size) - -(-start // self.page_size)
        evict_from_tree_cache(self.cache, need * self.page_size)
        if self.allocator.available_size() < need * self.page_size or end == start:
            return False
        self._compute(req, start, end)
        self.cache.maybe_hand_to_session(req)
        return True

    def decode(self, req: Request, token: int) -> bool:
        """The KV of the next token, and a new one after it."""
        req.output_ids.append(token)
        evict_from_tree_cache(self.cache, self.page_size)
        if self.allocator.available_size() < self.page_size:
            req.output_ids.pop()
            return False
        req.refresh_fill_ids()
        end = req.kv.kv_committed_len
        self._compute(req, end, end + 1)
        return True

    def checkpoint(self, req: Request) -> None:
        checkpoint_kv_cache(req, self.cache)
        if self.keep_kv:
            self.check_row(req)

    def finish(self, req: Request) -> None:
        req.finished_reason = "length"
        release_kv_cache(req, self.cache, checkpoint=True)
        del self.running[req.rid]

    def abort(self, req: Request, reason: Any = None) -> None:
        """Its client has left, or SGLang has refused to go on."""
        req.finished_reason = reason or FINISH_ABORT()
        release_kv_cache(req, self.cache, checkpoint=True)
        del self.running[req.rid]

    def retract(self, req: Request) -> None:
        """As SGLang's `retract_decode` and `reset_for_retract`."""
        release_kv_cache(req, self.cache, checkpoint=False)
        del self.running[req.rid]
        req.lock = req.last_node = None
        req.prefix_len = req.extend_end = 0
        req.kv = Kv()

    # --- laws -------------------------------------------------------------------------------------

    def check_row(self, req: Request) -> None:
        """The row shows slots that hold the request's own KV, all along."""
        end = req.kv.kv_committed_len
        slots = on_host(self.pool.req_to_token[req.kv.req_pool_idx, :end])
        assert self.kv[slots].tolist() == contents(req.tokens, req.extra_key, req.cache_salt)[:end]

    def check(self) -> None:
        """Every token of the pool is free, cached or a request's, once."""
        page = self.page_size
        owned = sum(
            -(-req.kv.kv_allocated_len // page) * page - req.kv.cache_protected_len
            for req in self.running.values()
        )
        free = self.allocator.available_size()
        cached = self.cache.evictable_size() + self.cache.protected_size()
        assert free + cached + owned == self.pool_tokens, (free, cached, owned)
        if isinstance(self.cache, PrefixKVCache):
            self.cache.sanity_check()
            assert self.cache.total_size() == cached
            times = np.zeros(self.pool_tokens // page + 1, np.int64)
            times[0] = 1  # SGLang's padding
            np.add.at(times, on_host(self.allocator.get_all_free_pages()), 1)
            np.add.at(times, on_host(self.cache.all_values_flatten())[::page] // page, 1)
            for req in self.running.values():
                row = on_host(self.pool.req_to_token[req.kv.req_pool_idx])
                own = row[req.kv.cache_protected_len : req.kv.kv_allocated_len : page]
                np.add.at(times, own // page, 1)
            assert (times == 1).all()

    def evict(self, num_tokens: int) -> int:
        evicted: int = self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted
        return evicted

    def flush(self) -> None:
        """SGLang's `flush_cache`."""
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    # --- inside -----------------------------------------------------------------------------------

    def _compute(self, req: Request, start: int, end: int) -> None:
        row = self.pool.req_to_token[req.kv.req_pool_idx]
        if self.page_size == 1:
            slots = self.allocator.alloc(end - start)
        else:
            last = int(row[start - 1]) if start else -1
            starts, ends = torch.tensor([start]), torch.tensor([end])
            slots = self.allocator.alloc_extend(
                starts, starts, ends, ends, torch.tensor([last]), end - start
            )
        assert slots is not None
        self.pool.write((req.kv.req_pool_idx, slice(start, end)), slots)
        if self.keep_kv:
            known = contents(req.tokens[:end], req.extra_key, req.cache_salt)
            self.kv[on_host(slots)] = known[start:]
        req.kv.kv_committed_len = req.kv.kv_allocated_len = req.extend_end = end
