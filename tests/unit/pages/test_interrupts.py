"""A KeyboardInterrupt at every line of an allocator's call, one line after the other: the call has
changed nothing, and the free list is whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from prefixkv.pages import allocator, free_runs
from prefixkv.pages.allocator import PageAllocator

FILES = {allocator.__file__, free_runs.__file__}
UNDOING = {"_undo", "of"}  # what mends is not interrupted a second time


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Raise KeyboardInterrupt at the `line`-th line that the call runs; False if it has fewer."""
    left, raised = line, False

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left, raised
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in UNDOING:
            return None
        if event == "line" and not raised:
            left -= 1
            if left < 0:
                raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert raised
    finally:
        sys.settrace(before)
    return raised


def scattered() -> PageAllocator:
    """64 pages in every state, the free ones in many short runs."""
    pages = PageAllocator(64)
    pages.alloc(64)
    pages.free([*range(0, 40, 3), 41, 42, 43, 50, 51])
    pages.cache([1, 4, 7])
    pages.hold([2, 5], "held")
    pages.hold([8], "held")
    pages.hold([11, 14], "late")
    pages.quarantine("late")
    return pages


CALLS: dict[str, Callable[[PageAllocator], Any]] = {
    "alloc, of one run": lambda pages: pages.alloc(3),
    "alloc, of several": lambda pages: pages.alloc(7),
    "alloc, of many": lambda pages: pages.alloc(17),
    "free, between two runs": lambda pages: pages.free([40, 44]),
    "free, scattered": lambda pages: pages.free([10, 13, 17, 20, 29, 47, 53, 55, 57, 59, 61, 63]),
    "free, one run, packed": lambda pages: pages.free(np.array([16, 17], np.int32).tobytes()),
    "cache": lambda pages: pages.cache([13, 16]),
    "uncache": lambda pages: pages.uncache([4, 7]),
    "hold, a new owner": lambda pages: pages.hold([13, 16], "new"),
    "hold, more": lambda pages: pages.hold([13, 16], "held"),
    "quarantine": lambda pages: pages.quarantine("held"),
    "release": lambda pages: pages.release("held"),
    "release, from quarantine": lambda pages: pages.release("late"),
}


def seen(pages: PageAllocator) -> Any:
    held = [(owner, pages.held_by(owner).tolist()) for owner in pages.owners()]
    return pages._state.tolist(), pages.free_runs(), sorted(held)


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_changes_nothing(name: str) -> None:
    call, num_lines = CALLS[name], 0
    while True:
        pages = scattered()
        before = seen(pages)
        if not interrupted_at(num_lines, lambda pages=pages: call(pages)):  # type: ignore[misc]
            break
        pages.check_invariants()
        assert seen(pages) == before, f"line {num_lines}"
        call(pages)  # it can be done again
        pages.check_invariants()
        num_lines += 1
    pages.check_invariants()
    assert seen(pages) != before
    assert num_lines > 5


def test_runs_are_made_of_what_is_free() -> None:
    for free in ([0] * 8, [1] * 8, [1, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]):
        mask = np.array(free, np.bool_)
        free_runs.FreeRuns.of(mask).check_invariants(mask)
