"""Conversations over `prefixkv serve FOLDER` with tiny models of `benchmarks/hybrid_models.py`, and
what the models say by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import openai
import torch

from benchmarks.hybrid_models import make_folder
from tests.support.served import Expected, Serve, client_of

_Talk = list[dict[str, str]]
_WORDS = ("sea", "boat", "wind", "star", "gull", "rope")
SIZES = ("--page-size", "8", "--chunk-tokens", "48")


def serve_folder(folder: Path, *options: str, **environ: str) -> Serve:
    return Serve(str(folder), "--served-name", "small", *options, **environ)


@contextmanager
def default_servers(made: Callable[[str], tuple[Path, Expected]]) -> Iterator[Callable[..., Serve]]:
    """Yields what starts, once for a family, a server with the pools and checkpoints of the
    defaults, which hold 20 conversations. All end with the block."""
    with ExitStack() as stack:

        @cache
        def server(family: str, backend: str) -> Serve:
            where = {"PREFIXKV_TRANSPORT_BACKEND": backend}
            return stack.enter_context(serve_folder(made(family)[0], *SIZES, **where))

        yield server


def folder_maker(root: Path) -> Callable[[str], tuple[Path, Expected]]:
    """Makes the folder of a family, once, and what its model says."""
    torch.set_num_threads(1)  # quicker for models so small, beside the processes that are asked

    @cache
    def made(family: str) -> tuple[Path, Expected]:
        make_folder(family, root / family)
        return root / family, Expected(folder=root / family)

    return made


def say(client: openai.OpenAI, talk: _Talk, num: int, **options: Any) -> Any:
    return client.chat.completions.create(
        model="small", messages=talk, max_tokens=num, temperature=0, **options
    )


def converse(
    serve: Serve, expected: Expected, seed: int, leave: float = 0.0
) -> tuple[int, int, int]:
    """20 conversations of 5 turns, five at once; some clients ask besides, and leave. Returns the
    tokens that decode hit, and of later turns what prefill computed and what was new."""
    chance = random.Random(seed)
    hit = computed = new = 0
    talks: list[_Talk] = [[] for _ in range(20)]
    lens = [0] * len(talks)

    def leave_early(talk: _Talk) -> None:
        with client.chat.completions.create(
            model="small", messages=talk, max_tokens=60, temperature=0, stream=True
        ) as stream:
            next(iter(stream))

    with client_of(serve) as client, ThreadPoolExecutor(5) as pool:
        for turn in range(5):
            for talk in talks:
                text = " ".join(chance.choice(_WORDS) for _ in range(chance.randint(1, 5)))
                talk.append({"role": "user", "content": text})
            left = [pool.submit(leave_early, talk) for talk in talks if chance.random() < leave]
            answers = list(pool.map(lambda talk: say(client, talk, 8), talks))
            for one in left:
                one.result()
            for at, (talk, answer) in enumerate(zip(talks, answers, strict=True)):
                said = answer.choices[0].message.content
                assert said == expected.chat(talk, 8, said), (at, turn)
                num, split = answer.usage.prompt_tokens, answer.usage.prefixkv
                hit += split["decode_hit_tokens"]
                if turn:
                    computed += split["computed_tokens"]
                    new += num - lens[at]
                lens[at] = num
                talk.append({"role": "assistant", "content": said})
    return hit, computed, new
