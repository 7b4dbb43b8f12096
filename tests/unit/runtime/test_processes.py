"""Two processes over real NIXL, one of which dies, stands still or leaves: what that does to the
other."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import PeerLostError, TransferError, TransferTimeoutError
from prefixkv.pages.allocator import PageState
from prefixkv.protocol.messages import ProcessLife
from prefixkv.runtime import death
from tests.support.gates import Gate
from tests.support.node_pair import (
    DecodeDriver,
    PrefillDriver,
    drive_until,
    left,
    make_pool,
    node_at_rest,
    tokens_of,
)
from tests.support.node_process import NodeProcess
from tests.support.patience import NEVER_S, SkippableClock, lasting_address, until
from tests.support.transport_child import cut_connections
from tests.support.wires import wired
from tests.unit.runtime.conftest import QUICK

POOL = {"num_pages": 160, "num_layers": 4, "head_dim": 64}  # 4 KiB a page: 128 KiB a chunk
NUM_TOKENS = 126  # of each request here: 32 pages, four chunks

pytestmark = pytest.mark.usefixtures("_any_wire")


class WithPrefillChild:
    """Decode here, prefill there."""

    def __init__(
        self, start: Callable[..., NodeProcess], stack: ExitStack, control: ControlConfig = QUICK
    ) -> None:
        self._start = start
        self._config = PrefillConfig(control=control, bind=lasting_address())
        self.child = start("prefill", self._config, POOL)
        config = DecodeConfig(control=control)
        self.node = stack.enter_context(DecodeNode(make_pool(**POOL), wired(config)))
        self.d = DecodeDriver(self.node, lambda *ask: self.child.call("add", *ask))
        self.child.call("set", chunk=32)
        self.run("warm-up", seed=0)

    def restart(self) -> None:
        """Another process under the same name and address."""
        self.child = self._start("prefill", self._config, POOL)
        self.child.call("set", chunk=32)

    def submit(self, rid: str, seed: int, chunk: int = -1, event: str = "") -> None:
        """`event` is what that chunk of it waits for."""
        if event:
            self.child.call("ready", rid, chunk, event)
        self.d.submit(rid, tokens_of(seed, NUM_TOKENS), self.child.endpoint, max_new_tokens=2)

    def until(self, done: Callable[[], bool]) -> None:
        drive_until(done, [self.d])

    def until_silence_shows(self, clock: SkippableClock, done: Callable[[], bool]) -> None:
        """Let deadlines pass until it is so. What the child said last may be read after a skip, and
        counts as heard then: so another skip follows."""

        def step() -> None:
            clock.skip(NEVER_S, [self.node])
            with suppress(AssertionError):
                drive_until(done, [self.d], patience_s=5.0)

        until(done, step=step, state=self.node.stats)

    def run(self, rid: str, seed: int) -> None:
        self.submit(rid, seed)
        self.until(lambda: rid in self.d.ended and not left(self.node))
        assert self.d.ended[rid] is None, self.d.ended[rid]

    def check_at_rest(self) -> None:
        self.until(lambda: not left(self.node))
        node_at_rest(self.node)
        assert self.d.mismatches == self.d.wrong_aux == 0
        until(lambda: not left_there(self.child))
        self.child.call("check_at_rest")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("_any_wire", "restarts_first"),
    [("tcp", False), ("shared memory", True), ("shm", False)],
    indirect=["_any_wire"],
)
def test_prefill_is_killed(
    start: Any, stack: ExitStack, clock: SkippableClock, restarts_first: bool
) -> None:
    """Where its death is not to be proved: requests end, by deadline or when another answers under
    the name; pages come back by a fence alone."""
    there = WithPrefillChild(start, stack, replace(QUICK, prove_death=False))
    lost = there.child.peer_id
    there.submit("between two chunks", 1, 2, "kill")
    there.submit("behind it", 2, 1, "never")
    there.submit("not begun", 3, 0, "never")
    there.until(lambda: not there.child.process.is_alive() and there.node.stats()["rooms"] == 3)
    if restarts_first:
        there.restart()
        there.until(lambda: len(there.d.ended) == 4)
    else:
        there.until_silence_shows(clock, lambda: len(there.d.ended) == 4)
    errors = [there.d.ended[rid] for rid in ("between two chunks", "behind it", "not begun")]
    expected = PeerLostError if restarts_first else TransferTimeoutError
    assert all(isinstance(error, expected) for error in errors), errors
    there.until_silence_shows(clock, lambda: there.node.stats()["pages_quarantined"] == 3 * 32)
    if (
        restarts_first
    ):  # it goes on with the new one, and that it is there proves nothing of the old one's writes
        there.until(
            lambda: there.node.peers()[there.child.endpoint] == (there.child.peer_id, "ready")
        )
        there.submit("again", 4)
        there.until(lambda: "again" in there.d.ended)
        assert there.node.stats()["pages_quarantined"] == 3 * 32
    there.node.fence(lost.name, lost.incarnation)
    there.until(lambda: not left(there.node))
    if not restarts_first:
        there.restart()
        there.submit("again", 4)
    there.until(lambda: "again" in there.d.ended)
    assert there.d.ended["again"] is None, there.d.ended
    there.check_at_rest()


@pytest.mark.slow
def test_prefill_stands_still_past_every_deadline_and_goes_on(
    start: Any, stack: ExitStack, clock: SkippableClock
) -> None:
    """What it writes when it wakes lands in quarantined pages; they come back when it says it is
    done."""
    there = WithPrefillChild(start, stack)
    pool, allocator = there.node.pool, there.node.pages.allocator
    there.submit("r", 1, 1, "stop")
    there.until(lambda: there.child.stopped)
    there.until_silence_shows(clock, lambda: "r" in there.d.ended)
    assert isinstance(there.d.ended["r"], TransferTimeoutError)
    there.until_silence_shows(clock, lambda: there.node.stats()["pages_quarantined"] == 32)

    states = {page: allocator.state(page) for page in range(POOL["num_pages"])}
    quarantined = [page for page, state in states.items() if state is PageState.QUARANTINED]
    others = [page for page, state in states.items() if state is not PageState.QUARANTINED]
    free = [page for page in others if states[page] is PageState.FREE]
    assert len(free) >= 64
    canary = pool.read_pages(free)
    pool.write_pages(free, canary.fill_(0xC5))
    before, late_before = pool.read_pages(others), pool.read_pages(quarantined)

    there.child.resume()
    there.child.call("skip", NEVER_S)
    there.until(lambda: not left(there.node))
    assert pool.read_pages(others).equal(before)
    assert not pool.read_pages(quarantined).equal(late_before), (
        "nothing came late: the test has shown nothing"
    )
    # To prefill it may be a success: it was all written before decode's abort was heard.
    until(lambda: "r" in there.child.call("names", "failed") + there.child.call("get", "sent"))
    there.run("again", 2)
    there.check_at_rest()


@pytest.mark.parametrize("_any_wire", ["tcp"], indirect=True)
def test_a_data_plane_that_is_cut_costs_a_request_and_no_page(start: Any, stack: ExitStack) -> None:
    """Both processes live on. What failed to be written is proved to be over by prefill itself:
    nobody is fenced."""
    there = WithPrefillChild(start, stack)
    for number in range(30):  # a write may have ended just before: then another time
        rid = f"cut {number}"
        there.submit(rid, 1 + number, 2, "stop")
        there.until(lambda: there.child.stopped)
        assert cut_connections(spared=-1) > 0
        there.child.resume()
        there.until(lambda rid=rid: rid in there.d.ended and not left(there.node))
        until(lambda: not left_there(there.child))
        if there.d.ended[rid] is not None:
            break
    else:
        raise AssertionError("no write has failed: the test has shown nothing")
    there.run("again", 99)
    there.check_at_rest()


def left_there(child: NodeProcess) -> int:
    stats: dict[str, int] = child.call("stats")
    return sum(stats[name] for name in ("requests", "rooms", "locks", "pages_owned"))


@pytest.mark.slow
@pytest.mark.parametrize("proves", [False, True])
def test_decode_is_killed(start: Any, stack: ExitStack, proves: bool) -> None:
    """Prefill's requests fail, its pages are free again, and it serves whoever comes next under the
    name. One that no write has met fails once the death is proved, or with the next life."""
    control = replace(QUICK, prove_death=proves)
    config = DecodeConfig(control=control, reserve_tokens=0)  # four of these have room at once
    child = start("decode", config, POOL)
    node = stack.enter_context(
        PrefillNode(make_pool(**POOL), wired(PrefillConfig(control=control)))
    )
    p = PrefillDriver(node, chunk=32)

    def submit(child: NodeProcess, rid: str, seed: int) -> None:
        tokens = tokens_of(seed, NUM_TOKENS)
        room = int(rid)
        child.call("submit", rid, tokens, node.endpoint, 2, room=room, tell=False)
        p.add(rid, tokens, room)

    submit(child, "0", 0)
    drive_until(lambda: p.sent == ["0"] and not left(node), [p])

    gate = p.ready["1", 1] = p.ready["2", 0] = Gate()
    p.ready["3", 2] = Gate()
    before = node.stats()["writes_done"]
    for rid in ("1", "2", "3"):
        submit(child, rid, int(rid))
    drive_until(lambda: node.stats()["writes_done"] == before + 1 + 2 and not p.computing, [p])
    p.hold = True
    submit(child, "4", 4)
    drive_until(lambda: "4" in p.computing, [p])
    child.kill()
    gate.answer = True
    drive_until(lambda: {"1", "2", "3"} <= p.failed.keys(), [p])
    if proves:
        drive_until(lambda: "4" in p.failed and not left(node), [p])
        assert "proved dead" in str(p.failed["4"])
        assert (node.stats()["peers_proved_dead"], node.peers()) == (1, {})
        node_at_rest(node)
    else:
        assert all(isinstance(error, TransferError) for error in p.failed.values())

    other = start("decode", config, POOL)
    submit(other, "9", 9)  # another life of the same name: what is meant for the old one fails
    drive_until(lambda: "4" in p.failed, [p])
    assert isinstance(p.failed["4"], PeerLostError)
    p.hold = False
    drive_until(lambda: "9" in p.sent and not left(node), [p])
    node_at_rest(node)
    until(lambda: other.call("get", "ended") == {"9": None})
    until(lambda: not left_there(other))
    other.call("check_at_rest")
    assert [peer.incarnation for peer in node.peers()] == [other.peer_id.incarnation]


# --- fenced unasked, and no other -----------------------------------------------------------------


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What this process's nodes have found out of others, one look after the other."""
    found: list[bool] = []

    def look(life: ProcessLife, is_dead: Callable[[ProcessLife], bool] = death.is_dead) -> bool:
        found.append(is_dead(life))
        return found[-1]

    monkeypatch.setattr(death, "is_dead", look)
    return found


