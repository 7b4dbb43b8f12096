"""KV pools: torch tensors that hold KV, with the layout that describes them.

`KVPool.create` owns its memory; `KVPool.from_tensors` wraps an engine's own, strided, and keeps it
alive. A pool knows nothing of page states; the allocator does. `shared_bytes` is memory that a peer
may map.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from sys import intern
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from prefixkv.errors import CapacityError, ConfigError, shown
from prefixkv.memory.axes import AxisNames, TensorLike, as_slabs, as_tensor
from prefixkv.memory.kv_layout import (
    ADDRESS_END,
    BLOCK_BYTES,
    SLABS_PER_LAYER,
    KVLayout,
    PageGroup,
    Slab,
    clusters,
    whole_blocks,
)
from prefixkv.paging import MAX_INDEX, PageIds, as_pages, check_in_pool
from prefixkv.settings import MAX_BYTES, check_flag, check_kind, check_list, check_whole

_HUGE_PAGE_BYTES = 2 << 20
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """A group of layers with pages of its own, for `KVPool.with_groups`.

    Args:
        name: of the group, the same on both sides.
        pool: the memory of its layers, with the page size of the first group; created, or an
            engine's own tensors. Of an engine with pages of its own, whose window layers lie in
            tensors of the first group, these tensors.
        window: tokens that a token of these layers sees, itself among them. 0: they keep every
            token, under the page ids of the first group (*aligned*), of which they have as many.
        step_tokens: of a window, the most tokens that the engine computes of a request before it
            tells the node: a chunk of a prompt on prefill, a step with its drafts on decode.
    """

    name: str
    pool: KVPool
    window: int = 0
    step_tokens: int = 16

    def check(self) -> None:
        """Raise ConfigError for a group that cannot be."""
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 64:
            raise ConfigError(
                f"a group's name is {shown(self.name)}, 1 to 64 characters are needed"
            )
        check_kind(f"pool of group {self.name!r}", self.pool, KVPool)
        check_whole(f"window of group {self.name!r}", self.window, 0, MAX_INDEX)
        check_whole(f"step_tokens of group {self.name!r}", self.step_tokens, 1, MAX_INDEX)


class KVPool:
    """One worker's KV: a view [num_pages, page_size, num_kv_heads, head_dim] per layer and kind.

    `groups` are layers with pages of their own beside these (`with_groups`).
    """

    def __init__(self, layout: KVLayout, slabs: Sequence[torch.Tensor]) -> None:
        """Keep views that match `layout`. Use `create` or `from_tensors` instead."""
        self.layout = layout
        self.groups: tuple[PoolGroup, ...] = ()
        self._slabs = tuple(slabs)
        self._words = _as_words(layout, self._slabs)

    @classmethod
    def create(
        cls,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: str = "bfloat16",
        attention: str = "mha",
        order: str = "layer_major",
        device: str = "cpu",
        shared: bool = False,
    ) -> KVPool:
        """Create a KV pool of zeros. O(bytes).

        Every memory page is touched, so that later timings include no page faults. On the CPU each
        tensor begins on a multiple of 4096 bytes.

        Args:
            num_pages: pages in the pool; `page_size` tokens each.
            page_size: tokens per page.
            num_layers, num_kv_heads: those that this rank holds; 1 head with "mla".
            head_dim: elements of a head; with "mla" of the latent vector.
            dtype: a key of `kv_layout.ITEMSIZE`, as torch names it.
            attention: "mha" (K and V, GQA too) or "mla" (one latent vector).
            order: "layer_major", a tensor per layer: [2, num_pages, page_size, num_kv_heads,
                head_dim]; or "page_major", one tensor: [num_pages, num_layers, 2, page_size,
                num_kv_heads, head_dim]. With "mla" the dimension of 2 is 1.
            device: as torch names it: "cpu", "cuda:1", or "cuda" for the present GPU.
            shared: in memory that a prefill worker of this host may map
                (`TransportConfig.backend`); on the CPU only. All tensors lie in one block then, and
                forks of this process share it.

        Raises ConfigError: a value out of range. CapacityError: the device has not enough memory.
        """
        check_flag("shared", shared)
        # Sizes are checked before memory is taken: products of them are its size.
        sizes = KVLayout(
            page_size,
            num_layers,
            num_kv_heads,
            head_dim,
            dtype,
            attention,
            order,
            (),
            (),
            num_pages,
        )
        sizes.validate_sizes()
        page_shape = (page_size, num_kv_heads, head_dim)
        kinds = sizes.slabs_per_layer
        if order == "layer_major":
            shape: tuple[int, ...] = kinds, num_pages, *page_shape
            tensors = make_zeros(shape, dtype, device, shared, num_layers)
            slabs = [tensor[kv] for tensor in tensors for kv in range(kinds)]
        elif order == "page_major":
            shape = num_pages, num_layers, kinds, *page_shape
            tensors = [whole] = make_zeros(shape, dtype, device, shared)
            slabs = [whole[:, layer, kv] for layer in range(num_layers) for kv in range(kinds)]
        else:
            raise ConfigError(
                f"order is {shown(order)}, a pool is created layer_major or page_major"
            )
        # One region per tensor, each whole: nothing else of the process is registered.
        regions = tuple((tensor.data_ptr(), tensor.numel() * tensor.itemsize) for tensor in tensors)
        return cls(_describe(slabs, attention, order, regions), slabs)

    @classmethod
    def from_tensors(
        cls,
        k: Sequence[TensorLike],
        v: Sequence[TensorLike] | None = None,
        *,
        page_size: int | None = None,
        axes: Sequence[str] | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        opaque: str = "",
        regions: Sequence[tuple[int, int]] | None = None,
    ) -> KVPool:
        """Describe an engine's own tensors as a KV pool, and keep them alive. Nothing is copied.

        Without `page_size`, `num_kv_heads` and `head_dim` the shape is believed; if given they have
        to agree with it. So give them: tensors [page, head, token, dim] taken for [page, token,
        head, dim] make a valid pool, with the wrong tokens.

        Args:
            k, v: one tensor per layer, all with the same shape, dtype and device; of torch, or
                numpy arrays, whose memory is used as it is. Strides are free, except that of "dim",
                which is 1. k alone: tensors that hold K and V, or MLA's latent vectors.
            page_size: tokens per page.
            axes: the meaning of each dimension, in the tensors' order: "page", "token", "head",
                "dim", and "kv", of size 2, if one tensor holds K and V. MLA has no "head". By
                default ("page", "token", "head", "dim"), for k alone ("page", "token", "dim").
            num_kv_heads: KV heads that this rank holds.
            head_dim: elements of a head; with MLA of the latent vector. With opaque pages: elements
                of a page per token and head.
            opaque: "" or the name of a format that only the engine's kernels can read
                (`KVLayout.opaque`). Pages then move whole, and only to a pool with the same name,
                page size and heads per rank. Formats with different bytes need different names.
                `page_size` and `axes` are required then. Only "page" has to be among the axes; all
                others together are one run of bytes, whatever their order. An axis without a name
                of its own is "packed", such as K and V mixed in a page; "kv" makes two runs per
                page, K and V. Without an axis "head", `num_kv_heads` is 1 by default.
            regions: (address, bytes) ranges to register. By default each storage that the views lie
                in, whole. Give them if the storage is an arena that holds more than KV.

        Raises ConfigError: the tensors differ from each other or from their description, are
        neither on the CPU nor on a GPU, overlap, or lie in no region.

        >>> blocks = torch.zeros(8, 2, 32, 128)  # K and V of a head together, in the last 128
        >>> k_and_v = blocks.unflatten(3, (2, 64))
        >>> axes = ("page", "head", "token", "kv", "dim")
        >>> KVPool.from_tensors([k_and_v], page_size=32, axes=axes).layout.head_dim
        64
        >>> axes = ("page", "head", "token", "packed")
        >>> KVPool.from_tensors([blocks], page_size=32, axes=axes, opaque="amx").layout.attention
        'fused'
        """
        description = AxisNames(axes, page_size, num_kv_heads, head_dim, opaque)
        slabs, attention = as_slabs(k, v, description)
        found = storages(slabs) if regions is None else checked_regions(regions)
        return cls(_describe(slabs, attention, "strided", found, opaque), slabs)

    def with_groups(self, *groups: PoolGroup) -> KVPool:
        """Return this KV pool, of the layers that keep every token, with groups of other layers
        beside it. Nothing is copied.

        Its own views, page ids and page states are as before: those of the first group. Raises
        ConfigError: names that are not distinct, groups of another page size or device, an aligned
        one with another number of pages, groups that share memory.

        >>> full = KVPool.create(64, 16, num_layers=1, num_kv_heads=2, head_dim=32)
        >>> last = KVPool.create(24, 16, num_layers=5, num_kv_heads=2, head_dim=32)
        >>> pool = full.with_groups(PoolGroup("sliding", last, window=128))
        >>> pool.layout.num_pages, [group.window for group in pool.layout.windows]
        (64, [128])
        """
        for group in groups:
            check_kind("a group", group, PoolGroup)
            group.check()
        described = tuple(
            PageGroup(group.name, group.window, group.pool.layout) for group in groups
        )
        layouts = self.layout, *(group.pool.layout for group in groups)
        regions = _merged([region for layout in layouts for region in layout.regions])
        layout = msgspec.structs.replace(self.layout, groups=described, regions=regions)
        layout.validate()
        pool = KVPool(layout, self._slabs)
        pool.groups = tuple(groups)
        return pool

    def group(self, name: str) -> KVPool:
        """Return the memory of one group. Raises KeyError if none has this name."""
        return {group.name: group.pool for group in self.groups}[name]

    # --- views ------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:INDEX"."""
        return self.layout.device

    def k(self, layer: int) -> torch.Tensor:
        """Return K of one layer: a view [num_pages, page_size, num_kv_heads, head_dim]; with MLA
        the latent vector, as one head. Bytes of opaque pages are in their own order."""
        return self._slab(layer, 0)

    def v(self, layer: int) -> torch.Tensor:
        """Return V of one layer, like `k`. Raises ConfigError with MLA, which has none."""
        return self._slab(layer, 1)

    def latent(self, layer: int) -> torch.Tensor:
        """Return MLA's latent vectors of one layer: a view [num_pages, page_size, head_dim]. Raises
        ConfigError with other attention."""
        if self.layout.attention != "mla":
            raise ConfigError(f"attention is {self.layout.attention}, only mla has latent vectors")
        return self._slab(layer, 0).squeeze(2)

    def _slab(self, layer: int, kv: int) -> torch.Tensor:
        self.layout.slab(layer, kv)  # checks both
        return self._slabs[layer * self.layout.slabs_per_layer + kv]

    # --- whole pages, as bytes --------------------------------------------------------------------

    def read_pages(self, pages: PageIds) -> torch.Tensor:
        """Return a copy of the bytes of `pages` on the CPU, whatever the layout: uint8 [n, slabs,
        page_size, num_kv_heads, head_bytes].

        Two pools of equal sizes hold the same KV if and only if these are equal. Raises
        PageStateError for a page outside the pool.
        """
        index = self._index(pages)
        first = self._words[0]
        out = torch.empty((len(index), len(self._words), *first.shape[1:]), dtype=first.dtype)
        for i, words in enumerate(self._words):
            out[:, i] = words.index_select(0, index)
        return out.view(torch.uint8)

    def write_pages(self, pages: PageIds, data: TensorLike) -> None:
        """Write bytes that `read_pages` returned, on any device. On a GPU it waits until they are
        there. Raises PageStateError for a page outside the pool, ConfigError for another shape or
        dtype."""
        index = self._index(pages)
        shape = (len(index), len(self._words), *self._words[0].view(torch.uint8).shape[1:])
        if isinstance(data, np.ndarray) and not data.flags.writeable:
            data = data.copy()  # it is only read, and torch takes none that is read-only
        data = as_tensor("data", data)
        if tuple(data.shape) != shape or data.dtype != torch.uint8:
            raise ConfigError(
                f"data is {data.dtype} {tuple(data.shape)}, must be torch.uint8 {shape}"
            )
        source = data.contiguous().view(self._words[0].dtype).to(self._words[0].device)
        for i, words in enumerate(self._words):
            words.index_copy_(0, index, source[:, i])
        # The transport reads the memory outside any stream.
        _synchronize(words.device)

    def _index(self, pages: PageIds) -> torch.Tensor:
        ids = as_pages(pages)
        check_in_pool(ids, self.layout.num_pages)
        return torch.tensor(ids, dtype=torch.int64, device=self._words[0].device)


