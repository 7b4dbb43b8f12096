"""The cut of chunks into pieces that fit into a reader's leases, and the bytes of a lease that each
writer writes. Pure.

All writers of a reader and the reader itself compute the same cut from the two meshes and the
reader's staging area, so none of it travels: a chunk is cut from its first unit page on into pieces
of `units_per_piece`, the last one taking the rest, and in the lease of a piece the writers'
sections lie one behind the other, by rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from prefixkv.errors import HandshakeError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Mesh, sent_shares
from prefixkv.memory.stage_parts import stage_unit_bytes
from prefixkv.memory.staging_area import StagingArea, whole_blocks


class Section(NamedTuple):
    """Bytes of a lease that one writer writes: `num_bytes` at `offset`."""

    rank: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LeaseCut:
    """The cut of chunks into leases for one reader; `shares`: (rank, bytes of a unit page) per
    writer."""

    shares: tuple[tuple[int, int], ...]
    units_per_piece: int
    area_bytes: int

    @classmethod
    def into(
        cls, writers: Mesh, readers: Mesh, reader: int, layout: KVLayout, unit_tokens: int,
        area: StagingArea,
    ) -> LeaseCut:  # fmt: skip
        """Compute the cut for rank `reader`, which has a pool of this layout, whose aligned groups
        are staged with the pages, and the staging area `area`. The meshes have passed
        `check_meshes`. Raises HandshakeError as `of`."""
        mine = readers.shard(reader)
        shares = tuple(
            (rank, sum(stage_unit_bytes(layout, share.inside(mine), unit_tokens)))
            for rank, share in sent_shares(writers, readers, reader).items()
        )
        return cls.of(shares, area)

    @classmethod
    def of(cls, shares: tuple[tuple[int, int], ...], area: StagingArea) -> LeaseCut:
        """Compute the cut for these shares. O(log units per lease), with a sum over the writers
        each. Raises HandshakeError where a lease cannot take one unit page.

        >>> area = StagingArea(base=4096, num_bytes=65536, lease_bytes=32768)
        >>> LeaseCut.of(((0, 4096), (1, 4096)), area)
        LeaseCut(shares=((0, 4096), (1, 4096)), units_per_piece=4, area_bytes=65536)
        """
        # Without the rounding of sections to blocks `most` units would fit; with it maybe fewer.
        # The size grows with the units, so bisection finds the largest number that fits.
        most = area.lease_bytes // sum(unit_bytes for _, unit_bytes in shares)
        lease_bytes = cls(shares, most, area.num_bytes).lease_bytes
        fitting = bisect_right(range(1, most + 1), area.lease_bytes, key=lease_bytes)
        if fitting < 1:
            raise HandshakeError(
                "staging lease_bytes", lease_bytes(1), area.lease_bytes, "cannot take one unit page"
            )
        return cls(shares, fitting, area.num_bytes)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for rank, _ in self.shares)

    def pieces(self, num_units: int) -> Iterator[tuple[int, int]]:
        """Cut a chunk into pieces for a lease each; iterate over (first unit of the chunk, number
        of units).

        >>> list(LeaseCut(((0, 4096),), units_per_piece=4, area_bytes=16384).pieces(9))
        [(0, 4), (4, 4), (8, 1)]
        """
        for first in range(0, num_units, self.units_per_piece):
            yield first, min(self.units_per_piece, num_units - first)

    def sections(self, num_units: int, offset: int = 0) -> dict[int, Section]:
        """Return each writer's section by this cut, by rank, in a lease of `num_units` unit pages
        at `offset`.

        Offsets are whole blocks.

        >>> cut = LeaseCut(((0, 100), (2, 300)), units_per_piece=40, area_bytes=16384)
        >>> cut.sections(30)[2]
        Section(rank=2, offset=4096, num_bytes=9000)
        """
        sections = {}
        for rank, unit_bytes in self.shares:
            sections[rank] = Section(rank, offset, num_units * unit_bytes)
            offset += whole_blocks(num_units * unit_bytes)
        return sections

    def lease_bytes(self, num_units: int) -> int:
        """Bytes of a lease of `num_units` unit pages: its sections, each in whole blocks."""
        return sum(whole_blocks(num_units * unit_bytes) for _, unit_bytes in self.shares)

    def check_slots(self, rank: int, slot_bytes: int) -> None:
        """Raise HandshakeError where a writer's largest section does not fit into one of its slots.
        Smaller pieces would be no help: all writers have to cut alike."""
        num_bytes = self.sections(self.units_per_piece)[rank].num_bytes
        if num_bytes > slot_bytes:
            raise HandshakeError(
                "staging slot_bytes", slot_bytes, num_bytes, "cannot take our section of a lease"
            )
