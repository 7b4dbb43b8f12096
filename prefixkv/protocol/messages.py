"""Frames of the control plane: msgpack of typed structs, nothing pickled, nothing trusted.

Every frame names the protocol's version, its sender's name and incarnation, and a sequence number
that only grows. A receiver takes a frame only if its number is above all it has seen from that
incarnation, so a late, repeated or overtaken frame is dropped without any memory of rooms. A frame
that must arrive is repeated, under a new number, until it is answered:

    sent (by)             answered by
    Hello (decode)        HelloReply
    Promise (decode)      a notification, an Outcome, or a PromiseAck
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
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.config import MAX_VERSION_CHARS
from prefixkv.digest import MAX_DIGEST_BYTES
from prefixkv.errors import (
    ChecksumError,
    HandshakeError,
    PromptMismatchError,
    ProtocolError,
    TransferError,
    VersionError,
    WeightsVersionError,
)
from prefixkv.memory.kv_layout import MAX_GROUPS, GroupName, KVLayout, PageGroup, RelayArea
from prefixkv.memory.mesh import MAX_RANKS, Mesh, check_equal
from prefixkv.memory.state_layout import StateLayout, StateTensor
from prefixkv.protocol.ids import PeerId, RoomKey

PROTOCOL_VERSION = 10
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
MemoryOffer = Annotated[bytes, msgspec.Meta(max_length=1024)]
Tensors = Annotated[tuple[StateTensor, ...], msgspec.Meta(max_length=4096)]
Stages = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)]
Endpoints = Annotated[tuple[Short, ...], msgspec.Meta(max_length=MAX_RANKS)]
Digest = Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)]
Holder = Annotated[str, msgspec.Meta(max_length=64)]
Version = Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARS)]
Algorithm = Annotated[str, msgspec.Meta(max_length=16)]
Algorithms = Annotated[tuple[Algorithm, ...], msgspec.Meta(max_length=16)]
GroupIds = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_GROUPS + 1)]


class GroupDigest(msgspec.Struct, frozen=True, array_like=True):
    """Fields of a group of layers that must be equal on both sides: see `PageGroup`. Heads are
    those of each rank, and have to fit the peer's: `check_group_heads`."""

    name: GroupName
    """The engine's name for it."""
    window: Count
    """Tokens that a token of its layers sees, itself among them; 0: all, under the page ids of the
    first group."""
    num_layers: Count
    """Layers of the group."""
    num_kv_heads: Count
    """KV heads of its layers, on each rank; 1 with mla."""
    head_dim: Count
    dtype: Short
    """Data type of its KV."""
    attention: Short
    """As in `ModelDigest`."""
    opaque: Short = ""
    """As in `ModelDigest`."""

    @classmethod
    def of(cls, group: PageGroup) -> GroupDigest:
        layout = group.layout
        return cls(
            group.name, group.window, layout.num_layers, layout.num_kv_heads, layout.head_dim,
            layout.dtype, layout.attention, layout.opaque,
        )  # fmt: skip


