"""What UCX packs: the installed UCX's is read under any setting, and each field of it that UCX
could not have packed is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from prefixkv.errors import MetadataError
from prefixkv.transport.metadata.nixl_form import read_metadata
from prefixkv.transport.metadata.ucx_form import (
    UcxAddress,
    read_address,
    read_key,
    transport_checksum,
)
from prefixkv.transport.nixl.agent import NixlAgent
from tests.models.node_pair import make_pool
from tests.models.ucx_packed import (
    Device,
    Packed,
    Transport,
    address_of,
    keys_of,
    unpack,
    with_keys,
)
from tests.models.ucx_shapes import shaped

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "tcp alone": {"TLS": "tcp"},
    "tcp and cma": {"TLS": "tcp,cma"},
    "tcp and posix": {"TLS": "tcp,posix"},
    "tcp, sysv and self": {"TLS": "tcp,sysv,self"},
    "all interfaces": {"NET_DEVICES": "all"},
    "second version": {"ADDRESS_VERSION": "v2"},
    "second version, all interfaces": {"ADDRESS_VERSION": "v2", "NET_DEVICES": "all"},
    "with its name": {"ADDRESS_DEBUG_INFO": "y"},
    "second version with its name": {"ADDRESS_VERSION": "v2", "ADDRESS_DEBUG_INFO": "y"},
    "posix by name": {"POSIX_USE_PROC_LINK": "n"},
    "posix in a folder": {"POSIX_USE_PROC_LINK": "n", "POSIX_DIR": "/tmp"},
    "older protocols": {"PROTO_ENABLE": "n"},
    "no puts over tcp": {"TCP_PUT_ENABLE": "n"},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("num_layers", [1, 40])
def test_what_ucx_packs_is_read(
    setting: str, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS[setting].items():
        monkeypatch.setenv(f"UCX_{name}", value)
    pool = make_pool(num_layers=num_layers)
    agent = NixlAgent("honest", pool.layout)
    metadata = agent.metadata
    assert agent.destroy()
    assert sorted(read_metadata(metadata).ranges) == sorted(pool.layout.regions)
    address = address_of(metadata)
    assert unpack(address).pack() == address, "the model of it is right too"


@pytest.fixture(scope="module")
def metadata() -> Iterator[bytes]:
    """Of the installed NIXL."""
    agent = NixlAgent("honest", make_pool().layout)
    yield agent.metadata
    assert agent.destroy()


TCP_V1 = struct.pack("<fffI", 5e-5, 1.25e7, 1.1e-5, 0x231301)
SHM_V1 = struct.pack("<fffI", 1e-8, 1.6e10, 8e-8, 0xC0234F00)


def tcp(attributes: bytes = TCP_V1, address: bytes = b"\xbd\x9f") -> Transport:
    return Transport(transport_checksum("tcp"), attributes, address)


def made() -> Packed:
    """A worker with TCP on an IPv4 network, and System V's shared memory."""
    sysv = Transport(transport_checksum("sysv"), SHM_V1, bytes(8))
    devices = [
        Device(1, b"\0\2\x0a\0\0\1", transports=[tcp()]),
        Device(2, bytes(8), None, 0, [sysv]),
    ]
    return Packed(0, 7, bytes(range(8)), None, devices)


def test_a_made_address_is_read() -> None:
    assert read_address(made().pack()) == UcxAddress({1: 0, 2: 12}, 0)


def first(packed: Packed) -> tuple[Device, Transport]:
    return packed.devices[0], packed.devices[0].transports[0]


def speed(overhead: float = 5e-5, bandwidth: float = 1e7, latency: float = 1e-5) -> bytes:
    return struct.pack("<fffI", overhead, bandwidth, latency, 0x231301)


def with_device(**fields: object) -> Callable[[Packed], None]:
    def change(packed: Packed) -> None:
        for name, value in fields.items():
            setattr(first(packed)[0], name, value)

    return change


def with_transport(**fields: object) -> Callable[[Packed], None]:
    def change(packed: Packed) -> None:
        for name, value in fields.items():
            setattr(first(packed)[1], name, value)

    return change


def with_packed(**fields: object) -> Callable[[Packed], None]:
    def change(packed: Packed) -> None:
        for name, value in fields.items():
            setattr(packed, name, value)

    return change


def posix(address: bytes) -> Callable[[Packed], None]:
    def change(packed: Packed) -> None:
        packed.devices[1].transports[0] = Transport(transport_checksum("posix"), SHM_V1, address)

    return change


