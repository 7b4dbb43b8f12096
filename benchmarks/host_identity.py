"""Claim: behind a pool that holds a tenth of what its clients come back to, with the rest in host
memory, no answer differs from the model's own, whatever is loaded, computed by decode, left by its
client, or lost with its prefill worker.

    python -m benchmarks host_identity --json benchmarks/results/host_identity.json

A prefill and a decode worker, as `prefixkv worker` runs them, with a small model of random weights,
and conversations that take turns: each comes back when all others have been there, so what it had
is in host memory. Meanwhile clients leave in the middle of an answer, and come back at once with
the same prompt; and the prefill worker is killed again and again. Every token is compared with what
transformers' `generate()` says. Decode asks prefill for all that it lacks, or computes what is
little (`compute.below`) and all while prefill is gone (`failure_policy="local"`).

A request that is refused or cut because of a kill is counted, and asked again. Where both
tokens are as likely to the model by itself, but for rounding, a difference counts as a tie.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer

from prefixkv.cli.chats.command import small_vocabulary
from prefixkv.cli.chats.workers import PREFILL, ModelWorkers
from prefixkv.cli.chats.workload import Run, Turn
from prefixkv.cli.figures import machine
from prefixkv.engines.hf.reference import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving.http import ApiError
from prefixkv.serving.wire import Ask, TokenEvent

PAGE_SIZE: Final = 16
TURNS: Final = 4
FIRST_TOKENS, MORE_TOKENS, ANSWER_TOKENS = (150, 300), (20, 150), (8, 32)
AT_ONCE: Final = 24  # conversations; their pages are more than the pool
LEAVE: Final = 0.1  # of the requests, after some of their tokens
NEAR: Final = 1e-4  # of logits: two sums in another order
DECODE: Final = "decode"
CASES: Final[dict[str, dict[str, Any]]] = {
    "decode asks": {},
    "decode computes": {"compute_below": 96, "failure_policy": "local"},
}
_COUNTED: Final = (
    "host_hit_tokens", "host_loads", "host_loaded_pages", "host_written_pages",
    "host_missed_pages", "host_copies_failed", "computed_requests", "failovers", "retractions",
    "evicted_pages",
)  # fmt: skip
_ENDS: Final = ("finished", "left", "cut", "refused")
_AUDIT_S: Final = 60.0

Prompts = dict[tuple[int, ...], list[int]]  # what the model says by itself


def host_identity(
    conversations: Annotated[int, typer.Option(help="Conversations of each case.")] = 200,
    kills: Annotated[int, typer.Option(help="Kills of the prefill worker in each case.")] = 8,
    only: Annotated[str, typer.Option(help="One case alone.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """Answers of chats that come back from host memory, token by token, with aborts and kills."""
    if conversations < AT_ONCE or kills < 0:
        raise ConfigError(f"at least {AT_ONCE} conversations and 0 kills are needed")
    rows = []
    reference = Reference(small_model(1, trial=False))
    said: Prompts = {}
    with tempfile.TemporaryDirectory(prefix="prefixkv-host-") as name:
        folder = Path(name)
        reference.save(folder)
        small_tokenizer().save(str(folder / "tokenizer.json"))
        for case, settings in CASES.items():
            if only not in ("", case):
                continue
            begun_s = time.monotonic()
            row = asyncio.run(_Case(folder, settings, conversations, kills).run())
            answers = row.pop("answers")
            # After the workers have ended, which need the processor.
            row |= _compare(reference, answers, said)
            rows.append({"case": case, **row, "duration_s": round(time.monotonic() - begun_s)})
            print(json.dumps(rows[-1], indent=1), flush=True)
    if json_file is not None:
        recipe: dict[str, Any] = {
            "command": f"python -m benchmarks host_identity --conversations {conversations} "
            f"--kills {kills}",
            "page_size": PAGE_SIZE, "turns": TURNS, "first_tokens": FIRST_TOKENS,
            "more_tokens": MORE_TOKENS, "answer_tokens": ANSWER_TOKENS, "at_once": AT_ONCE,
            "settings": CASES, "answers_compared": "all, those that a client left or a kill ended "
            "as far as they came", **machine(),
        }  # fmt: skip
        json_file.write_text(json.dumps({"recipe": recipe, "rows": rows}, indent=1) + "\n")


class _Answer:
    """An answer as far as it came. `end`: "finished", "left" by its client, "cut", or "refused"
    before its first token."""

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self.prompt, self.most = tuple(prompt), most
        self.tokens: list[int] = []
        self.end, self.why = "refused", ""


class _Workers(ModelWorkers):
    """The workers, asked output by output, and killed."""

    def outputs(self, ask: Ask) -> AsyncGenerator[TokenEvent, None]:
        """Answer a prompt. Closing the generator is a client that leaves."""
        return self._fleets[DECODE].generate(ask)

    def kill_prefill(self) -> None:
        """Kill the prefill worker; it is started again."""
        with suppress(ProcessLookupError):
            os.kill(self._infos[PREFILL].pid, signal.SIGKILL)

    def audit(self) -> None:
        """Raise HTTPError if a law of decode's node does not hold. Blocks."""
        request = urllib.request.Request(
            f"{self._infos[DECODE].url}/audit", method="POST",
            headers={"authorization": f"Bearer {self._key}"},
        )  # fmt: skip
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_AUDIT_S):
            pass


