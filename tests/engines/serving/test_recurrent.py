"""`prefixkv serve FOLDER` with models that have recurrent layers, as processes with small pools."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.hybrid_models import make_folder
from tests.models.served import Expected, Serve, Served, at_rest, client_of

_Talk = list[dict[str, str]]


def _serve(folder: Path, *options: str) -> Serve:
    return Serve(str(folder), "--served-name", "small", *options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("hybrid")

    @cache
    def made(family: str) -> tuple[Path, Expected]:
        make_folder(family, root / family)
        return root / family, Expected(folder=root / family)

    return made


def _say(client: openai.OpenAI, talk: _Talk, num: int) -> Any:
    return client.chat.completions.create(
        model="small", messages=talk, max_tokens=num, temperature=0
    )


def test_turns_are_answered_as_generate_does_and_hit(folders: Any) -> None:
    folder, expected = folders("qwen3_next")
    with _serve(folder, "--page-size", "8", "--chunk-tokens", "64") as serve:
        with client_of(serve) as client:
            talk = [{"role": "user", "content": "Please, tell me of the sea and its boats."}]
            before = 0
            for turn in range(3):
                answer = _say(client, talk, 20)
                said = answer.choices[0].message.content
                assert said == expected.chat(talk, 20)
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
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "granitemoehybrid"])
def test_twenty_conversations_of_five_turns(folders: Any, family: str) -> None:
    """With pools that evict, fewer checkpoints than conversations, and clients that leave: every
    answer is `generate`'s, and what prefill computes in later turns is hardly more than is new."""
    folder, expected = folders(family)
    chance = random.Random(len(family))
    words = ["sea", "boat", "wind", "star", "harbour", "gull", "rope", "sail"]
    tables = ("--page-size", "8", "--chunk-tokens", "48", "--checkpoints", "14")
    pools = ("--prefill-pages", "260", "--decode-pages", "180")
    hits = computed = new = 0

    def turn(client: openai.OpenAI, talk: _Talk, leave: bool) -> Any:
        if not leave:
            return _say(client, talk, 16)
        with client.chat.completions.create(
            model="small", messages=talk, max_tokens=200, temperature=0, stream=True
        ) as stream:
            next(iter(stream))
        return None

    talks: list[_Talk] = [[] for _ in range(20)]
    lens = [0] * len(talks)
    with _serve(folder, *tables, *pools) as serve:
        with client_of(serve) as client, ThreadPoolExecutor(5) as pool:
            for number in range(5):
                for talk in talks:
                    text = " ".join(chance.choice(words) for _ in range(chance.randint(2, 9)))
                    talk.append({"role": "user", "content": text})
                leaves = [chance.random() < 0.1 for _ in talks]
                left = [pool.submit(turn, client, talk, True)
                        for talk, one in zip(talks, leaves, strict=True) if one]  # fmt: skip
                answers = list(pool.map(lambda talk: turn(client, talk, False), talks))
                for at, (talk, answer) in enumerate(zip(talks, answers, strict=True)):
                    said = answer.choices[0].message.content
                    assert said == expected.chat(talk, 16), (at, number)
                    split = answer.usage.prefixkv
                    hits += split["decode_hit_tokens"]
                    num = answer.usage.prompt_tokens
                    if number:
                        computed += split["computed_tokens"]
                        new += num - lens[at]
                    lens[at] = num
                    talk.append({"role": "assistant", "content": said})
                for one in left:
                    one.result()
        at_rest(serve)
    assert hits > 0
    print(family, "computed", computed, "new", new, "hits", hits)


def test_what_states_do_not_go_with_is_refused_by_name(folders: Any) -> None:
    folder, _ = folders("qwen3_next")
    for options, why in (
        (("--compute-below", "64"), "compute"),
        (("--carry-on",), "compute"),
        (("--host-memory", "2x"), "host_memory"),
    ):
        with Served("serve", str(folder), "--port", "0", "--status-port", "0", *options) as serve:
            assert serve.ended() != 0
            assert f"{why}: qwen3_next has recurrent layers" in "".join(serve.err)


def test_a_model_without_states_has_no_checkpoints() -> None:
    told = ("--port", "0", "--status-port", "0", "--checkpoints", "4")
    with Served("serve", *told) as serve:
        assert serve.ended() != 0
        assert "checkpoints: 4 are of states" in "".join(serve.err)
