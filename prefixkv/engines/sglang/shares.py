"""A rank's share of a model's KV, as far as SGLang's own pool describes it.

Where two servers differ in their number of ranks, pages are cut by heads, so their layout is read
from the pool. Pages of an unknown kind are opaque: they move whole, between equal numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from prefixkv import Mesh

OPAQUE: Final = "opaque"
MHA: Final = "mha"
MLA: Final = "mla"


class Share(NamedTuple):
    """The layout of a page in a rank's buffers.

    `kind` MHA: the first half of the buffers hold K, the others V, as [token, head, element]; MLA:
    latent vectors, complete on each rank; OPAQUE: known to SGLang's kernels only. Heads are KV
    heads, `num_heads` those of the rank and `total_heads` those of the model. `window`: tokens
    before its own that a token sees in layers with sliding windows, 0 without such layers.

    >>> Share(MHA, 2, 4).mesh(num_buffers=32, size=2).shard(1)
    Shard(first_layer=0, num_layers=16, first_head=2, num_heads=2)
    """

    kind: str = OPAQUE
    num_heads: int = 1
    total_heads: int = 1
    window: int = 0

    def mesh(self, num_buffers: int, size: int) -> Mesh:
        """Return the mesh of `size` ranks of such shares. Opaque pages count as one head per rank.
        `num_buffers` are a rank's, which are layers; of MHA two buffers are one layer."""
        if self.kind == MHA:
            return Mesh(num_buffers // 2, self.total_heads, size)
        return Mesh(num_buffers, 1 if self.kind == MLA else size, size)


UNKNOWN: Final = Share()


def share_of(pool: Any, total_heads: int) -> Share:
    """`total_heads` are the model's KV heads. Only the exact classes are recognised; a derived
    class may lay its pages out differently, and counts as opaque: a wrong guess would send wrong
    bytes, an opaque page only needs equal ranks."""
    name, module = type(pool).__name__, type(pool).__module__
    if module != "sglang.srt.mem_cache.memory_pool":
        return UNKNOWN
    if name == "MLATokenToKVPool":
        return Share(MLA)
    plain = name == "MHATokenToKVPool" and getattr(pool, "kv_cache_layout", None) == "nhd"
    if plain and all(
        buffer.dim() == 3 and buffer.shape[1] == pool.head_num and buffer.is_contiguous()
        for buffer in (*pool.k_buffer, *pool.v_buffer)
    ):
        return Share(MHA, pool.head_num, total_heads)
    return UNKNOWN


_CURRENT_SHARE: ContextVar[Share] = ContextVar("share of the manager that SGLang makes")


def current_share() -> Share:
    return _CURRENT_SHARE.get(UNKNOWN)


@contextmanager
def use_share(share: Share) -> Iterator[None]:
    """Set the share while a manager is made: its constructor has no argument for it."""
    token = _CURRENT_SHARE.set(share)
    try:
        yield
    finally:
        _CURRENT_SHARE.reset(token)
