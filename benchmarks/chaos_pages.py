"""An allocator that fills pages with a canary as soon as no request holds them, and
finds out what is written to them then.

On prefill the canary overwrites *source* pages, on decode *destination* pages. A page freed while a
write still reads it brings the canary to decode, where it is a mismatch; a page freed while a write
may still land in it loses its canary, and is found when it is taken or at the next scan. Pages that
eviction hands from the tree straight to a request are filled too: what they held is
in use no more.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.allocator import PageAllocator, PageState
from prefixkv.paging import PageIds, Pages, as_pages

SOURCE_CANARY = 0xA5
TARGET_CANARY = 0xC5
_MOST_FINDINGS = 20


class WatchedAllocator(PageAllocator):
    """Owned by the scheduler's thread, like its base. `findings` are texts, one a page written
    while it was free."""

    def __init__(self, pool: KVPool, canary: int) -> None:
        num_pages = pool.layout.num_pages
        super().__init__(num_pages)
        self.canary = canary
        self.findings: list[str] = []
        self.num_findings = 0
        self.pages_checked = 0
        self._pool = pool
        self._freed: list[tuple[str, float]] = [("never used", time.monotonic())] * num_pages
        self._fill(np.arange(num_pages, dtype=np.int32))

    def alloc(self, num_pages: int) -> Pages:
        pages = super().alloc(num_pages)
        self._check(pages, "taken")
        return pages

    def free(self, pages: PageIds | bytes) -> None:
        ids = _ids(pages)
        super().free(pages)
        self._fill(ids, "freed")

    def uncache(self, pages: PageIds | bytes) -> None:
        ids = _ids(pages)
        super().uncache(pages)
        self._fill(ids, "evicted")

    def release(self, owner: object) -> int:
        ids = self.held_by(owner)
        count = super().release(owner)
        self._fill(ids, f"released by {owner}")
        return count

    def scan(self) -> None:
        """Look at every free page now."""
        self._check(self.pages_in(PageState.FREE), "scanned")

    def holds_canary(self, page: int) -> bool:
        """Whether the page has the canary in it somewhere, as a run of 16 bytes."""
        data = self._pool.read_pages([page]).numpy().tobytes()
        return any(bytes([canary]) * 16 in data for canary in (SOURCE_CANARY, TARGET_CANARY))

    def _fill(self, pages: Pages, how: str = "") -> None:
        if not len(pages):
            return
        if how:
            for page in pages.tolist():
                self._freed[page] = (how, time.monotonic())
        layout = self._pool.layout
        shape = (
            len(pages), len(layout.slabs), layout.page_size, layout.num_kv_heads, layout.head_bytes,
        )  # fmt: skip
        self._pool.write_pages(pages, torch.full(shape, self.canary, dtype=torch.uint8))

    def _check(self, pages: Pages, when: str) -> None:
        if not len(pages):
            return
        self.pages_checked += len(pages)
        wrong = (self._pool.read_pages(pages) != self.canary).flatten(1)
        if not wrong.any():
            return
        for page, count in zip(pages.tolist(), wrong.sum(1).tolist(), strict=True):
            if count:
                self.num_findings += 1
                how, when_s = self._freed[page]
                if len(self.findings) < _MOST_FINDINGS:
                    self.findings.append(
                        f"page {page} was written while free: {count} bytes, {when} "
                        f"{time.monotonic() - when_s:.3f} s"
                        f" after it was {how}"
                    )
                if when == "scanned":
                    self._fill(np.array([page], dtype=np.int32))


def _ids(pages: PageIds | bytes) -> Pages:
    """A copy; the scheduler hands a request's pages over packed."""
    return np.frombuffer(pages, np.int32) if isinstance(pages, bytes) else as_pages(pages).copy()
