"""The chats that think: what is found of them."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from benchmarks.thinking import PAGE_SIZE, Turn, chats, play


def turn(arrival_s: float, prompt: list[int], output: list[int]) -> Turn:
    return Turn(arrival_s, np.array(prompt, np.int32), np.array(output, np.int32))


@pytest.mark.parametrize("keeps", [True, False])
def test_hits_of_a_pool_that_holds_everything(keeps: bool) -> None:
    first, thinking = list(range(2 * PAGE_SIZE)), list(range(1000, 1000 + 2 * PAGE_SIZE))
    turns = [
        turn(0.0, first, thinking), turn(100.0, [*first, *range(500, 540)], [1, 2]),
        turn(200.0, [*first, *thinking, 7], [1]),
    ]  # fmt: skip
    # The last two count: one without the thinking, and one that has it.
    asked = (2 * PAGE_SIZE + 40) + (4 * PAGE_SIZE + 1)
    # The last token of an answer has no KV, so a page of the thinking is not whole.
    found = 2 * PAGE_SIZE + (3 if keeps else 2) * PAGE_SIZE
    assert play(turns, 1000, keeps, "lru") == {"hit_ratio": found / asked, "waits": 0}


def test_a_turn_waits_for_pages() -> None:
    turns = [turn(i / 100, [i] * PAGE_SIZE, [1] * 40) for i in range(6)]
    got = play(turns, 8, True, "lru")
    assert got["waits"]
    assert got["hit_ratio"] == 0


@pytest.mark.slow
def test_chats_are_those_of_their_seed() -> None:
    one, again, other = chats(5), chats(5), chats(6)
    assert [len(turn.prompt) for turn in one] == [len(turn.prompt) for turn in again]
    assert [len(turn.prompt) for turn in one] != [len(turn.prompt) for turn in other]
    assert 700 < statistics.median(len(turn.output) for turn in one) < 1300
