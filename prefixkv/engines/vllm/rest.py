"""How long vLLM's engine may rest where its scheduler only waits: by itself it polls, a step each
millisecond. A worker's wakeup ends the rest (`wakeup.py`), as does a new request."""

from __future__ import annotations

from typing import Final

QUIET_STEPS: Final = 3
"""Steps without any event before the engine may rest; see `Rest.may_rest`."""
LONGEST_REST_S: Final = 60.0
"""Limit of one rest, seconds: no wait is without a limit."""


class Rest:
    """The quiet steps of one engine, and who can wake it. Used by its `SchedulerSide` alone.

    Args:
        num_ranks: number of workers, each of which has to wake the engine when it has something to
            report.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._address = ""
        self._num_senders = 0  # workers that say that they wake the engine
        self._quiet_steps = 0  # consecutive ones, in which nothing was ordered, computed, reported
        self.bell = ""
        """Address for the next orders of vLLM's scheduler, until every worker has answered; a
        worker takes only the first."""

    def set_address(self, address: str) -> None:
        """Set the address at which workers can wake vLLM's scheduler."""
        self._address = address
        self.sent_by(0)

    def sent_by(self, num_senders: int) -> None:
        """Note that `num_senders` more workers say that they wake vLLM's scheduler."""
        self._num_senders += num_senders
        self.bell = self._address if self._num_senders < self._num_ranks else ""

    @property
    def has_wakeups(self) -> bool:
        """True where every worker wakes vLLM's scheduler when it has something to report."""
        return bool(self._address) and self._num_senders >= self._num_ranks

    def stepped(self, is_quiet: bool) -> None:
        """Note a step of vLLM's engine; `is_quiet`: nothing was ordered or computed in it."""
        self._quiet_steps = self._quiet_steps + 1 if is_quiet else 0

    def reported(self) -> None:
        """Note that vLLM's workers have reported something, beyond that they wake the engine."""
        self._quiet_steps = 0

    @property
    def may_rest(self) -> bool:
        """True if vLLM's engine may rest: whatever comes would wake it. An order and the report on
        it may be two steps apart where the engine works ahead, so the last `QUIET_STEPS` steps must
        all have been quiet."""
        return self.has_wakeups and self._quiet_steps >= QUIET_STEPS

    @staticmethod
    def limited(left_s: float | None) -> float:
        """Return how many seconds one rest of vLLM's engine may last. `left_s`: until something
        happens that no worker rings for; None: nothing does."""
        if left_s is None:
            return LONGEST_REST_S
        return min(max(left_s, 0.0) or LONGEST_REST_S, LONGEST_REST_S)