def _zero_bytes(num_bytes: int, device: str) -> torch.Tensor:
    """Return zeros, uint8, from a multiple of 4096 on."""
    check_device(device)
    try:
        # A block more than needed, so that an aligned start lies in it.
        raw = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, device=device)
        if device == "cpu":
            prefer_huge_pages(raw)
        # After the hint for huge pages, which counts only for memory that was not touched yet.
        raw.zero_()
        _synchronize(raw.device)
    except RuntimeError as error:
        raise CapacityError(f"{num_bytes} bytes do not fit on {device}: {error}") from error
    skip = -raw.data_ptr() % BLOCK_BYTES
    return raw[skip : skip + num_bytes]


def make_zeros(
    shape: tuple[int, ...], dtype: str, device: str, shared: bool, count: int = 1
) -> list[torch.Tensor]:
    """Return `count` tensors of zeros, each from a multiple of 4096 on; with `shared` in one block
    of memory that a peer may map. They are made as bytes: float8 has few operations of its own.

    Raises CapacityError for too little memory, ConfigError for a device that is not there, or
    shared memory not on the CPU.
    """
    element = getattr(torch, dtype)
    num_bytes = prod(shape) * element.itemsize
    if not shared:
        made = [_zero_bytes(num_bytes, device) for _ in range(count)]
    elif not (isinstance(device, str) and device == "cpu"):
        raise ConfigError(f'device is {shown(device)}, memory that a peer may map is on the "cpu"')
    else:
        # One block for all: a peer maps each block by a descriptor of its own. Each tensor begins
        # at a block boundary.
        made = list(shared_bytes(whole_blocks(num_bytes) * count).chunk(count))
    return [memory[:num_bytes].view(element).view(shape) for memory in made]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def check_device(device: str) -> None:
    """Raise ConfigError for a device other than "cpu" and "cuda", or a GPU that is not there."""
    if not isinstance(device, str):
        raise ConfigError(f'device is {shown(device)}, a string such as "cuda:0" is needed')
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}: {str(error).splitlines()[0]}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f'device is {device!r}, must be "cpu", "cuda" or "cuda:INDEX"')
    num_gpus = torch.cuda.device_count() if chosen.type == "cuda" else 0
    # torch takes the index modulo 256: compare the name, or "cuda:256" would be cuda:0.
    there = chosen.index is None or (0 <= chosen.index < num_gpus and str(chosen) == device)
    if chosen.type == "cuda" and not (num_gpus and there):
        raise ConfigError(f"device is {device!r}, torch {torch.__version__} finds {num_gpus} GPUs")