GOOD: dict[str, Callable[[Packed], None]] = {
    "the highest domain": with_device(domain=63),
    "paths": with_device(paths=2),
    "the most paths": with_device(paths=255),
    "a device": with_device(system=0),
    "the highest device": with_device(system=127),
    "a name": with_packed(name=b"host:1"),
    "an empty name": with_packed(name=b""),
    "the oldest release": with_packed(release=4),
    "the newest release": with_packed(release=14),
    "an IPv6 address": with_device(address=b"\0\x0a" + bytes(16)),
    "loopback": with_device(address=b"\1\2" + bytes(12)),
    "an unknown transport": with_transport(checksum=1, address=bytes(63)),
    "one that is slow": with_transport(attributes=speed(1.0, 1.0, 1.0)),
    "one that is fast": with_transport(attributes=speed(0.0, 9.9e14, 0.0)),
    "all flags": with_transport(attributes=struct.pack("<fffI", 0, 1, 0, 0xC03FFFFF)),
    "128 transports": with_device(transports=[tcp() for _ in range(127)]),
    "a segment by descriptor": posix(bytes(7) + b"\xc0"),
    "a segment by descriptor, in a namespace": posix(bytes(7) + b"\x90" + bytes(4)),
    "a segment by name": posix(bytes(7) + b"\x40"),
    "a segment in a folder": posix(bytes(7) + b"\x20/tmp\0"),
}

BAD: dict[str, Callable[[Packed], None]] = {
    "no identity": with_packed(flags=0),
    "a client's identity": with_packed(flags=6),
    "active messages only": with_packed(flags=10),
    "a domain beyond the map": with_device(domain=64),
    "no domain": with_device(domain=127),
    "no paths": with_device(paths=0),
    "one path, told": with_device(paths=1),
    "a device beyond the known": with_device(system=128),
    "no device, told": with_device(system=255),
    "a release before 1.20": with_packed(release=3),
    "a release after 1.30": with_packed(release=15),
    "flags of TCP": with_device(address=b"\2\2\x0a\0\0\1"),
    "a family of none": with_device(address=b"\0\x63\x0a\0\0\1"),
    "IPv6 in 4 bytes": with_device(address=b"\0\x0a\x0a\0\0\1"),
    "loopback in 4 bytes": with_device(address=b"\1\2\x0a\0\0\1"),
    "a short address of a device": with_device(address=b"\0\2\x0a\0\0"),
    "no address of a device": with_device(address=b""),
    "a short address": with_transport(address=b"\xbd"),
    "a long address": with_transport(address=b"\xbd\x9f\0"),
    "an endpoint": with_transport(flags=0x40),
    "another transport's checksum": with_transport(checksum=transport_checksum("self")),
    "unused flags": with_transport(attributes=struct.pack("<fffI", 0, 1, 0, 1 << 22)),
    "no bandwidth": with_transport(attributes=speed(bandwidth=0.0)),
    "negative bandwidth": with_transport(attributes=speed(bandwidth=-1.0)),
    "infinite bandwidth": with_transport(attributes=speed(bandwidth=float("inf"))),
    "no number for a bandwidth": with_transport(attributes=speed(bandwidth=float("nan"))),
    "no number for a latency": with_transport(attributes=speed(latency=float("nan"))),
    "a latency of hours": with_transport(attributes=speed(latency=4e3)),
    "negative overhead": with_transport(attributes=speed(overhead=-1e-6)),
    "129 transports": with_device(transports=[tcp() for _ in range(128)]),
    "one domain of two kinds": with_device(domain=2),
    "no devices": with_packed(devices=[]),
    "a segment without its namespace": posix(bytes(7) + b"\x90"),
    "a segment by descriptor and more": posix(bytes(7) + b"\x80/tmp\0"),
    "a segment without a folder": posix(bytes(8)),
    "a segment in a nameless folder": posix(bytes(8) + b"\0"),
    "a folder without an end": posix(bytes(8) + b"/tmp"),
    "a folder that ends early": posix(bytes(8) + b"/t\0p\0"),
}


def second(packed: Packed) -> Packed:
    """The same in the second version of the form, with speeds of 8 bits."""
    packed.version = 1
    for device in packed.devices:
        for transport in device.transports:
            *speeds, flags = struct.unpack("<fffI", transport.attributes)
            is_wrong = flags & 0x3FC00000 or not (
                all(0 <= one < float("inf") for one in speeds) and speeds[1] and speeds[2] <= 1
            )
            transport.attributes = (
                b"\x3f" * 8 if is_wrong else bytes([0x21, 0x4E, 0, 1, 4, 0, 0xF, 3])
            )
    return packed


@pytest.mark.parametrize("name", GOOD)
def test_what_ucx_could_have_packed_is_read(name: str) -> None:
    for version in (0, 1):
        packed = made()
        GOOD[name](packed)
        read_address((second(packed) if version else packed).pack())


@pytest.mark.parametrize("name", BAD)
def test_what_ucx_could_not_have_packed_is_refused(name: str) -> None:
    for version in (0, 1):
        packed = made()
        BAD[name](packed)
        with pytest.raises(MetadataError, match="UCX address"):
            read_address((second(packed) if version else packed).pack())


def test_a_device_without_transports_ends_the_first_version_and_is_nowhere_else() -> None:
    raw = made().pack()
    read_address(raw[:-2] + b"\x88\x80")
    for end in (
        *(b"", b"\x87", b"\x87\x80\x87\x80", b"\x87\x80\0"),
        *(b"\x22\x80", b"\x07\x80", b"\x97\x80"),
        *(b"\x87\x81\0", b"\x87\xa0\0", b"\x87\xc0\2", b"\x87\0"),
    ):
        with pytest.raises(MetadataError):
            read_address(raw[:-2] + end)
    with pytest.raises(MetadataError):
        read_address(second(made()).pack() + b"\x87\x80")
    with pytest.raises(MetadataError):
        read_address(raw[:9] + b"\x87\x80")


