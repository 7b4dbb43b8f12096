"""Log-probabilities in OpenAI's two forms, and what `echo` puts before an answer.

They are of the model's own distribution, before temperature, top_k and top_p. Every token that was
sampled has its entry, the one that stops the answer included, although it is not in the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, Final

from prefixkv.serving.wire import MAX_PROMPT_NUMBERS, Logprob, TokenEvent

# The characters by which byte-level tokenizers name bytes: printable ones stand for themselves, the
# others follow from 256 on (GPT-2's table).
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
_NO_CHARACTER: Final = "\ufffd"


class TokenTexts:
    """The text and the bytes of single tokens, by a model's tokenizer. Used on one event loop.

    A token's text is what it adds to a text before it, so a space before a word belongs to it. A
    token that is a part of a character has no text: its bytes are written out, as OpenAI does it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._found: dict[int, bytes] = {}  # at most the vocabulary

    def data(self, token: int) -> bytes:
        """Return the bytes of a token in UTF-8, or its part of a character."""
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
        """Return False for a special token, which has no part in an answer's text."""
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


class _Offsets:
    """The place of each token in a text: the number of characters before it."""

    def __init__(self, texts: TokenTexts, begin: int = 0) -> None:
        self._texts, self.num_chars = texts, begin
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        """Return the place of the next token of a text whose log-probabilities are told."""
        at = self.num_chars
        if self._texts.is_shown(token):
            self.num_chars += len(self._decoder.decode(self._texts.data(token)))
        return at


class AnswerLogprobs:
    """What a request's answer has beside its own text: log-probabilities, and the prompt by `echo`.
    Made only for requests that ask for one of them.

    Args:
        texts: of the model's tokenizer.
        prompt: the request's tokens.
        chat: True for the form of /v1/chat/completions, False for that of /v1/completions.
        num_top: likeliest tokens per position; None: no log-probabilities.
        echo: text of the prompt that goes before each sample's; None: it does not.
        is_empty: True where the answer is to have no tokens of its own.
    """

    def __init__(
        self, texts: TokenTexts, prompt: Sequence[int], chat: bool, num_top: int | None,
        echo: str | None = None, is_empty: bool = False,
    ) -> None:  # fmt: skip
        self._texts, self._prompt_tokens = texts, prompt
        self._chat, self._num_top = chat, num_top
        self._echo, self._is_empty = echo, is_empty
        self._tokens: list[Logprob | None] = []  # of the prompt, until the first output
        self._prompt: dict[str, list[Any]] | None = None
        self._offsets: dict[int, _Offsets] = {}  # by sample

    def show(self, output: TokenEvent) -> tuple[str, dict[str, Any] | None]:
        """Return the text that the next output of a sample adds to it, and the log-probabilities in
        OpenAI's form; None: it adds none."""
        # 1. Parts of the prompt's come first, and are kept until a sample begins.
        if output.prompt is not None:
            self._tokens += output.prompt
            return "", None
        text, body = output.text, None
        is_first = output.sample not in self._offsets
        if is_first:
            self._offsets[output.sample] = _Offsets(self._texts, len(self._echo or ""))
        # 2. The token's own.
        if self._is_empty:
            text = ""
        elif output.logprob is not None:
            body = self._body([output.logprob], self._offsets[output.sample])
        # 3. Before the first of a sample, the prompt's.
        if is_first and self._echo is not None:
            text = self._echo + text
            if self._num_top is not None:
                before = self._prompt_body()
                body = before if body is None else joined([before, body])
        return text, body

    def _prompt_body(self) -> dict[str, list[Any]]:
        """Return the log-probabilities of an echoed prompt, made once for all samples."""
        if self._prompt is None:
            offsets = _Offsets(self._texts)
            body = self._legacy(zip(self._prompt_tokens, self._tokens, strict=True), offsets)
            # Some tokenizers put a space before a text that it does not have.
            more = max(0, offsets.num_chars - len(self._echo or ""))
            body["text_offset"] = [max(0, at - more) for at in body["text_offset"]]
            self._prompt, self._tokens = body, []
        return self._prompt

    def _body(self, found: list[Logprob], offsets: _Offsets) -> dict[str, list[Any]]:
        if not self._chat:
            return self._legacy(((one.token, one) for one in found), offsets)
        content = [
            {**self._entry(one.token, one.logprob),
             "top_logprobs": [self._entry(*pair) for pair in one.top]}
            for one in found
        ]  # fmt: skip
        return {"content": content, "refusal": None}  # type: ignore[dict-item]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Return one token's log-probability in a chat's form."""
        data = self._texts.data(token)
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(data)}

    def _legacy(
        self, found: Iterable[tuple[int, Logprob | None]], offsets: _Offsets
    ) -> dict[str, list[Any]]:
        """Return log-probabilities in the form of completions, which is one list per quantity."""
        body: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        text = self._texts.text
        for token, one in found:
            body["tokens"].append(text(token))
            body["text_offset"].append(offsets.next(token))
            body["token_logprobs"].append(None if one is None else one.logprob)
            if one is None:
                body["top_logprobs"].append(None)
                continue
            # The token itself too, as OpenAI has it; of two with one text the likelier counts.
            likely: dict[str, float] = {}
            for other, logprob in (*one.top, (token, one.logprob)):
                likely.setdefault(text(other), logprob)
            body["top_logprobs"].append(likely)
        return body


def joined(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return log-probabilities of neighbouring pieces of a sample as those of one piece."""
    whole: dict[str, Any] = {name: None for body in bodies for name in body}
    for name in whole:
        lists = [body[name] for body in bodies if body.get(name) is not None]
        if lists:
            whole[name] = [one for part in lists for one in part]
    return whole


def most_numbers_exceeded(num_tokens: int, num_top: int, num_samples: int) -> int:
    """Return how many log-probabilities an echoed prompt would have, over all samples, if they are
    more than `MAX_PROMPT_NUMBERS`; else 0."""
    numbers = num_tokens * (num_top + 1) * num_samples
    return numbers if numbers > MAX_PROMPT_NUMBERS else 0
