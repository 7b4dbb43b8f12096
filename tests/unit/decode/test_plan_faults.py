"""Faults that a rewrite of admission made once, each as a call of the scheduler's shows it; three
more are in `test_admission.py`, `test_host_tier.py` and `test_retries.py`."""

from __future__ import annotations

import pytest

from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Sources
from tests.unit.decode.desk import Desk
from tests.unit.decode.test_host_tier import HostDesk, prompt


@pytest.mark.parametrize("admission", ["fifo", "hit_aware", "priority"])
@pytest.mark.parametrize("patience_s", [0.0, 1e9])
def test_no_pass_admits_beyond_the_last_row(admission: str, patience_s: float) -> None:
    desk = Desk(40, rows=2, admission=admission, patience_s=patience_s)
    reqs = [desk.add(rid, 4, max_new=1, priority=place) for place, rid in enumerate("abcde")]
    desk.now_s = 1.0
    left = {req.rid for req in reqs}
    while left:
        admitted = desk.admit()
        assert len(admitted) == min(2, len(left))
        assert desk.admit() == []
        for req in reqs:
            if req.rid in admitted:
                desk.succeed(req.room_key)
        for rid in desk.transferred():
            desk.finish(next(req for req in reqs if req.rid == rid))
            left.remove(rid)
    desk.commands()


def test_what_may_not_be_cached_is_not_loaded() -> None:
    desk = HostDesk()
    desk.leave_in_host_memory()
    alone = desk.add("b", prompt("a", 22), cacheable=False)
    shares = desk.add("c", prompt("a", 22))
    assert desk.admit() == ["b", "c"]
    assert [len(order.host_pages) for order in desk.orders() if order.is_load] == [4]
    assert (alone.prefix_len, shares.prefix_len) == (0, 16)


def test_one_that_names_no_worker_and_lacks_too_much_fails_once_its_pages_are_there() -> None:
    sources = Sources(ComputeConfig(below=4, down_below=7), fails_over=True)
    desk = Desk(8, sources=sources, admission="fifo")
    running = desk.start("R", 24, max_new=1)
    req = desk.add("a", 16, max_new=1, prefill="")
    behind = desk.add("b", 4, max_new=1, prefill="")
    assert desk.admit() == []
    desk.finish(running)
    assert desk.admit() == ["b"]
    assert "it names none" in str(req.error)
    assert desk.pop_failed() == [req]
    assert desk.scheduler.pop_local() == [behind]


def test_one_that_waited_and_is_cached_whole_leaves_its_last_page_to_be_computed() -> None:
    """Though the tree was told what it waits for, by all of its pages."""
    sources = Sources(ComputeConfig(below=64, down_below=64), fails_over=True)
    desk = Desk(8, sources=sources, admission="fifo")
    for rid, num_tokens in ("a", 8), ("R", 20):
        first = desk.admitted(rid, num_tokens, max_new=1, prefill="")
        assert desk.scheduler.pop_local() == [first]
        desk.scheduler.computed(first, num_tokens)
        assert desk.transferred() == [rid]
        if rid == "a":
            desk.finish(first)
    head = desk.add("H", 20, max_new=1)
    req = desk.add("ab", 8, max_new=1, prefill="")
    assert desk.admit() == []
    desk.abort(head)
    assert desk.admit() == ["ab"], req.error
    assert req.prefix_len == 4
    assert desk.scheduler.pop_local() == [req]
