"""A device that torch does not have here, for SGLang's pools: its tensors are in host memory, and
what reads them counts.

A read that waits for the device is counted in `reads`, a copy to it from pageable memory in
`pageable`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME = "lazy"  # torch knows the name, and loads nothing for it
aten = torch.ops.aten


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    backing: torch.Tensor

    @staticmethod
    def __new__(cls, backing: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, backing.shape, strides=backing.stride(), dtype=backing.dtype,
            storage_offset=backing.storage_offset(), device=torch.device(NAME, 0),
        )  # fmt: skip
        made.backing = backing
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<on the device: {self.backing!r}>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the device's `with`")


def on_host(tensor: torch.Tensor) -> Any:
    """What a test sees of a tensor, wherever it is."""
    return getattr(tensor, "backing", tensor).numpy()


class Device(TorchDispatchMode):
    """Within it, tensors may be on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.pageable = 0
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that it stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = [*args, *kwargs.values()]
        flat += [one for some in flat if isinstance(some, list | tuple) for one in some]
        there = any(isinstance(one, OnDevice) for one in flat)
        target = kwargs.get("device")
        to_host = target is not None and target.type == "cpu"
        if target is not None and target.type == NAME:
            kwargs["device"], there = torch.device("cpu"), True
            if func is aten._to_copy.default and not isinstance(args[0], OnDevice):
                self.pageable += not self._is_pinned(args[0])
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self._pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        if func is aten.copy_.default and isinstance(args[1], OnDevice) > isinstance(
            args[0], OnDevice
        ):
            self.reads += 1
            args[0].copy_(args[1].backing)
            return args[0]
        if there and (to_host or func in (aten._local_scalar_dense.default, aten.equal.default)):
            self.reads += 1
            there = False
        result = func(*tree_map(_backing, args), **tree_map(_backing, kwargs))
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map(_wrapped, result) if there else result

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or tensor.data_ptr() in self._pinned


def _backing(value: Any) -> Any:
    return value.backing if isinstance(value, OnDevice) else value


def _wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value
