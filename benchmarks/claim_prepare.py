"""Claim: prepared lists cost no more than building descriptors, and next to nothing where pages are
neighbours.

*Creation*: from the page ids of a chunk to a handle that can be posted. Prepared: flat indices and
`make_prepped_xfer`. Built: numpy address arithmetic for both sides (N x 3) and `initialize_xfer`.
64 runs (32 layers, K and V), so 1,024 descriptors are 16 pages. *TTFT*: 128 requests arrive at
once, 2,048 descriptors of 4 KiB each (32 pages on one rank of TP8), through the whole stack; in
every other repetition the prefill process's NIXL builds what it would have made of prepared lists.
Contiguous pages are those of an empty pool, random ones have no neighbours.
"""

from __future__ import annotations

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
    quantiles,
    run_pair,
    spread,
    turn_about,
)
from prefixkv.config import DecodeConfig, PrefillConfig

_RUNS: Final = 64
_PAGE_SIZE: Final = 16
SIDES: Final = ("prepared", "built")
ORDERS: Final = ("contiguous", "random")


# --- creation -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Creation:
    descriptors: tuple[int, ...] = (1024, 16_384, 131_072)
    descriptors_a_repetition: int = (
        2_000_000  # long enough for the kernel's clock to see what else is at work
    )
    repeats: int = 9
    patience_s: float = 10.0

    @property
    def num_pages(self) -> int:
        return 2 * max(self.descriptors) // _RUNS

    def pool(self) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        return KVPool.create(self.num_pages, _PAGE_SIZE, _RUNS // 2, 1, 32)

    def pages(self, descriptors: int, order: str, seed: int) -> Any:
        count = descriptors // _RUNS
        if order == "contiguous":
            return np.arange(seed, seed + count, dtype=np.int32)
        return (2 * np.random.default_rng(seed).permutation(self.num_pages // 2)[:count]).astype(
            np.int32
        )


def target_side(pipe: Connection, _watch: Watch, case: Creation) -> None:
    from benchmarks.raw import make_agent

    pool = case.pool()
    agent = make_agent("target", pool.layout)
    pipe.send((bytes(agent.get_agent_metadata()), pool.layout))
    pipe.recv()


def creating_side(pipe: Connection, watch: Watch, case: Creation) -> list[Row]:
    from benchmarks.raw import make_agent
    from prefixkv.transport.parts import Part, part_indices
    from prefixkv.transport.runs import paired_runs

    pool = case.pool()
    agent = make_agent("creator", pool.layout)
    metadata, layout = pipe.recv()
    agent.add_remote_agent(metadata)
    runs = paired_runs(pool.layout, layout)
    lists = (
        agent.prep_xfer_dlist("", runs.src, "DRAM"),
        agent.prep_xfer_dlist("target", runs.dst, "DRAM"),
    )
    block_bytes = runs.groups[0].block_bytes

    def indices(src: Any, dst: Any) -> Any:
        return part_indices(runs, Part(runs.groups[0], 0, len(src) * runs.num_runs), src, dst)

    def make(ours: Any, theirs: Any) -> Any:
        return agent.make_prepped_xfer("WRITE", lists[0], ours, lists[1], theirs, b"tag")

    def rows_of(side: Any, pages: Any) -> Any:
        rows = np.zeros((len(side) * len(pages), 3), np.uint64)
        rows[:, 0] = (side[:, 0, None] + side[:, 3, None] * pages.astype(np.uint64)).ravel()
        rows[:, 1] = block_bytes
        return agent.get_xfer_descs(rows, "DRAM")

    def tables(src: Any, dst: Any) -> Any:
        return rows_of(runs.src, src), rows_of(runs.dst, dst)

    def initialize(ours: Any, theirs: Any) -> Any:
        return agent.initialize_xfer("WRITE", ours, theirs, "target", b"tag")

    def took_ms(describe: Any, create: Any, src: Any, dst: Any) -> tuple[float, float]:
        """From the pages on, and the last call alone."""
        began = time.perf_counter_ns()
        described = describe(src, dst)
        between = time.perf_counter_ns()
        handle = create(*described)
        ended = time.perf_counter_ns()
        handle.release()
        return (ended - began) / 1e6, (ended - between) / 1e6

    ways = {"prepared": (indices, make), "built": (tables, initialize)}
    found = []
    for order in ORDERS:
        for descriptors in case.descriptors:
            src, dst = case.pages(descriptors, order, 1), case.pages(descriptors, order, 2)
            many = max(5, case.descriptors_a_repetition // descriptors)

            def repetition(number: int, src: Any = src, dst: Any = dst, many: int = many) -> Row:
                row: Row = {}
                for side in turn_about(SIDES, number):
                    took = np.median([took_ms(*ways[side], src, dst) for _ in range(many)], axis=0)
                    row[side], row[f"{side}_call"] = took.tolist()
                return row

            repetition(0)
            rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
            names = [*SIDES, *(f"{side}_call" for side in SIDES)]
            found.append(
                {
                    "pages": order,
                    "descriptors": descriptors,
                    **{
                        f"{name}_ms": round(float(np.median([row[name] for row in rows])), 4)
                        for name in names
                    },
                    "built_over_prepared": paired_ratio(rows, "built", "prepared"),
                    "spread": spread(rows, "built", "prepared"),
                    "built_over_prepared_call_alone": paired_ratio(
                        rows, "built_call", "prepared_call"
                    ),
                    **load_of(rows),
                }
            )
    pipe.send(None)
    return found


# --- TTFT -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Burst:
    pages: str = "contiguous"
    requests: int = 128
    pages_a_request: int = 32
    repeats: int = 5
    patience_s: float = 40.0

    @property
    def num_pages(self) -> int:
        """Random pages are every other one."""
        return self.requests * self.pages_a_request * (1 if self.pages == "contiguous" else 2) + 8

    def pool(self) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        return KVPool.create(self.num_pages, _PAGE_SIZE, _RUNS // 2, 1, 128)

    def prepare(self, node: Any) -> None:
        allocator = node.scheduler.pages.allocator
        if self.pages == "random":
            allocator.free(allocator.alloc(self.num_pages)[::2])  # the others never come back

    def request(self, burst: int, number: int, **fields: Any) -> Any:
        from prefixkv.request import Request

        tokens = np.random.default_rng([burst, number]).integers(
            0, 50_000, self.pages_a_request * _PAGE_SIZE, dtype=np.int32
        )
        return Request(
            f"{burst}.{number}",
            tokens,
            max_new_tokens=1,
            room=burst * self.requests + number,
            **fields,
        )


class Builder:
    """In the place of an agent's two calls for prepared lists, in this process: builds descriptors
    while it is `on`.

    What the transport does around them stays as it is.
    """

    def __init__(self) -> None:
        from benchmarks.raw import AgentType

        self.on = False
        self._prep, self._make = AgentType.prep_xfer_dlist, AgentType.make_prepped_xfer
        self._tables: dict[int, tuple[str, Any]] = {}

        def prep(agent: Any, name: str, table: Any, *args: Any, **more: Any) -> Any:
            prepared = self._prep(agent, name, table, *args, **more)
            self._tables[id(prepared)] = name, np.asarray(table).reshape(-1, 5)
            return prepared

        def make(
            agent: Any,
            operation: str,
            local: Any,
            src: Any,
            remote: Any,
            dst: Any,
            notif: bytes = b"",
            **more: Any,
        ) -> Any:
            if not self.on:
                return self._make(agent, operation, local, src, remote, dst, notif, **more)
            name = self._tables[id(remote)][0]
            ours, theirs = (
                self._descriptors(agent, local, src),
                self._descriptors(agent, remote, dst),
            )
            return agent.initialize_xfer(operation, ours, theirs, name, notif)

        AgentType.prep_xfer_dlist, AgentType.make_prepped_xfer = prep, make

    def _descriptors(self, agent: Any, prepared: Any, indices: Any) -> Any:
        table = self._tables[id(prepared)][1]
        run, slot = np.divmod(indices, np.int32(table[0, 4]))
        rows = np.zeros((len(indices), 3), np.uint64)
        rows[:, 0] = table[run, 0] + table[run, 3] * slot.astype(np.uint64)
        rows[:, 1] = table[run, 1]
        return agent.get_xfer_descs(rows, "DRAM")


def prefill_side(pipe: Connection, _watch: Watch, case: Burst) -> None:
    """Told (built, burst): adds its requests, says so, and sends each when decode has asked for
    it."""
    builder = Builder()
    from prefixkv.runtime.prefill_node import PrefillNode

    with PrefillNode(case.pool(), PrefillConfig()) as node:
        case.prepare(node)
        stuck = Stuck(node)
        pipe.send(node.endpoint)
        while (order := pipe.recv()) is not None:
            builder.on, burst = order
            node.flush()
            for number in range(case.requests):
                node.add(case.request(burst, number, decode="decode-0"))
            pipe.send("added")
            left = case.requests
            stuck.moved()
            while left:
                for req in node.pop_bootstrapped():
                    node.send_chunk(req, req.num_tokens, last=True)
                if sent := len(node.pop_sent()):
                    stuck.moved()
                    left -= sent
                elif left:
                    stuck.wait()


def decode_side(pipe: Connection, watch: Watch, case: Burst) -> Row:
    from prefixkv.runtime.decode_node import DecodeNode

    with DecodeNode(case.pool(), DecodeConfig(reserve_tokens=0)) as node:
        case.prepare(node)
        endpoint = pipe.recv()
        stuck = Stuck(node)
        bursts = 0

        def burst(side: str) -> list[float]:
            nonlocal bursts
            bursts += 1
            node.flush()
            requests = [
                case.request(bursts, number, prefill=endpoint) for number in range(case.requests)
            ]
            pipe.send((side == "built", bursts))
            pipe.recv()
            began_s = time.monotonic()
            for request in requests:
                node.add(request)
            node.pop_preallocated()
            took_s: list[float] = []
            while len(took_s) < case.requests:
                for req in stuck.until(node.pop_transferred):
                    took_s.append(time.monotonic() - began_s)
                    node.append_many([req], [7])
                    node.finish(req)
            return took_s

        took: dict[str, list[list[float]]] = {side: [] for side in SIDES}

        def repetition(number: int) -> Row:
            row = {}
            for side in turn_about(SIDES, number):
                took[side].append(burst(side))
                row[side] = float(np.mean(took[side][-1]))
                row[f"{side}_p50"] = float(np.median(took[side][-1]))
            return row | {"number": number}

        burst("prepared")
        rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
        pipe.send(None)
    kept = [row["number"] for row in rows]
    return {
        "pages": case.pages,
        "requests": case.requests,
        "descriptors_a_request": case.pages_a_request * _RUNS,
        "mean_lower_by": round(1 - paired_ratio(rows, "prepared", "built"), 3),
        "p50_lower_by": round(1 - paired_ratio(rows, "prepared_p50", "built_p50"), 3),
        "spread_of_mean_prepared_over_built": spread(rows, "prepared", "built"),
        "ttft_ms": {
            side: quantiles(np.concatenate([took[side][number] for number in kept]).tolist(), 1e-3)
            for side in SIDES
        },
        **load_of(rows),
    }


# --- the claim ------------------------------------------------------------------------------------


def measure(quick: bool) -> tuple[list[Claim], Row]:
    creation, burst = Creation(), Burst()
    if quick:
        creation = Creation((128, 1024), 1024, repeats=2, patience_s=0.0)
        burst = Burst(requests=4, pages_a_request=2, repeats=1, patience_s=0.0)
    rows = run_pair(creating_side, target_side, creation)
    bursts = [run_pair(decode_side, prefill_side, replace(burst, pages=order)) for order in ORDERS]
    claims = []
    for row in rows:
        case = f"creation, {row['descriptors']:,} descriptors, {row['pages']} pages"
        target = 10.0 if row["pages"] == "contiguous" else 1.0
        claims.append(
            Claim(
                "prep + make",
                f"{case}: initialize_xfer / prepared",
                row["built_over_prepared"],
                "ratio",
                target,
            )
        )
        alone = row["built_over_prepared_call_alone"]
        claims.append(Claim("prep + make", f"{case}: the same, NIXL's call alone", alone, "ratio"))
    for row in bursts:
        count = f"{row['requests']} requests of {row['descriptors_a_request']:,} descriptors"
        aim = 0.2 if row["pages"] == "contiguous" else None
        case = f"TTFT of {count}, {row['pages']} pages: mean lower by"
        claims.append(Claim("prep + make", case, row["mean_lower_by"], "share", aim))
    return claims, {"creation": rows, "ttft": bursts}
