"""A decode and a prefill worker in one process, over real NIXL, with an engine that has no model.

`StandInPrefill` is prefill's engine where its bytes matter and its model does not: in
`benchmarks/turns`, and in a `NodePair`, whose decode side the caller drives as its own engine
would.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np

from prefixkv import DecodeConfig, DecodeRequest, Mesh, PrefillConfig, PrefillRequest, Request
from prefixkv.spi import DecodeGroup, InternalError, PrefillGroup
from prefixkv.testing.hashing import Hashes, PrefixHasher, sample
from prefixkv.testing.pattern import KVPattern, make_patterns, make_pools

_IDLE_S: Final = 0.01
_MESH: Final = Mesh(num_layers=2, num_kv_heads=2)


class StandInPrefill:
    """Computes prompts in order of arrival, chunk by chunk, by writing the pattern, and sends each
    chunk at once. The last chunk carries the first token: the int32 `sample` of the prompt's hash.
    Belongs to one thread."""

    def __init__(
        self,
        node: PrefillGroup,
        patterns: Sequence[KVPattern],
        chunk_tokens: int,
        seconds_per_token: float = 0.0,
    ) -> None:
        """`patterns`: one per rank's pool. `seconds_per_token`: least time that computing takes."""
        self.node = node
        self._patterns = patterns
        self._chunk_tokens = chunk_tokens
        self._seconds_per_token = seconds_per_token
        self._hasher = PrefixHasher()
        self.open: dict[str, Hashes] = {}  # by rid: hashes of a prompt that is not sent yet
        self._computed: dict[str, int] = {}  # by rid: tokens computed or cached
        self._ready: deque[PrefillRequest] = deque()
        self.prompt_tokens = 0  # counts first attempts at cacheable prompts only
        self.hit_tokens = 0

    def add(self, request: Request) -> None:
        self.open[request.rid] = self._hasher.prefixes(request.key.tokens())
        self.node.add(request)

    def step(self) -> bool:
        """Compute one chunk at most. Returns False if there is none."""
        # Ended requests are taken out before a chunk is computed: none is computed for one that
        # failed.
        for req in self.node.pop_bootstrapped():
            self._begin(req)
        for req in self.node.pop_sent():
            self.ended(req)
        for req in self.node.pop_failed():
            self.ended(req)
        if self._ready:
            self._compute_chunk(self._ready[0])
            return True
        return False

    def ended(self, req: PrefillRequest) -> None:
        del self.open[req.rid]
        self._computed.pop(req.rid, None)

    def _begin(self, req: PrefillRequest) -> None:
        known = req.prefix_len
        if req.request.generation == 0 and req.request.cacheable:
            self.prompt_tokens += len(self.open[req.rid])
            self.hit_tokens += known
        self._computed[req.rid] = known
        self._ready.append(req)

    def _compute_chunk(self, req: PrefillRequest) -> None:
        if req.rid not in self.open:  # failed meanwhile
            self._ready.popleft()
            return
        began_s = time.perf_counter()
        hashes, start = self.open[req.rid], self._computed[req.rid]
        end = min(start + self._chunk_tokens, len(hashes))
        for pattern in self._patterns:  # page ids are the same on all ranks
            pattern.fill(req.pages, start, hashes[:end])
        if self._seconds_per_token:
            busy_s = self._seconds_per_token * (end - start)
            time.sleep(max(0.0, busy_s - (time.perf_counter() - began_s)))
        self._computed[req.rid] = end
        last = end == len(hashes)
        if last:
            self._ready.popleft()
        # The token travels with the last chunk alone: only then is the prompt's hash complete.
        aux = sample(hashes[-1:]).tobytes() if last else b""
        self.node.send_chunk(req, end=end, last=last, aux=aux)


class NodePair:
    """Both workers, of any two meshes, with small pools and prefill's engine. Use as a context.
    `decode` is for the caller's engine; `prefill.step()` gives prefill a turn and never blocks."""

    def __init__(
        self, mesh: Mesh = _MESH, prefill_mesh: Mesh | None = None, *,
        num_pages: int = 64, page_size: int = 16, head_dim: int = 16, chunk_tokens: int = 32,
        decode_config: DecodeConfig | None = None, prefill_config: PrefillConfig | None = None,
    ) -> None:  # fmt: skip
        """`mesh` is decode's, and by default prefill's too."""
        meshes = mesh, prefill_mesh or mesh
        pools = [make_pools(one, num_pages, page_size, head_dim) for one in meshes]
        self._patterns = make_patterns(pools[0], meshes[0], salt=1)
        # If the second worker fails to start, the first one is closed again.
        with ExitStack() as closing:
            prefill = PrefillGroup(pools[1], prefill_config or PrefillConfig(), meshes[1])
            closing.enter_context(prefill)
            self.prefill = StandInPrefill(
                prefill, make_patterns(pools[1], meshes[1], salt=1), chunk_tokens
            )
            self.decode = DecodeGroup(pools[0], decode_config or DecodeConfig(), meshes[0])
            closing.enter_context(self.decode)
            self.close = closing.pop_all().close

    def submit(self, rid: str, tokens: Any, room: int, **options: Any) -> DecodeRequest:
        """Submit to both sides; `options` are those of `Request`."""
        prefill, decode = self.prefill.node.endpoint, self.decode.peer_id.name
        request = Request(rid, tokens, room=room, prefill=prefill, decode=decode, **options)
        self.prefill.add(request)
        return self.decode.add(request)

    def arrived(self, patience_s: float = 60.0) -> list[DecodeRequest]:
        """Give both sides turns until decode has the KV of requests, and pop these. Raises the
        error of a request that failed, or TimeoutError."""
        end_s = time.monotonic() + patience_s
        while not (found := self.decode.pop_transferred()):
            self.decode.pop_preallocated()
            for req in self.decode.pop_failed():
                raise req.error or InternalError(f"{req.rid} failed without an error")
            if time.monotonic() > end_s:
                raise TimeoutError(f"nothing has arrived in {patience_s} s: {self.decode.stats()}")
            # With nothing to compute decode waits for its control thread, not in a busy
            # loop.
            if not self.prefill.step():
                self.decode.wait(_IDLE_S)
        return found

    def count_wrong_pages(self, req: DecodeRequest) -> int:
        """Count, over all ranks of decode, pages with a wrong byte in a token's KV."""
        # The token sampled last has no KV yet.
        output = np.array(req.output[:-1], dtype=np.int32)
        hashes = PrefixHasher().prefixes(np.concatenate([req.request.key.tokens(), output]))
        pairs = zip(self._patterns, self.decode.pages_of(req), strict=True)
        return sum(pattern.mismatches(pages, hashes) for pattern, pages in pairs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
