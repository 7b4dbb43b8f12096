"""Prefill killed in the middle, for the benchmark `vllm`: what becomes of the requests, and of
decode's blocks.

Two requests at a time; prefill's processes get SIGKILL at moments spread evenly from when they were
sent until, undisturbed, both would have had their first token. Prefill is started again before the
next. A request is answered, with the right tokens (those that decode alone computes, in float32) or
wrong ones; or with an error; or it hangs: no answer in `BOUND_S` after the kill, when the client
leaves.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import Future
from typing import Any, Final

from benchmarks.vllm_pair import Answer, Pair
from benchmarks.vllm_sets import drawn

BOUND_S: Final = 30.0
SETTLE_S: Final = 45.0
"""After the last kill, until decode's blocks are counted: longer than NixlConnector's lease."""
TOGETHER: Final = 2
PROMPT: Final = 3000
OUT: Final = 8


def kills(pair: Pair, moments: list[float], seed: int) -> dict[str, Any]:
    """`moments` are shares of the undisturbed time."""
    spans, afters = [], []
    for i in range(3):
        done = [one.result() for one in _ask(pair, seed * 1000 + 900 + i)]
        spans.append(max(one.ttft_s for one in done))
        afters.append(statistics.median(one.after_prefill_s for one in done))
    span_s, rows = statistics.median(spans), []
    for i, moment in enumerate(moments):
        begun_s = time.monotonic()
        asked = _ask(pair, seed * 1000 + i)
        time.sleep(max(0.0, begun_s + moment * span_s - time.monotonic()))
        pair.patience_s = BOUND_S
        pair.prefill.kill()
        said = [_outcome(one) for one in asked]
        row: dict[str, Any] = {"moment": round(moment, 3), "outcomes": []}
        for k, one in enumerate(said):
            if isinstance(one, Answer):
                right = pair.alone(_prompt(seed * 1000 + i, k), OUT, salt=f"{seed} {i} {k}")
                one = "right" if right.tokens == one.tokens else "wrong"
            row["outcomes"].append(one)
        pair.restart_prefill()
        row["blocks_in_use"] = _blocks(pair)
        rows.append(row)
        print(pair.system, row, flush=True)
    end_s = time.monotonic() + SETTLE_S
    while (left := _blocks(pair)) and time.monotonic() < end_s:
        time.sleep(1.0)
    return {
        "undisturbed_s": span_s, "after_prefill_s": statistics.median(afters),
        "kills": rows, "blocks_lost": left,
    }  # fmt: skip


def _prompt(seed: int, k: int) -> list[int]:
    return drawn(100 * seed + k, PROMPT)


def _ask(pair: Pair, seed: int) -> list[Future[Answer]]:
    pair.patience_s = BOUND_S
    return [pair.ask(_prompt(seed, k), OUT) for k in range(TOGETHER)]


def _outcome(asked: Future[Answer]) -> Answer | str:
    try:
        return asked.result(BOUND_S + 5.0)
    except TimeoutError:
        return "hang"
    except Exception as error:
        return f"error: {str(error)[:200]}"


def _blocks(pair: Pair) -> int:
    return round(pair.decode_usage() * (pair.shape.decode_blocks - 1))
