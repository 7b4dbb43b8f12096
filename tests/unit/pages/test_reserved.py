"""Reserved pages: the first of a pool, which no request ever gets."""

from __future__ import annotations

import pytest
import torch

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import CallerError, ConfigError, OutOfPagesError, PageStateError, RequestError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.allocator import PageAllocator, PageState
from prefixkv.request import Request


def test_reserved_pages_are_in_no_transition() -> None:
    pages = PageAllocator(8, reserved_pages=2)
    assert pages.pages_in(PageState.RESERVED).tolist() == [0, 1]
    assert pages.free_pages == 6
    assert pages.free_runs() == [(2, 6)]
    assert pages.alloc(6).tolist() == [2, 3, 4, 5, 6, 7]
    with pytest.raises(OutOfPagesError):
        pages.alloc(1)
    for move in (pages.free, pages.cache, pages.uncache):
        with pytest.raises(PageStateError, match="page 1 is RESERVED"):
            move([1])
    pages.free([2, 3])
    assert pages.free_runs() == [(2, 2)]  # it does not merge with them
    pages.check_invariants()


@pytest.mark.parametrize("reserved_pages", [-1, 8, 9])
def test_what_leaves_no_page_is_refused(reserved_pages: int) -> None:
    with pytest.raises(CallerError):
        PageAllocator(8, reserved_pages)


@pytest.mark.parametrize(
    ("node", "config"), [(DecodeNode, DecodeConfig), (PrefillNode, PrefillConfig)]
)
def test_a_node_with_reserved_pages(node: type, config: type) -> None:
    """A request that needs one of them is refused; a pool of them alone is no pool."""
    pool = KVPool.create(4, 4, 1, 1, 16)
    with pytest.raises(ConfigError, match="reserved_pages: 4 leaves none of 4 pages"):
        node(pool, config(reserved_pages=4))
    with node(pool, config(reserved_pages=1)) as one:
        assert one.stats()["pages_free"] == 3
        where = {"prefill": "tcp://127.0.0.1:9", "decode": "decode-0"}
        with pytest.raises(RequestError, match=r"needs? 4 pages"):
            one.add(Request("a", range(16), 1, room=1, **where))
        one.add(Request("b", range(12), 1, room=2, **where))
        one.audit()


def test_a_page_behind_the_pool_is_the_engine_s_too() -> None:
    """docs/integrate/steps.md, Padding: views of tensors that have one page more."""
    blocks = [torch.zeros(5, 2, 4, 1, 16) for _ in range(2)]
    axes = ("page", "kv", "token", "head", "dim")
    pool = KVPool.from_tensors([one[:4] for one in blocks], axes=axes, page_size=4)
    assert pool.layout.num_pages == 4
    with DecodeNode(pool) as node:
        assert node.stats()["pages_free"] == 4
        blocks[0][4] = 1.0
        assert not pool.read_pages(range(4)).any()
