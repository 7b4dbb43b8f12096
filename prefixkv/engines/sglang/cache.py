"""prefixkv's radix cache in SGLang's role of a tree cache.

SGLang works with tokens and their slots, in tensors on the device; prefixkv with pages, and page
ids on the host. SGLang locks nodes of a tree; prefixkv locks the result of a match or an insertion.
So a node handle is such a result here, and a lock is prefixkv's, inside SGLang's `TreeLock`.

Ownership of a request's row: [0, cache_protected_len) are pages of the tree, which the request's
lock holds; the rest belongs to the request until `checkpoint` hands whole pages over.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prefixkv.engines.envelope import hints_of
from prefixkv.engines.sglang import internals as sgl
from prefixkv.engines.sglang.events import EventTranslator
from prefixkv.engines.sglang.keys import TOKEN_WORDS, Packer, RequestKey, namespace_of
from prefixkv.engines.sglang.slots import SlotTable
from prefixkv.engines.sglang.waiting import CLOCK, RankClock, weight_order
from prefixkv.errors import LockError, RequestError, UserErrors
from prefixkv.settings import Continues
from prefixkv.spi import (
    DEFAULT_POLICY,
    MatchResult,
    Pages,
    Policy,
    PrefixLock,
    RadixCache,
    RadixKey,
    TreeNode,
    make_policy,
    packed_ids,
    pages_for,
)

_log = logging.getLogger("prefixkv.sglang")


class Handle:
    """The end of a match or an insertion, which SGLang calls a node. It holds no lock."""

    __slots__ = ("key", "result")

    def __init__(self, result: MatchResult | None, key: RequestKey | None = None) -> None:
        self.result = result  # None: the root
        self.key = key  # of the request that looked

    def __repr__(self) -> str:
        return f"<Handle {self.result!r}>"


def is_aborted(req: Any) -> bool:
    return type(req.finished_reason).__name__ == "FINISH_ABORT"


def is_spoilt(req: Any) -> bool:
    """Return whether the last drawn token was none, which SGLang takes for NaN."""
    return getattr(req.finished_reason, "matched", None) == "NaN happened"


class PrefixKVCache(sgl.BasePrefixCache):  # type: ignore[misc]
    """The tree cache of one scheduler, whose thread owns it. `clock` is the policy's time."""

    def __init__(
        self,
        params: Any,
        policy: str | Policy = DEFAULT_POLICY,
        clock: RankClock = CLOCK,
    ) -> None:
        self.disable: bool = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.is_eagle: bool = params.is_eagle
        self.sliding_window_size = None
        self.root_node = Handle(None)
        self.counters: Counter[str] = Counter(
            matches=0, matched_tokens=0, checkpoints=0, duplicate_tokens=0, evicted_tokens=0,
        )  # fmt: skip
        allocator = params.token_to_kv_pool_allocator
        # Page 0 is SGLang's padding, so ids go up to size // page_size, inclusive.
        num_pages = allocator.size // self.page_size + 1
        self._clock = clock
        self._packer = Packer(self.is_eagle)
        # The tree counts words of keys; its policy has bounds in tokens.
        policy = make_policy(policy)
        policy.token_scale = 1 / TOKEN_WORDS
        self.tree = RadixCache(
            TOKEN_WORDS * self.page_size, policy, num_pages, UserErrors(_log.error)
        )
        self._slots = SlotTable(num_pages, self.page_size, allocator.device)
        # Locks of `inc_lock_ref`, which gives its caller none; `dec_lock_ref` pops one by place.
        self._held: dict[TreeNode, list[PrefixLock]] = {}
        self._nothing = sgl.MatchResult(0, self.root_node, self.root_node, self.root_node)
        self.kv_events = sgl.KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events and not self.disable,
            page_size=self.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        # Without readers the tree keeps no changes.
        self._translator: EventTranslator | None = None
        if self.kv_events.enabled:
            self._translator = EventTranslator(self.kv_events, self.page_size, self.is_eagle)
            self._changes = self.tree.record()
            self._translator.record(self._changes.take())
        if params.enable_metrics:
            self.init_metrics_collector()

    # --- looking ----------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """Return the longest prefix of whole pages. Changes nothing, recency included."""
        key, raw_len = params.key, _raw_len(params.key)
        if self.disable or raw_len < self.page_size:
            return self._nothing
        own = None if params.req is None else self._key_of(params.req)
        packed = self._packed(key) if own is None else own.cover(key.token_ids, raw_len)
        match = self.tree.match_prefix(packed)
        num_tokens = match.depth * self.page_size
        self.counters["matches"] += 1
        self.counters["matched_tokens"] += num_tokens
        if not num_tokens:
            return self._nothing
        handle = Handle(match, own)
        return sgl.MatchResult(num_tokens, handle, handle, handle)

    def touch_prefix(self, key: Any) -> None:
        """Count a use of the cached part of a key, but no visit."""
        result = self.match_prefix(sgl.MatchPrefixParams(key=key)).last_device_node.result
        if result is not None:
            self.tree.unlock(self.tree.lock(result, self._clock.now_s, visit=False))

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        slots = self.path_device_indices(req.last_node)
        # Mostly the match is all of the path, and a slice of a tensor costs as much as the rest.
        if len(slots) == req.prefix_len:
            return slots
        assert len(slots) >= req.prefix_len, (req.rid, len(slots), req.prefix_len)
        return slots[: req.prefix_len]

    def path_device_indices(self, node: Handle) -> torch.Tensor:
        """Return the slots of a prefix, a new tensor int64 on the device."""
        return self._slots.slots_of_packed(b"" if node.result is None else node.result.packed)

    def dfs_weight_order(self, node_handles: Sequence[Handle]) -> list[int]:
        return weight_order([self._place(handle) for handle in node_handles])

    def root_node_handle(self, extra_key: str | None = None) -> Handle:
        """All namespaces share it."""
        return self.root_node

    # --- holding ----------------------------------------------------------------------------------

    def lock(self, node: Handle) -> Any:
        """A request counts as a visit only at its first lock."""
        return sgl.TreeLock(self._lock(node), sgl.DecLockRefParams())

    def unlock(self, lock: Any) -> None:
        """No-op for a lock that was released already, or before a reset."""
        if lock is not None and lock.node is not None and lock.node.held:
            self.tree.unlock(lock.node)

    def inc_lock_ref(self, node: Handle) -> Any:
        """Lock without a lock object. The result has the change of evictable tokens."""
        before = self.tree.evictable_pages
        lock = self._lock(node)
        if lock is not None:
            self._held.setdefault(lock.node, []).append(lock)
        return sgl.IncLockRefResult(delta=(self.tree.evictable_pages - before) * self.page_size)

    def dec_lock_ref(self, node: Handle, params: Any = None) -> Any:
        """Release one lock of `inc_lock_ref` at this place. Raises LockError without one."""
        before, place = self.tree.evictable_pages, self._place(node)
        if place is not None:
            held = self._held.get(place)
            if not held:
                raise LockError(f"{node!r} is not held by inc_lock_ref")
            self.tree.unlock(held.pop())
            if not held:
                del self._held[place]
        return sgl.DecLockRefResult(delta=(self.tree.evictable_pages - before) * self.page_size)

    # --- adding -----------------------------------------------------------------------------------

    def checkpoint(self, req: Any, *, up_to: int, **_kwargs: Any) -> None:
        """Hand the whole pages of a request's first `up_to` tokens to the tree, and move its lock
        to their end. Pages that the tree had already are freed; the request's row then shows the
        tree's. Of a request that ends by an abort, or by NaN, only the prompt is handed over, and
        that where a sound token came of it."""
        if self.disable:
            return
        # 1. The lock tells whether the tree was reset, and how many pages it covers already.
        old: PrefixLock | None = req.lock.node if req.lock is not None else None
        if old is not None and not old.held:
            return  # the tree was reset: its pages and this row's may belong to others now
        self.counters["checkpoints"] += 1
        page_size, kv = self.page_size, req.kv
        if is_aborted(req) or is_spoilt(req):
            prompt_len = len(req.origin_input_ids)
            is_computed = len(req.output_ids) > is_spoilt(req) and up_to >= prompt_len
            # What was handed over before stays the tree's.
            up_to = max(prompt_len if is_computed else 0, kv.cache_protected_len)
        own_key = self._key_of(req)
        key = own_key.cover(req.full_untruncated_fill_ids, up_to)
        whole = len(key) // self.tree.page_size
        held = 0 if old is None else old.prefix_len // self.tree.page_size
        # The lock covers more than the key: insert from the root instead.
        if held > whole:
            old, held = None, 0
        end, own = whole * page_size, kv.cache_protected_len
        table = self.req_to_token_pool.req_to_token
        # 2. Insert from the lock on, so only new pages are read from the row and compared.
        visit, own_key.seen = not own_key.seen, True
        result = self.tree.insert(
            key,
            self._pages_of(kv.req_pool_idx, held, whole),
            priority=req.priority or 0, now_s=self._clock.now_s, visit=visit, lock=old,
            extend_lock=old is not None,
        )  # fmt: skip
        # 3. Another request has inserted the same tokens meanwhile: use its pages, and free ours.
        # The slots are copied first, since the write replaces them in the row. They are freed last:
        # until then no other request can get slots that this row still shows.
        matched = result.old_depth * page_size
        if own < matched:
            duplicates = table[kv.req_pool_idx, own:matched].clone()
            there = self._slots.slots(result.pages[own // page_size : result.old_depth])
            self.req_to_token_pool.write((kv.req_pool_idx, slice(own, matched)), there)
            self.token_to_kv_pool_allocator.free_segment(duplicates, start_pos=own)
            self.counters["duplicate_tokens"] += matched - own
        # 4. The tree owns these pages from here on.
        kv.cache_inserted_len = max(kv.cache_inserted_len, end)
        kv.cache_protected_len = max(own, end)  # never less: SGLang frees what lies behind
        # 5. `insert` has moved an old lock; without one the request gets its lock here. Locked
        # before the former one is released, so that shared pages stay protected in between. A
        # finished request needs none: SGLang releases its lock next.
        if req.finished():
            self.tree.hint(result, _continues(req))
        elif old is None:
            lock = self.tree.pin(result, self._clock.now_s)  # inserting it was its use
            self.unlock(req.lock)
            req.lock = sgl.TreeLock(lock, sgl.DecLockRefParams())
        req.last_node = Handle(result, own_key) if end else self.root_node

    def insert(self, params: Any) -> Any:
        """For SGLang's tools and tests: its schedulers call only `checkpoint`."""
        if self.disable:
            return sgl.InsertResult(prefix_len=0)
        key, slots = params.key.maybe_to_bigram_view(self.is_eagle, params.value)
        end = len(key) // self.page_size * self.page_size
        result = self.tree.insert(
            self._packed(key), self._slots.pages(slots[:end]),
            priority=params.priority or 0, now_s=self._clock.now_s,
        )  # fmt: skip
        node = Handle(result) if end else self.root_node
        return sgl.InsertResult(result.old_depth * self.page_size, last_device_node=node)

    # --- taking back ------------------------------------------------------------------------------

    def evict(self, params: Any) -> Any:
        """Evict whole pages, at least `num_tokens` or all evictable ones, and free their slots."""
        if self.disable or params.num_tokens <= 0:
            return sgl.EvictResult()
        began = time.perf_counter()
        num_pages = pages_for(params.num_tokens, self.page_size)
        pages = self.tree.evict(num_pages, self._clock.now_s)
        if len(pages):
            allocator = self.token_to_kv_pool_allocator
            # A paged allocator takes page ids, which saves the gather of slots.
            if hasattr(allocator, "free_page_ids"):
                allocator.free_page_ids(self._slots.on_device(pages))
            else:
                allocator.free_segment(self._slots.slots(pages), start_pos=0)
        num_tokens = len(pages) * self.page_size
        self.counters["evicted_tokens"] += num_tokens
        self.update_eviction_metrics(num_tokens, began)
        return sgl.EvictResult(num_tokens_evicted=num_tokens)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Free a request's own part of its row. One range goes to the allocator as page ids,
        without a slice of a tensor per segment of slots."""
        allocator, size = self.token_to_kv_pool_allocator, self.page_size
        (start, end), *others = ranges
        if others or start % size or not hasattr(allocator, "free_page_ids"):
            super().free_kv_row(kv, ranges)
        elif start < end:
            table = self.req_to_token_pool.req_to_token
            pages = self._slots.page_ids_of_row(table, kv.req_pool_idx, start, end)
            allocator.free_page_ids(pages)

    def reset(self) -> None:
        """Empty the tree, of locked pages too: the allocator is cleared as well. `unlock` and
        `checkpoint` notice that locks from before are no longer held."""
        self.tree.reset(forget_locks=True)
        self._held.clear()

    # --- telling ----------------------------------------------------------------------------------

    def take_events(self) -> list[Any]:
        if self._translator is None:
            return []
        self._translator.record(self._changes.take())
        return self.kv_events.take()  # type: ignore[no-any-return]

    def supports_prefix_sharing(self) -> bool:
        return not self.disable

    def evictable_size(self) -> int:
        return self.tree.evictable_pages * self.page_size

    def protected_size(self) -> int:
        return self.tree.protected_pages * self.page_size

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def total_size(self) -> int:
        return self.tree.num_pages * self.page_size

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots of all pages; those of a path are in order."""
        return self._slots.slots(packed_ids([node.pages for node in self.tree.nodes()]))

    def pretty_print(self) -> None:
        print(self.tree.dump())
        print(f"{self.total_size()} tokens, {dict(self.counters)}")

    def sanity_check(self) -> None:
        self.tree.check_invariants()

    # --- shared -----------------------------------------------------------------------------------

    def key_of_waiting(self, req: Any) -> RadixKey:
        return self._key_of(req).cover(req.origin_input_ids, len(req.origin_input_ids))

    def _lock(self, node: Handle) -> PrefixLock | None:
        if self.disable or node.result is None:
            return None
        visit = None
        if node.key is not None:
            visit, node.key.seen = not node.key.seen, True
        return self.tree.lock(node.result, self._clock.now_s, visit=visit)

    def _pages_of(self, row: int, start: int, end: int) -> Pages:
        if start == end:
            return _NO_PAGES
        table, size = self.req_to_token_pool.req_to_token, self.page_size
        return self._slots.pages_of_row(table, row, start * size, end * size)

    def _place(self, handle: Handle) -> TreeNode | None:
        return None if handle.result is None else self.tree.locate(handle.result)[0]

    def _key_of(self, req: Any) -> RequestKey:
        own: RequestKey | None = getattr(req, "prefixkv_key", None)
        namespace = namespace_of(req.extra_key, req.cache_salt)
        if own is None or own.namespace != namespace:
            own = req.prefixkv_key = RequestKey(namespace, self._packer)
        return own

    def _packed(self, key: Any) -> RadixKey:
        namespace = namespace_of(key.extra_key, key.cache_salt)
        return self._packer.pack(key.token_ids, _raw_len(key), namespace)


_NO_PAGES: Pages = np.empty(0, np.int32)


def _continues(req: Any) -> Continues:
    """Return what the request's `kv_hints`, an envelope, say of its session; one that was cut
    short says nothing."""
    if req.kv_hints is None or is_aborted(req) or is_spoilt(req):
        return None
    try:
        return hints_of(req.kv_hints.actions).continues
    except RequestError as error:
        _log.warning("request %s: %s", req.rid, error)
        return None


def _raw_len(key: Any) -> int:
    num_tokens = len(key.token_ids)
    return num_tokens if key.limit is None else min(key.limit, num_tokens)
