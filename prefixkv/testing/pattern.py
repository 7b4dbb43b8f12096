"""The stand-in engine's KV: bytes that follow from a token's whole prefix, the layer, K or V, and
the head.

One word of KV is (hash of the prefix up to and including the token) XOR (a constant of its place in
the
token: layer, K or V, head, lane). So a page that is stale, of another prefix, of another layer,
shifted or unwritten differs in nearly every word, and both writing and checking run at the speed of
memory. The `salt` sets one pass over a pool apart from the next: what an earlier pass left behind
is never right by luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple, replace

from prefixkv import KVPool, Mesh
from prefixkv.spi import CallerError, KVLayout, Slab, pages_for
from prefixkv.testing.hashing import Words, splitmix64

Pages = npt.NDArray[np.int32]
WordArray = npt.NDArray[Any]  # of unsigned words, 1 to 8 bytes

_CHECK_BYTES: Final = 1 << 18  # compared at a time: the expected ones stay in a core's cache


class _Group(NamedTuple):
    """Slabs an equal distance apart, as one array."""

    view: WordArray  # [slabs, page, token, head, lane]
    places: WordArray  # [slabs, 1, 1, head, lane]


def make_pools(
    mesh: Mesh, num_pages: int, page_size: int, head_dim: int, **options: Any
) -> list[KVPool]:
    """A pool a rank, with its share of the mesh. Raises what `KVPool.create` raises."""
    shards = [mesh.shard(rank) for rank in range(mesh.num_ranks)]
    return [
        KVPool.create(num_pages, page_size, shard.num_layers, shard.num_heads, head_dim, **options)
        for shard in shards
    ]


def make_patterns(pools: Sequence[KVPool], mesh: Mesh, salt: int) -> list[KVPattern]:
    """One a rank."""
    return [pattern_in(pool, salt, (mesh, rank)) for rank, pool in enumerate(pools)]


def pattern_in(pool: KVPool, salt: int, place: tuple[Mesh, int] | None = None) -> KVPattern:
    """The pattern in a pool on any device; `place` as with `KVPattern`."""
    if pool.device == "cpu":
        return KVPattern(pool.layout, salt, pool, place)
    return MirroredPattern(pool, salt, place)


class KVPattern:
    """Writes and checks the pattern in one pool on the CPU. Keeps `owner` alive, since it works on
    addresses.

    `hashes` are prefix hashes (`PrefixHasher`), uint64, one a token. Token i of a request lies in
    slot i % page_size of `pages[i // page_size]`.
    """

    def __init__(
        self, layout: KVLayout, salt: int, owner: object, place: tuple[Mesh, int] | None = None
    ) -> None:
        """`place`: the pool holds the share of this rank of the mesh; all of the model by
        default."""
        self._owner = owner
        self.page_size = layout.page_size
        self._salt = splitmix64(np.array([salt], dtype=np.uint64))
        self._dtype = _word_dtype(layout)
        lanes = layout.head_bytes // self._dtype.itemsize
        kinds = layout.slabs_per_layer
        self._check_pages = max(1, _CHECK_BYTES // (layout.slab_page_bytes * kinds))
        mesh, rank = place or (Mesh(layout.num_layers, layout.num_kv_heads), 0)
        shard = mesh.shard(rank)
        count = mesh.num_layers * kinds * mesh.num_kv_heads * lanes
        places = splitmix64(np.arange(count, dtype=np.uint64)).astype(self._dtype)
        places = places.reshape(mesh.num_layers * kinds, 1, 1, mesh.num_kv_heads, lanes)
        heads = slice(shard.first_head, shard.first_head + shard.num_heads)
        places = places[shard.first_layer * kinds :, :, :, heads]
        places = np.ascontiguousarray(places[: len(layout.slabs)])
        self._groups = [
            _Group(_as_array(layout, first, step, end - start, self._dtype), places[start:end])
            for start, end, first, step in _even_runs(layout)
        ]

    def fill(self, pages: Pages, start: int, hashes: Words) -> None:
        """Write the KV of tokens `start` to `len(hashes)`; raises CallerError if `pages` has too
        few."""
        values = self._values(pages, hashes)
        for page_at, run, slot, count in _spans(pages, start, len(hashes), self.page_size):
            first = page_at * self.page_size + slot
            own = values[first : first + run * count].reshape(1, run, count, 1, 1)
            page = int(pages[page_at])
            for view, places in self._groups:
                np.bitwise_xor(own, places, out=view[:, page : page + run, slot : slot + count])

    def fill_tokens(self, pages: Pages, slots: npt.NDArray[np.int64], hashes: Words) -> None:
        """Write one token each of many requests: the one with `hashes[i]` to slot `slots[i]` of
        page `pages[i]`."""
        values = splitmix64(hashes ^ self._salt).astype(self._dtype).reshape(1, -1, 1, 1)
        for view, places in self._groups:
            view[:, pages, slots] = values ^ places[:, 0]

    def mismatches(self, pages: Pages, hashes: Words) -> int:
        """How many of the pages that hold tokens 0 to `len(hashes)` have a wrong byte in any of
        those tokens."""
        values = self._values(pages, hashes)
        wrong = 0
        for page_at, run, slot, count in _spans(pages, 0, len(hashes), self.page_size):
            for step in range(0, run, self._check_pages):
                size = min(self._check_pages, run - step)
                first = (page_at + step) * self.page_size + slot
                own = values[first : first + size * count].reshape(1, size, count, 1, 1)
                page = int(pages[page_at + step])
                bad = np.zeros(size, dtype=bool)
                for view, places in self._groups:
                    for i in range(0, len(places), 2):
                        actual = view[i : i + 2, page : page + size, slot : slot + count]
                        expected = own ^ places[i : i + 2]
                        if not np.array_equal(expected, actual):
                            bad |= (expected != actual).any(axis=(0, 2, 3, 4))
                wrong += int(bad.sum())
        return wrong

    def _values(self, pages: Pages, hashes: Words) -> WordArray:
        needed = pages_for(len(hashes), self.page_size)
        if len(pages) < needed:
            raise CallerError(f"{len(pages)} pages, {len(hashes)} tokens need {needed}")
        return splitmix64(hashes ^ self._salt).astype(self._dtype)


class MirroredPattern(KVPattern):
    """The pattern in a pool that the CPU cannot read. Works on a pool of the same sizes in CPU
    memory, and copies whole pages to it and back; they are there on return.
    """

    def __init__(self, pool: KVPool, salt: int, place: tuple[Mesh, int] | None = None) -> None:
        layout = pool.layout
        self._pool = pool
        self.mirror = KVPool.create(
            layout.num_pages, layout.page_size, layout.num_layers, layout.num_kv_heads,
            layout.head_dim, dtype=layout.dtype, attention=layout.attention,
        )  # fmt: skip
        super().__init__(self.mirror.layout, salt, self.mirror, place)

    def fill(self, pages: Pages, start: int, hashes: Words) -> None:
        touched = self.fill_mirror(pages, start, hashes)
        self._pool.write_pages(touched, self.mirror.read_pages(touched))

    def fill_mirror(self, pages: Pages, start: int, hashes: Words) -> Pages:
        """`fill` the mirror alone, other slots being as in the pool. Returns the pages touched."""
        touched = pages[start // self.page_size : pages_for(len(hashes), self.page_size)]
        self._fetch(touched)
        super().fill(pages, start, hashes)
        return touched

    def fill_tokens(self, pages: Pages, slots: npt.NDArray[np.int64], hashes: Words) -> None:
        touched = np.unique(pages)
        self._fetch(touched)
        super().fill_tokens(pages, slots, hashes)
        self._pool.write_pages(touched, self.mirror.read_pages(touched))

    def mismatches(self, pages: Pages, hashes: Words) -> int:
        self._fetch(pages[: pages_for(len(hashes), self.page_size)])
        return super().mismatches(pages, hashes)

    def _fetch(self, pages: Pages) -> None:
        self.mirror.write_pages(pages, self._pool.read_pages(pages))


def _spans(
    pages: Pages, start: int, end: int, page_size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Tokens [start, end) as (position in `pages`, pages, first slot, slots): neighbouring whole
    pages in one."""
    at = start
    while at < end:
        page_at, slot = divmod(at, page_size)
        count = min(page_size - slot, end - at)
        run = 1
        if count == page_size:
            limit = end // page_size
            while page_at + run < limit and pages[page_at + run] == pages[page_at] + run:
                run += 1
        yield page_at, run, slot, count
        at += run * count


