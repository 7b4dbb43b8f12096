"""Where the bytes of a page lie on both sides of a write: runs of blocks, flat indices, bounded parts.

A *run* is one block of each page: `num_pages` equal blocks, a page stride apart. Source and target have the
same runs in the same order, so block `run * num_pages + page` of one side belongs to the block of the same
run on the other. Indices go run by run, pages inside: NIXL merges neighbouring index pairs only inside one
run, and only when its blocks touch (stride = length) on both sides; that is the cheapest descriptor there is.

This is equal tensor parallelism: both sides hold the same heads. Pure numpy, no address is dereferenced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.errors import ConfigError, HandshakeError, PageStateError
from prefixkv.pool.kv_layout import KVLayout

Int64s = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
RunTable = npt.NDArray[np.uint64]

MAX_INDEX: Final = 2**31 - 1  # NIXL takes int32 indices
_MUST_BE_EQUAL: Final = ("attention", "dtype", "num_layers", "num_kv_heads", "head_dim", "page_size")


class RunGroup(NamedTuple):
    """Neighbouring runs with blocks of one size that all can or all cannot merge."""

    first_run: int
    num_runs: int
    block_bytes: int
    dense: bool  # blocks of neighbouring pages touch, on both sides


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The paired runs of a source and a target pool.

    `src` and `dst` are uint64 [R, 5] with columns (address, block bytes, device, stride, count), as NIXL takes
    them; row i of both has the same block bytes. `groups` cover the rows in order.
    """

    src: RunTable
    dst: RunTable
    groups: tuple[RunGroup, ...]
    src_num_pages: int
    dst_num_pages: int

    @property
    def num_runs(self) -> int:
        return len(self.src)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all runs."""
        return sum(group.num_runs * group.block_bytes for group in self.groups)


class Part(NamedTuple):
    """What one post carries: blocks `start` to `stop` of `group`, counted run by run, a job's pages inside."""

    group: RunGroup
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.group.block_bytes


# --- runs ---------------------------------------------------------------------------------------


def paired_runs(src: KVLayout, dst: KVLayout, device: int = 0) -> Runs:
    """Runs of the largest blocks that are contiguous in a page of both pools, whatever their orders.

    Found by walking the smallest pieces (one head of one token of one slab) in the order of the source's
    addresses and joining neighbours that are neighbours on the target too: whole pages where both are
    page-major, a slab's page where one is layer-major, a token or a head where strides demand it.
    O(slabs * page_size * heads) once a peer.

    Args:
        src, dst: our layout and the peer's. The peer's is validated here.
        device: the NIXL device id of both columns.

    Raises:
        HandshakeError: the pools hold different models or page sizes; names the field.
        ConfigError: `dst` breaks a law of layouts, or the pools have more blocks than an int32 can index.
    """
    for name in _MUST_BE_EQUAL:
        ours, theirs = getattr(src, name), getattr(dst, name)
        if ours != theirs:
            raise HandshakeError(name, ours, theirs)
    dst.validate()

    src_pieces, dst_pieces = _pieces(src), _pieces(dst)
    order = np.argsort(src_pieces.address, kind="stable")
    src_pieces, dst_pieces = src_pieces.take(order), dst_pieces.take(order)
    head_bytes = src.head_bytes
    joined = src_pieces.continues(head_bytes) & dst_pieces.continues(head_bytes)
    firsts = np.flatnonzero(np.concatenate(([True], ~joined)))
    lengths = np.diff(firsts, append=len(joined) + 1) * head_bytes

    tables = [
        _table(pieces.take(firsts), lengths, layout.num_pages, device)
        for pieces, layout in ((src_pieces, src), (dst_pieces, dst))
    ]
    for table, layout in zip(tables, (src, dst), strict=True):
        _check_index_range(len(table), layout.num_pages)
    dense = (tables[0][:, 3] == tables[0][:, 1]) & (tables[1][:, 3] == tables[1][:, 1])
    by_group = np.lexsort((dense, lengths))  # stable: address order inside a group
    lengths, dense = lengths[by_group], dense[by_group]
    return Runs(
        src=np.ascontiguousarray(tables[0][by_group]),
        dst=np.ascontiguousarray(tables[1][by_group]),
        groups=tuple(_groups(lengths, dense)),
        src_num_pages=src.num_pages,
        dst_num_pages=dst.num_pages,
    )


