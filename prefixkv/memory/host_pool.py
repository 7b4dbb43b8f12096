"""Host memory for KV pages: decode's host tier keeps there what its device may evict.

A page is one row of bytes, `KVLayout.copied_page_bytes` long, whatever the pool's layout.
`page_copy` says in which order they lie. Rows stand in chunks of memory, none across two of them.

Memory is taken chunk by chunk, pinned or touched at once, so the system's figure of free memory
falls with it. Host pools of a user on this machine take turns, and each looks at the figure before
its chunk: together they take no more than there is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefixkv.errors import CapacityError, ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import check_device, prefer_huge_pages
from prefixkv.paging import MAX_INDEX, Pages, checked_pages
from prefixkv.settings import MAX_BYTES, check_whole
from prefixkv.threads import undoing

_MEMINFO: Final = "/proc/meminfo"
_GROUPS: Final = "/sys/fs/cgroup"  # where the system's control groups are mounted
_OWN_GROUP: Final = "/proc/self/cgroup"  # the groups that this process is in
_SHM: Final = "/dev/shm"  # where the lock is: one folder, whatever TMPDIR a process has
_log = logging.getLogger("prefixkv.host")


class _GroupFiles(NamedTuple):
    """The names by which a version of control groups says what a group may take of memory."""

    controller: str  # in `_OWN_GROUP`, and of the folder that the groups are in
    limit: str
    taken: str
    dropped: str  # in memory.stat: what files take that nothing has used of late


_VERSIONS: Final = (
    _GroupFiles("", "memory.max", "memory.current", "inactive_file"),
    _GroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class HostPool:
    """Rows of host memory for pages. Created and closed by one thread; any thread may copy.

    On the CPU all of it is there at once. For a GPU it is pinned in a thread of its own. Torch
    rounds each pinned chunk up to a power of two, so the last one may take twice its bytes.

    `page_bytes` are those of one page of this rank: all layers that have its id, K and V. `error`
    says why pinning ended early, None if it did not.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, device: str = "cpu", chunk_bytes: int = 1 << 30
    ) -> None:
        """Take memory for `num_pages` host pages, or begin to, in chunks of at most `chunk_bytes`,
        and of one page at least. For a `device` "cuda:INDEX" it is pinned.

        Raises ConfigError: a value out of range, or too little memory: nothing was taken.
        CapacityError: the system refuses it, or other pools have taken it meanwhile.
        """
        check_whole("num_pages", num_pages, 1, MAX_INDEX)
        check_whole("chunk_bytes", chunk_bytes, 1, MAX_BYTES)
        check_device(device)
        self.num_pages = num_pages
        self.page_bytes = layout.copied_page_bytes
        check_whole("bytes per page", self.page_bytes, 1, MAX_BYTES // num_pages)
        # Before anything is taken: a host that runs out of memory kills a process, mostly this one.
        free, wanted = free_host_bytes(), num_pages * self.page_bytes
        if free is not None and wanted > free:
            raise ConfigError(
                f"host_memory: {num_pages} host pages of {self.page_bytes} bytes take {wanted} "
                f"bytes, the host has {free} free"
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
            with undoing(self.close):  # the exception may be kept, and this object with it
                self._fill()
            return
        thread = threading.Thread(None, self._fill_aside, "prefixkv-host-pool", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def ready_pages(self) -> int:
        """Number of host pages that may be used, from the first on; grows up to `num_pages`. Any
        thread may ask."""
        return self._ready_pages

    def wait_until_ready(self) -> None:
        """Wait until all pages can be used. Raises CapacityError if the system refused some."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise CapacityError(f"host memory: {self.error}") from self.error

    def close(self) -> None:
        """Give the memory back, once the chunk that is being pinned is. Idempotent. No copy may be
        under way: close their `HostCopies` first."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._ready_pages = 0
        self._bases[:] = 0
        self._chunks.clear()

    # --- for the copies ---------------------------------------------------------------------------

    def checked(self, pages: npt.NDArray[np.integer]) -> Pages:
        """Return pages as int32. Raises PageStateError for one that is not ready."""
        return checked_pages(pages, self._ready_pages, "host")

    def addresses(self, pages: Pages) -> npt.NDArray[np.int64]:
        """Return the addresses of checked pages' rows, int64 [n]."""
        chunk, row = np.divmod(pages.astype(np.int64), self._pages_a_chunk)
        return self._bases[chunk] + row * self.page_bytes  # type: ignore[no-any-return]

    def stretches(self, pages: Pages) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield checked pages that lie side by side, as slice of `pages` and memory, uint8 [n]."""
        follows = (np.diff(pages) == 1) & (pages[1:] % self._pages_a_chunk != 0)
        starts = [0, *(np.flatnonzero(~follows) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], len(pages)], strict=True):
            chunk, row = divmod(int(pages[start]), self._pages_a_chunk)
            first = row * self.page_bytes
            memory = self._chunks[chunk][first : first + (stop - start) * self.page_bytes]
            yield slice(start, stop), memory

    # --- taking the memory ------------------------------------------------------------------------

    def _fill(self) -> None:
        while self._ready_pages < self.num_pages and not self._closing:
            pages = min(self._pages_a_chunk, self.num_pages - self._ready_pages)
            num_bytes = pages * self.page_bytes
            with _in_turn():
                if (free := free_host_bytes()) is not None and num_bytes > free:
                    raise CapacityError(f"{num_bytes} bytes of host memory: {free} are free")
                self._chunks.append(_host_bytes(num_bytes, self._device))
            self._bases[len(self._chunks) - 1] = self._chunks[-1].data_ptr()
            # Last: from here on its pages are used.
            self._ready_pages += pages

    def _fill_aside(self) -> None:
        try:
            self._fill()
        except Exception as error:
            self.error = error
            _log.error("host memory: %d of %d pages: %s", self._ready_pages, self.num_pages, error)


@contextmanager
def _in_turn() -> Iterator[None]:
    """Let no other pool of this user's processes take memory meanwhile. Raises CapacityError where
    there is no file for it."""
    try:
        folder = _SHM if os.access(_SHM, os.W_OK) else tempfile.gettempdir()
        path = Path(folder, f"prefixkv-host-{os.getuid()}.lock")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CapacityError(f"host memory is taken in turn, by a lock on a file: {error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a fork of this process may have the file too
        os.close(file)


def _host_bytes(num_bytes: int, device: str) -> torch.Tensor:
    """Pinned where the device is a GPU. Raises CapacityError if there is none."""
    try:
        if device != "cpu":
            # Of this GPU: else torch would begin a context on the first one.
            with torch.cuda.device(device):
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(f"{num_bytes} bytes of host memory: {error}") from error
    prefer_huge_pages(memory)
    return memory.zero_()  # touches it


def free_host_bytes(
    meminfo: str = _MEMINFO, group: str = _GROUPS, own_group: str = _OWN_GROUP
) -> int | None:
    """Return the bytes that a host pool could take: what the system has available, and no more than
    each control group around this process may still take. None if the system does not say.

    `group` is the folder of all groups, of version 1, 2 or both; `own_group` the file that names
    those of this process.
    """
    found = []
    # Systems without these files, and groups without a limit, whose limit is the word "max".
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(meminfo)["MemAvailable:"] << 10)
    for version in _VERSIONS:
        root = Path(group, version.controller)
        for folder in _groups_around(root, _own_path(own_group, version.controller)):
            with suppress(OSError, ValueError, KeyError):
                limit = int((folder / version.limit).read_text(encoding="utf-8"))
                taken = int((folder / version.taken).read_text(encoding="utf-8"))
                # Files that nothing has used of late are dropped before the limit is felt.
                dropped = _numbers(str(folder / "memory.stat"))[version.dropped]
                found.append(max(0, limit - taken + dropped))
    return min(found, default=None)


def _own_path(own_group: str, controller: str) -> str:
    with suppress(OSError):
        for line in Path(own_group).read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            # A path with ".." leads to a group that this process cannot see.
            if controller in controllers.split(",") and ".." not in path.split("/"):
                return path.strip("/")
    return ""


def _groups_around(root: Path, path: str) -> list[Path]:
    """From `root` on. A root without the process's own group is a container's, mounted as the root,
    or was given in place of the system's: then each group below it that has no other beside it
    counts too."""
    found = [root]
    if path and (root / path).is_dir():
        for name in path.split("/"):
            found.append(found[-1] / name)
        return found
    if str(root).startswith(_GROUPS):
        return found
    with suppress(OSError):
        while len(inner := [one for one in found[-1].iterdir() if one.is_dir()]) == 1:
            found += inner
    return found


def _numbers(path: str) -> dict[str, int]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}
