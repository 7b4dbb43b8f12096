"""Tensors as engines hand them over: torch's own, or numpy arrays, whose memory is shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from prefixkv.errors import ConfigError

TensorLike: TypeAlias = torch.Tensor | npt.NDArray[Any]

_ARRAYS: Final = (np.ndarray, np.memmap)
"""Classes of numpy arrays that are taken. Others, masked ones say, are more than memory."""


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a dense torch tensor, or a writable numpy array, as a torch tensor on the same memory,
    which it keeps alive. Raises ConfigError, with `name`, for anything else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise ConfigError(f"{name} is a tensor of {value.layout}, a dense one is needed")
        return value.detach() if value.requires_grad else value
    if type(value) not in _ARRAYS:
        raise ConfigError(
            f"{name} is a {type(value).__name__}, a torch tensor (or a numpy array, the memory of "
            "which is used as it is) is needed"
        )
    # A peer's bytes are written into it.
    if not value.flags.writeable:
        raise ConfigError(f"{name} is a numpy array that must not be written")
    try:
        return torch.from_numpy(value)
    # Another byte order, strides below 0, a dtype that torch has not.
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is a numpy array of {value.dtype}: {error}") from None


def as_tensors(name: str, values: Any) -> list[torch.Tensor]:
    """Return a sequence of tensors; one tensor counts as the sequence of its parts. Raises as
    `as_tensor`."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = list(as_tensor(name, values)) if values.ndim else [values]
    elif not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ConfigError(f"{name} is a {type(values).__name__}, a list of tensors is needed")
    return [as_tensor(f"{name}[{i}]", value) for i, value in enumerate(values)]
