"""A whole engine without weights: both loops on real nodes, in as few lines as an engine can have.

Its model reads all KV of a request through the page table, and the next token follows from it. So a
page that is stale, shifted or of another request makes a wrong answer, as with a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from prefixkv import (
    DecodeNode,
    DecodeRequest,
    KVPool,
    OutOfPagesError,
    PrefillNode,
    PrefillRequest,
    Request,
)
from prefixkv.conformance.interface import AnswerLog, Prompt, ScenarioSettings, Side
from prefixkv.conformance.pattern import VOCABULARY, Hashes, PrefixHasher, sample, splitmix64
from prefixkv.spi import Pages

Tokens = npt.NDArray[np.int32]

_HASHER: Final = PrefixHasher()


class ToyModel:
    """One layer, and 16 bytes of KV per token: K and V are a uint64 each."""

    def __init__(self, num_pages: int, page_size: int, shared: bool = False) -> None:
        self.pool = KVPool.create(num_pages, page_size, 1, 1, 8, dtype="uint8", shared=shared)
        self.page_size = page_size
        # The pool's own memory as [page, slot].
        self._k, self._v = (
            half.numpy().view(np.uint64)[..., 0, 0] for half in (self.pool.k(0), self.pool.v(0))
        )

    def forward(self, pages: Pages, tokens: Tokens, start: int) -> int:
        """Compute tokens from `start` on: write their KV to `pages`, int32, and return the token
        that follows. KV of the tokens before is read there."""
        at = np.arange(len(tokens))
        page, slot = pages[at // self.page_size], at % self.page_size
        before = int(self._k[page[start - 1], slot[start - 1]]) if start else 0
        self._k[page[start:], slot[start:]] = new = _HASHER.prefixes(tokens[start:], before)
        self._v[page[start:], slot[start:]] = splitmix64(new)
        return _next_token(self._k[page, slot], self._v[page, slot])


def _next_token(k: Hashes, v: Hashes) -> int:
    weights = np.arange(1, 2 * len(k), 2, dtype=np.uint64)
    return int(sample(np.array([(k * weights).sum() ^ v.sum()]))[0])


def toy_answer(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """Return what the model says, without pages."""
    said = list(tokens)
    for _ in range(num_tokens):
        k = _HASHER.prefixes(np.array(said, np.int32), 0)
        said.append(_next_token(k, splitmix64(k)))
    return said[len(tokens) :]


class ToyPrefill:
    """One chunk of each prompt per pass."""

    def __init__(self, settings: ScenarioSettings) -> None:
        self.model = ToyModel(settings.prefill_pages, settings.prefill_page_size, settings.shared)
        self.chunk_tokens = settings.chunk_tokens
        self.node = PrefillNode(self.model.pool, settings.prefill)
        self.computing: dict[PrefillRequest, int] = {}  # tokens with KV

    def step(self) -> bool:
        """Returns True if it computed something."""
        for req in self.node.pop_bootstrapped():
            self.begin(req)
        self.forget_ended()
        for req in list(self.computing):
            self.compute(req)
        return bool(self.computing)

    def begin(self, req: PrefillRequest) -> None:
        """Begin behind what this worker's own cache has."""
        self.computing[req] = req.prefix_len

    def forget_ended(self) -> None:
        for req in [*self.node.pop_failed(), *self.node.pop_sent()]:
            self.computing.pop(req, None)

    def compute(self, req: PrefillRequest) -> None:
        """Compute one chunk, and hand it over; the last one with the first token."""
        start = self.computing[req]
        end = min(start + self.chunk_tokens, req.num_tokens)
        token = self.model.forward(req.pages, req.tokens[:end], start)
        last = end == req.num_tokens
        self.node.send_chunk(req, end, last, token.to_bytes(4, "little") if last else b"")
        self.computing[req] = end
        if last:
            del self.computing[req]