GroupDigests = Annotated[tuple[GroupDigest, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class ModelDigest(msgspec.Struct, frozen=True, array_like=True):
    """Fields that must be equal on both sides for KV and extra state to mean the same."""

    model: Short
    """`ModelConfig.model`."""
    kv_scales: Short
    """`ModelConfig.kv_scales`."""
    dtype: Short
    """Data type of the KV."""
    attention: Short
    """Kind: "mha" (GQA included), "mla" or "fused"."""
    num_layers: Count
    """Layers of all ranks."""
    num_kv_heads: Count
    """KV heads of all ranks; 1 with mla."""
    head_dim: Count
    """Elements of one head of one token."""
    opaque: Short = ""
    """Tag of the pools (`KVLayout.opaque`); compared first."""
    state: Tensors = ()
    """The model's extra state, in one order on both sides."""
    groups: GroupDigests = ()
    """The groups of layers beside the first one, in one order on both sides."""

    def check(self, theirs: ModelDigest) -> None:
        """Raise HandshakeError for the first field that differs."""
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
    """Raise HandshakeError for the first field, `besides` these, that differs."""
    for i, (mine, other) in enumerate(zip_longest(ours, theirs)):
        if mine is None or other is None:
            raise HandshakeError(f"{name}[{i}]", mine, other)
        fields = tuple(field for field in mine.__struct_fields__ if field not in besides)
        _check_fields(mine, other, fields, f"{name}[{i}].")


def _check_fields(
    ours: msgspec.Struct, theirs: msgspec.Struct, fields: tuple[str, ...], of: str = ""
) -> None:
    """Raise HandshakeError for the first field that differs; `of` is put before its name."""
    for field in fields:
        check_equal(of + field, getattr(ours, field), getattr(theirs, field))


class Libraries(msgspec.Struct, frozen=True, array_like=True):
    """Versions of the libraries by which a rank's memory is written to; "": not known."""

    nixl: Version = ""
    ucx: Version = ""

    def check(self, theirs: Libraries) -> None:
        """Raise HandshakeError for the first version that both sides know and that differs."""
        for name in self.__struct_fields__:
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours and other and ours != other:
                raise HandshakeError(f"version of {name}", ours, other)


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """Fields that may differ: how a side's ranks share the model, and its page size in tokens."""

    page_size: Count
    """Tokens of a page."""
    tensor_parallel: Count = 1
    """Ranks of a stage."""
    pipeline_parallel: Count = 1
    """Stages."""
    stage_layers: Stages = ()
    """Layers of each stage; empty: as equal as possible, with one layer more in the first stages.
    """

    def mesh(self, digest: ModelDigest) -> Mesh:
        """Return how the ranks share the model of `digest`; a peer's still has to pass
        `check_meshes`."""
        return Mesh(
            digest.num_layers,
            digest.num_kv_heads,
            tp_size=self.tensor_parallel,
            pp_size=self.pipeline_parallel,
            stage_layers=self.stage_layers,
        )


class ProcessLife(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a process on its machine; a peer's claim, so evidence against that peer alone."""

    boot: Short
    """The kernel's id of this boot."""
    pid_space: U64
    """Inode of its pid namespace."""
    net_space: U64
    """Inode of its network namespace."""
    pid: U64
    """Its id in that namespace."""
    began: U64
    """When it began, in clock ticks since boot."""
    holder: Holder
    """Names the abstract socket that it and its forks hold."""
    opened_ns: U64 = 0
    """When the node was made, in nanoseconds since boot; 0: unknown."""

    def is_before(self, other: ProcessLife) -> bool:
        """Return True if this process was made before the other; False where that is not known."""
        same = self.boot == other.boot
        # Times of different boots do not compare.
        return same and 0 < self.opened_ns < other.opened_ns


class Body(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of all message bodies."""


class Hello(Body, frozen=True, tag="hello"):
    """Decode to prefill: what this rank is, and how to write to its pool."""

    digest: ModelDigest
    """What must be equal."""
    topology: Topology
    """What is negotiated."""
    layout: KVLayout
    """Where the KV of this rank's pool lies."""
    agent_metadata: Metadata
    """What NIXL needs to reach the agent; opaque. Empty if NIXL does not write to decode."""
    rank: Count = 0
    """Which rank of its worker this is."""
    worker: PeerId | None = None
    """(name, incarnation) of rank 0: ranks of one worker name the same. None: the sender."""
    relay: RelayArea | None = None
    """Where slices may be staged; None: nowhere."""
    state: StateLayout | None = None
    """Where the extra state that `digest` lists is kept."""
    nonce: U64 = 0
    """Number of the last `HelloWanted`; 0: none."""
    known: U64 = 0
    """The incarnation that is known at this address; 0: none."""
    life: ProcessLife | None = None
    """Which process the sender is; None where the kernel has no such thing, or the process keeps it
    to itself."""
    mapping: MemoryOffer = b""
    """How its memory may be mapped; empty: not at all."""
    age_ms: U64 | None = None
    """How long ago this life of the worker began; sent by rank 0. None: other ranks, or not known.
    """
    libraries: Libraries = Libraries()
    """Versions of the libraries that `agent_metadata` is for."""
    place: Short = ""
    """Boot of the machine, network namespace and user, within which `mapping` may be used."""
    checksums: Algorithms = ()
    """Algorithms of checksums that it can compute, the best first; empty: it compares none."""


class HelloReply(Body, frozen=True, tag="hello-reply"):
    """Prefill to decode: what this rank is, or why the two cannot work together."""

    digest: ModelDigest
    topology: Topology
    endpoints: Endpoints
    """The addresses of all ranks, by rank; "" for its own. Only rank 0's list counts."""
    refused: Text = ""
    """Empty, or why the two cannot work together."""
    rank: Count = 0
    relayed: bool = False
    """Whether what it writes to this decode rank is staged."""
    known: U64 = 0
    """`known` of the `Hello`."""
    life: ProcessLife | None = None
    """As in `Hello`."""
    max_tokens: Count = 0
    """How many tokens its pool holds; 0: not given. Decode promises no pages for a request that may
    have more."""
    checksum: Algorithm = ""
    """The algorithm of the checksums in its notifications, one of the `Hello`; empty: there are
    none."""


class HelloWanted(Body, frozen=True, tag="hello-wanted"):
    """Prefill to decode: the sender of a frame is not known (any more), or its Hello came without
    the nonce.

    A Hello counts only with the nonce that is wanted, so a late one of a former life is no more
    than a question.
    """

    nonce: U64 = 0
    """The number that the `Hello` must repeat; 0 if the sender could not be read."""


class HelloRefused(Body, frozen=True, tag="hello-refused"):
    """Decode to prefill: no work with this process. Counts for the named process only."""

    life: U64
    """The incarnation that is refused."""
    reason: Text
    """Why; cut to 1,000 characters."""
    is_over: bool = False
    """True: the process was fenced or replaced, and none of its rooms lives here. False: the two do
    not fit."""


class RoomBody(Body, frozen=True):
    """Base of the bodies about a room; the fields that name it come first."""

    room: U64
    """The transfer."""
    generation: Count
    """Which attempt at it."""

    @property
    def key(self) -> RoomKey:
        return RoomKey(self.room, self.generation)


class Promise(RoomBody, frozen=True, tag="promise"):
    """Decode to prefill: decode has `prefix_len` tokens of the request, and wants the rest of
    `fill_len` in these pages. Extra state is wanted whole, as it is after `fill_len` tokens."""

    fill_len: Count
    """Tokens of the prompt (of an attempt after the first: those whose KV is needed; less the end
    that decode computes itself, where it keeps checkpoints); prefill's request must have as many.
    """
    prefix_len: Count
    """Tokens that decode has, or that come in a flight that this one joined; whole pages of
    decode's, at most `fill_len`."""
    pages: bytes
    """Destination page ids, little-endian int32, one per page behind the prefix, a partial last
    page included."""
    ticket: U64 = 0
    """Random number of this use of the room."""
    digest: Digest = b""
    """Digest of the prompt."""
    weights_version: Version = ""
    """Version of the weights that the KV must come from."""
    groups: GroupIds = ()
    """For each window group, in the layout's order, destination page ids as in `pages`: from the
    page in which the window behind `fill_len` tokens begins, `max(0, fill_len + 1 - window) //
    page_size`, to the last one, whatever `prefix_len` is. Behind them, where the model has extra
    state, the slot that it goes to. Empty without either."""
    life: U64 = 0
    """Incarnation of the prefill process that this is said to. Another process drops the message:
    decode may have drained its pages since."""

    @property
    def num_pages(self) -> int:
        """Number of pages, those of groups included."""
        return (len(self.pages) + sum(map(len, self.groups))) // 4

    def page_ids(self) -> npt.NDArray[np.int32]:
        """Return the destination pages, int32. Raises ProtocolError for no whole number of ids."""
        return _ids_of(self.pages)

    def group_ids(self) -> tuple[npt.NDArray[np.int32], ...]:
        """Return the destination pages in each group. Raises as `page_ids`."""
        return tuple(map(_ids_of, self.groups))


def _ids_of(packed: bytes) -> npt.NDArray[np.int32]:
    if len(packed) % 4:
        raise ProtocolError(f"{len(packed)} bytes are no list of page ids")
    return np.frombuffer(packed, dtype="<i4").astype(np.int32)


class PromiseAck(RoomBody, frozen=True, tag="promise-ack"):
    """Prefill to decode: the promise has arrived. One that begins the room is acknowledged only if
    it is repeated, or the room is open still after half of `ControlConfig.resend_s`."""

    rank: Count
    """The prefill rank that sends it."""
    ticket: U64 = 0


class FailureCode(enum.IntEnum):
    """Kinds of failure that the other side tells apart; the text has the rest."""

    OTHER = 0
    PROMPT_MISMATCH = 1
    CHECKSUM = 2

    @classmethod
    def _missing_(cls, value: object) -> FailureCode:
        # A peer of a later release may send codes that are unknown here: its frame still counts.
        return cls.OTHER


class Abort(RoomBody, frozen=True, tag="abort"):
    """Decode to prefill: refuse every earlier frame of this room, stop writing for it, say when it
    is drained."""

    reason: Text
    """For prefill's engine; cut to 1,000 characters."""
    ticket: U64 = 0
    versions: tuple[Version, Version] | None = None
    """If decode's weights have moved: the version of the room, and decode's version now."""
    digest: Digest = b""
    """Digest of the room's prompt, as in `Promise`: a request for another prompt belongs to another
    use of the number. Empty: not known."""
    life: U64 = 0
    """As in `Promise`."""
    code: FailureCode = FailureCode.OTHER
    """As in `Outcome`."""


class Drained(RoomBody, frozen=True, tag="drained"):
    """Prefill to decode: no write of this rank for this use of the room can land any more."""

    rank: Count
    """The prefill rank that sends it."""
    ticket: U64 = 0
    settle: bool = False
    """An agent was destroyed for it: decode must continue to read for a moment before it uses the
    pages."""


_KINDS: Final = {
    FailureCode.PROMPT_MISMATCH: PromptMismatchError,
    FailureCode.CHECKSUM: ChecksumError,
}


def code_of(error: object) -> FailureCode:
    codes = (code for code, kind in _KINDS.items() if isinstance(error, kind))
    return next(codes, FailureCode.OTHER)


def error_of(code: FailureCode, text: str, other: type[TransferError]) -> TransferError:
    """Return the error that a code and its text stand for; `other`: of OTHER."""
    return _KINDS.get(code, other)(text)


def failure(error: Exception) -> tuple[str, FailureCode, tuple[str, str] | None]:
    """Return `error`, `code` and `versions` of an outcome that reports this error."""
    versions = error.versions if isinstance(error, WeightsVersionError) else None
    return str(error)[:1000], code_of(error), versions


class Outcome(RoomBody, frozen=True, tag="outcome"):
    """Prefill to decode: how this rank's side of the room ended."""

    rank: Count
    """The prefill rank that sends it."""
    ok: bool
    """True: SUCCESS, sent only after every write has ended DONE. False: FAILED."""
    num_chunks: Count
    """Chunks that this rank wrote to the receiver of the message."""
    num_pages: Count
    """Number of decode's pages that were written, those of groups included; must be the
    number promised."""
    aux: bytes
    """The engine's payload of the last chunk, empty on FAILED; at most
    `ControlConfig.max_aux_bytes` on the sender's side."""
    error: Text
    """Why it failed; cut to 1,000 characters."""
    drained: bool
    """No write of it can land any more; if False, a `Drained` follows."""
    ticket: U64 = 0
    code: FailureCode = FailureCode.OTHER
    """The kind of failure: 1 the prompts differ, 2 a page has another checksum, 0 any other. An
    unknown code counts as 0."""
    num_units: Count = 0
    """Unit pages that this rank wrote to the receiver of the message; extra state counts as one, a
    page of a window group too. Its notifications must add up to this number."""
    versions: tuple[Version, Version] | None = None
    """If the room failed for its weights version: the promise's version, and prefill's."""


class OutcomeAck(RoomBody, frozen=True, tag="outcome-ack"):
    """Decode to prefill: the outcome has arrived. Also for a room that decode has forgotten."""

    rank: Count
    """The prefill rank whose outcome it was."""
    ticket: U64 = 0


class LeaseAsk(RoomBody, frozen=True, tag="lease-ask"):
    """Prefill to decode: the KV of this piece is ready at one writer, which asks for a lease."""

    rank: Count
    """The prefill rank that sends it."""
    piece: Count
    """Number of the piece in the room, from 0; all writers cut a room alike."""
    first_unit: Count
    """The unit page at which it begins, counted from the first one behind the promised prefix."""
    num_units: Count
    """Number of unit pages, at least 1; they must fit into a lease."""
    ticket: U64 = 0


class LeaseGrant(RoomBody, frozen=True, tag="lease-grant"):
    """Decode to prefill: the piece may be written, each writer to its section of the lease
    (`LeaseCut.sections`)."""

    piece: Count
    """As in the ask."""
    lease_id: Count
    """Travels in the notification's tag; used again only after 2^31 - 1 others."""
    offset: U64
    """Place of the lease in decode's staging area, in bytes; whole blocks of 4,096."""
    ticket: U64 = 0


class Heartbeat(Body, frozen=True, tag="heartbeat"):
    """Either side: the sender is alive."""


class Fenced(Body, frozen=True, tag="fenced"):
    """Either side: the sender has destroyed its transport's agent and leaves.

    No write of this incarnation can land any more, except for bytes that kernels hold. On decode it
    counts for rooms that were promised at that address.
    """


RoomWord = Promise | PromiseAck | Abort | Drained | Outcome | OutcomeAck | LeaseAsk | LeaseGrant
AnyBody = Hello | HelloReply | HelloWanted | HelloRefused | RoomWord | Heartbeat | Fenced


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message of the control plane as it travels."""

    version: Count
    """The version of the protocol."""
    name: Name
    """The sender's name; a rank above 0 of a worker has `/rank` behind it."""
    incarnation: U64
    """The life of that process: a random number, drawn at its start."""
    seq: U64
    """Number of the frame, in one sequence over all frames of the sender; it only grows."""
    body: AnyBody
    """One of the messages."""

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
    """Decode a frame that `encode` has made. Raises VersionError for another version, whatever its
    body is like, and ProtocolError for anything that is no frame."""
    # First the size, before anything is parsed.
    if len(raw) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(raw)} bytes, the limit is {MAX_FRAME_BYTES}")
    try:
        frame = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # A frame of another version may be malformed by our rules only: then its version is the
        # error that helps the operator.
        if (theirs := _version(raw)) != PROTOCOL_VERSION:
            raise VersionError(theirs, PROTOCOL_VERSION) from None
        raise ProtocolError(f"malformed frame: {error}") from None
    if frame.version != PROTOCOL_VERSION:
        raise VersionError(frame.version, PROTOCOL_VERSION)
    return frame


def _version(raw: bytes) -> int:
    """Ours where a frame begins with none."""
    try:
        return _envelope.decode(raw).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PROTOCOL_VERSION
