"""All imports from SGLang: its classes, and the names of the methods that are hooked.

Attributes of SGLang's objects that the plug-in uses. Request: `origin_input_ids`,
`full_untruncated_fill_ids`, `extra_key`, `cache_salt`, `priority`, `last_node`, `lock`,
`finished()`, `prefix_len`, `finished_reason`, `to_finish`, `return_logprob`; its `kv` record:
`req_pool_idx`, `cache_protected_len`, `cache_inserted_len`, `kv_allocated_len`. Decode's queue:
`queue`, with items that have `req`, `waiting_for_input` and `is_rebootstrap`,
`transfer_queue.queue`, `scheduler.waiting_queue`, and the arithmetic that
`plugin._around_capacity` calls. Allocator: `free_segment`, `free_page_ids`, `size`, `page_size`,
`device`. Pool of rows: `req_to_token`, `write`. Scheduler: its two queues, and
`grammar_manager.grammar_queue`.
"""

from __future__ import annotations

from http import HTTPStatus
from importlib import import_module
from typing import Any

from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg, get_memory

RECEIVER_BROADCAST = (
    "sglang.srt.managers.scheduler_components.request_receiver."
    "SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)
POP_PREALLOCATED = "sglang.srt.disaggregation.decode.DecodePreallocQueue.pop_preallocated"
UPDATE_HANDSHAKES = "sglang.srt.disaggregation.decode.DecodePreallocQueue._update_handshake_waiters"
NIXL_MEMORY_KINDS = "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds"

# Names for the transfer backend. Its classes are in `internals_transfer.py`, which is imported only
# when the backend is used, since it imports much of SGLang.
TRANSFER_UTILS = "sglang.srt.disaggregation.utils"  # TransferBackend, an Enum
GET_KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
MAKE_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager"
MAKE_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager"
CREATE_SENDER = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
DECODE_ADD = "sglang.srt.disaggregation.decode.DecodePreallocQueue.add"
DECODE_CAPACITY = (
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._check_if_req_exceed_kv_capacity"
)
PREFILL_ADD = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add"
POP_BOOTSTRAPPED = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped"
HANDLE_REQUEST = "sglang.srt.managers.scheduler.Scheduler._handle_generate_request"
WAITING_ABORT = (
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
    "release_aborted_prefill_waiting_req"
)
NORMALIZE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
CREATE_RECEIVER = (
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
)


def fake_host() -> str:
    """Return the address in SGLang's requests to itself, which transfer nothing."""
    return str(import_module(TRANSFER_UTILS).FAKE_BOOTSTRAP_HOST)


def refuse_request(queue: Any, req: Any, reason: str) -> None:
    prepare_abort = import_module(TRANSFER_UTILS).prepare_abort
    prepare_abort(req, reason, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)
