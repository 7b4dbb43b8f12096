"""Seeded conversations, as runs of tokens that are made on demand.

A *session* is a chain of turns: each prompt is everything said so far plus the turn's own text.
Equal seeds give equal prompts, as long as an engine's answers depend on the prompt alone. So a
prompt is known only once the turn before it has been answered: `play` sends them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from prefixkv.cli.demo.workers import ChatAnswer, ModelWorkers

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


# --- playing it -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Played:
    answers: tuple[tuple[ChatAnswer, ...], ...]
    duration_s: float  # from the first turn's arrival to the last answer's end

    def all(self) -> list[ChatAnswer]:
        return [answer for conversation in self.answers for answer in conversation]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Chat texts of words at [first, end), and marks that begin and end what each says."""

    first: int
    end: int
    system: int
    user: int
    assistant: int
    stop: int

    def __call__(self, turn: Turn, is_first: bool) -> list[int]:
        """Return the tokens that follow the answer before, up to where the model continues. The
        first run of the first turn is the system's."""
        runs = [self._words(run) for run in turn.text]
        said = [self.system, *runs.pop(0), self.stop] if is_first else []
        # The answer before may have ended at its length, without a stop mark: the user's mark
        # follows either way.
        return [*said, self.user, *chain(*runs), self.stop, self.assistant]

    def _words(self, run: Run) -> list[int]:
        found: list[int] = (run.tokens() % (self.end - self.first) + self.first).tolist()
        return found


def small_vocabulary() -> Vocabulary:
    from prefixkv.engines.hf.small import WORDS, small_tokenizer

    ids = small_tokenizer().get_vocab()
    marks = (ids[f"<|{name}|>"] for name in ("system", "user", "assistant", "end"))
    return Vocabulary(WORDS.start, WORDS.stop, *marks)


async def play(
    workers: ModelWorkers, decode: str, workload: Workload, spell: Vocabulary, salt: str,
    on_answer: Callable[[int, int, ChatAnswer], object] = lambda *_: None,
) -> Played:  # fmt: skip
    """Play all conversations at once against one decode worker; a turn is sent as soon as the turn
    before it is answered. Raises ModelWorkerError; the other conversations are ended.

    Args:
        salt: of all requests; passes with different salts share nothing.
        on_answer: hears the numbers of conversation and turn with each answer.
    """
    begun_s = time.perf_counter()

    async def converse(number: int, turns: Sequence[Turn]) -> tuple[ChatAnswer, ...]:
        conversation: list[int] = []
        answers: list[ChatAnswer] = []
        for at, turn in enumerate(turns):
            conversation += spell(turn, at == 0)
            rid = f"{salt}.{number}.{at}"
            answer = await workers.ask(decode, rid, conversation, turn.output_len, salt)
            answers.append(answer)
            conversation += answer.tokens
            on_answer(number, at, answer)
        return tuple(answers)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(converse(number, turns))
                for number, turns in enumerate(workload.sessions)
            ]
    # The group has cancelled the others; the first failure explains theirs.
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    answers = tuple(task.result() for task in tasks)
    return Played(answers, time.perf_counter() - begun_s)
