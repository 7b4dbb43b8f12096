"""A rank's extra state in numpy, with canaries round every slot, and bytes that follow from what
the state is of."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateEntry, StateLayout, StateTensor
from tests.support.transport_pools import Zeros

GUARD = 64
CANARY = 0xCA

SHARDED = StateTensor("conv", 0, 4, (3, 5), "float16")  # heads as the KV's of the tests
WHOLE = StateTensor("tail", 1, 1, (40,), "uint8")
TENSORS = (
    SHARDED,
    WHOLE,
    StateTensor("conv", 1, 4, (3, 5), "float16"),
    StateTensor("recurrent", 1, 4, (2, 2, 2)),
)


class StateMemory:
    """What one rank holds. `owner` of the state is a number, a hash of its tokens, say."""

    def __init__(
        self, tensors: Sequence[StateTensor], num_slots: int, mesh: Mesh, rank: int = 0,
        zeros: Zeros = np.zeros,
    ) -> None:  # fmt: skip
        self.tensors, self.mesh, self.rank = tuple(tensors), mesh, rank
        self.held = [
            (i, shard)
            for i, tensor in enumerate(tensors)
            if (shard := tensor.shard(mesh, rank)) is not None
        ]
        sizes = [tensors[i].head_bytes * shard.num_heads for i, shard in self.held]
        self.raw = [zeros((num_slots, GUARD + size + GUARD), np.uint8) for size in sizes]
        for raw in self.raw:
            raw[:] = CANARY
        self.slots = [raw[:, GUARD:-GUARD] for raw in self.raw]
        entries = tuple(
            StateEntry(slots.ctypes.data, raw.strides[0], size)
            for raw, slots, size in zip(self.raw, self.slots, sizes, strict=True)
        )
        self.layout = StateLayout(
            num_slots, entries, tuple((raw.ctypes.data, raw.nbytes) for raw in self.raw)
        )
        self.layout.validate()

    def pool(self) -> Any:
        """A StatePool of this memory."""
        import torch

        from prefixkv.memory.state_pool import StatePool

        views = [
            torch.from_numpy(raw)[:, GUARD:-GUARD]
            .view(getattr(torch, self.tensors[i].dtype))
            .unflatten(1, (shard.num_heads, *self.tensors[i].head_shape))
            for raw, (i, shard) in zip(self.raw, self.held, strict=True)
        ]
        return StatePool(self.tensors, views, self.mesh, self.rank, num_slots=self.layout.num_slots)

    def expected(self, owner: int) -> list[Any]:
        """By tensor held: the bytes of the rank's heads."""
        found = []
        for i, shard in self.held:
            heads = range(shard.first_head, shard.first_head + shard.num_heads)
            rows = [
                np.random.default_rng((owner, i, head)).bytes(self.tensors[i].head_bytes)
                for head in heads
            ]
            found.append(np.frombuffer(b"".join(rows), np.uint8))
        return found

    def fill(self, slot: int, owner: int) -> None:
        for slots, values in zip(self.slots, self.expected(owner), strict=True):
            slots[slot] = values

    def is_of(self, slot: int, owner: int) -> bool:
        pairs = zip(self.slots, self.expected(owner), strict=True)
        return all(np.array_equal(slots[slot], values) for slots, values in pairs)

    def scribble(self, slots: Sequence[int], value: int) -> None:
        for memory in self.slots:
            memory[list(slots)] = value

    def canaries_live(self) -> bool:
        return all(
            (raw[:, :GUARD] == CANARY).all() and (raw[:, -GUARD:] == CANARY).all()
            for raw in self.raw
        )
