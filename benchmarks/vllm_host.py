"""Conversations that come back to vLLM: with host memory and own compute on decode, and without.

One prefill server, whose connector sends at most `LINK_BYTES_PER_S`, and two decode servers, each
with blocks for a part of the conversations: as today, and with host memory and `compute_below`. One
is asked at a time; the others rest. Each pass has a cache salt of its own, so
prefill has nothing of the others'. A round is a pass with each, and one more as today (A against
A); the order changes from round to round. Two conversations are active at a time, and their turns
come in an order that is drawn. All tokens of a round have to be equal.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.agents import Sides, play_lanes, ratios
from benchmarks.report import Row
from benchmarks.vllm_pair import BLOCK, Answer, Pair, Shape
from benchmarks.vllm_servers import Sizes, make_model

SIZES: Final = Sizes(512, 8, 8, 4, 64, "float32")
FIRST, MORE, OUT, TURNS = 1200, 150, 16, 4
"""Tokens of a conversation's first turn, what each later one adds, and an answer; turns."""
ACTIVE: Final = 2
SHARE: Final = 0.25
"""Of all conversations' blocks, those that a decode server has."""
HOST: Final = "8x"
BELOW: Final = 2048
LINK_BYTES_PER_S: Final = 125_000_000
TODAY, AGAIN, BOTH = "today", "today again", "host memory and own compute"
SIDES: Final = Sides(BOTH, TODAY, AGAIN)
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    TODAY: {},
    BOTH: {"host_memory": HOST, "compute_below": BELOW},
}


def shape_of(sessions: int) -> Shape:
    """Prefill has blocks for all that one pass has."""
    each = -(-(FIRST + TURNS * (MORE + OUT)) // BLOCK)
    return Shape(
        SIZES, 512, 2 * sessions * each, max(3 * each, int(SHARE * sessions * each)) + 1,
        {"transport": {"max_bytes_per_s": LINK_BYTES_PER_S}}, OPTIONS,
    )  # fmt: skip


def settle(pair: Pair, name: str) -> None:
    """Until nothing is copied, sent or held."""
    keys = "prefixkv_host_copies", "prefixkv_held_blocks", "kv_cache_usage_perc"
    for server in (pair.decodes[name], pair.prefill):
        end_s = time.monotonic() + 60.0
        while any(server.metrics()[f"vllm:{key}"] for key in keys):
            if time.monotonic() > end_s:
                raise TimeoutError(f"{name} holds blocks for a minute")
            time.sleep(0.05)


def order(seed: int, turns: list[int]) -> Iterator[int]:
    """Yield each of the sessions as often as it has turns: their first turns one after the other,
    and then in an order that is drawn."""
    sessions = [*range(len(turns))]
    later = sessions * (TURNS - 1)
    random.Random(seed).shuffle(later)
    yield from (*sessions, *later)


def _pass(pair: Pair, kind: str, sessions: int, number: int) -> dict[str, Any]:
    name = TODAY if kind == AGAIN else kind
    decode, prefill = pair.decodes[name], pair.prefill
    before = decode.metrics(), prefill.metrics()
    answers: dict[tuple[int, int], Answer] = {}  # by session and turn

    def text(session: int, turn: int) -> list[int]:
        draw = random.Random(1000 * (1000 * number + session) + turn)
        return [draw.randrange(10, 2000) for _ in range(MORE if turn else FIRST)]

    async def ask(session: int, turn: int, prompt: list[int]) -> list[int]:
        asked = pair.ask(prompt, OUT, name, cache_salt=f"{kind} {number}")
        answers[session, turn] = await asyncio.wrap_future(asked)
        return answers[session, turn].tokens

    def in_order(lane: int, turns: list[int]) -> Iterator[int]:
        return order(number + lane, turns)

    asyncio.run(play_lanes([TURNS] * sessions, ACTIVE, text, ask, in_order))
    settle(pair, name)
    after = decode.metrics(), prefill.metrics()

    def grown(side: int, key: str) -> float:
        return after[side].get(f"vllm:{key}", 0.0) - before[side].get(f"vllm:{key}", 0.0)

    later = sorted(1e3 * answer.ttft_s for (_, turn), answer in answers.items() if turn)
    return {
        "later_ttft_p50_ms": round(statistics.median(later), 2),
        "later_ttft_p90_ms": round(later[int(0.9 * len(later))], 2),
        "sent_mib": round(grown(1, "prefixkv_bytes_sent_total") / (1 << 20), 1),
        "prefill_tokens": int(grown(1, "prompt_tokens_total")),
        "host_loaded_blocks": int(grown(0, "prefixkv_host_loaded_blocks_total")),
        "host_missed_blocks": int(grown(0, "prefixkv_host_missed_blocks_total")),
        "computed_requests": int(grown(0, "prefixkv_computed_requests_total")),
        "tokens": [answers[at].tokens for at in sorted(answers)],
    }


def measure(python: str, pairs: int, sessions: int) -> tuple[Row, Row]:
    """Rounds of passes; the ratios of each, and the recipe."""
    kinds = [*OPTIONS, AGAIN]
    passes: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    equal = True
    with tempfile.TemporaryDirectory(prefix="prefixkv-vllm-host-") as folder:
        model, shape = make_model(python, Path(folder) / "model", SIZES), shape_of(sessions)
        with Pair("ours", python, model, shape) as pair:
            for name in OPTIONS:  # so that no pass has the servers' first steps in it
                pair.ask([*range(10, 200)], OUT, name, cache_salt="first").result()
            for number in range(pairs):
                said = {}
                for kind in kinds if number % 2 == 0 else kinds[::-1]:
                    row = _pass(pair, kind, sessions, number)
                    said[kind] = row.pop("tokens")
                    passes[kind].append(row)
                    print(kind, row, flush=True)
                equal &= all(tokens == said[TODAY] for tokens in said.values())
    found: Row = {"tokens_equal": equal, "decode_blocks": shape.decode_blocks - 1}
    keys = ("later_ttft_p50_ms", "later_ttft_p90_ms", "sent_mib")
    found |= ratios(passes, SIDES, keys)
    return {**found, "passes": passes}, {
        "sessions": sessions, "first": FIRST, "more": MORE, "out": OUT, "turns": TURNS,
        "active": ACTIVE, "host": HOST, "share": SHARE, "below": BELOW,
        "link_bytes_per_s": LINK_BYTES_PER_S,
    }  # fmt: skip
