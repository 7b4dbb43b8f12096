"""Generated traces, for replays of eviction policies: five workloads.

Each is a list of requests as in Mooncake's traces: `timestamp` (ms), `input_length` and
`output_length` (tokens), `hash_ids` (one a block of 512 tokens; equal ids mean an equal prefix).
The same name and seed give the same trace on every machine. Lengths and pauses follow the two
recorded traces (conversation: a first prompt has 18 blocks in the middle, most do not return, and
pauses last 70 to 400 s; coding agents: 185 blocks, 23 turns, pauses of 17 s in the middle and 109 s
at the ninth tenth); what each workload does otherwise is in its function.

    python -m benchmarks.workloads NAME [SEED] > trace.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import exp, log
from random import Random
from typing import Any

import numpy as np

from prefixkv.cli.replay import Trace
from prefixkv.spi import RadixKey

BLOCK_TOKENS = 512
SEED = 11

Entry = dict[str, Any]


@dataclass
class _Draw:
    """A seeded source of numbers, block ids and requests."""

    seed: int
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self._ids = count()

    def blocks(self, number: int) -> list[int]:
        """New block ids."""
        return [next(self._ids) for _ in range(number)]

    def around(self, middle: float, spread: float, low: float, high: float) -> float:
        """Log-normal with this median; `spread` is the deviation of its logarithm."""
        return min(high, max(low, exp(self.random.gauss(log(middle), spread))))

    def size(self, middle: float, spread: float, high: float, low: float = 1) -> int:
        """As `around`, whole."""
        return round(self.around(middle, spread, low, high))

    def arrivals(self, begin_s: float, end_s: float, a_second: float) -> list[float]:
        """Times of a Poisson process."""
        times = []
        now_s = begin_s + self.random.expovariate(a_second)
        while now_s < end_s:
            times.append(now_s)
            now_s += self.random.expovariate(a_second)
        return times

    def request(self, now_s: float, path: list[int], answer: int) -> None:
        """A request with these whole blocks as its prompt, and so many tokens of answer."""
        self.entries.append(
            {
                "timestamp": round(now_s * 1000),
                "input_length": len(path) * BLOCK_TOKENS,
                "output_length": answer,
                "hash_ids": list(path),
            }
        )

    def talk(
        self,
        now_s: float,
        path: list[int],
        returns: Callable[[int], float],
        pause_s: Callable[[], float],
        added: Callable[[], int],
        most: int = 300,
    ) -> None:
        """A session from `now_s` on that begins with `path`.

        Args:
            returns: how likely a turn after turn 1, 2, ... is.
            pause_s, added: until the next turn, and how many blocks that has more.
            most: blocks, with which a session ends.
        """
        path = list(path)
        turn = 1
        while len(path) <= most:
            self.request(now_s, path, self.size(350, 0.7, 2000, 8))
            if self.random.random() >= returns(turn):
                return
            turn += 1
            now_s += pause_s()
            path += self.blocks(added())

    def trace(self, end_s: float) -> list[Entry]:
        """All requests up to a time, in their order."""
        ordered = sorted(self.entries, key=lambda entry: entry["timestamp"])
        return [entry for entry in ordered if entry["timestamp"] < end_s * 1000]


def chat(seed: int = SEED) -> list[Entry]:
    """Chat with other return times: 100 minutes, .8 sessions a second.

    A third of the first prompts return and then .65 of the turns; half of the sessions pause for
    15 s in the middle (a quick exchange), half for 15 minutes. All share one block.
    """
    draw = _Draw(seed)
    common = draw.blocks(1)
    for begin_s in draw.arrivals(0, 6000, 0.8):
        middle_s = draw.random.choice((15.0, 900.0))
        draw.talk(
            begin_s,
            common + draw.blocks(draw.size(16, 0.8, 200)),
            returns=lambda turn: 0.33 if turn == 1 else 0.65,
            pause_s=lambda middle_s=middle_s: draw.around(middle_s, 0.7, 1, 5000),  # type: ignore[misc]
            added=lambda: draw.size(2.5, 1.0, 60),
        )
    return draw.trace(6000)


def agents(seed: int = SEED) -> list[Entry]:
    """Agents with longer tools: 3 hours, 110 sessions, of .97 continuing turns.

    A tool runs for 90 s in the middle, one of ten for more than 6 minutes. Three kinds of agent,
    each with 12 to 30 blocks of tools and system prompt, and 70 blocks of its own in the middle.
    One turn of 25 starts a helper, with the same tools and a prompt of its own.
    """
    draw = _Draw(seed)
    kinds = [draw.blocks(number) for number in (12, 20, 30)]
    for _ in range(110):
        begin_s = draw.random.uniform(0, 9500)
        kind = draw.random.choice(kinds)
        task = draw.blocks(draw.size(70, 0.8, 400))

        def pause_s(begin_s: float = begin_s, kind: list[int] = kind) -> float:
            if draw.random.random() < 0.04:
                helper = kind + draw.blocks(draw.size(8, 0.7, 60))
                draw.talk(
                    begin_s + draw.random.uniform(0, 2000),
                    helper,
                    returns=lambda _: 0.9,
                    pause_s=lambda: draw.around(20, 0.8, 2, 400),
                    added=lambda: draw.size(3, 0.9, 30),
                )
            return draw.around(90, 1.1, 3, 3000)

        draw.talk(
            begin_s, kind + task, returns=lambda _: 0.97, most=600, pause_s=pause_s,
            added=lambda: draw.size(3, 1.0, 60),
        )  # fmt: skip
    return draw.trace(10_800)


def flood(seed: int = SEED) -> list[Entry]:
    """A flood of single prompts: 80 minutes of conversations, and from minute 15 to 30 and 45 to 65
    besides them 4 prompts a second that never return.

    Conversations: .5 sessions a second, .4 of the first prompts return and .75 of the others, after
    100 s in the middle.
    """
    draw = _Draw(seed)
    common = draw.blocks(1)
    for begin_s in draw.arrivals(0, 4800, 0.5):
        draw.talk(
            begin_s,
            common + draw.blocks(draw.size(18, 0.7, 150)),
            returns=lambda turn: 0.4 if turn == 1 else 0.75,
            pause_s=lambda: draw.around(100, 0.9, 2, 2000),
            added=lambda: draw.size(2.5, 1.0, 60),
        )
    for begin, end in ((15, 30), (45, 65)):
        for now_s in draw.arrivals(60 * begin, 60 * end, 4.0):
            draw.request(now_s, common + draw.blocks(draw.size(12, 0.6, 100)), 100)
    return draw.trace(4800)


def drift(seed: int = SEED) -> list[Entry]:
    """A slow drift from chat to agents: 3 hours.

    From the first minute to the last the sessions fall from .8 to .02 a second, the return from .3
    to .97, the middle pause from 200 to 20 s, and the first prompt grows from 16 to 60 blocks.
    """
    draw = _Draw(seed)
    common = draw.blocks(1)
    for begin_s in draw.arrivals(0, 10_800, 0.8):
        done = begin_s / 10_800
        if draw.random.random() > 0.025**done:  # thinned: fewer sessions as they grow longer
            continue
        draw.talk(
            begin_s,
            common + draw.blocks(draw.size(16 + 44 * done, 0.7, 200)),
            returns=lambda turn, done=done: (
                0.3 + 0.67 * done + (0.2 * (1 - done) if turn > 1 else 0)
            ),  # type: ignore[misc]
            pause_s=lambda done=done: draw.around(200 - 180 * done, 0.9, 2, 3000),  # type: ignore[misc]
            added=lambda: draw.size(2.5, 1.0, 60),
        )
    return draw.trace(10_800)


def retrieval(seed: int = SEED) -> list[Entry]:
    """Retrieval with shared documents: 80 minutes, 2 questions a second.

    A prompt is a common block, one of 600 documents (4 to 90 blocks; the k-th is asked for in
    proportion to 1 / k to the .8) and a question of 1 or 2 blocks. A quarter of the questions are
    followed by another to the same answer, after 40 s in the middle.
    """
    draw = _Draw(seed)
    common = draw.blocks(1)
    documents = [draw.blocks(draw.size(22, 0.7, 90, 4)) for _ in range(600)]
    weights = [1 / rank**0.8 for rank in range(1, 601)]
    for now_s in draw.arrivals(0, 4800, 2.0):
        (document,) = draw.random.choices(documents, weights)
        draw.talk(
            now_s,
            common + document + draw.blocks(draw.random.choice((1, 2))),
            returns=lambda _: 0.25,
            pause_s=lambda: draw.around(40, 0.8, 2, 600),
            added=lambda: draw.random.choice((1, 2)),
        )
    return draw.trace(4800)


WORKLOADS: dict[str, Callable[[int], list[Entry]]] = {
    "chat": chat, "agents": agents, "flood": flood, "drift": drift, "retrieval": retrieval,
}  # fmt: skip


def generate(name: str, seed: int = SEED) -> list[Entry]:
    """The workload of this name. Raises KeyError for another."""
    return WORKLOADS[name](seed)


def mix(traces: Sequence[Trace]) -> Trace:
    """Merge traces with blocks of one size by time, each in a namespace of its own."""

    # The number of the trace goes into the namespace, beside the one that the trace has itself.
    def apart(key: RadixKey, number: int) -> RadixKey:
        return RadixKey(np.frombuffer(key.data, "<i4"), (number, key.namespace))

    requests = [
        replace(request, key=apart(request.key, number))
        for number, trace in enumerate(traces)
        for request in trace.requests
    ]
    names = "+".join(trace.name for trace in traces)
    return replace(traces[0], name=names, requests=requests).in_order()


if __name__ == "__main__":
    for line in generate(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else SEED):
        print(json.dumps(line))
