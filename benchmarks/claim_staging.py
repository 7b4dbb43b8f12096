"""Claim: with unequal tensor parallelism, staging is five times faster than slices written one by
one.

A prefill and a decode worker in a process each, all ranks of a worker as threads of it, whole
nodes: TP4 to TP1 and TP1 to TP4, and, beside them, equal TP of the same model on one rank each,
with KV of the same size. 256 pages of 16 tokens of an eighth of an 8B-class model (4 layers, 8 KV
heads of 128, bfloat16: 64 MiB a request; a slice is 512 bytes of a token), from `send_chunk` to
`pop_transferred`, so gather and scatter count. All variants stand ready and take turns.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from benchmarks.pair import (
    Claim,
    Row,
    Stuck,
    Watch,
    load_of,
    paired_ratio,
    run_pair,
    spread,
    turn_about,
)
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
    lease_bytes: int = 4 << 20
    leases: int = 4
    repeats: int = 5
    patience_s: float = 30.0
    device: str = "cpu"  # of both sides' pools
    backend: Backend = "nixl"

    @property
    def variants(self) -> tuple[str, ...]:
        """shm needs no staging."""
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
                order=self.layout, device=self.device, shared=self.backend == "shm",
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

    def scatter(self, books: Any) -> None:
        if self.pages == "random":
            allocator = books.allocator
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
        groups = {}
        for variant in case.variants:
            mesh = case.mesh(0, variant)
            config = PrefillConfig(name=f"prefill-{variant}", transport=case.transport(variant))
            groups[variant] = open_groups.enter_context(
                PrefillGroup(case.pools(mesh), config, mesh)
            )
            for node in groups[variant].nodes:
                case.scatter(node.scheduler.books)
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
        groups = {}
        for variant in case.variants:
            mesh = case.mesh(1, variant)
            config = DecodeConfig(
                name=f"decode-{variant}", reserve_tokens=0, transport=case.transport(variant)
            )
            groups[variant] = open_groups.enter_context(DecodeGroup(case.pools(mesh), config, mesh))
            for rank in groups[variant].others:
                case.scatter(rank.replica.books)
            case.scatter(groups[variant].scheduler.books)
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


def measure_shm(quick: bool) -> tuple[list[Claim], Row]:
    """Slices straight into pages, over shm, beside equal tensor parallelism over shm."""
    rows, claims = [], []
    for meshes in MESHES:
        for pages in ("fresh",) if quick else ("fresh", "random"):
            case = small(meshes) if quick else Staging(meshes, pages=pages)
            row = run_pair(decode_side, prefill_side, replace(case, backend="shm"))
            rows.append(row)
            where = f"{row['meshes']}, {pages} pages, of equal TP's speed"
            claims.append(Claim("slices over shm", where, row["of_equal"], "ratio", 0.6))
    return claims, {"rows": rows}


def measure(quick: bool) -> tuple[list[Claim], Row]:
    rows, claims = [], []
    for meshes in MESHES:
        for pages in ("fresh",) if quick else ("fresh", "random"):
            case = small(meshes) if quick else Staging(meshes, pages=pages)
            row = run_pair(decode_side, prefill_side, case)
            rows.append(row)
            where = f"{row['meshes']}, {pages} pages"
            claims.append(
                Claim(
                    "staging", f"{where}: sliced / staged", row["sliced_over_staged"], "ratio", 5.0
                )
            )
            claims.append(
                Claim("staging", f"{where}: of equal TP's speed", row["of_equal"], "ratio", 0.5)
            )
    return claims, {"rows": rows}
