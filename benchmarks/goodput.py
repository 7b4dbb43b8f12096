"""Claim: the whole stack moves KV at .85 of the speed of one raw NIXL write of the same bytes.

    python benchmarks/goodput.py [--repeats 7] [--post-mib 2] > benchmarks/results/goodput.json

A prefill and a decode process, each pinned to a core of its own, 16-token pages of an 8B-class model (32 layers, 8 KV
heads of 128, bfloat16: 2 MiB a page), 2,048 tokens a request: 256 MiB. From `send_chunk` to `pop_transferred`
through both nodes, against one raw NIXL write of as many contiguous bytes between the same processes, and against
raw posts of the size that the transport makes; turn about, the ratio taken in each repetition. `fresh` pages come
from an empty pool; `aged` ones after 10,000 random requests through both sides' pages, evictions included; of
`scattered` ones no two are neighbours.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from prefixkv.cache.radix_key import RadixKey
from prefixkv.cli.report import machine
from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.errors import OutOfPagesError
from prefixkv.request_pages import PageBooks

PAGE_SIZE = 16
TOKENS = 2048
NUM_PAGES = 640
MODEL = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
PAGE_BYTES = 2 << 20
BYTES = TOKENS // PAGE_SIZE * PAGE_BYTES
LAYOUTS = ("layer_major", "page_major")
PAGES = ("fresh", "aged", "scattered")
AGEING_REQUESTS = 10_000
WINDOW = 8


class RawAgent:
    """A NIXL agent of its own with one contiguous buffer, as bare as it gets."""

    def __init__(self, name: str) -> None:
        import nixl._api as nixl_api

        self.name = name
        self.buffer = np.ones(BYTES, np.uint8)
        sync = nixl_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        config = nixl_api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
        self.agent: Any = nixl_api.nixl_agent(name, config)
        self.address = self.buffer.ctypes.data
        self.agent.register_memory([(self.address, BYTES, 0, "")], "DRAM", backends=["UCX"])

    def introduction(self) -> tuple[str, bytes, int]:
        return self.name, bytes(self.agent.get_agent_metadata()), self.address

    def connect(self, name: str, metadata: bytes, address: int, post_bytes: int) -> None:
        """Prepare one write of all bytes, and posts of `post_bytes`."""
        self.agent.add_remote_agent(metadata)

        def prepared(start: int, length: int) -> Any:
            ours = self.agent.get_xfer_descs([(self.address + start, length, 0)], "DRAM")
            theirs = self.agent.get_xfer_descs([(address + start, length, 0)], "DRAM")
            return self.agent.initialize_xfer("WRITE", ours, theirs, name, b"part")

        self.one = [prepared(0, BYTES)]
        self.many = [prepared(start, post_bytes) for start in range(0, BYTES, post_bytes)]

    def write(self, handles: list[Any]) -> float:
        """Post them all, at most WINDOW at a time; returns when the first was posted, on the monotonic clock."""
        began_s = time.monotonic()
        waiting, going = list(reversed(handles)), []
        while waiting or going:
            while waiting and len(going) < WINDOW:
                handle = waiting.pop()
                if self.agent.transfer(handle) != "DONE":
                    going.append(handle)
            going = [handle for handle in going if self.agent.check_xfer_state(handle) != "DONE"]
        return began_s

    def arrived_s(self, count: int) -> float:
        """When the last of so many notifications came."""
        while count:
            count -= sum(map(len, self.agent.get_new_notifs().values()))
        return time.monotonic()


def age(books: PageBooks, seed: int) -> None:
    """10,000 requests of random length, eight at a time, each cached when it ends."""
    rng = np.random.default_rng(seed)
    running: list[Any] = []
    for number in range(AGEING_REQUESTS):
        pages = int(rng.integers(2, 64))
        key = RadixKey(np.concatenate([[number], rng.integers(0, 50_000, pages * PAGE_SIZE - 1)]).astype(np.int32))
        while True:
            try:
                running.append((books.open(key, books.match(key), pages, float(number)), key))
                break
            except OutOfPagesError:
                books.cache_finished(*running.pop(0), float(number))
        if len(running) == 8:
            books.cache_finished(*running.pop(int(rng.integers(8))), float(number))
    for held in running:
        books.cache_finished(*held, float(AGEING_REQUESTS))


def prepare(node: Any, pages: str, seed: int) -> None:
    books = node.scheduler.books
    if pages == "aged":
        age(books, seed)
    elif pages == "scattered":
        books.allocator.free(books.allocator.alloc(NUM_PAGES)[seed % 3 :: 3])  # the others are never given back


def prefill_process(pipe: Connection, core: int, layout: str, pages: str, post_bytes: int) -> None:
    os.sched_setaffinity(0, {core})
    from prefixkv.pool.kv_pool import KVPool
    from prefixkv.request import Request
    from prefixkv.runtime.nodes import PrefillNode

    raw = RawAgent("raw-prefill")
    config = PrefillConfig(transport=TransportConfig(post_bytes=post_bytes))
    with PrefillNode(KVPool.create(NUM_PAGES, PAGE_SIZE, **MODEL, order=layout), config) as node:
        pipe.send((node.endpoint, raw.introduction()))
        raw.connect(*pipe.recv(), post_bytes)
        prepare(node, pages, 1)
        while (order := pipe.recv()) is not None:
            if order in ("one", "many"):
                pipe.send(raw.write(getattr(raw, order)))
                continue
            if pages != "aged":
                node.flush()
            node.add(Request(f"r{order}", prompt_of(order), room=order))
            while not (ready := node.pop_bootstrapped()):
                node.wait(10)
            began_s = time.monotonic()
            node.send_chunk(ready[0], TOKENS, last=True)
            while not node.pop_sent():
                node.wait(10)
            pipe.send(began_s)
    raw.one.clear()
    raw.many.clear()


def prompt_of(room: int) -> Any:
    return np.random.default_rng(room).integers(0, 50_000, TOKENS, dtype=np.int32)


def measure(layout: str, pages: str, args: argparse.Namespace) -> dict[str, Any]:
    from prefixkv.pool.kv_pool import KVPool
    from prefixkv.request import Request
    from prefixkv.runtime.nodes import DecodeNode

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    post_bytes = args.post_mib << 20
    child = context.Process(target=prefill_process, args=(theirs, args.cores[1], layout, pages, post_bytes))
    child.start()
    theirs.close()
    raw = RawAgent("raw-decode")
    rows: list[dict[str, float]] = []
    runs: list[int] = []
    with DecodeNode(KVPool.create(NUM_PAGES, PAGE_SIZE, **MODEL, order=layout), DecodeConfig()) as node:
        endpoint, introduction = pipe.recv()
        raw.agent.add_remote_agent(introduction[1])
        pipe.send(raw.introduction())
        prepare(node, pages, 2)

        def baseline(order: str, count: int) -> float:
            pipe.send(order)
            arrived_s = raw.arrived_s(count)
            return arrived_s - float(pipe.recv())

        def stack(room: int) -> float:
            if pages != "aged":
                node.flush()
            pipe.send(room)
            node.add(Request(f"r{room}", prompt_of(room), max_new_tokens=1, room=room, prefill=endpoint))
            node.pop_preallocated()
            while not (arrived := node.pop_transferred()):
                assert not node.pop_failed()
                assert node.wait(30.0), "nothing arrives"
            took_s = time.monotonic()
            runs.append(1 + int(np.count_nonzero(np.diff(arrived[0].pages) != 1)))
            node.append_many(arrived, [7])
            node.finish(arrived[0])
            return took_s - float(pipe.recv())

        for room in range(args.warm_up + args.repeats):
            row = {"one": baseline("one", 1), "stack": stack(room), "many": baseline("many", BYTES // post_bytes)}
            if room >= args.warm_up:
                rows.append(row)
        pipe.send(None)
        wait([child.sentinel], 60)
    child.kill()
    gib = {name: round(statistics.median(BYTES / row[name] for row in rows) / 2**30, 2) for name in rows[0]}
    return {
        "layout": layout,
        "pages": pages,
        "runs_a_request": statistics.median(runs[args.warm_up :]),
        "of_one_raw_write": round(statistics.median(row["one"] / row["stack"] for row in rows), 3),
        "of_raw_posts": round(statistics.median(row["many"] / row["stack"] for row in rows), 3),
        "gib_per_s": {"one raw write": gib["one"], "raw posts": gib["many"], "whole stack": gib["stack"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--post-mib", type=int, default=2, help="of each post, in the transport and in the raw posts")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES)
    args = parser.parse_args()
    args.cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {args.cores[0]})
    if len(args.cores) < 2:
        raise SystemExit("two cores are needed, one for each process")
    load_before = os.getloadavg()
    rows = []
    for layout in args.layouts:
        for pages in args.pages:
            rows.append(measure(layout, pages, args))
            print(json.dumps(rows[-1]), file=sys.stderr)
    recipe = {
        "command": f"python benchmarks/goodput.py --repeats {args.repeats} --post-mib {args.post_mib}",
        **machine(),
        "ucx_tls": os.environ.get("UCX_TLS", "default"),
        "load_before": load_before,
        "bytes_a_request": BYTES,
    }
    json.dump({"recipe": recipe, "rows": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
