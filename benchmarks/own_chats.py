"""Claim: the rule of own compute costs chats nothing where prefill is idle, since it knows what
prefill has to compute again; and chunks keep to `itl_share` over time.

    python -m benchmarks own_chats --json benchmarks/results/own_chats.json

The chats of `own_compute` in simulated time: four at once, each turn as soon as the one before is
answered, and passes of new chats one after the other by one decode worker that remembers what it
has measured. Passes of the engine, and prefill's, cost what `own_compute` measured on a Xeon,
times a lognormal factor of 10%. Decode keeps all; prefill keeps what it has computed itself:
"keeps all", or a third of all chats ("as pool"). The rule is `prefixkv.decode.sources.Sources`.

`off`: all is asked of prefill. `not told`: the rule without `again` and `goes_on`, so it does not
see what prefill lacks of prompts that decode has computed. Deterministic: no clock is looked at.
"""

from __future__ import annotations

import json
import platform
import random
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Source, Sources
from prefixkv.protocol.ids import RoomKey

CHATS, TURNS, FIRST_TOKENS, OUTPUT_TOKENS, PAGE_SIZE = 4, 5, 600, 24, 16
MOST_TOKENS = FIRST_TOKENS + TURNS * (512 + OUTPUT_TOKENS)
PAUSE_S = 10.0  # between passes
NOISE = 0.1
# Seconds: of decode's pass, each running request, each prompt in it, each of its tokens; of
# prefill's answer, and each token that it computes.
STEP_S, RUNNING_S, PROMPT_S, TOKEN_S = 0.002, 0.0065, 0.0085, 0.0004
ANSWER_S, PREFILL_TOKEN_S = 0.03, 0.0004
SHARES = (0.5, 0.25, 0.1)


@dataclass(slots=True, eq=False)
class Chat:
    """One conversation: how long its prompt is, what decode and prefill have of it, and since which
    token prefill has nothing (`unsent`; -1: it has all that decode was sent)."""

    name: int
    news: deque[int]
    prompt: int = 0
    cached: int = 0
    unsent: int = -1
    asked_s: float = 0.0
    left: int = 0  # tokens of its answer
    is_first: bool = True


class Prefill:
    """A prefill worker that answers one prompt after the other, and keeps so many tokens of the
    chats that were asked last."""

    def __init__(self, most_tokens: float, chance: random.Random) -> None:
        self._most, self._chance = most_tokens, chance
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._free_s = 0.0

    def ask(self, chat: Chat, now_s: float) -> float:
        """Return when the prompt of a chat is answered."""
        computed = chat.prompt - self._kept.pop(chat.name, 0)
        took_s = (ANSWER_S + PREFILL_TOKEN_S * computed) * _factor(self._chance)
        self._free_s = max(self._free_s, now_s) + took_s
        self._kept[chat.name] = chat.prompt
        while sum(self._kept.values()) > self._most and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return self._free_s


