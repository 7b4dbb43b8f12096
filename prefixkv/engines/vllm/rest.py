"""The wait of vLLM's engine where it would poll: until a request comes, or a worker rings."""

from __future__ import annotations

import threading
import time
from queue import Queue
from typing import Any


class Rest:
    """The wait of one engine. `wait` is called in the engine's own thread, `ring` in any."""

    def __init__(self) -> None:
        # Stays set until the next `wait`, so a ring that comes between two waits is not lost.
        self._rung = False
        # The condition of the queue on which the engine rests; None while it does not rest.
        self._resting: threading.Condition | None = None

    def ring(self) -> None:
        """Wake the engine, or keep it from resting once."""
        # The flag before the condition is read. If `wait` has not set `_resting` yet, no
        # notification is sent, and it finds the flag before it waits. The other way round a ring
        # between its two steps would be lost.
        self._rung = True
        if (condition := self._resting) is not None:
            with condition:
                condition.notify_all()

    def wait(self, inputs: Queue[Any], timeout_s: float) -> None:
        """Wait until there is an input, until the next ring, or for `timeout_s` at most.

        Takes nothing out of `inputs`. At a ring since the last wait it returns at once.
        """
        until_s = time.monotonic() + timeout_s
        # The queue's own condition: `put` notifies it too, so one wait covers inputs and rings.
        with inputs.not_empty:
            self._resting = inputs.not_empty
            while not self._rung and not inputs.queue:
                left_s = until_s - time.monotonic()
                if left_s <= 0.0:
                    break
                inputs.not_empty.wait(left_s)
            self._resting = None
        self._rung = False
