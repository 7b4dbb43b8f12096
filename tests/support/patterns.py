"""KV patterns and pools by rank of a mesh, on any device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv import KVPool, Mesh
from prefixkv.conformance.pattern import Hashes, KVPattern, Pages
from prefixkv.paging import pages_for


def make_pools(
    mesh: Mesh, num_pages: int, page_size: int, head_dim: int, **options: Any
) -> list[KVPool]:
    """Make one pool per rank, with its share of the mesh. Raises what `KVPool.create` raises."""
    shards = [mesh.shard(rank) for rank in range(mesh.num_ranks)]
    return [
        KVPool.create(num_pages, page_size, shard.num_layers, shard.num_heads, head_dim, **options)
        for shard in shards
    ]


def make_patterns(pools: Sequence[KVPool], mesh: Mesh, salt: int) -> list[KVPattern]:
    # Each rank gets the mesh and its number, so that it writes the bytes of its own share.
    return [pattern_in(pool, salt, (mesh, rank)) for rank, pool in enumerate(pools)]


def pattern_in(pool: KVPool, salt: int, place: tuple[Mesh, int] | None = None) -> KVPattern:
    """The pool is on any device; `place` as in `KVPattern`."""
    if pool.device == "cpu":
        return KVPattern(pool.layout, salt, pool, place)
    return MirroredPattern(pool, salt, place)


class MirroredPattern(KVPattern):
    """The pattern of a pool that the CPU cannot read. It works on a mirror in CPU memory and copies
    whole pages to the pool and back; the copies are complete on return."""

    def __init__(self, pool: KVPool, salt: int, place: tuple[Mesh, int] | None = None) -> None:
        layout = pool.layout
        self._pool = pool
        self.mirror = KVPool.create(
            layout.num_pages, layout.page_size, layout.num_layers, layout.num_kv_heads,
            layout.head_dim, dtype=layout.dtype, attention=layout.attention,
        )  # fmt: skip
        super().__init__(self.mirror.layout, salt, self.mirror, place)

    def fill(self, pages: Pages, start: int, hashes: Hashes) -> None:
        touched = self.fill_mirror(pages, start, hashes)
        self._pool.write_pages(touched, self.mirror.read_pages(touched))

    def fill_mirror(self, pages: Pages, start: int, hashes: Hashes) -> Pages:
        """Leave the other slots as in the pool. Returns the pages touched."""
        touched = pages[start // self.page_size : pages_for(len(hashes), self.page_size)]
        # Whole pages are copied back: fetch first, or other tokens of these pages would be
        # overwritten.
        self._fetch(touched)
        super().fill(pages, start, hashes)
        return touched

    def fill_tokens(self, pages: Pages, slots: npt.NDArray[np.int64], hashes: Hashes) -> None:
        touched = np.unique(pages)
        self._fetch(touched)
        super().fill_tokens(pages, slots, hashes)
        self._pool.write_pages(touched, self.mirror.read_pages(touched))

    def mismatches(self, pages: Pages, hashes: Hashes) -> int:
        # Only the pages that hold these tokens: a pool of a GPU is slow to read.
        self._fetch(pages[: pages_for(len(hashes), self.page_size)])
        return super().mismatches(pages, hashes)

    def _fetch(self, pages: Pages) -> None:
        self.mirror.write_pages(pages, self._pool.read_pages(pages))
