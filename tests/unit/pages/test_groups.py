"""Window groups: against a naive model, and copies that are broken in one place, each of which it
has to find."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from prefixkv.cache.checkpoints import Checkpoints
from prefixkv.errors import CallerError, OutOfPagesError
from prefixkv.pages.groups import GroupSpec, GroupStart, TailGroup, TailGroups
from tests.laws.window_machine import run


def group(window: int = 9, num_pages: int = 12, step: int = 4, shared: bool = False) -> TailGroup:
    return TailGroup(GroupSpec("w", window, num_pages, step), 4, 3, shared)


def test_no_page_of_another_path_depth_or_request_is_ever_read() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen.update(run(seed))
    assert min(seen.values()) > 60, seen


SLIDE, COUNT = TailGroup.slide, TailGroup.add_counts


def _first_page(self: TailGroup, num_tokens: int) -> int:
    return max(0, num_tokens + 2 - self.window) // self.page_size


def _count(self: TailGroup, ids: Any, refs: int, pins: int) -> None:
    COUNT(self, ids, -int(self.refs[ids].max(initial=0)) if refs < 0 else refs, pins)


def _available(self: TailGroup, besides: Any = ()) -> int:
    return self.allocator.free_pages + int(np.count_nonzero(self.refs > 0))


def _with_match(self: TailGroup, besides: Any = ()) -> int:
    may_go = (self.refs > 0) & (self.pins == 0)
    return self.allocator.free_pages + int(np.count_nonzero(may_go))


def _slide(self: TailGroup, row: int, num_tokens: int) -> None:
    """Moves the number of the first page, and no page."""
    self.first_pages[row] = max(self.first_pages[row], self.first_page(num_tokens))


def _lock(self: Checkpoints, checkpoint: Any) -> None:
    checkpoint.locks += 1


def _release(self: Checkpoints, checkpoint: Any) -> None:
    self._free.append(checkpoint.slot)


def _give_back(self: Checkpoints, slot: int) -> None:
    del self._taken[slot]
    self._free.append(slot)


def _too_eager(self: Checkpoints, needs: Any) -> None:
    while self._evict_one():
        pass


def _let_go(self: TailGroup, row: int, num_tokens: int) -> None:
    """What leaves a row is given up at once, though its device may still read it."""
    before, call = set(self.row(row).ids.tolist()), SLIDE
    call(self, row, num_tokens)
    for page in before - set(self.row(row).ids.tolist()):
        self._passed.pop(row, None)
        self.add_counts(np.array([page], np.int32), -1, -1)


BROKEN: dict[str, tuple[type, str, Any]] = {
    "the window is a token short": (TailGroup, "first_page", _first_page),
    "a page that others have is freed": (TailGroup, "add_counts", _count),
    "pinned pages count as available": (TailGroup, "available_pages", _available),
    "what it goes on from counts as available": (TailGroup, "available_pages", _with_match),
    "the row does not move": (TailGroup, "slide", _slide),
    "no page comes for those that a checkpoint has": (
        TailGroup, "num_replaced", lambda self, row, depth, end_pages: 0,
    ),
    "a lock pins nothing": (Checkpoints, "lock", _lock),
    "what is evicted keeps its pages": (Checkpoints, "_release", _release),
    "what is given back keeps its pages": (Checkpoints, "give_back", _give_back),
    "all go where some are needed": (Checkpoints, "make_room", _too_eager),
    "what leaves a row is free at once": (TailGroup, "slide", _let_go),
    "a row is not closed": (TailGroups, "free", lambda self, row: None),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_copy_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    with pytest.raises(Exception):  # noqa: B017  # whatever breaks first
        _run_seeds(20)


def _run_seeds(num: int) -> None:
    for seed in range(num):
        run(seed)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 13, 40])
@pytest.mark.parametrize("step", [1, 2, 4, 7, 16])
def test_a_row_has_the_window_and_a_step_and_not_a_page_more(window: int, step: int) -> None:
    one = group(window, 64, step)
    most = 0
    for num_tokens in range(120):
        seen = range(max(0, num_tokens - window + 1), num_tokens + step)
        pages = {at // 4 for at in seen}
        assert min(pages) >= one.first_page(num_tokens)
        if num_tokens % 4 == 0 or window > 1:
            assert min(pages) == one.first_page(num_tokens) or not num_tokens
        most = max(most, len(pages))
    assert one.row_pages == most


def test_a_short_request_takes_no_more_pages_than_it_may_come_to_have() -> None:
    one = group(window=9, step=4, num_pages=30, shared=True)
    assert one.row_pages == 4
    for num_tokens, end_pages, wanted in [(3, 1, 1), (3, 2, 2), (3, 9, 4), (30, 8, 3), (30, 20, 4)]:
        assert one.own_pages(GroupStart(num_tokens, end_pages), 0) == wanted
    # Behind a checkpoint, whose pages 3 and 4 it begins with, it needs what comes behind page 4.
    shared = (np.array([7, 8], np.int32),)
    for end_pages, wanted in [(5, 0), (6, 1), (7, 2), (12, 4)]:
        assert one.own_pages(GroupStart(20, end_pages, shared), 0) == wanted


def test_mistakes_raise_and_change_nothing() -> None:
    one = group(num_pages=6)
    one.open(0, 0, 4)
    for call in (lambda: one.row(1), lambda: one.close(2), lambda: one.slide(-1, 3)):
        with pytest.raises(CallerError, match="is not in use"):
            call()
    with pytest.raises(CallerError, match="tokens, the row has pages 0 to 4"):
        one.slide(0, 60)
    with pytest.raises(OutOfPagesError):
        one.open(1, 0, 3)
    one.check_invariants()
    assert one.rows_in_use == [0]


def test_all_groups_admit_or_none() -> None:
    specs = [GroupSpec("a", 9, 12, 4), GroupSpec("b", 5, 3, 4)]
    groups = TailGroups(TailGroup(spec, 4, 3) for spec in specs)
    start = GroupStart(20, 9)
    assert groups.short_of(start) is None
    groups.open(0, start, list)
    assert groups.short_of(start) is not None
    assert groups.short_of(start) is groups[1]
    before = [one.allocator.free_pages for one in groups]
    with pytest.raises(OutOfPagesError):
        groups.open(1, start, list)
    groups.free(1)
    assert [one.allocator.free_pages for one in groups] == before
    assert [one.rows_in_use for one in groups] == [[0], [0]]
    groups.hold(0, "room")
    for one in groups:
        one.allocator.quarantine("room")
    assert groups.short_of(start) is not None
    for one in groups:
        one.allocator.release("room")
    assert groups.short_of(start) is None