def test_a_number_that_has_room_in_one_byte_is_not_in_two() -> None:
    packed = second(made())
    packed.devices[0].transports[0] = Transport(1, bytes(8), bytes(63))
    raw = packed.pack()
    assert raw.count(b"\xbf\x3f") == 1
    read_address(raw)
    with pytest.raises(MetadataError, match="62 in two bytes"):
        read_address(raw.replace(b"\xbf\x3f", b"\xbf\x3e"))


def test_every_piece_of_an_address_and_of_a_key_is_refused(metadata: bytes) -> None:
    for raw in (address_of(metadata), made().pack(), second(made()).pack()):
        for size in range(len(raw)):
            with pytest.raises(MetadataError):
                read_address(raw[:size])
        with pytest.raises(MetadataError):
            read_address(raw + b"\0")
    address = read_address(made().pack())
    raw = key(2, 7, (b"", bytes(12)))
    for size in range(len(raw)):
        with pytest.raises(MetadataError):
            read_key(raw[:size], address)


def test_random_addresses_raise_nothing_else(metadata: bytes) -> None:
    rng = random.Random(1)
    whole = address_of(metadata)
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        with suppress(MetadataError):
            read_address(
                bytes(raw[: rng.randrange(len(raw) + 1)]) if rng.random() < 0.2 else bytes(raw)
            )


def key(memory_type: int, domains: int, parts: tuple[bytes, ...], end: bytes = b"\xff") -> bytes:
    raw = domains.to_bytes(8, "little") + bytes([memory_type])
    return raw + b"".join(bytes([len(part)]) + part for part in parts) + end


def test_a_key_is_read() -> None:
    address = read_address(made().pack())
    assert read_key(key(0, 0, (), b""), address) == (0, 0, 255), "no domain needs one"
    assert read_key(key(9, 6, (b"", bytes(12))), address) == (6, 9, 255)
    assert read_key(key(1, 1 << 63, (bytes(255),)), address) == (1 << 63, 1, 255)
    near = bytes([3, 0, 0x21, 0x0F, 63, 0x21, 0x4E, 255])
    assert read_key(key(1, 2, (b"",), near), address) == (2, 1, 3)


@pytest.mark.parametrize(
    "raw",
    [
        key(10, 2, (b"",)),
        key(255, 2, (b"",)),
        key(10, 0, (), b""),
        key(0, 0, ()),
        key(0, 4, (bytes(11),)),
        key(0, 2, (b"",), b"\xff\0"),
        key(0, 2, (b"",), b""),
        key(1, 2, (b"",), bytes([3])),
        key(1, 2, (b"",), bytes([3, 0, 0, 0])),
        key(1, 2, (b"",), bytes([3, 64, 0, 0, 255])),
        key(1, 2, (b"",), bytes([3, 1, 0, 0, 0, 0, 0, 255])),
        key(1, 2, (b"",), bytes([3, 0, 0x1F, 0, 255])),
        key(1, 2, (b"",), bytes([3, 0, 0, 0x1F, 255])),
    ],
)
def test_a_key_that_ucx_could_not_have_packed_is_refused(raw: bytes) -> None:
    with pytest.raises(MetadataError, match="UCX key"):
        read_key(raw, read_address(made().pack()))


def test_distances_go_with_devices_that_have_one() -> None:
    near = key(1, 2, (b"",), bytes([3, 0, 0, 0, 255]))
    read_key(near, UcxAddress({}, 63))
    with pytest.raises(MetadataError, match="an address with device 64"):
        read_key(near, UcxAddress({}, 64))


def test_a_peer_brings_few_kinds_of_keys(metadata: bytes) -> None:
    """UCX keeps each kind for good."""
    there = keys_of(metadata)
    assert len(there) == 2
    real = metadata[there[0].start : there[0].stop]
    read_metadata(with_keys(metadata, real))
    pool = make_pool(num_layers=5)
    agent = NixlAgent("honest", pool.layout)
    changed = bytearray(agent.metadata)
    assert agent.destroy()
    for number, one in enumerate(keys_of(bytes(changed))):
        changed[one.start + 8] = number % 4
    read_metadata(bytes(changed))
    for number, one in enumerate(keys_of(bytes(changed))):
        changed[one.start + 8] = number % 5
    with pytest.raises(MetadataError, match="more than 4 kinds"):
        read_metadata(bytes(changed))


def test_what_the_fuzzer_makes_keeps_the_form(metadata: bytes) -> None:
    """But for changes that do not go together, such as a key and the domains it was made for."""
    rng = random.Random(1)
    refused = 0
    for _ in range(300):
        try:
            read_metadata(shaped(metadata, rng))
        except MetadataError:
            refused += 1
    assert refused < 30
