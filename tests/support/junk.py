"""What no call asks for: wrong types, numbers out of range, what raises when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st


class OwnError(OSError):
    """What the caller's own object raises when it is used: a call lets it through as it is."""


class Broken:
    """An event that cannot be asked."""

    def query(self) -> bool:
        raise OwnError("the device is gone")

    def __repr__(self) -> str:
        return "Broken()"


class Mute:
    """An object that does not print."""

    def __repr__(self) -> str:
        raise OwnError("mute")


def half(*values: Any) -> Iterator[Any]:
    """Gives these, and raises."""
    yield from values
    raise OwnError("half way")


class Half(list[Any]):
    """A list that can be counted, and not be read to its end."""

    def __iter__(self) -> Iterator[Any]:
        return half(*self[:1])


class OwnDict(dict[Any, Any]):
    """A dictionary of a class of its own."""


_MAKE = {
    "half a generator": lambda: half(1, 2),
    "half a list": lambda: Half([1, 2]),
    "an object": object,
    "a mute object": Mute,
    "a broken event": Broken,
    "a list": lambda: [1],
    "an unhashable list": lambda: [[]],
    "a ragged list": lambda: [[1], [2, 3]],
    "an array": lambda: np.array([1, 2]),
    "a float array": lambda: np.array([0.5]),
    "a negative array": lambda: np.array([-1]),
    "an array without dimensions": lambda: np.array(3),
    "a tensor": lambda: torch.tensor([1, 2]),
    "a tensor that numpy has not": lambda: torch.zeros(2, dtype=torch.bfloat16),
    "a dictionary": dict,
    "a dictionary of its own": lambda: OwnDict({1: 2}),
    "a set": lambda: {1, 2},
}

_PLAIN = [
    None, "", "text", b"bytes", -1, 0, 1, 3, 2**31, 2**40, 2**70, 10**4400, 1.5, -0.5,
    float("nan"), float("inf"), True, (), (1, 2), 1j, np.int64(3), np.float32(2.0),
    np.bool_(True), "\ud800", "a\x00b", int, len,
]  # fmt: skip

JUNK = st.one_of(
    st.sampled_from(_PLAIN), st.sampled_from(sorted(_MAKE)).map(lambda name: _MAKE[name]())
)


def each_junk() -> Iterator[Any]:
    """Yield each of what `JUNK` draws from, newly made."""
    yield from _PLAIN
    for make in _MAKE.values():
        yield make()
