"""A page's bytes on both sides of a write: runs of equal blocks, for NIXL's prepared lists. Pure.

A *run* is one block of each page, a page stride apart, in the same order on both sides. It covers
the layers and heads that the source sends the target (`memory/mesh.py`). Both sides count pages of
the smaller size. NIXL merges inside a run only, so the units of a larger page are blocks of one run
where one stride steps through them, and else rows of their own. A *position* is a unit page's place
in a run: a block's flat index is `run * num_positions + position`.

A job is cut into bounded parts, each a stretch of flat indices, run by run, pages inside.

`Routes` are all runs to one peer: pages into pages, staging or state into its. A staging area is
one dense run of blocks of BLOCK_BYTES, so NIXL merges neighbouring blocks into one descriptor.
State has a run for each block of a slot that goes there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import BLOCK_BYTES, KVLayout, PageGroup, RelayArea
from prefixkv.memory.mesh import GROUPS_NEED_IT, Shard, check_equal, check_page_sizes, group_part
from prefixkv.memory.state_layout import StateLayout, StateLink
from prefixkv.paging import MAX_INDEX, Pages
from prefixkv.transport.base import PeerMemory, RankMemory, Route, window_route

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
RunTable = npt.NDArray[np.uint64]

_MUST_BE_EQUAL: Final = ("attention", "dtype", "head_dim", "opaque")
_WHOLE: Final = ("page_size", "num_kv_heads")  # equal too, where pages are opaque
_PART_MUST_BE_EQUAL: Final = (("num_layers", "num_layers"), ("num_heads", "num_kv_heads"))


class RunGroup(NamedTuple):
    """Neighbouring runs with blocks of one size, all of which can merge, or none."""

    first_run: int
    num_runs: int
    block_bytes: int
    dense: bool  # blocks of neighbouring positions touch, on both sides


class Positions(NamedTuple):
    """The mapping from the unit pages of one side to the positions of each of its runs.

    `step` is the number of positions from one page to the next; 0 where unit j of all pages makes
    row j of the run's `fold` rows. `num_positions` are those of one run; some may stand for no
    unit. With equal page sizes page, unit page and position are the same.
    """

    num_pages: int
    fold: int
    step: int
    num_positions: int

    @property
    def num_units(self) -> int:
        return self.num_pages * self.fold

    @classmethod
    def stepping(cls, num_pages: int, fold: int, step: int) -> Positions:
        """Return the positions with this step, as many as reach the last unit."""
        most = (num_pages - 1) * step + fold if step else num_pages * fold
        return cls(num_pages, fold, step, most)

    def of(self, units: Pages) -> Pages:
        """Return the positions (int32) of unit pages that were checked to lie in the pool."""
        # Three cases: position equals unit; units stepped through by one stride; one row per unit.
        if self.step == self.fold:
            return units
        page, unit = np.divmod(units, np.int32(self.fold))
        if self.step:
            return page * np.int32(self.step) + unit
        return unit * np.int32(self.num_pages) + page


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The paired runs of a source and a target pool.

    `src` and `dst` are uint64 [rows, 5] with columns (address, block bytes, device, stride, count),
    as NIXL takes them; a device is the owner's number of its GPU, 0 on the CPU. `groups` cover the
    runs in order.
    """

    src: RunTable
    dst: RunTable
    groups: tuple[RunGroup, ...]
    num_runs: int
    src_positions: Positions
    dst_positions: Positions

    def joined(self, other: Runs) -> Runs:
        """Return these runs with those of another pair of pools behind them, whose pages have the
        same ids. Raises ConfigError for more blocks than an int32 can index."""
        assert self.src_positions == other.src_positions, "pages are counted alike"
        assert self.dst_positions == other.dst_positions, "on both sides"
        num_runs = self.num_runs + other.num_runs
        for positions in (self.src_positions, self.dst_positions):
            check_index_range(num_runs, positions.num_positions)
        behind = [
            group._replace(first_run=group.first_run + self.num_runs) for group in other.groups
        ]
        return replace(
            self,
            src=np.concatenate([self.src, other.src]),
            dst=np.concatenate([self.dst, other.dst]),
            groups=(*self.groups, *behind),
            num_runs=num_runs,
        )


