"""Decode with a draft head: a step guesses one token of each request, and the model verifies it in
the same forward as the newest token.

The order of a step: the draft writes the slot of the newest token, which gives the guess; the model
runs over both; once the tokens are sampled, the draft writes the slot of a guess that was right. So
no slot of a token with KV is unwritten when its request ends, or is retracted, and is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefixkv import DecodeNode, DecodeRequest, OutOfPagesError
from prefixkv.engines.hf.attention import FlatPool
from prefixkv.engines.hf.draft import DraftPart, unpack_hidden
from prefixkv.engines.hf.models import PagedModel


@dataclass(slots=True)
class DraftStep:
    """One step of decode with guesses: the logits of the model, and what follows from what is
    accepted."""

    reqs: list[DecodeRequest]
    guesses: list[int | None]  # of each request, the token behind its newest one
    logits: torch.Tensor  # behind the newest token of each request, then behind each guess
    hidden: list[torch.Tensor]  # of each request, from that of token kv_len - 1 on
    due: list[bool]  # of each request, whether the draft's slot of its newest token is unwritten
    not_finite: list[int]  # places of the requests of which a number is not finite

    def row_behind(self, at: int) -> int:
        """Return the row of `logits` behind a request's guess."""
        return len(self.reqs) + sum(guess is not None for guess in self.guesses[:at])


class Drafting:
    """Guesses of one token per step and request on decode, each verified by the model in the same
    forward as the newest token. Owned by the decode engine's thread.

    Args:
        model: with a draft head.
        flat: the pool, of `PagedModel.flat_pool`.
    """

    def __init__(self, model: PagedModel, flat: FlatPool) -> None:
        assert model.draft is not None
        assert flat.draft is not None
        self._model, self._flat, self._head, self._own = model, flat, model.draft, flat.draft
        # Of requests that run: hidden states of their tokens from place `at` on, the last of them
        # with KV among them.
        self._states: dict[DecodeRequest, tuple[int, torch.Tensor]] = {}
        self.counters = {"draft_tokens": 0, "draft_tokens_accepted": 0}

    def begin(self, req: DecodeRequest) -> bytes:
        """Take the hidden state of the last token with KV from a request's `aux`, and return what
        else is there. A request that is resumed without prefill has none: its next step computes
        that token again.

        Raises ValueError where prefill has sent none.
        """
        self._states.pop(req, None)
        aux: bytes = req.aux
        if not (aux or req.resumed):
            raise ValueError("aux is empty, a draft needs the prompt's last hidden state")
        rest, state = unpack_hidden(aux, req.kv_len, self._head)
        if state is not None:
            self._states[req] = req.kv_len - 1, state[None]
        return rest

    def step(self, node: DecodeNode, reqs: list[DecodeRequest]) -> DraftStep:
        """Guess a token of each request that has pages for it, and run the model over the newest
        token of each, and the guesses."""
        # 1. The draft, for all whose last hidden state is here: its slot is due in any case.
        states = {req: self._state(req) for req in reqs if req in self._states}
        self._states = {}
        guessed: dict[DecodeRequest, int] = {}
        if states:
            parts = [
                DraftPart(req.pages, req.kv_len, req.output[-1:], state)
                for req, state in states.items()
            ]
            guesses = self._head.logits(self._head(self._own, parts)).argmax(-1).tolist()
            guessed = dict(zip(states, guesses, strict=True))
        # A guess needs a page, and a token behind it that is still wanted.
        wanted = [req for req in guessed if req.max_new_tokens - len(req.output) > 1]
        try:
            if wanted:
                node.reserve_many(wanted, 2)
        except OutOfPagesError:
            wanted = []
        guessed = {req: guessed[req] for req in wanted}
        self.counters["draft_tokens"] += len(guessed)
        # 2. The model. Without a hidden state the token before is computed again, and its KV, which
        # may be in a page of others, is not written.
        again = [int(req not in states) for req in reqs]
        starts = [req.kv_len - one for req, one in zip(reqs, again, strict=True)]
        tokens: list[list[int]] = []
        for req, one in zip(reqs, again, strict=True):
            tokens.append([
                *(req.tokens[-2:-1].tolist() if one else ()),
                req.output[-1],
                *((guessed[req],) if req in guessed else ()),
            ])  # fmt: skip
        ends = [start + len(one) for start, one in zip(starts, tokens, strict=True)]
        firsts = np.cumsum([0, *(len(one) for one in tokens)])[:-1].tolist()
        newest = [first + one for first, one in zip(firsts, again, strict=True)]
        behind = [row + 1 for row, req in zip(newest, reqs, strict=True) if req in guessed]
        hidden: list[torch.Tensor] = []
        not_finite: list[int] = []
        logits = self._model.forward(
            self._flat, np.concatenate(tokens), [req.pages for req in reqs], starts, ends, [],
            [*newest, *behind], again=again, hidden=hidden, not_finite=not_finite,
        )  # fmt: skip
        own = torch.split(hidden[0], [len(one) for one in tokens])
        rows = [
            torch.cat([states[req], one]) if req in states else one
            for req, one in zip(reqs, own, strict=True)
        ]
        due = [bool(one) for one in again]
        guesses = [guessed.get(req) for req in reqs]
        return DraftStep(reqs, guesses, logits, rows, due, not_finite)

    def verified(self, step: DraftStep, accepted: Sequence[int]) -> None:
        """Write the draft's slots of what a step has brought, before any of it may be cached; none
        of a request that has ended.

        `accepted`: indices of the requests whose guess was right.
        """
        self.counters["draft_tokens_accepted"] += len(accepted)
        parts: list[DraftPart] = []
        right = {*accepted}
        for at, (req, hidden) in enumerate(zip(step.reqs, step.hidden, strict=True)):
            if req.state.ended:
                continue
            newest, guess = req.output[-1], step.guesses[at]
            # Of one text no more than one: without a state there was no guess.
            if step.due[at]:
                parts.append(DraftPart(req.pages, req.kv_len, [newest], hidden[:1]))
            if at in right:
                assert guess is not None
                parts.append(DraftPart(req.pages, req.kv_len + 1, [guess], hidden[1:2]))
            # Those of the newest token, and of the guess if it was right: which of them is needed
            # depends on whether the second token is appended.
            self._states[req] = req.kv_len, hidden[1 : 2 + (at in right)].clone()
        if parts:
            self._head(self._own, parts)

    def _state(self, req: DecodeRequest) -> torch.Tensor:
        """Return the model's hidden state of a request's last token with KV: [1, width]."""
        at, states = self._states[req]
        place = req.kv_len - 1 - at
        return states[place : place + 1]
