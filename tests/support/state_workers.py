"""`MeshPair` with extra state: engines whose state can be computed only from its beginning, from a
snapshot, or from a checkpoint in the slot that prefill's node names.

The state after some tokens is a hash of them. Prefill's engine that goes on from a cached prefix
without the state behind it computes a wrong one, as a real engine would.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from prefixkv import DecodeRequest, Mesh, PrefillConfig, PrefillRequest, StateTensor
from prefixkv.conformance.pattern import PrefixHasher
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import DecodeDriver, PrefillDriver
from tests.support.state_memory import TENSORS, StateMemory

_hasher = PrefixHasher()


def owner_of(tokens: Any) -> int:
    return int(_hasher.prefixes(np.asarray(tokens, np.int32))[-1])


class StatePrefill(PrefillDriver):
    """`snapshots`: prefixes that it has the state of."""

    sources: list[StateMemory]
    free_slots: list[int]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.snapshots: set[int] = set()
        self.handed: dict[str, int] = {}
        self._wrong: dict[str, int] = {}  # 1: it has gone on without the state

    def usable(self, req: PrefillRequest, prefix_len: int) -> int:
        known = (
            end for end in range(prefix_len, 0, -1) if owner_of(req.tokens[:end]) in self.snapshots
        )
        return next(known, 0)

    def step(self) -> None:
        super().step()
        for rid in [rid for rid in self.handed if rid in self.sent or rid in self.failed]:
            slot = self.handed.pop(rid)
            self.free_slots.append(slot)
            for memory in self.sources:
                memory.scribble([slot], 0xEE)

    def may_end(self, req: PrefillRequest) -> bool:
        return bool(self.free_slots)

    def state_of(self, req: PrefillRequest, start: int, end: int) -> dict[str, Any]:
        if start == req.prefix_len:
            self._begin(req)
        if end in req.stops and (slot := self.node.save_state(req, end)) >= 0:
            self._compute_state(req, slot, end)
        if end < req.num_tokens:
            return {}
        slot = self.handed[req.rid] = self.free_slots.pop(0)
        self._compute_state(req, slot, end)
        return {"state_slot": slot}

    def _compute_state(self, req: PrefillRequest, slot: int, end: int) -> None:
        for memory in self.sources:
            memory.fill(slot, owner_of(req.tokens[:end]) ^ self._wrong[req.rid])

    def _begin(self, req: PrefillRequest) -> None:
        """From a checkpoint the engine's state is that of its slot, on each rank."""
        start, slot = req.prefix_len, req.checkpoint_slot
        owner = owner_of(req.tokens[:start]) if start else 0
        is_there = slot >= 0 and all(memory.is_of(slot, owner) for memory in self.sources)
        self._wrong[req.rid] = int(start > 0 and owner not in self.snapshots and not is_there)
        assert self.router is None or (slot >= 0) == (start > 0)


class StateDecode(DecodeDriver):
    targets: list[StateMemory]

    def check(self, req: DecodeRequest) -> None:
        super().check(req)
        others = getattr(self.node, "others", ())
        slots = {req.state_slot, *(other.state_slot(req.row) for other in others)}
        owner = owner_of(req.tokens[: req.kv_len])
        is_right = all(memory.is_of(req.state_slot, owner) for memory in self.targets)
        self.mismatches += len(slots) > 1 or not is_right


class StatePair(MeshPair):
    """Args: see MeshPair. `slots`: of prefill's engine and of decode."""

    prefill_driver, decode_driver = StatePrefill, StateDecode

    def __init__(
        self, prefill: Mesh, decode: Mesh, *, tensors: tuple[StateTensor, ...] = TENSORS,
        slots: tuple[int, int] = (6, 4), usable: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        config = options.pop("prefill_config", PrefillConfig())
        counts = slots[0] + config.checkpoints, slots[1]
        sources, targets = (
            [StateMemory(tensors, count, mesh, rank) for rank in range(mesh.num_ranks)]
            for mesh, count in zip((prefill, decode), counts, strict=True)
        )
        find = (lambda *args: self.p.usable(*args)) if usable else None
        super().__init__(
            prefill, decode, prefill_config=replace(config, usable_prefix=find),
            states=[[one.pool() for one in side] for side in (sources, targets)],
            router=config.checkpoints > 0,
            device="cpu",  # where the state is
            **options,
        )  # fmt: skip
        self.p.sources, self.d.targets = sources, targets
        self.p.free_slots = list(range(slots[0]))

    def check(self) -> None:
        """At the end: every byte was right, nobody wrote beside a slot, nothing is held."""
        self.check_at_rest()
        self.until(lambda: not self.p.handed)
        assert all(memory.canaries_live() for memory in (*self.p.sources, *self.d.targets))
        stats = self.decode.stats()
        assert (stats["slots_free"], stats["slots_held"]) == (self.d.targets[0].layout.num_slots, 0)
