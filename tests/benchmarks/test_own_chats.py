"""The rule of own compute on chats in simulated time: an idle prefill worker's are not slower."""

from __future__ import annotations

import numpy as np

from benchmarks.own_chats import measured
from prefixkv.config import ComputeConfig


def test_chats_of_an_idle_prefill_worker_lose_nothing_by_own_compute() -> None:
    """Where the rule is told what prefill lacks: else its next turns take a tenth longer."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(3):
        off = measured("keeps all", None, False, 30, seed)
        for is_told, found in ratios.items():
            on = measured("keeps all", ComputeConfig(), is_told, 30, seed)
            found.append(on["later_ttft_p50_s"] / off["later_ttft_p50_s"])
            assert on["itl_p99_s"] < 1.15 * off["itl_p99_s"]
    told, not_told = (float(np.mean(found)) for found in ratios.values())
    assert told < 1.06
    assert told < not_told


def test_chats_of_a_busy_prefill_worker_are_answered_in_half_the_time() -> None:
    off, on = (measured("as pool", config, True, 10, 1) for config in (None, ComputeConfig()))
    assert on["later_ttft_p50_s"] < 0.55 * off["later_ttft_p50_s"]
    assert off["here"] == 0.0
