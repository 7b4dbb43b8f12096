"""`prefixkv serve` without options: decode computes what it lacks where that is sooner, and goes on
alone while its prefill worker is gone."""

from __future__ import annotations

import os
import signal

import openai

from tests.support.patience import until
from tests.support.served import Expected, Serve, at_rest, client_of

COMPUTED = 'prefixkv_computed_requests_total{node="decode-0"}'


class AsItIs(Serve):
    own_compute = ()


def _say(client: openai.OpenAI, messages: list[dict[str, str]], num_tokens: int) -> str:
    answer = client.chat.completions.create(
        model="small", messages=messages, max_tokens=num_tokens, temperature=0
    )
    said: str = answer.choices[0].message.content
    return said


def test_decode_computes_a_turn_that_adds_little_and_answers_without_prefill(
    expected: Expected,
) -> None:
    messages = [{"role": "user", "content": "Tell me of snow, and of all that lies below it."}]
    with AsItIs() as serve, client_of(serve) as client:
        for turn in range(3):
            said = _say(client, messages, 12)
            assert said == expected.chat(messages, 12)
            messages += [
                {"role": "assistant", "content": said}, {"role": "user", "content": f"And {turn}?"},
            ]  # fmt: skip
        figures = serve.figures("decode-0")
        # Each turn adds fewer than 64 tokens; the first prompt is computed to know what that takes.
        assert figures[COMPUTED] == 3
        dead = serve.workers()["prefill-0"]["pid"]
        os.kill(dead, signal.SIGKILL)
        new = [{"role": "user", "content": "A new chat: of rain, and of rivers that it fills."}]
        assert _say(client, new, 12) == expected.chat(new, 12)
        # Another one: the front may not have noticed yet.
        until(lambda: serve.workers().get("prefill-0", {"pid": dead})["pid"] != dead)
        at_rest(serve)
