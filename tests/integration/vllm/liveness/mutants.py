"""Faults of the connector that the exploration has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from prefixkv.decode.host_tier import HostTier
from prefixkv.engines.vllm import connector as connector_module
from prefixkv.engines.vllm import scheduler as scheduler_module
from prefixkv.engines.vllm import wakeup as wakeup_module
from prefixkv.engines.vllm.blocks import Flights, Holds
from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.host import DeviceBlocks, HostBlocks
from prefixkv.engines.vllm.loads import ScheduledLoads, Turns
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.sends import ScheduledSends
from prefixkv.engines.vllm.worker import WorkerHost, WorkerSide
from tests.integration.vllm.liveness.process import Bell

Patch = Callable[[Any, str, Any], None]
Fault = Callable[[Patch], None]


def _replaced(owner: Any, name: str, value: Any) -> Fault:
    return lambda patch: patch(owner, name, value)


def _none(*args: Any, **more: Any) -> None:
    """Do nothing, whatever is asked."""


def _old_order(patch: Patch) -> None:
    """Prefill computes at once, and holds the blocks until decode asks for them."""
    begin = ScheduledSends.begin

    def promised(self: Any, request: Any, ask: Any) -> None:
        begin(self, request, ask)
        if (send := self.sends.get(request.request_id)) is not None:
            send.unpromised = 0

    patch(ScheduledSends, "begin", promised)
    patch(ScheduledSends, "may_start", lambda self, rid: None)


def _the_unwanted_wait(patch: Patch) -> None:
    unsent = ScheduledSends.unsent

    def told(self: Any, rid: str, error: str) -> None:
        unsent(self, rid, error)
        self.ending.clear()

    patch(ScheduledSends, "unsent", told)


def _aborts_are_lost(patch: Patch) -> None:
    finished = ScheduledSends.finished

    def ended(self: Any, rid: str) -> Any:
        said = finished(self, rid)
        self.ledger.orders.abort_sends.clear()
        return said

    patch(ScheduledSends, "finished", ended)


def _loads_take_all(patch: Patch) -> None:
    bind = SchedulerSide.bind

    def bound(self: Any, pool: Any, shadow: Any = None) -> None:
        bind(self, pool, shadow)
        self.loads.most_blocks = None

    patch(SchedulerSide, "bind", bound)


def _prompts_start_beside_others(patch: Patch) -> None:
    may_start = ScheduledSends.may_start

    def asked(self: Any, rid: str) -> Any:
        said = may_start(self, rid)
        send = self.sends.get(rid)
        is_promised = send is not None and send.unpromised <= 0 and rid not in self.ending
        return True if said is False and is_promised else said

    patch(ScheduledSends, "may_start", asked)


# --- of host memory: some without the laws of its tiers, so that what follows shows ---------------


def _no_tier_laws(patch: Patch) -> None:
    patch(HostTier, "check_invariants", lambda self: None)
    patch(HostBlocks, "check_invariants", lambda self: None)


def _blocks_go_before_they_are_written(patch: Patch) -> None:
    """vLLM may give a block away while a write reads it."""
    _no_tier_laws(patch)
    pin = DeviceBlocks.pin_key

    def pinned(self: Any, key: Any, now_s: float) -> Any:
        lock = pin(self, key, now_s)
        self._holds.release(lock.name)
        return lock

    patch(DeviceBlocks, "pin_key", pinned)


def _failed_copies_count(patch: Patch) -> None:
    """What a copy that was broken off has left behind is taken for what it should have brought."""
    take = WorkerHost.take_ends

    def taken(self: Any) -> Any:
        return [(msgspec.structs.replace(end, error=None), rid) for end, rid in take(self)]

    patch(WorkerHost, "take_ends", taken)


def _rooms_do_not_wait_for_copies(patch: Patch) -> None:
    """A request runs when its room has ended, whatever host memory has still to bring."""
    end = WorkerSide._end_load

    def ended(self: Any, rid: str, failed: bool) -> None:
        if rid in self._pending:
            self._pending[rid] = 1
            end(self, rid, failed)

    patch(WorkerSide, "_end_load", ended)


def _aborted_loads_are_forgotten(patch: Patch) -> None:
    """vLLM never hears the end of a load whose client has left: its blocks stay taken."""
    finished, ended = HostBlocks.finished, WorkerSide._end_load
    left: set[str] = set()

    def left_behind(self: Any, request: Any, *given: Any) -> None:
        left.update({request.request_id} & self._load_of.keys())
        finished(self, request, *given)

    def heard(self: Any, rid: str, failed: bool) -> None:
        if rid not in left:
            ended(self, rid, failed)

    patch(HostBlocks, "finished", left_behind)
    patch(WorkerSide, "_end_load", heard)


def _stale_host_memory(patch: Patch) -> None:
    """A write that was under way at a flush is entered behind it: T3."""
    flush = DeviceBlocks.flush

    def flushed(self: Any) -> None:
        flush(self)
        self.epoch -= 1

    patch(DeviceBlocks, "flush", flushed)


# --- of layers that keep a window -----------------------------------------------------------------


def _windows_are_not_held(patch: Patch) -> None:
    """vLLM frees a block that has fallen out of the window, whoever still sends it."""
    sent = BlockGroups.window_blocks
    windows: set[int] = set()

    def seen(self: Any, *given: Any) -> Any:
        found = sent(self, *given)
        windows.update(block for one in found for block in one.blocks)
        return found

    take = Holds.take
    patch(BlockGroups, "window_blocks", seen)
    patch(Holds, "take", lambda self, rid, pages: take(self, rid, [*{*pages} - windows]))


def _cached_windows_are_written_over(patch: Patch) -> None:
    """Where decode's cache has a part of the window, it is written into what others read."""

    def found_in_all(manager: Any, full: int, wanted: Any) -> None:
        def get(request: Any) -> Any:
            return *manager.get_computed_blocks(request), False

        manager.get_computed_blocks_for_connector = get

    patch(connector_module, "look_up_densely", found_in_all)