def paired_runs(
    src: KVLayout,
    dst: KVLayout,
    src_part: Shard | None = None,
    dst_part: Shard | None = None,
) -> Runs:
    """Return the runs that pair two pools, of the largest blocks that are contiguous in both.

    It walks the smallest pieces (a head of a token of a slab) by source address, and joins
    neighbours that are neighbours on the target too. O(slabs * page_size * heads) once per peer.
    `dst`, the peer's layout, is validated here. The parts are in each pool's own numbers.

    Raises HandshakeError, which names the field, if the parts or the models differ, or neither page
    size divides the other; ConfigError if `dst` breaks a law of layouts, a part is not in its pool,
    or the pools have more blocks than an int32 can index.
    """
    # 1. Same model, same shape of the part, page sizes that divide. Only then is the peer's layout
    # read further.
    src_part, dst_part = src_part or Shard.whole(src), dst_part or Shard.whole(dst)
    for name in (*_MUST_BE_EQUAL, *(_WHOLE if src.opaque else ())):
        check_equal(name, getattr(src, name), getattr(dst, name))
    for of_part, name in _PART_MUST_BE_EQUAL:
        check_equal(name, getattr(src_part, of_part), getattr(dst_part, of_part))
    if src.opaque:
        check_equal("num_heads", src.num_kv_heads, src_part.num_heads)
    check_page_sizes(src.page_size, dst.page_size)
    dst.validate()

    # 2. The smallest pieces of both sides, both in the order of the source's addresses.
    unit_tokens = min(src.page_size, dst.page_size)
    src_pieces = _pieces(src, src_part, unit_tokens)
    dst_pieces = _pieces(dst, dst_part, unit_tokens)
    order = np.argsort(src_pieces.address, kind="stable")
    src_pieces, dst_pieces = src_pieces.take(order), dst_pieces.take(order)
    head_bytes = src.head_bytes
    # 3. Join what continues on both sides: `firsts` begin a block, `lengths` are in bytes.
    joined = src_pieces.continues(head_bytes) & dst_pieces.continues(head_bytes)
    firsts = np.flatnonzero(np.concatenate(([True], ~joined)))
    lengths = np.diff(firsts, append=len(joined) + 1) * head_bytes

    # 4. The tables of both sides, then groups of equal blocks that can all merge or cannot.
    src_positions, src_table = _side(src, src_pieces.take(firsts), lengths, unit_tokens)
    dst_positions, dst_table = _side(dst, dst_pieces.take(firsts), lengths, unit_tokens)
    dense = np.all([table[:, 0, 3] == table[:, 0, 1] for table in (src_table, dst_table)], axis=0)
    by_group = np.lexsort((dense, lengths))  # stable: address order inside a group
    lengths, dense = lengths[by_group], dense[by_group]
    return Runs(
        src=np.ascontiguousarray(src_table[by_group]).reshape(-1, 5),
        dst=np.ascontiguousarray(dst_table[by_group]).reshape(-1, 5),
        groups=tuple(_groups(lengths, dense)),
        num_runs=len(lengths),
        src_positions=src_positions,
        dst_positions=dst_positions,
    )


class _Pieces(NamedTuple):
    """One entry for each (slab, token, head) of the first unit of page 0.

    `kind` is a row of `strides`, int64 [kinds, 3] with columns (page stride, unit stride, region);
    the stride of a dimension with one element means nothing, so it counts as 0.
    """

    address: Int64s
    kind: Int64s
    strides: Int64s

    def take(self, order: npt.NDArray[np.intp]) -> _Pieces:
        return _Pieces(self.address[order], self.kind[order], self.strides)

    def continues(self, head_bytes: int) -> Bools:
        """Return, for each i, whether piece i + 1 follows without a gap in every unit of every
        page. Regions that touch stay apart: NIXL refuses a descriptor across two registrations."""
        follows: Bools = np.diff(self.address) == head_bytes
        follows &= np.diff(self.kind) == 0
        return follows

    @property
    def steps(self) -> tuple[Int64s, Int64s]:
        """Page stride and unit stride of each."""
        return self.strides[self.kind, 0], self.strides[self.kind, 1]


