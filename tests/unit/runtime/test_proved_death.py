"""A process that is proved dead is fenced unasked, and no other; real NIXL, several processes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from prefixkv.errors import PeerLostError
from prefixkv.protocol.messages import ProcessLife
from prefixkv.runtime import death
from tests.support.node_pair import left
from tests.support.node_process import NodeProcess
from tests.support.patience import SkippableClock
from tests.unit.runtime.test_processes import WithPrefillChild

pytestmark = pytest.mark.usefixtures("_any_wire")
Start = Callable[..., NodeProcess]


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
def test_prefill_is_killed(
    start: Start, stack: ExitStack, caplog: pytest.LogCaptureFixture
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
    start: Start, stack: ExitStack, clock: SkippableClock, verdicts: list[bool]
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
