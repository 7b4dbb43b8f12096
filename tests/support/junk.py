"""What no call asks for: wrong types, numbers out of range, what raises when it is used."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from prefixkv.errors import CallerError, CapacityError, shown

EXAMPLES = int(os.environ.get("PREFIXKV_JUNK_EXAMPLES", "60"))  # more for a long run
Arguments = tuple[list[Any], dict[str, Any]]


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


def with_junk(
    data: st.DataObject,
    args: Sequence[Any],
    named: dict[str, Any],
    num_odd: int = 0,
    most: int = 99,
) -> dict[int | str, Any]:
    """Draw junk for up to `most` arguments, by place or name. Of `num_odd` objects that a test has
    it draws the number, as `Odd`: how far they are differs from run to run."""
    drawn = st.one_of(JUNK, st.builds(Odd, st.integers(0, num_odd - 1))) if num_odd else JUNK
    places = st.sampled_from([*range(len(args)), *named])
    return {
        place: data.draw(drawn)
        for place in sorted(data.draw(st.sets(places, min_size=1, max_size=most)), key=str)
    }


class Odd(int):
    """The number of an object of a right type for another place."""


def put(
    junk: dict[int | str, Any], args: Sequence[Any], named: dict[str, Any], odd: Sequence[Any] = ()
) -> Arguments:
    """The arguments with that junk among them."""
    wrong = {at: odd[one % len(odd)] if isinstance(one, Odd) else one for at, one in junk.items()}
    return (
        [wrong.get(at, one) for at, one in enumerate(args)],
        {name: wrong.get(name, one) for name, one in named.items()},
    )


def is_taken(name: str, call: Callable[..., Any], args: Sequence[Any], named: Any) -> bool:
    """Whether the call took these; False: it raised what it may: a caller's mistake, or what an
    object of the caller's raises."""
    try:
        call(*args, **named)
    except (CallerError, CapacityError, OwnError):
        return False
    except Exception as error:
        raise AssertionError(f"{name}: {shown((args, named))} raised {error!r}") from error
    return True
