"""The part of an answer that its client will leave out of the next turn: a model's thinking.

Most chat clients send an answer back without the thinking before it. All KV from the first token of
that on is then a branch of the cache that nothing asks for again; it takes pages that other prompts
could have. An agent, however, may send its thinking back between the calls of its tools. So a
worker may look at what the next turns do (`Thinking`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from prefixkv.spi import ConfigError

KeepThinking = Literal["on", "off", "learn"]
_KEEPS: Final = get_args(KeepThinking)
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

_MOST_ANSWERS: Final = 256  # that are remembered until their next turn comes
_PROMPT_END: Final = 8  # tokens of a prompt in which its template may begin a thinking
_LOOKED_AT: Final = 8  # tokens of a thinking that are compared with the next turn's
_LEAST_SEEN: Final = 8.0  # next turns, before anything is concluded from them
_SEEN_AT_ONCE: Final = 64.0  # weight of all that was seen: older turns count for less and less


class Markers:
    """Token ids between which an HF model thinks, from its tokenizer's own vocabulary.

    Args:
        tokenizer: of `load_tokenizer`.
    """

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
        """True if the HF tokenizer has any marker of a thinking."""
        return bool(self._begins)

    def first_thought(self, prompt: Tokens, output: Sequence[int]) -> int | None:
        """Return the place, in prompt and output, of the marker with which an HF answer's thinking
        begins; None: it has none.

        Some templates end a prompt with that marker, so the place may be in the prompt.
        """
        # The prompt first, and only its last tokens: further in front a marker that nothing ends is
        # of a former turn that was cut off.
        last = prompt[-_PROMPT_END:]
        for begin, end in zip(self._begins, self._ends, strict=True):
            if (place := _last(last, begin)) > _last(last, end):
                return len(prompt) - len(last) + place
        answer = np.array(output, np.int32)
        places = [place for begin in self._begins if (place := _first(answer, begin)) >= 0]
        return len(prompt) + min(places) if places else None


@dataclass(slots=True)
class _Thought:
    """An answer with a thinking, until its next turn comes."""

    digest: bytes  # of prompt and output before the thinking
    tail: bytes  # the last tokens of that
    thought: bytes  # the first tokens of the thinking
    prompt: bytes  # digest of the whole prompt, which a repeated request has, too


class Thinking:
    """What an HF decode worker keeps of its answers' thinking. Owned by the engine's thread.

    Args:
        keep: "on": all of it is cached as any KV; "off": none; "learn": all of it until the next
            turns show that most clients leave it out, and again once they no longer do.
        markers: what begins and ends a thinking. Without any, nothing is left out.

    Raises: ConfigError for another `keep`.
    """

    def __init__(self, keep: KeepThinking, markers: Markers | None) -> None:
        if keep not in _KEEPS:
            raise ConfigError(f"thinking is {keep!r}, one of {', '.join(_KEEPS)} is needed")
        self._keep, self._markers = keep, markers
        self._answers: OrderedDict[tuple[int, bytes], _Thought] = OrderedDict()
        self._seen = self._sent_back = 0.0  # next turns; those that have the thinking in them
        self.tokens_left_out = 0

    def __len__(self) -> int:
        """Number of answers that the HF worker remembers until their next turn comes."""
        return len(self._answers)

    @property
    def may_leave_out(self) -> bool:
        """True if the HF worker may keep less than all of an answer: then `keep_tokens` is to be
        asked."""
        return bool(self._markers) and self._keep != "on"

    @property
    def is_kept(self) -> bool:
        """True if the KV of a thinking that ends now is cached by the HF worker."""
        if self._keep != "learn":
            return self._keep == "on"
        return self._seen < _LEAST_SEEN or 2 * self._sent_back >= self._seen

    def note_prompt(self, prompt: Tokens) -> None:
        """Look at a prompt that a client sends to HF's decode: is it the next turn of an answer
        with a thinking, and does it have that in it?

        Cost: a comparison of some tokens for each answer that is remembered, at most 256.
        """
        if self._keep != "learn" or not self._answers:
            return
        for place, answer in self._answers.items():
            start = place[0]
            if len(prompt) <= start or _tail(prompt[:start]) != answer.tail:
                continue
            # The same prompt once more is no next turn: it ends where its answer began.
            if _digest(prompt[:start]) != answer.digest or _digest(prompt) == answer.prompt:
                continue
            del self._answers[place]
            fades = min(1.0, _SEEN_AT_ONCE / (self._seen + 1.0))
            self._seen = self._seen * fades + 1.0
            sent_back = prompt[start:].tobytes().startswith(answer.thought)
            self._sent_back = self._sent_back * fades + sent_back
            return

    def keep_tokens(self, prompt: Tokens, output: Sequence[int]) -> int | None:
        """Return how many tokens of prompt and output the cache of HF's decode keeps, at the end of
        an answer; None: all."""
        if not self._markers or not self.may_leave_out:
            return None
        start = self._markers.first_thought(prompt, output)
        if start is None:
            return None
        if self._keep == "learn":
            self._remember(prompt, output, start)
        if self.is_kept:
            return None
        self.tokens_left_out += len(prompt) + len(output) - start
        return start

    def _remember(self, prompt: Tokens, output: Sequence[int], start: int) -> None:
        """Remember an HF answer until its next turn comes, the oldest no longer."""
        tokens = np.concatenate([prompt, np.array(output, np.int32)])
        before = tokens[:start]
        answer = _Thought(
            _digest(before),
            _tail(before),
            tokens[start : start + _LOOKED_AT].tobytes(),
            _digest(prompt),
        )
        self._answers[start, answer.digest] = answer
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)


def _digest(tokens: Tokens) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def _tail(tokens: Tokens) -> bytes:
    return tokens[-16:].tobytes()


def _places(tokens: Tokens, marker: Sequence[int]) -> Any:
    """Return the places of a marker in tokens, ascending."""
    if len(tokens) < len(marker):
        return np.empty(0, np.intp)
    found = tokens[: len(tokens) - len(marker) + 1] == marker[0]
    for i, token in enumerate(marker[1:], 1):
        found = found & (tokens[i : len(found) + i] == token)
    return np.flatnonzero(found)


def _first(tokens: Tokens, marker: Sequence[int]) -> int:
    """Return the first place of a marker in tokens; -1: it is not there."""
    places = _places(tokens, marker)
    return int(places[0]) if len(places) else -1


def _last(tokens: Tokens, marker: Sequence[int]) -> int:
    """Return the last place of a marker in tokens; -1: it is not there."""
    places = _places(tokens, marker)
    return int(places[-1]) if len(places) else -1
