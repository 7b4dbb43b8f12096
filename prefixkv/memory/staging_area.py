"""A node's staging memory as described to a peer: its place, and the most of one lease."""

from __future__ import annotations

from typing import Final

import msgspec

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import ADDRESS_END

BLOCK_BYTES: Final = 4096


def whole_blocks(num_bytes: int) -> int:
    """Round `num_bytes` up to whole blocks.

    >>> whole_blocks(4097)
    8192
    """
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class StagingArea(msgspec.Struct, frozen=True, array_like=True):
    """Memory of `num_bytes` at address `base`. A lease takes at most `lease_bytes`; all in whole
    blocks of BLOCK_BYTES."""

    base: int
    """Address of the area."""
    num_bytes: int
    """Bytes of the area, whole blocks of 4,096."""
    lease_bytes: int
    """Largest lease, whole blocks."""

    def validate(self) -> None:
        """Raise ConfigError naming the value at fault in a peer's description."""
        # Whole blocks: leases are counted in them, and begin at block boundaries.
        for name in ("num_bytes", "lease_bytes"):
            value = getattr(self, name)
            if value < BLOCK_BYTES or value % BLOCK_BYTES:
                raise ConfigError(
                    f"staging {name} is {value}, must be a positive multiple of {BLOCK_BYTES}"
                )
        if self.lease_bytes > self.num_bytes:
            raise ConfigError(
                f"staging lease_bytes is {self.lease_bytes}, the area has {self.num_bytes}"
            )
        # Addresses in it must not overflow an int64.
        if not 0 < self.base < ADDRESS_END - self.num_bytes:
            raise ConfigError(f"staging of {self.num_bytes} bytes at {self.base} is no memory")
