"""The three copies of staging without the protocol, for the stack to be compared with.

Of each piece prefill's core gathers every writer's section into a slot and copies that into the
lease, and decode's core scatters the lease into pages: the cut and the copies are those of the
nodes. A plain copy stands for the wire; the leases lie in memory that both processes map. Each side
is one thread that does nothing else. Leases take turns, so both cores work at once: one message on
a pipe hands a lease over, one hands it back.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import torch

from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh, sent_shares
from prefixkv.memory.shared import block_of, shared_bytes
from prefixkv.memory.stage_copy import StagingCopy, scatter_together, staging_copy
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.staging_buffer import StagingBuffer
from prefixkv.paging import Pages
from prefixkv.staging.cut import LeaseCut, Section

LEASES: Final = 3  # one is gathered, one scattered, one lies between
_DONE: Final = b"done"


class _Piece(NamedTuple):
    reader: int
    units: Pages
    sections: tuple[Section, ...]


class _Side:
    """Of a side: its copies, by (writer, reader), and the leases."""

    def __init__(
        self, side: int, meshes: tuple[Mesh, Mesh], pools: Sequence[KVPool], pages: Pages,
        leases: torch.Tensor,
    ) -> None:  # fmt: skip
        writers, readers = self._meshes = meshes
        layout = pools[0].layout
        self._pages, self._leases = pages, leases
        self._unit_head_bytes = layout.page_size * layout.head_bytes * layout.slabs_per_layer
        self._copies: dict[tuple[int, int], StagingCopy] = {}
        for reader in range(readers.num_ranks):
            for writer, share in sent_shares(writers, readers, reader).items():
                rank = (writer, reader)[side]
                part = share.inside(meshes[side].shard(rank))
                self._copies[writer, reader] = staging_copy(
                    pools[rank].layout, part, layout.page_size
                )

    def _pieces(self, lease_bytes: int) -> Iterator[_Piece]:
        """In the order in which they are sent."""
        area = StagingArea(1 << 12, LEASES * lease_bytes, lease_bytes)
        number = 0
        for reader in range(self._meshes[1].num_ranks):
            cut = LeaseCut.of(*self._meshes, reader, self._unit_head_bytes, area)
            for first, count in cut.pieces(len(self._pages)):
                sections = cut.sections(count, number % LEASES * lease_bytes)
                yield _Piece(reader, self._pages[first : first + count], tuple(sections.values()))
                number += 1

    def _section(self, section: Section) -> torch.Tensor:
        return self._leases[section.offset : section.offset + section.num_bytes]

    def _takes_s(self, lease_bytes: int, copy: Callable[[_Piece], None]) -> float:
        """Of all pages, one copy of each piece and nothing else."""
        began_s = time.monotonic()
        for piece in self._pieces(lease_bytes):
            copy(piece)
        return time.monotonic() - began_s


class BareSender(_Side):
    """Prefill's side. `leases` is the receiver's `where`, `most_bytes` the largest lease."""

    def __init__(
        self, meshes: tuple[Mesh, Mesh], pools: Sequence[KVPool], pages: Pages, most_bytes: int,
        leases: tuple[int, int],
    ) -> None:  # fmt: skip
        pid, fd = leases
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        mapped.fill_(0)  # touches each page
        super().__init__(0, meshes, pools, pages, mapped)
        self._slots = StagingBuffer(most_bytes, most_bytes)

    def send(self, pipe: Connection, lease_bytes: int) -> float:
        """Send all pages; returns when that began, on the monotonic clock."""
        began_s = time.monotonic()
        under_way = 0
        for piece in self._pieces(lease_bytes):
            if under_way == LEASES:
                pipe.recv_bytes()
                under_way -= 1
            for section in piece.sections:
                self._gather(piece, section)
                self._wire(section)
            pipe.send_bytes(_DONE)
            under_way += 1
        for _ in range(under_way):
            pipe.recv_bytes()
        return began_s

    def each_s(self, lease_bytes: int) -> dict[str, float]:
        """What each copy takes by itself, while decode does nothing."""

        def gather(piece: _Piece) -> None:
            for section in piece.sections:
                self._gather(piece, section)

        def wire(piece: _Piece) -> None:
            for section in piece.sections:
                self._wire(section)

        return {
            "gather": self._takes_s(lease_bytes, gather),
            "wire": self._takes_s(lease_bytes, wire),
        }

    def _gather(self, piece: _Piece, section: Section) -> None:
        slot = self._slots.slice(0, section.num_bytes)
        self._copies[section.rank, piece.reader].gather(piece.units, slot)

    def _wire(self, section: Section) -> None:
        self._section(section).copy_(self._slots.slice(0, section.num_bytes))


class BareReceiver(_Side):
    """Decode's side; the leases are its memory, each of at most `most_bytes`."""

    def __init__(
        self, meshes: tuple[Mesh, Mesh], pools: Sequence[KVPool], pages: Pages, most_bytes: int
    ) -> None:
        leases = shared_bytes(LEASES * most_bytes)
        super().__init__(1, meshes, pools, pages, leases)
        block = block_of(leases.data_ptr(), leases.numel())
        assert block is not None
        self.where = os.getpid(), block.fd

    def take(self, pipe: Connection, lease_bytes: int) -> float:
        """Take what a sender sends; returns when the last of it lies in its pages."""
        for piece in self._pieces(lease_bytes):
            pipe.recv_bytes()
            self._scatter(piece)
            pipe.send_bytes(_DONE)
        return time.monotonic()

    def each_s(self, lease_bytes: int) -> dict[str, float]:
        """What the copy takes by itself, while prefill does nothing."""
        return {"scatter": self._takes_s(lease_bytes, self._scatter)}

    def _scatter(self, piece: _Piece) -> None:
        parts = [
            (self._copies[section.rank, piece.reader], self._section(section))
            for section in piece.sections
        ]
        scatter_together(parts, piece.units)
