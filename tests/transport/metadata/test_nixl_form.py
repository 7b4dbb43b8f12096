"""The form of NIXL's metadata: what the installed NIXL writes is read, and everything else is
refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from prefixkv.errors import HandshakeError, MetadataError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.metadata.nixl_form import check_metadata, nixl_name, read_metadata
from prefixkv.transport.nixl.agent import NixlAgent
from tests.models.node_pair import make_pool
from tests.models.ucx_packed import address_of, keys_of

PEER = PeerId("decode", 7)


class Real:
    """An agent of the installed NIXL, and where in its metadata the opaque parts are: what UCX
    packed, which has a form of its own (`test_ucx_form.py`), and the device of a range."""

    def __init__(self) -> None:
        self.pool = make_pool()
        self.agent = NixlAgent(nixl_name(PEER), self.pool.layout)
        self.raw = self.agent.metadata
        self.ranges = self.pool.layout.regions
        start = self.raw.index(b"|c") + 10
        self.address = range(start, start + len(address_of(self.raw)))
        self.opaque = {*self.address}
        for key in keys_of(self.raw):
            self.opaque |= {*range(key.start - 8, key.stop)}


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
    taken = set()
    for at in range(len(real.raw)):
        changed = bytearray(real.raw)
        changed[at] ^= 0x4C
        if not refused(bytes(changed), real.ranges):
            taken.add(at)
    assert taken < real.opaque


def test_every_piece_of_it_is_refused_and_more_than_it_too(real: Real) -> None:
    for size in range(len(real.raw)):
        assert refused(real.raw[:size], real.ranges)
    assert refused(real.raw + b"\0", real.ranges)


def test_a_ucx_address_that_begins_with_ff_is_refused(real: Real) -> None:
    changed = bytearray(real.raw)
    changed[real.address.start] = 0xFF
    with pytest.raises(HandshakeError, match="UCX address, before byte 1: it begins with ff"):
        check_metadata(bytes(changed), PEER, real.ranges)


def test_lengths_and_counts_at_their_limits_allocate_nothing(real: Real) -> None:
    for at in range(len(real.raw) - 8):
        for number in (2**64 - 1, 2**63, 2**31, len(real.raw)):
            changed = bytearray(real.raw)
            changed[at : at + 8] = number.to_bytes(8, "little")
            if {i for i in range(at, at + 8) if changed[i] != real.raw[i]} - real.opaque:
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
