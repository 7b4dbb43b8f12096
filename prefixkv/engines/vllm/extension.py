"""Methods of a server's workers for an operator or a supervisor, called through vLLM:

    --worker-extension-cls prefixkv.engines.vllm.extension.WorkerExtension

`LLM.collective_rpc("prefixkv_fence", args=(peer, life))` reaches them, and, where vLLM's
development routes are open, HTTP (docs/vllm.md).
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into each worker. Called between steps, in the worker's thread."""

    def prefixkv_lost_peers(self) -> list[dict[str, Any]]:
        """Return the peers that are silent or dead, and still hold something here. Per peer:
        `peer`, its name; `life`, its incarnation in hexadecimal; `why`; `held`, a number of pages
        on decode and of rooms on prefill."""
        return _side().lost_peers()  # type: ignore[no-any-return]

    def prefixkv_fence(self, peer: str, life: str) -> None:
        """Free all that a process holds which the operator knows to be dead, named as in
        `prefixkv_lost_peers` and the log. Fencing a live process loses its transfers, and may let
        it write into blocks that belong to another request."""
        _side().fence(peer, life)

    def prefixkv_move_weights(self, weights_version: str) -> None:
        """Move to another weights version, after weights were changed in place: transfers under way
        end, and none begins with a server of another version. For a server that vLLM's own weight
        version does not reach; call it while nothing runs, with the prefix cache reset."""
        _side().move_weights(weights_version)


def _side() -> Any:
    from prefixkv.engines.vllm.compat import get_kv_transfer_group

    return get_kv_transfer_group().worker
