"""What a peer can be written to, and the runs that each job goes by: pages into pages, or our staging into its.

A staging area is one dense run of blocks of BLOCK_BYTES, so NIXL merges neighbouring blocks into one descriptor.
Pure numpy, no address is dereferenced.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefixkv.errors import ConfigError
from prefixkv.pool.kv_layout import KVLayout
from prefixkv.pool.mesh import Shard
from prefixkv.pool.staging_area import BLOCK_BYTES, StagingArea
from prefixkv.transport.base import WriteJob
from prefixkv.transport.runs import RunGroup, Runs, RunTable, Slots, check_index_range, paired_runs


class PeerMemory(NamedTuple):
    """A peer's memory as `add_peer` was told of it. `parts`: what to pair of both pools; None: all of them."""

    layout: KVLayout
    parts: tuple[Shard, Shard] | None = None
    staging: StagingArea | None = None


class Routes(NamedTuple):
    """The runs to one peer. `staging` is None unless both sides have an area."""

    pages: Runs
    staging: Runs | None = None

    def of(self, job: WriteJob) -> Runs:
        """Raises ConfigError for a staged job where staging is not."""
        if not job.staged:
            return self.pages
        if self.staging is None:
            raise ConfigError(f"a staged write to {job.peer.name}: this side or that one has no staging area")
        return self.staging


def routes_to(peer: PeerMemory, layout: KVLayout, staging: StagingArea | None) -> Routes:
    """The runs from our pool and our area to a peer's.

    Raises: what `paired_runs` raises; ConfigError for an area of the peer's that breaks a law.
    """
    src_part, dst_part = peer.parts or (None, None)
    pages = paired_runs(layout, peer.layout, src_part=src_part, dst_part=dst_part)
    if peer.staging is None:
        return Routes(pages)
    peer.staging.validate()
    return Routes(pages, None if staging is None else staging_runs(staging, peer.staging))


def staging_runs(src: StagingArea, dst: StagingArea) -> Runs:
    """One run: block i of either area. Raises ConfigError for an area with more blocks than an int32 can name."""
    group = RunGroup(0, 1, BLOCK_BYTES, dense=True)
    return Runs(_table(src), _table(dst), (group,), 1, _slots(src), _slots(dst))


def _table(area: StagingArea) -> RunTable:
    check_index_range(1, area.num_blocks)
    return np.array([[area.base, BLOCK_BYTES, 0, BLOCK_BYTES, area.num_blocks]], dtype=np.uint64)


def _slots(area: StagingArea) -> Slots:
    return Slots.stepping(area.num_blocks, fold=1, step=1)
