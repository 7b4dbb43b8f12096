"""Conversations with a model. Each prompt is all that was said before plus the turn's own text, so
it is known only once the turn before has been answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from prefixkv.cli.chats.workers import ChatAnswer, ModelWorkers
from prefixkv.cli.chats.workload import Run, Seconds, Turn, Workload

Speller = Callable[[Turn, bool], list[int]]
"""Function that returns the tokens of a turn's text; its second argument is True for the first
turn."""


@dataclass(frozen=True, slots=True)
class Played:
    answers: tuple[tuple[ChatAnswer, ...], ...]
    duration_s: float  # from the first turn's arrival to the last answer's end

    def all(self) -> list[ChatAnswer]:
        return [answer for conversation in self.answers for answer in conversation]


class Vocabulary:
    """Chat texts of words at [first, end), and marks that begin and end what each says."""

    def __init__(
        self, first: int, end: int, system: int, user: int, assistant: int, stop: int
    ) -> None:
        self._first, self._num = first, end - first
        self._marks: Final = system, user, assistant, stop

    def __call__(self, turn: Turn, is_first: bool) -> list[int]:
        """Return the tokens that follow the answer before, up to where the model continues. The
        first run of the first turn is the system's."""
        system, user, assistant, stop = self._marks
        tokens: list[int] = []
        runs = list(turn.text)
        if is_first:
            tokens += [system, *self._words(runs.pop(0)), stop]
        # The answer before may have ended at its length, without a stop mark: the user's mark
        # follows either way.
        return [
            *tokens,
            user,
            *(word for run in runs for word in self._words(run)),
            stop,
            assistant,
        ]

    def _words(self, run: Run) -> list[int]:
        return [int(token) % self._num + self._first for token in run.tokens()]


async def play(
    workers: ModelWorkers,
    decode: str,
    workload: Workload,
    speller: Speller,
    salt: str,
    due: Sequence[Seconds] | None = None,
    ignore_end: bool = False,
    on_answer: Callable[[], object] = lambda: None,
) -> Played:
    """Play all conversations at once against one decode worker. Raises ModelWorkerError; the other
    conversations are ended.

    A turn arrives at its due time, or when the turn before it has been answered if that is later;
    its `ttft_s` counts from there.

    Args:
        due: as in `arrival_times`; None: as soon as the turn before is answered.
        salt: of all requests; passes with different salts share nothing.
        on_answer: called at the end of each answer.
    """
    begun_s = time.perf_counter()

    async def converse(number: int, turns: Sequence[Turn]) -> tuple[ChatAnswer, ...]:
        conversation: list[int] = []
        answers: list[ChatAnswer] = []
        for at, turn in enumerate(turns):
            conversation += speller(turn, at == 0)
            # Due times count from the start of the pass; a negative rest means it is late, and
            # sends at once.
            if due is not None:
                await asyncio.sleep(begun_s + float(due[number][at]) - time.perf_counter())
            rid = f"{salt}.{number}.{at}"
            answer = await workers.ask(decode, rid, conversation, turn.output_len, salt, ignore_end)
            answers.append(answer)
            conversation += answer.tokens
            on_answer()
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
