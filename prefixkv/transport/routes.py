"""The routes of a write to one peer, with their runs: pages into pages, staging or state into its.

A staging area is one dense run of blocks of BLOCK_BYTES, so NIXL merges neighbouring blocks into
one descriptor. State has a run for each block of a slot that goes there. Pure numpy, no address is
dereferenced.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import KVLayout, PageGroup
from prefixkv.memory.mesh import GROUPS_NEED_IT, check_equal, group_part
from prefixkv.memory.staging_area import BLOCK_BYTES, StagingArea
from prefixkv.memory.state_layout import StateLayout, StateLink
from prefixkv.transport.base import PeerMemory, RankMemory, WriteJob, window_route
from prefixkv.transport.runs import (
    Positions,
    RunGroup,
    Runs,
    check_index_range,
    paired_runs,
)


class Routes(NamedTuple):
    """The runs to one peer; None where one side has no staging area or state. `windows`: by window
    group, in the layouts' order."""

    pages: Runs
    staging: Runs | None = None
    state: Runs | None = None
    windows: tuple[Runs, ...] = ()

    def by_name(self) -> dict[str, Runs]:
        """Return the runs by `WriteJob.route`."""
        found = {"pages": self.pages, "staging": self.staging, "state": self.state}
        found |= {window_route(at): runs for at, runs in enumerate(self.windows)}
        return {route: runs for route, runs in found.items() if runs is not None}

    def of(self, job: WriteJob) -> Runs:
        """Return the runs of a write's route. Raise ConfigError if there are none."""
        if job.route == "pages":
            return self.pages
        runs = self.by_name().get(job.route)
        if runs is None:
            raise ConfigError(
                f"a write to {job.peer.name} by way of {job.route}: this side or that one has none"
            )
        return runs


def routes_to(ours: RankMemory, peer: PeerMemory) -> Routes:
    """Return the runs from our pool, staging area and state to a peer's. Raises HandshakeError and
    ConfigError as `paired_runs`, and ConfigError if the peer's staging area or state layout breaks
    a law."""
    layout, staging, state = ours
    src_part, dst_part = peer.parts or (None, None)
    pages = paired_runs(layout, peer.layout, src_part=src_part, dst_part=dst_part)
    windows: list[Runs] = []
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
            windows.append(runs)
        else:
            pages = pages.joined(runs)
    # The peer's word: validated before addresses are taken from it.
    if peer.staging is not None:
        peer.staging.validate()
    devices = layout.device_id, peer.layout.device_id
    return Routes(
        pages,
        staging_runs(staging, peer.staging, devices) if staging and peer.staging else None,
        state_runs(state, peer.state, devices) if state and peer.state else None,
        tuple(windows),
    )


def _paired_groups(src: KVLayout, dst: KVLayout) -> list[tuple[PageGroup, PageGroup]]:
    """Raise HandshakeError for groups with other names, windows or page sizes."""
    ours, theirs = ([(one.name, one.window) for one in side.groups] for side in (src, dst))
    check_equal("groups", ours, theirs)
    if src.groups:
        check_equal("page_size", src.page_size, dst.page_size, GROUPS_NEED_IT)
    return list(zip(src.groups, dst.groups, strict=True))


def staging_runs(src: StagingArea, dst: StagingArea, devices: tuple[int, int]) -> Runs:
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
    # A block outside its slot would read or write a neighbour's state.
    for block in blocks:
        sides = (src, block.src_entry, block.src_offset), (dst, block.dst_entry, block.dst_offset)
        for layout, entry, offset in sides:
            if (
                not 0 <= entry < len(layout.entries)
                or offset + block.num_bytes > layout.entries[entry].num_bytes
            ):
                raise ConfigError(f"{block} is not inside a slot of {len(layout.entries)} entries")
    # A group has blocks of one size.
    blocks = tuple(sorted(blocks, key=lambda block: block.num_bytes))
    groups: list[RunGroup] = []
    for num_bytes, same in groupby(block.num_bytes for block in blocks):
        first = sum(group.num_runs for group in groups)
        groups.append(RunGroup(first, len(list(same)), num_bytes, dense=False))
    places = (
        [(src.entries[one.src_entry], one.src_offset) for one in blocks],
        [(dst.entries[one.dst_entry], one.dst_offset) for one in blocks],
    )
    rows = [
        ([(entry.base + offset, block.num_bytes, device, entry.slot_stride)
          for block, (entry, offset) in zip(blocks, where, strict=True)], layout.num_slots)
        for layout, where, device in zip((src, dst), places, devices, strict=True)
    ]  # fmt: skip
    return _stepping_runs(rows, tuple(groups))


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