class _Pieces(NamedTuple):
    """One entry for each (slab, token, head) of page 0."""

    address: Int64s
    page_stride: Int64s
    region: Int64s

    def take(self, order: npt.NDArray[np.intp]) -> _Pieces:
        return _Pieces(self.address[order], self.page_stride[order], self.region[order])

    def continues(self, head_bytes: int) -> npt.NDArray[np.bool_]:
        """Whether piece i + 1 follows piece i without a gap in every page. Regions that touch stay apart: a
        descriptor across two registrations is refused by NIXL."""
        follows: npt.NDArray[np.bool_] = np.diff(self.address) == head_bytes
        follows &= (np.diff(self.page_stride) == 0) & (np.diff(self.region) == 0)
        return follows


def _pieces(layout: KVLayout) -> _Pieces:
    # a stride of a dimension with one element means nothing, so it counts as 0
    tokens = np.arange(layout.page_size, dtype=np.int64)
    heads = np.arange(layout.num_kv_heads, dtype=np.int64)
    base, page, token, head = np.array(
        [
            (
                slab.base,
                slab.page_stride if layout.num_pages > 1 else 0,
                slab.token_stride if layout.page_size > 1 else 0,
                slab.head_stride if layout.num_kv_heads > 1 else 0,
            )
            for slab in layout.slabs
        ],
        dtype=np.int64,
    ).T[:, :, None, None]
    address = base + tokens[None, :, None] * token + heads[None, None, :] * head
    region_starts = np.sort(np.array([start for start, _ in layout.regions], dtype=np.int64))
    region = np.searchsorted(region_starts, base, side="right")
    return _Pieces(
        address.ravel(),
        np.broadcast_to(page, address.shape).ravel(),
        np.broadcast_to(region, address.shape).ravel(),
    )


def _table(firsts: _Pieces, lengths: Int64s, num_pages: int, device: int) -> RunTable:
    table = np.empty((len(lengths), 5), dtype=np.uint64)
    table[:, 0] = firsts.address
    table[:, 1] = lengths
    table[:, 2] = device
    table[:, 3] = firsts.page_stride if num_pages > 1 else lengths
    table[:, 4] = num_pages
    return table


def _groups(lengths: Int64s, dense: npt.NDArray[np.bool_]) -> Iterator[RunGroup]:
    changes = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(dense.astype(np.int8)) != 0)) + 1
    edges = [0, *changes.tolist(), len(lengths)]
    for first, end in pairwise(edges):
        yield RunGroup(first, end - first, int(lengths[first]), bool(dense[first]))


def _check_index_range(num_runs: int, num_pages: int) -> None:
    if num_runs * num_pages - 1 > MAX_INDEX:
        raise ConfigError(
            f"{num_runs} runs of {num_pages} pages are {num_runs * num_pages} blocks, "
            f"an int32 index reaches {MAX_INDEX + 1}"
        )


# --- indices ------------------------------------------------------------------------------------


def checked_pages(pages: npt.NDArray[np.integer], num_pages: int, side: str) -> Pages:
    """`pages` as int32, after each id was found to lie in [0, num_pages). The only way to an address.

    Raises: PageStateError naming the side and the id or the shape.
    """
    if not isinstance(pages, np.ndarray) or pages.ndim != 1 or pages.dtype.kind not in "iu" or not len(pages):
        raise PageStateError(f"{side} pages: a one-dimensional array of at least one integer is needed")
    low, high = int(pages.min()), int(pages.max())
    if low < 0 or high >= num_pages:
        raise PageStateError(f"{side} page {low if low < 0 else high} is not in [0, {num_pages})")
    return pages.astype(np.int32, copy=False)


