"""Runs in vLLM's environment: makes the connector of what vLLM gives it, and says what came of it:
a line of JSON. Then with names of vLLM taken away, and with functions that take other arguments, as
another version may have them.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prefixkv.errors import ConfigError

BLOCK, NUM_BLOCKS = 16, 64
GONE = (
    ("vllm.utils.network_utils", "get_ip"),
    ("vllm.v1.core.kv_cache_utils", "get_block_hash"),
    ("vllm.v1.engine.core", "EngineCoreProc"),
)


def main() -> None:
    made = Made()
    _print(_apart(lambda: _use(made)))
    _print({name: _apart(partial(_remove, *one), _import) for one in GONE for name in one[1:]})
    _print({
        name: _apart(partial(_set_other, name), _import)
        for name in ("get_num_new_matched_tokens", "wait_for_save", "request_finished")
    })  # fmt: skip
    _print({"sleep": _sleep(made), "flags": _flags(), "groups": _groups(made)})


def _print(said: Any) -> None:
    print(json.dumps(said), flush=True)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _remove(module: str, name: str) -> None:
    delattr(_module(module), name)


def _import() -> None:
    import prefixkv.engines.vllm

    prefixkv.engines.vllm.PrefixKVConnector  # noqa: B018


def _set_other(name: str) -> None:
    """Has a method of vLLM's base class take one argument more."""
    base = _module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    before = getattr(base, name)
    code = f"def {name}(self, {', '.join(_names(before))}, of_the_next): ..."
    scope: dict[str, Any] = {}
    exec(code.replace("(self, , ", "(self, "), scope)
    setattr(base, name, scope[name])


def _names(function: Any) -> list[str]:
    return list(function.__code__.co_varnames[1 : function.__code__.co_argcount])


def config_folder() -> str:
    """Of a model of which only the configuration exists."""
    folder = tempfile.mkdtemp(prefix="prefixkv-config-")
    what = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 64, "vocab_size": 2048, "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }  # fmt: skip
    Path(folder, "config.json").write_text(json.dumps(what))
    return folder


class Made:
    """What vLLM gives a connector, made by the whole vLLM."""

    def __init__(self) -> None:
        from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.request import Request

        folder = config_folder()
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32"
        )
        # Another connector: ours is not to be imported yet.
        self.config: Any = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        )
        spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.kv = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        last = SlidingWindowSpec(
            BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=32
        )
        groups = [KVCacheGroupSpec(["last"], last), *self.kv.kv_cache_groups]
        self.windowed = KVCacheConfig(NUM_BLOCKS, [], groups)
        state = MambaSpec(
            block_size=BLOCK, shapes=((4, 64),), dtypes=(torch.float32,),
            page_size_padded=spec.page_size_bytes, mamba_cache_mode="align",
        )  # fmt: skip
        groups = [KVCacheGroupSpec(["state"], state), *self.kv.kv_cache_groups]
        self.stated = KVCacheConfig(NUM_BLOCKS, [], groups)
        self.pool: Any = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.request_of: Any = lambda: Request(
            "r", [*range(40)], SamplingParams(max_tokens=1), None
        )
        self.blocks: Any = KVCacheBlocks((self.pool.get_new_blocks(3),))


def _apart(*steps: Callable[[], Any]) -> Any:
    """What the last of these says, or the error of one, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said: Any = None
        try:
            for step in steps:
                said = step()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        said = json.loads(lines.read())
    os.waitpid(child, 0)
    return said


def _use(made: Made) -> dict[str, Any]:
    """What works of a scheduler's connector, with all options, and a worker's of each kind."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from prefixkv.engines.vllm import PrefixKVConnector
    from prefixkv.engines.vllm.extension import WorkerExtension

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.prefixkv").addHandler(handler)
    extra: dict[str, Any] = {"name": "drift", "bind": "tcp://*:14579"}
    made.config.kv_transfer_config.kv_connector_extra_config = extra
    for kv in (made.kv, made.windowed, made.stated):
        PrefixKVConnector(made.config, base.KVConnectorRole.WORKER, kv)
    extra |= {"host_memory": "4x", "policy": "lru"}
    connector = _scheduler(PrefixKVConnector, made, made.request_of())
    stats = connector.get_kv_connector_stats()
    connector.shutdown()
    return {
        "advertise": connector._options.advertise,
        "governed": "popleft_n" in vars(made.pool.free_block_queue),
        "rests": connector.wakeups is not None,
        "stats": None if stats is None else stats.data,
        "extension": hasattr(WorkerExtension, "prefixkv_lost_peers"),
        "lines": lines,
    }


