"""Working sets 1.5 times as large as decode's pool, for the benchmark `vllm`: agents, chat, and a
few conversations that come back within seconds.

A workload is sessions, each a number of turns with pauses between them; all is drawn from a seed.
New sessions come at random, so that about as many live at any time. The pool's size follows from
the workload: two thirds of the blocks that were used and will be used again, on the mean.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

VOCABULARY: Final = 2000
SIZE_OVER_POOL: Final = 1.5
TRACE_BLOCK: Final = 512


@dataclass
class Session:
    """`history` is what the next prompt begins with, `turns` are pause, new tokens, and tokens of
    the answer."""

    begin_s: float
    history: list[int]
    turns: list[tuple[float, int, int]]
    seed: int


@dataclass(frozen=True)
class Ask:
    """One request. Whoever serves it calls `Workload.answered`."""

    now_s: float
    session: int
    prompt: list[int]
    num_tokens: int


def drawn(seed: int, number: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(10, VOCABULARY) for _ in range(number)]


class Workload:
    """The requests in the order in which they come, each after the session's last was answered."""

    def __init__(self, sessions: list[Session]) -> None:
        self.sessions = sessions
        self._due = [(one.begin_s, i) for i, one in enumerate(sessions)]
        heapq.heapify(self._due)

    def __iter__(self) -> Iterator[Ask]:
        while self._due:
            now_s, i = heapq.heappop(self._due)
            session = self.sessions[i]
            _, more, num_tokens = session.turns[0]
            new = drawn(session.seed * 1000 + len(session.turns), more)
            yield Ask(now_s, i, session.history + new, num_tokens)

    def answered(self, ask: Ask, tokens: list[int]) -> None:
        session = self.sessions[ask.session]
        session.history = ask.prompt + tokens
        pause_s = session.turns.pop(0)[0]
        if session.turns:
            heapq.heappush(self._due, (ask.now_s + pause_s, ask.session))


Make = Callable[[random.Random, float, int], Session]


def _agent(random_: random.Random, begin_s: float, seed: int) -> Session:
    """One of three agents, whose instructions and tools are 40 blocks; 6 to 16 calls of tools, each
    back after some seconds, one of twelve after minutes."""
    kind = random_.randrange(3)
    turns = []
    for _ in range(random_.randrange(6, 17)):
        slow = random_.random() < 1 / 12
        pause_s = random_.expovariate(1 / 240.0) if slow else random_.expovariate(1 / 12.0)
        turns.append((pause_s, random_.choice((40, 120, 200, 400)), 24))
    return Session(begin_s, drawn(kind, 1280), turns, seed)


def _chat(random_: random.Random, begin_s: float, seed: int) -> Session:
    """Nearly six of ten prompts are never gone on with; the others are, after a minute or two."""
    num = 1 if random_.random() < 0.56 else 2 + int(random_.expovariate(1 / 3.0))
    turns = []
    for turn in range(num):
        first = int(min(2500.0, random_.lognormvariate(6.3, 0.7)))
        turns.append((random_.expovariate(1 / 90.0), first if not turn else 160, 24))
    return Session(begin_s, drawn(9, 64), turns, seed)


def _few(random_: random.Random, begin_s: float, seed: int) -> Session:
    """8 turns, each 2 to 8 seconds after the last."""
    turns = [(random_.uniform(2.0, 8.0), 200 if turn else 1200, 24) for turn in range(8)]
    return Session(begin_s, [], turns, seed)


KINDS: Final[dict[str, tuple[Make, float]]] = {
    "agents": (_agent, 9.0),
    "chat": (_chat, 6.0),
    "few": (_few, 5.0),
}
"""How a session is made, and the seconds from one to the next, on the mean."""


def workload(kind: str, requests: int, seed: int = 0) -> Workload:
    """About so many requests."""
    make, every_s = KINDS[kind]
    random_ = random.Random(f"{kind} {seed}")
    sessions: list[Session] = []
    begin_s, num = 0.0, 0
    while num < requests:
        sessions.append(make(random_, begin_s, 1_000_000 * (seed + 1) + len(sessions)))
        num += len(sessions[-1].turns)
        begin_s += random_.expovariate(1 / every_s)
    return Workload(sessions)


class Recorded:
    """A trace of requests in blocks of 512 tokens. A block of ours stands for one of these."""

    def __init__(self, path: Path, block: int, requests: int) -> None:
        with path.open(encoding="utf-8") as file:
            self._rows = [json.loads(line) for line in islice(file, requests)]
        self._block = block

    def __iter__(self) -> Iterator[Ask]:
        for i, row in enumerate(self._rows):
            whole = row["hash_ids"][: row["input_length"] // TRACE_BLOCK]
            prompt = [one + 10 for one in whole for _ in range(self._block)]
            yield Ask(row["timestamp"] / 1000, i, [*prompt, 7], 1)

    def answered(self, ask: Ask, tokens: list[int]) -> None:
        """The trace has its prompts already."""


def pool_blocks(asks: Workload | Recorded, block: int) -> int:
    """Decode's blocks: the working set on the mean, by 1.5. The working set are the blocks that a
    prompt has had and a later one will have."""
    keys: list[list[int]] = []
    for ask in asks:
        asks.answered(ask, [3] * ask.num_tokens)
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
