"""Traces as prompts of vLLM, for the part `pool` of the benchmark `vllm`. The pool's size follows
from the trace: two thirds of the blocks that were used and will be used again, on the mean."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

VOCABULARY: Final = 2000
SIZE_OVER_POOL: Final = 1.5
TRACE_BLOCK: Final = 512


@dataclass(frozen=True)
class Ask:
    """One request."""

    now_s: float
    prompt: list[int]


def drawn(seed: int, number: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(10, VOCABULARY) for _ in range(number)]


class Recorded:
    """A trace of requests in blocks of 512 tokens. A block of ours stands for one of these."""

    def __init__(self, path: Path, block: int, requests: int) -> None:
        with path.open(encoding="utf-8") as file:
            self._rows = [json.loads(line) for line in islice(file, requests)]
        self._block = block

    def __iter__(self) -> Iterator[Ask]:
        for row in self._rows:
            whole = row["hash_ids"][: row["input_length"] // TRACE_BLOCK]
            prompt = [one + 10 for one in whole for _ in range(self._block)]
            yield Ask(row["timestamp"] / 1000, [*prompt, 7])


def pool_blocks(asks: Recorded, block: int) -> int:
    """Decode's blocks: the working set on the mean, by 1.5. The working set are the blocks that a
    prompt has had and a later one will have."""
    keys: list[list[int]] = []
    for ask in asks:
        key, own = 0, []
        for at in range(0, len(ask.prompt) - block + 1, block):
            key = hash((key, *ask.prompt[at : at + block]))
            own.append(key)
        keys.append(own)
    last = {key: i for i, own in enumerate(keys) for key in own}
    sizes, live = [], set[int]()
    for i, own in enumerate(keys):
        live.update(own)
        live.difference_update(key for key in own if last[key] == i)
        sizes.append(len(live))
    middle = sizes[len(sizes) // 4 : 3 * len(sizes) // 4]
    return round(sum(middle) / len(middle) / SIZE_OVER_POOL)