class ToyDecode:
    """One step of the whole batch per pass, and one chunk of the oldest prompt that it computes
    itself, if `DecodeConfig.compute` lets it."""

    def __init__(self, settings: ScenarioSettings) -> None:
        self.model = ToyModel(settings.decode_pages, settings.page_size, settings.shared)
        self.tokens_per_step = settings.tokens_per_step
        self.node = DecodeNode(self.model.pool, settings.decode)
        self.answers: dict[str, AnswerLog] = {}
        self.batch: list[DecodeRequest] = []
        # Tokens that are not appended yet: of a step that found no page.
        self.sampled: dict[DecodeRequest, list[int]] = {}
        self.asked: list[Request] = []  # to be brought to prefill
        self.local: dict[DecodeRequest, int] = {}  # computed here: tokens with KV
        compute = settings.decode.compute
        self.asks_late = compute is not None and compute.ask == "late"
        self.rooms = 0

    def add(self, prompt: Prompt, answer: AnswerLog, prefill: str) -> None:
        """Make a request for each side, under one room."""
        self.rooms += 1
        request = Request(
            prompt.rid, prompt.tokens, prompt.max_new_tokens, room=self.rooms, prefill=prefill,
            decode=self.node.peer_id.name, namespace=prompt.namespace, cacheable=prompt.cacheable,
            deadline_s=prompt.deadline_s,
        )  # fmt: skip
        self.node.add(request)
        self.answers[prompt.rid] = answer
        if not self.asks_late:
            self.asked.append(request)

    def abort(self, rid: str) -> None:
        self.node.abort(rid)

    def step(self) -> bool:
        """Returns True if there was something to do."""
        node = self.node
        node.pop_preallocated()
        self.batch += node.pop_transferred()
        self.ask_again()
        for req in node.pop_local():
            self.local[req] = req.prefix_len
        for req in node.pop_failed():
            self.local.pop(req, None)
            self.answers.pop(req.rid).end(req.error)
        # An aborted request's pages may be another's by now.
        self.batch = [req for req in self.batch if not req.state.ended]
        for req in [req for req in self.local if not req.state.ended][:1]:
            self.compute(req)
        if not self.sampled:
            self.sampled = {req: self.sample(req) for req in self.batch}
        self.append()
        for req in [req for req in self.batch if self.is_done(req)]:
            self.finish(req)
        return bool(self.batch or self.local)

    def compute(self, req: DecodeRequest) -> None:
        """Compute a chunk behind what is in the pages already; the last one with the first token,
        unless the request ran before."""
        start = self.local[req]
        end = min(start + self.node.chunk_tokens, req.fill_len)
        if start == end < req.fill_len:  # this step has to go without
            return
        token = self.model.forward(req.pages, req.tokens[:end], start)
        self.local[req] = end
        last = end == req.fill_len
        if last:
            del self.local[req]
        first = last and not req.resumed
        self.node.computed(req, end, token.to_bytes(4, "little") if first else b"")

    def ask_again(self) -> None:
        """Use another name, since the attempt before may still live on prefill."""
        for ask in self.node.pop_needs_prefill():
            self.asked.append(
                Request(
                    f"{ask.rid}.{ask.generation}", ask.tokens, room=ask.room,
                    generation=ask.generation, decode=ask.decode, namespace=ask.namespace,
                    cacheable=ask.cacheable, prefill=ask.prefill,
                    deadline_s=self.answers[ask.rid].prompt.deadline_s,
                )
            )  # fmt: skip

    def sample(self, req: DecodeRequest) -> list[int]:
        """Return the next tokens, of which the first may come from prefill."""
        if not req.output:
            return [int.from_bytes(req.aux, "little")]
        # Its newest token has no KV yet: this step writes it.
        tokens = req.tokens
        new = [self.model.forward(req.pages, tokens, req.kv_len)]
        left = req.max_new_tokens - len(req.output)
        if self.tokens_per_step > 1:
            self.speculate(req, tokens, new, min(self.tokens_per_step, left))
        return new

    def speculate(self, req: DecodeRequest, tokens: Tokens, new: list[int], most: int) -> None:
        """Add tokens that a draft has guessed right to the one that a step gives for sure."""
        # Pages for all that the draft writes; without them this step goes without a draft.
        try:
            self.node.reserve_many([req], most)
        except OutOfPagesError:
            return
        # Every other draft goes wrong at its last token. Its KV is written all the same, and the
        # next step writes over it.
        draft = toy_answer(tokens.tolist(), most - 1)
        if draft and len(tokens) % 2:
            draft[-1] ^= 1
        for i in range(len(draft)):
            longer = np.array([*tokens, *draft[: i + 1]], np.int32)
            following = self.model.forward(req.pages, longer, len(longer) - 1)
            if draft[: i + 1] == new:
                new.append(following)

    def append(self) -> None:
        """Append the sampled tokens, in turns of one per request; retract until they fit. They are
        kept if pages are missing that come back by themselves."""
        while self.sampled:
            first = {req: tokens[0] for req, tokens in self.sampled.items()}
            try:
                self.node.append_many([*first], [*first.values()])
            except OutOfPagesError as error:
                if not error.retract:
                    return
                self.retract(error.retract[0])
                continue
            for req, token in first.items():
                if not req.state.ended:  # not aborted meanwhile
                    self.answers[req.rid].token(token)
            self.sampled = {
                req: tokens[1:] for req, tokens in self.sampled.items()
                if tokens[1:] and not req.state.ended and not self.is_done(req)
            }  # fmt: skip

    def retract(self, rid: str) -> None:
        self.node.retract(rid)
        self.batch = [req for req in self.batch if req.rid != rid]
        self.sampled = {req: tokens for req, tokens in self.sampled.items() if req.rid != rid}

    def is_done(self, req: DecodeRequest) -> bool:
        end = self.answers[req.rid].prompt.end_token
        return req.output[-1:] == [end] or len(req.output) == req.max_new_tokens

    def finish(self, req: DecodeRequest) -> None:
        """The KV stays, as the next turn's prefix."""
        self.node.finish(req)
        self.batch.remove(req)
        self.answers.pop(req.rid).end()


