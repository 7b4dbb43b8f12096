"""Text to tokens, by a model's tokenizer and its chat template, both as transformers has them; and
the texts of single tokens."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from prefixkv.engines.hf.folder import one_line
from prefixkv.errors import CallerError, ConfigError

logger = logging.getLogger("prefixkv.front")

PLAIN_TEMPLATE: Final = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if documents %}documents: {{ documents | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For a model without a template of its own."""

_SHORT: Final = 4096  # characters of a text that is tokenized at once
_PIECE: Final = 1 << 16  # characters
_DEFAULT: Final = "default"
_TOOLS: Final = "tool_use"  # transformers' name of the template for chats with tools
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class TextError(CallerError):
    """The model's chat template refuses the messages."""


class Texts:
    """A tokenizer and a chat template. Immutable, so any thread may call it.

    A template is part of a model's download, so transformers renders it in a sandbox; what a client
    sends is only data to it. Its time has no bound but `range`'s of 100,000 numbers a loop. Several
    templates have names, "default" for most chats. `tokens` are special tokens that templates name.

    Raises ConfigError for a template that is not read.
    """

    def __init__(
        self, tokenizer: Any, template: str | Mapping[str, str] = PLAIN_TEMPLATE,
        tokens: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        from prefixkv.engines.hf.folder import template_renderer

        # Else texts of all threads share as many threads of the package as there are cores, and a
        # short text waits for long ones.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer = tokenizer
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        # So long that what its cuts change is a fourth of its tokens at most.
        self._piece = max(_PIECE, 4 * self._longest**2)
        self._templates = {_DEFAULT: template} if isinstance(template, str) else dict(template)
        self._tokens, self._render_with = dict(tokens or {}), template_renderer()
        for name, source in self._templates.items():
            try:
                self._render_with([], chat_template=source)
            except Exception as error:
                why = f"line {getattr(error, 'lineno', '?')}: {one_line(error)}"
                raise ConfigError(f"the chat template {name!r} is not read: {why}") from None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = _NONE,
        most: int = 0,
    ) -> list[int]:  # fmt: skip
        """Return the tokens of a chat up to where the answer begins. Raises TextError.

        Args:
            messages: of any JSON values (`content`, `tool_calls`, ...). Keys that are None count as
                missing, except for `content`.
            variables: what a client gives the template: `tools`, `documents`, and others by name;
                `chat_template` is the name of one of several templates.
            most: where they are certain to be more (0: no bound), so many of them as say so.
        """
        return self._encode(self._render(messages, variables), False, most)

    def plain(self, text: str, most: int = 0) -> list[int]:
        """Return the tokens, with the special ones that the model puts before a text; `most` as of
        a chat."""
        return self._encode(text, True, most)

    def _encode(self, text: str, special: bool, most: int = 0) -> list[int]:
        if most and len(text) > self._piece:
            # A cut changes the tokens near it, and their number by `longest` at most.
            found: list[int] = []
            for cuts, begin in enumerate(range(0, len(text), self._piece), 1):
                found += self._encode(text[begin : begin + self._piece], False)
                if len(found) - cuts * self._longest > most:
                    return found
        # `encode` keeps Python's lock all the while, and offsets that nothing reads; a short text
        # costs less that way.
        if len(text) > _SHORT:
            (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        else:
            encoded = self.tokenizer.encode(text, add_special_tokens=special)
        ids: list[int] = encoded.ids
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {"add_generation_prompt": True, **self._tokens, **variables}
        given["chat_template"] = self._choose(variables)
        texts: list[str] = []
        errors: list[Exception] = []
        for chat in _readings(messages):
            try:
                ((text,), _) = self._render_with([chat], **given)
            except Exception as error:  # a template can raise any: 1 / 0, a missing key, too deep
                errors.append(error)
                continue
            texts.append(text)
            # A template that does not look whether there is a content may write null as a text.
            if "None" not in text:
                break
        if texts:
            return min(texts, key=lambda text: text.count("None"))
        # What the template says by itself is more than what happened to it.
        worst = next((one for one in errors if type(one).__name__ == "TemplateError"), errors[0])
        why = str(worst) or type(worst).__name__
        raise TextError(f"the model's chat template refuses it: {why}") from None

    def _choose(self, variables: Mapping[str, Any]) -> str:
        has_tools = variables.get("tools") is not None and _TOOLS in self._templates
        name = variables.get("chat_template") or (_TOOLS if has_tools else _DEFAULT)
        if not isinstance(name, str) or name not in self._templates:
            # A client's own template would run here: it may only name one of the model's.
            names = ", ".join(sorted(self._templates))
            raise TextError(f"the model has no chat template {name!r:.50}, it has {names}")
        return self._templates[name]


def _readings(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a chat as templates of several kinds read it: a content that is null stays null, which
    some ask for, or becomes an empty text, which others need; arguments of calls are objects, or
    texts of JSON. Those come first that lose nothing: a template that asks for null may leave out
    the calls of a message that has a text."""
    chat = [
        {"content": None, **{key: value for key, value in one.items() if value is not None}}
        for one in messages
    ]
    has_calls = any(one.get("tool_calls") for one in chat)
    has_none = any(one["content"] is None for one in chat)
    for text in (None, "") if has_none else (None,):
        for decode in (_with_objects, dict) if has_calls else (dict,):
            yield [
                decode(one if one["content"] is not None else {**one, "content": text})
                for one in chat
            ]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI has the arguments of calls as a text of JSON; templates write them as JSON themselves,
    so an object in such a text is decoded. A model may have written what is no object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                arguments = json.loads(function.get("arguments") or "{}")
                if isinstance(arguments, dict):
                    call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return {**message, "tool_calls": found}


def load_texts(folder: str) -> Texts:
    """Load a model's folder, or the small model for "". Raises ConfigError."""
    if not folder:
        from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer

        return Texts(small_tokenizer(), CHAT_TEMPLATE)
    from prefixkv.engines.hf.folder import load_auto_tokenizer

    loaded = load_auto_tokenizer(folder)
    template = loaded.chat_template
    if template is None:
        template = PLAIN_TEMPLATE
        logger.warning("%s: without a chat template: chats are written as ROLE: TEXT", folder)
    return Texts(loaded.backend_tokenizer, template, loaded.special_tokens_map)


# --- tokens to text -------------------------------------------------------------------------------

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
        # UTF-8 of a token, or a part of a character; at most the vocabulary is kept.
        self.data: Callable[[int], bytes] = cache(self._data)

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
