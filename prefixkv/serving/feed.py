"""A worker's cache events, for the routers of fronts: `GET /events` is a stream of frames, each its
length in 4 bytes (little-endian) and an `EventBatch` as msgpack. A frame of no bytes says that the
worker lives.

Each stream begins with all there is. A follower that does not read is cut off; it comes again, and
begins anew.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Final

import msgspec

from prefixkv.serving.waits import wait_set
from prefixkv.serving.wire import LIFE_SIGN_S
from prefixkv.spi import EventBatch, ProtocolError

_LENGTH: Final = struct.Struct("<I")
_MAX_FRAME_BYTES: Final = 256 << 20
_MAX_WAITING_FRAMES: Final = 4096
_MAX_WAITING_BYTES: Final = 32 << 20  # of one follower, but for a frame that is longer by itself
_MAX_FOLLOWERS: Final = 64


class _Follower:
    """One stream."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.num_bytes = 0  # of all but the last
        self.news = asyncio.Event()
        self.begun = self.cut = False

    def take(self, frame: bytes) -> None:
        self.num_bytes += len(self.frames[-1]) if self.frames else 0
        self.frames.append(frame)
        self.cut |= len(self.frames) > _MAX_WAITING_FRAMES or self.num_bytes > _MAX_WAITING_BYTES
        if self.cut:
            self.frames.clear()
        self.news.set()


class EventTap:
    """What a node's cache does, to all who follow. `after_step` is the engine's thread's, the rest
    the event loop's.

    Args:
        take: `take_cache_events` of the node.
        post: has a function called on the event loop, from the engine's thread.
    """

    def __init__(
        self, take: Callable[[bool], EventBatch], post: Callable[[Callable[[], None]], object]
    ) -> None:
        self._take, self._post = take, post
        self._followers: set[_Follower] = set()
        self._seq = 0
        self._afresh = self._used = False

    def after_step(self) -> None:
        """Pass on what has changed. O(changes)."""
        if not self._used:
            return
        afresh, self._afresh = self._afresh, False
        batch = self._take(afresh)
        if not batch.events and not afresh:
            return  # nothing: so batches are numbered here
        batch = msgspec.structs.replace(batch, seq=self._seq)
        self._seq += 1
        raw = batch.encode()
        frame = _LENGTH.pack(len(raw)) + raw
        self._post(lambda: self._deliver(frame, afresh))

    def _deliver(self, frame: bytes, afresh: bool) -> None:
        for follower in self._followers:
            follower.begun |= afresh
            if not follower.begun:
                continue
            if not follower.cut:
                follower.take(frame)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """One stream, until it is closed or cut off."""
        follower = _Follower()
        if len(self._followers) >= _MAX_FOLLOWERS:
            return  # its connection ends, and it comes again
        self._followers.add(follower)
        self._used = self._afresh = True
        try:
            while not follower.cut:
                await wait_set(follower.news, LIFE_SIGN_S)
                follower.news.clear()
                frames = list(follower.frames)
                follower.frames.clear()
                follower.num_bytes = 0
                yield b"".join(frames) or _LENGTH.pack(0)
        finally:
            self._followers.discard(follower)


async def batches_of(pieces: AsyncIterable[bytes], worker: str) -> AsyncGenerator[EventBatch, None]:
    """The batches of a stream, as that worker's whatever name they bear. Raises ProtocolError for
    what is none."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        while len(rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest)
            if length > _MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            if len(rest) < _LENGTH.size + length:
                break
            raw = bytes(rest[_LENGTH.size : _LENGTH.size + length])
            del rest[: _LENGTH.size + length]
            if raw:
                yield msgspec.structs.replace(EventBatch.decode(raw), worker=worker)