def _word_dtype(layout: KVLayout) -> np.dtype[Any]:
    """The widest unsigned word that divides a head's bytes and every address."""
    steps = [layout.head_bytes]
    for slab in layout.slabs:
        steps += [slab.base, slab.page_stride, slab.token_stride, slab.head_stride]
    size = next(size for size in (8, 4, 2, 1) if all(step % size == 0 for step in steps))
    return np.dtype(f"u{size}")


def _even_runs(layout: KVLayout) -> Iterator[tuple[int, int, Slab, int]]:
    """The slabs as (start, end, first slab, bytes between two bases), each run as long as it can
    be."""
    slabs = layout.slabs
    start = 0
    while start < len(slabs):
        first = slabs[start]
        step = slabs[start + 1].base - first.base if start + 1 < len(slabs) else 0
        end = start + 1
        while end < len(slabs) and slabs[end] == replace(
            first, base=first.base + (end - start) * step
        ):
            end += 1
        yield start, end, first, step
        start = end


def _as_array(
    layout: KVLayout, first: Slab, step: int, count: int, dtype: np.dtype[Any]
) -> WordArray:
    """A writable view of `count` slabs, [slab, page, token, head, lane]."""
    lanes = layout.head_bytes // dtype.itemsize

    class Memory:
        __array_interface__ = {
            "version": 3,
            "data": (first.base, False),
            "typestr": dtype.str,
            "shape": (count, layout.num_pages, layout.page_size, layout.num_kv_heads, lanes),
            "strides": (step, *astuple(first)[1:], dtype.itemsize),
        }

    return np.asarray(Memory())
