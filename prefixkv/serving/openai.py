"""OpenAI's interface as plain values: requests and the bodies of their answers.

A field of a request is a parameter, and its type what is taken. A parameter that is unknown is an
error that names it; so is one of `_NEUTRAL` that asks for something. `top_k`, `ignore_eos` and
others are those of other engines. `null` is as good as nothing.
"""

from __future__ import annotations

import codecs
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from prefixkv.engines.hf.requests import (
    MAX_LOGPROBS,
    AnswerToken,
    Name,
    Sampling,
    TokenLogprob,
)
from prefixkv.serving.api import SessionFields, refused
from prefixkv.serving.http import ApiError, decode_body, not_decoded
from prefixkv.serving.text import TokenTexts
from prefixkv.serving.wire import TokenEvent

logger = logging.getLogger("prefixkv.http")

MAX_SAMPLES: Final = 128
"""Most answers of one call: its prompts, times `n`."""
MAX_MESSAGES: Final = 4096
"""Most messages of a chat, and parts of a message."""
BATCH_TOKENS: Final = 1 << 20
"""Most tokens of several prompts in one call, together."""

_DEFAULT_TOKENS: Final = 16  # most of an answer of /v1/completions, as OpenAI has it

# Values that ask for nothing, of parameters that are not served. Clients send them all the same.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    # OpenAI's
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,),
    "function_call": ("none", "auto"), "functions": ([],), "logit_bias": ({},),
    "modalities": (["text"],), "presence_penalty": (0,), "response_format": ({"type": "text"},),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,),
    "verbosity": ("medium",),
    # of vLLM and SGLang
    "add_special_tokens": (False,), "bad_words": ([],), "continue_final_message": (False,),
    "custom_params": ({},),
    "detokenize": (True,), "include_stop_str_in_output": (False,), "length_penalty": (1,),
    "logits_processors": ([],), "min_p": (0,), "no_stop_trim": (False,),
    "repetition_penalty": (1,), "return_hidden_states": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "session_params": ({},),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "typical_p": (1,),
    "use_beam_search": (False,), "vllm_xargs": ({},),
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

T = TypeVar("T", bound="_RequestBase")
_Many = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Likely = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_NotEmpty = Annotated[str, Meta(min_length=1, max_length=1024)]


# --- what is asked --------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class _RequestBase(SessionFields, kw_only=True, forbid_unknown_fields=True):
    """Parameters of both kinds of request."""

    model: Name
    max_tokens: _Many | None = None
    min_tokens: _Token = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    seed: int | None = None
    stop: _NotEmpty | Annotated[list[_NotEmpty], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[_Token], Meta(max_length=128)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    cache_salt: _NotEmpty = ""
    request_id: Name | None = None
    user: Name | None = None
    safety_identifier: Name | None = None

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
        return Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            top_k=top_k if self.top_k is None else max(self.top_k, 0),
            top_p=top_p if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % 2**64,
            stop_tokens=tuple(self.stop_token_ids),
            ignore_end=self.ignore_eos,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            min_tokens=self.min_tokens,
            logprobs=self.num_logprobs,
        )

    def check(self) -> None:
        """Raise ApiError 400, with the parameter's name, for what the types do not express."""
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:  # more than JSON's own
            raise refused("seed", f"must be in [{-(2**63)}, {2**64 - 1}]")
        if self.min_tokens > (self.most_tokens or 2**31):
            why = f"is {self.min_tokens}, more than the {self.most_tokens} that an answer may have"
            raise refused("min_tokens", why)


