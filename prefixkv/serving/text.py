"""Text to tokens, by a model's tokenizer and its chat template, both as transformers has them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, Final

from prefixkv.errors import CallerError, ConfigError

PLAIN_TEMPLATE: Final = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if documents %}documents: {{ documents | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For a model without a template of its own."""

_SHORT: Final = 4096  # characters of a text that is tokenized at once
_PIECE: Final = 1 << 16  # characters, or more, of a long text that are counted together
_DEFAULT: Final = "default"
_TOOLS: Final = "tool_use"  # transformers' name of the template for chats with tools
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
# Arguments of transformers' functions that are no variables of the template.
_NOT_TAKEN: Final = (
    "conversation", "conversations", "messages", "continue_final_message", "tokenize",
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation",
    "max_length", "tokenizer_kwargs", "sanitize_control_tokens",
)  # fmt: skip


class TextError(CallerError):
    """The model's chat template refuses the messages."""


class TooManyTokensError(CallerError):
    """A text has more tokens than there is room for; its beginning alone has at least `least`."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class Arguments(dict[str, Any]):
    """Arguments of a tool call, and `json_text`, which they were decoded from."""

    __slots__ = ("json_text",)

    def __init__(self, decoded: Mapping[str, Any], json_text: str) -> None:
        super().__init__(decoded)
        self.json_text = json_text


def _go_on() -> None:
    """Let a text be tokenized to its end."""


class Texts:
    """A tokenizer and a chat template. Immutable, so any thread may call it.

    A template is part of a model's download, so transformers renders it in a sandbox; what a client
    sends is only data to it. Its time has no bound but `range`'s of 100,000 numbers a loop. Several
    templates have names, "default" for most chats. `tokens` are special tokens that templates name.

    Raises ConfigError for a template that is not read, with the line.
    """

    def __init__(
        self, tokenizer: Any, template: str | Mapping[str, str] = PLAIN_TEMPLATE,
        tokens: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        from prefixkv.engines.hf.text import template_renderer

        render = template_renderer()

        # Else texts of all threads share as many threads of the package as there are cores, and a
        # short text waits for long ones.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer = tokenizer
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        # So long that what its cuts change is a fourth of its tokens at most.
        self._piece = max(_PIECE, 4 * self._longest**2)
        self._templates = {_DEFAULT: template} if isinstance(template, str) else dict(template)
        self._tokens, self._render_with = dict(tokens or {}), render
        for name, source in self._templates.items():
            of = "" if name == _DEFAULT else f"{name!r} "
            try:
                render([], chat_template=source)
            except RecursionError:
                why = "it is nested too deep"
                raise ConfigError(f"the chat template {of}is not read: {why}") from None
            except Exception as error:
                line = _line(error)
                where = "" if line is None else f"line {line}: "
                raise ConfigError(f"the chat template {of}is not read: {where}{error}") from None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], most: int = 0,
        variables: Mapping[str, Any] = _NONE, go_on: Callable[[], None] = _go_on,
    ) -> list[int]:  # fmt: skip
        """Return the tokens of a chat up to where the answer begins. Raises TextError, with the
        line of the template, and as `plain`.

        Args:
            messages: of any JSON values (`content`, `tool_calls`, ...). Keys that are None count as
                missing, except for `content`.
            variables: what a client gives the template: `tools`, `documents`, and others by name;
                `chat_template` is the name of one of several templates.
        """
        return self._ids(self._render(messages, variables), False, most, go_on)

    def plain(self, text: str, most: int = 0, go_on: Callable[[], None] = _go_on) -> list[int]:
        """Return the tokens, with the special ones that the model puts before a text. Raises
        TooManyTokensError if they are certain to be more than `most` (0: no bound), without
        tokenizing all of a long text. `go_on` is called between its pieces: what it raises ends the
        work."""
        return self._ids(text, True, most, go_on)

    # --- tokens -----------------------------------------------------------------------------------

    def _ids(self, text: str, special: bool, most: int, go_on: Callable[[], None]) -> list[int]:
        if most and len(text) > self._piece:
            # A cut changes the tokens near it, and their number by `longest` at most.
            least = 0
            for begin in range(0, len(text), self._piece):
                go_on()
                piece = text[begin : begin + self._piece]
                least += max(len(self._encode(piece, False)) - self._longest, 0)
                if least > most:
                    raise TooManyTokensError(most + 1)
            go_on()
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        # `encode` keeps Python's lock all the while, and offsets that nothing reads; a short text
        # costs less that way.
        if len(text) <= _SHORT:
            short: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
            return short
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    # --- chats ------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {"add_generation_prompt": True, **variables}
        for name in _NOT_TAKEN:
            if name in given:
                raise TextError(f"{name} is no variable of a chat template")
        for name in ("tools", "documents"):
            some = given.get(name)
            if some is not None and not (
                isinstance(some, list) and all(isinstance(one, dict) for one in some)
            ):
                raise TextError(f"{name} is no list of objects")
        source = self._choose(given.pop("chat_template", None), given.get("tools"))
        given = {**self._tokens, **given, "chat_template": source}

        def render(chat: list[dict[str, Any]]) -> str:
            ((text,), _) = self._render_with([chat], **given)
            return str(text)

        errors: list[Exception] = []
        for chat in _readings(messages):
            try:
                text = render(chat)
            except Exception as error:  # a template can raise any: 1 / 0, a missing key, too deep
                errors.append(error)
                continue
            # A template that does not look whether there is a content may write null as a text.
            if "None" in text and any(_has_none(message) for message in chat):
                with_texts = [_with_content(message) for message in chat]
                try:
                    other = render(with_texts)
                except Exception:
                    return text
                return min(text, other, key=lambda one: one.count("None"))
            return text
        # What the template says by itself is more than what happened to it.
        worst = next((one for one in errors if type(one).__name__ == "TemplateError"), errors[0])
        line = _line(worst)
        where = "" if line is None else f" (line {line})"
        why = str(worst) or type(worst).__name__
        raise TextError(f"the model's chat template refuses it{where}: {why}") from None

    def _choose(self, name: Any, tools: Any) -> str:
        if name is None:
            name = _TOOLS if tools is not None and _TOOLS in self._templates else _DEFAULT
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
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]
    has_calls, has_none = any("tool_calls" in one for one in chat), any(map(_has_none, chat))
    yield chat
    if has_calls:
        yield [_with_text_arguments(message) for message in chat]
    if has_none:
        chat = [_with_content(message) for message in chat]
        yield chat
        if has_calls:
            yield [_with_text_arguments(message) for message in chat]


def _has_none(message: Mapping[str, Any]) -> bool:
    return message.get("content") is None


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if _has_none(message) else message


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(arguments, dict):
            text = getattr(arguments, "json_text", None) or _to_json(arguments)
            call = {**call, "function": {**function, "arguments": text}}
        found.append(call)
    return {**message, "tool_calls": found}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _line(error: BaseException) -> int | None:
    """Return the line of a chat template that an error comes from; None: it comes from no line."""
    line = getattr(error, "lineno", None)
    if isinstance(line, int):
        return line
    # Jinja names its frames so. The last is the innermost: of a macro, not of its call.
    lines = [
        line for frame, line in walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]  # fmt: skip
    return lines[-1] if lines else None


def load_texts(folder: str) -> Texts:
    """Load a model's folder, or the small model for "". Raises ConfigError."""
    if not folder:
        from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer

        return Texts(small_tokenizer(), CHAT_TEMPLATE)
    from prefixkv.engines.hf.text import load_auto_tokenizer

    loaded = load_auto_tokenizer(folder)
    template = PLAIN_TEMPLATE if loaded.chat_template is None else loaded.chat_template
    return Texts(loaded.backend_tokenizer, template, loaded.special_tokens_map)
