"""Host memory for KV pages: decode's host tier keeps there what its device may evict.

A page is one row of bytes, `KVLayout.host_page_bytes` long, whatever the pool's layout. `page_copy`
says in which order they lie. Rows stand in chunks of memory, none across two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from prefixkv.errors import CapacityError, ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import check_device, prefer_huge_pages
from prefixkv.paging import MAX_INDEX, Pages, checked_pages
from prefixkv.settings import MAX_BYTES, check_whole

_MEMINFO: Final = "/proc/meminfo"
_GROUP: Final = "/sys/fs/cgroup"  # a container's own group, with cgroup v2


class HostPool:
    """Rows of host memory for decode's pages. Created and closed by one thread; its rows are for
    the copies, which any thread may make.

    On the CPU all of it is there at once, and the system gives it out as it is first written. For a
    GPU it is pinned chunk by chunk in a thread of its own, which takes about .1 s per GB. Torch
    rounds each pinned chunk up to a power of two, so the last one may take twice its bytes.

    `page_bytes` are those of one page of this rank: all layers that have its id, K and V. `error`
    says why pinning ended early, None if it did not.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, device: str = "cpu", chunk_bytes: int = 1 << 30
    ) -> None:
        """Take memory for `num_pages` host pages, or begin to.

        Args:
            layout: of this rank's pool.
            num_pages: host pages; their number has nothing to do with that of the pool.
            device: of the pool: for "cuda:INDEX" the memory is pinned.
            chunk_bytes: memory is taken in chunks of at most this, and of one page at least.
        Raises:
            ConfigError: a value out of range, or the host has not enough memory: nothing was taken.
            CapacityError: the system refuses it.
        """
        check_whole("num_pages", num_pages, 1, MAX_INDEX)
        check_whole("chunk_bytes", chunk_bytes, 1, MAX_BYTES)
        check_device(device)
        self.num_pages = num_pages
        self.page_bytes = layout.host_page_bytes
        check_whole("bytes per page", self.page_bytes, 1, MAX_BYTES // num_pages)
        wanted, free = num_pages * self.page_bytes, free_host_bytes()
        # Before anything is taken: a host that runs out of memory kills a process, mostly this one.
        if free is not None and wanted > free:
            raise ConfigError(
                f"{num_pages} host pages of {self.page_bytes} bytes take {wanted} bytes, the host "
                f"has {free} free"
            )
        self.error: Exception | None = None
        self._device = device
        self._pages_a_chunk = max(1, chunk_bytes // self.page_bytes)
        self._chunks: list[torch.Tensor] = []
        # By chunk; an entry stays 0 until its chunk is there.
        self._bases = np.zeros(-(-num_pages // self._pages_a_chunk), np.int64)
        self._ready_pages = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        if device == "cpu":
            self._fill()
            return
        self._thread = threading.Thread(
            target=self._fill_aside, name="prefixkv-host-pool", daemon=True
        )
        self._thread.start()

    @property
    def ready_pages(self) -> int:
        """Number of host pages that are there: those below it may be used. It grows up to
        `num_pages`. Any thread may ask."""
        return self._ready_pages

    def wait_until_ready(self) -> None:
        """Wait until all host pages can be used. Raises CapacityError if the system refused
        some."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise CapacityError(f"host memory: {self.error}") from self.error

    def close(self) -> None:
        """Give the host pages' memory back, once the chunk that is being pinned is. Idempotent.

        No copy may be under way: close their `HostCopies` first.
        """
        self._closing = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._ready_pages = 0
        self._bases[:] = 0
        self._chunks.clear()

    # --- for the copies ---------------------------------------------------------------------------

    def checked(self, pages: npt.NDArray[np.integer]) -> Pages:
        """Return host pages of a copy as int32. Raises PageStateError for one that is not ready."""
        return checked_pages(pages, self._ready_pages, "host")

    def addresses(self, pages: Pages) -> npt.NDArray[np.int64]:
        """Return the addresses of these host pages' rows, int64 [n]. They are checked already."""
        chunk, row = np.divmod(pages.astype(np.int64), self._pages_a_chunk)
        found: npt.NDArray[np.int64] = self._bases[chunk] + row * self.page_bytes
        return found

    def stretches(self, pages: Pages) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield host pages that lie side by side, as a slice of `pages` and their memory, uint8
        [bytes]. They are checked already."""
        follows = (np.diff(pages) == 1) & (pages[1:] % self._pages_a_chunk != 0)
        starts = [0, *(np.flatnonzero(~follows) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], len(pages)], strict=True):
            chunk, row = divmod(int(pages[start]), self._pages_a_chunk)
            first = row * self.page_bytes
            memory = self._chunks[chunk][first : first + (stop - start) * self.page_bytes]
            yield slice(start, stop), memory

    # --- taking the memory ------------------------------------------------------------------------

    def _fill(self) -> None:
        """Take the host pool's memory, chunk by chunk, until all is there or the pool is closed."""
        while self._ready_pages < self.num_pages and not self._closing:
            pages = min(self._pages_a_chunk, self.num_pages - self._ready_pages)
            chunk = _host_bytes(pages * self.page_bytes, self._device)
            self._bases[len(self._chunks)] = chunk.data_ptr()
            self._chunks.append(chunk)
            # Last: from here on its pages are used.
            self._ready_pages += pages

    def _fill_aside(self) -> None:
        """Take the host pool's memory in its own thread. What is there stays after an error."""
        try:
            self._fill()
        except Exception as error:
            self.error = error


def _host_bytes(num_bytes: int, device: str) -> torch.Tensor:
    """Return memory for a chunk of a host pool, uint8 [num_bytes], pinned where the device is a
    GPU. Raises CapacityError if there is none."""
    try:
        if device != "cpu":
            # Of this GPU: else torch would begin a context on the first one.
            with torch.cuda.device(device):
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(f"{num_bytes} bytes of host memory: {error}") from error
    prefer_huge_pages(memory)
    return memory


def free_host_bytes(meminfo: str = _MEMINFO, group: str = _GROUP) -> int | None:
    """Return the bytes that a host pool could take: what the system has available, and no more than
    this container may still take. None if the system does not say."""
    found = []
    # Systems without these files, and groups without a limit, whose limit is the word "max".
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(meminfo)["MemAvailable:"] << 10)
    with suppress(OSError, ValueError, KeyError):
        limit = int(Path(group, "memory.max").read_text(encoding="utf-8"))
        taken = int(Path(group, "memory.current").read_text(encoding="utf-8"))
        # Files that nothing has used of late are dropped before the limit is felt.
        found.append(max(0, limit - taken + _numbers(f"{group}/memory.stat")["inactive_file"]))
    return min(found, default=None)


def _numbers(path: str) -> dict[str, int]:
    """Return the numbers of a file of the system about host memory by the words before them."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}
