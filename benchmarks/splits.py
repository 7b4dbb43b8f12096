"""Claim: at the same bytes decode finds far more where layers with windows have pages of their own,
and prefill goes on behind nearly all of it.

    python -m benchmarks splits AGENTS --json benchmarks/results/splits.json

`prefixkv replay --model` on the shapes of models that are used; the memory is that of so many
blocks in which all layers keep everything. Deterministic: no time is looked at.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.trace_rows import (
    HITS,
    TRACES,
    WARM,
    Jobs,
    JsonFile,
    Paths,
    Requests,
    measured,
    read_traces,
    write_rows,
)
from prefixkv.cli.replay.model import ModelShape, model_shape
from prefixkv.cli.replay.splits import replay_splits
from prefixkv.spi import make_policy

CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma 3 27B": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "GPT-OSS 120B": {
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "Qwen3-Next 80B": {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip
BLOCKS = (1000, 3000)
POLICIES = ("lru", "adaptive")


def shape_of(model: str) -> ModelShape:
    """Return the shape of one of `CONFIGS`, read as the command reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIGS[model]))
        return model_shape(path)


def _measure(job: tuple[str, str, int, str]) -> list[dict[str, Any]]:
    name, model, blocks, policy = job
    trace, shape = TRACES[name], shape_of(model)
    memory = blocks * trace.block_tokens * shape.all_token_bytes
    found = replay_splits(trace, shape, memory, policy, lambda: make_policy(policy), WARM)
    return [{**asdict(one), "model": model, "blocks": blocks} for one in found]


def splits(
    paths: Paths, requests: Requests = None, jobs: Jobs = 2, json_file: JsonFile = None
) -> None:
    """Hits at the same bytes with one pool for all layers, and with windows of their own."""
    read_traces(paths, requests)
    rows = [
        row
        for of_job in measured(_measure, product(TRACES, CONFIGS, BLOCKS, POLICIES), jobs)
        for row in of_job
    ]
    write_rows(json_file, "splits", paths, requests, HITS, rows)
