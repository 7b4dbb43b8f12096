"""The identity of a model: a digest of its config, and one of every number of its weights.

Two models may use each other's KV where both digests are equal. Neither depends on the location of
the files, or on how the tensors are spread over them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from prefixkv import ModelConfig

PIECE_BYTES: Final = 32 << 20
"""Bytes of a tensor that one thread hashes at a time."""
_DIGEST_BYTES: Final = 16
_NOT_THE_MODELS: Final = frozenset({"_name_or_path", "transformers_version", "architectures"})
"""Keys of a config, at any depth, that describe its origin and not the model."""


def identity_of(model: Any) -> ModelConfig:
    """Return name and version, by config and weights. Reads all weights: see `weights_digest`."""
    kind = type(model).__name__
    return ModelConfig(f"{kind} {config_digest(model.config)}", weights_digest(model))


def config_digest(config: Any) -> str:
    """Equal wherever the config was loaded from."""
    text = json.dumps(_without_origin(config.to_dict()), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def weights_digest(model: Any) -> str:
    """Return a digest of the names, dtypes, shapes and bytes of all tensors. Reads all weights, by
    one thread per core; from a GPU they are copied to the host, tensor by tensor."""
    # Sorted by name: the order of a state dict is that of the model's construction.
    entries = sorted(model.state_dict().items())
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with ThreadPoolExecutor(_num_threads(), "prefixkv-digest") as pool:
        # One tensor after the other, so that at most one copy from another device exists.
        for name, value in entries:
            if isinstance(value, torch.Tensor):
                head: tuple[Any, ...] = (name, str(value.dtype), tuple(value.shape))
                pieces = pool.map(_hash_piece, _pieces(value))
            else:  # a module's own kind of state (`get_extra_state`)
                head, pieces = (name, repr(value)), iter(())
            whole.update(repr(head).encode())
            for piece in pieces:
                whole.update(piece)
    return whole.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    view = memoryview(raw)  # type: ignore[arg-type]  # numpy's stub says no Buffer
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def _hash_piece(piece: memoryview) -> bytes:
    return hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest()  # without the GIL


def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _without_origin(value: Any) -> Any:
    """Return the value without the keys that describe its origin, at any depth."""
    if isinstance(value, dict):
        kept = {str(key): _without_origin(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if key not in _NOT_THE_MODELS}
    if isinstance(value, list | tuple):
        return [_without_origin(one) for one in value]
    return value
