"""The generated traces: the same on every machine, well-formed, and what their texts say."""

from __future__ import annotations

import json
import zlib
from itertools import pairwise

import pytest

from benchmarks import workloads
from benchmarks.workloads import BLOCK_TOKENS, WORKLOADS, generate

# crc32 of the JSON of each workload's first 500 requests
FIRST = {
    "chat": 2188945514,
    "agents": 899646833,
    "flood": 3033119984,
    "drift": 1602278135,
    "retrieval": 159337281,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_name_and_a_seed_are_one_trace(name):
    trace = generate(name)
    assert zlib.crc32(json.dumps(trace[:500]).encode()) == FIRST[name]
    assert generate(name, workloads.SEED + 1)[:500] != trace[:500]
    assert all(one["timestamp"] <= next_["timestamp"] for one, next_ in pairwise(trace))
    assert all(len(entry["hash_ids"]) * BLOCK_TOKENS == entry["input_length"] for entry in trace)