class ToySides:
    """The toy engine for the kit: `conformance.run(ToySides)`."""

    vocabulary = range(VOCABULARY)
    make_decode: type[ToyDecode] = ToyDecode
    make_prefill: type[ToyPrefill] = ToyPrefill

    def __init__(self, settings: ScenarioSettings) -> None:
        self.settings = settings
        self.p = self.make_prefill(settings)
        self.d = self.make_decode(settings)

    @property
    def decode(self) -> DecodeNode:
        return self.d.node

    @property
    def prefill(self) -> PrefillNode:
        return self.p.node

    def submit(self, prompt: Prompt, answer: AnswerLog) -> None:
        self.d.add(prompt, answer, self.p.node.endpoint)

    def abort(self, rid: str, side: Side) -> None:
        """Abort a request; on prefill in each attempt that may live there."""
        if side == "decode":
            self.d.abort(rid)
        else:
            for req in list(self.p.computing):
                if req.rid.partition(".")[0] == rid:
                    self.p.node.abort(req.rid)

    def step(self) -> bool:
        asked, self.d.asked = self.d.asked, []
        for request in asked:
            # A prefill worker that has gone takes nothing; decode finds out by itself.
            if request.prefill == self.p.node.endpoint:
                self.p.node.add(request)
        busy = self.p.step()
        return self.d.step() or busy

    def expected(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        return toy_answer(tokens, num_tokens)

    def restart(self, side: Side) -> None:
        if side == "prefill":
            self.p.node.close()
            self.p = self.make_prefill(self.settings)
        else:
            rooms = self.d.rooms
            self.d.node.close()
            self.d = self.make_decode(self.settings)
            self.d.rooms = rooms  # its former numbers may be in use on prefill

    def close(self) -> None:
        self.d.node.close()
        self.p.node.close()