class ChatRequest(_RequestBase, kw_only=True):
    """A body of /v1/chat/completions; `check` gives `messages` the form that templates take."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Many | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Name | None = None
    logprobs: bool = False
    top_logprobs: _Likely = 0
    add_generation_prompt: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages: only those that are given."""
        found = {
            "tools": self.tools or None, "documents": self.documents,
            "reasoning_effort": self.reasoning_effort,
            "add_generation_prompt": self.add_generation_prompt,
        }  # fmt: skip
        given = {name: value for name, value in found.items() if value is not None}
        return given | self.chat_template_kwargs

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "needs logprobs to be true")
        checked = _converted(self.messages, list[_Message], "messages")
        pairs = zip(self.messages, checked, strict=True)
        self.messages = [
            one.plain(f"messages[{i}]", fields) for i, (fields, one) in enumerate(pairs)
        ]

    @property
    def most_tokens(self) -> int | None:
        """The newer of OpenAI's two parameters counts."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_RequestBase, kw_only=True):
    """A body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: _Likely | bool | None = None

    @property
    def prompts(self) -> list[Any]:
        """Texts, or lists of tokens."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)

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
        kinds = {str} if isinstance(self.prompt, str) else {*map(type, self.prompt)}
        if len(kinds) != 1:
            how = "has texts, tokens and lists of them together" if kinds else "is an empty list"
            raise refused("prompt", how)
        num = len(self.prompts)
        if num * self.n > MAX_SAMPLES:
            why = f"has {num} prompts for n={self.n} answers each: at most {MAX_SAMPLES}"
            raise refused("prompt", f"{why} answers are given in one call")
        num_tokens = sum(len(one) for one in self.prompts if kinds == {list})
        if num > 1 and num_tokens > BATCH_TOKENS:
            why = f"has {num_tokens} tokens in its prompts, at most {BATCH_TOKENS} are taken"
            raise refused("prompt", f"{why} together")


def parse(body: bytes, kind: type[T]) -> T:
    """Decode and check a request. Raises ApiError 400, which names the wrong parameter."""
    found = decode_body(body, dict[str, Any])
    given = {name: value for name, value in found.items() if value is not None}
    for name in given.keys() & _IGNORED:
        del given[name]
        _warn(name)
    for name in given.keys() & (_NEUTRAL.keys() - {*kind.__struct_fields__}):
        taken = _NEUTRAL[name]
        # To draw as many as are shown asks for nothing; a template has its special tokens itself.
        if name == "best_of":
            taken = (given.get("n", 1),)
        elif name == "add_special_tokens":
            taken = (kind is CompletionRequest,)
        if given.pop(name) not in taken:
            shown = msgspec.json.encode(taken[0]).decode()
            why = f"{name} is not served here but for {shown}: leave it out"
            raise ApiError(400, why, code="unsupported_parameter", param=name)
    asked: T = _converted(given, kind)
    asked.check()
    return asked


@cache
def _warn(name: str) -> None:
    logger.warning("%s changes no answer here: it is ignored wherever it is sent", name)


def _converted(value: Any, kind: Any, name: str = "") -> Any:
    """Return a value of JSON as one of `kind`. Raises ApiError 400, with a place below `name`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise not_decoded(error, name) from None


# --- messages -------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    """Kinds of parts that are text; those of OpenAI's other interface too."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    """What is checked of a message; templates may use further fields."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[_Part], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def plain(self, where: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return `fields` as chat templates take them: a content that is a text, or None where an
        assistant or a tool said nothing. Raises ApiError 400."""
        content = self.content
        if isinstance(content, list):
            texts = [one.refusal if one.type == "refusal" else one.text for one in content]
            if None in texts:
                raise refused(f"{where}.content", "has a part without its text")
            content = "".join(map(str, texts))
        if content is None and self.role in ("system", "developer", "user"):
            raise refused(f"{where}.content", "is missing")
        # Clients send null for fields that they do not use, and no calls as an empty list;
        # templates ask whether a field is there.
        kept = {
            name: value for name, value in fields.items()
            if value is not None and (name != "tool_calls" or value)
        }  # fmt: skip
        # OpenAI renamed the role; templates know the old name.
        role = "system" if self.role == "developer" else self.role
        return {**kept, "role": role, "content": content}


def too_long(num_prompt: int, num_answer: int, context: int, param: str) -> ApiError:
    """Make the error for a prompt that, with its answer, exceeds the context."""
    asked = f"{num_prompt} tokens" + (f" and {num_answer} of an answer" if num_answer else "")
    return ApiError(
        400, f"the prompt has {asked}, the model takes {context} together",
        code="context_length_exceeded", param=param,
    )  # fmt: skip


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"there is no model {name!r}", code="model_not_found", param="model")


# --- what is answered -----------------------------------------------------------------------------


class Usage(msgspec.Struct):
    """Tokens of a request, over all its prompts and answers. Of the prompts' KV `decode_hit_tokens`
    were cached on decode (`decode_host_tokens` of these were loaded from its host memory),
    `shared_tokens` were arriving there for another request, `decode_computed_tokens` were computed
    there, and the other `sent_tokens` were sent. `prefill_hit_tokens` were cached on prefill, which
    computed the others that decode did not, `computed_tokens`; none of a prompt of which decode has
    computed all that it lacked."""

    prompt_tokens: int
    output_tokens: int = 0
    decode_hit_tokens: int = 0
    decode_host_tokens: int = 0
    shared_tokens: int = 0
    decode_computed_tokens: int = 0
    prefill_hit_tokens: int = 0
    computed_tokens: int = 0
    sent_tokens: int = 0
    cached_tokens: int = 0  # OpenAI has one number for two caches: of each prompt the longer hit

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
        self.cached_tokens += max(first.hit_tokens, first.prefill_hit_tokens)
        # A prompt that decode has whole is computed by prefill for its first token, or by decode.
        if sent_tokens or not first.decode_computed_tokens:
            self.computed_tokens += not_here - first.prefill_hit_tokens

    def body(self) -> dict[str, Any]:
        """Return OpenAI's `usage`, with a field `prefixkv`."""
        parts = msgspec.structs.asdict(self)
        prompt, output, cached = map(parts.pop, ("prompt_tokens", "output_tokens", "cached_tokens"))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "prefixkv": parts,
        }


