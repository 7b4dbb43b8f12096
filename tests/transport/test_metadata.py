"""The form of NIXL's metadata: what the installed NIXL writes is read, and everything else is
refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from prefixkv.errors import HandshakeError, MetadataError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.metadata import check_metadata, nixl_name, read_metadata
from prefixkv.transport.nixl_agent import NixlAgent
from tests.models.node_pair import make_pool

PEER = PeerId("decode", 7)


class Real:
    """An agent of the installed NIXL, and where in its metadata the opaque parts are."""

    def __init__(self) -> None:
        self.pool = make_pool()
        self.agent = NixlAgent(nixl_name(PEER), self.pool.layout)
        self.raw = self.agent.metadata
        self.ranges = self.pool.layout.regions
        start = self.raw.index(b"|c") + 10
        size = int.from_bytes(self.raw[start - 8 : start], "little")
        self.address = range(start, start + size)
        self.opaque = {*self.address[1:]}
        at = self.raw.index(b"nixlSDList|")
        at = self.raw.index(b"|n", at) + 19
        for _ in self.ranges:
            size = int.from_bytes(self.raw[at : at + 8], "little")
            self.opaque |= {*range(at + 8 + 16, at + 8 + size)}  # the device and the key
            at += 8 + size + 1
        assert at == len(self.raw), "the whole of it was walked"


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    made = Real()
    yield made
    assert made.agent.destroy()


def refused(raw: bytes, ranges: Any, peer: PeerId = PEER) -> bool:
    try:
        check_metadata(raw, peer, ranges)
    except MetadataError as error:
        assert len(str(error)) < 500
        return True
    return False


def test_what_nixl_writes_is_read_whole(real: Real) -> None:
    found = read_metadata(real.raw)
    assert found.name == nixl_name(PEER)
    assert sorted(found.ranges) == sorted(real.ranges)
    check_metadata(real.raw, PEER, real.ranges)


def test_every_byte_outside_the_opaque_parts_counts(real: Real) -> None:
    for at in range(len(real.raw)):
        changed = bytearray(real.raw)
        changed[at] ^= 0x4C
        assert refused(bytes(changed), real.ranges) == (at not in real.opaque), at


def test_every_piece_of_it_is_refused_and_more_than_it_too(real: Real) -> None:
    for size in range(len(real.raw)):
        assert refused(real.raw[:size], real.ranges)
    assert refused(real.raw + b"\0", real.ranges)


def test_a_ucx_address_that_begins_with_ff_is_refused(real: Real) -> None:
    changed = bytearray(real.raw)
    changed[real.address.start] = 0xFF
    with pytest.raises(HandshakeError, match="UCX address that begins with ff"):
        check_metadata(bytes(changed), PEER, real.ranges)


def test_lengths_and_counts_at_their_limits_allocate_nothing(real: Real) -> None:
    for at in range(len(real.raw) - 8):
        for number in (2**64 - 1, 2**63, 2**31, len(real.raw)):
            changed = bytearray(real.raw)
            changed[at : at + 8] = number.to_bytes(8, "little")
            counts = {i for i in range(at, at + 8) if changed[i] != real.raw[i]} - real.opaque
            if counts - {real.address.start}:  # of that byte only one half counts
                assert refused(bytes(changed), real.ranges), (at, number)


def test_random_bytes_raise_nothing_else() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        assert refused(
            b"nixlSerDes|Agent" * rng.randrange(2) + rng.randbytes(rng.randrange(99)), ()
        )


def test_it_is_the_peers_own_and_names_the_memory_of_its_hello(real: Real) -> None:
    assert refused(real.raw, real.ranges, PEER._replace(incarnation=8))
    [first, *others] = real.ranges
    assert refused(real.raw, [*real.ranges, (first[0] + first[1], 64)])
    assert refused(real.raw, others)
    assert refused(real.raw, [(first[0], first[1] + 1), *others])
