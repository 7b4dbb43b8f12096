"""Tokens from logits: greedy, or drawn by a number that follows from seed, sample and position
alone.

So an answer is the same whatever runs beside it, on whichever worker its first token is drawn, and
after a retraction.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from prefixkv.spi import RequestError, whole_number

_DRAW: Final = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer's tokens are chosen.

    Args:
        temperature: logits are divided by it; 0: the largest is taken, and nothing else counts.
        top_k: only the k likeliest, and those that are as likely as the last of them; 0: all.
        top_p: of these, the fewest likeliest whose shares sum up to at least p; 1: all.
        seed: [0, 2**64). None: one that follows from the request's id.
        stop_tokens: ids that end the answer. Those of the model's own end are added by the engine
            unless `ignore_end`.
        stop: strings that end it, and are not part of its text; they need an engine with a
            tokenizer.
        ignore_end: whether the model's end tokens do not end it.

    Raises: RequestError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    stop: tuple[str, ...] = ()

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
        if self.seed is not None:
            whole_number("seed", self.seed, 0, 2**64)
        for token in self.stop_tokens:
            whole_number("a stop token", token, 0, 2**31)
        if not all(isinstance(one, str) and one for one in self.stop):
            raise RequestError(f"stop is {self.stop!r}, strings that are not empty are needed")

    def seeded(self, rid: str) -> int:
        """`seed`, or the one that follows from the request's id."""
        if self.seed is not None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Choice:
    """How one token is chosen: token `position` of answer `sample` to a request."""

    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    sample: int = 0
    position: int = 0


def draw(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1), uniform over its arguments, the same everywhere.

    >>> round(draw(seed=1, sample=0, position=0), 6)
    0.337761
    """
    digest = hashlib.blake2b(_DRAW.pack(seed, sample, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def choose(logits: torch.Tensor, choices: Sequence[Choice]) -> list[int]:
    """One token a row.

    Args:
        logits: [len(choices), vocabulary], any float type and device.
        choices: a row's each.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0]
    if not drawn:
        return tokens
    some = drawn if len(drawn) < len(choices) else slice(None)
    shares = _shares(logits[some], [choices[row].sampling for row in drawn])
    sums = shares.cumsum(-1)
    numbers = [draw(choices[i].seed, choices[i].sample, choices[i].position) for i in drawn]
    at = torch.tensor(numbers, dtype=torch.float64).to(sums.device)[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, at, right=True).squeeze(1)
    # Rounding may put a number behind the last share: then it is the last that has any.
    last = sums.shape[-1] - 1 - (shares > 0).flip(-1).to(torch.uint8).argmax(-1)
    for row, token in zip(drawn, torch.minimum(found, last).tolist(), strict=True):
        tokens[row] = token
    return tokens


def _shares(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """What each token's chance is, up to a factor a row: float64 [rows, vocabulary], 0 for those
    that are cut off."""
    device = logits.device
    heat = torch.tensor([s.temperature for s in samplings], dtype=torch.float64).to(device)
    shares = torch.softmax(logits.to(torch.float64) / heat[:, None], -1)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        vocab = shares.shape[-1]
        top_k = torch.tensor([min(s.top_k or vocab, vocab) for s in samplings]).to(device)
        top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64).to(device)
        ordered = shares.sort(-1, descending=True).values
        least = ordered.gather(1, top_k[:, None] - 1)
        ordered = ordered.where(ordered >= least, 0.0)
        before = ordered.cumsum(-1) - ordered
        kept = (before < top_p[:, None] * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        least = ordered.gather(1, (kept - 1).clamp_(min=0)).maximum(least)
        shares = shares.where(shares >= least, 0.0)
    return shares
