"""OpenAI's interface as plain values: requests and the bodies of their answers.

A field of a request is a parameter, and its type what is taken. A parameter that is unknown is an
error that names it; so is one of `_UNSERVED` that asks for something. `top_k`, `ignore_eos` and
others are those of other engines. `null` is as good as nothing.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta, Raw

from prefixkv.engines.hf.requests import MAX_LOGPROBS, AnswerToken, Name, Sampling
from prefixkv.serving.failures import refused
from prefixkv.serving.hints import SessionFields
from prefixkv.serving.http import ApiError, decode_body
from prefixkv.serving.text import Arguments

logger = logging.getLogger("prefixkv.http")

MAX_SAMPLES: Final = 128
"""Most answers of one call: its prompts, times `n`."""
MAX_MESSAGES: Final = 4096
"""Most messages of a chat and their parts, together. A template takes some 10 us for each."""
BATCH_TOKENS: Final = 1 << 20
"""Most tokens of several prompts in one call, together."""

_EXTRA_BYTES: Final = 1 << 20  # JSON of what a chat template is given beside the messages
_DEFAULT_TOKENS: Final = 16  # most of an answer of /v1/completions, as OpenAI has it

# Parameters that are not served, and the values that ask for nothing; null always does.
_UNSERVED: Final[dict[str, tuple[Any, ...]]] = {
    # OpenAI's
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,),
    "function_call": ("none", "auto"), "functions": ([],), "logit_bias": ({},),
    "modalities": (["text"],), "prediction": (), "presence_penalty": (0,),
    "response_format": ({"type": "text"},), "suffix": ("",), "tool_choice": ("none", "auto"),
    "tools": ([],), "top_logprobs": (0,), "verbosity": ("medium",), "web_search_options": (),
    # of vLLM and SGLang: what is drawn
    "allowed_token_ids": (), "bad_words": ([],), "custom_logit_processor": (),
    "custom_params": ({},), "ebnf": (), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_regex": (), "guided_whitespace_pattern": (),
    "json_schema": (), "length_penalty": (1,), "logits_processors": ([],), "min_p": (0,),
    "regex": (), "repetition_detection": (), "repetition_penalty": (1,), "structured_outputs": (),
    "thinking_token_budget": (), "typical_p": (1,), "use_beam_search": (False,),
    # how it is shown, and where it ends
    "detokenize": (True,), "include_stop_str_in_output": (False,), "logprob_token_ids": (),
    "no_stop_trim": (False,),
    "prompt_logprobs": (), "return_hidden_states": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "stop_regex": (),
    # what is asked, and how it is served
    "add_special_tokens": (), "chat_template": (), "continue_final_message": (False,),
    "kv_transfer_params": (), "lora_path": (), "prompt_embeds": (), "session_params": ({},),
    "truncate_prompt_tokens": (), "vllm_xargs": ({},),
}  # fmt: skip

# Parameters whose value changes no answer here, whatever it is.
_IGNORED: Final = frozenset({
    # OpenAI's
    "metadata", "parallel_tool_calls", "service_tier", "store",
    # of vLLM and SGLang
    "data_parallel_rank", "guided_decoding_backend", "include_reasoning", "media_io_kwargs",
    "mm_processor_kwargs", "priority", "rid", "separate_reasoning", "stream_interval",
    "stream_reasoning",
})  # fmt: skip
_warned: Final[set[str]] = set()  # of these, the ones that the log has named

T = TypeVar("T", bound="_RequestBase")
_Many = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Likely = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_NotEmpty = Annotated[str, Meta(min_length=1, max_length=1024)]
_PROMPT: Any = str | list[str | int | list[int]]


# --- what is asked --------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class _RequestBase(SessionFields, kw_only=True):
    """Parameters of both kinds of request."""

    model: Name
    max_tokens: _Many | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    seed: int | None = None
    stop: _NotEmpty | Annotated[list[_NotEmpty], Meta(max_length=16)] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=128)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: _NotEmpty | None = None
    request_id: Name | None = None
    user: Name | None = None
    safety_identifier: Name | None = None

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def streams_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def streams_usage_always(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens per position; 0: only the chosen token's; None: none."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """None stands for as many as there is room for."""
        return self.max_tokens

    def sampling(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
        """The arguments count where the request has none of its own."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            top_k=top_k if self.top_k is None else max(self.top_k, 0),
            top_p=top_p if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % 2**64,
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_end=bool(self.ignore_eos),
            stop=tuple(stop),
            min_tokens=self.min_tokens or 0,
            logprobs=self.num_logprobs,
        )

    def check(self) -> None:
        """Raise ApiError 400, with the parameter's name, for what the types do not express."""
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:  # more than JSON's own
            raise refused("seed", f"must be in [{-(2**63)}, {2**64 - 1}]")
        if (self.min_tokens or 0) > (self.most_tokens or 2**31):
            why = f"is {self.min_tokens}, more than the {self.most_tokens} that an answer may have"
            raise refused("min_tokens", why)


