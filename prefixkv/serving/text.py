"""Text to tokens, by a model's tokenizer and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from prefixkv.serving.templates import DEFAULT, PLAIN_TEMPLATE, ChatTemplates
from prefixkv.serving.templates import TextError as TextError
from prefixkv.spi import CallerError, ConfigError

_CHARS_PER_TOKEN: Final = 16  # a text longer than this per token of room is tried in part first
_TOKENS_OF_TEMPLATES: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class TooManyTokensError(CallerError):
    """A text has more tokens than there is room for; its beginning alone has at least `least`."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} tokens")
        self.least = least


class Texts:
    """A tokenizer and a chat template. Immutable, so any thread may call it.

    Args:
        tokenizer: of the package tokenizers.
        template: of Jinja, or several by name; see `ChatTemplates`.
        tokens: special tokens that templates name, such as "bos_token".

    `longest` is the length of the longest token in characters. A text of n characters has at least
    n / longest tokens, except for blanks that some tokenizers drop.
    """

    def __init__(
        self, tokenizer: Any, template: str | Mapping[str, str] = PLAIN_TEMPLATE,
        tokens: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        named = {DEFAULT: template} if isinstance(template, str) else template
        self._templates = ChatTemplates(named, tokens or {})

    def chat(
        self, messages: Sequence[Mapping[str, Any]], most: int = 0,
        variables: Mapping[str, Any] = _NONE,
    ) -> list[int]:  # fmt: skip
        """Return the tokens of a chat, rendered by the model's template, up to where the answer
        begins. Raises TextError, and as `plain`.

        Args:
            messages: of any JSON values (`content`, `tool_calls`, ...).
            most: see `plain`.
            variables: what a client gives the template: `tools`, `documents`, and others by name.
        """
        return self._ids(self._templates.render(messages, variables), False, most)

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
    """Return the tokenizer and chat templates of a model's folder, or of the small model for "".
    Raises ConfigError."""
    from prefixkv.engines.hf.text import load_tokenizer

    if not folder:
        from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer

        return Texts(small_tokenizer(), CHAT_TEMPLATE)
    tokenizer = load_tokenizer(folder)
    path = Path(folder)
    config = _read_json(path / "tokenizer_config.json")
    named = config
    if "added_tokens_decoder" not in config:  # older folders have them in a file of their own
        named = {**config, **_read_json(path / "special_tokens_map.json")}
    tokens = {}
    for name in _TOKENS_OF_TEMPLATES:
        token = named.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return Texts(tokenizer, _read_templates(path, config.get("chat_template")), tokens)


def _read_templates(path: Path, configured: Any) -> dict[str, str]:
    """Return the chat templates of a model's folder by name. Raises ConfigError.

    Args:
        path: the folder. Templates in files count, those of its config only without.
        configured: of `tokenizer_config.json`: a template, a list of several, or None.
    """
    files = {one.stem: one for one in sorted(path.glob("additional_chat_templates/*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files[DEFAULT] = path / "chat_template.jinja"
    if files:
        return {name: _read(file) for name, file in files.items()}
    if not configured:
        return {DEFAULT: PLAIN_TEMPLATE}
    if isinstance(configured, str):
        return {DEFAULT: configured}
    try:
        return {str(one["name"]): str(one["template"]) for one in configured}
    except (KeyError, TypeError):
        raise ConfigError(f"chat_template in {path}/tokenizer_config.json is not read") from None


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file of a model's folder, {} without a file. Raises ConfigError."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"{file} is not read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not read: it has no object")
    return found


def _read(file: Path) -> str:
    """Return the text of a file of a model's folder. Raises ConfigError."""
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not read: {error}") from None
