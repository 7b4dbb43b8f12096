"""What travels: every body comes back as it was, and nothing else gets in."""

import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.control.handshake import check_pair
from prefixkv.errors import ConfigError, HandshakeError, ProtocolError
from prefixkv.protocol import messages
from prefixkv.protocol.ids import SUM_BYTES, TAG_BYTES, ChunkTag, tag_bytes
from prefixkv.protocol.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    FailureCode,
    Frame,
    Promise,
    Topology,
    decode,
    encode,
)
from tests.unit.control.wire import ADDRESS, DECODE, DIGEST, HELLO, LAYOUT, TOPOLOGY, promise

BODIES = [
    HELLO,
    messages.HelloReply(DIGEST, TOPOLOGY, (ADDRESS,), "no"),
    messages.HelloWanted(),
    messages.HelloRefused(2**64 - 1, "no", True),
    promise(room=2**64 - 1, generation=2**31 - 1),
    messages.PromiseAck(7, 0, 1),
    messages.Abort(7, 0, "why"),
    messages.Drained(7, 0, 1),
    messages.Outcome(7, 0, 1, True, 2, 3, b"\x00\xff", "", False),
    messages.Outcome(7, 0, 1, False, 0, 0, b"", "no", True, 2, FailureCode.PROMPT_MISMATCH),
    messages.OutcomeAck(7, 0, 1),
    messages.LeaseAsk(7, 0, 1, 2, 3, 4),
    messages.LeaseGrant(7, 0, 2, 3, 2**40),
    messages.Heartbeat(),
    messages.Fenced(),
]


def test_every_body_comes_back_as_it_was() -> None:
    assert {type(body) for body in BODIES} == set(get_args(messages.AnyBody)), (
        "a body without a test"
    )
    for body in BODIES:
        frame = decode(encode(DECODE, 2**63, body))
        assert frame == Frame(PROTOCOL_VERSION, DECODE.name, DECODE.incarnation, 2**63, body)
        assert frame.sender == DECODE


def _plain(**changes: Any) -> list[Any]:
    frame = {
        "version": PROTOCOL_VERSION,
        "name": "a",
        "incarnation": 1,
        "seq": 1,
        "body": ["heartbeat"],
        **changes,
    }
    return list(frame.values())


_changed = msgspec.structs.replace


def _hello(**changes: Any) -> bytes:
    return encode(DECODE, 1, _changed(HELLO, **changes))


BAD_FRAMES = {
    "empty": b"",
    "not msgpack": b"\xc1",
    "truncated": encode(DECODE, 1, HELLO)[:-1],
    "too long": b"\x00" * (MAX_FRAME_BYTES + 1),
    "nested too deep": b"\x91" * 200_000,
    "not a list": {"version": 1},
    "too few fields": _plain()[:4],
    "another version": _plain(version=PROTOCOL_VERSION + 1),
    "no name": _plain(name=""),
    "a long name": _plain(name="a" * 257),
    "a name of bytes": _plain(name=b"a"),
    "a negative incarnation": _plain(incarnation=-1),
    "a seq that is no integer": _plain(seq=1.5),
    "an unknown body": _plain(body=["pickle", b""]),
    "no body": _plain(body=[]),
    "a negative room": _plain(body=["promise-ack", -1, 0, 0]),
    "a generation beyond int32": _plain(body=["promise-ack", 7, 2**31, 0]),
    "a long reason": _plain(body=["abort", 7, 0, "x" * 5000]),
    "a model name of a megabyte": _hello(digest=_changed(DIGEST, model="x" * 1_000_000)),
    "metadata of two megabytes": _hello(agent_metadata=bytes(2 << 20)),
    "a mesh of a million stages": _hello(topology=Topology(16, 1, 1, (1,) * 1_000_000)),
    "a million regions": _hello(layout=_changed(LAYOUT, regions=((0, 1),) * 1_000_000)),
    "a million slabs": _hello(layout=_changed(LAYOUT, slabs=LAYOUT.slabs[:1] * 100_000)),
    "a million endpoints": encode(
        DECODE, 1, messages.HelloReply(DIGEST, TOPOLOGY, ("x",) * 1_000_000)
    ),
    "a digest of 65 bytes": encode(DECODE, 1, _changed(promise(), digest=bytes(65))),
    "pages as a list": _plain(body=["promise", 7, 0, 10, 4, [3, 9]]),
    "text that is no text": encode(DECODE, 1, messages.Abort(7, 0, "abc")).replace(
        b"abc", b"\xff\xfe\xfd"
    ),
}


