"""prefixkv inside vLLM: a KV connector that pushes what a decode server lacks of a prompt while a
prefill server computes it. See docs/vllm.md.

    --kv-transfer-config '{"kv_connector": "PrefixKVConnector",
        "kv_connector_module_path": "prefixkv.engines.vllm", "kv_role": "kv_producer", ...}'

Only `compat` imports vLLM, and says by name what a version of it lacks; `connector`, `metrics` and
`block_queue` have it from there, and are imported when the connector is asked for. `scheduler` and
`worker` are the two sides, and know vLLM's objects by their attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixkv.engines.vllm.connector import PrefixKVConnector as PrefixKVConnector

__all__ = ["PrefixKVConnector"]


def __getattr__(name: str) -> Any:
    if name != "PrefixKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefixkv.engines.vllm.connector import PrefixKVConnector

    globals()[name] = PrefixKVConnector
    return PrefixKVConnector
