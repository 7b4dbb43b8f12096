"""Text to tokens, by a model's tokenizer and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefixkv.spi import CallerError, ConfigError

# For a model without a template of its own.
PLAIN_TEMPLATE: Final = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if documents %}documents: {{ documents | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_CHARS_PER_TOKEN: Final = 16  # a text longer than this per token of room is tried in part first
_TOKENS_OF_TEMPLATES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class TextError(CallerError):
    """The model's chat template refuses the messages."""


class TooManyTokensError(CallerError):
    """A text has more tokens than there is room for; its beginning alone has at least `least`."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class Texts:
    """A tokenizer and a chat template. Immutable, so any thread may call it.

    Args:
        tokenizer: of the package tokenizers.
        template: of Jinja; it runs in a sandbox.
        tokens: special tokens that templates name, such as "bos_token".

    `longest` is the length of the longest token in characters. A text of n characters has at least
    n / longest tokens, except for blanks that some tokenizers drop.
    """

    def __init__(
        self, tokenizer: Any, template: str = PLAIN_TEMPLATE, tokens: dict[str, str] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        # A template is part of a model's download: the sandbox keeps it from running code.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, **(tokens or {}))
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not read: {error}") from None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], most: int = 0,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:  # fmt: skip
        """Return the tokens of a chat, rendered by the model's template with these further
        variables, up to where the answer begins. Raises TextError, and as `plain`."""
        try:
            named = {"add_generation_prompt": True, **variables, "messages": messages}
            text = self._template.render(named)
        except Exception as error:  # the template may do anything with what a client sends
            raise TextError(f"the model's chat template refuses it: {error}") from None
        return self._ids(text, False, most)

    def plain(self, text: str, most: int = 0) -> list[int]:
        """Return the tokenizer's tokens of a text, with the special tokens that the model puts
        before it. Raises TooManyTokensError if they are certain to be more than `most`, without
        tokenizing all of a long text; 0 sets no bound."""
        return self._ids(text, True, most)

    def _ids(self, text: str, special: bool, most: int) -> list[int]:
        """Return the tokenizer's tokens of a text, after a cheap check of its beginning if it is
        long."""
        begun = text[: most * _CHARS_PER_TOKEN]
        if most and len(begun) < len(text):
            # Cutting the text can change its last token; the others stand as they are in all of
            # it, or merge with that one. `longest` tokens of slack cover what the cut changes.
            num = len(self.tokenizer.encode(begun, add_special_tokens=False).ids)
            if num > most + self.longest:
                raise TooManyTokensError(most + 1)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids


def load_texts(folder: str) -> Texts:
    """Return the tokenizer and chat template of a model's folder, or of the small model for "".
    Raises ConfigError."""
    from prefixkv.engines.hf.text import load_tokenizer

    if not folder:
        from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer

        return Texts(small_tokenizer(), CHAT_TEMPLATE)
    tokenizer = load_tokenizer(folder)
    path = Path(folder)
    try:
        file = path / "tokenizer_config.json"
        config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        file = path / "chat_template.jinja"
        template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not read: {error}") from None
    if isinstance(template, list):  # several, by name
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default")
    tokens = {}
    for name in _TOKENS_OF_TEMPLATES:
        token = config.get(name)
        tokens[name] = token.get("content", "") if isinstance(token, dict) else token or ""
    return Texts(tokenizer, template or PLAIN_TEMPLATE, tokens)


def _to_json(value: Any, **options: Any) -> str:
    """Render a value as JSON in a chat template, with non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(why: str) -> NoReturn:
    """Let a chat template refuse its messages (`raise_exception`)."""
    raise TemplateError(why)
