"""A strict reader of what UCX packs for a peer: a worker's address, and a key to its memory. Pure.

UCX's own reader believes every number in it. A memory type that UCX does not have is an index
beyond a table, and an address with no device marked as the last is read beyond its end: what is
there differs from process to process, so a trial in another one cannot tell. So nothing passes here
that a UCX worker could not have packed. What differs between honest machines is only bounded:
addresses, speeds, and the number of devices.

An address is a head, then devices, each with its transports. A key is a bit map of memory domains,
the type of memory, a part for each of these domains, and how far the memory is from devices.

Not read: addresses without the transports' attributes (UCX_UNIFIED_MODE).

Source: UCX 1.23, `ucp_address_do_pack` and `ucp_rkey_pack_memh`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container
from typing import Final, NamedTuple

from prefixkv.errors import MetadataError

_HAS_NAME: Final = 1  # flags of the head: the worker's name is in it (UCX_ADDRESS_DEBUG_INFO)
_HAS_UUID: Final = 2
_RELEASES: Final = range(20 - 16, 31 - 16)  # 1.20 to 1.30, as the four bits tell it
_MAX_DOMAINS: Final = 64  # bits in a key's map
_MAX_TRANSPORTS: Final = 128
_MAX_DEVICES: Final = 64  # those that UCX knows distances of
_NO_DEVICE: Final = 0xFF
_NUM_MEMORY_TYPES: Final = 10  # host to gaudi

_LAST: Final = 0x80
_EMPTY: Final = 0x80  # of a memory domain: a device without transports
_HAS_PATHS: Final = 0x40
_HAS_DEVICE: Final = 0x20
_HAS_ENDPOINTS: Final = 0x40

_MAX_S: Final = 1.0  # overhead and latency
_MIN_BYTES_PER_S: Final = 1.0
_MAX_BYTES_PER_S: Final = 1e15
_V1_ATTRIBUTES: Final = struct.Struct("<fffI")  # overhead, bandwidth, latency, priority and flags
_V1_UNUSED_FLAGS: Final = 0x3FC00000
_V2_ATTRIBUTES: Final = struct.Struct("<BBBBHH")  # the same as floats of 8 bits, segment size
_V2_UNUSED_FLAGS: Final = 0xFC00


class UcxAddress(NamedTuple):
    """The part of an address that keys are checked against.

    `least_key_bytes` is, by memory domain, how much UCX reads of its part of a key.
    """

    least_key_bytes: dict[int, int]
    highest_device: int


class KeyKind(NamedTuple):
    """The properties of a key that UCX keeps a configuration for, as long as its worker lives."""

    domains: int
    memory_type: int
    device: int


class _Transport(NamedTuple):
    """A transport of UCX's, with the sizes that its addresses can have."""

    domain: str  # the component that its keys belong to
    least_key_bytes: int
    device_bytes: Container[int]
    address_bytes: Container[int]
    check: Callable[[bytes, bytes], bool] = lambda device, address: True


def read_address(raw: bytes) -> UcxAddress:
    """Read the address of a UCX worker, as it is packed. O(its bytes). Raise MetadataError for
    anything unknown. Transports that are not in the table have a form of their own, and only their
    lengths are read: UCX skips them unless it has them itself."""
    data = _ByteReader(raw, "the UCX address")
    is_second = _read_head(data)
    known: dict[int, _Transport] = {}
    num_transports, highest_device = 0, -1
    while True:
        # Each round is a device: its memory domain, its length and flags, its transports.
        domain, domain_flags = data.packed(0x7F, is_second)
        num_bytes, flags = data.packed(0x1F, is_second)
        # 1. In the first version an empty domain behind the devices carries the release, and ends
        # it.
        if domain_flags & _EMPTY and not is_second and num_transports:
            if num_bytes or flags != _LAST or domain not in _RELEASES:
                raise data.wrong(f"release {domain}, {num_bytes} bytes, flags {flags:#x}")
            break
        # 2. The domain is an index and a bit number in UCX.
        if domain_flags & _EMPTY or domain >= _MAX_DOMAINS:
            raise data.wrong(f"memory domain {domain}, flags {domain_flags:#x}")
        # 3. What the flags announce: paths, the system device.
        if flags & _HAS_PATHS and data.byte() < 2:
            raise data.wrong("a device with fewer paths than are told")
        if flags & _HAS_DEVICE:
            highest_device = max(highest_device, data.byte())
        if highest_device >= 2 * _MAX_DEVICES:
            raise data.wrong(f"system device {highest_device}")
        device = data.take(num_bytes)
        is_last = False
        # 4. Its transports, of which one is marked as the last. Two transports of one domain have
        # to agree on what its keys look like, since a key names the domain alone.
        while not is_last:
            num_transports += 1
            transport, is_last = _read_transport(data, device, is_second)
            if transport and known.setdefault(domain, transport).domain != transport.domain:
                raise data.wrong(f"memory domain {domain} of two kinds")
        if num_transports > _MAX_TRANSPORTS:
            raise data.wrong(f"more than {_MAX_TRANSPORTS} transports")
        # 5. The last device. Without the mark, UCX would read on behind the end of the address.
        if flags & _LAST:
            if not is_second:
                raise data.wrong("a last device without a release behind it")
            break
    data.end()
    least = {domain: transport.least_key_bytes for domain, transport in known.items()}
    return UcxAddress(least, highest_device)


