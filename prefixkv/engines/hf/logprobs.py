"""Log-probabilities of tokens as OpenAI's interface has them: log_softmax of the logits in float32,
before temperature, top_k and top_p. The first token's travel with it from prefill."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

MAX_LOGPROBS: Final = 20
"""Limit of the likeliest tokens per position, as OpenAI has it."""

LEAST: Final = -9999.0
"""Smallest log-probability: what is less, or no number, is this. JSON has no infinity."""

_ROUNDING: Final = 1e-3  # above 0, of a peer's number
_ROWS: Final = 64  # positions whose float32 distributions are in memory at once
_CHOSEN: Final = struct.Struct("<f")
_LIKELY: Final = struct.Struct("<if")


class TokenLogprob(NamedTuple):
    """A token's log-probability, and the likeliest tokens at its position with theirs, the
    likeliest first. The token itself may be among them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """At most `_ROWS` distributions are in memory. O(rows * vocabulary).

    Args:
        logits: [len(tokens), vocabulary], any float type and device.
        num_top: the number of likeliest tokens per row; never more than there are are returned.
    """
    found: list[TokenLogprob] = []
    for begin in range(0, len(tokens), _ROWS):
        some = slice(begin, begin + _ROWS)
        logs = torch.log_softmax(logits[some].float(), -1)
        logs = logs.nan_to_num(nan=LEAST, neginf=LEAST).clamp_(LEAST, 0.0)
        ids = torch.tensor(tokens[some], device=logs.device)
        chosen = logs.gather(1, ids[:, None]).squeeze(1).tolist()
        # One `topk` for the most that any row needs: its first n are the n likeliest of each row.
        most = min(max(num_top[some]), logs.shape[-1])
        best = logs.topk(most)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for token, logprob, (likely, values), num in zip(
            tokens[some], chosen, rows, num_top[some], strict=True
        ):
            top = tuple(zip(likely[:num], values[:num], strict=True))
            found.append(TokenLogprob(int(token), logprob, top))
    return found


def pack_logprob(one: TokenLogprob) -> bytes:
    """Pack without the token itself: 4 bytes, and 8 per likely token."""
    return _CHOSEN.pack(one.logprob) + b"".join(_LIKELY.pack(*pair) for pair in one.top)


def unpack_logprob(data: bytes, token: int, num_top: int, vocab_size: int) -> TokenLogprob:
    """Unpack what `pack_logprob` packed for `token`, with `num_top` likely tokens, or as many as
    the vocabulary has. Raises ValueError for another size, or numbers out of range."""
    # A peer's bytes: clients look the token ids up, and JSON takes no NaN.
    num = min(num_top, vocab_size)
    size = _CHOSEN.size + num * _LIKELY.size
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes of log-probabilities, {num} likely tokens have {size}")
    (logprob,) = _CHOSEN.unpack_from(data)
    top = tuple(_LIKELY.iter_unpack(data[_CHOSEN.size :]))
    one = TokenLogprob(token, logprob, top)
    for token, logprob in ((one.token, one.logprob), *one.top):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is not in [0, {vocab_size})")
        # Written so that NaN fails too.
        if not LEAST <= logprob <= _ROUNDING:
            raise ValueError(f"log-probability {logprob} is not in [{LEAST}, 0]")
    return one
