"""Memory of this process that a peer's process may map: the target of the shm transport's writes.

A block is a memfd, sealed so that it can neither shrink nor grow: a process that maps it, and has
checked the seals, can touch all of it without SIGBUS. It has small pages, or those that the kernel
makes of MADV_HUGEPAGE (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`). Not MFD_HUGETLB: a
hole that its owner punches into such a file kills the peer that touches it, if the kernel has no
huge page left.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

import torch

from prefixkv.errors import CapacityError, ConfigError
from prefixkv.settings import MAX_BYTES, check_whole

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Weak: a block is forgotten when the last tensor on it is gone, with no call to forget it.
_blocks: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()  # by address


class SharedBlock(NamedTuple):
    """Memory from `address` on, which is a whole file, and the file's descriptor."""

    address: int
    num_bytes: int
    fd: int


class _Mapping(mmap.mmap):
    """A mapping that lives as long as a tensor on it, and so does its descriptor."""

    block: SharedBlock


def shared_bytes(num_bytes: int) -> torch.Tensor:
    """Return zeros in memory that a peer may map, uint8 [num_bytes], from a multiple of 4096 on.

    For an engine that makes its tensors itself: views of it go to `KVPool.from_tensors`, or
    `StatePool`. Forks of this process share it too. Raises ConfigError where the system is not
    Linux, or `num_bytes` is below 1, CapacityError for too little memory.
    """
    check_whole("num_bytes", num_bytes, 1, MAX_BYTES)
    if not hasattr(os, "memfd_create"):
        raise ConfigError("memory that a peer may map is made by memfd_create, of Linux")
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        fd = os.memfd_create("prefixkv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise CapacityError(f"no shared memory of {size} bytes: {error}") from error
    try:
        # The size first: the seals forbid changing it afterwards.
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        # No seal against writing: peers write into it. F_SEAL_SEAL keeps it that way.
        mapping = _Mapping(fd, size)
        with suppress(OSError, AttributeError):  # a kernel that has none for such memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
    # Undo: without a mapping nothing closes the descriptor.
    except OSError as error:
        os.close(fd)
        raise CapacityError(f"no shared memory of {size} bytes: {error}") from error
    # The tensor keeps the mapping alive, and the mapping's end closes the descriptor.
    weakref.finalize(mapping, os.close, fd)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    whole.zero_()  # touches each page: later timings include no page faults
    mapping.block = SharedBlock(whole.data_ptr(), size, fd)
    _blocks[mapping.block.address] = mapping
    return whole[:num_bytes]


def block_of(address: int, num_bytes: int) -> SharedBlock | None:
    # A copy: a collection of garbage may remove entries meanwhile.
    for mapping in list(_blocks.values()):
        block = mapping.block
        if block.address <= address and address + num_bytes <= block.address + block.num_bytes:
            return block
    return None


def blocks_of(ranges: Iterable[tuple[int, int]]) -> list[SharedBlock] | None:
    """Return the shared blocks of these ranges, each once, by address; None if one is not
    shared."""
    found = {block_of(*one) for one in ranges}
    return None if None in found else sorted(block for block in found if block is not None)
