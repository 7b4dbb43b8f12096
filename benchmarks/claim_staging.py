"""Claims: with unequal tensor parallelism, staging is five times faster than slices written one by
one, and takes at most 1 / .6 of the time of its three copies alone.

A prefill and a decode worker in a process each, all ranks of a worker as threads of it, whole
nodes: TP4 to TP1 and TP1 to TP4, and, beside them, equal TP of the same model on one rank each,
with KV of the same size. 256 pages of 16 tokens of an eighth of an 8B-class model (4 layers, 8 KV
heads of 128, bfloat16: 64 MiB a request; a slice is 512 bytes of a token), from `send_chunk` to
`pop_transferred`, so gather and scatter count. All variants stand ready and take turns.

What the copies alone take: the same processes on the same cores move the same bytes between the
same pools by two plain loops (`bare_staging.py`), gather and wire on prefill's core, scatter on
decode's, at the same time. The loops take their turns as another variant. Several sizes of their
leases are tried first, and the quickest is kept: it need not be the nodes' size. After each
turn every copy also runs by itself, with the other core idle.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from benchmarks.bare_staging import BareReceiver, BareSender
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
BARE: Final = "bare"  # the copies alone
EACH: Final = "each"  # of them, with the other side idle
COPIES: Final = ("gather", "wire", "scatter")
BARE_LEASES: Final = tuple(mib << 20 for mib in (1, 2, 4, 8, 16))


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
    device: str = "cpu"  # of both sides' pools
    backend: Backend = "nixl"

    @property
    def variants(self) -> tuple[str, ...]:
        """Those of nodes. shm needs no staging."""
        return VARIANTS if self.backend == "nixl" else VARIANTS[1:]

    @property
    def beside_bare(self) -> bool:
        """Whether the copies alone are measured: they are the CPU's."""
        return self.backend == "nixl" and self.device == "cpu"

    @property
    def bare_leases(self) -> list[int]:
        """Sizes of leases to try: what no request fills is none."""
        return [size for size in BARE_LEASES if size <= max(BARE_LEASES[0], self.num_bytes // 2)]

    @property
    def bare_pages(self) -> Any:
        """The pages that a request has."""
        step = 1 if self.pages == "fresh" else 2
        return np.arange(1, 1 + step * self.num_pages, step, dtype=np.int32)

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

    @property
    def bare_meshes(self) -> tuple[Mesh, Mesh]:
        return self.mesh(0, "staged"), self.mesh(1, "staged")

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
            case.scatter(groups[variant].scheduler.pages)
        pipe.send({variant: group.endpoint for variant, group in groups.items()})
        if case.beside_bare:
            bare = BareSender(
                case.bare_meshes, pools["staged"], case.bare_pages, BARE_LEASES[-1], pipe.recv()
            )
        while (order := pipe.recv()) is not None:
            variant, room = order
            if variant in (BARE, EACH):
                lease_bytes = room
                said = bare.send(pipe, lease_bytes) if variant == BARE else bare.each_s(lease_bytes)
                pipe.send(said)
                continue
            group = groups[variant]
            stuck = Stuck(group)
            group.flush()
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
            case.scatter(groups[variant].scheduler.pages)
        rooms, bare_lease = 0, 0
        if case.beside_bare:
            bare = BareReceiver(case.bare_meshes, pools["staged"], case.bare_pages, BARE_LEASES[-1])
            pipe.send(bare.where)

        def take_bare(lease_bytes: int) -> float:
            pipe.send((BARE, lease_bytes))
            ended_s = bare.take(pipe, lease_bytes)
            return ended_s - float(pipe.recv())

        def take_each(lease_bytes: int) -> dict[str, float]:
            pipe.send((EACH, lease_bytes))
            theirs: dict[str, float] = pipe.recv()
            return theirs | bare.each_s(lease_bytes)

        def take(variant: str) -> float:
            nonlocal rooms
            if variant == BARE:
                return take_bare(bare_lease)
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

        sides = (*case.variants, BARE) if case.beside_bare else case.variants

        def repetition(number: int) -> Row:
            row: Row = {variant: take(variant) for variant in turn_about(sides, number)}
            return row | take_each(bare_lease) if case.beside_bare else row

        if case.beside_bare:
            tried = {size: min(take_bare(size) for _ in range(5)) for size in case.bare_leases}
            bare_lease = min(tried, key=tried.__getitem__)
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
            name: round(1e3 * statistics.median(row[name] for row in rows), 2) for name in sides
        },
        **load_of(rows),
    }
    if case.backend == "nixl":
        row["sliced_over_staged"] = paired_ratio(rows, "sliced", "staged")
        row["spread"] = spread(rows, "sliced", "staged")
    if case.beside_bare:
        row["of_copies_alone"] = paired_ratio(rows, BARE, "staged")
        row["spread_of_copies_alone"] = spread(rows, BARE, "staged")
        row["bare_lease_mib"] = bare_lease / 2**20
        row["bare_ms_by_lease"] = {
            f"{size / 2**20:g} MiB": round(1e3 * took_s, 2) for size, took_s in tried.items()
        }
        row["each_copy_ms"] = {
            name: round(1e3 * statistics.median(one[name] for one in rows), 2) for name in COPIES
        }
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
            alone = row["of_copies_alone"]
            claims.append(
                Claim("staging", f"{where}: of its copies' speed alone", alone, "ratio", 0.6)
            )
    return claims, {"rows": rows}
