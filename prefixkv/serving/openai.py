"""OpenAI's interface as plain values: requests and the bodies of their answers.

A parameter that is unknown is an error that names it; so is a known one that asks for something
that is not served. `seed`, `stop`, `n` and the like mean what OpenAI defines; `top_k`, `ignore_eos`
and `cache_salt` are those of other engines.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from prefixkv.serving.http import ApiError, decode_body
from prefixkv.serving.wire import SamplingParams

MAX_SAMPLES: Final = 128
_MAX_STOPS: Final = 16
MAX_MESSAGES: Final = 4096
"""Most messages of a chat and their parts, together. A template takes some 10 us for each."""

_NEUTRAL_BYTES: Final = 256  # longest JSON of a value that is compared with `_NEUTRAL`
_DEFAULT_TOKENS: Final = 16  # most of an answer of /v1/completions, as OpenAI has it

# Parameters that are not served, and the values that ask for nothing; null always does.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "logit_bias": ({},), "logprobs": (False,), "metadata": ({},),
    "min_p": (0,), "modalities": (["text"],), "parallel_tool_calls": (True, False),
    "presence_penalty": (0,), "repetition_penalty": (1,), "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,),
}  # fmt: skip

T = TypeVar("T", bound="_RequestBase")

Text = Annotated[str, msgspec.Meta(max_length=1024)]
"""A name, a key or a string to stop at: kept as it is for as long as its request lives."""


# --- what is asked --------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _RequestBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that both kinds of request have."""

    model: Text
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Text | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def num_samples(self) -> int:
        """Number of answers that OpenAI's `n` asks for."""
        return 1 if self.n is None else self.n

    @property
    def streams(self) -> bool:
        """True if OpenAI's `stream` asks for the answer as events."""
        return bool(self.stream)

    @property
    def streams_usage(self) -> bool:
        """True if OpenAI's `stream_options` ask for an event with the usage at the end."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an answer, by OpenAI's `max_tokens`; None: as many as there is room
        for."""
        return self.max_tokens

    def sampling(self) -> SamplingParams:
        """Return how the answer's tokens are sampled, by OpenAI's parameters and defaults."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        # OpenAI's defaults, not the engine's: without a temperature its tokens are drawn.
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % 2**64,
            ignore_end=bool(self.ignore_eos),
            stop=tuple(stop),
        )

    def check(self) -> None:
        """Raise ApiError 400, with the name of OpenAI's parameter, for one that is out of range."""
        for name, least, most in (
            ("max_tokens", 1, 2**31 - 1), ("max_completion_tokens", 1, 2**31 - 1),
            ("n", 1, MAX_SAMPLES), ("temperature", 0, 100), ("top_p", 0, 1),
            ("top_k", -1, 2**31 - 1), ("seed", -(2**63), 2**64 - 1),
        ):  # fmt: skip
            value = getattr(self, name, None)
            if value is not None and not least <= value <= most:
                raise refused(name, f"is {value}, must be in [{least}, {most}]")
        if self.top_p == 0:
            raise refused("top_p", "is 0, must be above")
        # A single string, or none, is compared like a list of one.
        stop = self.stop if isinstance(self.stop, list) else ["-"]
        if "" in (self.stop, *stop):
            raise refused("stop", "has a string that is empty")
        if len(stop) > _MAX_STOPS:
            raise refused("stop", f"has {len(stop)} strings, at most {_MAX_STOPS} are taken")
        if self.cache_salt == "":
            raise refused("cache_salt", "is empty")
        if self.stream_options is not None and not self.streams:
            raise refused("stream_options", "is for streams: stream is not set")