def read_key(raw: bytes, address: UcxAddress) -> KeyKind:
    """Read a packed UCX key to the memory of the worker with this address. O(its bytes).

    Raises:
        MetadataError: for anything unknown.
    """
    data = _ByteReader(raw, "a UCX key")
    domains = int.from_bytes(data.take(8), "little")
    if (memory_type := data.byte()) >= _NUM_MEMORY_TYPES:
        raise data.wrong(f"memory of type {memory_type}")
    # A part per domain. UCX reads a fixed length of each, whatever length is said.
    for domain in range(domains.bit_length()):
        if domains >> domain & 1:
            num_bytes = data.byte()
            if num_bytes < address.least_key_bytes.get(domain, 0):
                raise data.wrong(f"{num_bytes} bytes for memory domain {domain}")
            data.take(num_bytes)
    device = data.byte() if domains else _NO_DEVICE
    if device != _NO_DEVICE:
        _read_distances(data, address)
    data.end()
    return KeyKind(domains, memory_type, device)


def _read_head(data: _ByteReader) -> bool:
    """Read the head of a UCX address; return True for the second version of the form
    (UCX_ADDRESS_VERSION=v2)."""
    first = data.byte()
    version, high = first & 0xF, first >> 4
    if version > 1:
        raise data.wrong(f"it begins with {first:02x}")
    if version == 1 and high not in _RELEASES:
        raise data.wrong(f"release {high}")
    flags = data.byte() if version == 1 else high
    if flags & ~_HAS_NAME != _HAS_UUID:
        raise data.wrong(f"flags {flags:#x}")
    data.take(8)
    if flags & _HAS_NAME:
        data.take(data.byte())
    return version == 1


def _read_transport(
    data: _ByteReader, device: bytes, is_second: bool
) -> tuple[_Transport | None, bool]:
    """Read one transport of a device in a UCX address; return its entry in the table, None if it
    has none, and whether it is the device's last."""
    checksum = int.from_bytes(data.take(2), "little")
    # 1. Its attributes: UCX computes with them, so NaN and senseless speeds are refused.
    if is_second:
        *speeds, _, _, flags = _V2_ATTRIBUTES.unpack(data.take(_V2_ATTRIBUTES.size))
        if flags & _V2_UNUSED_FLAGS or any(speed & 0xF == 0xF for speed in speeds):
            raise data.wrong(f"a transport with speeds {speeds}, flags {flags:#x}")
    else:
        overhead, bandwidth, latency, flags = _V1_ATTRIBUTES.unpack(data.take(_V1_ATTRIBUTES.size))
        if flags & _V1_UNUSED_FLAGS or not (
            0 <= overhead <= _MAX_S
            and 0 <= latency <= _MAX_S
            and _MIN_BYTES_PER_S <= bandwidth <= _MAX_BYTES_PER_S
        ):
            raise data.wrong(
                f"a transport of {bandwidth} B/s, {latency} and {overhead} s, flags {flags:#x}"
            )
    # 2. Its own address, without endpoints: a worker's address has none.
    num_bytes, flags = data.packed(0x3F, is_second)
    if flags & _HAS_ENDPOINTS:
        raise data.wrong("an endpoint's address")
    address = data.take(num_bytes)
    # 3. A transport that is known has to have the form that UCX reads.
    transport = _TRANSPORTS.get(checksum)
    if transport is not None and not (
        len(device) in transport.device_bytes
        and num_bytes in transport.address_bytes
        and transport.check(device, address)
    ):
        raise data.wrong(
            f"{len(device)} and {num_bytes} bytes that are no address of {transport.domain!r}"
        )
    return transport, bool(flags & _LAST)


