"""The ways by which a decode rank can be written to: its NIXL agent's metadata, its shm transport's
offer, or both. Pure.

Each travels in a field of its own of the Hello, so that a peer that knows NIXL alone reads what it
has always read. A transport has them joined: in `Transport.metadata`, and for `add_peer`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from prefixkv.config import Backend
from prefixkv.errors import HandshakeError

SHM: Final = b"pkvshm1|"  # an offer of shm begins so
_BOTH: Final = b"pkvboth|"
_LENGTH_BYTES: Final = 4


class MetadataOffers(NamedTuple):
    """The two offers; b"" where there is none."""

    nixl: bytes
    shm: bytes

    def join(self) -> bytes:
        if not (self.nixl and self.shm):
            return self.nixl or self.shm
        return _BOTH + len(self.nixl).to_bytes(_LENGTH_BYTES, "little") + self.nixl + self.shm


def split_offers(metadata: bytes) -> MetadataOffers:
    """Return the two offers that `MetadataOffers.join` has put together.

    >>> split_offers(MetadataOffers(b"nixlSerDes|...", b"pkvshm1|...").join())
    MetadataOffers(nixl=b'nixlSerDes|...', shm=b'pkvshm1|...')
    """
    if metadata.startswith(SHM):
        return MetadataOffers(b"", metadata)
    if not metadata.startswith(_BOTH):
        return MetadataOffers(metadata, b"")
    # A wrong length only moves bytes from one part to the other: each part is checked by its own
    # reader.
    start = len(_BOTH) + _LENGTH_BYTES
    end = start + int.from_bytes(metadata[len(_BOTH) : start], "little")
    return MetadataOffers(metadata[start:end], metadata[end:])


def usable(backend: Backend, offers: MetadataOffers) -> bytes:
    """Return what a prefill rank with this `TransportConfig.backend` can use of the offers. Raises
    HandshakeError for nothing of them."""
    taken = {
        "nixl": MetadataOffers(offers.nixl, b""),
        "shm": MetadataOffers(b"", offers.shm),
        "auto": offers,
    }[backend]
    if not (taken.nixl or taken.shm):
        theirs = "shm" if offers.shm else "nixl" if offers.nixl else "none"
        raise HandshakeError("transport backend", backend, theirs)
    return taken.join()
