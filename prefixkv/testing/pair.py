"""A decode and a prefill worker in one process, over real NIXL, and an engine without a model.

`StandInPrefill` is prefill's engine wherever its bytes matter and its model does not: in
`benchmarks/stand_in`, and in a `NodePair`, whose decode side the caller drives as its own engine
would.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import InternalError
from prefixkv.memory.mesh import Mesh
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import Request
from prefixkv.runtime.groups import DecodeGroup, PrefillGroup
from prefixkv.testing.hashing import PrefixHasher, Words, sample
from prefixkv.testing.pattern import KVPattern, make_patterns, make_pools

_IDLE_S: Final = 0.01
_MESH: Final = Mesh(num_layers=2, num_kv_heads=2)


class StandInPrefill:
    """Computes prompts first come, first served, chunk by chunk, and sends each chunk as it is
    done. Belongs to one thread.

    Computing is writing the pattern. What goes with the last chunk is the first token: the int32
    `sample` of the prompt's hash.
    """

    def __init__(
        self,
        node: PrefillGroup,
        patterns: Sequence[KVPattern],
        chunk_tokens: int,
        seconds_per_token: float = 0.0,
    ) -> None:
        """`patterns`: of each rank's pool. `seconds_per_token`: the least time computing takes."""
        self.node = node
        self._patterns = patterns
        self._chunk_tokens = chunk_tokens
        self._seconds_per_token = seconds_per_token
        self._hasher = PrefixHasher()
        self.open: dict[str, Words] = {}  # hashes of each prompt that is not sent yet
        self._computed: dict[str, int] = {}  # tokens, of those whose pages are there
        self._ready: deque[PrefillRequest] = deque()
        self.prompt_tokens = 0  # of first attempts at prompts that may be cached
        self.hit_tokens = 0

    def add(self, request: Request) -> None:
        self.open[request.rid] = self._hasher.prefixes(request.key.tokens())
        self.node.add(request)

    def step(self) -> bool:
        """One turn of the scheduler loop, a chunk at most. False if there is none to compute."""
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
        """The request is sent, or has failed."""
        del self.open[req.rid]
        self._computed.pop(req.rid, None)

    def _begin(self, req: PrefillRequest) -> None:
        # What every rank has: each has a cache of its own.
        known = min(rank.prefix_len for rank in self.node.ranks_of(req.rid))
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
        for rank, pattern in zip(self.node.ranks_of(req.rid), self._patterns, strict=True):
            pattern.fill(rank.pages, max(start, rank.prefix_len), hashes[:end])
        if self._seconds_per_token:
            busy_s = self._seconds_per_token * (end - start)
            time.sleep(max(0.0, busy_s - (time.perf_counter() - began_s)))
        self._computed[req.rid] = end
        last = end == len(hashes)
        if last:
            self._ready.popleft()
        aux = sample(hashes[-1:]).tobytes() if last else b""
        self.node.send_chunk(req, end=end, last=last, aux=aux)


class NodePair:
    """Both workers, of any two meshes, their small pools, and prefill's engine. Use as a context.

    `decode` is for the caller's engine; `prefill.step()` gives prefill its turn and never blocks.
    """

    def __init__(
        self, mesh: Mesh = _MESH, prefill_mesh: Mesh | None = None, *,
        num_pages: int = 64, page_size: int = 16, head_dim: int = 16, chunk_tokens: int = 32,
        decode_config: DecodeConfig | None = None, prefill_config: PrefillConfig | None = None,
    ) -> None:  # fmt: skip
        """`mesh` is decode's, and prefill's too by default."""
        meshes = mesh, prefill_mesh or mesh
        pools = [make_pools(one, num_pages, page_size, head_dim) for one in meshes]
        self._patterns = make_patterns(pools[0], meshes[0], salt=1)
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
        """A request to both sides; `options` are those of `Request`."""
        prefill, decode = self.prefill.node.endpoint, self.decode.peer_id.name
        request = Request(rid, tokens, room=room, prefill=prefill, decode=decode, **options)
        self.prefill.add(request)
        return self.decode.add(request)

    def arrived(self, patience_s: float = 60.0) -> list[DecodeRequest]:
        """Give both sides turns until decode has the KV of requests; pops these. Raises the error
        of a request that failed, TimeoutError."""
        end_s = time.monotonic() + patience_s
        while not (found := self.decode.pop_transferred()):
            self.decode.pop_preallocated()
            for req in self.decode.pop_failed():
                raise req.error or InternalError(f"{req.rid} failed without an error")
            if time.monotonic() > end_s:
                raise TimeoutError(f"nothing has arrived in {patience_s} s: {self.decode.stats()}")
            if not self.prefill.step():
                self.decode.wait(_IDLE_S)
        return found

    def wrong_pages(self, req: DecodeRequest) -> int:
        """Over all ranks, how many of its pages have a wrong byte in its tokens' KV."""
        output = np.array(req.output[:-1], dtype=np.int32)
        hashes = PrefixHasher().prefixes(np.concatenate([req.request.key.tokens(), output]))
        pairs = zip(self._patterns, self.decode.pages_of(req), strict=True)
        return sum(pattern.mismatches(pages, hashes) for pattern, pages in pairs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
