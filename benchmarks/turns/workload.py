"""The stand-in's clients, who send seeded chats.

`Clients` plays a workload against a schedule; it is told the time and knows no clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixkv.cli.demo.workload import Tokens, Workload

Seconds = npt.NDArray[np.float64]


def arrival_times(workload: Workload, seed: int, rate: float | None) -> list[Seconds]:
    """When each turn of each session falls due, in seconds from the start; `rate` in requests a
    second.

    `None` makes all due at once: a turn then follows the answer before it without a pause.
    Otherwise turns come as a Poisson process, each arrival falling to one of the conversations that
    have been left alone longest, so that users think before they reply.
    """
    due = [np.zeros(len(turns)) for turns in workload.sessions]
    if rate is None:
        return due
    draw = np.random.default_rng([seed, 2])
    # of sessions, left alone longest first
    waiting = deque(draw.permutation(len(workload.sessions)).tolist())
    next_turn = [0] * len(workload.sessions)
    now_s = 0.0
    while waiting:
        now_s += draw.exponential(1 / rate)
        pick = int(draw.integers(0, max(1, len(waiting) // 2)))
        session = waiting[pick]
        del waiting[pick]
        due[session][next_turn[session]] = now_s
        next_turn[session] += 1
        if next_turn[session] < len(due[session]):
            waiting.append(session)
    return due


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One turn as its client sends it. `room` is its number, unique in a pass; `arrival_s` is when
    it fell due."""

    room: int
    session: int
    turn: int
    arrival_s: float
    tokens: Tokens
    output_len: int


class Clients:
    """Plays a workload: says which calls to make now, and takes their answers.

    A turn arrives at its due time, or when the turn before it has been answered if that is later.
    At most `concurrency` calls are open; one that waits for another to end has arrived all the
    same. Owned by one thread.
    """

    def __init__(self, workload: Workload, due: Sequence[Seconds], concurrency: int) -> None:
        self._workload = workload
        self._due = due
        self._concurrency = concurrency
        self._history: list[Tokens] = [np.empty(0, dtype=np.int32) for _ in workload.sessions]
        self._arrivals = [(float(times[0]), session, 0) for session, times in enumerate(due)]
        heapq.heapify(self._arrivals)
        self._rooms = 0
        self.open = 0
        self.finished = 0
        self.failed = 0

    @property
    def ended(self) -> int:
        return self.finished + self.failed

    @property
    def done(self) -> bool:
        return not self._arrivals and not self.open

    def next_arrival_s(self) -> float | None:
        """When `take` may have something again; None if that takes an answer first."""
        return self._arrivals[0][0] if self._arrivals and self.open < self._concurrency else None

    def take(self, now_s: float) -> list[Call]:
        """The calls to make now, in the order of their arrival."""
        calls = []
        while self._arrivals and self._arrivals[0][0] <= now_s and self.open < self._concurrency:
            arrival_s, session, number = heapq.heappop(self._arrivals)
            turn = self._workload.sessions[session][number]
            tokens = np.concatenate([self._history[session], *(run.tokens() for run in turn.text)])
            calls.append(Call(self._rooms, session, number, arrival_s, tokens, turn.output_len))
            self._rooms += 1
            self.open += 1
        return calls

    def answer(self, call: Call, output: Sequence[int], now_s: float) -> bool:
        """The call's answer is complete. Returns whether its session goes on with another turn."""
        self.open -= 1
        self.finished += 1
        following = call.turn + 1
        if following == len(self._due[call.session]):
            self._history[call.session] = np.empty(0, dtype=np.int32)
            return False
        said = [call.tokens, np.asarray(output, dtype=np.int32)]
        self._history[call.session] = np.concatenate(said)
        arrival_s = max(now_s, float(self._due[call.session][following]))
        heapq.heappush(self._arrivals, (arrival_s, call.session, following))
        return True

    def fail(self, call: Call) -> None:
        """The call failed: its session ends, and its remaining turns count as failed too."""
        self.open -= 1
        self.failed += len(self._due[call.session]) - call.turn
