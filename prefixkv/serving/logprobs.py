"""Log-probabilities in OpenAI's two forms, and what `echo` puts before an answer.

They are of the model's own distribution, before temperature, top_k and top_p. Every token that was
sampled has its entry, the one that stops the answer included, although it is not in the text.
"""

from __future__ import annotations

import codecs
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from prefixkv.engines.hf.requests import TokenLogprob
from prefixkv.serving.wire import TokenEvent

# The characters by which byte-level tokenizers name bytes: printable ones stand for themselves, the
# others follow from 256 on (GPT-2's table).
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
_NO_CHARACTER: Final = "\ufffd"


class TokenTexts:
    """The text and the bytes of single tokens. Used on one event loop.

    A token's text is what it adds to a text before it, so a space before a word belongs to it. A
    token that is a part of a character has no text: its bytes are written out, as OpenAI does it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._found: dict[int, bytes] = {}  # at most the vocabulary

    def data(self, token: int) -> bytes:
        """Return UTF-8, or a part of a character."""
        if token not in self._found:
            self._found[token] = self._data(token)
        return self._found[token]

    def text(self, token: int) -> str:
        r"""Return the text of a token, or "bytes:\xe2\x82" for a part of a character."""
        data = self.data(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_shown(self, token: int) -> bool:
        added = self._added.get(token)
        return added is None or not added.special

    def _data(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:  # models have more rows than tokenizers have tokens
            return b""
        # After another token, since some decoders drop the space at a text's beginning.
        once, twice = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
        text: str = twice[len(once) :]
        if _NO_CHARACTER not in text:
            return text.encode()
        # 1. A byte by its name, as SentencePiece has it.
        # 2. Bytes by characters that stand for them.
        # 3. The character that decoders use for broken ones, by itself.
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        if all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        return text.encode()


class AnswerLogprobs:
    """Made only where asked for. `chat`: in the form of chat completions, not of completions."""

    def __init__(self, texts: TokenTexts, chat: bool) -> None:
        self._texts, self._chat = texts, chat
        # By sample: the characters of its text so far, and what reads them.
        self._num_chars: Counter[int] = Counter()
        self._decoders: defaultdict[int, Any] = defaultdict(
            partial(codecs.getincrementaldecoder("utf-8"), "replace")
        )

    def show(self, output: TokenEvent) -> dict[str, Any] | None:
        """Return those of the next output of a sample; None: it has none."""
        one = output.logprob
        if one is None:
            return None
        if self._chat:
            top = [self._entry(*pair) for pair in one.top]
            entry = {**self._entry(one.token, one.logprob), "top_logprobs": top}
            return {"content": [entry], "refusal": None}
        return self._legacy(one, output.sample)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._texts.data(token)
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(data)}

    def _legacy(self, one: TokenLogprob, sample: int) -> dict[str, list[Any]]:
        """Return the form of completions, which is one list per quantity."""
        text = self._texts.text
        # The token itself too, as OpenAI has it; of two with one text the likelier counts.
        likely: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            likely.setdefault(text(token), logprob)
        at = self._num_chars[sample]
        if self._texts.is_shown(one.token):
            data = self._texts.data(one.token)
            self._num_chars[sample] += len(self._decoders[sample].decode(data))
        return {
            "tokens": [text(one.token)], "token_logprobs": [one.logprob],
            "top_logprobs": [likely], "text_offset": [at],
        }  # fmt: skip


def joined(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join those of neighbouring pieces of a sample."""
    whole: dict[str, Any] = {name: None for body in bodies for name in body}
    for name in whole:
        lists = [body[name] for body in bodies if body.get(name) is not None]
        if lists:
            whole[name] = [one for part in lists for one in part]
    return whole
