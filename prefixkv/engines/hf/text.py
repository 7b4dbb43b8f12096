"""Text of an answer as its tokens come, and the strings that end it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from prefixkv.spi import ConfigError

_PARTIAL: Final = "\ufffd"  # what stands for bytes that are no whole character
_MOST_PARTIAL: Final = 8  # tokens; a character has 4 bytes


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises ConfigError where it has none, or one that is not
    read."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"{path} is not read: {error}") from error


class AnswerText:
    """The text of one answer. A character comes when all its tokens are there; what may be the
    beginning of a string that ends the answer is kept back until that is known.

    Args:
        tokenizer: as `load_tokenizer` gives it.
        stop: strings that end the answer; none of them is empty. They are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []  # the newest: shown up to `_shown`, which say how the rest
        self._shown = 0  # is written (spaces), and those whose text is not there yet
        self._kept = ""

    def add(self, token: int) -> tuple[str, bool]:
        """The text that is certain now, and whether a string has ended the answer. O(what is
        kept)."""
        self._tokens.append(token)
        new = self._new()
        if new.endswith(_PARTIAL) and len(self._tokens) - self._shown < _MOST_PARTIAL:
            return "", False
        if new:
            del self._tokens[: self._shown]
            self._shown = len(self._tokens)
        text = self._kept + new
        ends = [at for at in (text.find(one) for one in self._stop) if at >= 0]
        if ends:
            self._kept, self._shown = "", len(self._tokens)
            return text[: min(ends)], True
        kept = max((_begun(text, one) for one in self._stop), default=0)
        self._kept = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def end(self) -> str:
        """What was kept back, when the answer ends otherwise."""
        kept, self._kept = self._kept + self._new(), ""
        self._shown = len(self._tokens)
        return kept

    def _new(self) -> str:
        """The text of the tokens that are not shown, as it is written behind those before."""
        before = self._tokenizer.decode(self._tokens[: self._shown])
        whole: str = self._tokenizer.decode(self._tokens)
        return whole[len(before) :]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    for num in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:num]):
            return num
    return 0