def _flags() -> list[str]:
    """All options of vLLM's server."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return sorted(flag for action in parser._actions for flag in action.option_strings)


SHAPES = {
    "Gemma 3 27B": (10, 52, "window"), "GPT-OSS 120B": (18, 18, "window"),
    "Granite 4": (4, 36, "state"), "Qwen3-Next": (12, 36, "state"),
    "more windows": (12, 13, "window"), "more full": (24, 12, "window"), "chunk": (2, 4, "chunk"),
    "uncached state": (2, 4, "uncached state"), "heads": (2, 4, "heads"),
}  # fmt: skip
"""Layers that keep every token, others, and of which kind these are."""


def _groups(made: Made) -> dict[str, Any]:
    """What the connector makes of the groups that vLLM makes of a model's layers: by window group
    its layers, or why not."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        MambaSpec,
        SlidingWindowSpec,
    )

    from prefixkv.engines.vllm.groups import BlockGroups

    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full, last = FullAttentionSpec(BLOCK, **sizes), {"sliding_window": 64}
    state: dict[str, Any] = {
        "block_size": BLOCK, "shapes": ((4, 64),), "dtypes": (torch.float32,),
        "page_size_padded": full.page_size_bytes, "mamba_cache_mode": "align",
    }  # fmt: skip
    others = {
        "window": SlidingWindowSpec(BLOCK, **sizes, **last),
        "chunk": ChunkedLocalAttentionSpec(BLOCK, **sizes, attention_chunk_size=64),
        "state": MambaSpec(**state),
        "uncached state": MambaSpec(**{**state, "block_size": 736, "mamba_cache_mode": "none"}),
        "heads": SlidingWindowSpec(BLOCK, **{**sizes, "num_kv_heads": 1}, **last),
    }
    made.config.scheduler_config.disable_hybrid_kv_cache_manager = False  # another connector's
    made.config.cache_config.kv_cache_layout = "LBHNC"
    said: dict[str, Any] = {}
    for name, (num_full, num_other, kind) in SHAPES.items():
        # As they lie in a model: spread evenly.
        layers = sorted(
            [(i / num_full, f"full.{i}", full) for i in range(num_full)]
            + [((i + 0.5) / num_other, f"{kind}.{i}", others[kind]) for i in range(num_other)]
        )
        try:
            groups = get_kv_cache_groups(made.config, {layer: spec for _, layer, spec in layers})
            windows = BlockGroups.of(KVCacheConfig(NUM_BLOCKS, [], groups)).windows
            said[name] = [len(groups[one.number].layer_names) for one in windows]
        except ConfigError as error:
            said[name] = str(error)
    return said


def _sleep(made: Made) -> dict[str, Any]:
    """What the connector says of sleep mode, and of the release of its memory, by device."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from prefixkv.engines.vllm import PrefixKVConnector

    transfer = made.config.kv_transfer_config
    transfer.kv_connector_extra_config = {"name": "sleep"}
    said: dict[str, Any] = {"supported": PrefixKVConnector.supports_sleep_mode(transfer)}
    connector = PrefixKVConnector(made.config, base.KVConnectorRole.WORKER, made.kv)
    for device in ("meta", "cpu"):
        connector._kv_caches = {"layer": torch.zeros(1, device=device)}
        try:
            connector.unregister_kv_caches()
        except ConfigError as error:
            said[device] = str(error)
    made.config.model_config.enable_sleep_mode = True
    made.config.device_config.device_type = "cuda"
    try:
        PrefixKVConnector(made.config, base.KVConnectorRole.WORKER, made.kv)
    except ConfigError as error:
        said["cuda"] = str(error)
    return said


def _scheduler(kind: Any, made: Made, request: Any) -> Any:
    """A scheduler's connector that has served a request."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    connector = kind(made.config, base.KVConnectorRole.SCHEDULER, made.kv)
    connector.bind_gpu_block_pool(made.pool)
    request.kv_transfer_params = {
        "do_remote_prefill": True, "room": 1, "prefill": "tcp://127.0.0.1:1"
    }  # fmt: skip
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (40, True)
    connector.update_state_after_alloc(request, made.blocks, 40)
    connector.request_finished(request, [1, 2, 3])
    return connector


if __name__ == "__main__":
    sys.exit(main())
