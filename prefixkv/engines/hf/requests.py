"""Inputs and outputs of the engines: plain values, as JSON for another process too."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec

from prefixkv import Hints, Request
from prefixkv.errors import RequestError
from prefixkv.spi import whole_number

MAX_LOGPROBS: Final = 20
"""Limit of the likeliest tokens per position, as OpenAI has it."""

LEAST: Final = -9999.0
"""Smallest log-probability: what is less, or no number, is this. JSON has no infinity."""

_ROUNDING: Final = 1e-3  # above 0, of a peer's number

Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""A string of a request that a worker keeps as it is, for as long as the request or its KV
lives."""

if TYPE_CHECKING:
    Tokens = Any  # of this process: any integer array too
else:
    Tokens = list[int]

Finish = Literal["stop", "length", "abort", "error"]


class Sampling(msgspec.Struct, frozen=True):
    """Settings for the choice of an answer's tokens.

    Args:
        temperature: divisor of the logits; 0: the largest logit wins, and nothing else counts.
        top_k: number of likeliest tokens that remain, with those equal to the last; 0: all.
        top_p: of these, the fewest likeliest tokens with shares that sum up to at least p; 1: all.
        seed: [0, 2**64). None: derived from the request's id.
        stop_tokens: ids that end the answer. The engine adds the model's own end tokens unless
            `ignore_end`.
        stop: strings that end the answer, and are not part of its text; they need an engine with a
            tokenizer.
        ignore_end: True where the model's end tokens do not end the answer.
        min_tokens: least tokens of the answer. Before, tokens that would end it are not chosen, and
            stop strings do not count, as with vLLM.
        logprobs: number of likeliest tokens whose log-probabilities come with each token's own, at
            most `MAX_LOGPROBS`; 0: only its own; None: none. They are of the model's distribution:
            temperature, top_k and top_p do not count.

    Raises: RequestError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    stop: tuple[Name, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"{name} is {value!r}, a number is needed")
        if not 0 <= self.temperature < math.inf:
            raise RequestError(f"temperature is {self.temperature!r}, must be in [0, infinity)")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p!r}, must be in (0, 1]")
        whole_number("top_k", self.top_k, 0, 2**31)
        whole_number("min_tokens", self.min_tokens, 0, 2**31)
        whole_number("seed", self.seed or 0, 0, 2**64)
        whole_number("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS + 1)
        for token in self.stop_tokens:
            whole_number("a stop token", token, 0, 2**31)
        if not all(isinstance(one, str) and one for one in self.stop):
            raise RequestError(f"stop is {self.stop!r}, strings that are not empty are needed")

    def ends(self, end_tokens: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end an answer, the model's among them unless `ignore_end`."""
        return frozenset(self.stop_tokens).union(() if self.ignore_end else end_tokens)

    def seeded(self, rid: str) -> int:
        """Return `seed`, or one from the request's id."""
        # Derived, not random: prefill and decode, and a retried request, must draw alike.
        if self.seed is not None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "little")


class Choice(msgspec.Struct, frozen=True):
    """The place of one token: number `position` of answer `sample` to a request."""

    sampling: Sampling = Sampling()
    seed: int = 0
    sample: int = 0
    position: int = 0


class Generate(msgspec.Struct, frozen=True):
    """A client's request to a decode worker.

    Args:
        rid: unique on the worker while it lives, without "/".
        tokens: the prompt, ids in [0, vocabulary).
        prefill: address of the prefill worker, `PrefillEngine.endpoint`.
        max_new_tokens: limit per answer.
        num_samples: answers to this prompt. They share its whole pages; see docs/engine.md.
        namespace, cacheable, priority, deadline_s, hints: see `Request`.
    """

    rid: Name
    tokens: Tokens
    prefill: Name
    sampling: Sampling = Sampling()
    max_new_tokens: int = 16
    num_samples: int = 1
    namespace: Any = None
    cacheable: bool = True
    priority: int = 0
    deadline_s: float | None = None
    hints: Hints = Hints()


