"""A KV connector for vLLM: it pushes the blocks that a decode server lacks of a prompt while a
prefill server computes it. See docs/vllm.md.

    --kv-transfer-config '{"kv_connector": "PrefixKVConnector",
        "kv_connector_module_path": "prefixkv.engines.vllm", "kv_role": "kv_producer", ...}'

Only `compat` imports vLLM; `connector`, `hooks` and `extension` take its names from
there. `scheduler` and `worker` are the two sides; they use vLLM's objects by attribute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixkv.engines.vllm.versions import RANGE, check_version, installed_version

if TYPE_CHECKING:
    from prefixkv.engines.vllm.connector import PrefixKVConnector as PrefixKVConnector

__all__ = ["PrefixKVConnector"]


def __getattr__(name: str) -> Any:
    # Lazy, so that importing `prefixkv.engines.vllm` works where vLLM is not installed.
    if name != "PrefixKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    try:
        from prefixkv.engines.vllm.connector import PrefixKVConnector
    except ImportError as error:
        raise ImportError(f"vLLM {installed_version()}: {error}. {RANGE}") from error
    globals()[name] = PrefixKVConnector
    return PrefixKVConnector
