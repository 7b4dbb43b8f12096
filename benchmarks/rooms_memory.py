"""Claim: what malloc counts levels off: a million rooms leave less than a byte a room each.

    nice -n 15 python -m benchmarks rooms_memory [--rooms 1000000] [--seed 1] [--json
    benchmarks/results/rooms_memory.json]

A decode and a prefill node with small pools in this process, over real NIXL. One room in `SENDS`
has a prompt of its own and sends its pages, the others have one of `PROMPTS` that decode has
already. All end well: `soak` is for the other ends. Each so many rooms everything is let come to
rest, the caches are emptied, and memory is counted three ways: bytes that malloc has handed out
(mallinfo2, all arenas), blocks that Python's own allocator has handed out, and anonymous resident
memory. The last line is the verdict: what a room of the last half has left.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.request import Request
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.prefill_node import PrefillNode

POOL: dict[str, Any] = {
    "num_pages": 4096, "page_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8,
}  # fmt: skip
OPEN = 128  # rooms at a time
SENDS = 4
PROMPTS = 8
TOKENS = 8
PATIENCE_S = 120.0
_MALLINFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


class Rooms:
    """The two nodes, and a loop that has `OPEN` rooms under way."""

    def __init__(self, seed: int) -> None:
        control = ControlConfig(heartbeat_s=1.0)
        self.chance = np.random.default_rng(seed)
        self.decode = DecodeNode(
            KVPool.create(**POOL), DecodeConfig(reserve_tokens=0, control=control)
        )
        self.prefill = PrefillNode(
            KVPool.create(**POOL), PrefillConfig(control=control, max_running=OPEN)
        )
        self.prompts = [
            self.chance.integers(0, 50_000, TOKENS, dtype=np.int32) for _ in range(PROMPTS)
        ]
        self.opened = self.decode_ended = self.prefill_ended = self.failed = 0

    @property
    def ended(self) -> int:
        return min(self.decode_ended, self.prefill_ended)

    def run(self, until: int) -> None:
        """Open rooms until `until` have been, and let all come to rest."""
        end_s = time.monotonic() + PATIENCE_S
        ended = self.ended
        while self.ended < until:
            while self.opened < until and self.opened - self.ended < OPEN:
                self.open()
            self.step()
            if self.ended > ended:
                ended, end_s = self.ended, time.monotonic() + PATIENCE_S
            elif time.monotonic() > end_s:
                raise SystemExit(f"{self.opened - self.ended} rooms do not end")
        for node in (self.decode, self.prefill):
            while any(node.stats()[name] for name in ("requests", "rooms", "pages_owned")):
                self.step()
                if time.monotonic() > end_s:
                    raise SystemExit(f"not at rest: {node.stats()}")
            node.audit()
            node.flush()

    def open(self) -> None:
        self.opened += 1
        number = self.opened
        if number % SENDS:
            tokens = self.prompts[number % PROMPTS]
        else:
            tokens = self.chance.integers(0, 50_000, TOKENS, dtype=np.int32)
        rid = f"r{number}"
        self.prefill.add(Request(rid, tokens, room=number, decode=self.decode.config.name))
        prefill = self.prefill.endpoint
        self.decode.add(Request(rid, tokens, max_new_tokens=1, room=number, prefill=prefill))

    def step(self) -> None:
        decode, prefill = self.decode, self.prefill
        decode.pop_preallocated()
        for req in prefill.pop_bootstrapped():
            prefill.send_chunk(req, req.num_tokens, last=True)
        sent, failed = prefill.pop_sent(), prefill.pop_failed()
        self.prefill_ended += len(sent) + len(failed)
        arrived, lost = decode.pop_transferred(), decode.pop_failed()
        for one in arrived:
            decode.append_many([one], [7])
            decode.finish(one)
        self.decode_ended += len(arrived) + len(lost)
        self.failed += len(lost) + len(failed)
        if not (sent or arrived):
            decode.wait(0.001)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def sample(rooms: int, began_s: float) -> dict[str, int | float]:
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    malloc = libc.mallinfo2()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    anon = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    found: dict[str, int | float] = {
        "rooms": rooms,
        "seconds": round(time.monotonic() - began_s, 1),
        "malloc_bytes": malloc.uordblks + malloc.hblkhd,
        "malloc_free_bytes": malloc.fordblks,
        "python_blocks": sys.getallocatedblocks(),
        "anon_rss_kib": int(anon.split()[1]),
    }
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def slope(samples: list[dict[str, Any]], name: str) -> float:
    """Of the last half of the samples, a room."""
    last = samples[len(samples) // 2 :]
    if len(last) < 3:
        return 0.0
    rooms = np.array([one["rooms"] for one in last], float)
    return float(np.polyfit(rooms, np.array([one[name] for one in last], float), 1)[0])


def rooms_memory(
    rooms: Annotated[int, typer.Option(help="Opened in all.")] = 1_000_000,
    every: Annotated[int, typer.Option(help="Rooms between two counts.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all counts there.")
    ] = None,
) -> int:
    """What malloc, Python and the system count as a million rooms go by."""
    from prefixkv.cli.figures import machine

    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        raise ConfigError("mallinfo2 is needed: glibc 2.33 or later")
    recipe = {
        "command": f"python -m benchmarks rooms_memory --rooms {rooms} --every {every} "
        f"--seed {seed}",
        "nice": os.nice(0),
        "ucx_tls": os.environ.get("UCX_TLS", "default"),
        "pool": POOL,
        "one_room_in_so_many_sends": SENDS,
        **machine(),
    }
    began_s = time.monotonic()
    run = Rooms(seed)
    samples = []
    try:
        for until in range(every, rooms + 1, every):
            run.run(until)
            samples.append(sample(until, began_s))
        sent = run.prefill.stats()["bytes_sent"]
    finally:
        run.close()
    names = {"malloc_bytes": "malloc_bytes_a_room", "python_blocks": "python_blocks_a_room"}
    found = {
        "rooms": run.ended,
        "failed": run.failed,
        "bytes_sent": sent,
        **{wanted: round(slope(samples, name), 3) for name, wanted in names.items()},
        "anon_rss_bytes_a_room": round(1024 * slope(samples, "anon_rss_kib"), 3),
    }
    recipe["load_average_after"] = list(os.getloadavg())
    if json_file is not None:
        content = {"recipe": recipe, "verdict": found, "samples": samples}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 1 if run.failed else 0
