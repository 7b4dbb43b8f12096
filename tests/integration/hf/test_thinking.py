"""Thinking that clients leave out of the next turn, and the cache: by the tokenizer's markers."""

import threading
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from prefixkv.engines.hf import PagedModel
from prefixkv.engines.hf.text import KeepThinking, Markers
from prefixkv.errors import ConfigError
from tests.support.hf_world import Reference, World

PAGE = 16


def with_marks(*marks: str) -> Tokenizer:
    """Some marks, and letters, a token each."""
    made = Tokenizer(BPE({chr(0x100 + i): i for i in range(250)}, []))
    made.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return made


TOKENIZER = with_marks("<think>", "</think>")
OPEN, CLOSE = 250, 251


def tokens(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("prompt", "output", "place"),
    [
        ([1, 2, 3], [4, 5], None),
        ([1, 2, 3], [OPEN, 5, CLOSE, 6], 3),
        ([1, 2, 3], [4, OPEN, 5], 4),  # not ended
        ([1, 2, OPEN], [5, CLOSE, 6], 2),  # its template begins it
        ([1, 2, OPEN, 9, 9], [5, 6], 2),
        ([1, OPEN, 9, CLOSE, 9], [5, 6], None),  # its template says that there is none
        ([1, OPEN, 9, CLOSE, 9], [OPEN, 6], 5),
        ([1, OPEN, *range(20)], [5, CLOSE, 6], None),  # a former turn's, that was cut off
        ([1], [5, CLOSE, 6], None),
    ],
)
def test_where_a_thinking_begins(prompt: list[int], output: list[int], place: int | None) -> None:
    markers = Markers(TOKENIZER)
    assert markers
    assert markers.first_thought(tokens(*prompt), output) == place


def test_a_marker_of_several_tokens() -> None:
    letters = "analysifn"
    made = Tokenizer(BPE({one: i for i, one in enumerate(dict.fromkeys(letters))}, []))
    made.add_special_tokens([AddedToken("<|channel|>", special=True)])
    begin = made.encode("<|channel|>analysis").ids
    assert len(begin) == 9
    markers = Markers(made)
    assert markers.first_thought(tokens(1, 1), [2, *begin, 3]) == 3
    assert markers.first_thought(tokens(1, 1), [2, *begin[:-1], 3]) is None
    assert markers.first_thought(tokens(1, 1), begin[:4]) is None


def test_another_word_for_it_is_refused(model: PagedModel) -> None:
    threads = threading.active_count()
    for keep in ("of", "learn", "", None, True):
        with pytest.raises(ConfigError, match="must be on or off"):
            World(model, tokenizer=TOKENIZER, thinking=keep)  # type: ignore[arg-type]
    assert threading.active_count() == threads


def test_a_tokenizer_without_markers_leaves_nothing_out(model: PagedModel) -> None:
    made = with_marks("<s>")
    assert not Markers(made)
    for tokenizer in (made, None):
        with World(model, tokenizer=tokenizer, thinking="off") as world:
            chat(world, "a", [*range(3 * PAGE), OPEN], 4)
            assert world.decode.stats()["thinking_tokens_left_out"] == 0


# --- with the engines -----------------------------------------------------------------------------


def chat(world: World, rid: str, prompt: list[int], most: int = 40) -> list[int]:
    answer = world.ask(rid, prompt, max_new_tokens=most)
    world.run()
    return answer.tokens[0]


@pytest.mark.parametrize(("keep", "cached"), [("on", 6), ("off", 3)])
def test_what_a_worker_caches_of_an_answer_that_thinks(
    model: PagedModel, reference: Reference, keep: KeepThinking, cached: int
) -> None:
    prompt = [*range(3 * PAGE), OPEN]
    with World(model, tokenizer=TOKENIZER, thinking=keep) as world:
        said = chat(world, "a", prompt, 3 * PAGE)
        assert said == reference.greedy(prompt, 3 * PAGE)
        stats = world.decode.stats()
        assert stats["pages_cached"] == cached
        assert stats["thinking_tokens_left_out"] == (0 if keep != "off" else 3 * PAGE + 1)
        # The next turn without it, and one with it: right, whatever was kept.
        for rid, turn in (("b", [*prompt[:-1], *range(9)]), ("c", [*prompt, *said, 7])):
            assert chat(world, rid, turn, 5) == reference.greedy(turn, 5)
        world.at_rest()
