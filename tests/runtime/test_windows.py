"""A model with window layers and a draft over real nodes: every answer is the model's, decode's
hits count full pages alone, and prefill goes on from its checkpoints."""

from __future__ import annotations

import pytest

from tests.models.window_engine import WindowPair


@pytest.mark.parametrize("window", [2, 5, 10, 30])
@pytest.mark.parametrize("checkpoints", [0, 4])
def test_turns_of_a_conversation(window: int, checkpoints: int) -> None:
    with WindowPair(checkpoints=checkpoints, window=window, decode=(64, 16)) as pair:
        said = list(range(30))
        for turn in range(4):
            before = len(said)
            said = pair.serve(f"r{turn}", said) + [turn] * 5
            if turn:
                # Decode has all of the last turn but its last token, which has no KV.
                assert pair.hits[f"r{turn}"] == (before - 5 - 1) // 4 * 4
        computed = [pair.computed[f"r{turn}"] for turn in range(4)]
        if checkpoints:
            assert max(computed[1:]) <= 11 + 3, computed
        else:
            assert computed == [30, 41, 52, 63]
        pair.at_rest()
