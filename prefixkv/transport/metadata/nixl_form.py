"""A strict reader of NIXL's agent metadata, without NIXL. Pure.

A peer sends it in its Hello, and NIXL and UCX parse it in native code, which trusts it: one wrong
byte may end the process. So every length and count of it is checked here first; what is unknown is
refused. What UCX packed, its address and its keys, is read by `ucx_form.py`.

The form, seen with NIXL 1.5.1: "nixlSerDes|", then fields of tag, length (8 bytes, little-endian),
value and "|": the agent's name; one connection per backend; one list of descriptors per backend and
kind of memory. A descriptor is address, length and device, 8 bytes each, and the backend's key.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Final, NamedTuple

from prefixkv.errors import MetadataError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.metadata.ucx_form import KeyKind, read_address, read_key

Range = tuple[int, int]
"""Address and length in bytes of memory that is registered."""

_HEAD: Final = b"nixlSerDes|"
_MAX_NAME_BYTES: Final = 1024
_MAX_ADDRESS_BYTES: Final = 32 << 10  # a UCX address grows with the number of network devices
_MAX_KEY_BYTES: Final = 8 << 10
_MEMORY_TYPES: Final = (0, 1)  # DRAM, VRAM
_MAX_KEY_KINDS: Final = 4  # memory of one device, some of which a transport may not register
_DESCRIPTOR: Final = struct.Struct("<QQQ")


class AgentMetadata(NamedTuple):
    """Agent name, and the `ranges` of all descriptors in the order they are written."""

    name: str
    ranges: tuple[Range, ...]


def nixl_name(peer: PeerId) -> str:
    """Return the peer's name as a NIXL agent; it has the incarnation in it, so that a restarted
    peer is never taken for its former self."""
    return f"{peer.name}#{peer.incarnation}"


def check_metadata(raw: bytes, peer: PeerId, ranges: Collection[Range]) -> None:
    """Check a peer's NIXL metadata, without NIXL: of its agent, with the memory that its Hello
    names registered, and no other.

    Raises:
        MetadataError: it is anything else.
    """
    found = read_metadata(raw, max_descriptors=len(ranges))
    # NIXL replaces what it has of an agent by this name: the name must be the peer's own.
    if found.name != nixl_name(peer):
        raise MetadataError(f"it is of agent {found.name!r}, not of {nixl_name(peer)!r}")
    # Both directions. A range in the Hello alone would fail at the first write; a registered range
    # that the Hello does not name is memory that nothing here has checked.
    if strange := set(found.ranges) ^ set(ranges):
        address, num_bytes = min(strange)
        raise MetadataError(
            f"{len(strange)} ranges are registered or in the Hello, not both, the first of them "
            f"{num_bytes} bytes at {address:#x}"
        )


def read_metadata(raw: bytes, max_descriptors: int = 1 << 20) -> AgentMetadata:
    """Read all of a NIXL agent's metadata, without NIXL. O(descriptors). Raise MetadataError for
    anything unknown."""
    fields = _FieldReader(raw)
    # 1. The name, and exactly one UCX connection, which is what keys are checked against.
    name = fields.take(b"Agent", _MAX_NAME_BYTES)
    if not fields.count(b"Conns", 1):
        raise MetadataError("no UCX address")
    fields.expect(b"t", b"UCX")
    address = read_address(fields.take(b"c", _MAX_ADDRESS_BYTES))
    # 2. Descriptors, at most one list per memory type and `max_descriptors` in all.
    fields.expect(b"", b"MemSection")
    ranges: list[Range] = []
    keys: set[bytes] = set()  # those of many regions are often the same
    kinds: set[KeyKind] = set()
    for _ in range(fields.count(b"nixlSecElms", len(_MEMORY_TYPES))):
        fields.expect(b"bknd", b"UCX")
        fields.expect(b"nixlDList", b"nixlSDList")
        memory_type = fields.number(b"t", 4)
        if memory_type not in _MEMORY_TYPES:
            raise MetadataError(f"memory of type {memory_type}")
        for _ in range(fields.count(b"n", max_descriptors - len(ranges))):
            descriptor = fields.take(b"", _DESCRIPTOR.size + _MAX_KEY_BYTES)
            if len(descriptor) < _DESCRIPTOR.size:
                raise MetadataError(f"a descriptor of {len(descriptor)} bytes")
            # UCX keeps a configuration per kind of key as long as it lives, so a peer may cause
            # only few.
            if (key := descriptor[_DESCRIPTOR.size :]) not in keys:
                kinds.add(read_key(key, address))
                keys.add(key)
                if len(kinds) > _MAX_KEY_KINDS:
                    raise MetadataError(f"keys of more than {_MAX_KEY_KINDS} kinds")
            address_at, num_bytes, _ = _DESCRIPTOR.unpack_from(descriptor)
            ranges.append((address_at, num_bytes))
    # 3. Nothing behind: unread bytes would be unchecked bytes.
    fields.end()
    try:
        return AgentMetadata(name.decode(), tuple(ranges))
    except UnicodeDecodeError:
        raise MetadataError("an agent's name that is no text") from None


class _FieldReader:
    """The fields that are not read yet. Each method reads the next one, and raises MetadataError if
    it is another or not whole."""

    def __init__(self, raw: bytes) -> None:
        if not raw.startswith(_HEAD):
            raise MetadataError(f"it begins with {raw[: len(_HEAD)]!r}")
        self._raw = raw
        self._at = len(_HEAD)

    def take(self, tag: bytes, max_bytes: int) -> bytes:
        start = self._at + len(tag) + 8
        if not self._raw.startswith(tag, self._at) or start > len(self._raw):
            raise MetadataError(f"no field {tag.decode()!r} at byte {self._at}")
        num_bytes = int.from_bytes(self._raw[start - 8 : start], "little")
        end = start + num_bytes
        # The bound first: `end` may lie anywhere, and slices beyond the end would be silent.
        if num_bytes > max_bytes or not self._raw.startswith(b"|", end):
            raise MetadataError(f"{num_bytes} bytes in field {tag.decode()!r} at byte {self._at}")
        self._at = end + 1
        return self._raw[start:end]

    def expect(self, tag: bytes, value: bytes) -> None:
        if (found := self.take(tag, len(value))) != value:
            raise MetadataError(f"{found!r} where {value.decode()!r} is known")

    def number(self, tag: bytes, size: int) -> int:
        value = self.take(tag, size)
        if len(value) != size:
            raise MetadataError(f"a number of {len(value)} bytes, {size} are known")
        return int.from_bytes(value, "little")

    def count(self, tag: bytes, at_most: int) -> int:
        number = self.number(tag, 8)
        if number > at_most:
            raise MetadataError(f"{number} of {tag.decode()!r}, at most {at_most} can be")
        return number

    def end(self) -> None:
        if self._at != len(self._raw):
            raise MetadataError(f"{len(self._raw) - self._at} bytes behind its end")