class MessagePart(msgspec.Struct, frozen=True):
    """One part of a message; only text is accepted."""

    type: Text
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[MessagePart]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """Return the chat's message as chat templates take it. Raises ApiError for a part that is
        no text."""
        content = self.content
        if not isinstance(content, str):
            for part in content:
                if part.type != "text":
                    raise refused(
                        "messages", f"has a part of type {part.type!r}, only text is taken"
                    )
            content = "".join(part.text for part in content)
        # OpenAI renamed the role; templates know the old name.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class ChatRequest(_RequestBase, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None

    def check(self) -> None:
        """Check a chat's parameters, and bound the number of its messages and parts. See
        `_RequestBase.check`."""
        super().check()
        num = len(self.messages)
        if num <= MAX_MESSAGES:  # too many already: the parts need no counting
            lists = (one.content for one in self.messages if not isinstance(one.content, str))
            num += sum(map(len, lists))
        if num > MAX_MESSAGES:
            raise refused("messages", f"has {num} messages and parts, {MAX_MESSAGES} at most")

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a chat's answer; the newer of OpenAI's two parameters counts. See
        `_RequestBase.most_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_RequestBase, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/completions. Its prompt is one text or one list of tokens; several are
    refused."""

    prompt: str | list[int]

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a completion, never None. See `_RequestBase.most_tokens`."""
        return _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens


def parse(body: bytes, kind: type[T], context: int | None = None) -> T:
    """Decode and check a request in OpenAI's form, of `kind`. Raises ApiError 400, which names the
    wrong parameter.

    Only parameters that are served are decoded, and only once a prompt of tokens is known to have
    at most `context`: a body may hold millions of other values.
    """
    # 1. Names: an unknown one is refused; values are still raw JSON.
    found = _found_in(body, kind)
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    # 2. Parameters that are not served: their values must ask for nothing.
    neutral = [name for name in found if name not in known]
    for name in neutral:
        raw = bytes(found[name])
        value = decode_body(raw, Any) if len(raw) <= _NEUTRAL_BYTES else ...
        if value is not None and value not in _NEUTRAL[name]:
            raise ApiError(
                400, f"{name} is not served here", code="unsupported_parameter", param=name
            )
    # 3. Required ones, and the length of a prompt of tokens, counted in the raw JSON.
    for name, field in known.items():
        if field.required and name not in found:
            raise ApiError(400, f"{name} is missing", code="missing_required_parameter", param=name)
    if context is not None and "prompt" in found:
        num = _tokens_in(bytes(found["prompt"]))
        if num > context:
            raise too_long(num, 0, context, "prompt")
    # 4. Decode what is left. The neutral ones are cut out, since `kind` forbids unknown fields.
    if neutral:
        body = msgspec.json.encode({name: raw for name, raw in found.items() if name in known})
    try:
        made = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        why, _, where = str(error).partition(" - at `$.")
        param = where.rstrip("`") or None
        raise ApiError(400, f"{param}: {why}" if param else why, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    # 5. Ranges, which the types do not express.
    made.check()
    return made


def _found_in(body: bytes, kind: type[Any]) -> dict[str, msgspec.Raw]:
    """Return the parameters of OpenAI's in a body as raw JSON, by name. Raises ApiError for an
    unknown one."""
    try:
        raw = decode_body(body, _RAW[kind])
    except ApiError as error:
        # msgspec says which field is unknown only in its text. The name is cut: it comes from the
        # client.
        _, found, rest = error.message.partition("unknown field `")
        if not found:
            raise
        name = rest.partition("`")[0][:100]
        raise ApiError(
            400, f"there is no parameter {name}", code="unknown_parameter", param=name
        ) from None
    given = msgspec.structs.asdict(raw)
    return {name: value for name, value in given.items() if len(bytes(value))}


def _raw(kind: type[Any]) -> Any:
    """Make a type that takes the parameters of OpenAI's request `kind`, and the neutral ones, as
    raw JSON."""
    names = {field.name for field in msgspec.structs.fields(kind)} | set(_NEUTRAL)
    fields = [(name, msgspec.Raw, msgspec.field(default=msgspec.Raw(b""))) for name in names]
    return msgspec.defstruct("_Body", fields, forbid_unknown_fields=True)


_RAW: Final[dict[type[Any], Any]] = {kind: _raw(kind) for kind in (ChatRequest, CompletionRequest)}


def _tokens_in(raw: bytes) -> int:
    """Count the tokens of OpenAI's `prompt` in raw JSON; 0 if it is no list.

    >>> _tokens_in(b"[1, 2, 3]"), _tokens_in(b'"a, b"')
    (3, 0)
    """
    return raw.count(b",") + 1 if raw.startswith(b"[") else 0


def refused(name: str, why: str) -> ApiError:
    """Make OpenAI's error for a request's parameter with a value that is not accepted."""
    return ApiError(400, f"{name} {why}", code="invalid_value", param=name)


def too_long(
    num_prompt: int, num_answer: int, context: int, param: str, at_least: bool = False
) -> ApiError:
    """Make OpenAI's error for a prompt that, with its answer, exceeds the model's context.
    `at_least`: the prompt was not tokenized to its end, so its count is a lower bound."""
    asked = f"{'at least ' * at_least}{num_prompt} tokens" + (
        f" and {num_answer} of an answer" if num_answer else ""
    )
    return ApiError(
        400, f"the prompt has {asked}, the model takes {context} together",
        code="context_length_exceeded", param=param,
    )  # fmt: skip


def unknown_model(name: str) -> ApiError:
    """Make OpenAI's error for a model that is not served."""
    return ApiError(404, f"there is no model {name!r}", code="model_not_found", param="model")


# --- what is answered -----------------------------------------------------------------------------


class Usage(msgspec.Struct):
    """Tokens of a request, over all its answers. The prompt's KV came from three places:
    `decode_hit_tokens` were cached on the decode worker, `shared_tokens` were arriving there for
    another request, and the other `sent_tokens` were sent. Of the prompt, `prefill_hit_tokens` were
    cached on the prefill worker, which computed the other `computed_tokens`."""

    prompt_tokens: int
    completion_tokens: int = 0
    decode_hit_tokens: int = 0
    shared_tokens: int = 0
    prefill_hit_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """Return OpenAI's `usage`, with a field `prefixkv` beside OpenAI's own."""
        prompt = self.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {
                # OpenAI has one number for two caches: the longer hit is what the client was
                # spared.
                "cached_tokens": max(self.decode_hit_tokens, self.prefill_hit_tokens)
            },
            "prefixkv": {
                "decode_hit_tokens": self.decode_hit_tokens,
                "shared_tokens": self.shared_tokens,
                "prefill_hit_tokens": self.prefill_hit_tokens,
                "computed_tokens": prompt - self.prefill_hit_tokens,
                "sent_tokens": prompt - self.decode_hit_tokens - self.shared_tokens,
            },
        }


