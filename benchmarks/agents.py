"""Agents that come back to decode: with an option and without, in rounds of passes.

A prefill worker on one core and two decode workers on another, as `prefixkv worker` runs them; the
decode worker that is not asked waits meanwhile. A round is a pass with the option and two without,
which are A against A; the order changes from round to round.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import Row
from prefixkv.cli.demo.command import SIZES
from prefixkv.cli.demo.workers import PREFILL, ChatAnswer, ModelWorkers
from prefixkv.cli.demo.workload import Run, Turn, Workload, small_vocabulary
from prefixkv.engines.hf.models import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer
from prefixkv.errors import ConfigError

CHATS = {
    "conversations": 4, "turns": 5, "first_tokens": 600, "least_tokens": 64, "most_tokens": 512,
    "output_tokens": 24,
}  # fmt: skip
PAGE_SIZE = 16
NEAR, NEAR_SHARE = 3, 0.6
"""Of the turns so many are of one of the last `NEAR` sessions of their lane."""
KEYS = ("later_ttft_p50_ms", "later_ttft_p99_ms", "itl_p99_ms", "sent_mib")


class Sides(NamedTuple):
    """Names of the decode workers with the option and without; of the second passes without."""

    on: str
    off: str
    again: str


class Served(NamedTuple):
    """A model in a folder, and the commands that its prefill and decode workers run within."""

    folder: Path
    within: Sequence[Sequence[str]]


@contextmanager
def served() -> Iterator[Served]:
    """Save the small model and its tokenizer, for prefill on one core and decode on another. Raises
    ConfigError where there is one alone."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two cores are needed")
    with tempfile.TemporaryDirectory(prefix="prefixkv-served-") as name:
        folder = Path(name)
        Reference(small_model(1, **SIZES, trial=False)).save(folder)
        small_tokenizer().save(str(folder / "tokenizer.json"))
        yield Served(folder, [("taskset", "-c", str(core)) for core in cores[:2]])


def agents(seed: int, num_chats: int = CHATS["conversations"]) -> Workload:
    """Return chats whose first prompts are long and have nothing in common, and whose later turns
    add 64 to 512 tokens, equally many of each power of two."""
    draw = np.random.default_rng(seed)
    low, high = np.log(CHATS["least_tokens"]), np.log(CHATS["most_tokens"])
    sessions = []
    for chat in range(num_chats):
        lengths = [CHATS["first_tokens"]]
        lengths += np.exp(draw.uniform(low, high, CHATS["turns"] - 1)).astype(int).tolist()
        marks = 8  # the marks of a chat
        texts = [Run(1_000 * seed + 100 * chat + at, num - marks) for at, num in enumerate(lengths)]
        first = (Run(7, 4), texts[0])  # a system prompt of a few words
        turns = [first, *((text,) for text in texts[1:])]
        sessions.append(tuple(Turn(text, CHATS["output_tokens"]) for text in turns))
    return Workload(tuple(sessions))


