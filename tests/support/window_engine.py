"""An engine of a model with layers of three kinds, over real nodes: one keeps every token, one the
last `WINDOW`, and a draft has the first one's pages.

Its next token follows from all that these layers keep, read through the pages that a request has.
What the window layer keeps of a token depends on what it keeps of those before: so a page that is
stale, shifted, of another depth or of another request makes a wrong answer, as in a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prefixkv import DecodeNode, PrefillNode
from prefixkv.cache.events import page_keys
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.conformance.hashing import splitmix64
from prefixkv.decode.request import DecodeRequest
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Mesh
from prefixkv.pages.groups import GroupPages
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import Request
from prefixkv.serving.router import WorkerIndex
from prefixkv.spi import DecodeGroup, PrefillGroup
from tests.support.patience import until

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
    """The model's layers in the pools of one worker's ranks. `heads`: of the three layers, over all
    ranks, which share them out as `tp_size` says."""

    def __init__(
        self, num_pages: int, last_pages: int, page_size: int = 4, window: int = WINDOW,
        step_tokens: int = 8, shared: bool = False, heads: tuple[int, int, int] = (1, 2, 3),
        tp_size: int = 1,
    ) -> None:  # fmt: skip
        self.page_size, self.window = page_size, window
        self.mesh = Mesh(1, heads[0], tp_size)
        self.pools: list[KVPool] = []
        # By rank and layer. Both K and V, and every head, hold the same word, but for the number of
        # the head in the model: [page, slot, head of the rank].
        self._words: list[list[list[Any]]] = []
        self._heads: list[list[Any]] = []
        for rank in range(tp_size):
            layers = [
                KVPool.create(
                    pages, page_size, 1, max(1, of_layer // tp_size), 8, dtype="uint8",
                    attention="mha", shared=shared,
                )
                for pages, of_layer in zip((num_pages, last_pages, num_pages), heads, strict=True)
            ]  # fmt: skip
            full, last, draft = layers
            self.pools.append(
                full.with_groups(
                    PoolGroup("sliding", last, window, step_tokens), PoolGroup("draft", draft)
                )
            )
            self._words.append([
                [half.numpy().view(np.uint64)[..., 0] for half in (pool.k(0), pool.v(0))]
                for pool in layers
            ])  # fmt: skip
            shards = [replace(self.mesh, num_kv_heads=of_layer).shard(rank) for of_layer in heads]
            self._heads.append([
                splitmix64(np.arange(one.num_heads, dtype=np.uint64) + np.uint64(one.first_head))
                for one in shards
            ])  # fmt: skip
        self.pool = self.pools[0]
        self.full, self.last, self.draft = (
            self.pool, self.pool.group("sliding"), self.pool.group("draft"),
        )  # fmt: skip

    def _put(self, layer: int, places: Sequence[tuple[int, int]], value: int) -> None:
        for words, heads, (page, slot) in zip(self._words, self._heads, places, strict=True):
            for half, kind in enumerate(words[layer]):
                kind[page, slot] = heads[layer] ^ np.uint64(value ^ half)

    def _get(self, layer: int, places: Sequence[tuple[int, int]]) -> int:
        found = {
            int(word) ^ half
            for words, heads, (page, slot) in zip(self._words, self._heads, places, strict=True)
            for half, kind in enumerate(words[layer])
            for word in kind[page, slot] ^ heads[layer]
        }
        assert len(found) == 1, "heads of one token differ"
        return found.pop()

    def forward(
        self, ranks: Sequence[tuple[Any, GroupPages]], tokens: Sequence[int], start: int
    ) -> int:
        """Compute tokens from `start` on, and return the one that follows. `ranks`: the request's
        pages on each."""
        size = self.page_size

        def at_full(at: int) -> list[tuple[int, int]]:
            return [(int(pages[at // size]), at % size) for pages, _ in ranks]

        def at_last(at: int) -> list[tuple[int, int]]:
            places = []
            for _, (first, ids) in ranks:
                number = at // size - first
                assert 0 <= number < len(ids), f"token {at} has no page: {first}, {ids}"
                places.append((int(ids[number]), at % size))
            return places

        full = [self._get(0, at_full(at)) for at in range(start)]
        drafts = [self._get(2, at_full(at)) for at in range(start)]
        assert drafts == [mix(word) for word in full], "the draft's KV is another's"
        begin = max(0, start + 1 - self.window)
        last = [self._get(1, at_last(at)) for at in range(begin, start)]
        for at in range(start, len(tokens)):
            new = kept(full, last[-(self.window - 1) :] if self.window > 1 else [], int(tokens[at]))
            full.append(new[0])
            last.append(new[1])
            self._put(0, at_full(at), new[0])
            self._put(2, at_full(at), mix(new[0]))
            self._put(1, at_last(at), new[1])
        return said(full, last[-self.window :])


class WindowPair:
    """Two nodes with small pools, or the ranks of two workers (`tp_sizes`), and both engines'
    loops."""

    def __init__(
        self, *, decode: tuple[int, int] = (64, 16), prefill: tuple[int, int] = (64, 24),
        checkpoints: int = 4, window: int = WINDOW, chunk: int = 8, page_size: int = 4,
        shared: bool = False, decode_config: DecodeConfig | None = None,
        prefill_config: PrefillConfig | None = None,
        tp_sizes: tuple[int, int] = (1, 1), heads: tuple[int, int, int] = (1, 2, 3),
    ) -> None:  # fmt: skip
        self.p_model, self.d_model = (
            Model(*pages, page_size, window, step, shared, heads, tp_size)
            for pages, step, tp_size in zip((prefill, decode), (chunk, 1), tp_sizes, strict=True)
        )
        self.chunk = chunk
        config = prefill_config or PrefillConfig(checkpoints=checkpoints)
        of_decode = decode_config or DecodeConfig(reserve_tokens=0)
        self.prefill: Any
        self.decode: DecodeNode
        if tp_sizes == (1, 1):
            self.prefill = PrefillNode(self.p_model.pool, config)
            self.decode = DecodeNode(self.d_model.pool, of_decode)
        else:
            self.prefill = PrefillGroup(self.p_model.pools, config, self.p_model.mesh)
            self.decode = DecodeGroup(self.d_model.pools, of_decode, self.d_model.mesh)
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
            keys = page_keys(RadixKey(req.tokens[:-1]).data, self.p_model.page_size)
            told = self.router.depth(None, keys) * self.p_model.page_size
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
        token = self.p_model.forward(self.on_prefill(req), req.tokens[:end].tolist(), start)
        last = end == req.num_tokens
        self.prefill.send_chunk(req, end, last, token.to_bytes(4, "little") if last else b"")
        self.computing[req] = end
        if last:
            del self.computing[req]

    def on_prefill(self, req: PrefillRequest) -> list[tuple[Any, GroupPages]]:
        """The request's pages on each rank."""
        ranks: list[Any] = [req]
        if others := getattr(self.prefill, "others", []):
            # The others compute by what the log has told them.
            self.prefill._hand_log()
            ranks[1:] = [other.request(req.rid) for other in others]
            for one in ranks:
                assert (one.prefix_len, one.stops) == (req.prefix_len, req.stops)
        return [(one.pages, one.window_pages("sliding")) for one in ranks]

    # --- decode -----------------------------------------------------------------------------------

    def step_decode(self) -> None:
        node = self.decode
        for req in node.pop_preallocated():
            self.hits.setdefault(req.rid, req.prefix_len)
        self.running += node.pop_transferred()
        for req in node.pop_failed():
            self.failed[req.rid] = req.error
            self.running = [one for one in self.running if one is not req]
        for req in list(self.running):
            token = self.sample(req)
            node.append_many([req], [token])
            self.tokens[req.rid].append(token)
            if len(req.output) == req.max_new_tokens:
                node.finish(req)
                self.running.remove(req)
                self.done.append(req.rid)

    def sample(self, req: DecodeRequest) -> int:
        if not req.output:
            return int.from_bytes(req.aux, "little")
        ranks = [(req.pages, req.window_pages("sliding"))]
        if isinstance(self.decode, DecodeGroup):
            others = [one.window_pages(req.row, "sliding") for one in self.decode.others]
            ranks = list(zip(self.decode.pages_of(req), [ranks[0][1], *others], strict=True))
        return self.d_model.forward(ranks, req.tokens.tolist(), req.kv_len)

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
            return self.decode.num_rooms == 0 and not self.prefill.requests

        until(lambda: is_over() and self.decode.idle)
        self.prefill.pop_bootstrapped()
        for node in (self.decode, self.prefill):
            node.audit()
        for node in (self.decode, self.prefill):
            pages = node.pages
            assert (pages.allocator.owned_pages, pages.allocator.held_pages) == (0, 0)
            for group in pages.windows:
                states = group.allocator
                assert (states.owned_pages, states.held_pages) == (0, 0), group.name
                assert not group.pins.any()
        (group,) = self.decode.pages.windows
        assert group.allocator.free_pages == group.allocator.num_pages

    def __enter__(self) -> WindowPair:
        return self

    def __exit__(self, *_error: object) -> None:
        self.decode.close()
        self.prefill.close()
