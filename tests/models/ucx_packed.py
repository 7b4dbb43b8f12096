"""A UCX worker's address taken apart and packed again, whatever its fields are: a naive model of
what `prefixkv/transport/metadata/ucx_form.py` reads."""

from __future__ import annotations

from dataclasses import dataclass, field

_ATTRIBUTES_BYTES = (16, 8)  # of a transport, by version


@dataclass
class Transport:
    checksum: int
    attributes: bytes
    address: bytes
    flags: int = 0  # beside the one that says it is the last


@dataclass
class Device:
    domain: int
    address: bytes = b""
    paths: int | None = None
    system: int | None = None
    transports: list[Transport] = field(default_factory=list)


@dataclass
class Packed:
    version: int  # 0 or 1, as in the first byte
    release: int
    uuid: bytes
    name: bytes | None
    devices: list[Device]
    flags: int = 2

    def pack(self) -> bytes:
        flags = self.flags | (self.name is not None)
        if self.version == 0:
            raw = bytes([flags << 4])
        else:
            raw = bytes([self.release << 4 | 1, flags])
        raw += self.uuid
        if self.name is not None:
            raw += bytes([len(self.name)]) + self.name
        for device in self.devices:
            is_last = self.version == 1 and device is self.devices[-1]
            more = b"" if device.paths is None else bytes([device.paths])
            more += b"" if device.system is None else bytes([device.system])
            device_flags = is_last << 7 | (device.paths is not None) << 6
            device_flags |= (device.system is not None) << 5
            raw += self._number(device.domain, 0x7F, 0)
            raw += self._number(len(device.address), 0x1F, device_flags) + more + device.address
            for transport in device.transports:
                transport_flags = transport.flags | (transport is device.transports[-1]) << 7
                raw += transport.checksum.to_bytes(2, "little") + transport.attributes
                raw += self._number(len(transport.address), 0x3F, transport_flags)
                raw += transport.address
        return raw + (bytes([0x80 | self.release, 0x80]) if self.version == 0 else b"")

    def _number(self, number: int, mask: int, flags: int) -> bytes:
        if self.version == 0 or number < mask:
            return bytes([number | flags])
        return bytes([mask | flags, number])


def unpack(raw: bytes) -> Packed:
    """Only for what a UCX worker packed."""
    left = iter(raw)

    def take(num_bytes: int) -> bytes:
        return bytes(next(left) for _ in range(num_bytes))

    def number(mask: int) -> tuple[int, int]:
        first = next(left)
        extended = version == 1 and first & mask == mask
        return next(left) if extended else first & mask, first & ~mask

    first = next(left)
    version = first & 0xF
    release, flags = (0, first >> 4) if version == 0 else (first >> 4, next(left))
    uuid = take(8)
    name = take(next(left)) if flags & 1 else None
    packed = Packed(version, release, uuid, name, [], flags & ~1)
    while True:
        domain, domain_flags = number(0x7F)
        num_bytes, device_flags = number(0x1F)
        if domain_flags:
            packed.release = domain
            return packed
        paths = next(left) if device_flags & 0x40 else None
        system = next(left) if device_flags & 0x20 else None
        device = Device(domain, take(num_bytes), paths, system)
        packed.devices.append(device)
        transport_flags = 0
        while not transport_flags & 0x80:
            checksum = int.from_bytes(take(2), "little")
            attributes = take(_ATTRIBUTES_BYTES[version])
            num_bytes, transport_flags = number(0x3F)
            device.transports.append(Transport(checksum, attributes, take(num_bytes)))
        if version == 1 and device_flags & 0x80:
            return packed


def address_of(metadata: bytes) -> bytes:
    """The UCX address in an agent's metadata."""
    start = metadata.index(b"|c") + 10
    return metadata[start : start + int.from_bytes(metadata[start - 8 : start], "little")]


def with_address(metadata: bytes, address: bytes) -> bytes:
    """The same metadata with another UCX address in it."""
    former = address_of(metadata)
    start = metadata.index(b"|c") + 2
    rest = metadata[start + 8 + len(former) :]
    return metadata[:start] + len(address).to_bytes(8, "little") + address + rest


def keys_of(metadata: bytes) -> list[range]:
    """Where in the metadata the keys are, of one kind of memory."""
    at = metadata.index(b"|n", metadata.index(b"nixlSDList|")) + 19
    found = []
    while at < len(metadata):
        size = int.from_bytes(metadata[at : at + 8], "little")
        found.append(range(at + 8 + 24, at + 8 + size))
        at += 8 + size + 1
    return found


def with_keys(metadata: bytes, key: bytes) -> bytes:
    """The same metadata with this key in the place of each."""
    for there in reversed(keys_of(metadata)):
        size = 24 + len(key)
        descriptor = metadata[there.start - 24 : there.start]
        start = there.start - 32
        metadata = (
            metadata[:start]
            + size.to_bytes(8, "little")
            + descriptor
            + key
            + metadata[there.stop :]
        )
    return metadata
