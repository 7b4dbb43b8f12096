"""What a rank holds of a model's KV, as far as SGLang's own pool says it.

SGLang gives a transfer backend addresses and sizes. Where ranks of one server are more than those
of the other, a page has to be cut by its heads, so its pool is asked how they lie in it. Of a pool
that is not known here pages are opaque: they move whole, between servers of equal size.
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
    """How a page lies in the buffers of a rank. `kind` MHA: the first half of them hold K, the
    others V, [token, head, element]; MLA: latent vectors, of which each rank has all; OPAQUE:
    whatever SGLang's kernels make of it. Heads are KV heads, `num_heads` those of the rank and
    `total_heads` those of the model.

    >>> Share(MHA, 2, 4).mesh(num_buffers=32, size=2).shard(1)
    Shard(first_layer=0, num_layers=16, first_head=2, num_heads=2)
    """

    kind: str = OPAQUE
    num_heads: int = 1
    total_heads: int = 1

    def mesh(self, num_buffers: int, size: int) -> Mesh:
        """Of a server with so many ranks. Opaque pages: a head of each rank's own."""
        if self.kind == MHA:
            return Mesh(num_buffers // 2, self.total_heads, size)
        return Mesh(num_buffers, 1 if self.kind == MLA else size, size)


UNKNOWN: Final = Share()


def share_of(pool: Any, total_heads: int) -> Share:
    """`pool` is SGLang's `token_to_kv_pool`, `total_heads` the model's. A class derived from those
    that are known may lay its pages out otherwise: it is opaque."""
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


_SAID: ContextVar[Share] = ContextVar("share of the manager that SGLang makes")


def said() -> Share:
    return _SAID.get(UNKNOWN)


@contextmanager
def saying(share: Share) -> Iterator[None]:
    """While SGLang makes a manager, which is not told."""
    token = _SAID.set(share)
    try:
        yield
    finally:
        _SAID.reset(token)
