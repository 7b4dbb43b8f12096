"""Part of `benchmarks/gpu.py`: staging copies on the card, against its copy bandwidth.

One rank of TP4 against one of TP1, as in `benchmarks/staging_copy.py`: the narrow pool (2 KV heads)
is copied whole, of the wide one (8 heads) a quarter of the heads, rows of 512 bytes. In leases of
8 and of 64 MiB, each waited for as the copy pool does, and all at once: wall time, launches
included. "kernel": what the device itself spent on copying all at once, as torch's profiler has it.
GB/s are of KV bytes, each read once and written once, as are those of the plain copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from benchmarks.pair import Row
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_copy import StagingCopy, staging_copy

HEADS, HEAD_DIM, RANKS, TOKENS = 8, 128, 4, 4096
LEASES_MIB: Final = (8, 64)
ROUNDS: Final = 11


def measure(device: str, quick: bool) -> Row:
    layers, tokens, rounds = (2, 256, 2) if quick else (32, TOKENS, ROUNDS)
    plain = {}
    for mib in (1,) if quick else (8, 128, 1024):
        source, target = (
            torch.randint(0, 256, (mib << 20,), dtype=torch.uint8, device=device) for _ in range(2)
        )
        took_s = _median_s(lambda a=source, b=target: b.copy_(a), rounds)  # type: ignore[misc]
        plain[f"{mib}_mib_gb_s"] = round((mib << 20) / took_s / 1e9, 1)
        del source, target
    rows = [
        _shape(device, order, page_size, contiguous, layers, tokens, rounds)
        for order in ("layer_major", "page_major")
        for page_size in (16, 64)
        for contiguous in (True, False)
    ]
    return {"plain_copy": plain, "rounds": rounds, "staging": rows}


def _shape(
    device: str, order: str, page_size: int, contiguous: bool, layers: int, tokens: int, rounds: int
) -> Row:
    count = tokens // page_size
    random = np.random.default_rng(1)
    pages = np.arange(count) + 1 if contiguous else random.permutation(2 * count)[:count]
    chosen = pages.astype(np.int32)
    made = {
        name: KVPool.create(
            2 * count, page_size, layers, heads, HEAD_DIM, order=order, device=device
        )
        for name, heads in (("wide", HEADS), ("narrow", HEADS // RANKS))
    }
    for pool in made.values():
        for layer in range(layers):
            pool.k(layer).normal_()
            pool.v(layer).normal_()
    part = HEADS // RANKS
    copies = {
        "wide": staging_copy(made["wide"].layout, Shard(0, layers, part, part), page_size,
                             made["wide"].device),
        "narrow": staging_copy(made["narrow"].layout, Shard(0, layers, 0, part), page_size,
                               made["narrow"].device),
    }  # fmt: skip
    total = copies["narrow"].num_bytes(count)
    stage = torch.empty(total, dtype=torch.uint8, device=device)
    a_page = copies["narrow"].num_bytes(1)
    sizes = {f"{mib}_mib": max(1, (mib << 20) // a_page) for mib in LEASES_MIB}
    sizes["whole"] = count
    row: Row = {
        "layout": order,
        "page_size": page_size,
        "pages": "contiguous" if contiguous else "random",
        "mib": total / 2**20,
    }
    for name, copy in copies.items():
        for act in ("gather", "scatter"):
            for how, each in sizes.items():
                took_s = _median_s(partial(_all, copy, act, chosen, each, stage), rounds)
                row[f"{name}_{act}_{how}_gb_s"] = round(total / took_s / 1e9, 1)
            if stage.is_cuda:
                took_s = _kernel_s(partial(_all, copy, act, chosen, count, stage), rounds)
                row[f"{name}_{act}_kernel_gb_s"] = round(total / took_s / 1e9, 1)
            one = partial(_all, copy, act, chosen[:1], 1, stage)
            row[f"{name}_{act}_one_page_us"] = round(1e6 * _median_s(one, rounds), 1)
    copies["narrow"].gather(chosen, stage)
    for name in copies:  # what came through the stage is what was there
        copies[name].scatter(chosen, stage)
        again = torch.empty_like(stage)
        copies[name].gather(chosen, again)
        if not torch.equal(again, stage):
            raise AssertionError(f"{name}, {order}: scatter and gather do not agree")
    return row


def _all(copy: StagingCopy, act: str, pages: Any, each: int, stage: torch.Tensor) -> None:
    for first in range(0, len(pages), each):
        part = pages[first : first + each]
        getattr(copy, act)(part, stage[: copy.num_bytes(len(part))])
        _settle(stage)


def _median_s(act: Callable[[], object], rounds: int) -> float:
    """Wall time to the end of the work, two rounds of warm-up left out."""
    took = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        found = act()
        if isinstance(found, torch.Tensor):
            _settle(found)
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])


def _kernel_s(act: Callable[[], object], rounds: int) -> float:
    """The mean time of the staging kernel on the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(rounds):
            act()
    found = [event for event in profiled.key_averages() if "_copy_rows" in event.key]
    return float(sum(event.device_time_total for event in found)) / rounds / 1e6


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        cuda: Any = torch.cuda
        cuda.current_stream(tensor.device).synchronize()