# --- of layers that keep a state ------------------------------------------------------------------


def _prefill_goes_on(patch: Patch) -> None:
    """What it generates is written into the state while that is sent."""
    leave_out = scheduler_module.leave_out_last_token

    def cut(request: Any, hash_size: int) -> None:
        leave_out(request, hash_size)
        request.max_tokens = 20

    patch(scheduler_module, "leave_out_last_token", cut)


def _the_state_before_is_sent(patch: Patch) -> None:
    """That of the block before, where vLLM still has it: on prefill alone."""
    sent = BlockGroups.window_blocks

    def before(self: Any, tables: Any, *given: Any) -> Any:
        found = zip(sent(self, tables, *given), self.windows, strict=True)
        return tuple(
            one._replace(blocks=(table[-2],))
            if one.blocks and any((table := tables[group.number])[-2:-1])
            else one
            for one, group in found
        )

    patch(BlockGroups, "window_blocks", before)


MUTANTS: dict[str, dict[str, Fault]] = {
    "": {
        "old_order": _old_order,
        "promises_are_lost": _replaced(ScheduledSends, "promised", _none),
        "sent_blocks_stay": _replaced(
            ScheduledSends, "_forget", lambda self, rid: self.sends.pop(rid)
        ),
        "offers_stay": _replaced(ScheduledSends, "make_room", _none),
        "offers_stay_for_those_behind": _replaced(ScheduledSends, "has_promised_uncomputed", False),
        "followers_sleep": _replaced(Flights, "land", _none),
        "the_unwanted_wait": _the_unwanted_wait,
        "refusals_are_lost": _replaced(ScheduledLoads, "refuse", _none),
        "aborts_are_lost": _aborts_are_lost,
        "loads_take_all": _loads_take_all,
        "prompts_start_beside_others": _prompts_start_beside_others,
        # Whatever vLLM preempted later goes before a preempted prompt, which holds blocks.
        "preempted_prompts_wait_their_turn": _replaced(ScheduledSends, "must_yield", _none),
        # Behind a request that needs blocks of loads.
        "promised_prompts_wait_for_loads": _replaced(Turns, "must_yield", _none),
        "rests_too_early": _replaced(wakeup_module, "QUIET_STEPS", 0),
        "bells_ring_once": _replaced(Bell, "arm", _none),
        "nothing_is_held": _replaced(Holds, "take", _none),
    },
    "host": {
        "blocks_go_before_they_are_written": _blocks_go_before_they_are_written,
        "failed_copies_count": _failed_copies_count,
        "rooms_do_not_wait_for_copies": _rooms_do_not_wait_for_copies,
        "aborted_loads_are_forgotten": _aborted_loads_are_forgotten,
        "loads_are_not_joined": _replaced(Flights, "begin", _none),  # two load one path at once: T4
        "failed_requests_load_again": _replaced(HostBlocks, "bar", _none),
        # The engine rests, or stops, while copies are under way.
        "copies_are_not_waited_for": _replaced(HostBlocks, "num_copies", 0),
        "stale_host_memory": _stale_host_memory,
    },
    "windows": {
        # What vLLM computes first on decode sees one token more than it has kept.
        "the_last_token_is_sent": _replaced(BlockGroups, "num_sent", lambda self, number: number),
        "windows_are_not_held": _windows_are_not_held,
        "cached_windows_are_written_over": _cached_windows_are_written_over,
        # vLLM comes to nothing behind a request whose load has failed and for which blocks lack.
        "failed_loads_wait_for_blocks": _replaced(Turns, "steps_back", _none),
    },
    "states": {
        # The state that is sent is then behind a token that vLLM computes on decode once more.
        "prefill_computes_the_last_token": _replaced(
            scheduler_module, "leave_out_last_token", _none
        ),
        "prefill_goes_on": _prefill_goes_on,
        # vLLM gives the block to another request, whoever still sends it.
        "states_are_not_held": _windows_are_not_held,
        "the_state_before_is_sent": _the_state_before_is_sent,
    },
}
"""By what the model or the server has: see `cases.WITH`."""
ALL = {name: (of, fault) for of, faults in MUTANTS.items() for name, fault in faults.items()}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """With this fault in the connector. "": none."""
    former: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, attribute: str, value: Any) -> None:
        former.append((owner, attribute, vars(owner)[attribute]))
        setattr(owner, attribute, value)

    try:
        if name:
            ALL[name][1](patch)
        yield
    finally:
        for owner, attribute, value in reversed(former):
            setattr(owner, attribute, value)
