"""`prefixkv serve FOLDER` with models that have recurrent layers, and with sliding windows, as
processes with small pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.hybrid_chats import (
    SIZES,
    converse,
    default_servers,
    folder_maker,
    say,
    serve_folder,
)
from tests.support.served import Serve, Served, at_rest, client_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return folder_maker(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def served(folders: Any) -> Iterator[Callable[..., Serve]]:
    with default_servers(folders) as server:
        yield server


SERVED = pytest.mark.parametrize(
    ("family", "backend"), [("qwen3_next", "shm"), ("gpt_oss", "shm"), ("gemma3_text", "nixl")]
)


@SERVED
def test_turns_are_answered_as_generate_does_and_hit(
    folders: Any, served: Callable[..., Serve], family: str, backend: str
) -> None:
    """Log-probabilities too, which tell a state or a window that is not right where words do not.
    Over memory that prefill maps, and over NIXL."""
    expected, serve = folders(family)[1], served(family, backend)
    with client_of(serve) as client:
        talk = [{"role": "user", "content": "Please, tell me of the sea and its boats."}]
        before = 0
        for turn in range(3):
            answer = say(client, talk, 20, logprobs=True)
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
    ("family", "below", "more"),
    [
        ("qwen3_next", 0, ()),
        ("nemotron_h", 0, ()),
        ("granitemoehybrid", 40, ("--host-memory", "8x")),
        ("gemma3_text", 0, ("--host-memory", "8x", "--prefill-window-pages", "60",
                            "--decode-window-pages", "18")),
        ("gpt_oss", 40, ("--host-memory", "8x", "--prefill-window-pages", "60",
                         "--decode-window-pages", "90")),
    ],
)  # fmt: skip
def test_twenty_conversations_in_small_pools(
    folders: Any, family: str, below: int, more: tuple[str, ...]
) -> None:
    """With pools that evict, windows for a few requests, fewer checkpoints than conversations, and
    clients that leave: every answer is `generate`'s. Also where decode computes what lacks few
    tokens, which takes windows for a chunk, and with host memory."""
    folder, expected = folders(family)
    pools = (
        "--prefill-pages", "150", "--decode-pages", "120", "--checkpoints", "14",
        "--compute-below", str(below), *more,
    )  # fmt: skip
    with serve_folder(folder, *SIZES, *pools) as serve:
        hit, _, _ = converse(serve, expected, len(family), leave=0.2)
        evicted = [serve.figures(f"{role}-0")[
            f'prefixkv_evicted_pages_total{{node="{role}-0"}}'] for role in ("decode", "prefill")
        ]  # fmt: skip
        figures = serve.figures("decode-0")
        computed = figures['prefixkv_computed_requests_total{node="decode-0"}']
        if "--host-memory" in more:
            assert figures['prefixkv_host_hit_tokens_total{node="decode-0"}'] > 0
        at_rest(serve)
    assert hit > 0
    assert all(evicted)
    assert (computed > 20) == (below > 0)


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