class ChatRequest(_RequestBase, kw_only=True):
    """A body of /v1/chat/completions; `_plain_messages` makes `messages`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: _Many | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Name | None = None
    logprobs: bool | None = None
    top_logprobs: _Likely | None = None
    add_generation_prompt: bool | None = None

    NEUTRAL: ClassVar = {"add_special_tokens": (False,)}
    """Values of a parameter that ask for nothing in this kind of request, beside `_UNSERVED`."""

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages: only those that are given."""
        found = {
            "tools": self.tools or None, "documents": self.documents or None,
            "reasoning_effort": self.reasoning_effort,
            "add_generation_prompt": self.add_generation_prompt,
        }  # fmt: skip
        given = {name: value for name, value in found.items() if value is not None}
        return given | (self.chat_template_kwargs or {})

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "needs logprobs to be true")
        if "messages" in (self.chat_template_kwargs or {}):
            why = "has messages, which are a parameter of their own"
            raise refused("chat_template_kwargs", why)
        num_bytes = len(msgspec.json.encode(self.variables))
        if num_bytes > _EXTRA_BYTES:
            name = next(
                one for one in ("tools", "documents", "chat_template_kwargs") if getattr(self, one)
            )
            why = f"and the like have {num_bytes} bytes, at most {_EXTRA_BYTES} are taken"
            raise refused(name, why)
        self.messages = _plain_messages(self.messages)

    @property
    def most_tokens(self) -> int | None:
        """The newer of OpenAI's two parameters counts."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_RequestBase, kw_only=True):
    """A body of /v1/completions; `_decode_prompts` makes the list `prompt`, also of one."""

    prompt: list[str] | list[list[int]]
    logprobs: _Likely | bool | None = None

    NEUTRAL: ClassVar = {"add_special_tokens": (True,)}

    @property
    def num_logprobs(self) -> int | None:
        # Clients of both endpoints send true and false here too.
        if isinstance(self.logprobs, bool):
            return 1 if self.logprobs else None
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        """It is never None."""
        return _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        super().check()
        num = len(self.prompt)
        if num * self.num_samples > MAX_SAMPLES:
            why = f"has {num} prompts for n={self.num_samples} answers each: at most {MAX_SAMPLES}"
            raise refused("prompt", f"{why} answers are given in one call")


def _body_of(kind: type[Any]) -> Any:
    """Make the type of a body: `kind`, with what is not served, and prompts, as raw JSON."""
    names = (_UNSERVED.keys() | _IGNORED) - {*kind.__struct_fields__}
    fields: list[Any] = [(name, Raw, msgspec.field(default=Raw(b""))) for name in names]
    if kind is CompletionRequest:
        fields.append(("prompt", Raw))
    return msgspec.defstruct(
        "Body", fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True
    )


_BODIES: Final[dict[type[Any], Any]] = {
    kind: _body_of(kind) for kind in (ChatRequest, CompletionRequest)
}


def parse(body: bytes, kind: type[T], context: int | None = None) -> T:
    """Decode and check a request. Raises ApiError 400, which names the wrong parameter.

    Prompts of tokens are decoded once they are known to have at most `context`, or `BATCH_TOKENS`
    together: a body may hold millions.
    """
    found = decode_body(body, _BODIES[kind])
    for name in found.__struct_fields__:
        if name in kind.__struct_fields__ or (raw := bytes(getattr(found, name))) in (b"", b"null"):
            continue
        if name not in _IGNORED:
            _check_neutral(name, raw, found)
        elif name not in _warned:
            _warned.add(name)
            logger.warning("%s changes no answer here: it is ignored wherever it is sent", name)
    values = {name: getattr(found, name) for name in kind.__struct_fields__}
    if "prompt" in values:
        values["prompt"] = _decode_prompts(bytes(values["prompt"]).strip(), context)
    # Without the raw values, which would keep the whole body.
    made = kind(**values)
    made.check()
    return made


def _check_neutral(name: str, raw: bytes, asked: Any) -> None:
    """Raise ApiError for a parameter that is not served, unless its value asks for nothing."""
    taken = (*_UNSERVED[name], *asked.NEUTRAL.get(name, ()))
    if name == "best_of":  # it asks for nothing where it is `n`
        taken = (asked.num_samples,)
    value = decode_body(raw, Any, name) if len(raw) <= 256 else ...
    if value not in taken:
        # The first of them says what a client may send instead.
        shown = f" but for {msgspec.json.encode(taken[0]).decode()}" if taken else ""
        raise ApiError(
            400, f"{name} is not served here{shown}: leave it out", code="unsupported_parameter",
            param=name,
        )  # fmt: skip


def _decode_prompts(raw: bytes, context: int | None) -> list[str] | list[list[int]]:
    """Raises ApiError 400 for too many prompts, or for more tokens than `context`, undecoded."""
    first = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
    if first and first not in b'"]':
        num = raw.count(b",") + 1
        if first == b"[":  # no text is in it, so each bracket is a list
            _check_prompts(raw.count(b"[") - 1)
            if num > max(BATCH_TOKENS, context or 0):
                why = f"has {num} tokens in its prompts, at most {BATCH_TOKENS} are taken together"
                raise refused("prompt", why)
        elif context is not None and num > context:
            raise too_long(num, 0, context, "prompt")
    found: Any = decode_body(raw, _PROMPT, "prompt")
    if isinstance(found, str):
        return [found]
    kinds = {*map(type, found)}
    if len(kinds) != 1:
        how = "is an empty list" if not kinds else "has texts, tokens and lists of them together"
        raise refused("prompt", how)
    if kinds == {int}:
        return [found]
    _check_prompts(len(found))
    return list(found)


def _check_prompts(num: int) -> None:
    if num > MAX_SAMPLES:
        raise refused("prompt", f"has {num} prompts, at most {MAX_SAMPLES} are taken in one call")


# --- messages -------------------------------------------------------------------------------------

# Kinds of parts that are text, and where; those of OpenAI's other interface too.
_PARTS: Final = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal",
}  # fmt: skip
_OTHER_NAMES: Final = {
    "developer": "system"
}  # OpenAI renamed the role; templates know the old name


def _plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, with all their fields. Raises ApiError 400."""
    if not messages:
        raise refused("messages", "is empty")
    lists = (one["content"] for one in messages if isinstance(one.get("content"), list))
    num = len(messages) + sum(map(len, lists))
    if num > MAX_MESSAGES:
        raise refused("messages", f"has {num} messages and parts, {MAX_MESSAGES} at most")
    return [_plain_message(f"messages[{i}]", fields) for i, fields in enumerate(messages)]


