"""The control thread between a node and its peers: exceptions in it, and news that nobody may
miss."""

import logging
import math
import select
import threading
from typing import Any

import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, TransportConfig
from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.effects import AgentDestroyed, Tick
from prefixkv.control.lives import PeerChange
from prefixkv.errors import InternalError, ProtocolError
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Hello, HelloReply, RoomBody
from prefixkv.runtime import control_thread
from prefixkv.runtime.control_thread import REPEAT_S, ControlFailed, PeerLog
from prefixkv.runtime.death import ProverThread
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import PATIENCE_S, SkippableClock, until
from tests.support.wires import wired
from tests.unit.runtime.conftest import node_threads


@pytest.mark.parametrize("side", ["decode", "prefill"])
@pytest.mark.parametrize("where", [Tick, "send"])
def test_an_exception_in_the_control_thread(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, side: str, where: Any
) -> None:
    """It comes out of the next call, with its cause; the thread goes on, and what was lost is said
    again."""
    node = getattr(pair, side)
    thread = node.transfers.thread
    owner, name = (thread.channel, "send") if where == "send" else (thread.control, "on")
    real = getattr(owner, name)
    happened = threading.Event()

    def broken(*args: Any) -> Any:
        if not happened.is_set() and (where == "send" or isinstance(args[0], where)):
            happened.set()
            raise ZeroDivisionError("on purpose")
        return real(*args)

    pair.d.submit("r", tokens_of(1, 10), pair.prefill.endpoint)
    # From here on only what `step` calls may raise it; the room's frames are still to be sent.
    monkeypatch.setattr(owner, name, broken)
    seen: list[InternalError] = []

    def step() -> bool:
        try:
            pair.step()
        except InternalError as error:
            seen.append(error)
        # A Tick may be due only after the request has ended.
        return "r" in pair.d.ended and bool(seen)

    until(step)
    assert pair.d.ended["r"] is None
    assert happened.is_set()
    (error,) = seen
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "on purpose" in str(error)
    assert node.stats()["control_errors"] == 1


