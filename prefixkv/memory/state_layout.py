"""Layouts of the extra state that a request has beside its KV: a sliding window's tail, a recurrent
state. Pure.

A request has one *slot* in all state tensors. A tensor has heads, which tensor-parallel ranks share
as they share KV heads, replicas included: so a tensor of one head is whole on every rank, and each
reader has it from one writer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Annotated, NamedTuple

import msgspec

from prefixkv.errors import ConfigError, HandshakeError, shown
from prefixkv.memory.kv_layout import (
    ADDRESS_END,
    ITEMSIZE,
    Regions,
    check_choice,
    check_inside,
    clusters,
    sorted_regions,
)
from prefixkv.memory.mesh import Mesh, Shard, check_equal, check_meshes, sent_share
from prefixkv.paging import MAX_INDEX
from prefixkv.settings import check_list, check_whole

Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]


class StateTensor(msgspec.Struct, frozen=True, array_like=True):
    """One state tensor of the model: per slot [num_heads, *head_shape] of `dtype`, contiguous;
    heads over all ranks.

    `layer` is a KV layer: the tensor lives in its pipeline stage; several may name the same. Both
    sides list all of the model's tensors, in the same order.
    """

    name: str
    """Name of the tensor."""
    layer: int
    """The KV layer in whose pipeline stage it lives."""
    num_heads: int
    """Heads of all ranks; split over ranks as KV heads are."""
    head_shape: Shape
    """Shape of one head in one slot."""
    dtype: str = "float32"
    """Data type, as torch names it."""

    @property
    def head_bytes(self) -> int:
        return prod(self.head_shape) * ITEMSIZE[self.dtype]

    def mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh in which a worker's ranks share the heads."""
        return replace(mesh, num_kv_heads=self.num_heads)

    def shard(self, mesh: Mesh, rank: int) -> Shard | None:
        """Return the heads that a rank holds; None if the layer is not in its stage."""
        shard = self.mesh(mesh).shard(rank)
        return shard if 0 <= self.layer - shard.first_layer < shard.num_layers else None

    def validate(self, mesh: Mesh) -> None:
        """Raise ConfigError naming the value out of range, or heads that the mesh cannot share."""
        if not isinstance(self.name, str):
            raise ConfigError(f"a state tensor's name is {shown(self.name)}, a string is needed")
        where = f"state tensor {self.name!r}"
        check_choice(f"{where}: dtype", self.dtype, tuple(ITEMSIZE))
        check_whole(f"{where}: layer", self.layer, 0, mesh.num_layers - 1)
        check_whole(f"{where}: num_heads", self.num_heads, 1, MAX_INDEX)
        check_list(f"{where}: head_shape", self.head_shape)
        for size in self.head_shape:
            check_whole(f"{where}: head_shape", size, 1, MAX_INDEX)
        if self.num_heads * self.head_bytes > MAX_INDEX:
            raise ConfigError(
                f"{where}: {self.num_heads} heads of {self.head_shape}, must be 1 to {MAX_INDEX} "
                "bytes"
            )
        self.mesh(mesh).validate()


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """A rank's share of one tensor: `num_bytes` per slot, those of slot 0 at `base`."""

    base: int
    """Address of slot 0."""
    slot_stride: int
    """Bytes."""
    num_bytes: int
    """Bytes of one slot."""


Entries = Annotated[tuple[StateEntry, ...], msgspec.Meta(max_length=8192)]


