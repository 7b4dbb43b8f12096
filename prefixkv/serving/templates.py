"""Chat templates, rendered as transformers renders them (`apply_chat_template`).

The rules are transformers' own and `tests/serving/test_templates.py` holds both together. Its
renderer is not imported: that takes 15 times as long as jinja2, and it keeps no line of an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from traceback import walk_tb
from typing import Any, Final, NoReturn

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from prefixkv.spi import CallerError, ConfigError

# For a model without a template of its own.
PLAIN_TEMPLATE: Final = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if documents %}documents: {{ documents | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DEFAULT: Final = "default"
_TOOLS: Final = "tool_use"  # the name of the template for chats with tools
# What reasoning is called in messages: the usual name, then those that older templates read.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# Arguments of `apply_chat_template` that are no variables of the template.
_NOT_TAKEN: Final = (
    "conversation", "messages", "continue_final_message", "tokenize", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
    "tokenizer_kwargs", "sanitize_control_tokens",
)  # fmt: skip


class TextError(CallerError):
    """The model's chat template refuses the messages."""


class ChatTemplates:
    """A model's chat templates. Immutable, so any thread may call it.

    A template is part of a model's download, so a sandbox keeps it from running code. What a client
    sends is only data to it. The time that a template takes has no bound but `range`'s of 100,000
    numbers a loop.

    Args:
        sources: the templates of Jinja by name, "default" for that of most models.
        tokens: special tokens that templates name, such as "bos_token".

    Raises: ConfigError for a template that is not read, with the line.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        environment = _environment()
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateSyntaxError as error:
                of = "" if name == DEFAULT else f"{name!r} "
                raise ConfigError(
                    f"the chat template {of}is not read: line {error.lineno}: {error.message}"
                ) from None
            except RecursionError:
                raise ConfigError("the chat template is not read: it is nested too deep") from None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return a chat's text, up to where the answer begins.

        Args:
            messages: of any JSON values. Keys that are None count as missing.
            variables: the template's variables. `tools` and `documents` are None without;
                `add_generation_prompt` is True; special tokens have their names, and
                `chat_template` is the name of one of several templates.
        Raises: TextError, with the line of the template if that refuses or fails.
        """
        given = dict(variables)
        for name in _NOT_TAKEN:
            if name in given:
                raise TextError(f"{name} is no variable of a chat template")
        template = self._choose(given.pop("chat_template", None), given.get("tools"))
        for name in ("tools", "documents"):
            some = given.setdefault(name, None)
            if some is not None and not (
                isinstance(some, list) and all(isinstance(one, dict) for one in some)
            ):
                raise TextError(f"{name} is no list of objects")
        given.setdefault("add_generation_prompt", True)
        # `dict(...)`: a variable may have the name of an argument of `render`, such as "self".
        values = {**self._tokens, **given, "messages": [_message(one) for one in messages]}
        try:
            return template.render(values)
        except Exception as error:  # a template can raise any: 1 / 0, a missing key, too deep
            line = _line(error)
            where = "" if line is None else f" (line {line})"
            why = str(error) or type(error).__name__
            raise TextError(f"the model's chat template refuses it{where}: {why}") from None

    def _choose(self, name: Any, tools: Any) -> Template:
        """Return the chat template of a name, or the one for this chat. Raises TextError."""
        if name is None:
            name = _TOOLS if tools is not None and _TOOLS in self._templates else DEFAULT
        if not isinstance(name, str) or name not in self._templates:
            # A client's own template would run here: it may only name one of the model's.
            names = ", ".join(sorted(self._templates))
            raise TextError(f"the model has no chat template {name!r:.50}, it has {names}")
        return self._templates[name]


def _environment() -> Environment:
    """Return the sandbox that chat templates run in, with what transformers gives them."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals.update(raise_exception=_refuse, strftime_now=_now, dict=_Dicts(), namespace=_Names)
    return made


class _Generation(Extension):
    """`{% generation %}` of chat templates: it marks text to train on, and renders what it has."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the inner part of a template's mark, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> Any:
        """Render the inner part of a template's mark."""
        return caller()


class _Dicts:
    """`dict` of chat templates, without the attributes of the class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a template's dict of these keys."""
        return dict.fromkeys(*args)


class _Names(Namespace):
    """`namespace` of chat templates, without names that begin with "_": they lead to Python's."""

    def __init__(*args: Any, **names: Any) -> None:  # so that a template's name may be "self"
        self, *rest = args
        attributes = dict(*rest, **names)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    """Raise SecurityError for a name that a chat template's namespace must not have."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name like {name!r}")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's message as templates take it: without None, its reasoning by each name."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _line(error: BaseException) -> int | None:
    """Return the line of a chat template that an error comes from, None if from no line."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    # Jinja names its frames so. The last is the innermost: of a macro, not of its call.
    lines = [
        line for frame, line in walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]  # fmt: skip
    return lines[-1] if lines else None


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Render a value as JSON in a chat template. Unlike Jinja's, it escapes nothing of HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format: str) -> str:
    """Return the local time in a chat template (`strftime_now`)."""
    return datetime.now().strftime(format)


def _refuse(message: Any) -> NoReturn:
    """Let a chat template refuse its messages (`raise_exception`)."""
    raise TemplateError(message)
