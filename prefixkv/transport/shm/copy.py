"""Copies from our addresses to a peer's mapped memory, in one pass where blocks are large.

A job's blocks are cut into parts as for NIXL, but in another order: where runs lie inside each
other's pages (the tokens of a slice of heads), a page's blocks come one after the other, so that
what is read and written stays near. Large blocks, and those that touch on both sides, are moved by
memmove, without the GIL. Small ones at equal distances, as those of a page's slice, are one strided
copy of numpy's. The rest is gathered into a buffer that stays in the processor's cache, and
scattered from there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.errors import HandshakeError
from prefixkv.paging import Pages
from prefixkv.transport.runs import Part, Positions, RunGroup, Runs, RunTable

Int64s = npt.NDArray[np.int64]

_MOVED_BYTES: Final = 6 << 10  # from this mean length on memmove is the faster one
_ROWS_A_MOVE: Final = 32  # rows cost as much as one call of memmove
_STRIDED_BLOCKS: Final = 8  # of a bundle, at least
_SCRATCH_BYTES: Final = 256 << 10

_move = ctypes.memmove


class Mapped(NamedTuple):
    """Memory of a peer's, mapped here: it begins at `address` for the peer, at `here` for us."""

    address: int
    num_bytes: int
    here: int


def moved(table: RunTable, mapped: Sequence[Mapped]) -> RunTable:
    """Return the peer's run table with our addresses. Raises HandshakeError if a row is not inside
    what is mapped."""
    if not len(table):
        return table
    blocks = sorted(mapped)
    firsts = np.array([block.address for block in blocks], dtype=np.int64)
    ends = firsts + np.array([block.num_bytes for block in blocks], dtype=np.int64)
    shifts = np.array([block.here - block.address for block in blocks], dtype=np.int64)
    rows = table.astype(np.int64)
    # `last` is the end of a row's last block. The whole row has to lie inside one mapping: the
    # layout in the Hello is a peer's word, and a copy goes where the row says.
    last = rows[:, 0] + (rows[:, 4] - 1) * rows[:, 3] + rows[:, 1]
    at = np.searchsorted(firsts, rows[:, 0], side="right") - 1
    inside = at >= 0
    inside[inside] &= last[inside] <= ends[at[inside]]
    if not np.all(inside):
        row = int(np.flatnonzero(~inside)[0])
        where = f"[{rows[row, 0]:#x}, {last[row]:#x})"
        raise HandshakeError("shared memory", where, None, "is not in what the peer handed over")
    rows[:, 0] += shifts[at]
    return rows.astype(np.uint64)


