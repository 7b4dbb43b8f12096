"""The pattern is what a loop over every element says, and any wrong byte is seen."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.conformance.pattern import KVPattern, PrefixHasher, splitmix64
from prefixkv.memory.kv_pool import KVPool
from tests.support.patterns import MirroredPattern

SHAPES = [  # dtype, attention, order, heads, head_dim
    ("bfloat16", "mha", "layer_major", 3, 16),
    ("float32", "mha", "page_major", 2, 5),
    ("float16", "mla", "page_major", 1, 18),
    ("float8_e4m3fn", "mla", "layer_major", 1, 7),
    ("uint8", "mha", "layer_major", 2, 4),
]
PAGES, PAGE_SIZE, LAYERS = 12, 4, 3


def make_pool(
    dtype="bfloat16", attention="mha", order="layer_major", heads=2, head_dim=8
) -> KVPool:
    return KVPool.create(
        PAGES, PAGE_SIZE, LAYERS, heads, head_dim, dtype=dtype, attention=attention, order=order
    )


def engine_tensors() -> KVPool:
    """K and V side by side in one tensor a layer, heads before tokens, with room between the
    pages."""
    stores = [
        torch.zeros(PAGES + 1, 3, 2, PAGE_SIZE, 24, dtype=torch.float16) for _ in range(LAYERS)
    ]
    views = [[s[:PAGES, i, :, :, 4:20].transpose(1, 2) for s in stores] for i in range(2)]
    return KVPool.from_tensors(*views)


def hashes_of(num_tokens: int, seed: int = 0) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)
    return PrefixHasher().prefixes(tokens)


def pages_of(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def as_bytes(pool: KVPool) -> np.ndarray:
    """[page, slab, token, head, byte], through torch, as an engine would read it."""
    return pool.read_pages(list(range(PAGES))).numpy()


def by_hand(pool: KVPool, salt: int, pages, start: int, hashes) -> np.ndarray:
    """What `as_bytes` has to be after a fill of a pool of zeros."""
    layout = pool.layout
    out = np.zeros_like(as_bytes(pool))
    size = next(s for s in (8, 4, 2, 1) if layout.head_bytes % s == 0)
    lanes = layout.head_bytes // size
    for i in range(start, len(hashes)):
        value = int(
            splitmix64(hashes[i : i + 1] ^ splitmix64(np.array([salt], dtype=np.uint64)))[0]
        )
        for slab in range(len(layout.slabs)):
            for head in range(layout.num_kv_heads):
                place = (slab * layout.num_kv_heads + head) * lanes + np.arange(
                    lanes, dtype=np.uint64
                )
                words = (splitmix64(place) ^ np.uint64(value)).astype(f"u{size}")
                out[pages[i // PAGE_SIZE], slab, i % PAGE_SIZE, head] = words.view(np.uint8)
    return out


def plain(pool: KVPool, salt: int) -> KVPattern:
    return KVPattern(pool.layout, salt, pool)


WAYS = pytest.mark.parametrize("pattern_of", [plain, MirroredPattern])


@WAYS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0, 3, 8])
def test_fill_is_the_loop(shape, start, pattern_of):
    pool = make_pool(*shape)
    pages, hashes = pages_of(7, 3, 4, 5, 1), hashes_of(18)
    pattern_of(pool, 5).fill(pages, start, hashes)
    assert np.array_equal(as_bytes(pool), by_hand(pool, 5, pages, start, hashes))


@WAYS
@pytest.mark.parametrize(
    "make", [*(partial(make_pool, *shape) for shape in SHAPES), engine_tensors]
)
def test_token_by_token_is_the_same_as_at_once(make, pattern_of):
    pool = make()
    pattern = pattern_of(pool, 1)
    many = [(pages_of(2, 9), hashes_of(7, 1)), (pages_of(4, 3), hashes_of(7, 2))]
    for i in range(7):
        at = np.array([pages[i // PAGE_SIZE] for pages, _ in many], dtype=np.int32)
        pattern.fill_tokens(
            at, np.full(2, i % PAGE_SIZE), np.array([h[i] for _, h in many], dtype=np.uint64)
        )
    one_by_one = as_bytes(pool).copy()
    for pages, hashes in many:
        assert pattern.mismatches(pages, hashes) == 0
        pool.write_pages(pages, torch.zeros_like(pool.read_pages(pages)))
        assert pattern.mismatches(pages, hashes) == 2
        pattern.fill(pages, 0, hashes)
    assert np.array_equal(as_bytes(pool), one_by_one)


@given(st.data())
def test_any_flipped_bit_is_seen_in_its_page_only(data):
    shape = data.draw(st.sampled_from(SHAPES))
    pool = make_pool(*shape)
    pattern = KVPattern(pool.layout, 9, pool)
    num_tokens = data.draw(st.integers(1, 20))
    order = data.draw(st.permutations(range(PAGES)))
    pages = np.array(sorted(order[:6]) if data.draw(st.booleans()) else order[:6], dtype=np.int32)
    hashes = hashes_of(num_tokens)
    pattern.fill(pages, 0, hashes)
    assert pattern.mismatches(pages, hashes) == 0
    raw = pool.read_pages(pages)
    flipped = data.draw(
        st.sets(
            st.tuples(*(st.integers(0, n - 1) for n in raw.shape), st.integers(0, 7)), max_size=3
        )
    )
    for *place, bit in flipped:
        raw[tuple(place)] ^= 1 << bit
    pool.write_pages(pages, raw)
    seen = {page for page, _, token, *_ in flipped if page * PAGE_SIZE + token < num_tokens}
    assert pattern.mismatches(pages, hashes) == len(seen)


def test_wrong_pages_are_seen():
    pool = make_pool()
    pattern = KVPattern(pool.layout, 9, pool)
    pages, hashes = pages_of(1, 2, 3, 4), hashes_of(16)
    pattern.fill(pages, 0, hashes)
    assert pattern.mismatches(pages_of(2, 1, 3, 4), hashes) == 2  # two pages swapped
    assert pattern.mismatches(pages, hashes_of(16, seed=8)) == 4  # of another prompt
    other = hashes.copy()
    other[8:] = hashes_of(16, seed=8)[8:]
    assert pattern.mismatches(pages, other) == 2  # the same until token 8
    assert KVPattern(pool.layout, 10, pool).mismatches(pages, hashes) == 4  # of an earlier pass
    pool.k(0)[3].copy_(pool.k(1)[3])
    assert pattern.mismatches(pages, hashes) == 1  # K of another layer
    pool.v(2)[1, 2, 0] = 0
    assert pattern.mismatches(pages, hashes) == 2  # one head of one token not written
