"""Rooms of a prefill and a decode server over real NIXL, with pools at addresses, as SGLang tells
them."""

import itertools
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.engines.sglang.memory import pool_of
from prefixkv.engines.sglang.rooms import Receive, Receives, RoomSend, RoomSends
from prefixkv.transfer import DecodeTransfers, KVPoll, PrefillTransfers
from tests.support.patience import until

PAGE = 4  # tokens
PAGE_BYTES, PAGES, BUFFERS = 64, 32, 3


def digest(prompt: str) -> bytes:
    return blake2b(prompt.encode(), digest_size=32).digest()


class Memory:
    """Three buffers of SGLang's; each page of each has bytes of its own on prefill."""

    def __init__(self, *, filled: bool) -> None:
        self.buffers = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(BUFFERS)]
        if filled:
            rng = np.random.default_rng(5)
            for buffer in self.buffers:
                buffer[:] = rng.integers(1, 255, buffer.shape)
        self.pool = pool_of(
            [buffer.ctypes.data for buffer in self.buffers],
            [buffer.nbytes for buffer in self.buffers],
            [PAGE_BYTES] * BUFFERS,
            page_size=PAGE, device="cpu", tag="test",
        )  # fmt: skip


class Servers:
    def __init__(self) -> None:
        self.tickets = itertools.count(1)
        self.source, self.target = Memory(filled=True), Memory(filled=False)
        self.now_s = 100.0  # of the graces
        prefill = PrefillTransfers(self.source.pool, PrefillConfig("prefill-0"))
        self.sends = RoomSends(prefill, PAGE, clock=lambda: self.now_s)
        self.receives = Receives(DecodeTransfers(self.target.pool, DecodeConfig("decode-0")))

    @property
    def prefill(self) -> str:
        return self.sends.transfers.endpoint

    def begin(self, room: int, num_pages: int, prompt: str = "prompt") -> RoomSend:
        return self.sends.begin(room, digest(prompt), num_pages * PAGE)

    def announce(self, room: int, decode: str = "decode-0", prompt: str = "prompt") -> None:
        self.sends.announce(room, decode, digest(prompt))

    def open(
        self, room: int, num_pages: int, pages: list[int], prompt: str = "prompt", **more: Any
    ) -> Receive:
        """The first pages are decode's already, the last are `pages`."""
        prefix_len = (num_pages - len(pages)) * PAGE
        named = {"room": room, "prefill": self.prefill, "num_tokens": num_pages * PAGE,
                 "prefix_len": prefix_len, "pages": pages, "digest": digest(prompt),
                 "ticket": next(self.tickets)}  # fmt: skip
        return self.receives.open(**{**named, **more})

    def both(self, room: int = 1, waits: bool = False) -> tuple[RoomSend, Receive]:
        """A request of three pages, on both sides; or until prefill waits for its KV."""
        send, receive = self.begin(room, 3), self.open(room, 3, [5, 6, 7])
        self.announce(room)
        if waits:
            self.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
        return send, receive

    def step(self) -> None:
        self.sends.pump()
        self.receives.pump()

    def until(self, done: Callable[[], object]) -> None:
        until(done, step=self.step)

    def holds(self, pages: list[int], source: list[int]) -> bool:
        """Whether these pages of decode have what those of prefill have."""
        pairs = zip(self.source.buffers, self.target.buffers, strict=True)
        return all((mine[source] == theirs[pages]).all() for mine, theirs in pairs)

    def close(self) -> None:
        self.sends.transfers.close()
        self.receives.transfers.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()
