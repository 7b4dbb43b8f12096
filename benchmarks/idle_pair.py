"""Claim: on an otherwise idle pair a full hit has its first token in under 2 ms, and idling costs under 3% of a core.

    python benchmarks/idle_pair.py [--requests 500] [--gap-ms 10] > benchmarks/results/idle_pair.json

A prefill and a decode process, NIXL over shared memory. Every request's prompt is cached on both sides, so no KV is
sent; time runs from `add` on decode, which also tells prefill of the request over a pipe, to `pop_transferred`.
A write to the pipe costs what it costs a router; the prompt itself is known on both sides.
Then both stay connected, exchange heartbeats and have nothing to do: the processor time of each, all its threads.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_SIZE = 16
POOL = {"num_pages": 1024, "page_size": PAGE_SIZE, "num_layers": 8, "num_kv_heads": 2, "head_dim": 64}


def prompt_of(seed: int, tokens: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)


def prefill_process(pipe: Connection, seed: int, tokens: int) -> None:
    """Sends at once whatever it is asked for. A float asks for the processor time of so many idle seconds."""
    from prefixkv.pool.kv_pool import KVPool
    from prefixkv.request import Request
    from prefixkv.runtime.nodes import PrefillNode

    prompt = prompt_of(seed, tokens)
    with PrefillNode(KVPool.create(**POOL)) as node:
        pipe.send(node.endpoint)
        while True:
            for ready in wait([pipe, node.fileno()], 1.0):
                if ready is not pipe:
                    continue
                message = pipe.recv()
                if message is None:
                    return
                if isinstance(message, float):
                    pipe.send(idle_share(message))
                else:
                    node.add(Request(f"r{message}", prompt, room=message))
            for req in node.pop_bootstrapped():
                node.send_chunk(req, req.num_tokens, last=True, aux=b"token")
            node.pop_sent()
            assert not node.pop_failed()


def idle_share(seconds: float) -> float:
    """Processor time of this process, all threads, as a share of one core, over so many seconds of doing nothing."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu_s) / (time.perf_counter() - began_s)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from prefixkv.pool.kv_pool import KVPool
    from prefixkv.request import Request
    from prefixkv.runtime.nodes import DecodeNode

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=prefill_process, args=(theirs, args.seed, args.tokens), daemon=True)
    child.start()
    theirs.close()
    prompt = prompt_of(args.seed, args.tokens)
    took_s: list[float] = []
    with DecodeNode(KVPool.create(**POOL)) as node:
        endpoint = pipe.recv()
        for room in range(args.warm_up + args.requests):
            time.sleep(args.gap_ms * 1e-3)
            began_s = time.perf_counter()
            pipe.send(room)
            node.add(Request(f"r{room}", prompt, max_new_tokens=1, room=room, prefill=endpoint))
            node.pop_preallocated()
            while not (arrived := node.pop_transferred()):
                assert not node.pop_failed()
                assert node.wait(10.0), "nothing arrives"
            took_s.append(time.perf_counter() - began_s)
            (req,) = arrived
            assert room == 0 or req.prefix_len == args.tokens
            node.append_many([req], [7])
            node.finish(req)
        stats = node.stats()
        pipe.send(args.idle_seconds)
        decode_share = idle_share(args.idle_seconds)
        prefill_share = pipe.recv()
    pipe.send(None)
    child.join(10)
    child.kill()
    hits = np.array(took_s[args.warm_up :]) * 1e3
    return {
        "ttft_full_hit_ms": {
            **{f"p{q}": round(float(np.percentile(hits, q)), 3) for q in (50, 90, 99)},
            "max": round(float(hits.max()), 3),
        },
        "first_request_ms": round(took_s[0] * 1e3, 1),
        "hit_tokens": stats["hit_tokens"],
        "idle_share_of_a_core": {"decode": round(decode_share, 5), "prefill": round(prefill_share, 5)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt, whole pages")
    parser.add_argument("--gap-ms", type=float, default=10.0, help="between two requests")
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.tokens % PAGE_SIZE:
        parser.error(f"--tokens is {args.tokens}, a multiple of {PAGE_SIZE} is needed")
    load_before = os.getloadavg()[0]
    result = measure(args)
    recipe = {
        **vars(args),
        "pool": POOL,
        "ucx_tls": os.environ.get("UCX_TLS", "default"),
        "switch_interval_s": sys.getswitchinterval(),
        "cores": os.cpu_count(),
        "load_before_after": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernel": platform.release(),
    }
    print(json.dumps({"recipe": recipe, **result}, indent=1))


if __name__ == "__main__":
    main()
