"""What an operator or a supervisor asks of a server's workers, by vLLM's own way of calling them:

    --worker-extension-cls prefixkv.engines.vllm.extension.WorkerExtension

vLLM mixes the class into its workers, so `LLM.collective_rpc("prefixkv_fence", args=(peer, life))`
reaches it, and, where vLLM's development routes are open, HTTP (docs/vllm.md).
"""

from __future__ import annotations

from typing import Any

from prefixkv.engines.vllm import compat


class WorkerExtension:
    """Methods of each worker. Called between steps, in the worker's own thread."""

    def prefixkv_lost_peers(self) -> list[dict[str, Any]]:
        """Peers that are silent or over and still hold something here: `peer` and `life`, its name
        and which life of it; `why`; `held`, pages on decode and rooms on prefill."""
        found: list[dict[str, Any]] = _side().lost_peers()
        return found

    def prefixkv_fence(self, peer: str, life: str) -> None:
        """The caller knows that this process is dead: what it held is free. `peer` and `life` as
        `prefixkv_lost_peers` and the log name them.

        Fencing one that lives loses its transfers, and may let it write into blocks that are
        another request's.
        """
        _side().fence(peer, life)

    def prefixkv_move_weights(self, weights_version: str) -> None:
        """The weights were changed in place, and are of this version now: transfers under way end,
        and none is begun with a server of another version. For a vLLM that has no weight version of
        its own; call it while nothing runs, with the prefix cache reset."""
        _side().move_weights(weights_version)


def _side() -> Any:
    return compat.require(compat.FENCING).get_kv_transfer_group().worker
