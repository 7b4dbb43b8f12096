"""The stand-in's options, checked against each other, and the plan of a pass."""

# ruff: noqa: RUF009 - `_option` returns a dataclass field
from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.stand_in.workload import TRACE_BLOCK_TOKENS, trace
from prefixkv.cache.eviction.policy import DEFAULT_POLICY
from prefixkv.cli.chats.workload import Workload, chat
from prefixkv.cli.policies import policy_of
from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError, HandshakeError, check_range
from prefixkv.memory.kv_layout import ITEMSIZE, SLABS_PER_LAYER
from prefixkv.memory.mesh import Mesh, check_meshes
from prefixkv.memory.staging_area import BLOCK_BYTES
from prefixkv.paging import pages_for

RESERVE_TOKENS: Final = 64  # room decode keeps for each running request's answer
LOAD_FRACTION: Final = 0.7  # of what cache-off sustains, in the timed passes
_MAX_SIZE: Final = 1 << 20  # of one dimension; what a product may be, memory says
_LEASE_BYTES: Final = 4 << 20
_WORKER_BYTES: Final = 1 << 30  # of two workers without their pools: torch, NIXL, token lists


class Dtype(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8 = "float8"
    uint8 = "uint8"


class Attention(StrEnum):
    mha = "mha"
    mla = "mla"


class Layout(StrEnum):
    layer_major = "layer_major"
    page_major = "page_major"


class Switch(StrEnum):
    on = "on"
    off = "off"


_CHOICES: Final = {kind.__name__: kind for kind in (Dtype, Attention, Layout, Switch)}


class PassPlan(NamedTuple):
    """One pass over the workload. `rate` in requests a second; None sends all at once."""

    cache: bool
    verify: bool
    rate: float | None
    salt: int


def _option(
    default: Any, help: str = "", least: float = 1, most: float = _MAX_SIZE, **more: Any
) -> Any:
    """A field, and what the command line says of it. `least` and `most` bound a number; `more` is
    for `typer.Option`."""
    return field(default=default, metadata={"bounds": (least, most), "help": help, **more})


@dataclass(frozen=True, slots=True)
class StandInOptions:
    """See `python -m benchmarks stand_in --help`. `kv_heads` and `head_dim` of None mean the usual
    ones of the attention.

    Raises: ConfigError that names the option, its value and its bound.
    """

    seed: int = _option(1, "Seed of the workload and its arrivals.", 0, 2**63 - 1)
    conversations: int = _option(24, "How many chats; they share a system prompt.")
    turns: int = _option(6, "How many turns per conversation.")
    requests: int | None = _option(
        None, "Cut the workload to this many requests.", show_default="all"
    )
    concurrency: int = _option(24, "The most requests under way at once.")
    page_size: int = _option(16, "How many tokens per page.")
    layers: int = _option(16, "How many layers of KV.")
    kv_heads: int | None = _option(None, "How many KV heads per layer.", show_default="8; mla: 1")
    head_dim: int | None = _option(
        None, "How many elements per head.", show_default="128; mla: 576"
    )
    dtype: Dtype = _option(Dtype.bfloat16, "Element type of the KV.")
    attention: Attention = _option(Attention.mha, "Kind of attention: the shape of the KV.")
    layout: Layout = _option(Layout.layer_major, "Order of a pool's memory.")
    prefill_tp: int = _option(1, "How many tensor-parallel ranks prefill has.")
    decode_tp: int = _option(1, "How many tensor-parallel ranks decode has.")
    prefill_layout: Layout | None = _option(None, "Of prefill alone.", show_default="--layout")
    decode_layout: Layout | None = _option(None, "Of decode alone.", show_default="--layout")
    staging: Switch = _option(Switch.on, "Gather slices of heads, where the ranks differ.")
    staging_leases: float = _option(
        16.0, "Staging memory per rank, in leases of 4 MiB.", 1, 1 << 20
    )
    prefill_pages: int = _option(1792, "How many pages in prefill's pool.")
    decode_pages: int = _option(2304, "How many pages in decode's pool.")
    policy: str = _option(
        DEFAULT_POLICY,
        "Eviction policy of both sides, with settings if any: lru, or adaptive:trust=5.",
    )
    trace: Path | None = _option(
        None, "Replay a Mooncake JSONL trace instead of chats.", metavar="FILE"
    )
    block_tokens: int = _option(
        16, "How many tokens a trace's block of 512 is scaled to.", 1, TRACE_BLOCK_TOKENS
    )
    system_tokens: int = _option(1024, "How many tokens in the shared system prompt.")
    user_tokens: int = _option(40, "How many tokens in a user's text; the median.")
    output_tokens: int = _option(24, "How many tokens in an answer; the median.")
    chunk_tokens: int = _option(512, "How many tokens prefill computes at a time.")
    step_ms: float = _option(5.0, "The shortest decode step.", 0, 10_000)
    prefill_us_per_token: float = _option(
        0.0, "Compute time to add to the writing of the KV.", 0, 1_000_000
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            self._check(option.name, option.type, *option.metadata["bounds"])
        policy_of(self.policy)
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

    def _check(self, name: str, kind: Any, least: float, most: float) -> None:
        """One option by itself: a number's bounds, a word's choices."""
        value = getattr(self, name)
        choices = _CHOICES.get(kind.partition(" ")[0])
        if choices is None and isinstance(value, int | float):
            check_range(_flag(name), value, least, most)
        elif choices is not None and value is not None and value not in list(choices):
            raise ConfigError(f"{_flag(name)} is {value!r}, must be one of {', '.join(choices)}")

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
        """KV heads per layer."""
        return self.kv_heads if self.kv_heads is not None else 1 if self.attention == "mla" else 8

    @property
    def dim(self) -> int:
        """Elements per head, or of the latent vector."""
        return (
            self.head_dim if self.head_dim is not None else 576 if self.attention == "mla" else 128
        )

    @property
    def torch_dtype(self) -> str:
        return "float8_e4m3fn" if self.dtype == "float8" else self.dtype

    @property
    def page_bytes(self) -> int:
        element = ITEMSIZE[self.torch_dtype]
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
