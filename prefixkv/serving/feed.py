"""Cache events of a worker as an HTTP stream, for the routers of fronts. `GET /events` sends
frames, each a length of 4 bytes (little-endian) and an `EventBatch` as msgpack. A frame of length 0
is a sign of life.

Each stream begins with a snapshot of the cache. A follower that does not read is disconnected; it
reconnects and begins with a new snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Final

import msgspec

from prefixkv.errors import ProtocolError
from prefixkv.serving.wire import LIFE_SIGN_S
from prefixkv.spi import EventBatch

_LENGTH: Final = struct.Struct("<I")
_MAX_FRAME_BYTES: Final = 256 << 20
_MAX_WAITING_FRAMES: Final = 4096  # per follower
_MAX_FOLLOWERS: Final = 64


class _EventFollower:
    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING_FRAMES)
        # `begun`: it has had its snapshot, so later changes make sense to it. `cut`: it fell
        # behind, and its stream ends.
        self.begun = self.cut = False


class EventTap:
    """The events of a node's cache, for all followers. `after_step` runs on the engine's thread,
    the rest on the event loop, where `post` schedules a function from that thread."""

    def __init__(
        self, take: Callable[[bool], EventBatch], post: Callable[[Callable[[], None]], object]
    ) -> None:
        self._take, self._post = take, post
        self._followers: set[_EventFollower] = set()
        self._seq = 0
        # Set by the loop, read by the engine's thread. `_used`: there has been a follower; before
        # the first one events are not collected at all. `_wants_snapshot`: a follower waits for a
        # snapshot.
        self._wants_snapshot = self._used = False

    def after_step(self) -> None:
        """Send what has changed in a step. O(changes)."""
        if not self._used:
            return
        # Reset before the snapshot is taken: a follower that comes during it asks for another one.
        is_snapshot, self._wants_snapshot = self._wants_snapshot, False
        batch = self._take(is_snapshot)
        if not batch.events and not is_snapshot:
            return  # empty batches are not sent; those sent are numbered here, without a gap
        batch = msgspec.structs.replace(batch, seq=self._seq)
        self._seq += 1
        raw = batch.encode()
        frame = _LENGTH.pack(len(raw)) + raw
        self._post(lambda: self._deliver(frame, is_snapshot))

    def _deliver(self, frame: bytes, is_snapshot: bool) -> None:
        """Queue a frame for every follower that has its snapshot, or gets it by this frame."""
        for follower in self._followers:
            follower.begun |= is_snapshot
            if follower.begun:
                try:
                    follower.frames.put_nowait(frame)
                except asyncio.QueueFull:
                    follower.cut = True

    async def frames(self) -> AsyncGenerator[bytes, None]:
        follower = _EventFollower()
        if len(self._followers) >= _MAX_FOLLOWERS:
            return  # the connection ends; the follower tries again later
        self._followers.add(follower)
        # After it was added: the snapshot that this asks for is then delivered to it.
        self._used = self._wants_snapshot = True
        try:
            while not follower.cut:
                frame = _LENGTH.pack(0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LIFE_SIGN_S):
                        frame = await follower.frames.get()
                yield frame
        finally:
            self._followers.discard(follower)


async def batches_of(pieces: AsyncIterable[bytes], worker: str) -> AsyncGenerator[EventBatch, None]:
    """Yield a worker's batches, renamed to `worker` whatever name they carry. Raises ProtocolError
    for a frame that is too long or no batch."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        while len(rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest)
            # Checked before it is buffered: a peer must not make this process hold 4 GiB.
            if length > _MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            if len(rest) < _LENGTH.size + length:
                break
            raw = bytes(rest[_LENGTH.size : _LENGTH.size + length])
            del rest[: _LENGTH.size + length]
            # An empty frame is only a sign of life.
            if raw:
                yield msgspec.structs.replace(EventBatch.decode(raw), worker=worker)
