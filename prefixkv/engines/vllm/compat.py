"""All that the connector imports of vLLM. Importing it raises ImportError for a name that is not
there, and ConfigError for a function whose stand-in takes other arguments."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.network_utils import get_ip
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import RequestStatus

from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.host import HostEvent
from prefixkv.engines.vllm.versions import installed_version

WAKEUP = (EngineCoreRequestType.WAKEUP, None)  # an input of which the engine does nothing


def unwatched() -> AbstractContextManager[None]:
    """Return a context without the watch dog of 0.33, which takes a resting engine for stuck."""
    try:
        from vllm.utils.watch_dog import get_watch_dog
    except ImportError:
        return nullcontext()
    paused: AbstractContextManager[None] = get_watch_dog().disable()
    return paused


def reached_at(bind: str) -> str:
    """Return a wildcard address with the host's own (VLLM_HOST_IP, if it is set) in its place."""
    host, port = get_ip(), bind.rpartition(":")[2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_events(events: Iterable[HostEvent], block_size: int) -> list[Any]:
    convert, found = maybe_convert_block_hash, []
    for event in events:
        hashes = [convert(one) for one in event.hashes]
        if not event.is_stored:
            found.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU))
            continue
        first = event.blocks[0]
        found.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if first.parent is None else convert(first.parent),
                token_ids=event.tokens,
                block_size=block_size,
                lora_id=first.adapter and first.adapter.adapter_id,
                medium=MEDIUM_CPU,
                lora_name=first.adapter and first.adapter.name,
                extra_keys=[block.extra_keys for block in event.blocks],
            )
        )
    return found


def backends_of(config: Any, kv_cache: Any) -> list[str]:
    names = [name for group in kv_cache.kv_cache_groups for name in group.layer_names]
    layers = get_layers_from_vllm_config(config, AttentionLayerBase, names)
    return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})


def block_format(config: Any, kv_cache: Any, groups: BlockGroups, backends: list[str]) -> str:
    """Return a tag, equal on both servers, of all that the bytes of blocks depend on besides shape
    and element type: the version, the kernels, their packing (on CPUs it depends on the
    instructions), quantization. `OPTION_NAMES` maps each word to the option that sets it."""
    # The version too: kernels may pack differently in the next one, and no name would show it.
    # Blocks of all groups are alike, but for states.
    spec = groups.spec
    words = {
        "vllm": installed_version(),
        "kernels": "+".join(backends),
        "layout": kv_cache.kv_cache_layout,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "quantization": spec.kv_quant_mode.name,
        "head_size": spec.head_size,
        "dtype": str(spec.dtype).removeprefix("torch."),
    }
    # These two modules load kernels and layers, which other servers do without.
    if "CPU_ATTN" in backends:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        words["instructions"] = _get_attn_isa(
            config.model_config.dtype,
            spec.block_size,
            spec.head_size,
            config.cache_config.cache_dtype,
        )
    if groups.has_states:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

        states = [kv_cache.kv_cache_groups[one.number].kv_cache_spec for one in groups.windows]
        names = {str(dtype).removeprefix("torch.") for spec in states for dtype in spec.dtypes}
        words["state_dtypes"] = "+".join(sorted(names))
        words["state_layout"] = get_conv_state_layout()
    return " ".join(f"{key}={value}" for key, value in words.items())


def gather(given: object) -> list[object]:
    # The CPU group: objects are gathered at start-up only, without use of a device.
    group = get_tp_group()
    found: list[object] = [None] * group.world_size
    torch.distributed.all_gather_object(found, given, group=group.cpu_group)
    return found
