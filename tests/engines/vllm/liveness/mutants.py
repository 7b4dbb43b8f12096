"""Faults of the connector that the exploration has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from prefixkv.engines.vllm import scheduler as scheduler_module
from prefixkv.engines.vllm.blocks import Flights, Holds
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.sends import ScheduledSends
from tests.engines.vllm.liveness.process import Bell

Patch = Callable[[Any, str, Any], None]


def _old_order(patch: Patch) -> None:
    """Prefill computes at once, and holds the blocks until decode asks for them."""
    begin = ScheduledSends.begin

    def promised(self: Any, request: Any, ask: Any, orders: Any) -> None:
        begin(self, request, ask, orders)
        if (send := self.sends.get(request.request_id)) is not None:
            send.unpromised = 0

    patch(ScheduledSends, "begin", promised)
    patch(ScheduledSends, "may_start", lambda self, rid, num_free, orders: None)


def _promises_are_lost(patch: Patch) -> None:
    patch(ScheduledSends, "promised", lambda self, rid: None)


def _sent_blocks_stay(patch: Patch) -> None:
    freed = ScheduledSends.freed
    keeps: Any = SimpleNamespace(release=lambda rid: None)
    patch(ScheduledSends, "freed", lambda self, rid, holds: freed(self, rid, keeps))


def _offers_stay(patch: Patch) -> None:
    patch(ScheduledSends, "make_room", lambda self, num_blocks, grace_s, orders: None)


def _offers_stay_for_those_behind(patch: Patch) -> None:
    patch(ScheduledSends, "has_promised_uncomputed", False)


def _followers_sleep(patch: Patch) -> None:
    patch(Flights, "land", lambda self, rid: None)


def _the_unwanted_wait(patch: Patch) -> None:
    unsent = ScheduledSends.unsent

    def told(self: Any, rid: str, error: str) -> None:
        unsent(self, rid, error)
        self.ending.clear()

    patch(ScheduledSends, "unsent", told)


def _refusals_are_lost(patch: Patch) -> None:
    patch(SchedulerSide, "_order_refusal", lambda self, ask, reason: None)


def _aborts_are_lost(patch: Patch) -> None:
    finished = ScheduledSends.finished

    def ended(self: Any, rid: str, orders: Any) -> Any:
        said = finished(self, rid, orders)
        orders.abort_sends.pop(rid, None)
        return said

    patch(ScheduledSends, "finished", ended)


def _loads_take_all(patch: Patch) -> None:
    bind = SchedulerSide.bind

    def bound(self: Any, pool: Any, shadow: Any = None) -> None:
        bind(self, pool, shadow)
        self._most_loading = None

    patch(SchedulerSide, "bind", bound)


def _prompts_start_beside_others(patch: Patch) -> None:
    may_start = ScheduledSends.may_start

    def asked(self: Any, rid: str, num_free: int, orders: Any) -> Any:
        said = may_start(self, rid, num_free, orders)
        send = self.sends.get(rid)
        is_promised = send is not None and send.unpromised <= 0 and rid not in self.ending
        return True if said is False and is_promised else said

    patch(ScheduledSends, "may_start", asked)


def _rests_too_early(patch: Patch) -> None:
    patch(scheduler_module, "QUIET_STEPS", 0)


def _bells_ring_once(patch: Patch) -> None:
    arm = Bell.arm

    def armed(self: Any) -> None:
        if not hasattr(self, "was_armed"):
            self.was_armed = True
            arm(self)

    patch(Bell, "arm", armed)


def _nothing_is_held(patch: Patch) -> None:
    patch(Holds, "take", lambda self, rid, pages: None)


MUTANTS: dict[str, Callable[[Patch], None]] = {
    one.__name__.removeprefix("_"): one
    for one in (
        _old_order,
        _promises_are_lost,
        _sent_blocks_stay,
        _offers_stay,
        _offers_stay_for_those_behind,
        _followers_sleep,
        _the_unwanted_wait,
        _refusals_are_lost,
        _aborts_are_lost,
        _loads_take_all,
        _prompts_start_beside_others,
        _rests_too_early,
        _bells_ring_once,
        _nothing_is_held,
    )
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """With this fault in the connector. "": none."""
    former: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, attribute: str, value: Any) -> None:
        former.append((owner, attribute, vars(owner)[attribute]))
        setattr(owner, attribute, value)

    try:
        if name:
            MUTANTS[name](patch)
        yield
    finally:
        for owner, attribute, value in reversed(former):
            setattr(owner, attribute, value)
