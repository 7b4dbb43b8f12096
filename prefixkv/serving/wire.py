"""Messages between a front, a decode worker and a prefill worker, as JSON over HTTP.

| to | method and path | body | answer |
| --- | --- | --- | --- |
| any worker | GET /info | | a `WorkerInfo`; 503 while it drains |
| any worker | GET /events | | frames: cache events |
| any worker | POST /audit | | 204 if every invariant of its node holds; slow |
| any worker | GET /lost | | a `LostPeer` for each lost peer that it holds something for |
| any worker | POST /fence | a `FenceRequest` | 202 |
| decode | POST /announce | an `Announcement` | 202, also of a session that is unknown there |
| decode | POST /generate | an `Ask` | lines: `TokenEvent`s; an empty line is a sign of life |
| prefill | POST /jobs | a `PrefillJob`, whose `namespace` is a salt | 202 |

Closing a connection ends what was asked on it. Errors have OpenAI's form.

A frame is a length of 4 bytes (little-endian) and an `EventBatch` as msgpack; one of length 0 is a
sign of life. Each stream of them, for the routers of fronts, begins with a snapshot of the cache. A
follower that does not read is disconnected; it reconnects and begins with a new snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

from prefixkv import Namespace
from prefixkv.engines.hf.requests import AnswerToken, Generate, Name
from prefixkv.errors import ProtocolError
from prefixkv.spi import EventBatch

LIFE_SIGN_S: Final = 2.0
"""Longest pause of a stream: it then sends an empty line or frame."""

SILENCE_S: Final = 30.0
"""Time without a byte after which a stream counts as lost."""


# Descriptions: what a worker says of itself.
class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as others need to know it.

    `url` is for requests, `status_url` for health and metrics. `endpoint` is the address of a
    prefill worker's node. `model` is the model's name for people, `identity` what its KV depends
    on. `context` is the most tokens of a request, prompt and answer together. `life` is its node's
    incarnation in hexadecimal, another one each time the worker starts. `alone`: a decode worker
    that also answers without a prefill worker.
    """

    role: Literal["prefill", "decode"]
    name: str
    url: str
    status_url: str
    endpoint: str
    model: str
    identity: str
    page_size: int
    num_pages: int
    context: int
    vocab_size: int
    life: str
    pid: int
    alone: bool = False


# Requests: the engine's own structs.
class Ask(Generate, frozen=True):
    """With the URL of the prefill worker at `prefill`; without both, the decode worker computes the
    prompt itself, if it is one that is `alone`. `namespace` is a salt: requests with different
    salts share no KV."""

    prefill_url: Name = ""


class Announcement(msgspec.Struct, frozen=True):
    """The next turn of a session comes soon. `namespace` is a salt."""

    session: Name
    namespace: Name = ""


class TokenEvent(AnswerToken, frozen=True, omit_defaults=True):
    """An `Output` of the engine; `error` begins with its class."""

    error: str = ""


# Lives that are over.
class FenceRequest(msgspec.Struct, frozen=True):
    """This life of a worker is certainly dead, so what is held for it may be used again."""

    name: str
    life: str


class LostPeer(FenceRequest, frozen=True):
    """A peer that is suspect or dead (`lost_peers` of a node). `held` counts the pages of a decode
    worker that it may still write, or the rooms of a prefill worker that it is in."""

    why: str
    held: int


def salt_digest(salt: str) -> str:
    """Return 32 characters that stand for a client's salt in messages between front and workers.
    They are kept as long as KV of that salt is; the salt itself may be long, and is the client's
    secret.

    >>> len(salt_digest("tenant 1")), salt_digest("tenant 1") == salt_digest("tenant 2")
    (32, False)
    """
    return blake2b(salt.encode(), digest_size=16).hexdigest()


def namespace_of(salt: Any) -> Namespace | None:
    return Namespace(salt=salt) if salt else None


def part_rid(rid: str, number: int) -> str:
    """Return the id under which a part of a front's request goes over the wire: one of its prompts,
    and of that one attempt.

    >>> part_rid("9f3a-1", 0), part_rid(part_rid("9f3a-1", 2), 0)
    ('9f3a-1#0', '9f3a-1#2#0')
    """
    return f"{rid}#{number}"


def front_rid(rid: str) -> str:
    """Return the front's id of a request on the wire, out of its id on a worker's node; an id that
    no front has made is returned as it is.

    >>> front_rid("9f3a-1#0/2"), front_rid("decode-0/9f3a-1#2#0/2.1"), front_rid("mine")
    ('9f3a-1', '9f3a-1', 'mine')
    """
    # A decode node names requests "RID/sample", and its jobs "worker/RID/sample.generation".
    asked, _, _ = rid.rpartition("#")
    if not asked:
        return rid
    asked = asked.rpartition("/")[2]
    request, _, prompt = asked.rpartition("#")
    # A client's own id may have a "#" too, but never a number alone behind its last one.
    return request if request and prompt.isdecimal() else asked


_LENGTH: Final = struct.Struct("<I")
_MAX_FRAME_BYTES: Final = 256 << 20
_MAX_WAITING_FRAMES: Final = 4096  # per follower
_MAX_FOLLOWERS: Final = 64


# --- cache events --------------------------------------------------------------------------------


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
