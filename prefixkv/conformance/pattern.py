"""KV of the stand-in engine: bytes that follow from a token's whole prefix, the layer, K or V, and
the head.

One word of KV is (hash of the prefix up to and including the token) XOR (a constant of its place in
the token: layer, K or V, head, lane). A page that is stale, shifted, unwritten, of another prefix
or of another layer thus differs in nearly every word. The `salt` makes each pass over a pool
different, so that bytes of an earlier pass are never right by luck.

The prefix hash (`PrefixHasher`) is a polynomial of 64 bits, vectorised: a whole prompt takes one
cumulative sum, and one more token one multiplication. uint64 arithmetic wraps around on purpose.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from prefixkv import Mesh
from prefixkv.errors import CallerError
from prefixkv.spi import KVLayout, Slab, pages_for

Hashes = npt.NDArray[np.uint64]

VOCABULARY: Final = 128_000  # token ids that `sample` returns are below it

_FACTOR: Final = 0xD1342543DE82EF95  # odd, so it has an inverse
_INVERSE: Final = pow(_FACTOR, -1, 2**64)
_START: Final = 0x243F6A8885A308D3


def splitmix64(values: Hashes) -> Hashes:
    """Mix hashes by a bijection: each output bit depends on all input bits. Returns a new array."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class PrefixHasher:
    """`hashes[i]` depends on tokens 0 to i and on nothing else. Keeps a table of powers."""

    def __init__(self) -> None:
        self._powers = np.ones(1, dtype=np.uint64)  # _FACTOR ** i
        self._inverses = np.ones(1, dtype=np.uint64)

    def prefixes(self, tokens: npt.NDArray[np.int32], before: int = _START) -> Hashes:
        """Return the hash of the prefix up to each token: uint64, same length. O(n). `before`: the
        hash of what comes before them.

        >>> hasher = PrefixHasher()
        >>> long = hasher.prefixes(np.array([5, 6, 7], dtype=np.int32))
        >>> bool(np.array_equal(long[1:], extend(long[:2], np.array([6, 7], dtype=np.int32))))
        True
        >>> bool(np.array_equal(long[1:], hasher.prefixes(np.array([6, 7]), int(long[0]))))
        True
        """
        n = len(tokens)
        if n >= len(self._powers):
            self._powers = _powers(_FACTOR, 2 * n + 1)
            self._inverses = _powers(_INVERSE, 2 * n + 1)
        # h[i] = sum of (token[j] + 1) * F**(i - j), plus `before`: with the inverse powers of F
        # taken inside the sum it is one cumulative sum, times F**(i + 1). The + 1 keeps token 0
        # from vanishing.
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._inverses[1 : n + 1]
        terms[:1] += np.uint64(before)
        return self._powers[1 : n + 1] * np.cumsum(terms, dtype=np.uint64)


def extend(hashes: Hashes, tokens: npt.NDArray[np.int32]) -> Hashes:
    """Return the hashes of prefixes that are each one token of `tokens` longer."""
    return hashes * np.uint64(_FACTOR) + tokens.astype(np.uint64) + np.uint64(1)


def sample(hashes: Hashes) -> npt.NDArray[np.int32]:
    """Return the token that follows each prefix, int32 in [0, VOCABULARY)."""
    return (splitmix64(~hashes) % np.uint64(VOCABULARY)).astype(np.int32)


def _powers(base: int, count: int) -> Hashes:
    """Return `base` to the powers 0 to `count` - 1, modulo 2**64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


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
        places = np.asarray(pages)[at // self.page_size], at % self.page_size
        self.fill_tokens(*places, hashes[start:])

    def fill_tokens(self, pages: Pages, slots: npt.NDArray[np.int64], hashes: Hashes) -> None:
        """Write token `hashes[i]` to slot `slots[i]` of page `pages[i]`, for each i."""
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
