"""What the device has still to write of a prompt that is computed here: nothing copies it, and
nothing else gets its pages, before `after` of `computed` is done."""

from itertools import product
from typing import Any

import pytest

from prefixkv.config import ComputeConfig
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.sources import Sources
from prefixkv.errors import CallerError, PrefixKVError, TransferError
from prefixkv.pages.allocator import PageState
from tests.support.gates import Gate
from tests.unit.decode.test_host_tier import HostDesk, prompt


def owned(desk: HostDesk) -> set[int]:
    return set(desk.pages.allocator.pages_in(PageState.OWNED).tolist())


class ComputingDesk(HostDesk):
    """A desk with host memory whose engine computes every prompt."""

    def __init__(self, **settings: Any) -> None:
        compute = ComputeConfig(below=1000, ask="late")
        super().__init__(sources=Sources(compute, True), **settings)

    def begin(self, rid: str, tokens: int | list[int] = 16, **fields: Any) -> DecodeRequest:
        req = self.add(rid, tokens, **fields)
        assert self.admit() == [rid]
        assert self.scheduler.pop_local() == [req]
        return req

    def computed(self, req: DecodeRequest, end: int, after: Any = None) -> None:
        self.now_s += 0.01
        self._checked(self.scheduler.computed(req, end, after=after))

    def run(
        self, rid: str, tokens: int | list[int] = 16, after: Any = None, **fields: Any
    ) -> DecodeRequest:
        req = self.begin(rid, tokens, **fields)
        self.computed(req, req.fill_len, after)
        assert self.transferred() == [rid]
        return req

    def copies(self, after: Any, **fields: Any) -> tuple[DecodeRequest, set[int]]:
        """One that is computed, and its own pages: of those another has brought the tree some."""
        a = self.run("a", prompt("b", 6), max_new=8)
        b = self.begin("b", prompt("b", 20), **fields)
        for token in prompt("b", 13)[6:]:
            self.token(a, token=token)
        self.finish(a)
        assert self.prefix_of(b) == 12
        own = set(b.pages[b.prefix_len // 4 :].tolist())
        self.computed(b, 20, after)
        return b, own

    def leave_due(self, rid: str = "a", num_tokens: int = 16) -> None:
        """A path is due to be written: a part of it is, and the pool has forgotten the rest."""
        self.finish(self.run(rid, prompt(rid, 8)))
        assert len(self.orders()) == 1
        self.finish(self.run(rid + "2", prompt(rid, num_tokens)))
        assert self.orders() == []
        assert self.host.due
        self.evict(self.pages.num_pages)


# --- not read -------------------------------------------------------------------------------------


def test_host_memory_copies_nothing_that_the_device_has_still_to_write() -> None:
    desk, event = ComputingDesk(), Gate()
    desk.leave_due()
    again = desk.run("a3", prompt("a", 19), after=event)  # it runs: the device goes on behind it
    desk.end_copy()
    for _ in range(3):
        desk.admit()
        assert desk.orders() == [], "a write of what is not written yet"
    event.answer = True
    desk.admit()
    (write,) = desk.orders()
    assert write.device_pages.tolist() == again.pages[2:4].tolist()
    desk.end_copy()
    assert desk.host.cache.match_prefix(prompt("a", 16)).prefix_len == 16


@pytest.mark.parametrize("how", ["finish", "retract", "abort"])
def test_the_end_of_its_request_does_not_say_that_the_device_is_done(how: str) -> None:
    """Another request of the same prompt finishes: its path is due, and has those pages."""
    desk, event = ComputingDesk(num_pages=32), Gate()
    desk.run("z", 4)
    req = desk.run("a", 17, after=event)
    other = desk.run("a2", prompt("a", 18))
    end = Gate()
    getattr(desk, how)(req, after=end)
    desk.finish(other)
    desk.admit()
    assert desk.orders() == []
    event.answer = end.answer = True
    desk.admit()
    (write,) = desk.orders()
    assert len(write.device_pages) == 4


def test_an_event_that_raises_proves_nothing() -> None:
    desk = ComputingDesk(num_pages=32)
    event = Gate()
    req = desk.run("a", 16, after=event)
    event.answer = RuntimeError("the device is lost")
    desk.finish(req)
    with pytest.raises(RuntimeError, match="the device is lost"):
        desk.admit()
    desk.admit()  # told once
    assert desk.orders() == []
    event.answer = True


# --- not given to others --------------------------------------------------------------------------


def test_copies_of_what_the_tree_has_are_not_free_before_the_device_is_done() -> None:
    """`a` runs into what `b` computes, and is finished first: `b`'s own pages of that would be
    free, and prefill could be told to write there."""
    desk, event = ComputingDesk(num_pages=32), Gate()
    b, own = desk.copies(event)
    taken: set[int] = set()
    for rid in "wxy":
        taken |= set(desk.begin(rid, 8).pages.tolist())
    assert desk.transferred() == []
    assert not taken & own
    assert b.state is DecodeState.PREALLOCATED
    event.answer = True
    assert desk.transferred() == ["b"]
    assert desk.prefix_of(b) == 20


@pytest.mark.parametrize("joined", [False, True])
def test_an_abort_before_it_is_popped_waits_for_the_device(joined: bool) -> None:
    desk, event, end = ComputingDesk(num_pages=32), Gate(), Gate()
    req = desk.begin("a", 18)
    if joined:
        other = desk.admitted("a2", prompt("a", 20))
    desk.computed(req, 18, event)
    own = set(req.pages.tolist())
    assert desk.abort(req, after=end)
    assert desk.pop_failed() == [req]
    free = set(range(32)) - set(desk.pages.allocator.pages_in(PageState.OWNED).tolist())
    assert not own & free
    event.answer = end.answer = True
    desk.scheduler.release_deferred(desk.now_s)
    free = set(range(32)) - set(desk.pages.allocator.pages_in(PageState.OWNED).tolist())
    assert own <= free
    if joined:  # what it had waited for is asked for again
        assert desk.admit() == ["a2"]
        assert desk.scheduler.pop_local() == [other]
        desk.abort(other)
        desk.pop_failed()
    desk.at_rest()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_deadline_before_it_is_committed_ends_it(is_broken: bool) -> None:
    """`b` waits for the device, since it would free pages. Its pages wait on."""
    desk, event, end = ComputingDesk(num_pages=32), Gate(), Gate()
    b, own = desk.copies(event, deadline_s=5.0)
    assert desk.transferred() == []
    if is_broken:
        event.answer = RuntimeError("the device is lost")
        assert desk.transferred() == []
        with pytest.raises(RuntimeError, match="the device is lost"):
            desk.admit()
    desk.admit(at_s=6.0)
    assert b.state is DecodeState.FAILED
    assert desk._checked(desk.scheduler.pop_failed(end)) == [b]
    assert isinstance(b.error, PrefixKVError)
    assert own <= owned(desk)
    end.answer = True
    desk.admit()
    if not is_broken:
        assert own <= owned(desk), "the chunk's own event is not done"
        event.answer = True
        desk.admit()
    assert not own & owned(desk)


def test_a_prompt_that_waits_for_an_event_that_raises_fails_by_that() -> None:
    """It has no deadline: nothing else would end its wait."""
    desk, event, end = ComputingDesk(num_pages=32), Gate(), Gate()
    b, own = desk.copies(event)
    assert desk.transferred() == []
    event.answer = RuntimeError("the device is lost")
    assert desk.transferred() == []
    with pytest.raises(RuntimeError, match="the device is lost"):
        desk.admit()
    assert b.state is DecodeState.FAILED
    assert isinstance(b.error, TransferError)
    assert b.error.__cause__ is event.answer
    assert desk._checked(desk.scheduler.pop_failed(end)) == [b]
    assert own <= owned(desk)
    end.answer = True
    desk.admit()
    assert not own & owned(desk)


@pytest.mark.parametrize(
    ("how", "is_whole"),
    [
        *product(["abort", "fail", "end_all", "flush"], [False, True]),
        ("deadline", False),  # a whole one only waits to be popped
    ],
)
def test_its_pages_wait_for_its_own_event_without_another(how: str, is_whole: bool) -> None:
    """The engine names no event at the request's end: that of the chunk is not done yet."""
    desk, event = ComputingDesk(num_pages=32), Gate()
    req = desk.begin("a", 18, deadline_s=5.0)
    desk.computed(req, 18 if is_whole else 10, event)
    own = set(req.pages.tolist())
    if how == "deadline":
        desk.admit(at_s=6.0)
    elif how == "abort":
        desk.abort(req)
    elif how == "fail":
        desk._checked(desk.scheduler.fail("a", RuntimeError("NaN")))
    elif how == "end_all":
        desk._checked(desk.scheduler.end_all(RuntimeError("over"), desk.now_s))
    else:
        desk._checked(desk.scheduler.flush("2"))
    assert req in desk.pop_failed()
    desk.admit()
    assert own <= owned(desk)
    event.answer = True
    desk.admit()
    assert not own & owned(desk)


def test_its_own_event_is_that_of_each_chunk() -> None:
    desk, first, last = ComputingDesk(num_pages=32), Gate(), Gate()
    req = desk.begin("a", 18)
    desk.computed(req, 10, first)
    desk.computed(req, 18, last)
    own = set(req.pages.tolist())
    desk.abort(req)
    last.answer = True
    desk.admit()
    assert own <= owned(desk)
    first.answer = True
    desk.admit()
    assert not own & owned(desk)


def test_a_request_that_comes_back_has_no_deadline_any_more() -> None:
    """It was retracted, and waits for the device again, since `a` has brought what it computes."""
    desk, event = ComputingDesk(num_pages=32), Gate()
    desk.run("z", 4, max_new=30)
    req = desk.run("b", prompt("b", 12), deadline_s=5.0, max_new=30)
    for token in prompt("b", 20)[12:]:
        desk.token(req, token=token)
    desk.now_s = 6.0
    desk.retract(req)
    desk.end_all_copies()
    desk.scheduler.flush()
    assert desk.admit() == ["b"]
    assert desk.scheduler.pop_local() == [req]
    assert req.prefix_len == 0
    a = desk.run("a", prompt("b", 3), max_new=30)
    for token in prompt("b", 13)[3:]:
        desk.token(a, token=token)
    desk.finish(a)
    assert desk.prefix_of(req) == 12
    desk.computed(req, req.fill_len, event)
    for _ in range(2):
        assert desk.transferred() == []
        desk.admit()
    assert req.state is DecodeState.PREALLOCATED
    event.answer = True
    assert desk.transferred() == ["b"]


# --- what is no event -----------------------------------------------------------------------------


def test_what_is_no_event_or_raises_changes_nothing() -> None:
    desk = ComputingDesk()
    req = desk.begin("a", 16)
    before = desk.snapshot()
    with pytest.raises(CallerError, match="after"):
        desk.scheduler.computed(req, 16, after=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="lost"):
        desk.scheduler.computed(req, 16, after=Gate(RuntimeError("lost")))
    assert desk.snapshot() == before
    desk.computed(req, 16, Gate(True))
    assert desk.transferred() == ["a"]
