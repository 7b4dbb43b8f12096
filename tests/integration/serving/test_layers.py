"""`prefixkv serve FOLDER` with models that have recurrent layers, and with sliding windows, as
processes with small pools."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.hybrid_models import make_folder
from tests.support.served import Expected, Serve, Served, at_rest, client_of, greedy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Expected]]:
    """The folder of a family, made once, and what its model says."""
    root = tmp_path_factory.mktemp("layers")
    torch.set_num_threads(1)  # quicker for models so small, beside the processes that are asked

    @cache
    def made(family: str) -> tuple[Path, Expected]:
        make_folder(family, root / family)
        return root / family, Expected(folder=root / family)

    return made


@pytest.mark.parametrize(
    ("family", "backend"), [("qwen3_next", "shm"), ("gpt_oss", "shm"), ("gemma3_text", "nixl")]
)
def test_turns_are_answered_as_generate_does_and_hit(
    folders: Callable[[str], tuple[Path, Expected]], family: str, backend: str
) -> None:
    """Log-probabilities too, which tell a state or a window that is not right where words do not.
    Over memory that prefill maps, and over NIXL."""
    folder, expected = folders(family)
    options = ("--served-name", "small", "--page-size", "8", "--chunk-tokens", "48")
    environ = {"PREFIXKV_TRANSPORT_BACKEND": backend}
    with Serve(str(folder), *options, **environ) as serve, client_of(serve) as client:
        talk = [{"role": "user", "content": "Please, tell me of the sea and its boats."}]
        before = 0
        for turn in range(3):
            answer = greedy(client, talk, 20, logprobs=True)
            said, prompt = answer.choices[0].message.content, expected.texts.chat(talk)
            tokens = expected.tokens(prompt, 20)
            assert said == expected.text(tokens)
            rows = expected.logprobs([*prompt, *tokens])[len(prompt) - 1 :]
            given = [one.logprob for one in answer.choices[0].logprobs.content]
            wanted = [row[token] for row, token in zip(rows, tokens, strict=False)]
            assert len(given) >= len(tokens) - 1  # an end token is not shown
            assert np.abs(np.array(given) - wanted[: len(given)]).max() < 1e-3
            hit = answer.usage.prefixkv["decode_hit_tokens"]
            assert answer.usage.prompt_tokens_details.cached_tokens == hit
            assert (hit > 0) == (turn > 0)
            # Prefill goes on behind the prompt before, in whole pages.
            assert answer.usage.prefixkv["prefill_hit_tokens"] == before // 8 * 8
            talk += [
                {"role": "assistant", "content": said}, {"role": "user", "content": "And?"},
            ]  # fmt: skip
            before = len(prompt)
        at_rest(serve)
        for role in ("decode", "prefill") if backend == "nixl" else ():
            figures, node = serve.figures(f"{role}-0"), f'node="{role}-0"'
            pages = {
                state: figures[f'prefixkv_window_pages{{group="sliding",{node},state="{state}"}}']
                for state in ("free", "owned", "cached", "held")
            }
            assert pages["owned"] == pages["held"] == 0 < pages["free"]
            assert (pages["cached"] > 0) == (role == "prefill")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("prefill --checkpoints 4", "checkpoints: 4 are of states"),
        ("decode --window-pages 4", "window_pages: 4 are of layers with a window, and the model"),
    ],
)
def test_a_model_without_states_and_windows_takes_no_memory_for_them(words: str, why: str) -> None:
    with Served("worker", *words.split()) as worker:
        assert worker.ended() != 0
        assert why in worker.shown()
