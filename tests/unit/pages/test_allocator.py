"""The allocator against its model, and what the model leaves out: the reserved pages, which no
request ever gets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import (
    CallerError,
    ConfigError,
    InternalError,
    OutOfPagesError,
    PageStateError,
    RequestError,
)
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages import allocator
from prefixkv.pages.allocator import FreeRuns, PageAllocator, PageState
from prefixkv.request import Request
from tests.laws.allocator_model import AllocatorMachine, runs_of

TestAllocator = AllocatorMachine.TestCase


@pytest.mark.parametrize("num_pages", [0, -1, 2**31])
def test_pool_size_out_of_range(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=str(num_pages)):
        PageAllocator(num_pages)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1.0, 2.0], "float64"),
        (np.array([True]), "bool"),
        ([2**31], f"page {2**31} does not fit"),
        ([2**32], f"page {2**32} does not fit"),  # page 0, if it were cast
        ([2**70], "must be integers"),
        ([[0, 1]], "2 dimensions"),
        (3, "0 dimensions"),
        (["0"], "must be integers"),
        (b"\0\0\0\0\1", "5 bytes are no packed page ids"),
    ],
)
def test_what_is_no_page_id(pages: object, message: str) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(4)
    with pytest.raises(PageStateError, match=message):
        allocator.free(pages)  # type: ignore[arg-type]
    allocator.check_invariants()
    assert allocator.owned_pages == 4


@pytest.mark.parametrize("page", [-1, 4, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("method", ["free", "cache", "uncache", "hold"])
def test_pages_just_outside_the_pool(method: str, page: int) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(4)
    if method == "uncache":
        allocator.cache(range(4))
    before = [allocator.state(i) for i in range(4)]
    with pytest.raises(PageStateError, match=rf"^page {page} is not in \[0, 4\)"):
        getattr(allocator, method)(
            np.array([0, page], np.int32), *(["room"] if method == "hold" else [])
        )
    allocator.check_invariants()
    assert [allocator.state(i) for i in range(4)] == before


def test_an_owner_that_cannot_be_hashed_changes_nothing() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    with pytest.raises(TypeError):
        allocator.hold(pages, [])  # type: ignore[arg-type]
    allocator.check_invariants()
    assert allocator.owned_pages == 2


@pytest.mark.parametrize("break_it", ["state", "count", "owner", "run", "filed"])
def test_check_invariants_sees(break_it: str) -> None:
    allocator = PageAllocator(20)
    pages = allocator.alloc(10)
    allocator.hold(pages[:3], "room")
    allocator.check_invariants()
    if break_it == "state":
        allocator._state[pages[5]] = PageState.CACHED
    elif break_it == "count":
        allocator._counts[0] += 1
    elif break_it == "owner":
        allocator._held["room"][0][0] = pages[5]
    elif break_it == "run":
        allocator._runs._length_from[10] = 9
    else:
        allocator._runs._by_length[10].clear()
    with pytest.raises(InternalError, match="broken"):
        allocator.check_invariants()


# --- free runs: the loop and the vector path must do the same -------------------------------------


@given(data=st.data())
@pytest.mark.parametrize("loop_below", [0, 10**9])
def test_adding_back_any_pages_gives_maximal_runs(loop_below: int, data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(1, 60))
    free = np.array(data.draw(st.lists(st.booleans(), min_size=num_pages, max_size=num_pages)))
    back = (
        np.array(data.draw(st.lists(st.booleans(), min_size=num_pages, max_size=num_pages))) & ~free
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator, "_LOOP_BELOW_RUNS", loop_below)
        runs = FreeRuns(num_pages)
        runs.take(num_pages)
        for part in (free, back):
            if part.any():
                runs.add(np.flatnonzero(part).astype(np.int32))
        runs.check_invariants(free | back)
        assert runs.runs() == runs_of(np.flatnonzero(free | back).tolist())


@pytest.mark.parametrize(
    ("pages", "fault"),
    [
        ([-3, -2], "page -3 is not in"),  # a slice would take them from the end
        ([6, 7, 8], "page 8 is not in"),
        ([3, 3, 5], "page 3 is named twice"),  # spans as many as it names
    ],
)
def test_what_looks_like_a_run_and_is_none(pages: list[int], fault: str) -> None:
    allocator = PageAllocator(8)
    allocator.alloc(8)
    for call in (allocator.free, allocator.cache, allocator.checked):
        for ids in (pages, np.array(pages, np.int32).tobytes()):
            with pytest.raises(PageStateError, match=fault):
                call(ids)
    allocator.check_invariants()
    assert allocator.owned_pages == 8


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
