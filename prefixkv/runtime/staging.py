"""The route of writes through staging memory: what the machines of `staging/` say in the control
objects, and their copies, gathers on prefill and scatters on decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from prefixkv.config import TransportConfig
from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.effects import RELAYS, AddPeer, CopyDone, Relay, RemovePeer
from prefixkv.control.prefill.control import PrefillControl
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import BLOCK_BYTES, KVLayout, RelayArea
from prefixkv.memory.kv_pool import make_zeros
from prefixkv.memory.stage_copy import StagingCopy, scatter_together, staging_copy
from prefixkv.protocol.ids import PeerId
from prefixkv.runtime.copies import CopyOrder, CopyThreads
from prefixkv.staging.leases import LeaseCut
from prefixkv.staging.receiver import Grant, Scatter, StagingPlan, StagingReceiver, ToRoom
from prefixkv.staging.sender import Gather, SendLeaseAsk, StagingSender
from prefixkv.transport.base import CHECKS

CopySink = Callable[[CopyDone], None]


class RelayBuffer:
    """Zeros on the pool's device, from a multiple of BLOCK_BYTES on. The transport registers it,
    the copies write it: a rank's slots on prefill, the area of leases on decode.

    `area` describes it for peers. On prefill its lease_bytes are those of a slot.
    """

    def __init__(
        self, num_bytes: int, lease_bytes: int, device: str = "cpu", shared: bool = False
    ) -> None:
        """Make the memory; `shared` as for `KVPool.create`. Raises ConfigError for sizes that no
        RelayArea has, CapacityError for too little memory."""
        # The sizes are checked before memory is taken; the address is not known yet.
        RelayArea(BLOCK_BYTES, num_bytes, lease_bytes).validate()
        (self._memory,) = make_zeros((num_bytes,), "uint8", device, shared)
        self.area = RelayArea(self._memory.data_ptr(), num_bytes, lease_bytes)

    @property
    def device(self) -> str:
        return str(self._memory.device)

    def slice(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a view, uint8 [num_bytes]. Raises ConfigError if it is not inside."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.area.num_bytes:
            raise ConfigError(
                f"bytes {offset} to {offset + num_bytes} of a staging area of {self.area.num_bytes}"
            )
        return self._memory[offset : offset + num_bytes]


def make_buffer(layout: KVLayout, config: TransportConfig) -> RelayBuffer | None:
    if not config.staging_bytes:
        return None
    shared = config.backend != "nixl" and layout.device == "cpu"
    return RelayBuffer(config.staging_bytes, config.lease_bytes, layout.device, shared)


def make_copies(
    layout: KVLayout, buffer: RelayBuffer, config: TransportConfig, name: str, sink: CopySink
) -> StagingCopies:
    workers = CopyPool(config.copy_threads, sink, buffer.device, name)
    return StagingCopies(layout, buffer, config.lease_bytes, workers)


class CopyPool(CopyThreads):
    """The staging copies of a node: each ends with one CopyDone to the sink."""

    def __init__(
        self, num_threads: int, sink: CopySink, device: str = "cpu", name: str = "node"
    ) -> None:
        super().__init__(num_threads, device, f"copy-{name}")
        self._sink = sink

    def submit(self, copy_id: int, copy: Callable[[], None]) -> None:
        """Queue a copy. Raises ClosedError after `close`."""

        def ended(order: CopyOrder) -> None:
            self._sink(CopyDone(copy_id, order.error))

        self.put(CopyOrder(lambda _start, _stop: copy(), ended))


class StagingCopies:
    """The copies for a control object's Gather and Scatter. Used by the control thread; the copies
    run in `workers`.

    `buffer` is the rank's staging memory, in slots of `slot_bytes` on prefill.
    """

    def __init__(
        self, layout: KVLayout, buffer: RelayBuffer, slot_bytes: int, workers: CopyPool
    ) -> None:
        self.buffer = buffer
        self._slot_bytes = slot_bytes
        self._workers = workers
        # By part and unit: tables of the whole pool, built on first use, at most a few times. Where
        # two threads build one at once, one of them is kept.
        self._copy_of = cache(lambda part, unit: staging_copy(layout, part, unit, buffer.device))
        self._reader = cache(lambda *what: CHECKS[0].reader(layout, *what))  # likewise
        # Read by workers, changed by the control thread.
        self.to_peers: dict[PeerId, StagingCopy] = {}
        self.effects: dict[type, Callable[[Any], None]] = {
            Gather: self.gather,
            Scatter: self.scatter,
            AddPeer: self.add_peer,
            RemovePeer: lambda removed: self.remove_peer(removed.peer),
        }

    def add_peer(self, added: AddPeer) -> None:
        """Prepare the gathers for a peer, if it is staged to."""
        if added.relayed and added.memory.parts is not None:
            self.to_peers[added.peer] = self._copy_of(added.memory.parts[0], added.unit_tokens)

    def remove_peer(self, peer: PeerId) -> None:
        """Forget a peer. A gather for it that has not started fails, by its CopyDone."""
        self.to_peers.pop(peer, None)

    def gather(self, effect: Gather) -> None:
        """Queue a gather into its slot. All errors come back in its CopyDone, as with `scatter`."""

        def run() -> None:
            # In the worker, so that a peer that is removed meanwhile fails this copy alone.
            stage = self.buffer.slice(effect.slot * self._slot_bytes, effect.num_bytes)
            self.to_peers[effect.peer].gather(effect.src_units, stage)

        self._workers.submit(effect.gather_id, run)

    def scatter(self, effect: Scatter) -> None:
        """Queue a scatter of a lease's sections into pages."""

        def run() -> None:
            parts = [
                (
                    self._copy_of(effect.plan.parts[section.rank], effect.plan.unit_tokens),
                    self.buffer.slice(section.offset, section.num_bytes),
                )
                for section in effect.sections
            ]
            scatter_together(parts, effect.units)
            if effect.plan.checksum:
                self._look_at(effect)

        self._workers.submit(effect.lease_id, run)

    def _look_at(self, effect: Scatter) -> None:
        """Raise ChecksumError unless each unit holds what each writer had, behind the scatter: so
        also gather and scatter have been right."""
        for rank, part in effect.plan.parts.items():
            # By part, each of which has the next share of the units.
            tags = sorted(tag for tag in effect.tags if tag.rank == rank)
            sums = self._reader(effect.plan.checksum, part, effect.plan.unit_tokens)
            sums.check(-1, effect.units, b"".join(tag.sums for tag in tags), tags[0].what)

    def close(self) -> None:
        self._workers.close()


# --- prefill: what the sender says ----------------------------------------------------------------


def _ask(control: PrefillControl, ask: SendLeaseAsk, now_s: float) -> None:
    if (peer := control._peers.find(ask.peer)) is not None:
        control._peers.send(peer, ask.ask, now_s)


# --- decode: what the receiver says of rooms ------------------------------------------------------


def _grant(control: DecodeControl, action: Grant, now_s: float) -> None:
    # The room may have ended since staging decided; then nothing is to be granted.
    if (room := control._rooms.get(action.key)) is not None:
        control._rooms.tell(room, action.rank, action.grant, now_s)


def _tell(control: DecodeControl, said: ToRoom, now_s: float) -> None:
    if (room := control._rooms.get(said.key)) is not None:
        control._rooms.on(room, said.event, now_s)


def install() -> None:
    parts = StagingSender, StagingReceiver, LeaseCut.into, StagingPlan.of, make_copies
    RELAYS[:] = [Relay("staging_bytes", make_buffer, *parts)]
    PrefillControl.INSIDE |= {SendLeaseAsk: _ask}
    DecodeControl.INSIDE |= {Grant: _grant, ToRoom: _tell}
