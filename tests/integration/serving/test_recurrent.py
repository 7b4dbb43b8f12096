"""`prefixkv serve FOLDER` with models that have recurrent layers, as processes with small pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
    return folder_maker(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def served(folders: Any) -> Iterator[Callable[..., Serve]]:
    with default_servers(folders) as server:
        yield server


def test_turns_are_answered_as_generate_does_and_hit(
    folders: Any, served: Callable[..., Serve]
) -> None:
    """Over memory that prefill maps, the states' too; those in small pools over NIXL."""
    expected, serve = folders("qwen3_next")[1], served("qwen3_next", "shm")
    with client_of(serve) as client:
        talk = [{"role": "user", "content": "Please, tell me of the sea and its boats."}]
        before = 0
        for turn in range(3):
            answer = say(client, talk, 20)
            said = answer.choices[0].message.content
            assert said == expected.chat(talk, 20)
            for other in (said, said[:-3], f"{said} sea", said.partition(" ")[2]):
                assert expected.chat(talk, 20, other) == said
            num, usage = len(expected.texts.chat(talk)), answer.usage
            hit = usage.prefixkv["decode_hit_tokens"]
            assert usage.prompt_tokens_details.cached_tokens == hit
            assert (hit > 0) == (turn > 0)
            # Prefill goes on behind the prompt before, in whole pages.
            assert usage.prefixkv["prefill_hit_tokens"] == before // 8 * 8
            talk += [
                {"role": "assistant", "content": said}, {"role": "user", "content": "And?"},
            ]  # fmt: skip
            before = num
    at_rest(serve)


@pytest.mark.slow
def test_prefill_computes_little_more_than_what_is_new(
    folders: Any, served: Callable[..., Serve]
) -> None:
    """In later turns, where each conversation may have its checkpoint: hardly a tenth, and less
    than a page for each answer."""
    serve = served("qwen3_next", "shm")
    hit, computed, new = converse(serve, folders("qwen3_next")[1], 1)
    at_rest(serve)
    assert hit > 0
    assert new <= computed < 1.1 * new + 8 * 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "below"),
    [("qwen3_next", 0), ("nemotron_h", 0), ("granitemoehybrid", 0), ("granitemoehybrid", 40)],
)
def test_twenty_conversations_in_small_pools(folders: Any, family: str, below: int) -> None:
    """With pools that evict, fewer checkpoints than conversations, and clients that leave: every
    answer is `generate`'s. Also where decode computes what lacks few tokens."""
    folder, expected = folders(family)
    pools: tuple[str, ...] = (
        "--prefill-pages", "150", "--decode-pages", "120", "--checkpoints", "14",
    )  # fmt: skip
    if family == "granitemoehybrid":
        pools += ("--host-memory", "8x")
    with serve_folder(folder, *SIZES, *pools, "--compute-below", str(below)) as serve:
        hit, _, _ = converse(serve, expected, len(family), leave=0.2)
        evicted = [serve.figures(f"{role}-0")[
            f'prefixkv_evicted_pages_total{{node="{role}-0"}}'] for role in ("decode", "prefill")
        ]  # fmt: skip
        figures = serve.figures("decode-0")
        computed = figures['prefixkv_computed_requests_total{node="decode-0"}']
        if family == "granitemoehybrid":
            assert figures['prefixkv_host_hit_tokens_total{node="decode-0"}'] > 0
        at_rest(serve)
    assert hit > 0
    assert all(evicted)
    assert (computed > 20) == (below > 0)


@pytest.mark.slow
def test_a_model_without_states_has_no_checkpoints() -> None:
    with Served("worker", "prefill", "--checkpoints", "4") as worker:
        assert worker.ended() != 0
        assert "checkpoints: 4 are of states" in worker.shown()
