"""Decode's step time beside a connector, for the benchmark `vllm`: idle against a server without
one, and busy beside a copy of the same bytes.

A step's time is the time between two tokens of a stream, while all streams of a batch run; a round
is the median of these. Rounds of the sides are turn about, so that each ratio is of neighbours.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np

from benchmarks.vllm_pair import BLOCK, Answer, Pair
from benchmarks.vllm_sets import drawn

BATCH: Final = 8
CONTEXT: Final = 256
LOAD_TOKENS: Final = 32 * BLOCK + 1
NUM_PROMPTS: Final = 24  # more blocks than decode has: each is loaded anew
EVERY_S: Final = 0.25


def steps_of(answers: list[Answer], begun_s: list[float]) -> dict[str, float]:
    """Of the time in which all streams ran, in milliseconds."""
    times = [
        [begun + at for at in one.times_s] for one, begun in zip(answers, begun_s, strict=True)
    ]
    first, last = max(one[0] for one in times), min(one[-1] for one in times)
    gaps = [
        (after - before) * 1e3
        for one in times
        for before, after in pairwise(one)
        if before >= first and after <= last
    ]
    within = np.percentile(gaps, [50, 95])
    return {"p50": float(within[0]), "p95": float(within[1]), "mean": statistics.mean(gaps)}


def measured(pair: Pair, on_prefill: bool, num_tokens: int, seed: int) -> dict[str, float]:
    """A batch of streams on one of the servers, none of whose prompts has been seen."""
    server = pair.prefill if on_prefill else pair.decode
    begun_s = [0.0] * BATCH

    def stream(i: int) -> Answer:
        begun_s[i] = time.perf_counter()
        prompt = drawn(seed * 100 + i, CONTEXT)
        return pair.streamed(server, prompt, num_tokens, None, begun_s[i])

    with ThreadPoolExecutor(BATCH) as threads:
        answers = list(threads.map(stream, range(BATCH)))
    return steps_of(answers, begun_s)


def idle(pair: Pair, rounds: int, num_tokens: int) -> dict[str, Any]:
    """The pair's prefill server has no connector, decode has ours, and nothing is loaded."""
    found: dict[str, list[dict[str, float]]] = {"without": [], "idle": []}
    for i in range(-1, rounds):  # the first round is not counted
        for side in sorted(found, reverse=bool(i % 2)):
            one = measured(pair, side == "without", num_tokens, 1000 + 10 * i + len(side))
            if i >= 0:
                found[side].append(one)
    return found


def busy(pair: Pair, rounds: int, num_tokens: int) -> dict[str, Any]:
    """Rounds alone, while loads come, and while the same requests are answered from decode's own
    cache and a process copies what a load brings."""
    prompts = [drawn(700 + i, LOAD_TOKENS) for i in range(NUM_PROMPTS)]
    for prompt in prompts:
        pair.prefill.complete(prompt, 1)
    known = drawn(699, LOAD_TOKENS)
    pair.prefill.complete(known, 1)
    num_bytes = pair.shape.sizes.kv_bytes(LOAD_TOKENS // BLOCK * BLOCK + BLOCK)
    turn = iter(range(1 << 30))

    def load() -> None:
        pair.ask(prompts[next(turn) % NUM_PROMPTS], 1).result()

    found: dict[str, list[Any]] = {"alone": [], "copies": [], "loads": []}
    with _copier(num_bytes) as copy:

        def copied() -> None:
            copy()
            pair.prefill.complete(known, 1)
            pair.alone(known, 1)

        work: dict[str, Callable[[], None] | None] = {
            "alone": None, "copies": copied, "loads": load,
        }  # fmt: skip
        for i in range(-1, rounds):
            for side in sorted(work, reverse=bool(i % 2)):
                before = pair.bytes_moved()
                with _beside(work[side]) as num_done:
                    seed = 5000 + 10 * i + [*work].index(side)
                    one: dict[str, Any] = measured(pair, False, num_tokens, seed)
                time.sleep(1.0)
                one |= {"requests": num_done[0], "bytes": pair.bytes_moved() - before}
                if i >= 0:
                    found[side].append(one)
                pair.alone(known, 1)  # in decode's cache, and lately used
    return {"load_bytes": num_bytes, **found}


@contextmanager
def _beside(work: Callable[[], None] | None) -> Iterator[list[int]]:
    """Does it every EVERY_S in a thread; how often, in the end."""
    done, over = [0], threading.Event()

    def go_on() -> None:
        begun_s = time.monotonic()
        while work is not None and not over.wait(
            max(0.0, begun_s + done[0] * EVERY_S - time.monotonic())
        ):
            work()
            done[0] += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


@contextmanager
def _copier(num_bytes: int) -> Iterator[Callable[[], None]]:
    """Has another process copy so many bytes, and does not wait for it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_copy, args=(theirs, num_bytes), daemon=True)
    process.start()
    ours.recv()
    try:
        yield lambda: ours.send(True)
    finally:
        ours.send(False)
        process.join()


def _copy(pipe: Any, num_bytes: int) -> None:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    pipe.send(True)
    while pipe.recv():
        np.copyto(target, source)