def _pieces(layout: KVLayout, part: Shard, unit_tokens: int) -> _Pieces:
    """Raise ConfigError if the part is not inside the pool."""
    slabs = part.slabs_of(layout)
    starts = sorted(start for start, _ in layout.regions)
    kinds: dict[tuple[int, int, int], int] = {}
    columns = []
    # A kind is what two pieces must share to continue each other everywhere, not just in page 0.
    for slab in slabs:
        page = slab.page_stride if layout.num_pages > 1 else 0
        token = slab.token_stride if layout.page_size > 1 else 0
        head = slab.head_stride if layout.num_kv_heads > 1 else 0
        unit = token * unit_tokens if unit_tokens < layout.page_size else 0
        kind = kinds.setdefault((page, unit, bisect_right(starts, slab.base)), len(kinds))
        columns.append((slab.base, token, head, kind))
    base, token, head, kind = np.array(columns, dtype=np.int64).T[:, :, None, None]
    tokens = np.arange(unit_tokens, dtype=np.int64)[:, None]
    heads = np.arange(part.first_head, part.first_head + part.num_heads, dtype=np.int64)
    address = base + tokens * token + heads * head
    return _Pieces(
        address.ravel(),
        np.broadcast_to(kind, address.shape).ravel(),
        np.array(list(kinds), dtype=np.int64),
    )


# --- tables -------------------------------------------------------------------------------------


def _side(
    layout: KVLayout, firsts: _Pieces, lengths: Int64s, unit_tokens: int
) -> tuple[Positions, RunTable]:
    num_runs, num_pages, fold = len(lengths), layout.num_pages, layout.page_size // unit_tokens
    step = _position_step(firsts, num_pages, fold, num_runs)
    positions = Positions.stepping(num_pages, fold, step)
    check_index_range(num_runs, positions.num_positions)
    rows = 1 if step else fold  # of each run
    page, unit = firsts.steps
    stride = unit if fold > 1 and step else page
    table = np.empty((num_runs, rows, 5), dtype=np.uint64)
    table[:, :, 0] = firsts.address[:, None] + np.arange(rows, dtype=np.int64) * unit[:, None]
    table[:, :, 1] = lengths[:, None]
    table[:, :, 2] = layout.device_id
    # A stride of 0 (one element) becomes the block's length, so that the run counts as dense.
    table[:, :, 3] = np.where(stride, stride, lengths)[:, None]
    table[:, :, 4] = positions.num_positions // rows
    return positions, table


def _position_step(firsts: _Pieces, num_pages: int, fold: int, num_runs: int) -> int:
    """Return the units from page to page in a run; 0 if they are not the same whole number in every
    run, or the positions do not fit into an index."""
    if fold == 1 or num_pages == 1:
        return fold
    page, unit = firsts.steps
    step = int(page[0] // unit[0])
    regular = step >= fold and bool(np.all(page == step * unit))
    fits = num_runs * Positions.stepping(num_pages, fold, step).num_positions - 1 <= MAX_INDEX
    return step if regular and fits else 0


def _groups(lengths: Int64s, dense: Bools) -> Iterator[RunGroup]:
    """A new group begins where the length or the density changes."""
    changes = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(dense.astype(np.int8)) != 0)) + 1
    edges = [0, *changes.tolist(), len(lengths)]
    for first, end in pairwise(edges):
        yield RunGroup(first, end - first, int(lengths[first]), bool(dense[first]))


def check_index_range(num_runs: int, num_positions: int) -> None:
    """Raise ConfigError if a flat index would not fit into an int32, the width that NIXL takes."""
    if num_runs * num_positions - 1 > MAX_INDEX:
        raise ConfigError(
            f"{num_runs} runs of {num_positions} pages are {num_runs * num_positions} blocks, "
            f"an int32 index reaches {MAX_INDEX + 1}"
        )


# --- parts of a job ------------------------------------------------------------------------------


class Part(NamedTuple):
    """The content of one post: blocks `start` to `stop` of `group`, counted run by run, with the
    job's pages inside each run."""

    group: RunGroup
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.group.block_bytes


