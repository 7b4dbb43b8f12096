"""KV of the stand-in engine: bytes that follow from a token's whole prefix, the layer, K or V, and
the head.

One word of KV is (hash of the prefix up to and including the token) XOR (a constant of its place in
the token: layer, K or V, head, lane). A page that is stale, shifted, unwritten, of another prefix
or of another layer thus differs in nearly every word. The `salt` makes each pass over a pool
different, so that bytes of an earlier pass are never right by luck.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from prefixkv import Mesh
from prefixkv.conformance.hashing import Hashes, splitmix64
from prefixkv.errors import CallerError
from prefixkv.spi import KVLayout, Slab, pages_for

Pages = npt.NDArray[np.int32]
WordArray = npt.NDArray[Any]  # of unsigned words, 1 to 8 bytes

_CHECK_BYTES: Final = 1 << 18  # compared at a time, so that the expected bytes stay in cache


class KVPattern:
    """Writer and checker of the pattern in one pool on the CPU. Keeps `owner` alive, since it works
    on addresses.

    `hashes` are prefix hashes (`PrefixHasher`), uint64, one per token. Token i of a request lies in
    slot i % page_size of `pages[i // page_size]`.
    """

    def __init__(
        self, layout: KVLayout, salt: int, owner: object, place: tuple[Mesh, int] | None = None
    ) -> None:
        """`place`: the mesh, and the rank of the pool; None: the pool holds the whole model."""
        self._owner = owner
        self.page_size = layout.page_size
        self._salt = splitmix64(np.array([salt], dtype=np.uint64))
        self._dtype = _word_dtype(layout)
        lanes = layout.head_bytes // self._dtype.itemsize
        self._check_tokens = max(1, _CHECK_BYTES // (layout.num_kv_heads * layout.head_bytes))
        # Constants are numbered over the whole model, then cut to this rank's share: two ranks, or
        # two meshes, agree on every head's bytes.
        mesh, rank = place or (Mesh(layout.num_layers, layout.num_kv_heads), 0)
        shard, kinds = mesh.shard(rank), layout.slabs_per_layer
        count = mesh.num_layers * kinds * mesh.num_kv_heads * lanes
        places = splitmix64(np.arange(count, dtype=np.uint64)).astype(self._dtype)
        places = places.reshape(mesh.num_layers * kinds, mesh.num_kv_heads, lanes)
        heads = slice(shard.first_head, shard.first_head + shard.num_heads)
        places = places[shard.first_layer * kinds :, heads]
        # Of each slab its memory [page, token, head, lane], and its constants [head, lane].
        self._slabs = [
            (_as_array(layout, slab, self._dtype), places[number])
            for number, slab in enumerate(layout.slabs)
        ]

    def fill(self, pages: Pages, start: int, hashes: Hashes) -> None:
        """Write tokens `start` to `len(hashes)`. Raises CallerError if `pages` has too few."""
        self._check(pages, hashes)
        at = np.arange(start, len(hashes))
        self._write(np.asarray(pages)[at // self.page_size], at % self.page_size, hashes[start:])

    def fill_tokens(self, pages: Pages, slots: npt.NDArray[np.int64], hashes: Hashes) -> None:
        """Write token `hashes[i]` to slot `slots[i]` of page `pages[i]`, for each i."""
        self._write(pages, slots, hashes)

    def _write(self, pages: Pages, slots: npt.NDArray[np.int64], hashes: Hashes) -> None:
        values = self._values(hashes)
        for memory, places in self._slabs:
            memory[pages, slots] = values ^ places

    def mismatches(self, pages: Pages, hashes: Hashes) -> int:
        """Count the pages with a wrong byte in any of tokens 0 to `len(hashes)`."""
        self._check(pages, hashes)
        pages, values = np.asarray(pages), self._values(hashes)
        page_at, slots = np.divmod(np.arange(len(hashes)), self.page_size)
        wrong: set[int] = set()
        for first in range(0, len(hashes), self._check_tokens):
            part = slice(first, first + self._check_tokens)
            for memory, places in self._slabs:
                actual, expected = memory[pages[page_at[part]], slots[part]], values[part] ^ places
                # The common case is equal, which needs no mask per token.
                if not np.array_equal(expected, actual):
                    bad = (expected != actual).any(axis=(1, 2))
                    wrong.update(page_at[part][bad].tolist())
        return len(wrong)

    def _check(self, pages: Pages, hashes: Hashes) -> None:
        needed = pages_for(len(hashes), self.page_size)
        if len(pages) < needed:
            raise CallerError(f"{len(pages)} pages, {len(hashes)} tokens need {needed}")

    def _values(self, hashes: Hashes) -> WordArray:
        """Return [token, 1, 1]: one value per token, for all slabs, heads and lanes."""
        return splitmix64(hashes ^ self._salt).astype(self._dtype).reshape(-1, 1, 1)


def _word_dtype(layout: KVLayout) -> np.dtype[Any]:
    """Return the widest unsigned type that divides a head's bytes and every address."""
    steps = [layout.head_bytes]
    for slab in layout.slabs:
        steps += [slab.base, slab.page_stride, slab.token_stride, slab.head_stride]
    size = next(size for size in (8, 4, 2, 1) if all(step % size == 0 for step in steps))
    return np.dtype(f"u{size}")


def _as_array(layout: KVLayout, slab: Slab, dtype: np.dtype[Any]) -> WordArray:
    """Return a writable view of a slab: [page, token, head, lane]."""
    lanes = layout.head_bytes // dtype.itemsize

    # numpy views foreign memory through this interface; `owner` keeps the memory alive.
    class ArrayView:
        __array_interface__ = {
            "version": 3,
            "data": (slab.base, False),
            "typestr": dtype.str,
            "shape": (layout.num_pages, layout.page_size, layout.num_kv_heads, lanes),
            "strides": (*astuple(slab)[1:], dtype.itemsize),
        }

    return np.asarray(ArrayView())
