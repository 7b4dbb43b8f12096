"""A prefill and a decode worker of any two meshes in one process over real NIXL, and stand-in
engines round them.

The KV is the demo's pattern, which follows from the whole prefix, the layer, K or V, and the head
of the *model*; so each rank's bytes are right only if they came from the right place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.conformance.hashing import PrefixHasher
from prefixkv.decode.request import DecodeRequest
from prefixkv.memory.axes import SLAB_AXES
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import Request
from prefixkv.spi import DecodeGroup, PrefillGroup
from tests.support.devices import DEVICE
from tests.support.node_pair import Tokens
from tests.support.patience import until
from tests.support.patterns import make_patterns, make_pools

SALT = 7
_hasher = PrefixHasher()


def opaque_pool(pool: KVPool, tag: str) -> KVPool:
    """The same memory, whose pages move whole from now on."""
    k, v = ([kind(layer) for layer in range(pool.layout.num_layers)] for kind in (pool.k, pool.v))
    page_size = pool.layout.page_size
    return KVPool.from_tensors(k, v, page_size=page_size, axes=SLAB_AXES, opaque=tag)


class MeshPair:
    """Both workers, stepped from one thread. `step` never blocks."""

    def __init__(
        self, prefill: Mesh, decode: Mesh, *, attention: str = "mha",
        orders: tuple[str, str] = ("layer_major",) * 2, page_sizes: tuple[int, int] = (4, 4),
        num_pages: int = 64, head_dim: int = 16, chunk: int = 12, device: str = DEVICE,
        prefill_config: PrefillConfig | None = None, decode_config: DecodeConfig | None = None,
        opaque: str = "",
        prefill_more: dict[str, Any] | None = None, decode_more: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`prefill_more` and `decode_more` are for the groups; `opaque` is the tag of all pools."""
        self.chunk = chunk
        shared = decode_config is not None and decode_config.transport.backend != "nixl"
        prefill_pools, self.decode_pools = (
            make_pools(
                side, num_pages, page_size, head_dim,
                attention=attention, order=order, device=device, shared=shared,
            )
            for side, page_size, order in zip((prefill, decode), page_sizes, orders, strict=True)
        )  # fmt: skip
        if opaque:
            prefill_pools, self.decode_pools = (
                [opaque_pool(pool, opaque) for pool in pools]
                for pools in (prefill_pools, self.decode_pools)
            )
        self.prefill = PrefillGroup(
            prefill_pools, prefill_config or PrefillConfig(), prefill, **prefill_more or {}
        )
        try:
            config = replace(decode_config or DecodeConfig(), reserve_tokens=8)
            self.decode = DecodeGroup(self.decode_pools, config, decode, **decode_more or {})
        except BaseException:
            self.prefill.close()
            raise
        self._prefill_patterns = make_patterns(prefill_pools, prefill, SALT)
        self._decode_patterns = make_patterns(self.decode_pools, decode, SALT)
        self.hold = False
        self.computing: dict[str, int] = {}
        self.arrived: dict[str, DecodeRequest] = {}
        self.failed: dict[str, Exception | None] = {}
        self.prefill_failed: dict[str, Exception | None] = {}
        self.sent: list[str] = []
        self.prefix_lens: dict[str, int] = {}
        self.mismatches = 0

    def submit(self, rid: str, tokens: Tokens, room: int, *, tell: bool = True) -> DecodeRequest:
        """To both sides; to decode alone with `tell` False."""
        req = self.decode.add(
            Request(rid, tokens, max_new_tokens=4, room=room, prefill=self.prefill.endpoint)
        )
        if tell:
            decode = self.decode.peer_id.name
            self.prefill.add(Request(rid, tokens, room=room, decode=decode))
        return req

    def step(self) -> None:
        self.decode.pop_preallocated()
        for ready in self.prefill.pop_bootstrapped():
            self.computing[ready.rid] = ready.prefix_len
        for bad in self.prefill.pop_failed():
            self.computing.pop(bad.rid, None)
            self.prefill_failed[bad.rid] = bad.error
        if not self.hold:
            for rid in list(self.computing):
                self.compute(self.on_prefill(rid))
        self.sent += [req.rid for req in self.prefill.pop_sent()]
        for req in self.decode.pop_transferred():
            self.arrived[req.rid] = req
            self.prefix_lens[req.rid] = req.prefix_len
            self.mismatches += self.wrong_pages(req)
        for failed in self.decode.pop_failed():
            self.failed[failed.rid] = failed.error

    def on_prefill(self, rid: str) -> PrefillRequest:
        return self.prefill.requests[rid]

    def wrong_pages(self, req: DecodeRequest) -> int:
        """Over all ranks; each rank's own page table has to say the same pages."""
        hashes = _hasher.prefixes(req.request.key.tokens())
        assert all(pages.tolist() == req.pages.tolist() for pages in self.decode.pages_of(req))
        pairs = zip(self._decode_patterns, self.decode.pages_of(req), strict=True)
        return sum(pattern.mismatches(pages, hashes) for pattern, pages in pairs)

    def compute(self, req: PrefillRequest) -> None:
        """One chunk of this request, also while holding."""
        hashes = _hasher.prefixes(req.tokens)
        start = self.computing[req.rid]
        end = min([start + self.chunk, req.num_tokens, *(at for at in req.stops if at > start)])
        for pattern in self._prefill_patterns:
            pattern.fill(req.pages, max(start, req.prefix_len), hashes[:end])
        last = end == req.num_tokens
        if last and not self.may_end(req):
            return
        self.reached(req, start, end)
        more = self.last(req) if last else {}
        self.prefill.send_chunk(req, end, last, b"aux " + req.rid.encode() if last else b"", **more)
        self.computing[req.rid] = end
        if last:
            del self.computing[req.rid]

    def may_end(self, req: PrefillRequest) -> bool:
        """Whether prefill's engine has what the last chunk takes."""
        return True

    def reached(self, req: PrefillRequest, start: int, end: int) -> None:
        """The chunk is computed, and not sent yet."""

    def last(self, req: PrefillRequest) -> dict[str, Any]:
        """What goes with the last chunk."""
        return {}

    def until(self, reached: Any) -> None:
        """Step until `reached()` is true."""
        until(reached, step=self.step, state=self.state, pause_s=0.0005)

    def state(self) -> object:
        return self.failed, self.prefill_failed, self.decode.stats()

    def finish(self, rid: str) -> None:
        """The request answers one token and ends."""
        req = self.arrived.pop(rid)
        self.decode.append_many([req], [1])
        self.decode.finish(req)

    def serve(self, room: int, prompts: dict[str, Tokens]) -> None:
        """Requests side by side, from this room on, to their ends on both sides. Each answers one
        token, or is among the failed."""
        for number, (rid, tokens) in enumerate(prompts.items()):
            self.submit(rid, tokens, room + number)
        self.until(lambda: prompts.keys() <= self.arrived.keys() | self.failed.keys())
        for rid in prompts.keys() & self.arrived.keys():
            assert self.arrived[rid].aux == b"aux " + rid.encode()
            self.finish(rid)
        self.until(lambda: prompts.keys() <= {*self.sent, *self.prefill_failed})
        self.until(self.at_rest)

    def at_rest(self) -> bool:
        """Nothing is locked, owned, held or open anywhere."""
        stats = self.decode.stats()
        sides = (stats, self.prefill.stats())
        names = ("pages_owned", "pages_held", "pages_quarantined", "locks", "rooms")
        return not any(side[name] for side in sides for name in names) and not any(
            other.num_rooms for other in self.decode.others
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.decode.close()
        finally:
            self.prefill.close()
