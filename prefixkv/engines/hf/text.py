"""The text of an answer as its tokens arrive, and the strings that end it.

It is the text of prompt and answer together, less what that has in common with the prompt's. So the
space between two words is there, and a character that the prompt began belongs to the answer that
completes it. A text that was given out is never taken back.

`Markers` find the part of an answer that its client will leave out of the next turn: a model's
thinking. All KV from its first token on is then a branch of the cache that nothing asks for again.
An agent, however, may send its thinking back between the calls of its tools.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

_Tokens = Sequence[int] | npt.NDArray[np.int32]

_NO_CHARACTER: Final = "\ufffd"  # replaces bytes that are no character, and is one by itself
# Units (tokens, or characters of several byte tokens) that are decoded together. Decoders look at
# one before the newest (a space between words), byte-level ones at three (a character of 4 bytes).
_CONTEXT: Final = 4
_MOST_UNITS: Final = 2 * _CONTEXT
_PROMPT_END: Final = 32  # tokens of a prompt that are looked at, with and without a text
_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")  # name of a token that is a byte


class AnswerText:
    """The text of one answer, released piece by piece.

    A character is released when all its tokens are there. Bytes that are no character become
    U+FFFD, and keep back one character at most. A possible beginning of a stop string is kept back.
    Special tokens have no text.

    Text equals the tokenizer's `decode`, except where tokens are bytes by name ("<0xE6>"): `decode`
    turns a whole run into U+FFFD for one bad byte; here its characters stand, so that no text waits
    for a run's end. Source: SentencePiece, `DecodeSentencePieces`.

    `prompt` is the tokens before the answer; O(1) of them are read, from the end.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), prompt: _Tokens = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._no_character = _bytes_by_name(tokenizer)
        # The newest units, the text that they decode to, and the part of it that is released. A
        # token's text can depend on those before it, so released units stay as context.
        self._units: list[list[int]] = []
        self._whole = self._shown = ""
        # Byte tokens of a character that is not complete, and what they name.
        self._begun: list[int] = []
        self._bytes = b""
        self._kept = ""  # text that may be the beginning of a stop string
        self._read_prompt(prompt)

    def add(self, token: int, stops: bool = True) -> tuple[str, bool]:
        """Return the text that is certain with this token, and True if a stop string ended it.
        O(what is kept). `stops`: False where this token's text can be no part of a stop string."""
        # 1. Decode. A special token may come between the bytes of a character.
        if not (self._begun and self._silent(token)):
            self._take(token)
        new = self._release(final=False)
        # 2. Look for stop strings, which may have begun in the text that was kept back.
        text = self._kept + new
        if not stops:
            self._kept = ""
            return text, False
        shown = self._until_stop(text)
        if shown < len(text):
            self._kept, self._shown = "", self._whole
            self._broken()
            return text[:shown], True
        # 3. Keep the longest end of the text that could begin a stop string.
        begun = (
            num for stop in self._stop for num in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:num])
        )  # fmt: skip
        certain = len(text) - max(begun, default=0)
        self._kept = text[certain:]
        return text[:certain], False

    def end(self) -> str:
        """Return the text that was kept back, at an end without a stop string."""
        self._units += self._broken()
        text, self._kept = self._kept + self._release(final=True), ""
        return text[: self._until_stop(text)]

    def _until_stop(self, text: str) -> int:
        return min((at for at in map(text.find, self._stop) if at >= 0), default=len(text))

    # --- tokens to units --------------------------------------------------------------------------

    def _read_prompt(self, prompt: _Tokens) -> None:
        last = map(int, prompt[-_PROMPT_END:])
        for token in [token for token in last if not self._silent(token)][-_CONTEXT:]:
            self._take(token)
        self._whole = self._decode()
        # The prompt's text by itself has U+FFFD for a character that is not complete.
        self._shown = self._whole + _NO_CHARACTER * len(self._begun)

    def _take(self, token: int) -> None:
        named = None
        if self._no_character:
            named = _BYTE.fullmatch(self._tokenizer.id_to_token(token) or "")
        if named is None:
            self._units += [*self._broken(), [token]]
            return
        # 1. The bytes before it and this one are a character, or its beginning.
        # 2. They are none: the bytes before it are no character. Look at this one alone.
        # 3. This one alone is none either.
        for _ in range(2):
            tokens, name = [*self._begun, token], self._bytes + bytes.fromhex(named[1])
            try:
                # Strict and not final: raises as soon as no byte could complete the character.
                char, _ = utf_8_decode(name, "strict", False)
            except UnicodeDecodeError:
                self._units += self._broken()
                continue
            if char:
                self._units.append(tokens)
                tokens, name = [], b""
            self._begun, self._bytes = tokens, name
            return
        self._units.append(self._no_character)

    def _broken(self) -> list[list[int]]:
        """Return the bytes that no character came of, and forget them."""
        broken = [self._no_character] * len(self._begun)
        self._begun, self._bytes = [], b""
        return broken

    def _silent(self, token: int) -> bool:
        """Return True if `decode` leaves the token out: a special one, or unknown."""
        decode = self._tokenizer.decode
        if decode([token]):
            return False
        # A lone space may have no text at the beginning of a text, but has elsewhere.
        return self._tokenizer.id_to_token(token) is None or bool(
            decode([token], skip_special_tokens=False)
        )

    # --- units to text ----------------------------------------------------------------------------

    def _release(self, final: bool) -> str:
        """Return the text that is certain and was not released."""
        before, self._whole = self._whole, self._decode()
        whole, end = self._whole, len(self._whole)
        # Units without a text would push the others out.
        if whole == before and self._units and self._silent(self._units[-1][-1]):
            self._units.pop()
        # Of a byte-level decoder, only the last character can change by what comes: U+FFFD stands
        # for a whole number of bytes that are no character, or for those of one not complete.
        if not final and not self._no_character and whole.endswith(_NO_CHARACTER):
            end -= 1
        # What is shown begins the whole, but where the prompt's last character was not complete.
        at = len(self._shown)
        while not whole.startswith(self._shown[:at]):
            at -= 1
        new = whole[at:end]
        if new:
            self._shown = whole[:end]
            if len(self._units) > _MOST_UNITS:  # forget the oldest
                waiting = len(whole) - end
                del self._units[:-_CONTEXT]
                self._whole = self._decode()
                self._shown = self._whole[: len(self._whole) - waiting]
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode([token for unit in self._units for token in unit])
        return text


def _bytes_by_name(tokenizer: Any) -> list[int]:
    """Return the tokens of U+FFFD's bytes if a tokenizer has tokens that name a byte, or []."""
    tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in _NO_CHARACTER.encode()]
    if None in tokens or tokenizer.decode(tokens) != _NO_CHARACTER:
        return []
    return tokens


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

_THINKING_END: Final = 8  # tokens of a prompt in which its template may begin a thinking


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
        last = prompt[-_THINKING_END:]
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
