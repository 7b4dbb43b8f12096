"""The control thread between a node and its peers: exceptions in it, and news that nobody may
miss."""

from __future__ import annotations

import select
import threading
from typing import Any

import pytest

from prefixkv.errors import InternalError
from prefixkv.runtime import control_thread as kv_manager
from prefixkv.runtime.control_thread import ControlFailed
from prefixkv.runtime.nodes import DecodeNode, PrefillNode
from tests.models.node_pair import NodePair, tokens_of
from tests.models.patience import SkippableClock, until


@pytest.mark.parametrize("side", ["decode", "prefill"])
@pytest.mark.parametrize("where", ["tick", "on_frame", "send"])
def test_an_exception_in_the_control_thread(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, side: str, where: str
) -> None:
    """It comes out of the next call, with its cause; the thread goes on, and what was lost is said
    again."""
    node = getattr(pair, side)
    owner = node._manager._channel if where == "send" else node._manager.endpoint
    real = getattr(owner, where)
    happened = threading.Event()

    def broken(*args: Any) -> Any:
        if not happened.is_set():
            happened.set()
            raise ZeroDivisionError("on purpose")
        return real(*args)

    monkeypatch.setattr(owner, where, broken)
    pair.d.submit("r", tokens_of(1, 10), pair.prefill.endpoint)
    seen: list[InternalError] = []

    def step() -> bool:
        try:
            pair.step()
        except InternalError as error:
            seen.append(error)
        return "r" in pair.d.ended

    until(step)
    assert pair.d.ended["r"] is None
    assert happened.is_set()
    (error,) = seen
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "on purpose" in str(error)
    assert node.stats()["control_errors"] == 1


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_an_exception_in_one_item_does_not_end_the_batch(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """What was queued behind it, and comes with it, is handled too."""
    manager = getattr(pair, side)._manager
    take = manager._take

    def careful(item: Any, now_s: float) -> None:
        if item == "bad":
            raise ZeroDivisionError("on purpose")
        take(item, now_s)

    monkeypatch.setattr(manager, "_take", careful)
    manager.inbox._items.append("bad")  # without waking the thread: the next command does
    pair.d.submit("r", tokens_of(1, 10), pair.prefill.endpoint)
    with pytest.raises(InternalError, match="on purpose"):
        pair.until(lambda: False)
    pair.run("r")
    assert pair.d.ended["r"] is None


def test_a_step_that_keeps_failing_is_no_busy_loop(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses after each failure, so that whoever wants to close the node gets the processor."""
    naps: list[float] = []
    step = pair.decode._manager._step

    class Clock(SkippableClock):
        def sleep(self, seconds: float) -> None:
            naps.append(seconds)

    def broken(now_s: float) -> Any:
        if len(naps) == 5:
            return step(now_s)
        raise ZeroDivisionError("on purpose")

    Clock().install(monkeypatch.setattr)
    monkeypatch.setattr(pair.decode._manager, "_step", broken)
    pair.decode._manager.inbox.put(None)  # wakes it
    until(lambda: len(naps) == 5)
    with pytest.raises(InternalError):
        pair.decode.pop_failed()
    assert naps == [kv_manager._STUMBLE_S] * 5
    assert pair.decode.stats()["control_errors"] == 5
    pair.submit("r", tokens_of(1, 10))
    pair.run("r")


def test_a_failure_takes_no_other_event_with_it(pair: NodePair) -> None:
    pair.p.hold = True
    pair.submit("r", tokens_of(1, 10))
    pair.until(lambda: "r" in pair.p.computing)
    pair.p.hold = False
    pair.decode._manager.events.put(ControlFailed(ZeroDivisionError("on purpose")))
    while pair.p.computing:
        pair.p.step()
    until(lambda: len(pair.decode._manager.events._items) == 2)  # behind it: the request's success
    with pytest.raises(InternalError, match="on purpose"):
        pair.decode.pop_transferred()
    pair.run("r")
    assert pair.d.ended["r"] is None


@pytest.mark.parametrize("how", ["wait", "fileno"])
def test_no_wait_misses_what_another_call_has_taken_in(pair: NodePair, how: str) -> None:
    """Any call takes in the control thread's news; only some of it is for that call."""

    def awake(node: DecodeNode | PrefillNode) -> bool:
        until(lambda: not writing(node))
        return node.wait(0) if how == "wait" else readable(node)

    def readable(node: DecodeNode | PrefillNode) -> bool:
        return bool(select.select([node.fileno()], [], [], 0)[0])

    def writing(node: DecodeNode | PrefillNode) -> bool:
        """Whoever queues something writes the descriptor behind it, and may be held up in
        between."""
        return bool(node._manager.events._begun) and not readable(node)

    def quiet(node: DecodeNode | PrefillNode) -> None:
        """Nothing is left: the descriptor comes to rest with a call or two."""
        for _ in range(2):
            until(lambda: not writing(node))
            node.stats()
        assert not awake(node)

    def taken_in(node: DecodeNode | PrefillNode) -> None:
        until(lambda: node._manager.events._items and not writing(node))
        node.stats()
        assert not node._manager.events._items

    pair.submit("r", tokens_of(1, 10), max_new_tokens=1)
    assert awake(pair.decode)  # to be admitted
    pair.decode.pop_preallocated()
    quiet(pair.decode)
    taken_in(pair.prefill)
    assert awake(pair.prefill)
    pair.p.hold = True
    pair.p.step()
    quiet(pair.prefill)
    while pair.p.computing:
        pair.p.compute(pair.p.computing["r"])
    taken_in(pair.decode)
    assert awake(pair.decode)
    (req,) = pair.decode.pop_transferred()
    quiet(pair.decode)
    until(lambda: len(pair.prefill._manager.events._items) == 2)  # ended, and its source is free
    taken_in(pair.prefill)
    assert awake(pair.prefill)
    assert pair.prefill.pop_sent()
    quiet(pair.prefill)
    pair.decode.abort("r")
    assert awake(pair.decode)
    assert pair.decode.pop_failed() == [req]
    quiet(pair.decode)
