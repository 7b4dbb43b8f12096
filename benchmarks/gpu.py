"""What a GPU is lent for: at most eight minutes on one card, each part by itself.

    python -m benchmarks gpu --json benchmarks/results/gpu.json
    python -m benchmarks gpu --device cpu --quick               # whether it works

- `host`: the host tier's copies between VRAM and pinned memory, in pieces of 4 and 16 MiB, by one
  thread and by two, beside a plain copy of as many bytes. What was loaded is compared with what was
  written.
- `stream`: writes to host memory behind work of the engine's stream. A page is written by a stream
  that is kept busy; the copy is ordered at once with the event behind that work. No old byte may
  reach host memory. It says how long after the event the copy ended.

The parts come in this order, so that what is most wanted is there if the time ends: a part is begun
only if `--minutes` have not passed. What failed is told in the place of its figures.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from itertools import product
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer

from benchmarks import host_copies
from benchmarks.pair import turn_about
from benchmarks.report import JsonFile, Quick, Row, check_outputs, tell, write
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 16, 32, 8, 128
POOL_MIB, ROUND_MIB, ROUNDS = 1024, 64, 11
PIECES_MIB: Final = (4, 16)
THREADS: Final = (1, 2)
ORDERS: Final = ("layer_major", "page_major")
_cuda: Any = torch.cuda


class Part(StrEnum):
    host = "host"
    stream = "stream"


def settle(device: str) -> None:
    if device != "cpu":
        _cuda.synchronize(torch.device(device))


class Tier(host_copies.Tier):
    """A pool on the device with numbers in it; `count` pages are copied at a time."""

    def __init__(self, device: str, order: str, quick: bool) -> None:
        self.layers, pool_mib, round_mib = (2, 8, 2) if quick else (LAYERS, POOL_MIB, ROUND_MIB)
        page_bytes = self.layers * HEADS * HEAD_DIM * PAGE_SIZE * 4
        num_pages, self.count = (mib * 2**20 // page_bytes for mib in (pool_mib, round_mib))
        pool = KVPool.create(
            num_pages, PAGE_SIZE, self.layers, HEADS, HEAD_DIM, order=order, device=device
        )
        for layer in range(self.layers):
            pool.k(layer).normal_()
            pool.v(layer).normal_()
        began_s = time.perf_counter()
        super().__init__(pool)
        self.host.wait_until_ready()
        self.pinned_s = time.perf_counter() - began_s
        self.random = np.random.default_rng(1)

    def pages(self) -> Any:
        return self.random.permutation(self.num_pages)[: self.count].astype(np.int32)

    def same(self, first: Any, second: Any) -> bool:
        """Whether these pages of the pool have the same bytes as those."""
        one, two = (torch.from_numpy(pages.astype(np.int64)) for pages in (first, second))
        return all(
            torch.equal(part[one.to(part.device)], part[two.to(part.device)])
            for layer in range(self.layers)
            for part in (self.pool.k(layer), self.pool.v(layer))
        )


def host(device: str, quick: bool) -> Iterator[Callable[[], Row]]:
    for order in ORDERS:
        yield partial(_host, device, order, quick)


def _host(device: str, order: str, quick: bool) -> Row:
    times: dict[str, list[float]] = {}
    with Tier(device, order, quick) as tier:
        ways = {
            f"{threads} threads, {mib} MiB": tier.copies(threads, mib << 20)
            for threads, mib in product(THREADS, PIECES_MIB)
        }
        num_bytes = tier.count * tier.host.page_bytes
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
        for number in range((2 if quick else ROUNDS) + 1):
            for name in turn_about([*ways, "plain"], number):
                rows, kept, other = tier.pages(), tier.pages(), tier.pages()
                for what, pages in (("write", kept), ("load", other)):
                    settle(device)
                    began_s = time.perf_counter()
                    if name == "plain":
                        target, source = (there, here) if what == "load" else (here, there)
                        target.copy_(source, non_blocking=True)
                        settle(device)
                    else:
                        tier.order(ways[name], rows, pages, what == "load")
                    if number:  # the first compiles the kernels
                        took_s = time.perf_counter() - began_s
                        times.setdefault(f"{what}, {name}", []).append(took_s)
                # What the load itself has overwritten is not compared.
                keep = ~np.isin(kept, other)
                if name != "plain" and not number and not tier.same(kept[keep], other[keep]):
                    raise AssertionError(f"{order}, {name}: a page came back with other bytes")
    return {
        "layout": order, "mib": num_bytes / 2**20, "pinned_s": round(tier.pinned_s, 3),
        "gb_s": {
            way: round(num_bytes / statistics.median(took) / 1e9, 2) for way, took in times.items()
        },
    }  # fmt: skip


def stream(device: str, quick: bool) -> Iterator[Callable[[], Row]]:
    for order in ORDERS:
        yield partial(_stream, device, order, quick)


def _stream(device: str, order: str, quick: bool) -> Row:
    late, waits_ms, rounds = 0, [], 2 if quick else 20
    busy = torch.randn(64 if quick else 8192, 64 if quick else 8192, device=device)
    with Tier(device, order, quick) as tier:
        copies = tier.copies(2, 16 << 20)
        for number in range(rounds):
            rows, pages, back = tier.pages(), *np.split(
                tier.random.permutation(tier.num_pages)[: 2 * tier.count].astype(np.int32), 2
            )  # fmt: skip
            at = torch.from_numpy(pages.astype(np.int64)).to(tier.pool.device)
            event: Any = None
            engine = _cuda.Stream() if device != "cpu" else None
            settle(device)
            with _cuda.stream(engine):  # nothing, where there is no stream
                for _ in range(1 if quick else 8):
                    busy @ busy
                for layer in range(tier.layers):
                    tier.pool.k(layer)[at] = float(number)
                    tier.pool.v(layer)[at] = float(-number)
                if engine is not None:
                    event = _cuda.Event()
                    event.record(engine)
            waits_ms.append(1e3 * tier.order(copies, rows, pages, False, event))
            tier.order(copies, rows, back, True)
            late += not tier.same(pages, back)
    if late:
        raise AssertionError(f"{order}: {late} of {rounds} writes took bytes from before the event")
    return {"layout": order, "rounds": rounds, "late_reads": late,
            "ms_from_event_to_end": round(statistics.median(waits_ms), 3)}  # fmt: skip


PARTS: Final = {Part.host: host, Part.stream: stream}


def gpu(
    json_file: JsonFile = None,
    part: Annotated[list[Part] | None, typer.Option(help="Only this; may be given again.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N; cpu to try it out.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="No part is begun after so long.")] = 6.0,
    quick: Quick = False,
) -> int:
    """Host copies, and writes behind a stream, on one GPU."""
    check_outputs(json_file)
    name, end_s, rows = device_name(device), time.monotonic() + 60 * minutes, []
    for one in part or Part:
        for call in PARTS[one](device, quick):
            if time.monotonic() > end_s:
                tell({"part": one.value, "not_begun": f"{minutes:g} minutes have passed"})
                continue
            began_s = time.monotonic()
            try:
                row = call()
            except Exception:
                row = {"failed": traceback.format_exc()[-2000:]}
            rows.append({"part": one.value, "took_s": round(time.monotonic() - began_s, 1), **row})
            print(json.dumps(rows[-1]), flush=True)
            # After each row: what there is, should a later one not end.
            write(
                json_file, "gpu" + " --quick" * quick, rows, device=name,
                statistic="medians; what is compared takes turns",
            )  # fmt: skip
    return 1 if any("failed" in row for row in rows) else 0


def device_name(device: str) -> str:
    """What the card calls itself. Raises ConfigError for one that is not there."""
    if device == "cpu":
        return "cpu"
    try:
        return str(_cuda.get_device_name(torch.device(device)))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"--device is {device}: {str(error).splitlines()[0]}") from None
