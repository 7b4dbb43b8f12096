"""The stand-in engine's KV on all ranks of a worker: each rank's share of the pattern, in each
rank's own pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.testing.hashing import Words
from prefixkv.testing.pattern import KVPattern, Pages

if TYPE_CHECKING:
    from prefixkv.decode.request import DecodeRequest
    from prefixkv.prefill.request import PrefillRequest


def patterns(pools: Sequence[KVPool], mesh: Mesh, salt: int) -> list[KVPattern]:
    """One a rank."""
    return [KVPattern(pool.layout, salt, pool, (mesh, rank)) for rank, pool in enumerate(pools)]


class PrefillKV:
    """Computes prompts. `ranks_of` gives a request's likeness on each rank: they have caches of
    their own."""

    def __init__(
        self,
        patterns: Sequence[KVPattern],
        ranks_of: Callable[[PrefillRequest], Sequence[PrefillRequest]] = lambda req: [req],
    ) -> None:
        self._patterns = patterns
        self._ranks_of = ranks_of

    def computed(self, req: PrefillRequest) -> int:
        """Tokens whose KV every rank has."""
        return min(rank.prefix_len for rank in self._ranks_of(req))

    def fill(self, req: PrefillRequest, start: int, hashes: Words) -> None:
        """Compute tokens `start` to `len(hashes)` wherever they are not cached."""
        for rank, pattern in zip(self._ranks_of(req), self._patterns, strict=True):
            pattern.fill(rank.pages, max(start, rank.prefix_len), hashes)


class DecodeKV:
    """Checks prompts and writes the tokens after them. `pages_of` gives a request's pages as each
    rank knows them."""

    def __init__(
        self,
        patterns: Sequence[KVPattern],
        pages_of: Callable[[DecodeRequest], Sequence[Pages]] = lambda req: [req.pages],
    ) -> None:
        self._patterns = patterns
        self._pages_of = pages_of

    @property
    def num_ranks(self) -> int:
        return len(self._patterns)

    def mismatches(self, req: DecodeRequest, hashes: Words) -> int:
        """Over all ranks, how many pages of tokens 0 to `len(hashes)` hold a wrong byte."""
        pairs = zip(self._pages_of(req), self._patterns, strict=True)
        return sum(pattern.mismatches(pages, hashes) for pages, pattern in pairs)

    def fill_tokens(self, pages: Pages, slots: npt.NDArray[np.int64], hashes: Words) -> None:
        """See `KVPattern.fill_tokens`: page ids are the same on all ranks."""
        for pattern in self._patterns:
            pattern.fill_tokens(pages, slots, hashes)


def make_pools(
    mesh: Mesh, num_pages: int, page_size: int, head_dim: int, **options: Any
) -> list[KVPool]:
    """A pool a rank, with its share of the mesh. Raises what `KVPool.create` raises."""
    shards = [mesh.shard(rank) for rank in range(mesh.num_ranks)]
    return [
        KVPool.create(num_pages, page_size, shard.num_layers, shard.num_heads, head_dim, **options)
        for shard in shards
    ]
