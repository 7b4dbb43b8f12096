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

from prefixkv.conformance.hashing import VOCABULARY, splitmix64

Tokens = npt.NDArray[np.int32]
Seconds = npt.NDArray[np.float64]

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


class Run(NamedTuple):
    """`length` tokens that follow from `seed` alone; a shorter run begins a longer one."""

    seed: int
    length: int

    def tokens(self) -> Tokens:
        """Return the run's tokens of seeded chat text, int32 in [0, VOCABULARY).

        >>> Run(7, 3).tokens().tolist() == Run(7, 9).tokens()[:3].tolist()
        True
        """
        position = np.arange(1, self.length + 1, dtype=np.uint64)
        start = splitmix64(np.array([self.seed % 2**64], dtype=np.uint64))
        return (splitmix64(start + position * _ODD) % np.uint64(VOCABULARY)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Turn:
    """`text` comes after all that was said before; `output_len` is at least 1."""

    text: tuple[Run, ...]
    output_len: int

    @property
    def text_len(self) -> int:
        return sum(run.length for run in self.text)


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` counts turns; `max_request_tokens` is the longest prompt with its answer."""

    sessions: tuple[tuple[Turn, ...], ...]

    @property
    def num_requests(self) -> int:
        return sum(len(turns) for turns in self.sessions)

    @property
    def max_request_tokens(self) -> int:
        return max(
            sum(turn.text_len + turn.output_len for turn in turns) for turns in self.sessions
        )


def chat(
    seed: int,
    conversations: int,
    turns: int,
    *,
    system_tokens: int,
    user_tokens: int,
    output_tokens: int,
    requests: int | None = None,
) -> Workload:
    """Make conversations that share a system prompt; user texts and answers have log-normal
    lengths.

    Args:
        system_tokens: length of the system prompt, the first part of every first turn.
        user_tokens, output_tokens: medians; a draw is kept within a quarter and four times of its
            median.
        requests: cut to this many turns in all, the later turns of all conversations first.
    """
    draw = np.random.default_rng([seed, 1])
    shape = (conversations, turns)
    users = _log_normal(draw, user_tokens, shape)
    answers = _log_normal(draw, output_tokens, shape)
    total = conversations * turns if requests is None else min(requests, conversations * turns)
    system = Run(_mix(seed, 0), system_tokens)
    sessions = []
    for c in range(conversations):
        num_turns = total // conversations + (c < total % conversations)
        session = []
        for t in range(num_turns):
            user = Run(_mix(seed, 1, c, t), int(users[c, t]))
            text = (system, user) if t == 0 else (user,)
            session.append(Turn(text, int(answers[c, t])))
        if session:
            sessions.append(tuple(session))
    return Workload(tuple(sessions))


def _log_normal(
    draw: np.random.Generator, median: int, shape: tuple[int, int]
) -> npt.NDArray[np.int64]:
    lengths = np.exp(draw.normal(math.log(median), 0.5, shape)).round()
    return np.clip(lengths, max(1, median // 4), median * 4).astype(np.int64)


def _mix(*parts: int) -> int:
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = splitmix64(state ^ splitmix64(np.array([part % 2**64], dtype=np.uint64)))
    return int(state[0])
