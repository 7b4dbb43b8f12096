"""The allocator against its model, and what the model leaves out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import ConfigError, InternalError, OutOfPagesError, PageStateError
from prefixkv.pages import free_runs
from prefixkv.pages.allocator import PageAllocator, PageState
from prefixkv.pages.free_runs import FreeRuns
from tests.laws.allocator_model import AllocatorMachine, runs_of

TestAllocator = AllocatorMachine.TestCase


@pytest.mark.parametrize("num_pages", [0, -1, 2**31])
def test_pool_size_out_of_range(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=str(num_pages)):
        PageAllocator(num_pages)


def test_prefers_the_shortest_run_that_fits() -> None:
    allocator = PageAllocator(30)
    allocator.alloc(30)
    for start, length in [(0, 9), (10, 4), (15, 6), (22, 3)]:
        allocator.free(range(start, start + length))
    assert allocator.alloc(4).tolist() == [10, 11, 12, 13]
    assert allocator.alloc(5).tolist() == [15, 16, 17, 18, 19]
    # None is long enough for 12: the longest whole, then the shortest that does for the rest.
    assert allocator.alloc(12).tolist() == [*range(9), 22, 23, 24]
    assert allocator.free_runs() == [(20, 1)]


@pytest.mark.parametrize("left", [0, 1, 3])
def test_one_page_too_many(left: int) -> None:
    allocator = PageAllocator(8)
    allocator.alloc(8 - left)
    with pytest.raises(OutOfPagesError) as caught:
        allocator.alloc(left + 1)
    assert (caught.value.needed, caught.value.free) == (left + 1, left)
    allocator.check_invariants()
    assert len(allocator.alloc(left)) == left


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


def test_an_owner_of_no_pages_lives_until_its_release() -> None:
    allocator = PageAllocator(4)
    allocator.hold([], "room")
    assert allocator.owners() == ["room"]
    assert allocator.quarantine("room") == 0
    assert allocator.release("room") == 0
    assert allocator.owners() == []


@pytest.mark.parametrize("page", [-1, 4])
def test_state_outside_the_pool(page: int) -> None:
    with pytest.raises(PageStateError, match=f"page {page} "):
        PageAllocator(4).state(page)


def test_state_names_each_state() -> None:
    allocator = PageAllocator(5)
    pages = allocator.alloc(4)
    allocator.cache(pages[:1])
    allocator.hold(pages[1:2], "a")
    allocator.hold(pages[2:3], "b")
    allocator.quarantine("b")
    assert [allocator.state(page).name for page in range(5)] == [
        "CACHED",
        "HELD",
        "QUARANTINED",
        "OWNED",
        "FREE",
    ]


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
        patch.setattr(free_runs, "_LOOP_BELOW_RUNS", loop_below)
        runs = FreeRuns(num_pages)
        runs.take(num_pages)
        for part in (free, back):
            if part.any():
                runs.add(np.flatnonzero(part).astype(np.int32))
        runs.check_invariants(free | back)
        assert runs.runs() == runs_of(np.flatnonzero(free | back).tolist())


def test_runs_that_merge_leave_nothing_behind() -> None:
    num_pages = 64
    runs = FreeRuns(num_pages)
    for _ in range(300):
        runs.take(num_pages)
        runs.add(np.arange(0, num_pages, 2, dtype=np.int32))
        runs.add(np.arange(1, num_pages, 2, dtype=np.int32))
    runs.check_invariants(np.ones(num_pages, bool))
    assert runs._by_length == {num_pages: {0: None}}


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
    for call in (allocator.free, allocator.cache, allocator.owned):
        for ids in (pages, np.array(pages, np.int32).tobytes()):
            with pytest.raises(PageStateError, match=fault):
                call(ids)
    allocator.check_invariants()
    assert allocator.owned_pages == 8


@pytest.mark.parametrize("pages", [[0, 1, 2], [2, 1, 0]], ids=["a run", "no run"])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_one_page_in_another_state_is_found_wherever_it_stands(
    pages: list[int], other: int
) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(3)
    allocator.cache([other])
    for call in (allocator.free, allocator.cache, allocator.owned):
        for ids in (pages, np.array(pages, np.int32).tobytes()):
            with pytest.raises(PageStateError, match=f"page {other} is CACHED, must be OWNED"):
                call(ids)
    with pytest.raises(PageStateError, match="is OWNED, must be CACHED"):
        allocator.uncache(pages)
    allocator.check_invariants()
    assert allocator.owned_pages == 2


def test_rising_pages_with_a_gap_leave_what_lies_in_it() -> None:
    allocator = PageAllocator(8)
    allocator.alloc(8)
    allocator.free([3, 5])
    assert allocator.pages_in(PageState.FREE).tolist() == [3, 5]
    allocator.check_invariants()