class StateLayout(msgspec.Struct, frozen=True, array_like=True):
    """A rank's state memory: an entry for each tensor of its stage, in order. `regions` as in
    KVLayout."""

    num_slots: int
    """Number of requests that can have state at the same time."""
    entries: Entries
    """One per tensor of the rank's stage, in order."""
    regions: Regions
    """The registered ranges, as (address, bytes)."""

    def validate(self) -> None:
        """Check every value, and that slots share no byte: entries lie apart, or interleave with
        one stride. Raises ConfigError. Call it on a peer's layout."""
        check_whole("state num_slots", self.num_slots, 1, MAX_INDEX)
        # Bounds the work below: each entry is looked up in all regions.
        if len(self.regions) > len(self.entries):
            raise ConfigError(f"{len(self.regions)} state regions for {len(self.entries)} entries")
        regions = sorted_regions(self.regions)
        # A peer's word: a write goes to these addresses, so each entry has to lie in memory that it
        # says is registered.
        for i, entry in enumerate(self.entries):
            if not 1 <= entry.num_bytes <= entry.slot_stride < ADDRESS_END:
                raise ConfigError(
                    f"state entry {i} has {entry.num_bytes} bytes a slot, {entry.slot_stride} apart"
                )
            check_inside(regions, f"state entry {i}", entry.base, self._extent(entry))
        # Slots of entries that overlap lie between each other's, within one stride.
        spans = [(one.base, i, one.base + self._extent(one)) for i, one in enumerate(self.entries)]
        for cluster in clusters(spans):
            first, *_ = together = [self.entries[i] for _, i, _ in cluster]
            for before, entry in pairwise(together):
                if (
                    entry.slot_stride != first.slot_stride
                    or entry.base < before.base + before.num_bytes
                    or entry.base + entry.num_bytes > first.base + first.slot_stride
                ):
                    raise ConfigError(
                        f"state entries at {before.base:#x} and {entry.base:#x} overlap"
                    )

    def _extent(self, entry: StateEntry) -> int:
        return (self.num_slots - 1) * entry.slot_stride + entry.num_bytes

    def check_holds(self, tensors: Iterable[StateTensor], mesh: Mesh, rank: int) -> None:
        """Raise HandshakeError unless this is what a rank of the mesh holds of the tensors."""
        shards = [(tensor, tensor.shard(mesh, rank)) for tensor in tensors]
        expected = [
            tensor.head_bytes * shard.num_heads for tensor, shard in shards if shard is not None
        ]
        described = [entry.num_bytes for entry in self.entries]
        why = f"of a slot are not the share of rank {rank}"
        check_equal("state bytes", expected, described, why)


# --- pairs --------------------------------------------------------------------------------------


class StateBlock(NamedTuple):
    """Part of a slot that one rank writes to another: entry and offset in it, on each side."""

    src_entry: int
    src_offset: int
    dst_entry: int
    dst_offset: int
    num_bytes: int


class StateLink(NamedTuple):
    """A peer's state memory, and the blocks that are copied from our slots into its slots."""

    layout: StateLayout
    blocks: tuple[StateBlock, ...]


def check_state_pairs(tensors: Iterable[StateTensor], writers: Mesh, readers: Mesh) -> None:
    """Raise HandshakeError or ConfigError for meshes that cannot share the state tensors, or in
    which a rank would send state to a rank that it sends no KV. They have passed `check_meshes`."""
    for num_heads in {tensor.num_heads for tensor in tensors}:
        ours = replace(writers, num_kv_heads=num_heads)
        ours.validate()
        check_meshes(ours, replace(readers, num_kv_heads=num_heads))
        # If there are more writers than readers, a reader gets its KV from each writer with heads
        # that it needs; with no more heads than readers, only from the first of them.
        kv_heads, num_writers = writers.num_kv_heads, writers.tp_size
        if num_writers > readers.tp_size and not (
            kv_heads >= num_writers or num_heads <= readers.tp_size or kv_heads % num_heads == 0
        ):
            raise HandshakeError(
                "state heads", kv_heads, num_heads, "would come from ranks that send no KV"
            )


def state_blocks(
    tensors: Iterable[StateTensor], writers: Mesh, writer: int, readers: Mesh, reader: int
) -> tuple[StateBlock, ...]:
    """Return the blocks of each slot that `writer` sends to `reader`. Over all writers, each byte
    of a slot comes once."""
    blocks: list[StateBlock] = []
    src = dst = 0
    for tensor in tensors:
        mine, theirs = tensor.shard(writers, writer), tensor.shard(readers, reader)
        if mine is not None and theirs is not None:
            share = sent_share(tensor.mesh(writers), writer, tensor.mesh(readers), reader)
            if share is not None:
                head = tensor.head_bytes
                src_offset = (share.first_head - mine.first_head) * head
                dst_offset = (share.first_head - theirs.first_head) * head
                blocks.append(StateBlock(src, src_offset, dst, dst_offset, share.num_heads * head))
        # Entries are counted on each side by itself: a rank lists only the tensors of its own
        # stage.
        src += mine is not None
        dst += theirs is not None
    return tuple(blocks)