def _plain_message(where: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Raises ApiError, with `where`, for a message without a role, and for parts without text."""
    role = fields.get("role")
    if not isinstance(role, str) or not role or len(role) > 64:
        raise refused(f"{where}.role", "has to be a role, such as system, user, assistant or tool")
    name = fields.get("name")
    if name is not None and not isinstance(name, str):
        raise refused(f"{where}.name", "has to be a text")
    # Clients send null for fields that they do not use; templates ask whether a field is there.
    kept = {key: value for key, value in fields.items() if value is not None}
    kept["role"] = _OTHER_NAMES.get(role, role)
    kept["content"] = _text_of(where, fields)
    # Clients send back an answer without calls as it was: some templates ask whether the field is
    # there.
    if kept.get("tool_calls") == []:
        del kept["tool_calls"]
    if "tool_calls" in kept:
        kept["tool_calls"] = _calls_of(f"{where}.tool_calls", kept["tool_calls"])
    return kept


def _text_of(where: str, fields: dict[str, Any]) -> str | None:
    """Return the text of a message, its parts joined. None where an assistant said nothing, for
    instance since it called tools, or a tool answered nothing. Raises ApiError."""
    content = fields.get("content")
    if content is None:
        if fields["role"] not in ("system", "developer", "user"):
            return None
        raise refused(f"{where}.content", "is missing")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(f"{where}.content", "has to be a text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise refused(f"{where}.content[{i}]", "has to be an object with a type")
        if kind not in _PARTS:
            raise refused(
                f"{where}.content", f"has a part of type {kind[:100]!r}, only text is taken"
            )
        text = part.get(_PARTS[kind])
        if not isinstance(text, str):
            raise refused(f"{where}.content[{i}].{_PARTS[kind]}", "has to be a text")
        texts.append(text)
    return "".join(texts)


def _calls_of(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a message. OpenAI has their arguments as a text of JSON; templates
    write them as JSON themselves, so an object in such a text is decoded. Raises ApiError."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise refused(where, "has to be a list of objects")
    found = []
    for call in calls:
        function = call.get("function")
        text = function.get("arguments") or "{}" if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(text, str):
            try:
                arguments = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                arguments = None
            # A model may have written what is no object: the template then has its text.
            if isinstance(arguments, dict):
                decoded = Arguments(arguments, text)
                call = {**call, "function": {**function, "arguments": decoded}}
        found.append(call)
    return found


def too_long(
    num_prompt: int, num_answer: int, context: int, param: str, at_least: bool = False
) -> ApiError:
    """Make the error for a prompt that, with its answer, exceeds the context. `at_least`: the
    prompt was not tokenized to its end, so its count is a lower bound."""
    asked = f"{'at least ' * at_least}{num_prompt} tokens" + (
        f" and {num_answer} of an answer" if num_answer else ""
    )
    return ApiError(
        400, f"the prompt has {asked}, the model takes {context} together",
        code="context_length_exceeded", param=param,
    )  # fmt: skip


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"there is no model {name!r}", code="model_not_found", param="model")


# --- what is answered -----------------------------------------------------------------------------


_USAGE_PARTS: Final = (
    "decode_hit_tokens", "decode_host_tokens", "shared_tokens", "decode_computed_tokens",
    "prefill_hit_tokens", "computed_tokens", "sent_tokens",
)  # fmt: skip


class Usage(msgspec.Struct):
    """Tokens of a request, over all its prompts and answers. Of the prompts' KV `decode_hit_tokens`
    were cached on decode (`decode_host_tokens` of these were loaded from its host memory),
    `shared_tokens` were arriving there for another request, `decode_computed_tokens` were computed
    there, and the other `sent_tokens` were sent. `prefill_hit_tokens` were cached on prefill, which
    computed the others that decode did not, `computed_tokens`; none of a prompt of which decode has
    computed all that it lacked."""

    prompt_tokens: int
    completion_tokens: int = 0
    decode_hit_tokens: int = 0
    shared_tokens: int = 0
    prefill_hit_tokens: int = 0
    decode_host_tokens: int = 0
    decode_computed_tokens: int = 0
    sent_tokens: int = 0
    computed_tokens: int = 0

    def add_prompt(self, num_tokens: int, first: AnswerToken) -> None:
        """Count where the KV of a prompt came from, as its first token says."""
        not_here = num_tokens - first.decode_computed_tokens
        sent_tokens = not_here - first.hit_tokens - first.shared_tokens
        self.decode_hit_tokens += first.hit_tokens
        self.shared_tokens += first.shared_tokens
        self.prefill_hit_tokens += first.prefill_hit_tokens
        self.decode_host_tokens += first.host_tokens
        self.decode_computed_tokens += first.decode_computed_tokens
        self.sent_tokens += sent_tokens
        # A prompt that decode has whole is computed by prefill for its first token, or by decode.
        if sent_tokens or not first.decode_computed_tokens:
            self.computed_tokens += not_here - first.prefill_hit_tokens

    def body(self) -> dict[str, Any]:
        """Return OpenAI's `usage`, with a field `prefixkv`."""
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
            "prefixkv": {name: getattr(self, name) for name in _USAGE_PARTS},
        }


