"""A device that torch does not have here, for SGLang's pools: its tensors are in host memory, and
what reads them counts.

As on a GPU, a copy into pinned memory comes later: until its event is waited for, or has come by
itself, the memory holds something else. What is copied is what was there when it was queued. A read
that waits for the device is counted in `reads`, a copy to it from pageable memory in `pageable`.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME = "lazy"  # torch knows the name, and loads nothing for it
POISON = -(1 << 30)
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
    """Within it, tensors may be on the device.

    Args:
        seed: of when copies come by themselves.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.reads = self.pageable = 0
        self._rng = random.Random(seed)
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_done = 0
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that it stays its own

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = SimpleNamespace(Event=lambda: Event(self))
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def run(self, upto: int) -> None:
        """Copies come, up to this one."""
        while self._num_done < upto:
            host, values = self._queued[self._num_done]
            host.copy_(values)
            self._num_done += 1

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
            return self._copy_back(args[0], args[1], *args[2:], **kwargs)
        if there and (to_host or func in (aten._local_scalar_dense.default, aten.equal.default)):
            self._wait()
            there = False
        result = func(*tree_map(_backing, args), **tree_map(_backing, kwargs))
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map(_wrapped, result) if there else result

    def _copy_back(
        self, host: torch.Tensor, source: OnDevice, non_blocking: bool = False
    ) -> torch.Tensor:
        if non_blocking and self._is_pinned(host):
            self._queued.append((host, source.backing.clone()))
            host.fill_(POISON)
        else:
            self._wait()
            host.copy_(source.backing)
        return host

    def _wait(self) -> None:
        self.reads += 1  # and no queued copy comes by that: they might be on another stream

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or tensor.data_ptr() in self._pinned


class Event:
    """After what was queued when it was recorded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._upto = 0

    def record(self) -> None:
        self._upto = len(self._device._queued)

    def query(self) -> bool:
        if self._device._rng.random() < 0.5:
            self._device.run(self._upto)
        return self._device._num_done >= self._upto

    def synchronize(self) -> None:
        self._device.run(self._upto)


def _backing(value: Any) -> Any:
    return value.backing if isinstance(value, OnDevice) else value


def _wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(np.array_equal(on_host(first), on_host(second)))
