"""Conversations with a model. Each prompt is all that was said before plus the turn's own text, so
it is known only once the turn before has been answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from prefixkv.cli.demo.workers import ChatAnswer, ModelWorkers
from prefixkv.cli.demo.workload import Run, Turn, Workload


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
    ignore_end: bool = False,
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
            answer = await workers.ask(decode, rid, conversation, turn.output_len, salt, ignore_end)
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