class _Side(NamedTuple):
    """One side of a group, in units of `unit` bytes from `base`.

    `first` is the place of block [run, row] of position 0, `stride` the distance to the next
    position. `rows` is the flat memory from address `base` on, as numpy takes it.
    """

    first: Int64s
    stride: Int64s
    positions: Positions
    base: int
    rows: Any

    def places(self, first_run: int, num_runs: int, units: Pages) -> Int64s:
        runs = slice(first_run, first_run + num_runs)
        at = self.positions.of(units).astype(np.int64)[:, None]
        first, stride = self.first[runs].T, self.stride[runs].T  # [rows, runs]
        if len(first) == 1:
            found: Int64s = first + stride * at
            return found
        row, at = np.divmod(at, self.positions.num_positions // len(first))
        return first[row[:, 0]] + stride[row[:, 0]] * at

    def thinned(self, step: int) -> _Side:
        return self._replace(first=self.first[::step], stride=self.stride[::step])


@dataclass(frozen=True, slots=True, eq=False)
class _GroupPlan:
    """The plan for one group of runs. A block has `num_units` units of `unit` bytes.

    `bundle` is the number of neighbouring runs that lie inside each other's pages and are copied
    together. `steps` are the units from block to block of a bundle, on both sides, where they are
    the same in the whole group; then `heads` is the plan of the first block of each bundle.
    """

    unit: int
    num_units: int
    bundle: int
    src: _Side
    dst: _Side
    steps: tuple[int, int] | None = None
    heads: _GroupPlan | None = None


class CopyPlan:
    """The way in which each part of a job to one peer is copied. Addresses are this process's,
    valid as long as both pools, and the peer's map."""

    def __init__(self, runs: Runs, dst: RunTable) -> None:
        self._first_run = [group.first_run for group in runs.groups]
        self._plans = [_plan(group, runs, dst) for group in runs.groups]
        self._scratch: dict[int, Any] = {}  # buffers by unit, reused by each copy

    def copy(self, part: Part, src_pages: Pages, dst_pages: Pages) -> None:
        """Copy blocks `part.start` to `part.stop` of the part's group. The pages are checked."""
        plan = self._plans[self._first_run.index(part.group.first_run)]
        # 1. Bundles at equal steps: strided copies.
        if plan.heads is not None:
            self._by_strides(plan, plan.heads, part, src_pages, dst_pages)
            return
        # 2. Join neighbours that touch on both sides: what is left decides between memmove and
        # numpy.
        src, dst = _places(plan, part, src_pages, dst_pages)
        step = plan.num_units
        breaks = (np.diff(src) != step) | (np.diff(dst) != step)
        starts = np.flatnonzero(np.concatenate(([True], breaks)))
        mean_bytes = part.num_bytes // len(starts)
        if mean_bytes >= _MOVED_BYTES or plan.num_units > _ROWS_A_MOVE:
            self._move(plan, src[starts], dst[starts], np.diff(starts, append=len(src)))
        else:
            self._by_rows(plan, src, dst)

    def _move(self, plan: _GroupPlan, src: Int64s, dst: Int64s, counts: Int64s) -> None:
        """Each joined stretch by one memmove."""
        here = (src * plan.unit + plan.src.base).tolist()
        there = (dst * plan.unit + plan.dst.base).tolist()
        lengths = (counts * (plan.unit * plan.num_units)).tolist()
        for target, source, num_bytes in zip(there, here, lengths, strict=True):
            _move(target, source, num_bytes)

    def _by_strides(
        self, plan: _GroupPlan, heads: _GroupPlan, part: Part, src_pages: Pages, dst_pages: Pages
    ) -> None:
        assert plan.steps is not None
        size, (src_step, dst_step) = plan.bundle, plan.steps
        # 1. The bundles that the part touches, as blocks of the plan `heads`.
        first, end = part.start // size, (part.stop - 1) // size + 1
        whole = Part(part.group, first, end)
        src, dst = _places(heads, whole, src_pages, dst_pages)
        # 2. Join bundles that continue each other's steps on both sides.
        breaks = (np.diff(src) != size * src_step) | (np.diff(dst) != size * dst_step)
        starts = np.flatnonzero(np.concatenate(([True], breaks)))
        counts = np.diff(starts, append=len(src)) * size
        src, dst = src[starts], dst[starts]
        # 3. The part may begin and end inside a bundle: take the surplus off its first and last
        # stretch.
        before = part.start - first * size  # blocks of the first bundle that are not the part's
        src[0] += before * src_step
        dst[0] += before * dst_step
        counts[0] -= before
        counts[-1] -= end * size - part.stop
        # 4. One strided copy per stretch; the end is one unit behind its last block.
        src_ends, dst_ends = src + (counts - 1) * src_step + 1, dst + (counts - 1) * dst_step + 1
        sources, targets = plan.src.rows, plan.dst.rows
        for s, s_end, d, d_end in zip(
            src.tolist(), src_ends.tolist(), dst.tolist(), dst_ends.tolist(), strict=True
        ):
            targets[d:d_end:dst_step] = sources[s:s_end:src_step]

    def _by_rows(self, plan: _GroupPlan, src: Int64s, dst: Int64s) -> None:
        """Gather small blocks into the scratch buffer and scatter them from there."""
        if plan.num_units > 1:
            inner = np.arange(plan.num_units, dtype=np.int64)
            src, dst = (src[:, None] + inner).ravel(), (dst[:, None] + inner).ravel()
        scratch = self._scratch.get(plan.unit)
        if scratch is None:
            count = max(1, _SCRATCH_BYTES // plan.unit)
            scratch = self._scratch[plan.unit] = np.empty(count, plan.src.rows.dtype)
        sources, targets = plan.src.rows, plan.dst.rows
        for start in range(0, len(src), len(scratch)):
            stop = min(start + len(scratch), len(src))
            some = scratch[: stop - start]
            # "wrap" and no error: indices were checked as pages; a buffer less is written.
            np.take(sources, src[start:stop], out=some, mode="wrap")
            targets[dst[start:stop]] = some


def _plan(group: RunGroup, runs: Runs, dst_table: RunTable) -> _GroupPlan:
    """The largest unit that divides everything, the group's sides, and its bundles."""
    mine = slice(group.first_run, group.first_run + group.num_runs)
    tables = runs.src, dst_table
    src, dst = (table.astype(np.int64).reshape(runs.num_runs, -1, 5)[mine] for table in tables)
    # Units count from the lowest address of each side, so that places fit numpy's indices.
    bases = int(src[:, :, 0].min()), int(dst[:, :, 0].min())
    unit = group.block_bytes
    # A unit has to divide every place and stride, or a block would begin inside one.
    for table, base in zip((src, dst), bases, strict=True):
        unit = gcd(unit, *np.unique(table[:, :, 0] - base).tolist())
        unit = gcd(unit, *np.unique(table[:, :, 3]).tolist())
    mine_at = _side(src, bases[0], unit, runs.src_positions)
    theirs_at = _side(dst, bases[1], unit, runs.dst_positions)
    bundle = _bundle(group, src)
    plan = _GroupPlan(unit, group.block_bytes // unit, bundle, mine_at, theirs_at)
    steps = _step(mine_at, bundle), _step(theirs_at, bundle)
    # Not worth a strided copy: large blocks, small bundles, or steps that differ.
    if plan.num_units > 1 or bundle < _STRIDED_BLOCKS or min(steps) < 1:
        return plan
    heads = replace(plan, bundle=1, src=mine_at.thinned(bundle), dst=theirs_at.thinned(bundle))
    return replace(plan, steps=steps, heads=heads)


def _step(side: _Side, bundle: int) -> int:
    if bundle < 2:
        return 0
    bundles = side.first.reshape(-1, bundle, side.first.shape[1])
    steps, strides = np.diff(bundles, axis=1), side.stride.reshape(bundles.shape)
    same = bool(np.all(steps == steps.flat[0]) and np.all(strides == strides[:, :1]))
    return int(steps.flat[0]) if same else 0


def _side(table: Int64s, base: int, unit: int, positions: Positions) -> _Side:
    # Up to the end of the last block, in whole units: nothing behind it may be reached.
    ends = table[:, :, 0] + (table[:, :, 4] - 1) * table[:, :, 3] + table[:, :, 1]
    num_bytes = (int(ends.max()) - base) // unit * unit
    memory = (ctypes.c_char * num_bytes).from_address(base)
    rows = np.frombuffer(memoryview(memory).cast("B"), dtype=f"V{unit}")
    return _Side((table[:, :, 0] - base) // unit, table[:, :, 3] // unit, positions, base, rows)


def _bundle(group: RunGroup, src: Int64s) -> int:
    """Return the number of neighbouring runs that begin within one stride of the first; 1 if it is
    not the same in the whole group."""
    if group.dense:
        return 1
    firsts, strides = src[:, 0, 0], src[:, 0, 3]
    beyond = np.flatnonzero(firsts - firsts[0] >= strides[0])
    size = int(beyond[0]) if len(beyond) else len(firsts)
    if size < 2 or len(firsts) % size:
        return 1
    bundles = firsts.reshape(-1, size)
    near = bundles.max(axis=1) - bundles.min(axis=1) < strides.reshape(-1, size)[:, 0]
    return size if bool(np.all(near)) else 1


def _places(
    plan: _GroupPlan, part: Part, src_pages: Pages, dst_pages: Pages
) -> tuple[Int64s, Int64s]:
    """Return the blocks' places on both sides, in units, bundle by bundle, page by page inside a
    bundle, run by run inside a page."""
    size, num_pages = plan.bundle, len(src_pages)
    a_bundle = size * num_pages
    first, last = part.start // a_bundle, (part.stop - 1) // a_bundle
    start, stop = part.start - first * a_bundle, part.stop - first * a_bundle
    pages = slice(None)
    # Often a part lies in one bundle: then only its pages are looked at.
    if first == last:
        pages = slice(start // size, (stop - 1) // size + 1)
        start, stop = start - pages.start * size, stop - pages.start * size
    num_runs = (last + 1 - first) * size

    def flat(side: _Side, units: Pages) -> Int64s:
        """From [page, bundle, run] by bundle, cut to the part."""
        places = side.places(first * size, num_runs, units[pages])
        return places.reshape(len(places), -1, size).swapaxes(0, 1).ravel()[start:stop]

    return flat(plan.src, src_pages), flat(plan.dst, dst_pages)
