"""Frames of the control plane: msgpack of typed structs, nothing pickled, nothing trusted.

Every frame names the protocol's version, its sender's name and incarnation, and a sequence number
that only grows. A receiver takes a frame only if its number is above all it has seen from that
incarnation, so a late, repeated or overtaken frame is dropped without any memory of rooms. A frame
that must arrive is repeated, under a new number, until it is answered:

    sent (by)             answered by
    Hello (decode)        HelloReply
    Promise (decode)      PromiseAck, or an Outcome
    Abort (decode)        Drained, once no write of the room can land any more
    Outcome (prefill)     OutcomeAck
    LeaseAsk (prefill)    LeaseGrant

A promise bears a ticket, which decode never uses twice, and every frame about its room repeats the
ticket: so a late frame about a room cannot be taken for one about the next use of its number.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.config import MAX_VERSION_CHARS
from prefixkv.digest import MAX_DIGEST_BYTES
from prefixkv.errors import HandshakeError, ProtocolError, VersionError
from prefixkv.memory.kv_layout import MAX_GROUPS, GroupName, KVLayout, PageGroup
from prefixkv.memory.mesh import MAX_RANKS, Mesh
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout, StateTensor
from prefixkv.protocol.ids import PeerId, RoomKey

PROTOCOL_VERSION = 7
MAX_FRAME_BYTES = 4 << 20
MAX_METADATA_BYTES = 1 << 20
MAX_PAGES = MAX_FRAME_BYTES // 4 - 1024
"""Page ids that one promise may name, with room for its other fields."""

# Bounds of the fields that a peer fills: msgspec refuses a frame beyond them before our code reads
# it. Bytes without a bound of their own are bounded by the frame's, MAX_FRAME_BYTES.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Slot = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Short = Annotated[str, msgspec.Meta(max_length=1024)]
Metadata = Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
ShmOffer = Annotated[bytes, msgspec.Meta(max_length=1024)]
Tensors = Annotated[tuple[StateTensor, ...], msgspec.Meta(max_length=4096)]
Stages = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)]
Endpoints = Annotated[tuple[Short, ...], msgspec.Meta(max_length=MAX_RANKS)]
Digest = Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)]
Holder = Annotated[str, msgspec.Meta(max_length=64)]
Version = Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARS)]
WindowIds = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class GroupDigest(msgspec.Struct, frozen=True, array_like=True):
    """Fields of a group of layers that must be equal on both sides, in a handshake: see
    `PageGroup`. Heads are those of each rank, and have to fit the peer's: `check_group_heads`."""

    name: GroupName
    window: Count
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    dtype: Short
    attention: Short
    opaque: Short = ""

    @classmethod
    def of(cls, group: PageGroup) -> GroupDigest:
        layout = group.layout
        return cls(
            group.name, group.window, layout.num_layers, layout.num_kv_heads, layout.head_dim,
            layout.dtype, layout.attention, layout.opaque,
        )  # fmt: skip