def prefer_huge_pages(memory: torch.Tensor) -> None:
    """Ask Linux for huge pages before memory is first touched: NIXL's copies then walk fewer."""
    # Only whole huge pages inside the memory: its edges belong to others.
    start = -(-memory.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    num_bytes = (memory.data_ptr() + memory.nbytes - start) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_HUGEPAGE
        )


def _describe(
    slabs: Sequence[torch.Tensor],
    attention: str,
    order: str,
    regions: tuple[tuple[int, int], ...],
    opaque: str = "",
) -> KVLayout:
    num_pages, page_size, num_kv_heads, head_dim = slabs[0].shape
    size = slabs[0].itemsize
    # The views are alike, so the first gives the sizes; each gives its own address and strides, in
    # bytes.
    layout = KVLayout(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=len(slabs) // SLABS_PER_LAYER[attention],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(slabs[0].dtype).removeprefix("torch."),
        attention=attention,
        order=order,
        slabs=tuple(
            Slab(slab.data_ptr(), *(step * size for step in slab.stride()[:3])) for slab in slabs
        ),
        regions=regions,
        # Interned: msgspec leaves a default value out of a message by identity.
        device=intern(str(slabs[0].device)),
        opaque=opaque,
    )
    layout.validate()
    return layout


def storages(views: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the views' storages as (address, bytes); overlapping ones become one."""
    stores = [view.untyped_storage() for view in views]
    return _merged([(store.data_ptr(), store.nbytes()) for store in stores])


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found = clusters((start, 0, start + num_bytes) for start, num_bytes in ranges)
    return tuple((one[0][0], max(end for *_, end in one) - one[0][0]) for one in found)


def checked_regions(regions: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges of memory as (address, bytes). Raises ConfigError for what is none."""
    check_list("regions", regions)
    for region in regions:
        if not isinstance(region, tuple | list) or len(region) != 2:
            raise ConfigError(f"region {shown(region)} is no pair of address and bytes")
        for name, value in zip(("address", "bytes"), region, strict=True):
            check_whole(f"region {name}", value, 0, ADDRESS_END - 1)
    return tuple((int(address), int(num_bytes)) for address, num_bytes in regions)


def _as_words(layout: KVLayout, slabs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """In the widest possible word: torch moves one element at a time, so `read_pages` is fast."""
    # Its size has to divide every stride, the offset and the bytes of a head.
    steps = [layout.head_bytes]
    for slab in slabs:
        steps += [
            int(step) * slab.itemsize for step in (slab.storage_offset(), *slab.stride()[:-1])
        ]
    word = next(dtype for size, dtype in _WORDS if all(step % size == 0 for step in steps))
    return tuple(slab.view(torch.uint8).view(word) for slab in slabs)


# --- memory that a peer may map -------------------------------------------------------------------

# The target of the shm transport's writes. A block is a memfd, sealed so that it can neither shrink
# nor grow: a process that maps it, and has checked the seals, can touch all of it without SIGBUS.
# It has small pages, or those that the kernel makes of MADV_HUGEPAGE
# (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`). Not MFD_HUGETLB: a hole that its owner
# punches into such a file kills the peer that touches it, if the kernel has no huge page left.

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
