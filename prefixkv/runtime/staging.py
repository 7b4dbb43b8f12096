"""The staging of a node: its memory, its copy threads, and what the pure machines want of both.
Used by the control thread, except that copies run in threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prefixkv.config import TransportConfig
from prefixkv.control.prefill import AddPeer
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_copy import StagingCopy, staging_copy
from prefixkv.memory.staging_area import BLOCK_BYTES
from prefixkv.memory.staging_buffer import StagingBuffer
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.tags import ChunkTag
from prefixkv.runtime.copy_pool import CopyDone, CopyPool
from prefixkv.staging.receiver import Scatter
from prefixkv.staging.sender import Gather, PostStaged, StagingSender
from prefixkv.transport.base import WriteJob


class Gathered(NamedTuple):
    """The token of a gather's CopyDone."""

    gather_id: int


class Scattered(NamedTuple):
    """The token of a scatter's CopyDone."""

    lease_id: int


class _Staging:
    """What both sides share."""

    def __init__(
        self, layout: KVLayout, buffer: StagingBuffer, config: TransportConfig, name: str
    ) -> None:
        self.buffer = buffer
        self._layout = layout
        self._config = config
        self._name = name
        self._copies: dict[tuple[Shard, int], StagingCopy] = {}
        self._pool: CopyPool | None = None

    def start(self, sink: Callable[[CopyDone], None]) -> None:
        """Start the copy threads; what has been copied is said to `sink`."""
        self._pool = CopyPool(self._config.copy_threads, sink, self.buffer.device, self._name)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _submit(self, token: Gathered | Scattered, copy: Callable[[], None]) -> None:
        """Whatever goes wrong comes back as the token's CopyDone."""
        assert self._pool is not None
        self._pool.submit(token, copy)

    def _copy_of(self, part: Shard, unit_tokens: int) -> StagingCopy:
        """Made once, as it holds tables of the whole pool; two threads may both make one, and one
        is kept."""
        copy = self._copies.get((part, unit_tokens))
        if copy is None:
            copy = self._copies[part, unit_tokens] = staging_copy(
                self._layout, part, unit_tokens, self.buffer.device
            )
        return copy


class SendStaging(_Staging):
    """Prefill's: slices of many pages are gathered into a local slot, which is then written
    whole."""

    machine: StagingSender

    def start_sending(self, rank: int, resend_s: float, next_id: Callable[[], int]) -> None:
        """Before anything else; job numbers come from the endpoint."""
        config = self._config
        slots = config.staging_bytes // config.lease_bytes
        self.machine = StagingSender(
            rank, slots, config.lease_bytes, config.staging_window, resend_s, next_id
        )
        self._peers: dict[PeerId, StagingCopy] = {}

    def takes(self, peer: PeerId) -> bool:
        """Whether what goes to this reader is staged."""
        return peer in self._peers

    def add_peer(self, added: AddPeer) -> None:
        if added.cut is not None:
            self.machine.add_peer(added.peer, added.cut)
            self._peers[added.peer] = self._copy_of(added.parts[0], added.unit_tokens)

    def remove_peer(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)

    def gather(self, action: Gather) -> None:
        def run() -> None:
            stage = self.buffer.slice(action.slot * self._config.lease_bytes, action.num_bytes)
            self._peers[action.peer].gather(action.src_units, stage)

        self._submit(Gathered(action.gather_id), run)

    def job(self, action: PostStaged, incarnation: int, rank: int) -> WriteJob:
        """The write of a slot into a lease."""
        count = -(-action.num_bytes // BLOCK_BYTES)
        blocks = np.arange(count, dtype=np.int32)
        src = blocks + np.int32(action.slot * (self._config.lease_bytes // BLOCK_BYTES))
        dst = blocks + np.int32(action.dst_offset // BLOCK_BYTES)
        tag = ChunkTag(
            incarnation, *action.key, rank=rank, chunk=action.piece, slot=action.lease_id
        )
        return WriteJob(action.write_id, action.peer, src, dst, tag, route="staging")


class ReceiveStaging(_Staging):
    """Decode's: what has landed in a lease is scattered into the room's pages."""

    def scatter(self, action: Scatter) -> None:
        def run() -> None:
            for section in action.sections:
                copy = self._copy_of(action.parts[section.rank], action.unit_tokens)
                copy.scatter(action.units, self.buffer.slice(section.offset, section.num_bytes))

        self._submit(Scattered(action.lease_id), run)
