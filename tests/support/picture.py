"""The whole state of an object as plain values, so that two moments can be compared: all that it
reaches, the same object twice as the same number. What a look may change is left out."""

import types
from array import array
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np

from prefixkv.cache.eviction.policy import Use
from prefixkv.cache.radix_key import RadixKey
from prefixkv.errors import UserErrors

_PLAIN = (int, float, str, bytes, bool, type(None), complex, Enum, type)
_CODE = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
    types.MethodWrapperType, types.MethodDescriptorType,
)  # fmt: skip


def picture(*things: Any) -> Any:
    """A tree of tuples that is equal for two moments if nothing has changed between them.

    Left out: what a `UserErrors` has caught, the `Use` that a cache fills in anew each time, code.
    """
    return tuple(_of(thing, {}, []) for thing in things)


def _of(thing: Any, seen: dict[int, int], keep: list[Any]) -> Any:
    if isinstance(thing, float) and thing != thing:
        return "nan"
    if isinstance(thing, _PLAIN):
        return thing
    if isinstance(thing, _CODE):
        return "code", id(thing) if isinstance(thing, types.FunctionType) else ""
    if isinstance(thing, UserErrors | Use):
        return type(thing).__name__
    if id(thing) in seen:
        return "again", seen[id(thing)]
    seen[id(thing)] = len(seen)
    keep.append(thing)  # else its id may be another's
    return type(thing).__name__, tuple(_of(part, seen, keep) for part in _parts(thing))


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, RadixKey):
        yield from (thing.data, thing.namespace)
    elif isinstance(thing, np.ndarray):
        yield from (str(thing.dtype), thing.shape, thing.tobytes())
    elif isinstance(thing, bytearray | memoryview | array):
        yield bytes(thing)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield key
            yield value
    elif isinstance(thing, set | frozenset):
        yield from sorted(map(repr, thing))
    elif hasattr(thing, "__iter__") and hasattr(thing, "__len__"):  # lists, tuples, sorted ones
        yield from thing
    for name, value in sorted(_fields(thing)):
        yield name
        yield value


def _fields(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict | np.ndarray) or type(thing).__module__.startswith(
        "sortedcontainers"
    ):
        return
    if isinstance(thing, RadixKey):
        return
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(thing, name):
                yield name, getattr(thing, name)