def flat_indices(pages: Pages, num_runs: int, num_pages: int, start: int = 0, stop: int | None = None) -> Pages:
    """Indices `run * num_pages + page` for every run and page, run by run; or a slice of that sequence.

    The slice is computed without the rest, so a part of a large job costs only itself.

    >>> flat_indices(np.array([4, 5], np.int32), num_runs=2, num_pages=10).tolist()
    [4, 5, 14, 15]
    >>> flat_indices(np.array([4, 5], np.int32), num_runs=2, num_pages=10, start=1, stop=3).tolist()
    [5, 14]

    Args:
        pages: int32, checked to lie in [0, num_pages).
        start, stop: positions in the sequence, 0 <= start < stop <= num_runs * len(pages).

    Raises: ConfigError where an index would not fit into an int32.
    """
    _check_index_range(num_runs, num_pages)
    length = len(pages)
    stop = num_runs * length if stop is None else stop
    first, last = start // length, (stop - 1) // length
    if first == last:
        return pages[start - first * length : stop - first * length] + np.int32(first * num_pages)
    bases = np.arange(first, last + 1, dtype=np.int32) * np.int32(num_pages)
    return (bases[:, None] + pages).ravel()[start - first * length : stop - first * length]


def part_indices(runs: Runs, part: Part, src_pages: Pages, dst_pages: Pages) -> tuple[Pages, Pages]:
    """The int32 indices of a part into the prepared lists of both sides; pair i is one block's copy."""
    first = part.group.first_run * len(src_pages)
    start, stop = first + part.start, first + part.stop
    return (
        flat_indices(src_pages, runs.num_runs, runs.src_num_pages, start, stop),
        flat_indices(dst_pages, runs.num_runs, runs.dst_num_pages, start, stop),
    )


# --- parts --------------------------------------------------------------------------------------


def cut_parts(runs: Runs, src_pages: Pages, dst_pages: Pages, max_bytes: int, max_descriptors: int) -> list[Part]:
    """Cut a job into parts of at most `max_bytes` and `max_descriptors` after merging, and at least a block.

    A post blocks its thread for its whole copy on some transports, and no other peer is served meanwhile: hence
    the bounds. O(len(pages) + parts).
    """
    # positions where a page does not continue its predecessor on both sides: each begins a descriptor
    steps = (np.diff(src_pages) == 1) & (np.diff(dst_pages) == 1)
    breaks = np.flatnonzero(np.concatenate(([True], ~steps)))
    parts: list[Part] = []
    for group in runs.groups:
        parts.extend(_group_parts(group, len(src_pages), breaks, max_bytes, max_descriptors))
    return parts


def _group_parts(
    group: RunGroup, num_pages: int, breaks: npt.NDArray[np.intp], max_bytes: int, max_descriptors: int
) -> Iterator[Part]:
    end = group.num_runs * num_pages
    most_blocks = max(1, max_bytes // group.block_bytes)
    if not group.dense:
        most_blocks = min(most_blocks, max_descriptors)
    # with few pieces the byte bound always comes first, which spares the search
    may_exceed = group.dense and max_descriptors < most_blocks
    start = 0
    while start < end:
        stop = min(start + most_blocks, end)
        if may_exceed:
            run, within = divmod(start, num_pages)
            # the part holds one descriptor, and one more for each break behind `start`; find the break too many
            descriptor = run * len(breaks) + int(np.searchsorted(breaks, within, side="right"))
            run, nth = divmod(descriptor + max_descriptors - 1, len(breaks))
            stop = min(stop, run * num_pages + int(breaks[nth]))
        yield Part(group, start, stop)
        start = stop
