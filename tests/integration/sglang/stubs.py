"""Loads SGLang's caches, allocators and pools from its wheel alone.

Of what they import, the parts that need a GPU, a model or a server are replaced: a module that is
named here as fake has every attribute, and none of them does anything. What the tests stand on is
SGLang's own code: trees, the Rust core, allocators, the request pool, the functions that match,
checkpoint and release a request's KV, the recorder of events, the registries.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

BARE = (  # packages whose own code imports too much; their modules are real
    "sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.mem_cache",
    "sglang.srt.disaggregation", "sglang.srt.managers", "sglang.srt.observability",
)  # fmt: skip

FAKE = (
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.hardware_backend",
    "sglang.srt.layers",
    "sglang.srt.managers.cache_controller",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.utils",
    "sglang.srt.mem_cache.buffer_mode",
    "sglang.srt.mem_cache.hicache_key_scheme",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.hybrid_cache",
    "sglang.srt.mem_cache.kv_vmm_backing",
    "sglang.srt.mem_cache.layout",
    "sglang.srt.mem_cache.mamba_checkpoint_pool",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage_prefetch",
    "sglang.srt.mem_cache.unified_cache.storage_attachment",
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker",
    "sglang.srt.multimodal",
    "sglang.srt.observability.metrics_collector",
    "sglang.srt.platforms",
    "sglang.srt.runtime_context",
    "sglang.srt.server_args",
    "sglang.srt.session",
    "sglang.srt.utils.async_probe",
    "sglang.srt.utils.common",
    "sglang.srt.utils.poll_timer",
    "sglang.srt.utils.rank_consensus_checker",
    "sglang.srt.utils.torch_memory_saver_adapter",
    "sglang.utils",
)

CONTEXT = SimpleNamespace(
    disagg=SimpleNamespace(
        disaggregation_mode="null",
        disaggregation_decode_retraction_backup="cpu_tensor",
        disaggregation_decode_enable_offload_kvcache=False,
        disaggregation_decode_enable_radix_cache=True,
        disaggregation_decode_host_receive_threshold=1.0,
        disaggregation_decode_allocation_policy="early",
        disaggregation_enable_kv_checksum=False,
        disaggregation_transfer_backend="prefixkv",
        disaggregation_bootstrap_port=0,
    ),
    device=SimpleNamespace(device="cpu", gpu_id=0),
    memory=SimpleNamespace(
        radix_cache_backend="prefixkv",
        radix_eviction_policy="lru",
        hicache_host_memory_mode="cache",
        enable_hierarchical_cache=False,
        enable_lmcache=False,
        enable_flexkv=False,
        enable_unified_cache_external_linker=False,
        enable_hisparse=False,
        enable_session_radix_cache=False,
    ),
    serving=SimpleNamespace(
        strip_thinking_cache=False, enable_streaming_session=False, host="127.0.0.1", port=30000
    ),
    spec=SimpleNamespace(speculative_algorithm=None),
    observability=SimpleNamespace(extra_metric_labels=None, enable_trace=False),
    parallel=SimpleNamespace(
        tp_size=1,
        tp_rank=0,
        pp_size=1,
        pp_rank=0,
        dp_size=1,
        num_dp_ranks=1,
        nnodes=1,
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_cp_size=1,
        attn_cp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        attn_dcp_size=1,
        attn_dcp_rank=0,
        dist_init_addr=None,
        pp_group=None,
        enable_kv_cache_sharding=False,
        enable_dsa_cache_layer_split=False,
        enable_cp_tp_group_sharing=False,
        load_balance_method="follow_bootstrap_room",
        attn_tp_group=SimpleNamespace(cpu_group=None),
    ),
    exec=SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1)),
)
"""What SGLang's modules are told of the server's options; tests change it, and change it back."""

HERE = threading.local()
"""`parallel`, where it is set: what a thread that makes a rank of several is told instead."""


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _thing(name)
        setattr(cls, name, made)
        return made


def _thing(name: str) -> Any:
    if name.startswith("is_"):  # a platform, a build: this is none
        return lambda *_args, **_named: False
    return _Anything(name, (), {"__init__": lambda self, *args, **named: None})


class _Fake(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _thing(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == fake or name.startswith(f"{fake}.") for fake in FAKE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Fake(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in _SAID.get(module.__name__, {}).items():
            setattr(module, name, value)


def _ceil_align(number: int, step: int) -> int:
    return -(-number // step) * step


def _new_pages(seq_lens: Any, page_size: int, prefix_lens: Any = None, decode: bool = False) -> int:
    """How many pages a step allocates."""
    if decode:
        return int((seq_lens % page_size == 1).sum()) if page_size > 1 else len(seq_lens)
    ends = (seq_lens + page_size - 1) // page_size
    starts = (prefix_lens + page_size - 1) // page_size
    return int((ends - starts).sum())


class _Session:
    """No request has a session."""

    def __init__(self, _cache: Any) -> None:
        self.slots: dict[str, Any] = {}

    def try_match_prefix(self, _params: Any) -> None: ...

    def try_checkpoint(self, *_args: Any, **_named: Any) -> bool:
        return False

    def take(self, _req: Any) -> None: ...

    def try_cache_finished_req(self, _req: Any) -> bool:
        return False

    def borrowed_slot(self, _req: Any) -> None: ...


def _consensus(*args: Any, **_named: Any) -> Any:
    return args[0] if args and callable(args[0]) else lambda func: func


_SAID: dict[str, dict[str, Any]] = {
    "sglang.srt.utils.common": {
        "ceil_align": _ceil_align,
        "async_h2d": lambda values, dtype, device: __import__("torch").tensor(values, dtype=dtype),
    },
    "sglang.srt.utils.rank_consensus_checker": {"rank_consensus": _consensus},
    "sglang.srt.utils.torch_memory_saver_adapter": {
        "TorchMemorySaverAdapter": SimpleNamespace(
            create=lambda enable: SimpleNamespace(region=lambda *_args, **_named: nullcontext())
        )
    },
    "sglang.srt.platforms": {
        "current_platform": SimpleNamespace(
            capabilities=SimpleNamespace(supports_triton=False), is_cuda_alike=lambda: False
        )
    },
    "sglang.srt.hardware_backend.mlx.runtime": {"use_mlx": lambda: False},
    "sglang.srt.session.streaming_session": {
        "StreamingSession": _Session, "is_virtual_node": lambda _node: False,
    },
    "sglang.srt.runtime_context": {
        **{f"get_{name}": lambda name=name: getattr(CONTEXT, name) for name in vars(CONTEXT)},
        "get_parallel": lambda: getattr(HERE, "parallel", CONTEXT.parallel),
        "mamba_cache_chunk_size": lambda: 64,
    },
}  # fmt: skip


def _assert_int64_array(values: Any, what: str = "") -> None:
    assert values.typecode == "q", what


_UTILS = {
    "ceil_align": _ceil_align,
    "assert_int64_array": _assert_int64_array,
    "get_bool_env_var": lambda name, default="false": False,
    "get_num_new_pages": _new_pages,
    "next_power_of_2": lambda number: 1 << (number - 1).bit_length(),
}


def install(bare: Sequence[str] = BARE) -> None:
    """Before anything of SGLang is imported."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = Path(found.submodule_search_locations[0])
    sys.meta_path.insert(0, _Finder())
    for name in bare:
        module = _Fake(name) if name == "sglang.srt.utils" else ModuleType(name)
        place = str(root.joinpath(*name.split(".")[1:]))
        module.__path__ = [place]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__spec__.submodule_search_locations = [place]
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    for name, value in _UTILS.items():
        setattr(sys.modules["sglang.srt.utils"], name, value)
    # A server has it of transformers, which gives it to every logger.
    logging.Logger.warning_once = logging.Logger.warning  # type: ignore[attr-defined]
