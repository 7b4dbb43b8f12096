"""A rank's staging memory: slots on prefill, the area of leases on decode."""

from __future__ import annotations

import torch

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import make_zeros
from prefixkv.memory.staging_area import BLOCK_BYTES, StagingArea


class StagingBuffer:
    """Zeros on the pool's device, from a multiple of BLOCK_BYTES on. The transport registers it,
    the copies write it.

    `area` describes it for peers. On prefill its lease_bytes are those of a slot.
    """

    def __init__(
        self, num_bytes: int, lease_bytes: int, device: str = "cpu", shared: bool = False
    ) -> None:
        """Make the memory; `shared` as for `KVPool.create`. Raises ConfigError for sizes that no
        StagingArea has, CapacityError for too little memory."""
        # The sizes are checked before memory is taken; the address is not known yet.
        StagingArea(BLOCK_BYTES, num_bytes, lease_bytes).validate()
        (self._memory,) = make_zeros((num_bytes,), "uint8", device, shared)
        self.area = StagingArea(self._memory.data_ptr(), num_bytes, lease_bytes)

    @property
    def device(self) -> str:
        return str(self._memory.device)

    def slice(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a view, uint8 [num_bytes]. Raises ConfigError if it is not inside."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.area.num_bytes:
            raise ConfigError(
                f"bytes {offset} to {offset + num_bytes} of a staging area of {self.area.num_bytes}"
            )
        return self._memory[offset : offset + num_bytes]
