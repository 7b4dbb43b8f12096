"""The part of an answer that its client will leave out of the next turn: a model's thinking.

All KV from its first token on is then a branch of the cache that nothing asks for again. An agent,
however, may send its thinking back between the calls of its tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

KeepThinking = Literal["on", "off"]
Tokens = npt.NDArray[np.int32]

# What begins a model's thinking, and what ends it. The first of each must be a token of its own in
# the tokenizer: a text that merely looks like one is no marker.
_MARKERS: Final = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis", "<|channel|>final"),
)

_PROMPT_END: Final = 8  # tokens of a prompt in which its template may begin a thinking


class Markers:
    """Token ids between which a model thinks, from its tokenizer's own vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._begins: list[list[int]] = []
        self._ends: list[list[int]] = []
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for begin, end in _MARKERS:
            # An added token is never merged with its neighbours, so it has the same id wherever it
            # stands.
            if any(begin.startswith(token) for token in special):
                self._begins.append(tokenizer.encode(begin, add_special_tokens=False).ids)
                self._ends.append(tokenizer.encode(end, add_special_tokens=False).ids)

    def __bool__(self) -> bool:
        return bool(self._begins)

    def first_thought(self, prompt: Tokens, output: Sequence[int]) -> int | None:
        """Return the place, in prompt and output, of the marker with which the thinking begins;
        None: there is none. Some templates end a prompt with it, so it may be in the prompt."""
        # The prompt first, and only its last tokens: further in front a marker that nothing ends is
        # of a former turn that was cut off.
        last = prompt[-_PROMPT_END:]
        for begin, end in zip(self._begins, self._ends, strict=True):
            place = max(_places(last, begin), default=-1)
            if place > max(_places(last, end), default=-1):
                return len(prompt) - len(last) + place
        answer = np.array(output, np.int32)
        places = [place for begin in self._begins for place in _places(answer, begin)]
        return len(prompt) + min(places) if places else None


def _places(tokens: Tokens, marker: Sequence[int]) -> list[int]:
    if len(tokens) < len(marker):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(marker))
    places: list[int] = np.flatnonzero((windows == marker).all(1)).tolist()
    return places