class TokenLogprob(NamedTuple):
    """A token's log-probability, and the likeliest tokens at its position with theirs, the
    likeliest first. The token itself may be among them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class AnswerToken(msgspec.Struct, frozen=True):
    """One token of an answer, or its end without a token.

    `position` counts the answer's tokens from 0. `token` is None at an end by "abort" (of the
    client) or "error"; with "stop" it is the token that stopped. Of the prompt, `hit_tokens` were
    on decode (`host_tokens` of them in host memory), the next `shared_tokens` on their way for
    another request, the last `decode_computed_tokens` computed there, and those between sent. Of
    the sent ones `prefill_hit_tokens` had their KV on prefill. `text` is what this token makes
    certain: often empty, and without stop tokens and stop strings. `logprob` comes where
    `Sampling.logprobs` is set.
    """

    sample: int = 0
    position: int = 0
    token: int | None = None
    text: str = ""
    finish: Finish | None = None
    hit_tokens: int = 0
    prefill_hit_tokens: int = 0
    shared_tokens: int = 0
    logprob: TokenLogprob | None = None
    host_tokens: int = 0
    decode_computed_tokens: int = 0


class Output(AnswerToken, frozen=True, kw_only=True):
    """Of the request `rid`; `error` is why it has ended by "error"."""

    rid: str
    error: Exception | None = None


class PrefillJob(msgspec.Struct, frozen=True):
    """A decode worker's request to the prefill worker at `prefill`. `rid` is
    "worker/request/sample.generation".

    Prefill computes the prompt, sends its KV, and samples the next token, unless decode knows it
    already (`is_known`). A job that is not sent within `deadline_s` fails there.
    """

    rid: Name
    tokens: Tokens
    prefill: Name
    decode: Name
    room: int
    generation: int = 0
    namespace: Any = None
    cacheable: bool = True
    choice: Choice = Choice()
    is_known: bool = False
    deadline_s: float | None = None

    @property
    def answer_rid(self) -> str:
        """The answer's id on the decode node: "request/sample"."""
        return "/".join(self.rid.rsplit("/", 2)[1:]).rpartition(".")[0]

    def request(self) -> Request:
        """Raises as `Request` does."""
        return Request(
            self.rid, self.tokens, room=self.room, generation=self.generation, decode=self.decode,
            namespace=self.namespace, cacheable=self.cacheable,
            deadline_s=self.deadline_s,
        )  # fmt: skip


_First = tuple[int, int, TokenLogprob | None]
_first_decoder: Final = msgspec.msgpack.Decoder(_First)


def pack_first(token: int, hit_tokens: int, logprob: TokenLogprob | None = None) -> bytes:
    """Pack a room's `aux`: the first token, the number of cached prompt tokens, and the
    log-probabilities where they are wanted; some 300 bytes at most."""
    return msgspec.msgpack.encode((token, hit_tokens, logprob))


def unpack_first(
    aux: bytes, vocab_size: int, prompt_len: int, num_top: int | None = None
) -> _First:
    """Unpack the first token, the hit tokens, and the token's log-probabilities with `num_top`
    likely tokens, or as many as the vocabulary has; None: it has none. Raises ValueError for what a
    peer may not say."""
    # A peer's bytes: a token becomes an index into the embedding, and JSON takes no NaN.
    try:
        token, hit_tokens, logprob = first = _first_decoder.decode(aux)
    except msgspec.DecodeError as error:
        raise ValueError(f"aux of {len(aux)} bytes is no first token: {error}") from None
    if not 0 <= hit_tokens <= prompt_len:
        raise ValueError(f"{hit_tokens} tokens were hit, the prompt has {prompt_len}")
    pairs, num = [(token, 0.0)], None
    if logprob is not None:
        pairs += [(logprob.token, logprob.logprob), *logprob.top]
        num = len(logprob.top)
    if num != (None if num_top is None else min(num_top, vocab_size)):
        raise ValueError(f"log-probabilities with {num} likely tokens, asked for were {num_top}")
    for token_id, value in pairs:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token {token_id} is not in [0, {vocab_size})")
        # Written so that NaN fails too.
        if not LEAST <= value <= _ROUNDING:
            raise ValueError(f"log-probability {value} is not in [{LEAST}, 0]")
    return first