def flat_indices(
    pages: Pages, num_runs: int, num_pages: int, start: int = 0, stop: int | None = None
) -> Pages:
    """Return the indices `run * num_pages + page` of a write's blocks, for every run and page, run
    by run, or a slice of that sequence for one part.

    The slice is computed without the rest, so a part of a large job costs only itself.

    >>> flat_indices(np.array([4, 5], np.int32), num_runs=2, num_pages=10).tolist()
    [4, 5, 14, 15]
    >>> flat_indices(np.array([4, 5], np.int32), num_runs=2, num_pages=10, start=1, stop=3).tolist()
    [5, 14]

    `pages`: int32, checked to lie in [0, num_pages). `start`, `stop`: positions in the sequence, 0
    <= start < stop <= num_runs * len(pages). The runs were checked to have no more blocks
    than an int32 counts.
    """
    length = len(pages)
    stop = num_runs * length if stop is None else stop
    # Often a part lies in one run: then no table of runs and pages is built.
    first, last = start // length, (stop - 1) // length
    if first == last:
        return pages[start - first * length : stop - first * length] + np.int32(first * num_pages)
    bases = np.arange(first, last + 1, dtype=np.int32) * np.int32(num_pages)
    return (bases[:, None] + pages).ravel()[start - first * length : stop - first * length]


def part_indices(runs: Runs, part: Part, src_pages: Pages, dst_pages: Pages) -> tuple[Pages, Pages]:
    """Return the int32 indices of a part into the lists of both sides; pair i is one block."""
    first = part.group.first_run * len(src_pages)
    start, stop = first + part.start, first + part.stop
    src, dst = runs.src_positions, runs.dst_positions
    return (
        flat_indices(src.of(src_pages), runs.num_runs, src.num_positions, start, stop),
        flat_indices(dst.of(dst_pages), runs.num_runs, dst.num_positions, start, stop),
    )


def next_indices(
    runs: Runs, parts: list[Part], first: int, most: int, src_pages: Pages, dst_pages: Pages
) -> list[tuple[Pages, Pages]]:
    """Return `part_indices` of up to `most` parts from number `first` on, at least of one.

    Parts that follow each other in one group are worked out together: that takes one of them hardly
    longer, and between two posts, each of which moves more than the caches hold, this code is cold.
    """
    begun = parts[first]
    last = first + 1
    while last < min(first + most, len(parts)) and parts[last].group is begun.group:
        last += 1
    whole = begun._replace(stop=parts[last - 1].stop)
    src, dst = part_indices(runs, whole, src_pages, dst_pages)
    spans = [slice(one.start - begun.start, one.stop - begun.start) for one in parts[first:last]]
    return [(src[span], dst[span]) for span in spans]


