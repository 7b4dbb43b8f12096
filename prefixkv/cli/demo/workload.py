"""Seeded conversations, as runs of tokens that are made on demand.

A *session* is a chain of turns: each prompt is everything said so far plus the turn's own text.
Equal seeds give equal prompts, as long as an engine's answers depend on the prompt alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

VOCABULARY: Final = 128_000  # token ids of runs are below it


class Run(NamedTuple):
    """`length` tokens that follow from `seed` alone."""

    seed: int | tuple[int, ...]
    length: int

    def tokens(self) -> Tokens:
        """Return the tokens, int32 in [0, VOCABULARY)."""
        draw = np.random.default_rng(self.seed)
        return draw.integers(VOCABULARY, size=self.length, dtype=np.int32)


class Turn(NamedTuple):
    """`text` comes after all that was said before; `output_len` is at least 1."""

    text: tuple[Run, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    sessions: tuple[tuple[Turn, ...], ...]

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.sessions))


def chat(
    seed: int, conversations: int, turns: int, *, system_tokens: int, user_tokens: int,
    output_tokens: int,
) -> Workload:  # fmt: skip
    """Make conversations that share a system prompt; user texts and answers have log-normal
    lengths.

    Args:
        system_tokens: length of the system prompt, the first part of every first turn.
        user_tokens, output_tokens: medians; a draw is kept within a quarter and four times of its
            median.
    """
    draw = np.random.default_rng([seed, 1])

    def lengths(median: int) -> npt.NDArray[np.int64]:
        drawn = np.exp(draw.normal(math.log(median), 0.5, (conversations, turns))).round()
        return np.clip(drawn, max(1, median // 4), median * 4).astype(np.int64)

    users, answers = lengths(user_tokens).tolist(), lengths(output_tokens).tolist()
    system = (Run((seed, 0), system_tokens),)
    return Workload(
        tuple(
            tuple(
                Turn(system * (t == 0) + (Run((seed, 1, c, t), users[c][t]),), answers[c][t])
                for t in range(turns)
            )
            for c in range(conversations)
        )
    )
