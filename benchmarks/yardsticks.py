"""Fixed work, to hold the scheduler's figures against: two loops that tell one machine from
another, and the least that an admission is made of, whatever the scheduler around it looks like.
And what keeps the garbage collector out of a timing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from prefixkv.digest import prompt_digest
from prefixkv.protocol.commands import DecodeCommand, OpenRoom
from prefixkv.protocol.messages import Promise

_PAGE_IDS = np.arange(128)
_STATES = np.zeros(1 << 16, np.uint8)


@contextmanager
def no_collector() -> Iterator[None]:
    """Collect garbage now, and none in what follows."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def python_loop() -> int:
    """1000 turns of a loop of Python's own, over a dictionary."""
    total, places = 0, {}
    for at in range(1000):
        places[at & 63] = total
        total += len(places)
    return total


def numpy_loop() -> None:
    """100 times 128 elements of an array set, and as many numbers added to and sorted."""
    for _ in range(100):
        _STATES[_PAGE_IDS] = 1
        (_PAGE_IDS + 1).sort()


class LeastAdmission:
    """What is cached compared, copied once to be split, other pages taken, a row written, a message
    made: no more."""

    def __init__(
        self, tokens: npt.NDArray[np.int32], cached_tokens: int, page_size: int, pool_pages: int
    ) -> None:
        self._lens = len(tokens), cached_tokens
        self._data = tokens.tobytes()
        self._key = tokens[:cached_tokens].tobytes()
        self._num_locked, self._num_pages = cached_tokens // page_size, len(tokens) // page_size
        self._locked = np.arange(self._num_locked, dtype=np.int32).tobytes()
        self._state = np.zeros(pool_pages, np.uint8)
        self._row = np.full(self._num_pages, -1, np.int32)
        self._digest = prompt_digest([])
        self._commands: dict[int, DecodeCommand] = {}

    def make(self) -> None:
        """One such admission, of no request."""
        assert self._data.startswith(self._key)
        bytes(memoryview(self._data)[: len(self._key)])
        new = np.arange(self._num_locked, self._num_pages)
        self._state[new] = 1
        self._row[: self._num_locked] = np.frombuffer(self._locked, np.int32)
        self._row[self._num_locked :] = new
        promise = Promise(1, 0, *self._lens, self._row[self._num_locked :].tobytes(), 1)
        self._commands[1] = OpenRoom(promise, "tcp://127.0.0.1:1", self._digest)
