"""The demo's options, checked against each other, and the plan of passes that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from prefixkv.cli.workload import TRACE_BLOCK_TOKENS, Workload, chat, trace
from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.memory.kv_layout import ITEMSIZE, SLABS_PER_LAYER
from prefixkv.memory.mesh import Mesh, check_meshes
from prefixkv.memory.staging_area import BLOCK_BYTES
from prefixkv.paging import pages_for

DTYPES: Final = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8": "float8_e4m3fn",
    "uint8": "uint8",
}
RESERVE_TOKENS: Final = 64  # room decode keeps for each running request's answer
LOAD_FRACTION: Final = 0.7  # of what cache-off sustains, in the timed passes
_MAX_SIZE: Final = 1 << 20  # of one dimension; what a product may be, memory says
_LEASE_BYTES: Final = 4 << 20
_WORKER_BYTES: Final = 1 << 30  # of two workers without their pools: torch, NIXL, token lists


class PassPlan(NamedTuple):
    """One pass over the workload. `rate` in requests a second; None sends all at once."""

    cache: bool
    verify: bool
    rate: float | None
    salt: int


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """See `prefixkv demo --help`. `kv_heads` and `head_dim` of None mean the attention's usual
    ones.

    Raises: ConfigError that names the option, its value and its bound.
    """

    seed: int = 1
    conversations: int = 24
    turns: int = 10
    requests: int | None = None
    concurrency: int = 24
    page_size: int = 16
    layers: int = 16
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str = "bfloat16"
    attention: str = "mha"
    layout: str = "layer_major"
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_layout: str | None = None
    decode_layout: str | None = None
    staging: str = "on"
    staging_leases: float = 16.0
    prefill_pages: int = 1792
    decode_pages: int = 2304
    system_tokens: int = 1024
    user_tokens: int = 40
    output_tokens: int = 24
    chunk_tokens: int = 512
    step_ms: float = 5.0
    prefill_us_per_token: float = 0.0
    trace: Path | None = None
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in (
            "conversations", "turns", "concurrency", "page_size", "layers", "prefill_pages",
            "decode_pages", "system_tokens", "user_tokens", "output_tokens", "chunk_tokens",
            "prefill_tp", "decode_tp",
        ):  # fmt: skip
            _in_range(name, getattr(self, name), 1, _MAX_SIZE)
        for name in ("requests", "kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                _in_range(name, getattr(self, name), 1, _MAX_SIZE)
        _in_range("seed", self.seed, 0, 2**63 - 1)
        _in_range("block_tokens", self.block_tokens, 1, TRACE_BLOCK_TOKENS)
        _in_range("step_ms", self.step_ms, 0, 10_000)
        _in_range("prefill_us_per_token", self.prefill_us_per_token, 0, 1_000_000)
        _one_of("dtype", self.dtype, tuple(DTYPES))
        _one_of("attention", self.attention, tuple(SLABS_PER_LAYER))
        for name in ("layout", "prefill_layout", "decode_layout"):
            if getattr(self, name) is not None:
                _one_of(name, getattr(self, name), ("layer_major", "page_major"))
        _one_of("staging", self.staging, ("on", "off"))
        _in_range("staging_leases", self.staging_leases, 1, 1 << 20)
        if self.attention == "mla" and self.heads != 1:
            raise ConfigError(f"--kv-heads is {self.heads}, it has to be 1 with --attention mla")
        for name in ("prefill_tp", "decode_tp"):
            try:
                self.mesh(getattr(self, name)).validate()
            except ConfigError as error:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}: {error}") from None
        try:
            check_meshes(self.mesh(self.prefill_tp), self.mesh(self.decode_tp))
        except HandshakeError as error:
            raise ConfigError(
                f"--prefill-tp {self.prefill_tp} and --decode-tp {self.decode_tp}: {error}"
            ) from None

    def mesh(self, tp_size: int) -> Mesh:
        return Mesh(self.layers, self.heads, tp_size)

    def transport(self) -> TransportConfig:
        """Of every rank: staging for slices of heads, unless it is off."""
        if self.staging == "off" or self.prefill_tp == self.decode_tp:
            return TransportConfig()
        # At least a page of everything, with each writer's section rounded up to whole blocks.
        least = self.page_bytes + BLOCK_BYTES * max(self.prefill_tp, self.decode_tp)
        lease_bytes = -(-max(_LEASE_BYTES, least) // BLOCK_BYTES) * BLOCK_BYTES
        staging_bytes = int(self.staging_leases * lease_bytes) // BLOCK_BYTES * BLOCK_BYTES
        return TransportConfig(staging_bytes=staging_bytes, lease_bytes=lease_bytes)

    @property
    def heads(self) -> int:
        """KV heads a layer."""
        return self.kv_heads if self.kv_heads is not None else 1 if self.attention == "mla" else 8

    @property
    def dim(self) -> int:
        """Elements a head, or of the latent vector."""
        return (
            self.head_dim if self.head_dim is not None else 576 if self.attention == "mla" else 128
        )

    @property
    def page_bytes(self) -> int:
        element = ITEMSIZE[DTYPES[self.dtype]]
        slabs = self.layers * SLABS_PER_LAYER[self.attention]
        return self.page_size * slabs * self.heads * self.dim * element

    def workload(self) -> Workload:
        """What the clients send. Raises TraceError for a trace that cannot be read."""
        if self.trace is not None:
            return trace(self.trace, self.requests, self.block_tokens)
        return chat(
            self.seed,
            self.conversations,
            self.turns,
            system_tokens=self.system_tokens,
            user_tokens=self.user_tokens,
            output_tokens=self.output_tokens,
            requests=self.requests,
        )

    def check_pools(self, workload: Workload, available_bytes: int) -> None:
        """That each pool holds the longest request, and the machine both pools. Raises ConfigError
        otherwise."""
        longest = workload.max_request_tokens
        for name, tokens in (
            ("prefill_pages", longest),
            ("decode_pages", longest + RESERVE_TOKENS),
        ):
            needed = pages_for(tokens, self.page_size)
            if getattr(self, name) < needed:
                raise ConfigError(
                    f"{_flag(name)} is {getattr(self, name)}, at least {needed} are needed: "
                    f"the longest request has {longest} tokens"
                )
        total = _WORKER_BYTES
        for tp_size, num_pages in (
            (self.prefill_tp, self.prefill_pages),
            (self.decode_tp, self.decode_pages),
        ):
            total += num_pages * self.page_bytes * self.mesh(tp_size).replicas
            total += tp_size * self.transport().staging_bytes
        if total > available_bytes:
            raise ConfigError(
                f"pools of {self.prefill_pages} and {self.decode_pages} pages of "
                f"{self.page_bytes} bytes need "
                f"{total} bytes with their workers, {available_bytes} are available"
            )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{_flag(name)} is {value}, must be in [{low}, {high}]")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{_flag(name)} is {value!r}, must be one of {', '.join(allowed)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
