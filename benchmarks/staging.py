"""Unequal tensor parallelism: staged slices beside slices written one by one, and equal ranks.

A prefill and a decode worker in a process each, all ranks of a worker as threads of it, whole
nodes: TP4 to TP1 and TP1 to TP4, and, beside them, equal TP of the same model on one rank each,
with KV of the same size. 256 pages of 16 tokens of an eighth of an 8B-class model (4 layers, 8 KV
heads of 128, bfloat16: 64 MiB a request; a slice is 512 bytes of a token), from `send_chunk` to
`pop_transferred`, so gather and scatter count. All variants stand ready and take turns.
`python -m benchmarks transfer --part staging` runs it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from benchmarks.pair import (
    Stuck,
    Watch,
    load_of,
    paired_ratio,
    run_pair,
    spread,
    turn_about,
)
from benchmarks.report import Row
from prefixkv.config import Backend, DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.memory.mesh import Mesh

MESHES: Final = {"4 to 1": (4, 1), "1 to 4": (1, 4)}
VARIANTS: Final = ("staged", "sliced", "equal")


@dataclass(frozen=True)
class Staging:
    meshes: str = "4 to 1"
    layout: str = "layer_major"
    pages: str = "fresh"
    num_pages: int = 256  # of a request
    page_size: int = 16
    num_layers: int = 4
    num_heads: int = 8
    head_dim: int = 128
    lease_bytes: int = 16 << 20
    leases: int = 2
    repeats: int = 5
    patience_s: float = 30.0
    backend: Backend = "nixl"

    @property
    def variants(self) -> tuple[str, ...]:
        """Those of nodes. shm needs no staging."""
        return VARIANTS if self.backend == "nixl" else VARIANTS[1:]

    @property
    def num_bytes(self) -> int:
        return (
            self.num_pages
            * self.page_size
            * self.num_layers
            * 2
            * self.num_heads
            * self.head_dim
            * 2
        )

    def prompt(self, room: int) -> Any:
        return np.random.default_rng(room).integers(
            0, 50_000, self.num_pages * self.page_size, dtype=np.int32
        )

    def pools(self, mesh: Mesh) -> list[Any]:
        """One a rank. Random pages are every other one."""
        from prefixkv.memory.kv_pool import KVPool

        count = self.num_pages + 8 if self.pages == "fresh" else 2 * self.num_pages + 16
        shards = [mesh.shard(rank) for rank in range(mesh.num_ranks)]
        return [
            KVPool.create(
                count, self.page_size, s.num_layers, s.num_heads, self.head_dim,
                order=self.layout, shared=self.backend == "shm",
            )
            for s in shards
        ]  # fmt: skip

    def mesh(self, side: int, variant: str) -> Mesh:
        """`side`: 0 for prefill, 1 for decode."""
        return Mesh(
            self.num_layers, self.num_heads, 1 if variant == "equal" else MESHES[self.meshes][side]
        )

    def transport(self, variant: str) -> TransportConfig:
        if variant != "staged":
            return TransportConfig(backend=self.backend)
        return TransportConfig(
            staging_bytes=self.leases * self.lease_bytes, lease_bytes=self.lease_bytes
        )

    def scatter(self, pages: Any) -> None:
        if self.pages == "random":
            allocator = pages.allocator
            allocator.free(allocator.alloc(allocator.free_pages)[::2])  # the others never come back


def small(meshes: str) -> Staging:
    """As small as it still works."""
    return Staging(
        meshes, num_pages=8, num_layers=2, lease_bytes=512 << 10, repeats=1, patience_s=0.0
    )


def prefill_side(pipe: Connection, _watch: Watch, case: Staging) -> None:
    """Told (variant, room): sends a request when decode has asked for it, and says when."""
    from prefixkv.request import Request
    from prefixkv.runtime.groups import PrefillGroup

    with contextlib.ExitStack() as open_groups:
        groups, pools = {}, {}
        for variant in case.variants:
            mesh, pools[variant] = case.mesh(0, variant), case.pools(case.mesh(0, variant))
            config = PrefillConfig(name=f"prefill-{variant}", transport=case.transport(variant))
            groups[variant] = open_groups.enter_context(PrefillGroup(pools[variant], config, mesh))
            for node in groups[variant].nodes:
                case.scatter(node.scheduler.pages)
        pipe.send({variant: group.endpoint for variant, group in groups.items()})
        while (order := pipe.recv()) is not None:
            variant, room = order
            group = groups[variant]
            stuck = Stuck(group)
            for node in group.nodes:
                node.flush()
            decode = f"decode-{variant}"
            group.add(Request(f"r{room}", case.prompt(room), room=room, decode=decode))
            (req,) = stuck.until(group.pop_bootstrapped)
            began_s = time.monotonic()
            group.send_chunk(req, req.num_tokens, last=True)
            stuck.until(group.pop_sent)
            pipe.send(began_s)


def decode_side(pipe: Connection, watch: Watch, case: Staging) -> Row:
    from prefixkv.request import Request
    from prefixkv.runtime.groups import DecodeGroup

    endpoints = pipe.recv()
    with contextlib.ExitStack() as open_groups:
        groups, pools = {}, {}
        for variant in case.variants:
            mesh, pools[variant] = case.mesh(1, variant), case.pools(case.mesh(1, variant))
            config = DecodeConfig(
                name=f"decode-{variant}", reserve_tokens=0, transport=case.transport(variant)
            )
            groups[variant] = open_groups.enter_context(DecodeGroup(pools[variant], config, mesh))
            for rank in groups[variant].others:
                case.scatter(rank.replica.page_manager)
            case.scatter(groups[variant].scheduler.pages)
        rooms = 0

        def take(variant: str) -> float:
            nonlocal rooms
            rooms += 1
            group = groups[variant]
            group.flush()
            pipe.send((variant, rooms))
            group.add(
                Request(
                    f"r{rooms}",
                    case.prompt(rooms),
                    max_new_tokens=1,
                    room=rooms,
                    prefill=endpoints[variant],
                )
            )
            group.pop_preallocated()
            arrived = Stuck(group).until(group.pop_transferred)
            ended_s = time.monotonic()
            group.append_many(arrived, [7])
            group.finish(arrived[0])
            return ended_s - float(pipe.recv())

        def repetition(number: int) -> Row:
            return {variant: take(variant) for variant in turn_about(case.variants, number)}

        repetition(0)
        rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
        pipe.send(None)
    row: Row = {
        "meshes": f"TP{case.meshes.replace(' to ', ' to TP')}",
        "layout": case.layout,
        "pages": case.pages,
        "mib_a_request": case.num_bytes / 2**20,
        "of_equal": paired_ratio(rows, "equal", case.variants[0]),
        "spread_of_equal": spread(rows, "equal", case.variants[0]),
        "ms": {
            name: round(1e3 * statistics.median(row[name] for row in rows), 2)
            for name in case.variants
        },
        **load_of(rows),
    }
    if case.backend == "nixl":
        row["sliced_over_staged"] = paired_ratio(rows, "sliced", "staged")
        row["spread"] = spread(rows, "sliced", "staged")
    return row


def measure(quick: bool, backend: Backend) -> Iterator[Row]:
    """A row for each pair of meshes and order of pages."""
    for meshes in MESHES:
        for pages in ("fresh",) if quick else ("fresh", "random"):
            case = small(meshes) if quick else Staging(meshes, pages=pages)
            row: Row = run_pair(decode_side, prefill_side, replace(case, backend=backend))
            yield {"part": "staging", **row}