def cut_parts(
    runs: Runs, src_pages: Pages, dst_pages: Pages, max_bytes: int, max_descriptors: int
) -> list[Part]:
    """Cut a write into parts of at most `max_bytes` and `max_descriptors` after merging, each at
    least one block. O(len(pages) + parts).

    A post blocks its thread for its whole copy on some transports, and no other peer is served
    meanwhile: hence the bounds.
    """
    # Positions where a page does not continue its predecessor on both sides: each begins a
    # descriptor.
    steps = (np.diff(runs.src_positions.of(src_pages)) == 1) & (
        np.diff(runs.dst_positions.of(dst_pages)) == 1
    )
    breaks = np.flatnonzero(np.concatenate(([True], ~steps)))
    num_pages = len(src_pages)
    parts: list[Part] = []
    for group in runs.groups:
        end = group.num_runs * num_pages
        most_blocks = max(1, max_bytes // group.block_bytes)
        # Blocks that do not touch never merge: one descriptor each.
        if not group.dense:
            most_blocks = min(most_blocks, max_descriptors)
        # With few pieces the byte bound always comes first, which spares the search.
        may_exceed = group.dense and max_descriptors < most_blocks
        start = 0
        while start < end:
            stop = min(start + most_blocks, end)
            if may_exceed:
                run, within = divmod(start, num_pages)
                # The part holds one descriptor, and one more for each break behind `start`. It ends
                # at the first break that would be too many.
                descriptor = run * len(breaks) + int(np.searchsorted(breaks, within, side="right"))
                run, nth = divmod(descriptor + max_descriptors - 1, len(breaks))
                stop = min(stop, run * num_pages + int(breaks[nth]))
            parts.append(Part(group, start, stop))
            start = stop
    return parts


Routes = dict[Route, Runs]
"""The runs to one peer, by `WriteJob.route`; those are missing that one side has no memory for."""


def routes_to(ours: RankMemory, peer: PeerMemory) -> Routes:
    """Return the runs from our pool, staging area and state to a peer's. Raises HandshakeError and
    ConfigError as `paired_runs`, and ConfigError if the peer's staging area or state layout breaks
    a law."""
    layout, area, state = ours
    src_part, dst_part = peer.parts or (None, None)
    pages = paired_runs(layout, peer.layout, src_part=src_part, dst_part=dst_part)
    routes: Routes = {}
    for mine, theirs in _paired_groups(layout, peer.layout):
        # Cut as the first layers are, between ranks that hold other numbers of heads.
        runs = paired_runs(
            mine.layout,
            theirs.layout,
            src_part and group_part(src_part, layout, mine.layout),
            dst_part and group_part(dst_part, peer.layout, theirs.layout),
        )
        # A page of an aligned group is written with the page of the same id.
        if mine.window:
            routes[window_route(len(routes))] = runs
        else:
            pages = pages.joined(runs)
    routes["pages"] = pages
    devices = layout.device_id, peer.layout.device_id
    # The peer's word: validated before addresses are taken from it.
    if peer.relay is not None:
        peer.relay.validate()
        if area is not None:
            routes["staging"] = relay_runs(area, peer.relay, devices)
    if state and peer.state:
        routes["state"] = state_runs(state, peer.state, devices)
    return routes


def _paired_groups(src: KVLayout, dst: KVLayout) -> list[tuple[PageGroup, PageGroup]]:
    """Raise HandshakeError for groups with other names, windows or page sizes."""
    ours, theirs = ([(one.name, one.window) for one in side.groups] for side in (src, dst))
    check_equal("groups", ours, theirs)
    if src.groups:
        check_equal("page_size", src.page_size, dst.page_size, GROUPS_NEED_IT)
    return list(zip(src.groups, dst.groups, strict=True))


def relay_runs(src: RelayArea, dst: RelayArea, devices: tuple[int, int]) -> Runs:
    """Return one run: block i of either area. ConfigError for more than an int32 names."""
    sides = [
        ([(area.base, BLOCK_BYTES, device, BLOCK_BYTES)], area.num_bytes // BLOCK_BYTES)
        for area, device in zip((src, dst), devices, strict=True)
    ]
    return _stepping_runs(sides, (RunGroup(0, 1, BLOCK_BYTES, dense=True),))


def state_runs(src: StateLayout, link: StateLink, devices: tuple[int, int]) -> Runs:
    """Return one run for each block of state that goes to a peer. Raises ConfigError if the peer's
    layout breaks a law, or a block is not inside a slot."""
    dst, blocks = link.layout, link.blocks
    dst.validate()
    # A group has blocks of one size.
    blocks = tuple(sorted(blocks, key=lambda block: block.num_bytes))
    groups: list[RunGroup] = []
    for num_bytes, same in groupby(block.num_bytes for block in blocks):
        first = sum(group.num_runs for group in groups)
        groups.append(RunGroup(first, len(list(same)), num_bytes, dense=False))
    places = (
        [(one.src_entry, one.src_offset, one.num_bytes) for one in blocks],
        [(one.dst_entry, one.dst_offset, one.num_bytes) for one in blocks],
    )
    sides = [
        ([_state_row(layout, *place, device) for place in where], layout.num_slots)
        for layout, where, device in zip((src, dst), places, devices, strict=True)
    ]
    return _stepping_runs(sides, tuple(groups))


def _state_row(
    layout: StateLayout, number: int, offset: int, num_bytes: int, device: int
) -> tuple[int, int, int, int]:
    """Raise ConfigError for a block outside its slot: it would read or write a neighbour's."""
    entry = layout.entries[number] if 0 <= number < len(layout.entries) else None
    if entry is None or offset + num_bytes > entry.num_bytes:
        block = f"block of {num_bytes} bytes at {offset} of entry {number}"
        raise ConfigError(f"{block} is not inside a slot of {len(layout.entries)} entries")
    return entry.base + offset, num_bytes, device, entry.slot_stride


def _stepping_runs(
    sides: list[tuple[list[tuple[int, int, int, int]], int]], groups: tuple[RunGroup, ...]
) -> Runs:
    """Return runs with a row (address, bytes, device, stride) each, and as many blocks as the
    number behind all rows of a side."""
    for rows, count in sides:
        check_index_range(len(rows), count)
    src, dst = (np.array([(*row, count) for row in rows], dtype=np.uint64) for rows, count in sides)
    positions = [Positions.stepping(count, fold=1, step=1) for _, count in sides]
    return Runs(src, dst, groups, len(src), *positions)
