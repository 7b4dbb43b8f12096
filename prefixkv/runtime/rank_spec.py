"""The position of a node in its worker's mesh, and what follows from it for the handshake."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

from prefixkv.config import DecodeConfig, ModelConfig, PrefillConfig
from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import MAX_RANKS, Mesh, check_holds
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.groups import GroupSpec
from prefixkv.protocol.messages import (
    GroupDigest,
    ModelDigest,
    Topology,
)
from prefixkv.settings import check_kind, check_whole

Config = TypeVar("Config", DecodeConfig, PrefillConfig)


def checked_config(config: Config | None, kind: type[Config]) -> Config:
    """Return the config, or the default one. Raise ConfigError for an object of another class."""
    if config is None:
        return kind()
    check_kind("config", config, kind)
    return config


class RankSpec:
    """Rank `rank` of `mesh`, with its pool, and its state pool if the model has extra state.

    Without a mesh it is the only rank. Raises ConfigError if a pool does not hold the rank's share,
    or the two pools are on different devices.
    """

    def __init__(
        self, pool: KVPool, mesh: Mesh | None = None, rank: int = 0, state: StatePool | None = None
    ) -> None:
        check_kind("pool", pool, KVPool)
        if mesh is not None:
            check_kind("mesh", mesh, Mesh)
        if state is not None:
            check_kind("state", state, StatePool)
        check_whole("rank", rank, 0, MAX_RANKS - 1)
        self.pool, self.rank, self.state = pool, rank, state
        self.layout = layout = pool.layout
        self.mesh = mesh = mesh or Mesh(layout.num_layers, layout.num_kv_heads)
        self.num_slots = 0 if state is None else state.num_slots
        self.state_layout = None if state is None else state.layout
        self.windows = [
            GroupSpec(group.name, group.window, group.pool.layout.num_pages, group.step_tokens)
            for group in pool.groups
            if group.window
        ]
        mesh.validate()
        self.topology = Topology(layout.page_size, mesh.tp_size, mesh.pp_size, mesh.stage_layers)
        if layout.groups and mesh.pp_size > 1:
            raise ConfigError(f"a pool with groups of layers is of one stage, not {mesh.pp_size}")
        # One transport registers both with one type of memory.
        if state is not None and state.device not in (None, pool.device):
            raise ConfigError(f"state is on {state.device}, the KV pool is on {pool.device}")
        try:
            # Shares are compared by the handshake's own rules, so what passes here passes there.
            check_holds(layout, mesh.shard(rank))
            if state is not None:
                for tensor in state.tensors:
                    tensor.validate(mesh)
                state.layout.check_holds(state.tensors, mesh, rank)
        except HandshakeError as error:
            raise ConfigError(f"the pool of rank {rank}: {error}") from error

    def digest(self, model: ModelConfig) -> ModelDigest:
        """Return the properties of the model that two workers compare."""
        layout, mesh = self.layout, self.mesh
        return ModelDigest(
            model.model, model.kv_scales, layout.dtype, layout.attention,
            mesh.num_layers, mesh.num_kv_heads, layout.head_dim, layout.opaque,
            () if self.state is None else self.state.tensors,
            tuple(GroupDigest.of(group) for group in layout.groups),
        )  # fmt: skip

    @property
    def place(self) -> str:
        """Within which memory can be mapped, "" for a device that it cannot."""
        return place_of() if self.layout.device == "cpu" else ""

    @property
    def has_more(self) -> bool:
        """True if requests have more than pages: what only a save goes on from."""
        return self.state is not None or bool(self.windows)

    def check_saved(self, num_saved: int) -> None:
        """Raise ConfigError where there is nothing to keep, or no slot is left for requests."""
        if num_saved and not self.has_more:
            why = "they are of extra state (state=) or of window groups, and there is neither"
        elif self.state is not None and self.num_slots <= num_saved:
            why = f"the extra state has {self.num_slots} slots, and requests need some"
        else:
            return
        raise ConfigError(f"checkpoints: {num_saved}: {why}")

    def check_own_memory(self) -> None:
        """Raise ConfigError for a group in the memory of the first one: the node takes their page
        ids for those of two pools."""
        for group in self.layout.windows:
            if self.layout.is_shared(group):
                raise ConfigError(
                    f"group {group.name!r} has the first group's memory, which is for an engine "
                    "with its own pages (prefixkv.transfer)"
                )


def place_of() -> str:
    """Return boot, network namespace and user of this process, "" where the kernel does not tell.
    Between equal places memory can be mapped."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/thread-self/ns/net").st_ino
        return f"{boot} net {space} user {os.geteuid()}"
    return ""