def pages_of_longest(workload: Workload) -> int:
    """Pages of the longest prompt with its answer, and of a few words more."""
    longest = max(
        sum(turn.output_len + sum(run.length for run in turn.text) for turn in turns)
        for turns in workload.sessions
    )
    return -(-(longest + 64) // PAGE_SIZE)


def near_order(lane: int, turns: list[int]) -> Iterator[int]:
    """Yield the sessions of a lane in the order of their turns: `turns` says how many each has."""
    draw = np.random.default_rng(1000 * lane + len(turns))
    left = dict(enumerate(turns))
    last: list[int] = []
    while left:
        near = [one for one in last[-NEAR:] if one in left]
        among = near if near and draw.random() < NEAR_SHARE else list(left)
        chosen = among[int(draw.integers(len(among)))]
        last = [*(one for one in last if one != chosen), chosen]
        left[chosen] -= 1
        if not left[chosen]:
            del left[chosen]
        yield chosen


async def play_lanes(
    turns: Sequence[int], active: int, text: Callable[[int, int], list[int]],
    ask: Callable[[int, int, list[int]], Awaitable[list[int]]],
    order: Callable[[int, list[int]], Iterator[int]] = near_order,
) -> None:  # fmt: skip
    """Play sessions of so many `turns`, `active` at a time, each lane its own ones. `text` is what
    a session adds in a turn; `ask` sends session, turn and prompt, and returns the answer."""

    async def lane(number: int) -> None:
        mine = range(number, len(turns), active)
        said: dict[int, list[int]] = {session: [] for session in mine}
        turn_of = dict.fromkeys(mine, 0)
        for at in order(number, [turns[session] for session in mine]):
            session = mine[at]
            said[session] += text(session, turn_of[session])
            said[session] += await ask(session, turn_of[session], said[session])
            turn_of[session] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(active):
            group.create_task(lane(number))


async def compared(
    model: Served, sides: Sides, settings: Mapping[str, Mapping[str, Any]], pairs: int,
    workloads: Callable[[int], Workload], active: int,
) -> Row:  # fmt: skip
    """Play `pairs` rounds, each with a workload of its own, `active` sessions at a time; returns
    the figures of each pass, and their ratios. `settings` are of the workers by name."""
    passes: dict[str, list[Row]] = {side: [] for side in sides}
    speller = small_vocabulary()
    decodes = {name: settings[name] for name in sides[:2]}
    async with ModelWorkers(model.folder, settings[PREFILL], decodes, *model.within) as workers:

        async def one_pass(name: str, sessions: Sequence[Sequence[Turn]], salt: str) -> Row:
            answers: list[tuple[int, ChatAnswer]] = []

            async def ask(session: int, turn: int, prompt: list[int]) -> list[int]:
                rid, most = f"{salt}.{session}.{turn}", sessions[session][turn].output_len
                answers.append((turn, await workers.ask(name, rid, prompt, most, salt, True)))
                return answers[-1][1].tokens

            def text(session: int, turn: int) -> list[int]:
                return speller(sessions[session][turn], turn == 0)

            before, begun_s = await _counted(workers, name), time.perf_counter()
            await play_lanes([*map(len, sessions)], active, text, ask)
            duration_s = time.perf_counter() - begun_s
            await workers.settled(name)
            sent, computed = np.subtract(await _counted(workers, name), before).tolist()
            return {
                **_figures(answers), "sent_mib": round(sent / (1 << 20), 1),
                "computed": int(computed), "duration_s": round(duration_s, 3),
            }  # fmt: skip

        for name in decodes:  # so that no pass has the nodes' wire-up in it
            await workers.ask(name, "first", [*range(16)], 2, f"first {name}")
        for number in range(pairs):
            for side in sides if number % 2 == 0 else (*sides[1:], sides.on):
                name = sides.on if side == sides.on else sides.off
                row = await one_pass(name, workloads(2 + number).sessions, f"{side} {number}")
                passes[side].append(row)
                print(side, row, flush=True)
    return {"passes": passes, **ratios(passes, sides)}


async def _counted(workers: ModelWorkers, name: str) -> tuple[float, float]:
    """Bytes that prefill has sent, and requests that decode has computed itself."""
    sent, computed = await workers.figures(PREFILL), await workers.figures(name)
    return (
        sum(value for key, value in sent.items() if "prefixkv_sent_bytes_total" in key),
        computed.get(f'prefixkv_computed_requests_total{{node="{name}"}}', 0.0),
    )


def _figures(answers: Sequence[tuple[int, ChatAnswer]]) -> Row:
    later = [answer for turn, answer in answers if turn]
    ttft_ms = 1e3 * np.array([answer.ttft_s for answer in later])
    itl_ms = 1e3 * np.array([gap for _, answer in answers for gap in answer.itl_s])
    usages = [answer.usage for answer in later]
    hits = sum(one.decode_hit_tokens for one in usages) / sum(one.prompt_tokens for one in usages)
    times = {"later_ttft": ttft_ms, "itl": itl_ms}
    return {
        f"{name}_p{percent}_ms": round(float(np.percentile(of, percent)), 2)
        for name, of in times.items() for percent in (50, 99)
    } | {"hit_ratio": round(hits, 4)}  # fmt: skip


def ratios(passes: Mapping[str, Sequence[Row]], sides: Sides, keys: Sequence[str] = KEYS) -> Row:
    """Of each figure the ratios of the pairs and their median: with, by without; and without, by
    without again."""
    found: Row = {}
    for key in keys:
        for name, one in (("on_by_off", sides.on), ("off_by_off", sides.again)):
            both = zip(passes[one], passes[sides.off], strict=True)
            each = [round(a[key] / b[key], 4) for a, b in both]
            found[f"{key}_{name}"] = {"median": round(statistics.median(each), 4), "ratios": each}
    return found
