"""An engine of a model with layers of three kinds, over real nodes: one keeps every token, one the
last `WINDOW`, and a draft has the first one's pages.

Its next token follows from all that these layers keep, read through the pages that a request has.
What the window layer keeps of a token depends on what it keeps of those before: so a page that is
stale, shifted, of another depth or of another request makes a wrong answer, as in a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefixkv.cache.events import page_keys
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import OutOfPagesError
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.pages.windows import WindowPages
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import Request
from prefixkv.routing import WorkerIndex
from prefixkv.runtime.nodes import DecodeNode, PrefillNode
from prefixkv.testing.hashing import splitmix64
from tests.models.patience import until

MASK = 2**64 - 1
WINDOW = 10


def mix(value: int) -> int:
    return int(splitmix64(np.array([value & MASK], np.uint64))[0])


def kept(full: list[int], last: list[int], token: int) -> tuple[int, int]:
    """What the two layers keep of a token behind these. `last`: of the window before it."""
    new = mix((full[-1] if full else 0) * 3 + token + 1)
    return new, mix(new ^ sum((at + 1) * value for at, value in enumerate(reversed(last))))


def said(full: list[int], last: list[int]) -> int:
    """The token that follows. `last`: of the window that its own token sees."""
    return (
        mix(sum(full) ^ sum((at + 2) * value for at, value in enumerate(reversed(last)))) % 50_000
    )


def answer(tokens: Sequence[int], num_tokens: int, window: int = WINDOW) -> list[int]:
    """What the model says, without pages."""
    full: list[int] = []
    last: list[int] = []
    out: list[int] = []
    todo = list(tokens)
    while len(out) < num_tokens:
        for token in todo:
            new = kept(full, last[-(window - 1) :] if window > 1 else [], token)
            full.append(new[0])
            last.append(new[1])
        out.append(said(full, last[-window:]))
        todo = out[-1:]
    return out


class Model:
    def __init__(
        self, num_pages: int, last_pages: int, page_size: int = 4, window: int = WINDOW,
        step_tokens: int = 8, shared: bool = False,
    ) -> None:  # fmt: skip
        def make(pages: int, heads: int) -> KVPool:
            return KVPool.create(
                pages, page_size, 1, heads, 8, dtype="uint8", attention="mha", shared=shared
            )

        self.page_size, self.window = page_size, window
        self.full, self.last, self.draft = (
            make(num_pages, 1),
            make(last_pages, 2),
            make(num_pages, 3),
        )
        self.pool = self.full.with_groups(
            PoolGroup("sliding", self.last, window, step_tokens), PoolGroup("draft", self.draft)
        )
        # Both K and V, and every head, hold the same word: [page, slot, head].
        self._words = [
            [half.numpy().view(np.uint64)[..., 0] for half in (pool.k(0), pool.v(0))]
            for pool in (self.full, self.last, self.draft)
        ]

    def _put(self, layer: int, page: int, slot: int, value: int) -> None:
        for half, words in enumerate(self._words[layer]):
            words[page, slot, :] = value ^ half

    def _get(self, layer: int, page: int, slot: int) -> int:
        found = {
            int(word) ^ half
            for half, words in enumerate(self._words[layer])
            for word in words[page, slot]
        }
        assert len(found) == 1, "heads of one token differ"
        return found.pop()

    def forward(self, pages: Any, sliding: WindowPages, tokens: Sequence[int], start: int) -> int:
        """Compute tokens from `start` on, and return the one that follows."""
        size, (first, ids) = self.page_size, sliding
        full = [self._get(0, pages[at // size], at % size) for at in range(start)]
        drafts = [self._get(2, pages[at // size], at % size) for at in range(start)]
        assert drafts == [mix(word) for word in full], "the draft's KV is another's"

        def slot(at: int) -> tuple[int, int]:
            number = at // size - first
            assert 0 <= number < len(ids), f"token {at} has no page: {sliding}"
            return int(ids[number]), at % size

        begin = max(0, start + 1 - self.window)
        last = [self._get(1, *slot(at)) for at in range(begin, start)]
        for at in range(start, len(tokens)):
            new = kept(full, last[-(self.window - 1) :] if self.window > 1 else [], int(tokens[at]))
            full.append(new[0])
            last.append(new[1])
            self._put(0, pages[at // size], at % size, new[0])
            self._put(2, pages[at // size], at % size, mix(new[0]))
            self._put(1, *slot(at), new[1])
        return said(full, last[-self.window :])


class WindowPair:
    """Two nodes with small pools, and both engines' loops."""

    def __init__(
        self, *, decode: tuple[int, int] = (64, 16), prefill: tuple[int, int] = (64, 24),
        checkpoints: int = 4, window: int = WINDOW, chunk: int = 8, page_size: int = 4,
        shared: bool = False, decode_config: DecodeConfig | None = None,
        prefill_config: PrefillConfig | None = None, transport: Any = None,
    ) -> None:  # fmt: skip
        self.p_model = Model(*prefill, page_size, window, chunk, shared)
        self.d_model = Model(*decode, page_size, window, 1, shared)
        self.chunk = chunk
        config = prefill_config or PrefillConfig(checkpoints=checkpoints)
        self.prefill = PrefillNode(self.p_model.pool, config, transport=transport)
        self.decode = DecodeNode(
            self.d_model.pool, decode_config or DecodeConfig(reserve_tokens=0), transport=transport
        )
        self.computing: dict[PrefillRequest, int] = {}
        self.hold = False
        self.running: list[DecodeRequest] = []
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.failed: dict[str, Exception | None] = {}
        self.done: list[str] = []
        self.computed: dict[str, int] = {}  # tokens of prompts that prefill computed
        self.hits: dict[str, int] = {}  # tokens that decode had
        self.router = WorkerIndex(10_000)  # of prefill's pages
        self._rooms = 0

    def submit(self, rid: str, tokens: list[int], num_tokens: int = 6) -> DecodeRequest:
        self._rooms += 1
        self.prompts[rid], self.tokens[rid] = tokens, []
        request = Request(
            rid, tokens, num_tokens, room=self._rooms, prefill=self.prefill.endpoint,
            decode=self.decode.peer_id.name,
        )  # fmt: skip
        self.prefill.add(request)
        return self.decode.add(request)

    # --- prefill ----------------------------------------------------------------------------------

    def step_prefill(self) -> None:
        begun = self.prefill.pop_bootstrapped()
        if begun:
            assert self.router.apply(self.prefill.take_cache_events())
        for req in begun:
            # What routers are told of is what can be used, and all of it.
            keys = page_keys(RadixKey(req.tokens[:-1]).data, self.prefill.pool.layout.page_size)
            told = self.router.depth(None, keys) * self.prefill.pool.layout.page_size
            assert req.prefix_len == told
            self.computing[req] = req.prefix_len
            self.computed[req.rid] = req.num_tokens - req.prefix_len
        for req in [*self.prefill.pop_failed(), *self.prefill.pop_sent()]:
            self.computing.pop(req, None)
        for req in [] if self.hold else list(self.computing):
            self.compute(req)

    def compute(self, req: PrefillRequest) -> None:
        start = self.computing[req]
        end = min([start + self.chunk, req.num_tokens, *(at for at in req.stops if at > start)])
        sliding = req.window_pages("sliding")
        token = self.p_model.forward(req.pages, sliding, req.tokens[:end].tolist(), start)
        last = end == req.num_tokens
        self.prefill.send_chunk(req, end, last, token.to_bytes(4, "little") if last else b"")
        self.computing[req] = end
        if last:
            del self.computing[req]

    # --- decode -----------------------------------------------------------------------------------

    def step_decode(self) -> None:
        node = self.decode
        for req in node.pop_preallocated():
            self.hits.setdefault(req.rid, req.prefix_len)
        self.running += node.pop_transferred()
        for req in node.pop_failed():
            self.failed[req.rid] = req.error
            self.running = [one for one in self.running if one is not req]
        for ask in node.pop_needs_prefill():
            self.prefill.add(
                Request(
                    f"{ask.rid}.{ask.generation}", ask.tokens, room=ask.room,
                    generation=ask.generation, decode=ask.decode, prefill=ask.prefill,
                )
            )  # fmt: skip
        for req in list(self.running):
            if req not in self.running:  # retracted for one before it
                continue
            token = self.sample(req)
            try:
                node.append_many([req], [token])
            except OutOfPagesError as error:
                for rid in error.retract:
                    node.retract(rid)
                    self.running = [one for one in self.running if one.rid != rid]
                continue
            self.tokens[req.rid].append(token)
            if len(req.output) == req.max_new_tokens:
                node.finish(req)
                self.running.remove(req)
                self.done.append(req.rid)

    def sample(self, req: DecodeRequest) -> int:
        if not req.output:
            return int.from_bytes(req.aux, "little")
        sliding = req.window_pages("sliding")
        return self.d_model.forward(req.pages, sliding, req.tokens.tolist(), req.kv_len)

    # --- both -------------------------------------------------------------------------------------

    def step(self) -> None:
        self.step_prefill()
        self.step_decode()

    def serve(self, rid: str, tokens: list[int], num_tokens: int = 6) -> list[int]:
        """A whole request; returns prompt and answer."""
        self.submit(rid, tokens, num_tokens)
        until(lambda: rid in self.done or rid in self.failed, step=self.step)
        assert rid not in self.failed, self.failed[rid]
        self.check(rid)
        return tokens + self.tokens[rid]

    def check(self, rid: str) -> None:
        wanted = answer(self.prompts[rid], len(self.tokens[rid]), self.d_model.window)
        assert self.tokens[rid] == wanted, rid

    def at_rest(self) -> None:
        """Nothing is left in any group, but what is cached."""

        def is_over() -> bool:
            self.step()
            return self.decode.num_rooms == 0 and not self.prefill.scheduler.requests

        until(lambda: is_over() and self.decode.scheduler.idle)
        self.prefill.pop_bootstrapped()
        for node in (self.decode, self.prefill):
            node.audit()
            pages = node.scheduler.pages
            assert (pages.allocator.owned_pages, pages.allocator.held_pages) == (0, 0)
            for group in pages.windows:
                states = group.allocator
                assert (states.owned_pages, states.held_pages) == (0, 0), group.name
                assert not group.pins.any()
        (group,) = self.decode.scheduler.pages.windows
        assert group.allocator.free_pages == group.allocator.num_pages

    def __enter__(self) -> WindowPair:
        return self

    def __exit__(self, *_error: object) -> None:
        self.decode.close()
        self.prefill.close()
