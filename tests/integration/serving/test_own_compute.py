"""`prefixkv serve` without options: decode computes what it lacks where that is sooner."""

from __future__ import annotations

from tests.support.served import Expected, Serve, at_rest, client_of, said_by

COMPUTED = 'prefixkv_computed_requests_total{node="decode-0"}'


class AsItIs(Serve):
    own_compute = ()


def test_decode_computes_a_turn_that_adds_little(expected: Expected) -> None:
    messages = [{"role": "user", "content": "Tell me of snow, and of all that lies below it."}]
    with AsItIs() as serve, client_of(serve) as client:
        for turn in range(3):
            said = said_by(client, messages, 12)
            assert said == expected.chat(messages, 12)
            messages += [
                {"role": "assistant", "content": said}, {"role": "user", "content": f"And {turn}?"},
            ]  # fmt: skip
        # Each turn adds fewer than 64 tokens; the first prompt is computed to know what that takes.
        assert serve.figures("decode-0")[COMPUTED] == 3
        at_rest(serve)
