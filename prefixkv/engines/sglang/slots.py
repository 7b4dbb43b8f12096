"""SGLang's token slots and prefixkv's page ids: slot = page * page_size + offset."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prefixkv.spi import Pages


class SlotTable:
    """A table on the device with one row of slots per page: pages become slots in one gather. Takes
    8 bytes per token of the pool. `num_pages` is one above the largest page id.

    >>> SlotTable(8, 4, "cpu").slots(np.array([7, 3], np.int32)).tolist()
    [28, 29, 30, 31, 12, 13, 14, 15]
    """

    def __init__(self, num_pages: int, page_size: int, device: Any) -> None:
        self._page_size = page_size
        self._device = torch.device(device)
        self._empty = torch.empty(0, dtype=torch.int64, device=self._device)
        slots = torch.arange(num_pages * page_size, device=self._device)
        self._table = slots.view(num_pages, page_size)

    def slots(self, pages: Pages) -> torch.Tensor:
        """Return a new tensor int64 [len(pages) * page_size] on the device."""
        if not len(pages):
            return self._empty
        if self._page_size == 1:
            return self.on_device(pages)
        return self._table.index_select(0, self.on_device(pages)).view(-1)

    def slots_of_packed(self, packed: bytes | bytearray) -> torch.Tensor:
        """Return slots as `slots` does, of pages as a result of the tree has them."""
        return self.slots(np.frombuffer(packed, np.int32))

    def on_device(self, pages: Pages) -> torch.Tensor:
        """Return a new tensor int64 [len(pages)], without a wait."""
        tensor = torch.from_numpy(pages.astype(np.int64))
        if self._device.type == "cpu":
            return tensor
        # From pageable memory the copy might wait for what is queued before it.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def page_ids_of_row(self, table: torch.Tensor, row: int, start: int, end: int) -> torch.Tensor:
        """Return the same on the device, int64; `start` is a page's first token. Waits for
        nothing."""
        return (table[row, start : end : self._page_size] // self._page_size).to(torch.int64)

    def pages(self, slots: torch.Tensor) -> Pages:
        """Return the page ids of whole pages of slots, int32 on the host. Waits for a GPU."""
        # The first slot of a page names it: slots of a page are consecutive.
        first = slots[:: self._page_size].cpu().numpy()
        return (first // self._page_size).astype(np.int32, copy=False)