@pytest.mark.parametrize("side", ["decode", "prefill"])
@pytest.mark.parametrize("kind", [RoomBody, Hello | HelloReply])
def test_an_exception_from_a_frame_is_its_senders_fault(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, side: str, kind: Any
) -> None:
    """It is counted, and the room that the frame names ends, on both sides and with its pages back.
    The loop hears of nothing else, and other requests are served."""
    node = getattr(pair, side)
    control = node.transfers.thread.control
    real = control._take
    happened = threading.Event()

    def broken(*args: Any) -> Any:
        frame = args[1]
        if not happened.is_set() and isinstance(frame.body, kind):
            happened.set()
            raise ZeroDivisionError("on purpose")
        return real(*args)

    monkeypatch.setattr(control, "_take", broken)
    pair.d.submit("r", tokens_of(1, 10), pair.prefill.endpoint)
    until(lambda: (pair.step(), "r" in pair.d.ended)[1])
    pair.d.submit("another", tokens_of(2, 10), pair.prefill.endpoint)
    until(lambda: (pair.step(), "another" in pair.d.ended)[1])
    assert pair.d.ended["another"] is None
    if side == "decode" and kind is RoomBody:
        assert isinstance(pair.d.ended["r"], ProtocolError)
    else:  # prefill knows no room yet where a promise raises: it is said again
        assert pair.d.ended["r"] is None
    stats = node.stats()
    assert (stats["frames_failed"], stats["control_errors"]) == (1, 0)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_an_exception_in_one_item_does_not_end_the_batch(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """What was queued behind it, and comes with it, is handled too."""
    thread = getattr(pair, side).transfers.thread
    control = thread.control
    on = control.on
    held, go_on, taken = threading.Event(), threading.Event(), []

    def careful(what: Any, now_s: float) -> Any:
        taken.append(what)
        if what == "hold":
            held.set()
            assert go_on.wait(PATIENCE_S)
            return []
        if what == "bad":
            raise ZeroDivisionError("on purpose")
        return on(what, now_s)

    monkeypatch.setattr(control, "on", careful)
    thread.inbox.put("hold")
    assert held.wait(PATIENCE_S)
    thread.inbox.put("bad")
    pair.d.submit("r", tokens_of(1, 10), pair.prefill.endpoint)
    pair.decode.pop_preallocated()
    go_on.set()
    with pytest.raises(InternalError, match="on purpose"):
        pair.until(lambda: False)
    pair.run("r")
    assert pair.d.ended["r"] is None


@pytest.mark.parametrize("where", ["poll", "tick"])
def test_a_step_that_keeps_failing_is_no_busy_loop(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It pauses after each failure, so that whoever wants to close the node gets the processor."""
    naps: list[float] = []
    thread = pair.decode.transfers.thread
    poll = thread.channel.poll

    class Clock(SkippableClock):
        def sleep(self, seconds: float) -> None:
            naps.append(seconds)

    def broken(timeout_s: float) -> Any:
        if len(naps) < 5:
            raise ZeroDivisionError("on purpose")
        return poll(timeout_s)

    def broken_tick(control: DecodeControl, what: Tick, now_s: float) -> None:
        if len(naps) < 5:
            raise ZeroDivisionError("on purpose")
        tick(control, what, now_s)

    def wake_s(control: DecodeControl) -> float:
        return -math.inf if len(naps) < 5 else due(control)

    Clock().install(monkeypatch.setattr)
    if where == "poll":
        monkeypatch.setattr(thread.channel, "poll", broken)
    else:
        tick, due = DecodeControl.INPUTS[Tick], DecodeControl.wake_s.fget
        inputs = {**DecodeControl.INPUTS, Tick: broken_tick}
        monkeypatch.setattr(DecodeControl, "INPUTS", inputs)
        monkeypatch.setattr(DecodeControl, "wake_s", property(wake_s))
    thread.inbox.put(None)
    until(lambda: len(naps) == 5)
    with pytest.raises(InternalError):
        pair.decode.pop_failed()
    assert naps == [control_thread._RETRY_PAUSE_S] * 5
    assert pair.decode.stats()["control_errors"] == 5
    pair.submit("r", tokens_of(1, 10))
    pair.run("r")


def test_a_farewell_that_fails_is_an_error_of_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(control: DecodeControl, what: AgentDestroyed, now_s: float) -> None:
        raise ZeroDivisionError("on purpose")

    inputs = {**DecodeControl.INPUTS, AgentDestroyed: broken}
    monkeypatch.setattr(DecodeControl, "INPUTS", inputs)
    node = DecodeNode(make_pool(), wired(DecodeConfig()))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        node.close()
    assert not node_threads()


def test_a_part_that_fails_to_close_keeps_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    close = ProverThread.close

    def broken(prover: ProverThread, *, ended: bool = True) -> None:
        close(prover, ended=ended)
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(ProverThread, "close", broken)
    # With threads that look at pages.
    config = DecodeConfig(transport=TransportConfig(checksums=True))
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        DecodeNode(make_pool(), wired(config)).close()
    assert not node_threads()


def test_a_failure_takes_no_other_event_with_it(pair: NodePair) -> None:
    pair.p.hold = True
    pair.submit("r", tokens_of(1, 10))
    pair.until(lambda: "r" in pair.p.computing)
    pair.p.hold = False
    pair.decode.transfers.thread.events.put(ControlFailed(ZeroDivisionError("on purpose")))
    while pair.p.computing:
        pair.p.step()
    until(lambda: len(pair.decode.transfers.thread.events) == 2)  # behind it: the request's success
    with pytest.raises(InternalError, match="on purpose"):
        pair.decode.pop_transferred()
    assert select.select([pair.decode.fileno()], [], [], 0)[0]  # a poller comes back for it
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
        return bool(node.transfers.thread.events._begun) and not readable(node)

    def quiet(node: DecodeNode | PrefillNode) -> None:
        """Nothing is left: the descriptor comes to rest with a call or two."""
        for _ in range(2):
            until(lambda: not writing(node))
            node.stats()
        assert not awake(node)

    def taken_in(node: DecodeNode | PrefillNode) -> None:
        until(lambda: len(node.transfers.thread.events) and not writing(node))
        node.stats()
        assert not len(node.transfers.thread.events)

    pair.submit("met", tokens_of(2, 10))  # so that prefill has answered
    pair.run("met")
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
    until(lambda: len(pair.prefill.transfers.thread.events) == 2)  # ended, and its source is free
    taken_in(pair.prefill)
    assert awake(pair.prefill)
    assert pair.prefill.pop_sent()
    quiet(pair.prefill)
    pair.decode.abort("r")
    assert awake(pair.decode)
    assert pair.decode.pop_failed() == [req]
    quiet(pair.decode)


def test_the_transport_expects_no_write_for_a_full_hit(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would poll for nothing, beside the threads that the request goes through."""
    expected: list[int] = []
    transport = pair.decode.transfers.thread.transports
    expect = transport.expect

    def noted(num: int) -> None:
        if [num] != expected[-1:]:  # it is said again where an outcome has overtaken its writes
            expected.append(num)
        expect(num)

    monkeypatch.setattr(transport, "expect", noted)
    pair.submit("r", tokens_of(1, 8))
    pair.run("r")
    until(lambda: expected == [1, 0])
    pair.submit("again", tokens_of(1, 8))
    pair.run("again")
    pair.submit("longer", tokens_of(1, 12))
    pair.run("longer")
    until(lambda: expected == [1, 0, 1, 0])


def test_the_control_object_is_told_the_time_only_where_that_is_due(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = pair.decode.transfers.thread.control
    on, early = control.on, []

    def noted(what: Any, now_s: float) -> Any:
        if isinstance(what, Tick) and now_s < control.wake_s:
            early.append(now_s)
        return on(what, now_s)

    monkeypatch.setattr(control, "on", noted)
    pair.submit("r", tokens_of(1, 10))
    pair.run("r")
    assert not early


# --- the log of peers: a line for each thing that becomes of one, and never a flood ---------------


P = PeerId("p", 0x3F2A)


@pytest.fixture
def _infos(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixkv.peers")


@pytest.mark.usefixtures("_infos")
def test_a_line_names_the_worker_the_peer_and_why(caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog("d0")
    log.write(
        [PeerChange("met", P, "at tcp://x"), PeerChange("refused", P, "page_size differs")], 0.0
    )
    assert caplog.messages == [
        "d0: met: p life 3f2a at tcp://x",
        "d0: refused: p life 3f2a page_size differs",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


@pytest.mark.usefixtures("_infos")
def test_a_peer_that_is_refused_again_and_again_is_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = PeerLog("d0")
    for second in range(int(REPEAT_S) + 1):  # started again each second, and says another reason
        log.write([PeerChange("refused", PeerId("p", second), f"no, {second}")], float(second))
    assert caplog.messages == [
        "d0: refused: p life 0 no, 0",
        f"d0: refused: p life 3c no, 60 ({int(REPEAT_S) - 1} more since the last line)",
    ]


@pytest.mark.usefixtures("_infos")
def test_each_life_that_is_met_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog("d0")
    log.write([PeerChange("met", PeerId("p", life)) for life in (1, 2, 1)], 0.0)
    assert len(caplog.messages) == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_thread, "_MAX_KEYS", 3)
    log = PeerLog("d0")
    log.write([PeerChange("met", PeerId(f"p{number}", 1)) for number in range(9)], 0.0)
    assert len(log._written) == 3