def _read_distances(data: _ByteReader, address: UcxAddress) -> None:
    """Read the distances in a UCX key from the memory to system devices, in the order of these.
    Each is latency and bandwidth, floats of 8 bits."""
    if address.highest_device >= _MAX_DEVICES:
        raise data.wrong(f"distances, and an address with device {address.highest_device}")
    former = -1
    while (device := data.byte()) != _NO_DEVICE:
        latency, bandwidth = data.take(2)
        # In rising order, so their number is bounded as well.
        if not former < device < _MAX_DEVICES or _is_nan(latency) or _is_nan(bandwidth):
            raise data.wrong(f"a distance {latency:02x}, {bandwidth:02x} to device {device}")
        former = device


def _is_nan(packed: int) -> bool:
    return packed & 0xF == 0xF and packed > 0xF


def _is_tcp(device: bytes, address: bytes) -> bool:
    sizes = {(0, 2): 6, (0, 10): 18, (1, 2): 14, (1, 10): 14}
    return sizes.get((device[0], device[1])) == len(device)


def _is_posix(device: bytes, address: bytes) -> bool:
    """Return whether this is a posix segment in UCX's form, with what opens it: nothing, a
    namespace or a folder."""
    kind = address[7] >> 4
    if kind & 0b1000:  # a descriptor of the process
        return len(address) == (12 if kind & 1 else 8)
    return len(address) == 8 if kind & 0b0100 else address.find(0, 8) == len(address) - 1 > 8


class _ByteReader:
    """The bytes that are not read yet. Each method reads the next ones, and raises MetadataError if
    they are too few."""

    def __init__(self, raw: bytes, what: str) -> None:
        self._raw = raw
        self._what = what
        self._at = 0

    def wrong(self, why: str) -> MetadataError:
        return MetadataError(f"in {self._what}, before byte {self._at}: {why}")

    def take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._raw):
            raise self.wrong(f"{num_bytes} bytes, {len(self._raw) - self._at} are left")
        taken = self._raw[self._at : end]
        self._at = end
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def packed(self, mask: int, is_extended: bool) -> tuple[int, int]:
        """Return a number that UCX packed in the low bits of a byte, and the flags above it. In the
        second version a number that has no room there is in the byte behind. One that would have
        had room is refused: UCX never packs it so."""
        first = self.byte()
        number = first & mask
        if is_extended and number == mask and (number := self.byte()) < mask:
            raise self.wrong(f"{number} in two bytes")
        return number, first & ~mask

    def end(self) -> None:
        if self._at != len(self._raw):
            raise self.wrong(f"{len(self._raw) - self._at} bytes behind its end")


def transport_checksum(name: str) -> int:
    """Return the number by which a UCX address names a transport: CRC-16 of its name, as of X.25.

    >>> hex(transport_checksum("tcp"))
    '0x19cf'
    """
    checksum = 0xFFFF
    for byte in name.encode():
        checksum ^= byte
        for _ in range(8):
            checksum = checksum >> 1 ^ (0x8408 if checksum & 1 else 0)
    return checksum ^ 0xFFFF


# The lengths are what UCX reads of each, whatever length the address says. In a namespace of
# processes the host's identity and a process id are 4 bytes longer. Of the last two groups only the
# least is known here.
_HOST: Final = (8, 12)
_INFINIBAND: Final = ("rc_verbs", "ud_verbs", "rc_mlx5", "dc_mlx5", "ud_mlx5", "srd", "rc_gda")
_BY_NAME: Final[dict[str, _Transport]] = {
    "self": _Transport("self", 0, (0,), (8,)),
    "tcp": _Transport("tcp", 0, (6, 14, 18), (2,), _is_tcp),
    "sysv": _Transport("sysv", 12, _HOST, (8,)),
    "posix": _Transport("posix", 24, _HOST, range(8, 256), _is_posix),
    "cma": _Transport("cma", 0, _HOST, (4, 8)),
    "cuda_copy": _Transport("cuda_cpy", 0, range(256), range(8, 256)),
    "cuda_ipc": _Transport("cuda_ipc", 64, range(8, 256), range(4, 256)),
    **{name: _Transport("ib", 8, range(3, 256), range(256)) for name in _INFINIBAND},
}
_TRANSPORTS: Final = {transport_checksum(name): known for name, known in _BY_NAME.items()}
