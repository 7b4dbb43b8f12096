"""UCX addresses and keys that keep the form which prefixkv checks, with anything in them that the
form leaves open: what a decode worker could send that knows it."""

from __future__ import annotations

import random
import struct

from prefixkv.transport.metadata.ucx_form import transport_checksum
from tests.models.ucx_packed import (
    Device,
    Packed,
    Transport,
    address_of,
    unpack,
    with_address,
    with_keys,
)

_OTHERS = {"cuda_copy": (0, 8), "cuda_ipc": (8, 12), "rc_mlx5": (17, 1), "dc_mlx5": (17, 5)}
_MOST_TRANSPORTS = 128


def shaped(metadata: bytes, rng: random.Random) -> bytes:
    """The metadata with one to four changes inside the form."""
    packed = unpack(address_of(metadata))
    key = None
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        change = rng.choice((*_CHANGES, None, None))
        if change is not None:
            change(packed, rng)
        else:
            key = _key(packed, rng)
    metadata = with_address(metadata, packed.pack())
    return metadata if key is None else with_keys(metadata, key)


def _domains(packed: Packed, rng: random.Random) -> None:
    former = sorted({device.domain for device in packed.devices})
    others = dict(zip(former, rng.sample(range(64), len(former)), strict=True))
    for device in packed.devices:
        device.domain = others[device.domain]


def _devices(packed: Packed, rng: random.Random) -> None:
    for device in packed.devices:
        if rng.random() < 0.5:
            device.paths = rng.choice((None, 2, 3, 64, 255, rng.randrange(2, 256)))
            device.system = rng.choice((None, 0, 63, 64, 127, rng.randrange(128)))


def _attributes(packed: Packed, rng: random.Random) -> None:
    for device in packed.devices:
        for transport in device.transports:
            if rng.random() < 0.5:
                transport.attributes = _random_attributes(packed.version, rng)


def _random_attributes(version: int, rng: random.Random) -> bytes:
    if version == 1:
        speeds = (rng.randrange(16) << 4 | rng.randrange(15) for _ in range(3))
        return struct.pack(
            "<BBBBHH", *speeds, rng.randrange(256), rng.randrange(2**16), rng.randrange(2**10)
        )
    flags = rng.randrange(2**22) | rng.randrange(4) << 30
    times = [rng.choice((0.0, 1.0, 1e-38, 10 ** rng.uniform(-12, 0))) for _ in range(2)]
    bandwidth = rng.choice((1.0, 9e14, 10 ** rng.uniform(0, 14.9)))
    return struct.pack("<fffI", times[0], bandwidth, times[1], flags)


def _second_version(packed: Packed, rng: random.Random) -> None:
    if packed.version == 0:
        packed.version = 1
        for device in packed.devices:
            for transport in device.transports:
                transport.attributes = _random_attributes(1, rng)


def _release(packed: Packed, rng: random.Random) -> None:
    packed.release = rng.randrange(4, 15)


def _identity(packed: Packed, rng: random.Random) -> None:
    packed.uuid = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))
    packed.name = rng.choice((None, b"", rng.randbytes(rng.randrange(256))))


def _order(packed: Packed, rng: random.Random) -> None:
    rng.shuffle(packed.devices)


def _fewer(packed: Packed, rng: random.Random) -> None:
    packed.devices = rng.sample(packed.devices, rng.randrange(1, len(packed.devices) + 1))


def _more(packed: Packed, rng: random.Random) -> None:
    """Devices of the same kind, or of one that this machine has not."""
    here = sum(len(device.transports) for device in packed.devices)
    room = rng.choice((1, 2, 8, _MOST_TRANSPORTS - here))
    while (room := room - 1) >= 0 and here < _MOST_TRANSPORTS:
        like = rng.choice(packed.devices)
        if rng.random() < 0.7:
            transports = [Transport(*_fields(one)) for one in like.transports]
            device = Device(like.domain, like.address, like.paths, like.system, transports)
        else:
            device = _other_device(packed, rng)
        here += len(device.transports)
        if here <= _MOST_TRANSPORTS:
            packed.devices.insert(rng.randrange(len(packed.devices) + 1), device)


def _fields(transport: Transport) -> tuple[int, bytes, bytes]:
    return transport.checksum, transport.attributes, transport.address


def _other_device(packed: Packed, rng: random.Random) -> Device:
    taken = {device.domain for device in packed.devices}
    free = [domain for domain in range(64) if domain not in taken] or [64]  # one that is refused
    name = rng.choice((*_OTHERS, ""))
    device_bytes, address_bytes = _OTHERS.get(name, (rng.randrange(31), rng.randrange(63)))
    checksum = transport_checksum(name) if name else 1
    address = rng.randbytes(address_bytes)
    transport = Transport(checksum, _random_attributes(packed.version, rng), address)
    return Device(rng.choice(free), rng.randbytes(device_bytes), transports=[transport])


def _addresses(packed: Packed, rng: random.Random) -> None:
    """Another port, process, host or segment."""
    for device in packed.devices:
        for transport in device.transports:
            if transport.address and rng.random() < 0.3:
                changed = bytearray(transport.address)
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                transport.address = bytes(changed)


def _key(packed: Packed, rng: random.Random) -> bytes:
    domains = rng.sample(range(64), rng.randrange(8))
    domains = sorted({*domains, *rng.sample([one.domain for one in packed.devices], 1)})
    key = sum(1 << domain for domain in domains).to_bytes(8, "little") + bytes([rng.randrange(10)])
    for _ in domains:
        num_bytes = rng.choice((24, 32, 64, 255))
        key += bytes([num_bytes]) + rng.randbytes(num_bytes)
    if rng.random() < 0.5:
        return key + b"\xff"
    key += bytes([rng.choice((0, 1, 63, 127, 128, 191, rng.randrange(255)))])
    for device in sorted(rng.sample(range(64), rng.choice((0, 1, 8, 64)))):
        key += bytes([device, *(rng.randrange(16) << 4 | rng.randrange(15) for _ in range(2))])
    return key + b"\xff"


_CHANGES = (
    _domains, _devices, _attributes, _second_version, _release, _identity, _order, _fewer, _more,
    _addresses,
)  # fmt: skip
