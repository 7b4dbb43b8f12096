"""The text of an answer as its tokens arrive, and the strings that end it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from prefixkv.engines.hf.folder import TOKENIZER_FILE, check_folder
from prefixkv.spi import ConfigError

_PARTIAL: Final = "\ufffd"  # replaces bytes that are no whole character
_MOST_PARTIAL: Final = 8  # tokens; a character has 4 bytes


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer that turns an HF model's answers into text, from its folder.

    Raises ConfigError if it is missing or unreadable.
    """
    path = check_folder(folder, (TOKENIZER_FILE,)) / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"{path} is not read: {error}") from error


class AnswerText:
    """The text of one answer, released piece by piece.

    A character is released when all its tokens are there. Text that may be the beginning of a stop
    string is kept back until that is decided.

    Args:
        tokenizer: the result of `load_tokenizer`.
        stop: strings that end the answer, not empty. They are not part of the text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # The newest tokens: [0, _shown) are released, and kept as context, since a token's text can
        # depend on the tokens before it (spaces); the others have no whole character yet.
        self._tokens: list[int] = []
        self._shown = 0
        self._kept = ""  # text that may be the beginning of a stop string

    def add(self, token: int) -> tuple[str, bool]:
        """Add a token to the text of an HF answer.

        Returns the text that is certain now, and True if a stop string ended it.

        O(tokens and characters that are kept).
        """
        # 1. Decode. The end of a partial character is awaited for a few tokens only: bytes that
        # never become a character must not keep the answer back.
        self._tokens.append(token)
        new = self._new()
        if new.endswith(_PARTIAL) and len(self._tokens) - self._shown < _MOST_PARTIAL:
            return "", False
        if new:
            del self._tokens[: self._shown]
            self._shown = len(self._tokens)
        # 2. Look for stop strings, which may have begun in the text that was kept back.
        text = self._kept + new
        ends = [at for at in (text.find(one) for one in self._stop) if at >= 0]
        if ends:
            self._kept, self._shown = "", len(self._tokens)
            return text[: min(ends)], True
        # 3. Keep the longest end of the text that could begin a stop string.
        kept = max((_begun(text, one) for one in self._stop), default=0)
        self._kept = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def end(self) -> str:
        """Return the text of an HF answer that was kept back, at an end without a stop string."""
        kept, self._kept = self._kept + self._new(), ""
        self._shown = len(self._tokens)
        return kept

    def _new(self) -> str:
        """Return the text of an HF answer's tokens that are not released, after those before."""
        before = self._tokenizer.decode(self._tokens[: self._shown])
        whole: str = self._tokenizer.decode(self._tokens)
        return whole[len(before) :]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of an HF answer's text begin `stop`."""
    for num in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:num]):
            return num
    return 0
