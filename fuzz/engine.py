"""Invariant tested: whatever page sizes, layouts, pools and caches the two workers of the engine of
Hugging Face's models have, and whichever requests are aborted, every token of every answer is what
the model says by itself: greedy ones `generate`'s, drawn ones a plain sampler's on its logits. At
the end nothing is held.

    python fuzz/engine.py --rounds 500 [--seed 1] [--models llama,qwen3_next]
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import torch

from benchmarks.hybrid_models import FAMILIES, config_of
from prefixkv.engines.hf import PagedModel, make_model
from tests.support.hf_workload import Found, run_round
from tests.support.hf_world import TINY, Reference

KINDS = (
    "llama", "qwen3", "mistral", "qwen3_next", "granitemoehybrid", "gemma3_text", "gpt_oss",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--models", default=",".join(KINDS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # that each round's decode node has left
    torch.set_num_threads(args.threads)
    kinds = args.models.split(",")
    models = [_make(kind, seed) for seed, kind in enumerate(kinds)]
    references = [Reference(model) for model in models]
    found = Found()
    for number in range(args.rounds):
        seed, which = args.seed + number, number % len(models)
        try:
            run_round(models[which], references[which], seed, found, args.requests)
        except BaseException:
            print(f"round of seed {seed} with {kinds[which]}", file=sys.stderr)
            raise
        if number % 20 == 19:
            print(number + 1, "rounds", found, flush=True)
    print(args.rounds, "rounds without a difference", found)


def _make(kind: str, seed: int) -> PagedModel:
    if kind in FAMILIES:
        return make_model(config_of(kind), seed)
    return make_model(kind, seed, **TINY, **EXTRA.get(kind, {}))


EXTRA = {"mistral": {"sliding_window": None}}

if __name__ == "__main__":
    main()
