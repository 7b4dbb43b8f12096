"""How long the engine may rest where its scheduler only waits: by itself vLLM polls, a step each
millisecond. A worker's wakeup ends the rest (`wakeup.py`), as does a new request."""

from __future__ import annotations

from typing import Final

QUIET_STEPS: Final = 3
"""Steps without any event before the engine may rest. An order and the report on it may be two
steps apart where the engine works ahead."""
LONGEST_REST_S: Final = 60.0  # no wait is without a limit


class Rest:
    """The quiet steps of one engine, and which workers wake it. Its `SchedulerSide`'s."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._address = ""
        self._num_senders = 0  # workers that say that they wake the engine
        self._quiet_steps = 0  # consecutive ones, in which nothing was ordered, computed, reported
        # Address for the next orders, until every worker has answered; a worker takes the first.
        self.bell = ""

    def set_address(self, address: str) -> None:
        self._address = address
        self.sent_by(0)

    def sent_by(self, num_senders: int) -> None:
        """`num_senders` more workers say that they wake the engine."""
        self._num_senders += num_senders
        self.bell = self._address if self._num_senders < self._num_ranks else ""

    @property
    def has_wakeups(self) -> bool:
        """True where every worker wakes the engine when it has something to report."""
        return bool(self._address) and self._num_senders >= self._num_ranks

    def stepped(self, is_quiet: bool) -> None:
        """`is_quiet`: nothing was ordered, computed or reported in the step."""
        self._quiet_steps = self._quiet_steps + 1 if is_quiet else 0

    @property
    def may_rest(self) -> bool:
        """True if whatever comes would wake the engine."""
        return self.has_wakeups and self._quiet_steps >= QUIET_STEPS

    @staticmethod
    def limited(left_s: float | None) -> float:
        """Return the seconds of one rest. `left_s`: until something that no worker rings for."""
        return min(max(left_s or 0.0, 0.0) or LONGEST_REST_S, LONGEST_REST_S)
