"""The choice of tokens from logits: greedy, or drawn by a number that depends only on seed, sample
and position. So an answer does not depend on the other requests of a batch, nor on the worker that
draws its first token, and a retraction does not change it."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from prefixkv.engines.hf.requests import LEAST, Choice, Sampling, TokenLogprob

_DRAW: Final = struct.Struct("<QQQ")


def draw(seed: int, sample: int, position: int) -> float:
    """Draw the number that samples one token: in [0, 1), uniform, and equal on every machine.

    >>> round(draw(seed=1, sample=0, position=0), 6)
    0.337761
    """
    # A hash, since torch's generators give other numbers on other devices and versions. 53 bits are
    # what a double holds exactly.
    digest = hashlib.blake2b(_DRAW.pack(seed, sample, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def choose(
    logits: torch.Tensor, choices: Sequence[Choice], end_tokens: Iterable[int] = ()
) -> list[int]:
    """Choose one token per row of `logits`, [len(choices), vocabulary] of any float type and
    device. The model's `end_tokens` are not chosen before an answer has its least tokens."""
    logits = _without_early_ends(logits, choices, end_tokens)
    # 1. Greedy rows are done with one argmax over the whole batch.
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0]
    if not drawn:
        return tokens
    # 2. Drawn rows invert the cumulative sum: a number below the total picks the token under it.
    some = drawn if len(drawn) < len(choices) else slice(None)
    shares = _probabilities(logits[some], [choices[row].sampling for row in drawn])
    sums = shares.cumsum(-1)
    numbers = [draw(choices[i].seed, choices[i].sample, choices[i].position) for i in drawn]
    at = torch.tensor(numbers, dtype=torch.float64).to(sums.device)[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, at, right=True).squeeze(1)
    # Rounding may put a number behind the last share. Then the last token with a share is taken,
    # not the last one of the vocabulary.
    last = sums.shape[-1] - 1 - (shares > 0).flip(-1).to(torch.uint8).argmax(-1)
    for row, token in zip(drawn, torch.minimum(found, last).tolist(), strict=True):
        tokens[row] = token
    return tokens


def chosen_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], choices: Sequence[Choice]
) -> list[TokenLogprob | None]:
    """Return the log-probabilities of what `choose` chose; None where none are wanted. They are
    log_softmax of the logits in float32: temperature, top_k and top_p do not count."""
    found: list[TokenLogprob | None] = [None] * len(tokens)
    wanted = {
        row: num for row, one in enumerate(choices) if (num := one.sampling.logprobs) is not None
    }
    if not wanted:
        return found
    rows = [*wanted]
    logs = torch.log_softmax(logits[rows].float(), -1)
    logs = logs.nan_to_num(nan=LEAST, neginf=LEAST).clamp_(LEAST, 0.0)
    ids = torch.tensor([tokens[row] for row in rows], device=logs.device)
    chosen = logs.gather(1, ids[:, None]).squeeze(1).tolist()
    # One `topk` for the most that any row needs: its first n are the n likeliest of each row.
    best = logs.topk(min(max(wanted.values()), logs.shape[-1]))
    likely = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    for (row, num), logprob, (top, values) in zip(wanted.items(), chosen, likely, strict=True):
        pairs = tuple(zip(top[:num], values[:num], strict=True))
        found[row] = TokenLogprob(tokens[row], logprob, pairs)
    return found


def _without_early_ends(
    logits: torch.Tensor, choices: Sequence[Choice], end_tokens: Iterable[int]
) -> torch.Tensor:
    """Return the logits, with -inf for tokens that would end an answer before its `min_tokens`. It
    depends on the position alone, so a retraction changes nothing."""
    rows: list[int] = []
    columns: list[int] = []
    for row, choice in enumerate(choices):
        if choice.position < choice.sampling.min_tokens:
            # A client's stop token may be beyond the vocabulary: it never comes anyway.
            ends = [t for t in choice.sampling.ends(end_tokens) if t < logits.shape[-1]]
            rows += [row] * len(ends)
            columns += ends
    if not rows:
        return logits
    at = torch.tensor([rows, columns]).to(logits.device)
    return logits.index_put((at[0], at[1]), logits.new_tensor(-math.inf))


def _probabilities(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return shares after temperature, top_k and top_p: the probabilities up to a factor per row, 0
    where they cut off. Float64 [rows, vocabulary], for the sums over a large vocabulary."""
    device = logits.device
    heat = torch.tensor([s.temperature for s in samplings], dtype=torch.float64).to(device)
    # The largest is 0 first: what a small temperature makes of it would have no number.
    logits = logits.to(torch.float64) - logits.amax(-1, keepdim=True)
    shares = torch.softmax(logits / heat[:, None], -1)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        vocab = shares.shape[-1]
        top_k = torch.tensor([min(s.top_k or vocab, vocab) for s in samplings]).to(device)
        top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64).to(device)
        # top_k as a threshold, so that equal tokens stay or go together in whatever order a sort
        # puts them.
        ordered = shares.sort(-1, descending=True).values
        least = ordered.gather(1, top_k[:, None] - 1)
        ordered = ordered.where(ordered >= least, 0.0)
        # top_p of what top_k left: a token stays while the tokens before it sum up to less than p.
        before = ordered.cumsum(-1) - ordered
        kept = (before < top_p[:, None] * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        least = ordered.gather(1, (kept - 1).clamp_(min=0)).maximum(least)
        shares = shares.where(shares >= least, 0.0)
    return shares
