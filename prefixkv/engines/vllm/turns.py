"""Which requests let others go first in a step of vLLM's scheduler.

vLLM asks of no request behind one for which blocks are lacking. Where a load, or what a load has
left, has those blocks, the request that lacks them waits for another server, which may wait for a
request behind it here. So it lets them go first, and the law of the order holds: a side that waits
holds nothing that the other's progress may need.
"""

from __future__ import annotations

from prefixkv.engines.vllm.loads import ScheduledLoads
from prefixkv.engines.vllm.sends import ScheduledSends


class Turns:
    def __init__(self, loads: ScheduledLoads, sends: ScheduledSends) -> None:
        self._loads, self._sends = loads, sends
        self.is_changed = False  # a request has let others go first in this step
        self._has_yielded = False  # a request in this step, to the promised sends behind it
        self._has_stepped_back = False  # one of `failed` in this step, to those of `landed`
        # With windows, where a request whose load has failed needs more blocks to be computed than
        # to be loaded: such requests, until vLLM admits them again; and those that have the blocks
        # of a load that is over, until vLLM computes them or asks about them again.
        # `SchedulerSide` takes them out then: the second at each step, where a call would count.
        self.failed: set[str] = set()
        self.landed: set[str] = set()

    def must_yield(self, need: int) -> bool:
        """Return whether a request that lacks `need` blocks lets promised sends go first. Others
        keep their order, so that the loads under way end, and no new one takes the blocks."""
        if need > 0 and self._sends.has_promised_uncomputed:
            self._has_yielded |= self._loads.any_under_way
            self.is_changed |= self._has_yielded
        return self._has_yielded

    def steps_back(self, rid: str, need: int) -> bool:
        """Return whether a request that lacks `need` blocks lets those go first that have blocks of
        loads. vLLM comes to none of these behind a request whose load has failed. No other request
        may take the blocks meanwhile."""
        self.landed.discard(rid)
        if rid in self.failed and need > 0:
            self._has_stepped_back |= self._loads.any_under_way or bool(self.landed)
            self.is_changed |= self._has_stepped_back
        return self._has_stepped_back

    def next_step(self) -> None:
        """All have their turns again. To be left out unless `is_changed`."""
        self._has_yielded = self._has_stepped_back = self.is_changed = False

    def received(self, rid: str, is_failed: bool) -> None:
        if self._loads.ledger.groups.windows:
            self.landed.add(rid)
            if is_failed:
                self.failed.add(rid)

    def ended(self, rid: str) -> None:
        self.failed.discard(rid)
        self.landed.discard(rid)
