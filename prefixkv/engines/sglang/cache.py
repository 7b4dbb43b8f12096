"""prefixkv's radix cache as SGLang's tree cache.

SGLang speaks of tokens and of their slots, in tensors on the device; prefixkv of pages, and of page
ids on the host. SGLang locks nodes of a tree; prefixkv locks what a match or an insertion gave. So
a node handle is here such a result, and a lock is prefixkv's, in SGLang's `TreeLock`.

Who owns what of a request's row: [0, cache_protected_len) are pages of the tree, which the
request's lock holds; the rest is the request's own until `checkpoint` hands whole pages over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prefixkv.engines.sglang import internals as sgl
from prefixkv.engines.sglang.clock import CLOCK, RankClock
from prefixkv.engines.sglang.keys import Packer, RequestKey, namespace_of
from prefixkv.engines.sglang.mirror import RowMirror
from prefixkv.engines.sglang.order import weight_order
from prefixkv.engines.sglang.slots import SlotTable
from prefixkv.engines.sglang.words import Words
from prefixkv.spi import (
    DEFAULT_POLICY,
    LockError,
    MatchResult,
    Node,
    Pages,
    Policy,
    PrefixLock,
    RadixCache,
    RadixKey,
    packed_ids,
    pages_for,
)


class Handle:
    """What SGLang calls a node: where a match or an insertion ended. It holds nothing."""

    __slots__ = ("key", "result")

    def __init__(self, result: MatchResult | None, key: RequestKey | None = None) -> None:
        self.result = result  # None: the root
        self.key = key  # of the request that looked

    def __repr__(self) -> str:
        return f"<Handle {self.result!r}>"


class PrefixKVCache(sgl.BasePrefixCache):  # type: ignore[misc]
    """See the module's text. Owner: SGLang's scheduler.

    Args:
        params: SGLang's `CacheInitParams`.
        policy: of eviction, a name or an object.
        clock: whose time the policy is told.
        mirror: whether rows that are not on a CPU are mirrored on the host.
    """

    def __init__(
        self,
        params: Any,
        policy: str | Policy = DEFAULT_POLICY,
        clock: RankClock = CLOCK,
        *,
        mirror: bool = True,
    ) -> None:
        self.disable: bool = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.is_eagle: bool = params.is_eagle
        self.sliding_window_size = None
        self.root_node = Handle(None)
        self.counters: Counter[str] = Counter(
            matches=0, matched_tokens=0, checkpoints=0, rows_read=0, duplicate_tokens=0,
            evicted_tokens=0,
        )  # fmt: skip
        allocator = params.token_to_kv_pool_allocator
        # Page 0 is SGLang's padding; ids go up to size // page_size.
        num_pages = allocator.size // self.page_size + 1
        self._clock = clock
        self._packer = Packer(self.is_eagle)
        words_a_page = self.page_size * (2 if self.is_eagle else 1)
        self.tree = RadixCache(words_a_page, policy, num_pages)
        self._slots = SlotTable(num_pages, self.page_size, allocator.device)
        on_cpu = torch.device(allocator.device).type == "cpu"
        self.mirror: RowMirror | None = None
        if mirror and not on_cpu and not self.disable:
            self.mirror = RowMirror(self.req_to_token_pool, self.page_size)
        self._held: dict[Node, list[PrefixLock]] = {}  # by `inc_lock_ref`
        self._nothing = sgl.MatchResult(0, self.root_node, self.root_node, self.root_node)
        self.kv_events = sgl.KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events and not self.disable,
            page_size=self.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self._told: Words | None = None
        if self.kv_events.enabled:
            self._told = Words(self.kv_events, self.page_size, self.is_eagle)
            self._told.tell(self.tree.drain_changes(afresh=True))
        if params.enable_metrics:
            self.init_metrics_collector()

    # --- looking ----------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """The longest cached prefix of whole pages. Changes nothing, recency included."""
        key = params.key
        key.maybe_to_bigram_view(self.is_eagle)
        if self.disable or len(key) < self.page_size:
            return self._nothing
        own = None if params.req is None else self._key_of(params.req)
        packed = self._packed(key) if own is None else own.cover(key.token_ids, _raw_len(key))
        match = self.tree.match_prefix(packed)
        num_tokens = match.depth * self.page_size
        self.counters["matches"] += 1
        self.counters["matched_tokens"] += num_tokens
        if not num_tokens:
            return self._nothing
        handle = Handle(match, own)
        return sgl.MatchResult(num_tokens, handle, handle, handle)

    def touch_prefix(self, key: Any) -> None:
        """Count a use of what is cached of it, and no visit."""
        result = self.match_prefix(sgl.MatchPrefixParams(key=key)).last_device_node.result
        if result is not None:
            self.tree.unlock(self.tree.lock(result, self._clock.now_s, visit=False))

    def path_device_indices(self, node: Handle) -> torch.Tensor:
        """The slots of a prefix, int64 on the device, a new tensor."""
        return self._slots.slots(_NO_PAGES if node.result is None else node.result.pages)

    def dfs_weight_order(self, node_handles: Sequence[Handle]) -> list[int]:
        return weight_order([self._place(handle) for handle in node_handles])

    def root_node_handle(self, extra_key: str | None = None) -> Handle:
        return self.root_node

    # --- holding ----------------------------------------------------------------------------------

    def lock(self, node: Handle) -> Any:
        """Hold a prefix for one holder. A request is a visit once, however often it asks."""
        return sgl.TreeLock(self._lock(node), sgl.DecLockRefParams())

    def unlock(self, lock: Any) -> None:
        """Again, or after a reset: nothing."""
        if lock is not None and lock.node is not None and lock.node.held:
            self.tree.unlock(lock.node)

    def inc_lock_ref(self, node: Handle) -> Any:
        before = self.tree.evictable_pages
        lock = self._lock(node)
        if lock is not None:
            self._held.setdefault(lock.node, []).append(lock)
        return sgl.IncLockRefResult(delta=(self.tree.evictable_pages - before) * self.page_size)

    def dec_lock_ref(self, node: Handle, params: Any = None) -> Any:
        """Raises LockError where `inc_lock_ref` was not called for this place."""
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
        """Hand the whole pages of the first `up_to` tokens of a request to the tree.

        What the tree had already is freed, and the request's row shows the tree's pages from there
        on. The request's lock moves to the end of it; of a request that is finished it stays where
        it is, for it is given back next.
        """
        if self.disable:
            return
        old: PrefixLock | None = req.lock.node if req.lock is not None else None
        if old is not None and not old.held:
            return  # the tree was reset since: its pages, and this row, are another's now
        self.counters["checkpoints"] += 1
        page_size, kv = self.page_size, req.kv
        own_key = self._key_of(req)
        key = own_key.cover(req.full_untruncated_fill_ids, up_to)
        whole = len(key) // self.tree.page_size
        held = 0 if old is None else old.prefix_len // self.tree.page_size
        if held > whole:  # it gives less than it was given: look from the root
            old, held = None, 0
        end, own = whole * page_size, kv.cache_protected_len
        table = self.req_to_token_pool.req_to_token
        visit, own_key.seen = not own_key.seen, True
        goes_on = not req.finished()
        result = self.tree.insert(
            key,
            self._pages_of(kv.req_pool_idx, held, whole),
            priority=req.priority or 0, now_s=self._clock.now_s, visit=visit, lock=old,
            extend_lock=goes_on and old is not None,
        )  # fmt: skip
        matched = result.old_depth * page_size
        if own < matched:
            duplicates = table[kv.req_pool_idx, own:matched].clone()
            there = self._slots.slots(result.pages[own // page_size : result.old_depth])
            self.req_to_token_pool.write((kv.req_pool_idx, slice(own, matched)), there)
            self.token_to_kv_pool_allocator.free_segment(duplicates, start_pos=own)
            self.counters["duplicate_tokens"] += matched - own
        kv.cache_inserted_len = max(kv.cache_inserted_len, end)
        kv.cache_protected_len = end
        if self.mirror is not None:
            self.mirror.forget(kv.req_pool_idx, whole)
        if goes_on and old is None:
            lock = self.tree.lock(result, self._clock.now_s, visit=False)
            self.unlock(req.lock)
            req.lock = sgl.TreeLock(lock, sgl.DecLockRefParams())
        req.last_node = Handle(result, own_key) if end else self.root_node

    def insert(self, params: Any) -> Any:
        """SGLang's schedulers call `checkpoint` alone; this is for its tools and tests."""
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

    def maybe_hand_to_session(self, req: Any) -> None:
        """SGLang calls this when it has written the row of a request whose prompt, or a chunk of
        it, was given pages."""
        if self.mirror is not None:
            self.mirror.written(req.kv, req.prefix_len)

    # --- taking back ------------------------------------------------------------------------------

    def evict(self, params: Any) -> Any:
        """Free as many whole pages as hold `num_tokens`, or all that may go."""
        if self.disable or params.num_tokens <= 0:
            return sgl.EvictResult()
        began = time.perf_counter()
        num_pages = pages_for(params.num_tokens, self.page_size)
        pages = self.tree.evict(num_pages, self._clock.now_s)
        if len(pages):
            allocator = self.token_to_kv_pool_allocator
            if hasattr(allocator, "free_page_ids"):
                allocator.free_page_ids(self._slots.on_device(pages))
            else:
                allocator.free_segment(self._slots.slots(pages), start_pos=0)
        num_tokens = len(pages) * self.page_size
        self.counters["evicted_tokens"] += num_tokens
        self.update_eviction_metrics(num_tokens, began)
        return sgl.EvictResult(num_tokens_evicted=num_tokens)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """SGLang is about to give the request's row away."""
        if self.mirror is not None:
            self.mirror.released(req.kv.req_pool_idx)

    def reset(self) -> None:
        """SGLang clears its allocator besides, so all pages are given back, locks or not."""
        self.tree.reset(forget_locks=True)
        self._held.clear()

    # --- telling ----------------------------------------------------------------------------------

    def take_events(self) -> list[Any]:
        """What came and went since the last call, in SGLang's words."""
        if self._told is None:
            return []
        self._told.tell(self.tree.drain_changes())
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
        """The slots of all cached pages, a path's in order."""
        return self._slots.slots(packed_ids([node.pages for node in self.tree.nodes()]))

    def pretty_print(self) -> None:
        print(self.tree.dump())
        print(f"{self.total_size()} tokens, {dict(self.counters)}")

    def sanity_check(self) -> None:
        """Raises InternalError for a law of the tree that does not hold. O(tree)."""
        self.tree.check_invariants()
        if self.mirror is not None:
            self.mirror.check_invariants()

    # --- shared -----------------------------------------------------------------------------------

    def key_of_waiting(self, req: Any) -> RadixKey:
        """The packed prompt of a request that waits."""
        return self._key_of(req).cover(req.origin_input_ids, len(req.origin_input_ids))

    def _lock(self, node: Handle) -> PrefixLock | None:
        if self.disable or node.result is None:
            return None
        visit = None
        if node.key is not None:
            visit, node.key.seen = not node.key.seen, True
        return self.tree.lock(node.result, self._clock.now_s, visit=visit)

    def _pages_of(self, row: int, start: int, end: int) -> Pages:
        """Pages `start` to `end` of a row."""
        if start == end:
            return _NO_PAGES
        if self.mirror is not None:
            pages = self.mirror.pages(row, start, end)
            if pages is not None:
                return pages
            self.counters["rows_read"] += 1
        table, size = self.req_to_token_pool.req_to_token, self.page_size
        return self._slots.pages_of_row(table, row, start * size, end * size)

    def _place(self, handle: Handle) -> Node | None:
        return None if handle.result is None else self.tree.locate(handle.result)[0]

    def _key_of(self, req: Any) -> RequestKey:
        """The key that grows with a request, kept on the request."""
        own: RequestKey | None = getattr(req, "prefixkv_key", None)
        namespace = namespace_of(req.extra_key, req.cache_salt)
        if own is None or own.namespace != namespace:
            own = req.prefixkv_key = RequestKey(namespace, self._packer)
        return own

    def _packed(self, key: Any) -> RadixKey:
        namespace = namespace_of(key.extra_key, key.cache_salt)
        return self._packer.pack(key.token_ids, _raw_len(key), namespace)


_NO_PAGES: Pages = np.empty(0, np.int32)


def _raw_len(key: Any) -> int:
    """How many tokens of the array a key of SGLang's stands for."""
    num_tokens = len(key.token_ids)
    return num_tokens if key.limit is None else min(key.limit, num_tokens)