def looked_again(verdicts: list[bool]) -> Callable[[], bool]:
    """Whether it has been looked at three times more."""
    enough = len(verdicts) + 3
    return lambda: len(verdicts) >= enough


@pytest.mark.slow
def test_prefill_is_killed_and_proved_dead(
    start: Any, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pages are back, and what waits for it has failed, though nobody says so and no deadline
    passes."""
    caplog.set_level(logging.INFO, "prefixkv.peers")
    there = WithPrefillChild(start, stack)
    there.submit("between two chunks", 1, 2, "kill")
    there.submit("behind it", 2, 1, "never")
    there.submit("not begun", 3, 0, "never")
    there.until(lambda: len(there.d.ended) == 4 and not left(there.node))
    del there.d.ended["warm-up"]
    for error in there.d.ended.values():
        assert isinstance(error, PeerLostError)
        assert error.peer == there.child.peer_id
        assert "proved dead" in str(error)
    assert there.node.stats()["peers_proved_dead"] == 1
    assert there.node.stats()["quarantined_pages"] == 0
    assert f"{there.child.peer_id} was fenced, since it is proved dead" in caplog.text
    there.restart()
    there.run("again", 4)
    there.check_at_rest()
    assert there.node.stats()["peers_proved_dead"] == 1


@contextmanager
def ended_by_force(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_prefill_whose_fork_lives_is_not_fenced_before_that_has_ended(
    start: Any, stack: ExitStack, clock: SkippableClock, verdicts: list[bool]
) -> None:
    """The fork has its sockets, so that it is dead shows in its silence alone."""
    there = WithPrefillChild(start, stack)
    fork = there.child.call("fork")
    with ended_by_force(fork):
        there.submit("r", 1, 1, "kill")
        there.until(lambda: not there.child.process.is_alive())
        for _ in range(3):
            there.until_silence_shows(clock, looked_again(verdicts))
        assert not any(verdicts)
        assert left(there.node)["pages_quarantined"] == 32
    there.until(lambda: "r" in there.d.ended and not left(there.node))
    assert there.node.stats()["peers_proved_dead"] == 1
