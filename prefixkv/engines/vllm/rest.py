"""How vLLM's engine waits where it would poll: until a request comes, or a worker rings."""

from __future__ import annotations

import threading
import time
from queue import Queue
from typing import Any


class Rest:
    """One engine's. `wait` is called in the engine's own thread, `ring` in any."""

    def __init__(self) -> None:
        self._rung = False
        self._resting: threading.Condition | None = None

    def ring(self) -> None:
        """Wake the engine, or keep it from resting once."""
        self._rung = True  # first: whoever holds the lock below looks at it before it waits
        if (condition := self._resting) is not None:
            with condition:
                condition.notify_all()

    def wait(self, inputs: Queue[Any], timeout_s: float) -> None:
        """Return when there is an input, at the next ring, or after `timeout_s`. Takes nothing out
        of `inputs`."""
        until_s = time.monotonic() + timeout_s
        with inputs.not_empty:  # who puts an input notifies this condition, as `ring` does
            self._resting = inputs.not_empty
            while not self._rung and not inputs.queue:
                left_s = until_s - time.monotonic()
                if left_s <= 0.0:
                    break
                inputs.not_empty.wait(left_s)
            self._resting = None
        self._rung = False
