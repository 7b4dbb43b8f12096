"""The stand-in's sizes, checked against each other, and the plan of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from prefixkv.cli.demo.workload import Workload, chat
from prefixkv.cli.policies import policy_of
from prefixkv.config import TransportConfig
from prefixkv.errors import check_range
from prefixkv.memory.kv_layout import BLOCK_BYTES, ITEMSIZE, SLABS_PER_LAYER
from prefixkv.memory.mesh import Mesh, check_meshes
from prefixkv.spi import DEFAULT_POLICY

RESERVE_TOKENS: Final = 64  # room decode keeps for each running request's answer
LOAD_FRACTION: Final = 0.7  # of what cache-off sustains, in the timed passes
_LEASE_BYTES: Final = 4 << 20


class PassPlan(NamedTuple):
    """One pass over the workload. `rate` in requests a second; None sends all at once."""

    cache: bool
    verify: bool
    rate: float | None
    salt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInOptions:
    """What the two workers are, and what the clients send. Lengths of texts are medians.

    Raises: ConfigError that names the option, its value and its bound.
    """

    seed: int = 1
    conversations: int = 24  # they share a system prompt
    turns: int = 6
    concurrency: int = 24
    page_size: int = 16
    layers: int = 16
    heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"
    attention: str = "mha"
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_layout: str = "layer_major"
    decode_layout: str = "layer_major"
    staging_leases: float = 16.0  # of 4 MiB, a rank; 0: slices of heads are written one by one
    prefill_pages: int = 1792
    decode_pages: int = 2304
    policy: str = DEFAULT_POLICY
    system_tokens: int = 1024
    user_tokens: int = 40
    output_tokens: int = 24
    chunk_tokens: int = 512
    step_ms: float = 5.0  # the shortest decode step

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "layers"):
            check_range(f"--{name}", getattr(self, name), 1, 1 << 20)
        policy_of(self.policy)
        check_meshes(self.mesh(self.prefill_tp), self.mesh(self.decode_tp))

    def mesh(self, tp_size: int) -> Mesh:
        return Mesh(self.layers, self.heads, tp_size)

    def transport(self) -> TransportConfig:
        """Of every rank: staging for slices of heads, unless it is off."""
        if not self.staging_leases or self.prefill_tp == self.decode_tp:
            return TransportConfig()
        # At least a page of everything, with each writer's section rounded up to whole blocks.
        least = self.page_bytes + BLOCK_BYTES * max(self.prefill_tp, self.decode_tp)
        lease_bytes = -(-max(_LEASE_BYTES, least) // BLOCK_BYTES) * BLOCK_BYTES
        staging_bytes = int(self.staging_leases * lease_bytes) // BLOCK_BYTES * BLOCK_BYTES
        return TransportConfig(staging_bytes=staging_bytes, lease_bytes=lease_bytes)

    @property
    def page_bytes(self) -> int:
        slabs = self.layers * SLABS_PER_LAYER[self.attention]
        return self.page_size * slabs * self.heads * self.dim * ITEMSIZE[self.dtype]

    def workload(self) -> Workload:
        return chat(
            self.seed, self.conversations, self.turns, system_tokens=self.system_tokens,
            user_tokens=self.user_tokens, output_tokens=self.output_tokens,
        )  # fmt: skip