@pytest.mark.parametrize("raw", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_what_is_no_frame_is_a_protocol_error(raw: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(raw if isinstance(raw, bytes) else msgspec.msgpack.encode(raw))


def test_a_code_of_a_later_release_is_another_failure() -> None:
    frame = decode(
        msgspec.msgpack.encode(
            _plain(body=["outcome", 7, 0, 1, False, 0, 0, b"", "no", True, 2, 99])
        )
    )
    assert frame.body == messages.Outcome(
        7, 0, 1, False, 0, 0, b"", "no", True, 2, FailureCode.OTHER
    )


@given(st.sampled_from(BODIES), st.data())
def test_a_damaged_frame_is_another_frame_or_a_protocol_error(
    body: Any, data: st.DataObject
) -> None:
    raw = bytearray(encode(DECODE, 1, body))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = decode(bytes(raw))
    except ProtocolError:
        return
    assert isinstance(frame, Frame)
    assert decode(encode(frame.sender, frame.seq, frame.body)) == frame


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.integers(1, 3))
def test_page_ids_are_little_endian_int32(pages: list[int], extra_bytes: int) -> None:
    raw = struct.pack(f"<{len(pages)}i", *pages)
    ids = Promise(1, 0, 1, 0, raw).page_ids()
    assert ids.tolist() == pages
    assert ids.dtype.name == "int32"
    ids[:] = 0  # the caller's
    with pytest.raises(ProtocolError, match=f"{len(raw) + extra_bytes} bytes"):
        Promise(1, 0, 1, 0, raw + b"\x00" * extra_bytes).page_ids()


@pytest.mark.parametrize(
    "field", [field for field in DIGEST.__struct_fields__ if field not in ("state", "groups")]
)
def test_a_digest_that_differs_names_the_field(field: str) -> None:
    value = getattr(DIGEST, field)
    theirs = msgspec.structs.replace(
        DIGEST, **{field: value + 1 if isinstance(value, int) else value + "x"}
    )
    with pytest.raises(HandshakeError, match=f"{field} differs") as caught:
        check_pair(DIGEST, TOPOLOGY, theirs, TOPOLOGY)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        field,
        value,
        getattr(theirs, field),
    )
    check_pair(DIGEST, TOPOLOGY, DIGEST, TOPOLOGY)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"page_size": 6}, "page_size"),
        ({"tensor_parallel": 3}, "tp_size"),
        ({"pipeline_parallel": 8}, "pp_size"),
        ({"pipeline_parallel": 2, "stage_layers": (1, 2)}, "stage_layers"),
    ],
)
def test_a_topology_that_does_not_fit_names_the_field(changes: dict[str, Any], field: str) -> None:
    digest = msgspec.structs.replace(DIGEST, num_layers=4, num_kv_heads=6)
    ours = msgspec.structs.replace(TOPOLOGY, tensor_parallel=2)
    with pytest.raises((HandshakeError, ConfigError), match=field):
        check_pair(digest, ours, digest, msgspec.structs.replace(TOPOLOGY, **changes))


def test_a_topology_that_fits_may_differ() -> None:
    digest = msgspec.structs.replace(DIGEST, num_layers=4, num_kv_heads=6)
    check_pair(digest, TOPOLOGY, digest, Topology(TOPOLOGY.page_size * 4, 2, 2, (1, 3)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"page_size": TOPOLOGY.page_size * 4}, "page_size"), ({"tensor_parallel": 2}, "tp_size")],
)
def test_opaque_pages_are_not_split(changes: dict[str, Any], field: str) -> None:
    digest = msgspec.structs.replace(DIGEST, num_layers=4, num_kv_heads=6)
    theirs = msgspec.structs.replace(TOPOLOGY, **changes)
    check_pair(digest, TOPOLOGY, digest, theirs)
    opaque = msgspec.structs.replace(digest, opaque="amx")
    with pytest.raises(HandshakeError, match="must be equal where pages are opaque") as caught:
        check_pair(opaque, TOPOLOGY, opaque, theirs)
    assert caught.value.field == field
    check_pair(opaque, TOPOLOGY, opaque, Topology(TOPOLOGY.page_size, 1, 2, (1, 3)))


TAGS = st.builds(
    ChunkTag, incarnation=st.integers(0, 2**64 - 1), room=st.integers(0, 2**64 - 1),
    generation=st.integers(0, 2**32 - 1), rank=st.integers(0, 2**16 - 1),
    chunk=st.integers(0, 2**32 - 1), part=st.integers(0, 99), num_parts=st.integers(100, 2**16 - 1),
    lease_id=st.integers(-1, 2**31 - 1), num_pages=st.integers(0, 2**32 - 1),
    ticket=st.integers(0, 2**64 - 1), group=st.integers(-1, 99), first=st.integers(0, 2**32 - 1),
    sums=st.binary(max_size=99).map(lambda raw: raw * SUM_BYTES),
)  # fmt: skip


@given(TAGS)
def test_a_tag_comes_back_as_it_was(tag: ChunkTag) -> None:
    raw = tag.pack()
    assert len(raw) == tag_bytes(raw) == TAG_BYTES + len(tag.sums)
    assert ChunkTag.unpack(raw) == tag


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x" * TAG_BYTES,
        ChunkTag(1, 7, 0, 0, 2).pack()[:-1],
        ChunkTag(1, 7, 0, 0, 2).pack() + b"\x00",
        ChunkTag(1, 7, 0, 0, 2, sums=bytes(8)).pack()[:-SUM_BYTES],
        ChunkTag(1, 7, 0, 0, 2, part=1, num_parts=1).pack(),
        ChunkTag(1, 7, 0, 0, 2, part=0, num_parts=0).pack(),
        ChunkTag(1, 7, 0, 0, 2, group=-2).pack(),
    ],
)
def test_what_is_no_tag_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChunkTag.unpack(raw)
