"""A KV connector for vLLM: it pushes the blocks that a decode server lacks of a prompt while a
prefill server computes it. See docs/vllm.md.

    --kv-transfer-config '{"kv_connector": "PrefixKVConnector",
        "kv_connector_module_path": "prefixkv.engines.vllm", "kv_role": "kv_producer", ...}'

Only `compat` imports vLLM, and names what a version of it lacks. `connector`, `metrics` and
`block_queue` take vLLM's classes from there, and are imported when the connector is asked for.
`scheduler` and `worker` are the two sides; they use vLLM's objects by attribute, without imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixkv.engines.vllm.connector import PrefixKVConnector as PrefixKVConnector

__all__ = ["PrefixKVConnector"]


def __getattr__(name: str) -> Any:
    # Lazy, so that importing `prefixkv.engines.vllm` works where vLLM is not installed, and so that
    # `compat` can report a missing class as a ConfigError when the connector is really wanted.
    if name != "PrefixKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefixkv.engines.vllm.connector import PrefixKVConnector

    globals()[name] = PrefixKVConnector
    return PrefixKVConnector
