"""What is alike in both workers: a model on a node computes tokens of several requests in one
forward, and samples the tokens behind them.

A token is the likeliest, or drawn by a number that depends only on seed, sample and position. So
the other requests of a batch, the worker that draws the first token, and a retraction change an
answer by rounding only.
"""

from __future__ import annotations

import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from prefixkv import KVPool, NotFiniteError
from prefixkv.engines.hf.layers import NO_SLOT, Row, StateMemory
from prefixkv.engines.hf.models import SLIDING, PagedModel
from prefixkv.engines.hf.requests import LEAST, Choice, Sampling, TokenLogprob
from prefixkv.spi import DeviceEvent, GroupPages, RadixKey

_IDLE_S: Final = 0.1  # longest rest, after which deadlines are checked


@dataclass(slots=True, eq=False)
class Work:
    """What one forward computes of a request; where there is a `choice`, the token behind is
    `drawn`."""

    req: Any
    row: Row
    choice: Choice | None = None
    drawn: tuple[int, TokenLogprob | None] | None = None


class NodeEngine(ABC):
    """Used from one thread. It owns the model from now on; `pool` must outlive it."""

    node: Any
    side: ClassVar[str]

    def __init__(self, model: PagedModel, pool: KVPool, most_tokens: int) -> None:
        self.model = model
        self.states: StateMemory | None = None  # of recurrent layers
        self._flat = model.flat_pool(pool)
        # Most tokens of one prompt per forward: a row of the window group has pages for no more.
        self._step_tokens = min([most_tokens, *(group.step_tokens for group in pool.groups)])
        # Tokens with KV of the prompts that are computed here, oldest first.
        self._computing: dict[Any, int] = {}

    @abstractmethod
    def _slot(self, req: Any) -> int:
        """Return the slot of the state of a request that is computed here."""

    @abstractmethod
    def _first_choice(self, req: Any) -> Choice | None:
        """Return the choice of the token behind a request's prompt; None: it is known."""

    @abstractmethod
    def _fail(self, req: Any, error: Exception, after: DeviceEvent | None) -> None: ...

    def _next_chunks(self, limit: int) -> list[Work]:
        """The oldest prompts come first, each as far as the limit of tokens allows."""
        chunks = []
        for req, start in self._computing.items():
            if limit <= 0:
                break
            if not req.state.ended:
                end = min(start + min(limit, self._step_tokens), req.fill_len)
                if self.model.window:  # a window is kept at a chunk's end
                    end = next((at for at in req.stops if start < at <= end), end)
                chunks.append((req, start, end, self._saves(req, start, end)))
                limit -= end - start
        # Pages are read after the last call on the node.
        return [self._chunk(*chunk) for chunk in chunks]

    def _saves(self, req: Any, start: int, end: int) -> dict[int, int]:
        """Asked for before the forward: once a chunk is handed over its stops are over."""
        if self.states is None:
            return {}
        stops = [at for at in req.stops if start <= at <= end]
        saves = {at: slot for at in stops if (slot := self.node.save_state(req, at)) != NO_SLOT}
        if start in saves:  # what prefill has sent
            self.states.copy([(self._slot(req), saves.pop(start))])
        return saves

    def _chunk(self, req: Any, start: int, end: int, saves: Mapping[int, int]) -> Work:
        choice = self._first_choice(req) if end == req.fill_len else None
        source = slot = NO_SLOT
        if self.states is not None:
            slot = self._slot(req)
            # A checkpoint is only read: it may be another prompt's too.
            source = req.checkpoint_slot if start == req.prefix_len else slot
        wanted = () if choice is None else (-1,)
        tokens = req.key.tokens()[start:end]
        row = Row(tokens, start, req.pages, self._window(req), wanted, source, slot, saves)
        return Work(req, row, choice)

    def _window(self, req: Any) -> GroupPages | None:
        pages: GroupPages | None = req.window_pages(SLIDING) if self.model.window else None
        return pages

    def _compute(self, work: list[Work]) -> tuple[list[Work], DeviceEvent | None]:
        """Run one forward. Returns the work whose numbers are finite, and an event behind it; the
        requests of the others have failed."""
        model = self.model
        logits, wrong = model.forward(self._flat, [one.row for one in work], self.states)
        # Sends and copies need not wait for the work of sampling.
        event = model.event()
        drawn = [one for one in work if one.choice is not None]
        # Before anything of it is handed over.
        for at in wrong:
            why = f"{self.side} computed NaN or infinity for request {work[at].req.rid!r}"
            self._fail(work[at].req, NotFiniteError(why), event)
        if wrong:
            failed = {work[at] for at in wrong}
            logits = logits[[at for at, one in enumerate(drawn) if one not in failed]]
            work, drawn = ([one for one in some if one not in failed] for some in (work, drawn))
        choices = [one.choice for one in drawn if one.choice is not None]
        tokens = choose(logits, choices, model.end_tokens)
        logprobs = chosen_logprobs(logits, tokens, choices)
        for one, token, logprob in zip(drawn, tokens, logprobs, strict=True):
            one.drawn = token, logprob
        return work, event

    def _why_refused(self, prompt: RadixKey, more: int = 0) -> str:
        """Return why the model cannot take a prompt and `more` new tokens; "": it can."""
        num, context = len(prompt), self.model.context
        if num + more > context:
            said = f" and max_new_tokens={more} are {num + more}" if more else ""
            return f"{num} tokens{said}, the model takes {context}"
        # It would index outside of the embedding.
        if (token := int(prompt.tokens().max())) >= self.model.vocab_size:
            return f"token {token} is not in the vocabulary of {self.model.vocab_size}"
        return ""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until `step` may have something to do. Returns True if so."""
        return self._is_busy or bool(self.node.wait(timeout_s))

    @property
    def idle_s(self) -> float:
        """Longest time in seconds that a poller may wait."""
        return _IDLE_S

    @property
    def _is_busy(self) -> bool:
        return bool(self._computing)

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no more requests. Call `step` and this until it returns True: all have ended."""
        return bool(self.node.drain(0.0 if self._is_busy else timeout_s))

    def fileno(self) -> int:
        """Return a descriptor for a poller, to be polled while `step` is False."""
        fd: int = self.node.fileno()
        return fd

    def audit(self) -> None:
        self.node.audit()

    def close(self) -> None:
        self.node.close()


# --- sampling ------------------------------------------------------------------------------------

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
