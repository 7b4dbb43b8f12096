"""What the demo's clients send: seeded chats and replayed traces, as runs of tokens that are made
on demand.

A *session* is a chain of turns: each prompt is everything said so far plus the turn's own text, so
a prompt is known only once the turn before it has been answered. A trace's requests are sessions of
one turn. Equal seeds give equal prompts whatever the engine does, as long as its answers depend on
the prompt alone. `Clients` plays a workload against a schedule; it is told the time and knows no
clock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.cli.traces import blocks_in, number_in, read_lines
from prefixkv.testing.hashing import VOCABULARY, splitmix64

Tokens = npt.NDArray[np.int32]
Seconds = npt.NDArray[np.float64]

TRACE_BLOCK_TOKENS: Final = 512  # tokens that one block id of a Mooncake trace stands for
_MAX_TRACE_TOKENS: Final = 1 << 24  # a line that asks for more is garbage
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


class Run(NamedTuple):
    """`length` tokens that follow from `seed` alone; a shorter run of one seed is a prefix of a
    longer one."""

    seed: int
    length: int

    def tokens(self) -> Tokens:
        """The tokens, int32 in [0, VOCABULARY).

        >>> Run(7, 3).tokens().tolist() == Run(7, 9).tokens()[:3].tolist()
        True
        """
        position = np.arange(1, self.length + 1, dtype=np.uint64)
        start = splitmix64(np.array([self.seed % 2**64], dtype=np.uint64))
        return (splitmix64(start + position * _ODD) % np.uint64(VOCABULARY)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: `text` comes after all that was said before, `output_len` tokens are generated
    (at least 1)."""

    text: tuple[Run, ...]
    output_len: int

    @property
    def text_len(self) -> int:
        return sum(run.length for run in self.text)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions of turns. `arrival_shape` holds a trace's own arrival times (seconds, one a
    session), or None.

    `num_requests` counts turns; `max_request_tokens` is the longest prompt with its answer.
    """

    sessions: tuple[tuple[Turn, ...], ...]
    arrival_shape: tuple[float, ...] | None = None

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
    """Conversations that share a system prompt; user texts and answers have log-normal lengths.

    Args:
        system_tokens: length of the shared system prompt, the first part of every first turn.
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


def trace(path: Path, requests: int | None, block_tokens: int) -> Workload:
    """A Mooncake JSONL trace, scaled so that a block of 512 tokens becomes one of `block_tokens`.

    Each line is an object with `timestamp` (ms, never falling), `input_length`, `output_length`
    (tokens) and `hash_ids` (one a block of the prompt, the last may be partial). Lengths are scaled
    and rounded up, so a prompt has at least one token in every block it names. Reads `requests`
    lines, or all.

    Raises: TraceError if the file cannot be read or a line is malformed; the message has the line's
    number.
    """
    times: list[float] = []

    def session(entry: Any) -> tuple[Turn]:
        arrival_s, turn = _trace_turn(entry, block_tokens)
        if times and arrival_s < times[-1]:
            raise ValueError(f"timestamp {arrival_s * 1e3:g} ms is before the last line's")
        times.append(arrival_s)
        return (turn,)

    sessions = read_lines(path, requests, session)
    return Workload(tuple(sessions), tuple(t - times[0] for t in times))


def arrival_times(workload: Workload, seed: int, rate: float | None) -> list[Seconds]:
    """When each turn of each session falls due, in seconds from the start; `rate` in requests a
    second.

    `None` makes all due at once: a turn then follows the answer before it without a pause.
    Otherwise a trace keeps its own pattern, stretched to the rate, and chats get a Poisson process,
    each arrival falling to one of the conversations that have been left alone longest, so that
    users think before they reply.
    """
    due = [np.zeros(len(turns)) for turns in workload.sessions]
    if rate is None:
        return due
    if workload.arrival_shape is not None:
        shape = np.asarray(workload.arrival_shape)
        span = shape[-1] if shape[-1] > 0 else 1.0
        for own, at in zip(due, shape / span * (len(shape) / rate), strict=True):
            own[:] = at
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


def _log_normal(
    draw: np.random.Generator, median: int, shape: tuple[int, int]
) -> npt.NDArray[np.int64]:
    lengths = np.exp(draw.normal(math.log(median), 0.5, shape)).round()
    return np.clip(lengths, max(1, median // 4), median * 4).astype(np.int64)


def _mix(*parts: int) -> int:
    """One seed from several numbers."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = splitmix64(state ^ splitmix64(np.array([part % 2**64], dtype=np.uint64)))
    return int(state[0])


def _trace_turn(entry: Any, block_tokens: int) -> tuple[float, Turn]:
    """One line of a trace: its arrival (seconds) and its turn."""
    if not isinstance(entry, dict):
        raise TypeError("not an object")
    arrival_ms = number_in(entry, "timestamp", 0, 2**53, (int, float))
    input_len = number_in(entry, "input_length", 1, _MAX_TRACE_TOKENS)
    output_len = number_in(entry, "output_length", 0, _MAX_TRACE_TOKENS)
    ids = blocks_in(entry, input_len, TRACE_BLOCK_TOKENS)
    if not all(0 <= name < 2**63 for name in ids):
        raise TypeError("hash_ids is not a list of integers in [0, 2**63)")
    last_len = input_len - (len(ids) - 1) * TRACE_BLOCK_TOKENS
    lengths = [*[block_tokens] * (len(ids) - 1), _scaled(last_len, block_tokens)]
    text = tuple(map(Run, ids, lengths))
    return arrival_ms / 1e3, Turn(text, _scaled(max(output_len, 1), block_tokens))


def _scaled(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens * block_tokens // TRACE_BLOCK_TOKENS)
