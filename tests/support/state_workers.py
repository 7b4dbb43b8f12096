"""`MeshPair` with extra state: engines whose state can be computed only from its beginning, from a
snapshot, or from a checkpoint in the slot that prefill's node names.

The state after some tokens is a hash of them. Prefill's engine that goes on from a cached prefix
without the state behind it computes a wrong one, as a real engine would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from prefixkv import PrefillConfig
from prefixkv.cache.events import page_keys
from prefixkv.cache.radix_key import RadixKey
from prefixkv.conformance.hashing import PrefixHasher
from prefixkv.decode.request import DecodeRequest
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import Request
from prefixkv.serving.router import WorkerIndex
from tests.support.mesh_workers import MeshPair
from tests.support.state_memory import TENSORS, StateMemory

_hasher = PrefixHasher()


def owner_of(tokens: Any) -> int:
    return int(_hasher.prefixes(np.asarray(tokens, np.int32))[-1])


class StatePair(MeshPair):
    """Args: see MeshPair. `slots`: of prefill's engine and of decode. `snapshots`: prefixes that
    prefill has the state of."""

    def __init__(
        self, prefill: Mesh, decode: Mesh, *, tensors: tuple[StateTensor, ...] = TENSORS,
        slots: tuple[int, int] = (6, 4), usable: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        config = options.pop("prefill_config", PrefillConfig())
        self.sources = [
            StateMemory(tensors, slots[0] + config.checkpoints, prefill, rank)
            for rank in range(prefill.num_ranks)
        ]
        self.targets = [
            StateMemory(tensors, slots[1], decode, rank) for rank in range(decode.num_ranks)
        ]
        self.snapshots: set[int] = set()
        self.free_slots = list(range(slots[0]))
        self.handed: dict[str, int] = {}
        self.wrong_state: list[str] = []
        self._wrong: dict[str, int] = {}  # 1: prefill's engine has gone on without the state
        self.asked: list[str] = []
        self.starts: dict[str, int] = {}
        self.router = WorkerIndex(10_000)  # of prefill's pages
        super().__init__(
            prefill, decode,
            prefill_more={"states": [memory.pool() for memory in self.sources]},
            prefill_config=replace(config, usable_prefix=self._usable if usable else None),
            decode_more={"states": [memory.pool() for memory in self.targets]},
            device="cpu",  # where the state is
            **options,
        )  # fmt: skip

    def _usable(self, req: PrefillRequest, prefix_len: int) -> int:
        known = (
            end for end in range(prefix_len, 0, -1) if owner_of(req.tokens[:end]) in self.snapshots
        )
        return next(known, 0)

    def step(self) -> None:
        super().step()
        for ask in self.decode.pop_needs_prefill():
            rid = f"{ask.rid}.{ask.generation}"
            self.asked.append(ask.rid)
            attempt = {"room": ask.room, "generation": ask.generation, "decode": ask.decode}
            self.prefill.add(Request(rid, ask.tokens, **attempt))
        for rid in [rid for rid in self.handed if rid in self.sent or rid in self.prefill_failed]:
            slot = self.handed.pop(rid)
            self.free_slots.append(slot)
            for memory in self.sources:
                memory.scribble([slot], 0xEE)

    def may_end(self, req: PrefillRequest) -> bool:
        return bool(self.free_slots)

    def reached(self, req: PrefillRequest, start: int, end: int) -> None:
        if start == req.prefix_len:
            self._begin(req)
        if end in req.stops and (slot := self.prefill.save_state(req, end)) >= 0:
            for memory in self.sources:
                memory.fill(slot, owner_of(req.tokens[:end]) ^ self._wrong[req.rid])

    def _begin(self, req: PrefillRequest) -> None:
        """From a checkpoint the engine's state is that of its slot, on each rank."""
        start = self.starts[req.rid] = req.prefix_len
        owner, slot = owner_of(req.tokens[:start]) if start else 0, req.checkpoint_slot
        is_there = slot >= 0 and all(memory.is_of(slot, owner) for memory in self.sources)
        self._wrong[req.rid] = int(start > 0 and owner not in self.snapshots and not is_there)
        if self.prefill.config.checkpoints:
            # What routers are told of is what can be used, and all of it.
            assert self.router.apply(self.prefill.take_cache_events())
            page_size = self.prefill.pool.layout.page_size
            keys = page_keys(RadixKey(req.tokens[:-1]).data, page_size)
            assert start == self.router.depth(None, keys) * page_size
            assert (slot >= 0) == (start > 0)

    def last(self, req: PrefillRequest) -> dict[str, Any]:
        owner = owner_of(req.tokens) ^ self._wrong[req.rid]
        slot = self.handed[req.rid] = self.free_slots.pop(0)
        for memory in self.sources:
            memory.fill(slot, owner)
        return {"state_slot": slot}

    def wrong_pages(self, req: DecodeRequest) -> int:
        """Looks at the state as well."""
        wrong = super().wrong_pages(req)
        slots = [req.state_slot, *(other.state_slot(req.row) for other in self.decode.others)]
        if set(slots) != {req.state_slot} or not self.has_state(req):
            self.wrong_state.append(req.rid)
        return wrong

    def has_state(self, req: DecodeRequest) -> bool:
        owner = owner_of(req.tokens[: req.kv_len])
        return all(memory.is_of(req.state_slot, owner) for memory in self.targets)

    def check(self) -> None:
        """At the end: every byte was right, nobody wrote beside a slot, nothing is held."""
        self.until(self.at_rest)
        self.until(lambda: not self.handed)
        assert (self.mismatches, self.wrong_state) == (0, [])
        assert all(memory.canaries_live() for memory in (*self.sources, *self.targets))
        stats = self.decode.stats()
        assert (stats["slots_free"], stats["slots_held"]) == (self.targets[0].layout.num_slots, 0)
        self.decode.audit()
        self.prefill.audit()