GroupDigests = Annotated[tuple[GroupDigest, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class ModelDigest(msgspec.Struct, frozen=True, array_like=True):
    """Fields of a handshake that must be equal on both sides for KV and extra state to mean the
    same.

    Heads are those of all ranks. `opaque` is the pool's tag (`KVLayout.opaque`).
    """

    model: Short
    kv_scales: Short
    dtype: Short
    attention: Short
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    opaque: Short = ""
    state: Tensors = ()
    groups: GroupDigests = ()

    def check(self, theirs: ModelDigest) -> None:
        """Compare this model digest with the peer's of the handshake. Raise HandshakeError for the
        first field that differs."""
        # `opaque` first: it is the reason where `attention` or `head_dim` differ too. Lists last.
        _check_fields(self, theirs, ("opaque", *self.__struct_fields__[:-2]))
        _check_lists("state", self.state, theirs.state)
        # How many heads a rank has of a group follows from its mesh, which may differ.
        _check_lists("groups", self.groups, theirs.groups, besides=("num_kv_heads",))


def _check_lists(
    name: str,
    ours: Sequence[msgspec.Struct],
    theirs: Sequence[msgspec.Struct],
    besides: tuple[str, ...] = (),
) -> None:
    """Compare lists of structs of a handshake's messages, `besides` these fields. Raise
    HandshakeError for the first field that differs."""
    for i, (mine, other) in enumerate(zip_longest(ours, theirs)):
        if mine is None or other is None:
            raise HandshakeError(f"{name}[{i}]", mine, other)
        fields = tuple(field for field in mine.__struct_fields__ if field not in besides)
        _check_fields(mine, other, fields, f"{name}[{i}].")


def _check_fields(
    ours: msgspec.Struct, theirs: msgspec.Struct, fields: tuple[str, ...], of: str = ""
) -> None:
    """Compare fields of two structs of a handshake's messages. Raise HandshakeError for the first
    field that differs; `of` is put before its name."""
    for field in fields:
        if getattr(ours, field) != getattr(theirs, field):
            raise HandshakeError(of + field, getattr(ours, field), getattr(theirs, field))


class Libraries(msgspec.Struct, frozen=True, array_like=True):
    """Versions of the libraries by which a rank's memory is written to; "": not known."""

    nixl: Version = ""
    ucx: Version = ""

    def check(self, theirs: Libraries) -> None:
        """Compare the versions that both sides know. Raise HandshakeError for the first that
        differs."""
        for name in self.__struct_fields__:
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours and other and ours != other:
                raise HandshakeError(f"version of {name}", ours, other)


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """Fields of a handshake that may differ and are negotiated: how a side's ranks share the model,
    and its page size in tokens."""

    page_size: Count
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    stage_layers: Stages = ()

    def mesh(self, digest: ModelDigest) -> Mesh:
        """Return how the model of `digest` is shared out over the ranks of this message's topology;
        a peer's still has to pass `check_meshes`."""
        return Mesh(
            digest.num_layers,
            digest.num_kv_heads,
            tp_size=self.tensor_parallel,
            pp_size=self.pipeline_parallel,
            stage_layers=self.stage_layers,
        )


class ProcessLife(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a process on its machine; a peer's claim, so nothing but evidence against itself.

    `boot` is the kernel's id of this boot, the spaces are inodes of the namespaces in which `pid`
    and sockets are looked up. `began` is in clock ticks since boot. `holder` names the abstract
    socket that the process and its forks hold. `opened_ns` is when the node was made, in
    nanoseconds since boot; 0: unknown.
    """

    boot: Short
    pid_space: U64
    net_space: U64
    pid: U64
    began: U64
    holder: Holder
    opened_ns: U64 = 0

    def is_before(self, other: ProcessLife) -> bool:
        """Return True if this process, as its message tells, was made before the other; False where
        that is not known."""
        same = self.boot == other.boot
        # Times of different boots do not compare.
        return same and 0 < self.opened_ns < other.opened_ns


class Body(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of all message bodies."""


class Hello(Body, frozen=True, tag="hello"):
    """A decode rank introduces itself: what it runs, and how to write to its pool.

    `worker` is rank 0's identity: the ranks of one worker name the same. `staging` is where slices
    may be staged, `state` where the extra state that `digest` lists is kept. `nonce` is that of the
    last HelloWanted, `known` the life that is known at this address. `life` is None where the
    kernel has no such thing, or the process keeps it to itself. `agent_metadata` is NIXL's, empty
    where NIXL does not write to it; `shm` is for prefill workers of this host that map the memory,
    empty where it is not shared. `age_ms` is the age of this life of the worker, as its rank 0
    reports it; other ranks leave it None. `libraries` are those that `agent_metadata` is for.
    """

    digest: ModelDigest
    topology: Topology
    layout: KVLayout
    agent_metadata: Metadata
    rank: Count = 0
    worker: PeerId | None = None
    staging: StagingArea | None = None
    state: StateLayout | None = None
    nonce: U64 = 0
    known: U64 = 0
    life: ProcessLife | None = None
    shm: ShmOffer = b""
    age_ms: U64 | None = None
    libraries: Libraries = Libraries()


class HelloReply(Body, frozen=True, tag="hello-reply"):
    """A prefill rank's answer. `refused` is empty, or the reason why the two cannot work together.

    `endpoints` are the addresses of all ranks, by rank; "" for one's own.
    `staged`: its writes are staged. `known` is that of the Hello it answers. `life` is as in Hello.
    `max_tokens` is the size of its pool: a longer prompt it can never compute; 0: not given.
    """

    digest: ModelDigest
    topology: Topology
    endpoints: Endpoints
    refused: Text = ""
    rank: Count = 0
    staged: bool = False
    known: U64 = 0
    life: ProcessLife | None = None
    max_tokens: Count = 0


class HelloWanted(Body, frozen=True, tag="hello-wanted"):
    """Prefill does not know the sender of a frame: introduce yourself, with this `nonce`.

    A Hello counts only with the nonce that is wanted, so a late one of a former life is no more
    than a question.
    """

    nonce: U64 = 0


class HelloRefused(Body, frozen=True, tag="hello-refused"):
    """Decode does not work with the prefill process of this `life`.

    If it `is_over`, that is since the process was fenced or replaced.
    """

    life: U64
    reason: Text
    is_over: bool = False


class RoomBody(Body, frozen=True):
    """Base of the bodies about a room; the fields that name it come first."""

    room: U64
    generation: Count

    @property
    def key(self) -> RoomKey:
        return RoomKey(self.room, self.generation)


class Promise(RoomBody, frozen=True, tag="promise"):
    """Decode has `prefix_len` tokens of a request and wants the rest of `fill_len` in these pages.

    `digest` is that of the prompt. `life` names the prefill process that this is said to: to its
    successor the promise is none. Extra state, where the model has some, is wanted in `state_slot`,
    whole: as it is after `fill_len` tokens. `weights_version` is that of the weights that the KV is
    for. `windows` has, for each window group, the ids of pages for the last tokens: from the page
    in which the window behind `fill_len` tokens begins, whatever `prefix_len` is."""

    fill_len: Count
    prefix_len: Count
    pages: bytes
    ticket: U64 = 0
    state_slot: Slot = -1
    digest: Digest = b""
    weights_version: Version = ""
    windows: WindowIds = ()
    life: U64 = 0

    @property
    def num_pages(self) -> int:
        """Number of pages that a Promise message names, those of window groups included."""
        return (len(self.pages) + sum(map(len, self.windows))) // 4

    def page_ids(self) -> npt.NDArray[np.int32]:
        """Return the destination pages that a Promise message names, int32. Raises ProtocolError if
        the bytes are no whole number of ids."""
        return _ids_of(self.pages)

    def window_ids(self) -> tuple[npt.NDArray[np.int32], ...]:
        """Return the destination pages that a Promise message names in each window group. Raises
        as `page_ids`."""
        return tuple(map(_ids_of, self.windows))


def _ids_of(packed: bytes) -> npt.NDArray[np.int32]:
    """Return the page ids of a message. Raises ProtocolError for bytes that are no whole number of
    them."""
    if len(packed) % 4:
        raise ProtocolError(f"{len(packed)} bytes are no list of page ids")
    return np.frombuffer(packed, dtype="<i4").astype(np.int32)


class PromiseAck(RoomBody, frozen=True, tag="promise-ack"):
    """This rank of prefill has the promise."""

    rank: Count
    ticket: U64 = 0


class Abort(RoomBody, frozen=True, tag="abort"):
    """Refuse every earlier frame of this room, stop writing for it, and say when it is drained.

    `versions`: as of Outcome. `life`: as of Promise. `digest` too; a request of another prompt is
    of another use of the room's number. Empty: not known.
    """

    reason: Text
    ticket: U64 = 0
    versions: tuple[Version, Version] | None = None
    digest: Digest = b""
    life: U64 = 0


class Drained(RoomBody, frozen=True, tag="drained"):
    """Prefill reports that no write of this rank for this generation can land any more.

    `settle`: an agent was destroyed for it, so what kernels held by then may land as decode polls,
    for a moment.
    """

    rank: Count
    ticket: U64 = 0
    settle: bool = False


class FailureCode(enum.IntEnum):
    """Kinds of failure that the other side tells apart; the text has the rest."""

    OTHER = 0
    PROMPT_MISMATCH = 1

    @classmethod
    def _missing_(cls, value: object) -> FailureCode:
        # A peer of a later release may send codes that are unknown here: its frame still counts.
        return cls.OTHER


class Outcome(RoomBody, frozen=True, tag="outcome"):
    """A rank reports how its side of the room ended: `num_pages` of the room's pages were written.

    `num_chunks` and `num_units` count the writes of this writer to the rank that it addresses:
    chunks, and unit pages (extra state counts one). Its notifications must add up to the same.
    `versions`: the weights version of the room and the one that differs from it, where that is why
    it failed.
    """

    rank: Count
    ok: bool
    num_chunks: Count
    num_pages: Count
    aux: bytes
    error: Text
    drained: bool
    ticket: U64 = 0
    code: FailureCode = FailureCode.OTHER
    num_units: Count = 0
    versions: tuple[Version, Version] | None = None


class OutcomeAck(RoomBody, frozen=True, tag="outcome-ack"):
    """This rank of decode knows the outcome."""

    rank: Count
    ticket: U64 = 0


class LeaseAsk(RoomBody, frozen=True, tag="lease-ask"):
    """A writer wants to stage units `first_unit`.. of a room, counted from the first one behind the
    promised prefix.

    `piece` counts the asks of a room from 0; all writers of a room cut it into the same pieces.
    """

    rank: Count
    piece: Count
    first_unit: Count
    num_units: Count
    ticket: U64 = 0


class LeaseGrant(RoomBody, frozen=True, tag="lease-grant"):
    """The piece may be written at `offset` of decode's staging area, each rank its section
    (`LeaseCut.sections`)."""

    piece: Count
    lease_id: Count
    offset: U64
    ticket: U64 = 0


class Heartbeat(Body, frozen=True, tag="heartbeat"):
    """The sender is alive, and has nothing else to report."""


class Fenced(Body, frozen=True, tag="fenced"):
    """The sender has destroyed its transport agent and leaves: no write of it can land any more."""


RoomWord = Promise | PromiseAck | Abort | Drained | Outcome | OutcomeAck | LeaseAsk | LeaseGrant
AnyBody = Hello | HelloReply | HelloWanted | HelloRefused | RoomWord | Heartbeat | Fenced


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message of the control plane as it travels."""

    version: Count
    name: Name
    incarnation: U64
    seq: U64
    body: AnyBody

    @property
    def sender(self) -> PeerId:
        return PeerId(self.name, self.incarnation)


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The part of a frame that every version begins with."""

    version: Count
    name: Name
    incarnation: U64


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_envelope = msgspec.msgpack.Decoder(_Envelope)


def encode(sender: PeerId, seq: int, body: AnyBody) -> bytes:
    return _encoder.encode(Frame(PROTOCOL_VERSION, sender.name, sender.incarnation, seq, body))


def decode(raw: bytes) -> Frame:
    """Decode a frame of the control plane from these bytes, which `encode` has made. Raises
    VersionError for a frame of another version, whatever its body is like there, and ProtocolError
    for anything that is no frame."""
    # First the size, before anything is parsed.
    if len(raw) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(raw)} bytes, the limit is {MAX_FRAME_BYTES}")
    try:
        frame = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # A frame of another version may be malformed by our rules only: then its version is the
        # error that helps the operator.
        _check_version(_version(raw))
        raise ProtocolError(f"malformed frame: {error}") from None
    _check_version(frame.version)
    return frame


def _version(raw: bytes) -> int:
    """Return the protocol version that a frame begins with; ours where it begins with none."""
    try:
        return _envelope.decode(raw).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PROTOCOL_VERSION


def _check_version(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        raise VersionError(theirs, PROTOCOL_VERSION)
