"""The page allocator as a list of states, and the machine that holds the real one to it.

Which pages an allocation gives is the allocator's choice; the model says which choices are right:
pages that were free, in as few runs as any choice would have.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixkv.errors import CallerError, OutOfPagesError, PageStateError
from prefixkv.pages import allocator
from prefixkv.pages.allocator import PageAllocator, PageState

FREE, OWNED, CACHED, HELD, QUARANTINED, _ = PageState
DEFAULT_LOOP = allocator._LOOP_BELOW_RUNS


def runs_of(pages: Sequence[int]) -> list[tuple[int, int]]:
    """The maximal runs (first page, pages) of a set of page ids."""
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


class AllocatorModel:
    def __init__(self, num_pages: int) -> None:
        self.states = [FREE] * num_pages
        self.held: dict[Hashable, list[int]] = {}

    def pages_in(self, *states: PageState) -> list[int]:
        return [page for page, state in enumerate(self.states) if state in states]

    def fewest_runs(self, num_pages: int) -> int:
        """How many runs of free pages it takes at least to have `num_pages`."""
        needed = 0
        for length in sorted((length for _, length in runs_of(self.pages_in(FREE))), reverse=True):
            if num_pages <= 0:
                break
            num_pages -= length
            needed += 1
        return needed

    def first_fault(self, pages: Sequence[int], state: PageState) -> int | None:
        for i, page in enumerate(pages):
            if not 0 <= page < len(self.states) or page in pages[:i] or self.states[page] != state:
                return page
        return None

    def move(self, pages: Sequence[int], before: PageState, after: PageState) -> None:
        assert self.first_fault(pages, before) is None
        for page in pages:
            self.states[page] = after


class Pick(NamedTuple):
    """Chooses some of a list: cheap to draw, shrinks to nothing, and with a stride it makes
    holes."""

    offset: int
    stride: int
    count: int
    backwards: bool

    def of(self, items: list[int]) -> list[int]:
        chosen = items[self.offset :: self.stride][: self.count]
        return chosen[::-1] if self.backwards else chosen


picks = st.builds(Pick, st.integers(0, 8), st.integers(1, 4), st.integers(0, 60), st.booleans())
owners = st.sampled_from(["a", "b", ("room", 7), 3])
kinds = st.sampled_from(
    [list, tuple, lambda pages: np.array(pages, np.int32), lambda pages: np.array(pages, np.int64)]
)

# What each method that takes pages starts from, and where it leads.
MOVES = {
    "free": (OWNED, FREE),
    "cache": (OWNED, CACHED),
    "uncache": (CACHED, OWNED),
    "hold": (OWNED, HELD),
}


class AllocatorMachine(RuleBasedStateMachine):
    """Every public method against the model, wrong calls included."""

    @initialize(num_pages=st.integers(1, 150), loop_below_runs=st.sampled_from([2, DEFAULT_LOOP]))
    def start(self, num_pages: int, loop_below_runs: int) -> None:
        allocator._LOOP_BELOW_RUNS = (
            loop_below_runs  # else few examples have the many runs that need vectors
        )
        self.real = PageAllocator(num_pages)
        self.model = AllocatorModel(num_pages)

    # --- right calls ------------------------------------------------------------------------------

    @rule(num_pages=st.integers(0, 160))
    def alloc(self, num_pages: int) -> None:
        free = self.model.pages_in(FREE)
        if num_pages > len(free):
            with pytest.raises(OutOfPagesError) as caught:
                self.real.alloc(num_pages)
            assert (caught.value.needed, caught.value.free) == (num_pages, len(free))
            return
        fewest = self.model.fewest_runs(num_pages)
        pages = self.real.alloc(num_pages)
        assert pages.dtype == np.int32
        assert pages.tolist() == sorted(pages.tolist())
        assert len(pages) == num_pages
        assert len(runs_of(pages.tolist())) == fewest
        self.model.move(pages.tolist(), FREE, OWNED)
        pages[:] = -1  # the caller's: the allocator must not look at it again

    @rule(pick=picks, kind=kinds)
    def free(self, pick: Pick, kind: type) -> None:
        pages = pick.of(self.model.pages_in(OWNED))
        self.real.free(kind(pages))
        self.model.move(pages, OWNED, FREE)

    @rule(pick=picks, kind=kinds)
    def cache(self, pick: Pick, kind: type) -> None:
        pages = pick.of(self.model.pages_in(OWNED))
        self.real.cache(kind(pages))
        self.model.move(pages, OWNED, CACHED)

    @rule(pick=picks, kind=kinds)
    def uncache(self, pick: Pick, kind: type) -> None:
        pages = pick.of(self.model.pages_in(CACHED))
        self.real.uncache(kind(pages))
        self.model.move(pages, CACHED, OWNED)

    @rule(pick=picks, owner=owners)
    def hold(self, pick: Pick, owner: Hashable) -> None:
        pages = pick.of(self.model.pages_in(OWNED))
        given = np.array(pages, np.int32)
        self.real.hold(given, owner)
        given[:] = 0  # the allocator keeps a copy
        self.model.move(pages, OWNED, HELD)
        self.model.held.setdefault(owner, []).extend(pages)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(list(self.model.held)))
        mine = self.model.held[owner]
        held = [page for page in mine if self.model.states[page] == HELD]
        if mine and not held:
            with pytest.raises(PageStateError, match="is QUARANTINED, must be HELD"):
                self.real.quarantine(owner)
            return
        assert self.real.quarantine(owner) == len(held)
        self.model.move(held, HELD, QUARANTINED)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(list(self.model.held)))
        pages = self.model.held.pop(owner)
        assert self.real.release(owner) == len(pages)
        for page in pages:
            self.model.states[page] = FREE

    # --- wrong calls ------------------------------------------------------------------------------

    @rule(
        method=st.sampled_from(sorted(MOVES)),
        pick=picks,
        extra=st.lists(st.integers(-3, 200) | st.sampled_from([-(2**31), 2**31 - 1]), max_size=3),
        again=st.booleans(),
        kind=kinds,
    )
    def wrong_pages(
        self, method: str, pick: Pick, extra: list[int], again: bool, kind: type
    ) -> None:
        """Pages in the right state mixed with others; raises for the first wrong one, and changes
        nothing."""
        before, _ = MOVES[method]
        pages = pick.of(self.model.pages_in(before))
        pages = pages + extra + (pages[:1] if again else [])
        fault = self.model.first_fault(pages, before)
        if fault is None:
            return
        arguments = (kind(pages), "nobody") if method == "hold" else (kind(pages),)
        with pytest.raises(PageStateError, match=rf"^page {fault} "):
            getattr(self.real, method)(*arguments)
        assert "nobody" not in self.real.owners()

    @rule(method=st.sampled_from(["quarantine", "release"]))
    def unknown_owner(self, method: str) -> None:
        with pytest.raises(PageStateError, match="'nobody' holds no pages"):
            getattr(self.real, method)("nobody")

    @rule(num_pages=st.integers(-5, -1))
    def negative(self, num_pages: int) -> None:
        with pytest.raises(CallerError):
            self.real.alloc(num_pages)

    def teardown(self) -> None:
        allocator._LOOP_BELOW_RUNS = DEFAULT_LOOP

    # --- agreement --------------------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "real"):
            return
        real, model = self.real, self.model
        real.check_invariants()
        for state in PageState:
            assert real.pages_in(state).tolist() == model.pages_in(state)
        counts = (
            real.free_pages,
            real.owned_pages,
            real.cached_pages,
            real.held_pages,
            real.quarantined_pages,
            0,  # reserved
        )
        assert counts == tuple(len(model.pages_in(state)) for state in PageState)
        assert real.free_runs() == runs_of(model.pages_in(FREE))
        assert real.owners() == list(model.held)
        for owner, pages in model.held.items():
            assert real.held_by(owner).tolist() == sorted(pages)
