"""How fast KV goes from node to node, beside raw NIXL.

    python -m benchmarks transfer --json benchmarks/results/transfer.json

`goodput`: a prefill and a decode process, each pinned to a core of its own; 16-token pages of an
8B-class model (32 layers, 8 KV heads of 128, bfloat16: 2 MiB a page), 2,048 tokens a request: 256
MiB, from `send_chunk` to `pop_transferred`. Beside it, between the same processes and turn about:
one raw NIXL write of as many contiguous bytes, and raw posts of the very descriptors that the
transport makes. The ratio is taken in each repetition. `fresh`
pages come from an empty pool; `aged` ones after 10,000 random requests through both sides' pages,
evictions included; of `random` ones no two are neighbours.

`full_hit`: what a full hit costs on an idle pair of nodes. Every prompt is cached on both sides, so
no KV is sent; from decode's `add`, with prefill told over a pipe, to `pop_transferred`, with pauses
of 10 ms.

`checksums`: `goodput` of aged pages with `TransportConfig.checksums` by that without, one pair of
processes after the other, beside the rate of each algorithm alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import product
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer

from benchmarks.pair import (
    Stuck,
    Watch,
    load_of,
    paired_ratio,
    quantiles,
    run_pair,
    spread,
    turn_about,
)
from benchmarks.report import JsonFile, Quick, Row, check_outputs, told, write
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import Backend, DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.errors import InternalError, OutOfPagesError
from prefixkv.pages.manager import PageManager, RequestPages

if TYPE_CHECKING:
    from prefixkv import DecodeNode, PrefillNode
    from prefixkv.memory.kv_pool import KVPool

SIDES: Final = ("stack", "one", "same")
LAYOUTS: Final = ("layer_major", "page_major")
PAGES: Final = ("fresh", "aged", "random")
AIMS: Final = {"fresh": 0.85, "aged": 0.85, "random": 0.7}  # the last for layer_major
SHM_AIM: Final = 1.2
GAP_S: Final = 0.01
_AGED_PAGES: Final = 64  # the longest of the requests that age a pool


class Way(StrEnum):
    nixl = "nixl"
    shm = "shm"


@dataclass(frozen=True)
class Transfer:
    """One case, and the sizes it is measured with."""

    layout: str
    pages: str
    tokens: int = 2048
    page_size: int = 16
    num_pages: int = 640
    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    post_bytes: int = TransportConfig().post_bytes
    ageing_requests: int = 10_000
    repeats: int = 7
    warm_up: int = 2
    patience_s: float = 25.0  # for repetitions that are left alone
    device: str = "cpu"  # of both sides' pools
    backend: Backend = "nixl"
    checksums: bool = False
    hits: int = 25  # of "hit" in a repetition

    @property
    def is_hit(self) -> bool:
        """All requests have one prompt, which stays cached."""
        return self.pages == "hit"

    @property
    def is_shared(self) -> bool:
        """All memory, that of raw NIXL too, lies in small pages that can be shared."""
        return self.backend == "shm"

    def transport(self) -> TransportConfig:
        return TransportConfig(
            post_bytes=self.post_bytes, backend=self.backend, checksums=self.checksums
        )

    @property
    def num_bytes(self) -> int:
        """Of one request."""
        return self.tokens * self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    def pool(self, seed: int) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        pool = KVPool.create(
            self.num_pages, self.page_size, self.num_layers, self.num_kv_heads, self.head_dim,
            order=self.layout, device=self.device, shared=self.is_shared,
        )  # fmt: skip
        for layer in range(self.num_layers):
            for view in (pool.k(layer), pool.v(layer)):
                view.fill_(seed + layer) if self.device == "cpu" else view.normal_()
        return pool

    def prompt(self, room: int) -> Any:
        return _drawn(0 if self.is_hit else room, self.tokens)

    def prepare(self, node: DecodeNode | PrefillNode, seed: int) -> None:
        """Bring the pool's pages into the order that the case is about."""
        pages = node.pages
        if self.pages == "aged":
            _age(pages, self, seed)
        elif self.pages == "random":
            pages.allocator.free(
                pages.allocator.alloc(self.num_pages)[seed % 3 :: 3]
            )  # the others never come back

    def begin(self, node: DecodeNode | PrefillNode) -> None:
        """Before each request: nothing of the one before is cached, or all."""
        if self.pages in ("fresh", "random"):
            node.flush()


