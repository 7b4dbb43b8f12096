"""Log-probabilities over real workers, and by OpenAI's client."""

from __future__ import annotations

from typing import Any

from tests.support.served import Expected

NEAR = 1e-4  # float32, and sums in another order
TEXT = "kaka tono mumu"
GREEDY = {"model": "small", "temperature": 0, "extra_body": {"ignore_eos": True}}


def check_legacy(expected: Expected, choice: Any, num_top: int, num: int) -> None:
    """A completion's log-probabilities against the model by itself."""
    prompt = expected.texts.plain(TEXT)
    said = expected.tokens(prompt, num)
    rows = expected.logprobs([*prompt, *said])[len(prompt) - 1 :]
    found = choice.logprobs
    assert choice.text == expected.text(said)
    assert "".join(found.tokens) == choice.text
    columns = (found.token_logprobs, found.top_logprobs, found.tokens, found.text_offset)
    assert {len(column) for column in columns} == {num}
    for (number, top, name, place), token, row in zip(
        zip(*columns, strict=True), said, rows, strict=False
    ):
        assert choice.text[place : place + len(name)] == name
        assert abs(number - row[token]) < NEAR
        assert top[name] == number
        assert num_top <= len(top) <= num_top + 1 or num_top > 1
        # As scorers do it: the greedy token is the one whose number is the largest.
        if num_top:
            assert (number == max(top.values())) == (row.argmax() == token)


def test_completions_have_them(client: Any, expected: Expected) -> None:
    for num_top in (0, 1, 5):
        for num in (6, 1):
            how = {"prompt": TEXT, "max_tokens": num, "logprobs": num_top, **GREEDY}
            answer = client.completions.create(**how)
            check_legacy(expected, answer.choices[0], num_top, num)
            assert answer.usage.completion_tokens == num
            pieces = list(client.completions.create(stream=True, **how))
            choice = answer.choices[0]
            assert "".join(one.choices[0].text for one in pieces) == choice.text
            parts = [one.choices[0].logprobs for one in pieces if one.choices[0].logprobs]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [x for part in parts for x in getattr(part, name)]
                if name in ("tokens", "text_offset"):
                    assert joined == getattr(choice.logprobs, name)
                assert len(joined) == len(choice.logprobs.tokens)