class Answers:
    """Bodies of the answers to one request, in one piece or as events, made of their outputs. `rid`
    is without OpenAI's prefix. `logprobs`: None where they are not asked for."""

    def __init__(
        self, rid: str, asked: ChatRequest | CompletionRequest, usage: Usage,
        logprobs: AnswerLogprobs | None = None,
    ) -> None:  # fmt: skip
        self._chat, self._usage = isinstance(asked, ChatRequest), usage
        self._options = asked.stream_options
        self._show: Callable[[TokenEvent], Any] = logprobs.show if logprobs else lambda _: None
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{rid}", "created": int(time.time()),
            "model": asked.model,
        }  # fmt: skip
        self._begun: set[int] = set()  # samples with a piece

    def whole(self, outputs: Iterable[TokenEvent]) -> dict[str, Any]:
        samples: defaultdict[int, list[TokenEvent]] = defaultdict(list)
        for output in outputs:
            samples[output.sample].append(output)
        choices = []
        for sample, parts in sorted(samples.items()):
            text = "".join(one.text for one in parts)
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._chat else {"text": text}
            shown = [body for body in map(self._show, parts) if body is not None]
            choices.append(_choice(sample, content, parts[-1].finish, joined(shown) or None))
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage.body()}

    def piece(self, output: TokenEvent) -> bytes:
        """Return the events of an output, behind those that open its sample if it is the first;
        empty if it shows nothing."""
        sample, text, opening = output.sample, output.text, b""
        if sample not in self._begun and self._chat:  # completions have no role to announce
            opening = self._event(
                [_choice(sample, {"delta": {"role": "assistant", "content": ""}})]
            )
        self._begun.add(sample)
        logprobs = self._show(output)
        if not text and output.finish is None and logprobs is None:
            return opening
        delta = {"content": text} if text else {}
        content = {"delta": delta} if self._chat else {"text": text}
        return opening + self._event([_choice(sample, content, output.finish, logprobs)])

    def end(self) -> bytes:
        """Return the last events."""
        told = self._event([], True) if self._options.include_usage else b""
        return told + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], tells_usage: bool = False) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices}
        if tells_usage or self._options.continuous_usage_stats:
            body["usage"] = self._usage.body()
        return event(body)


def _choice(
    sample: int, content: dict[str, Any], finish: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    return {"index": sample, **content, "logprobs": logprobs, "finish_reason": finish}


def event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def model(name: str, created: int, context: int, temperature: float = 1.0) -> dict[str, Any]:
    """`temperature` is that of requests without one."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "prefixkv",
        "max_model_len": context, "default_temperature": temperature,
    }  # fmt: skip


# --- log-probabilities ----------------------------------------------------------------------------


class AnswerLogprobs:
    """Log-probabilities of the model's own distribution, before temperature, top_k and top_p. Every
    token that was sampled has its entry, the one that stops the answer included, although it is not
    in the text. `chat`: in the form of chat completions, not of completions."""

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
        if self._texts.is_shown(one.token) and (data := self._texts.data(one.token)):
            decoder = self._decoders[sample]
            num = at + len(decoder.decode(data[:1]))
            # A token begins behind a character that is left incomplete before it.
            at = num - (not decoder.getstate()[0])
            self._num_chars[sample] = num + len(decoder.decode(data[1:]))
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