class _Case:
    """One case: all conversations, turn by turn."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], conversations: int, kills: int
    ) -> None:
        self._draw, self._chance = np.random.default_rng(1), random.Random(1)
        self._conversations, self._num_kills = conversations, kills
        most = FIRST_TOKENS[1] + (TURNS - 1) * MORE_TOKENS[1] + TURNS * (ANSWER_TOKENS[1] + 8)
        mean = sum(FIRST_TOKENS) + (TURNS - 1) * sum(MORE_TOKENS) + TURNS * sum(ANSWER_TOKENS)
        self.working_set = conversations * (mean // 2) // PAGE_SIZE
        self.pages = max(self.working_set // 10, 2 * (most // PAGE_SIZE + 1))
        prefill = {"num_pages": self.pages, "page_size": PAGE_SIZE}
        # Without a reserve, so that requests are retracted.
        host = {"host_memory_num_pages": 4 * self.working_set, "reserve_tokens": 0}
        decode = {**prefill, **host, **settings}
        self._workers = _Workers(folder, prefill, {DECODE: decode})
        self._answers: list[_Answer] = []
        self._counts: Counter[str] = Counter()

    async def run(self) -> dict[str, Any]:
        """Play the case. Returns its counts and its answers."""
        spell = small_vocabulary()
        low, high = FIRST_TOKENS
        talks = [
            spell(Turn((Run(chat, 4), Run(chat, int(num))), 1), True)
            for chat, num in enumerate(self._draw.integers(low, high, self._conversations))
        ]
        total = TURNS * self._conversations
        # By the answers that have ended: the machine's speed does not move them.
        self._due = [total * (at + 1) // (self._num_kills + 1) for at in range(self._num_kills)]
        async with self._workers:
            for turn in range(TURNS):
                order = self._chance.sample(range(self._conversations), self._conversations)
                turns = iter(order)

                async def client(turn: int, turns: Any) -> None:
                    for chat in turns:
                        answer = await self._ask(f"{chat}.{turn}", talks[chat])
                        num = int(self._draw.integers(*MORE_TOKENS))
                        more = spell(Turn((Run(1000 * chat + turn + 7, num),), 1), False)
                        talks[chat] = [*talks[chat], *answer.tokens, *more]

                await asyncio.gather(*(client(turn, turns) for _ in range(AT_ONCE)))
            figures, left = await self._workers.settled(DECODE)
            await asyncio.to_thread(self._workers.audit)
        counted = {
            name: int(figures[f'prefixkv_{name}_total{{node="{DECODE}"}}']) for name in _COUNTED
        }
        return {
            "conversations": self._conversations, "pool_pages": self.pages,
            "working_set_pages": self.working_set, "host_pages": 4 * self.working_set,
            **{name: self._counts[name] for name in _ENDS}, "kills": self._counts["kills"],
            "pages_left": sum(left.values()), **counted, "answers": self._answers,
        }  # fmt: skip

    async def _ask(self, rid: str, prompt: Sequence[int]) -> _Answer:
        """Ask until it is answered to its end."""
        most = int(self._draw.integers(*ANSWER_TOKENS))
        leaves = self._chance.randrange(1, most) if self._chance.random() < LEAVE else 0
        attempt = 0
        while True:
            answer = await self._once(f"{rid}.{attempt}", prompt, most, leaves)
            self._answers.append(answer)
            self._counts[answer.end] += 1
            if answer.end == "finished":
                if self._due and self._counts["finished"] >= self._due[0]:
                    self._due.pop(0)
                    self._workers.kill_prefill()
                    self._counts["kills"] += 1
                return answer
            if answer.end != "left":
                await asyncio.sleep(1.0)
            attempt, leaves = attempt + 1, 0

    async def _once(self, rid: str, prompt: Sequence[int], most: int, leaves: int) -> _Answer:
        answer = _Answer(prompt, most)
        try:
            async with aclosing(
                self._workers.outputs(Ask(rid, [*prompt], "", "", most))
            ) as outputs:
                async for output in outputs:
                    answer.why = output.error
                    if output.token is not None:
                        answer.tokens.append(output.token)
                        answer.end = "cut"
                    if output.finish in ("stop", "length"):
                        answer.end = "finished"
                    elif leaves and len(answer.tokens) >= leaves:
                        answer.end = "left"
                        break
        except ApiError as error:
            answer.why = str(error)
        if answer.end == "cut":
            print(f"{rid} was cut behind {len(answer.tokens)} tokens: {answer.why}", flush=True)
        return answer


def _compare(reference: Reference, answers: Sequence[_Answer], said: Prompts) -> dict[str, int]:
    """Count the answers that are not the model's own. `said` remembers those."""
    found = {"answers": len(answers), "tokens": 0, "ties": 0, "different": 0}
    for answer in answers:
        if answer.prompt not in said:
            said[answer.prompt] = reference.answer(answer.prompt, max(ANSWER_TOKENS))
        # The model's tokens do not depend on how many are asked for.
        wanted = said[answer.prompt][: answer.most]
        if answer.end != "finished":
            wanted = wanted[: len(answer.tokens)]
        found["tokens"] += len(answer.tokens)
        if answer.tokens != wanted:
            is_tie = _is_tie(reference, answer.prompt, wanted, answer.tokens)
            found["ties" if is_tie else "different"] += 1
    return found


@torch.inference_mode()
def _is_tie(reference: Reference, prompt: Sequence[int], wanted: list[int], got: list[int]) -> bool:
    """Return whether two answers part at a token where the model itself has both as likely."""
    pairs = enumerate(zip(wanted, got, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), None)
    if at is None:
        return False  # one is longer
    ids = torch.tensor([[*prompt, *wanted[:at]]])
    row = reference.model(input_ids=ids, logits_to_keep=1).logits[0, -1]
    return bool(abs(row[wanted[at]] - row[got[at]]) < NEAR)
