"""Runs in vLLM's workers (`--worker-extension-cls`): makes a token's embedding NaN for a moment."""

from typing import Any


class Spoiler:
    """Methods of each worker, for vLLM's `collective_rpc`."""

    def spoil(self: Any, token: int) -> None:
        """From now on every prompt with this token has NaN from there on, until `heal`."""
        weight = self.get_model().model.embed_tokens.weight.data
        self.healthy = weight[token].clone()
        weight[token] = float("nan")

    def heal(self: Any, token: int) -> None:
        self.get_model().model.embed_tokens.weight.data[token] = self.healthy