class Decode:
    """A decode worker that remembers what it has measured.

    Args:
        config: None: all is asked of prefill.
        is_told: the rule knows what prefill lacks.
    """

    def __init__(
        self, config: ComputeConfig | None, is_told: bool, prefill: Prefill, seed: int
    ) -> None:
        self._sources, self._is_told, self._prefill = Sources(config), is_told, prefill
        self._chance = random.Random(seed)
        self._now_s, self._rooms = 0.0, 0
        self.ttft_s: list[float] = []  # of later turns
        self.itl_s: list[float] = []
        self.here = 0

    def play(self, chats: list[Chat]) -> None:
        """Answer all turns of these chats."""
        self._now_s += PAUSE_S
        asked = list(chats)
        for chat in chats:
            chat.asked_s = self._now_s
        sent: list[tuple[float, Chat, RoomKey, int]] = []
        local: dict[Chat, int] = {}
        running: list[Chat] = []
        while asked or sent or local or running:
            # 1. What has come, and what is asked.
            for at in [one for one in sent if one[0] <= self._now_s]:
                sent.remove(at)
                self._sources.arrived("p", at[2], at[3], self._now_s)
                at[1].unsent = -1
                self._begin(at[1], running)
            for chat in asked:
                self._choose(chat, local, sent, len(running))
            asked = []
            if not local and not running:
                self._now_s = max(self._now_s, min(one[0] for one in sent))
                continue
            # 2. A pass.
            begin_running = list(running)
            self._sources.next_pass(len(running))
            chunks = self._chunks(local, len(running))
            tokens = sum(num for _, num in chunks)
            pass_s = STEP_S + RUNNING_S * len(running) + PROMPT_S * len(chunks) + TOKEN_S * tokens
            pass_s *= _factor(self._chance)
            self._now_s += pass_s
            if chunks:
                self._sources.chunk(tokens, pass_s, len(running), self._now_s, len(chunks))
            else:
                self._sources.step(pass_s, len(running))
            for chat, num in chunks:
                local[chat] -= num
                if not local[chat]:
                    del local[chat]
                    self._begin(chat, running)
            for chat in begin_running:
                self.itl_s.append(pass_s)
                chat.left -= 1
                if not chat.left:
                    running.remove(chat)
                    chat.cached = (chat.prompt + OUTPUT_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE
                    chat.prompt += OUTPUT_TOKENS
                    chat.is_first = False
                    if chat.news:
                        chat.asked_s = self._now_s
                        asked.append(chat)

    def _begin(self, chat: Chat, running: list[Chat]) -> None:
        if not chat.is_first:
            self.ttft_s.append(self._now_s - chat.asked_s)
        chat.left = OUTPUT_TOKENS - 1
        running.append(chat)

    def _chunks(self, local: dict[Chat, int], running: int) -> list[tuple[Chat, int]]:
        found, left = [], self._sources.chunk_tokens(running)
        for chat, missing in local.items():
            if left > 0:
                num = min(left, missing)
                found.append((chat, num))
                left -= num + self._sources.further_prompt_tokens(running)
        return found

    def _choose(
        self, chat: Chat, local: dict[Chat, int],
        sent: list[tuple[float, Chat, RoomKey, int]], running: int,
    ) -> None:  # fmt: skip
        chat.prompt += chat.news.popleft()
        missing = chat.prompt - chat.cached
        again = chat.cached - chat.unsent if chat.unsent >= 0 else 0
        told: dict[str, Any] = {"again": again, "goes_on": chat.cached > 0}
        source = self._sources.choose(
            missing, sum(local.values()), running, "p", self._now_s,
            **(told if self._is_told else {}),
        )  # fmt: skip
        if source is Source.HERE:
            self.here += 1
            local[chat] = missing
            chat.unsent = chat.cached if chat.unsent < 0 else chat.unsent
            return
        self._rooms += 1
        key = RoomKey(self._rooms, 0)
        self._sources.promised("p", key, self._now_s, missing, again=again if self._is_told else 0)
        sent.append((self._prefill.ask(chat, self._now_s), chat, key, missing))


def _factor(chance: random.Random) -> float:
    return chance.lognormvariate(-(NOISE**2) / 2, NOISE)


def _chats(number: int, chance: random.Random) -> list[Chat]:
    low, high = np.log(64), np.log(512)
    return [
        Chat(
            CHATS * number + at,
            deque(
                [FIRST_TOKENS] + [int(np.exp(chance.uniform(low, high))) for _ in range(TURNS - 1)]
            ),
        )
        for at in range(CHATS)
    ]


def measured(
    case: str, config: ComputeConfig | None, is_told: bool, passes: int, seed: int
) -> dict[str, float]:
    """Play all passes; of the first one, in which nothing is known, nothing counts."""
    kept = MOST_TOKENS * CHATS / 3 if case == "as pool" else float("inf")
    decode = Decode(config, is_told, Prefill(kept, random.Random(seed)), seed)
    chance = random.Random(seed)
    for number in range(passes):
        decode.play(_chats(number, chance))
        if not number:
            decode.ttft_s, decode.itl_s, decode.here = [], [], 0
    ttft, itl = np.array(decode.ttft_s), np.array(decode.itl_s)
    return {
        "later_ttft_p50_s": float(np.percentile(ttft, 50)),
        "later_ttft_p99_s": float(np.percentile(ttft, 99)),
        "itl_mean_s": float(itl.mean()),
        "itl_p99_s": float(np.percentile(itl, 99)),
        "here": decode.here / (CHATS * TURNS * (passes - 1)),
    }


def row(case: str, share: float, passes: int, seeds: int) -> dict[str, Any]:
    """Measure one case with one `itl_share`: ratios by the same without own compute, medians over
    the seeds."""
    config = ComputeConfig(itl_share=share)
    found: dict[str, Any] = {"prefill": case, "itl_share": share}
    off = [measured(case, None, False, passes, seed) for seed in range(seeds)]
    for name, is_told in (("rule", True), ("not told", False)):
        on = [measured(case, config, is_told, passes, seed) for seed in range(seeds)]
        found[name] = {
            key: round(float(np.median([a[key] / b[key] for a, b in zip(on, off, strict=True)])), 3)
            for key in ("later_ttft_p50_s", "later_ttft_p99_s", "itl_mean_s", "itl_p99_s")
        }
        found[name]["here"] = round(float(np.median([one["here"] for one in on])), 3)
    return found


def own_chats(
    passes: Annotated[int, typer.Option(help="Of new chats, by one decode worker.")] = 30,
    seeds: Annotated[int, typer.Option(help="Repetitions.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """The chats of own_compute in simulated time, with what prefill has to compute again."""
    rows = []
    for case in ("as pool", "keeps all"):
        for share in SHARES:
            rows.append(row(case, share, passes, seeds))
            print(json.dumps(rows[-1]), flush=True)
    if json_file is not None:
        recipe = {
            "command": f"python -m benchmarks own_chats --passes {passes} --seeds {seeds}",
            "ratios": "by the same without own compute, medians over the seeds",
            "python": platform.python_version(),
        }
        text = json.dumps({"recipe": recipe, "rows": rows}, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
