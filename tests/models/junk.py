"""What no call asks for: wrong types, numbers out of range, what raises when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st


class Broken:
    """An event that cannot be asked."""

    def query(self) -> bool:
        raise OSError("the device is gone")

    def __repr__(self) -> str:
        return "Broken()"


def half(*values: Any) -> Iterator[Any]:
    """Gives these, and raises."""
    yield from values
    raise OSError("half way")


class Half(list[Any]):
    """A list that can be counted, and not be read to its end."""

    def __iter__(self) -> Iterator[Any]:
        return half(*self[:1])


_MAKE = {
    "half a generator": lambda: half(1, 2),
    "half a list": lambda: Half([1, 2]),
    "an object": object,
    "a broken event": Broken,
    "a list": lambda: [1],
    "an unhashable list": lambda: [[]],
    "an array": lambda: np.array([1, 2]),
    "a float array": lambda: np.array([0.5]),
    "a negative array": lambda: np.array([-1]),
    "a dictionary": dict,
}

JUNK = st.one_of(
    st.sampled_from(
        [None, "", "text", b"bytes", -1, 0, 1, 3, 2**31, 2**40, 2**70, 1.5, float("nan"),
         float("inf"), True, (), np.int64(3), np.float32(2.0)],
    ),
    st.sampled_from(sorted(_MAKE)).map(lambda name: _MAKE[name]()),
)  # fmt: skip