class Answers:
    """Bodies of one request's answer, in one piece or as events.

    Args:
        rid: the request's, without OpenAI's prefix.
        model: as the client named it.
        created: seconds since 1970.
        chat: True for /v1/chat/completions, False for /v1/completions.
    """

    def __init__(self, rid: str, model: str, created: int, chat: bool) -> None:
        self.chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{rid}", "created": created, "model": model,
        }  # fmt: skip

    def whole(self, texts: list[str], finishes: list[str | None], usage: Usage) -> dict[str, Any]:
        """Return OpenAI's body of an answer that is not streamed."""
        choices = []
        for i, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            content: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self.chat
                else {"text": text}
            )
            choices.append({"index": i, **content, "logprobs": None, "finish_reason": finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage.body()}

    def begin(self, sample: int) -> bytes:
        """Return OpenAI's event that opens a sample of the answer; empty for /v1/completions."""
        # Completions have no role to announce.
        if not self.chat:
            return b""
        return self._event([self._choice(sample, {"role": "assistant", "content": ""}, None)])

    def piece(self, sample: int, text: str, finish: str | None) -> bytes:
        """Return OpenAI's event for text of the answer that has arrived, and for the end of a
        sample."""
        return self._event([self._choice(sample, {"content": text} if text else {}, finish)])

    def usage(self, usage: Usage) -> bytes:
        """Return OpenAI's event with the answer's usage, which `include_usage` asks for."""
        return self._event([], usage=usage.body())

    def _choice(self, sample: int, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        )
        return {"index": sample, **content, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event({**self._head, "object": kind, "choices": choices, **more})


DONE: Final = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """Encode one server-sent event of OpenAI's interface."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def models(name: str, created: int, context: int) -> dict[str, Any]:
    """Return OpenAI's body of /v1/models, with the one model that is served."""
    return {"object": "list", "data": [model(name, created, context)]}


def model(name: str, created: int, context: int) -> dict[str, Any]:
    """Return OpenAI's body of /v1/models/NAME."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "prefixkv",
        "max_model_len": context,
    }  # fmt: skip
