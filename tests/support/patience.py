"""How long tests wait, and how time passes in them without a wait.

No test fails because the machine is slow, or stood still for a while: it waits for a state, for
`PATIENCE_S` at most, and deadlines that are not its subject are `NEVER_S`. Where a deadline is the
subject, the test lets it pass on a `SkippableClock`, once the state it wants is there.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.support.ports import free_port

PATIENCE_S = 120.0
NEVER_S = 1000.0  # well beyond anybody's patience

T = TypeVar("T")


def until(
    done: Callable[[], object],
    patience_s: float = PATIENCE_S,
    *,
    step: Callable[[], object] = int,
    state: Callable[[], object] = str,
    pause_s: float = 0.002,
) -> None:
    """Wait until `done()` is true. AssertionError after `patience_s`.

    Args:
        step: called before each look: whatever has to go on meanwhile, such as a turn of an engine.
        state: what the error shows, asked when patience has ended.
        pause_s: between a look and the next step.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        step()
        if done():
            return
        assert time.monotonic() < deadline_s, f"it never came to be {state()}"
        time.sleep(pause_s)


def returned(call: Callable[[], T]) -> T:
    """What the call returns, from a thread of its own: one that hangs is an error, not a test
    without end."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it never returned"
    return results[0]


class SkippableClock:
    """The `time` of the modules that drive nodes: the real one, but for what the test has
    skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped_s

    def install(self, put: Callable[[Any, str, Any], None] = setattr) -> None:
        """For all nodes of this process. `put` may be monkeypatch.setattr."""
        from prefixkv.runtime import (
            control_thread,
            decode_transfers,
            node,
            prefill_transfers,
            transfers,
        )

        for module in (control_thread, transfers, decode_transfers, prefill_transfers, node):
            put(module, "time", self)

    def skip(self, seconds: float, nodes: Sequence[Any]) -> None:
        """That much time has passed, and these nodes' control threads look at the clock again."""
        self._skipped_s += seconds
        for node in nodes:
            node.transfers.thread.inbox.put(None)


def lasting_address() -> str:
    """A TCP address that stays ours while nothing listens there, or a process that is told it."""
    return f"tcp://127.0.0.1:{free_port()}"