@lru_cache(maxsize=1)  # that of all hits is drawn once: cold, it takes .2 ms of a millisecond
def _drawn(seed: int, tokens: int) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)


HIT: Final = Transfer(
    "layer_major", "hit", num_pages=1024, num_layers=8, num_kv_heads=2, head_dim=64, repeats=12,
    patience_s=30.0,
)  # fmt: skip
SMALL_HIT: Final = replace(HIT, hits=5, repeats=1, patience_s=0.0)


def small(layout: str, pages: str) -> Transfer:
    """As small as it still works."""
    return Transfer(
        layout, pages, tokens=128, num_pages=200, num_layers=4, num_kv_heads=2, head_dim=64,
        post_bytes=64 << 10, ageing_requests=200, repeats=2, warm_up=1, patience_s=0.0,
    )  # fmt: skip


def _age(page_manager: PageManager, case: Transfer, seed: int) -> None:
    """Requests of random length, eight at a time, each cached when it ends."""
    random = np.random.default_rng(seed)
    running: list[tuple[RequestPages, RadixKey]] = []

    def end(at: int, now_s: float) -> None:
        pages, key = running.pop(at)
        page_manager.cache_finished(pages, key, now_s)

    for number in range(case.ageing_requests):
        pages = int(random.integers(2, min(_AGED_PAGES, case.num_pages // 8)))
        tokens = random.integers(0, 50_000, pages * case.page_size - 1)
        key = RadixKey(np.concatenate([[number], tokens]).astype(np.int32))
        while True:
            try:
                running.append(
                    (page_manager.open(page_manager.match(key), pages, float(number)), key)
                )
                break
            except OutOfPagesError:
                end(0, float(number))
        if len(running) == 8:
            end(int(random.integers(8)), float(number))
    while running:
        end(0, float(case.ageing_requests))


def digest(pool: KVPool, pages: Any) -> bytes:
    """Of all bytes of these pages."""
    whole = hashlib.blake2b()
    for page in pages:
        whole.update(pool.read_pages([page]).numpy().tobytes())
    return whole.digest()


# --- the prefill process --------------------------------------------------------------------------


def prefill_side(pipe: Connection, _watch: Watch, case: Transfer) -> None:
    """Does as it is told over the pipe: (side, room, decode's pages), and answers when the first
    byte set out."""
    from benchmarks.raw import RawAgent
    from prefixkv import PrefillNode
    from prefixkv.request import Request

    transport = case.transport()
    raw = RawAgent("raw-prefill", case.num_bytes, pool := case.pool(1), case.is_shared)
    with PrefillNode(pool, PrefillConfig(transport=transport)) as node:
        pipe.send((node.endpoint, raw.introduction()))
        raw.connect(pipe.recv())
        handles = {"one": raw.buffer_write()}
        case.prepare(node, 1)
        stuck = Stuck(node)
        pages: Any = None
        while (order := pipe.recv()) is not None:
            side, room, theirs = order
            if side == "bytes":
                pipe.send(digest(pool, pages))
                continue
            if side == "same":
                handles["same"] = raw.page_writes(
                    pages, theirs, case.post_bytes, transport.post_descriptors
                )
                pipe.send(len(handles["same"]))
            if side != "stack":
                pipe.send(raw.write(handles[side], transport.window))
                continue
            case.begin(node)
            node.add(Request(f"r{room}", case.prompt(room), room=room, decode="decode-0"))
            ready = stuck.until(node.pop_bootstrapped)
            began_s = time.monotonic()
            node.send_chunk(ready[0], case.tokens, last=True)
            pages = np.array(ready[0].pages)
            stuck.until(node.pop_sent)
            pipe.send(began_s)


# --- the decode process, which measures -----------------------------------------------------------


class Decode:
    def __init__(
        self, pipe: Connection, case: Transfer, node: DecodeNode, raw: Any, endpoint: str
    ) -> None:
        self._pipe, self._case, self._node, self._raw, self._endpoint = (
            pipe, case, node, raw, endpoint,
        )  # fmt: skip
        self._stuck = Stuck(node)
        self._pages: Any = None
        self.runs: list[int] = []

    def take(self, side: str, room: int) -> float:
        """Seconds that one transfer took."""
        if side == "stack":
            return self._stack(room)
        self._pipe.send((side, room, self._pages))
        count = 1 if side == "one" else self._pipe.recv()
        arrived_s: float = self._raw.arrived_s(count)
        return arrived_s - float(self._pipe.recv())

    def check_bytes(self, pool: KVPool) -> None:
        """Raises InternalError unless the last request's pages are here as they are on prefill."""
        self._pipe.send(("bytes", 0, None))
        if self._pipe.recv() != digest(pool, self._pages):
            raise InternalError("decode has other bytes than prefill")

    def _stack(self, room: int) -> float:
        from prefixkv.request import Request

        node, case = self._node, self._case
        case.begin(node)
        began_s = time.monotonic()
        self._pipe.send(("stack", room, None))
        node.add(
            Request(
                f"r{room}", case.prompt(room), max_new_tokens=1, room=room, prefill=self._endpoint
            )
        )
        node.pop_preallocated()
        arrived = self._stuck.until(node.pop_transferred)
        ended_s = time.monotonic()
        assert not (case.is_hit and room) or arrived[0].prefix_len == case.tokens
        self._pages = np.array(arrived[0].pages)
        self.runs.append(1 + int(np.count_nonzero(np.diff(self._pages) != 1)))
        node.append_many(arrived, [7])
        node.finish(arrived[0])
        sent_s = float(self._pipe.recv())
        return ended_s - (began_s if case.is_hit else sent_s)


@contextlib.contextmanager
def decode_of(pipe: Connection, case: Transfer) -> Iterator[tuple[Decode, KVPool]]:
    """A node, and a raw agent, that know prefill's; and the pool of both."""
    from benchmarks.raw import RawAgent
    from prefixkv import DecodeNode

    raw = RawAgent("raw-decode", case.num_bytes, pool := case.pool(2), case.is_shared)
    with DecodeNode(pool, DecodeConfig(transport=case.transport())) as node:
        endpoint, introduction = pipe.recv()
        raw.api.add_remote_agent(introduction[1])
        pipe.send(raw.introduction())
        case.prepare(node, 2)
        yield Decode(pipe, case, node, raw, endpoint), pool


def decode_side(pipe: Connection, watch: Watch, case: Transfer) -> Row:
    with decode_of(pipe, case) as (decode, pool):
        for room in range(case.warm_up):
            for side in SIDES:
                decode.take(side, room)
        decode.runs.clear()

        def repetition(number: int) -> Row:  # the pages of "same" are the last request's
            return {
                side: decode.take(side, case.warm_up + number) for side in turn_about(SIDES, number)
            }

        rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
        decode.take("stack", 1 << 20)  # a room of its own
        decode.check_bytes(pool)
        pipe.send(None)
    return {
        "layout": case.layout,
        "pages": case.pages,
        "mib_a_request": round(case.num_bytes / 2**20, 2),
        "runs_a_request": statistics.median(decode.runs),
        "of_one_raw_write": paired_ratio(rows, "one", "stack"),
        "of_raw_posts_of_the_same_descriptors": paired_ratio(rows, "same", "stack"),
        "spread_of_one_raw_write": spread(rows, "one", "stack"),
        "the_same_descriptors_of_one_raw_write": paired_ratio(rows, "one", "same"),
        "gib_per_s": {
            side: round(statistics.median(case.num_bytes / row[side] for row in rows) / 2**30, 2)
            for side in SIDES
        },
        **load_of(rows),
    }


def hits_side(pipe: Connection, watch: Watch, case: Transfer) -> Row:
    with decode_of(pipe, case) as (decode, _pool):
        took_s = [decode.take("stack", 0)]  # connects, and fills both caches

        def repetition(number: int) -> Row:
            for _ in range(case.hits):
                time.sleep(GAP_S)
                took_s.append(decode.take("stack", len(took_s)))
            return {"number": number}

        rows = watch.least_disturbed(repetition, case.repeats, case.patience_s)
        pipe.send(None)
    first_s = took_s.pop(0)
    kept = [took_s[row["number"] * case.hits :][: case.hits] for row in rows]
    return {
        "part": "full hit",
        "ms": quantiles(np.concatenate(kept).tolist(), 1e-3),
        "first_request_ms": round(first_s * 1e3, 1),
        **load_of(rows),
    }


# --- all cases ------------------------------------------------------------------------------------


class Part(StrEnum):
    goodput = "goodput"
    full_hit = "full_hit"
    checksums = "checksums"


def measure(quick: bool, backend: Backend = "nixl") -> Iterator[Row]:
    """A row for each layout and order of pages."""
    for layout, pages in zip(LAYOUTS, PAGES[1:], strict=True) if quick else product(LAYOUTS, PAGES):
        case = small(layout, pages) if quick else Transfer(layout, pages)
        row: Row = run_pair(decode_side, prefill_side, replace(case, backend=backend))
        aim = SHM_AIM if backend == "shm" else AIMS[pages]
        if (layout, pages) != ("page_major", "random") or backend == "shm":
            row |= {"aim": aim, "met": row["of_one_raw_write"] >= aim}
        yield {"part": "goodput", **row}


def hash_rates(case: Transfer) -> Row:
    """GiB/s of each algorithm alone, over all pages of a request in a pool of this process."""
    from prefixkv.memory.mesh import Shard
    from prefixkv.memory.page_sums import ALGORITHMS, PageSums, SumPlan

    pool = case.pool(1)  # kept: what is summed is its memory
    pages = np.random.default_rng(1).permutation(case.num_pages)[: case.tokens // case.page_size]
    rates: Row = {}
    for name in ALGORITHMS:
        sums = PageSums(pool.layout, None, SumPlan(name, Shard.whole(pool.layout), case.page_size))
        took_s = []
        for _ in range(case.repeats):
            began_s = time.monotonic()
            sums.of(-1, pages.astype(np.int32))
            took_s.append(time.monotonic() - began_s)
        rates[name] = round(case.num_bytes / statistics.median(took_s) / 2**30, 2)
    return rates


def compare_checksums(quick: bool, backend: Backend) -> Iterator[Row]:
    """Goodput with checksums by goodput without, each as a part of one raw write beside it."""
    for layout in LAYOUTS:
        case = small(layout, "aged") if quick else Transfer(layout, "aged")
        off, on = (
            run_pair(decode_side, prefill_side, replace(case, backend=backend, checksums=checksums))
            for checksums in (False, True)
        )
        yield {
            "part": "checksums",
            "layout": layout,
            "goodput_with_by_without": round(on["of_one_raw_write"] / off["of_one_raw_write"], 3),
            "gib_per_s": {"off": off["gib_per_s"]["stack"], "on": on["gib_per_s"]["stack"]},
            "gib_per_s_of_the_bare_hash": hash_rates(case),
            "foreign_cores_median": [one["foreign_cores_median"] for one in (off, on)],
        }


def transfer(
    json_file: JsonFile = None,
    quick: Quick = False,
    backend: Annotated[
        Way, typer.Option(help="Of both nodes; raw NIXL beside it in any case.")
    ] = Way.nixl,
    part: Annotated[list[Part] | None, typer.Option(help="Only this; may be given again.")] = None,
) -> None:
    """How fast KV goes from node to node, beside raw NIXL. UCX_TLS=tcp in the environment measures
    TCP."""
    check_outputs(json_file)
    parts: dict[Part, Callable[[], Iterator[Row]]] = {
        Part.goodput: lambda: measure(quick, backend.value),
        Part.full_hit: lambda: iter(
            [run_pair(hits_side, prefill_side, SMALL_HIT if quick else HIT)]
        ),
        Part.checksums: lambda: compare_checksums(quick, backend.value),
    }
    rows = told(row for one in part or Part for row in parts[one]())
    case = small("", "") if quick else Transfer("", "")
    write(
        json_file, "transfer" + " --quick" * quick + " --backend shm" * (backend is Way.shm), rows,
        statistic="medians, over the repetitions that others disturbed least, of the ratio "
        "within one", nice=os.nice(0), ucx_tls=os.environ.get("UCX_TLS", "default"),
        case=asdict(replace(case, backend=backend.value)),
    )  # fmt: skip
