"""Inputs and outputs of the engines: plain values, for another process too."""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from prefixkv import Request
from prefixkv.engines.hf.logprobs import TokenLogprob, pack_logprob, unpack_logprob
from prefixkv.engines.hf.sampling import Choice, Sampling

_FIRST: Final = struct.Struct("<ii")

Finish = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Generate:
    """A client's request to a decode worker.

    Args:
        rid: unique on the worker while it lives, without "/".
        tokens: the prompt, ids in [0, vocabulary).
        prefill: address of the prefill worker, `PrefillEngine.endpoint`.
        max_new_tokens: limit per answer.
        num_samples: answers to this prompt. They share its whole pages; see docs/engine.md.
        namespace, cacheable, priority, deadline_s: see `Request`.
    """

    rid: str
    tokens: Any
    prefill: str
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 16
    num_samples: int = 1
    namespace: Hashable = None
    cacheable: bool = True
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One token of an answer, or its end without a token.

    `position` counts the answer's tokens from 0. `token` is None at an end by "abort" (of the
    client) or "error"; with "stop" it is the token that stopped. Of the prompt, `hit_tokens` were
    on decode (`host_tokens` of them in host memory), the next `shared_tokens` on their way for
    another request, the last `decode_computed_tokens` computed there, and those between sent. Of
    the sent ones `prefill_hit_tokens` had their KV on prefill. `text` is what this token makes
    certain: often empty, and without stop tokens and stop strings. `logprob` comes where
    `Sampling.logprobs` is set.
    """

    rid: str
    sample: int
    position: int
    token: int | None
    finish: Finish | None = None
    error: Exception | None = None
    hit_tokens: int = 0
    text: str = ""
    prefill_hit_tokens: int = 0
    shared_tokens: int = 0
    logprob: TokenLogprob | None = None
    host_tokens: int = 0
    decode_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A decode worker's request to the prefill worker at `prefill`.

    Prefill computes the prompt, sends its KV, and samples the next token, unless decode knows it
    already (`is_known`). A job that is not sent within `deadline_s` fails there.
    """

    rid: str
    tokens: npt.NDArray[np.int32]
    prefill: str
    decode: str
    room: int
    generation: int = 0
    namespace: Hashable = None
    cacheable: bool = True
    choice: Choice = field(default_factory=Choice)
    is_known: bool = False
    deadline_s: float | None = None

    def request(self) -> Request:
        """Raises as `Request` does."""
        return Request(
            self.rid, self.tokens, room=self.room, generation=self.generation, decode=self.decode,
            namespace=self.namespace, cacheable=self.cacheable,
            deadline_s=self.deadline_s,
        )  # fmt: skip


def pack_first(token: int, hit_tokens: int, logprob: TokenLogprob | None = None) -> bytes:
    """Pack a room's `aux`: the first token, the number of cached prompt tokens, and the
    log-probabilities where they are wanted; 172 bytes at most."""
    first = _FIRST.pack(token, hit_tokens)
    return first if logprob is None else first + pack_logprob(logprob)


def unpack_first(
    aux: bytes, vocab_size: int, prompt_len: int, num_top: int | None = None
) -> tuple[int, int, TokenLogprob | None]:
    """Unpack the first token, the hit tokens, and the token's log-probabilities with `num_top`
    likely tokens; None: it has none. Raises ValueError for numbers out of range."""
    # A peer's bytes: the token becomes an index into the embedding, so it is checked here.
    first, rest = aux[: _FIRST.size], aux[_FIRST.size :]
    if len(first) != _FIRST.size or (rest and num_top is None):
        raise ValueError(f"aux of {len(aux)} bytes, a token and a hit have {_FIRST.size}")
    token, hit_tokens = _FIRST.unpack(first)
    if not 0 <= token < vocab_size:
        raise ValueError(f"token {token} is not in [0, {vocab_size})")
    if not 0 <= hit_tokens <= prompt_len:
        raise ValueError(f"{hit_tokens} tokens were hit, the prompt has {prompt_len}")
    if num_top is None:
        return token, hit_tokens, None
    return token, hit_tokens, unpack_logprob(rest, token, num_top, vocab_size)