class Answers:
    """Bodies of one request's answer, in one piece or as events. `rid` is without OpenAI's prefix;
    `created` is in seconds since 1970."""

    def __init__(self, rid: str, model: str, created: int, chat: bool) -> None:
        self.chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{rid}", "created": created, "model": model,
        }  # fmt: skip

    def whole(
        self, texts: list[str], finishes: list[str | None], usage: Usage,
        logprobs: list[Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """`logprobs` of each sample have their final form (`AnswerLogprobs`)."""
        choices = []
        for i, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            content: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self.chat
                else {"text": text}
            )
            found = logprobs[i] if logprobs else None
            choices.append({"index": i, **content, "logprobs": found, "finish_reason": finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage.body()}

    def begin(self, sample: int, usage: Usage | None = None) -> bytes:
        """Return the event that opens a sample; empty for /v1/completions."""
        # Completions have no role to announce.
        if not self.chat:
            return b""
        more = {} if usage is None else {"usage": usage.body()}
        opening = {"role": "assistant", "content": ""}
        return self._event([self._choice(sample, opening, None)], **more)

    def piece(
        self, sample: int, text: str, finish: str | None, usage: Usage | None = None,
        logprobs: Any = None,
    ) -> bytes:  # fmt: skip
        """Return the event for text that has arrived, and for the end of a sample."""
        more = {} if usage is None else {"usage": usage.body()}
        delta = {"content": text} if text else {}
        return self._event([self._choice(sample, delta, finish, logprobs)], **more)

    def usage(self, usage: Usage) -> bytes:
        return self._event([], usage=usage.body())

    def _choice(
        self, sample: int, delta: dict[str, str], finish: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        )
        return {"index": sample, **content, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event({**self._head, "object": kind, "choices": choices, **more})


DONE: Final = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def models(name: str, created: int, context: int, temperature: float = 1.0) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, created, context, temperature)]}


def model(name: str, created: int, context: int, temperature: float = 1.0) -> dict[str, Any]:
    """`temperature` is that of requests without one."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "prefixkv",
        "max_model_len": context, "default_temperature": temperature,
    }  # fmt: skip
