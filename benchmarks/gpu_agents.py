"""Part of `benchmarks/gpu.py`: agents' chats with a model on the card, own compute and host memory
on and off.

The workloads, the link of 1 Gbit/s and the ratios are those of `benchmarks/own_compute.py` and
`benchmarks/host_turns.py`. The model is a Llama of 0.7 billion random parameters in bfloat16, whose
KV takes as many bytes a token as that of theirs. All three workers share the card, each with cores
of its own where there are enough.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Final

from benchmarks import host_turns, own_compute
from benchmarks.pair import Row

SIZES: Final = {
    "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "dtype": "bfloat16",
}  # fmt: skip
PAIRS: Final = {"own_compute": 2, "host_turns": 1}
BELOW: Final = 2048
CORES: Final = 4  # of prefill, and of decode


def measures(device: str, quick: bool) -> list[Callable[[], Row]]:
    """A row for each case of both workloads; `quick`: the first of one."""
    kinds: list[tuple[str, Any]] = [("own_compute", own_compute), ("host_turns", host_turns)]
    cases = [(name, of, case) for name, of in kinds for case in of.CASES]
    return [
        lambda name=name, of=of, case=case: _measured(name, of, case, device, quick)  # type: ignore[misc]
        for name, of, case in (cases[:1] if quick else cases)
    ]


def _measured(name: str, of: Any, case: str, device: str, quick: bool) -> Row:
    pairs, sizes = (1, {}) if quick else (PAIRS[name], SIZES)
    with own_compute.served(_within(), {"device": device}, **sizes) as model:
        found = asyncio.run(of.measured(model, case, pairs, BELOW))
    return {"workload": name, "prefill": case, "pairs": pairs, "model": sizes, **found}


def _within() -> list[tuple[str, ...]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * CORES:
        return [(), ()]
    parts = cores[:CORES], cores[CORES : 2 * CORES]
    return [("taskset", "-c", ",".join(map(str, part))) for part in parts]
