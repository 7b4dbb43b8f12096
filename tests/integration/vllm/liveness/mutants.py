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
from prefixkv.engines.vllm.host_worker import WorkerHost
from prefixkv.engines.vllm.loads import ScheduledLoads
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.sends import ScheduledSends
from prefixkv.engines.vllm.turns import Turns
from prefixkv.engines.vllm.worker import WorkerSide
from tests.integration.vllm.liveness.process import Bell

Patch = Callable[[Any, str, Any], None]


def _old_order(patch: Patch) -> None:
    """Prefill computes at once, and holds the blocks until decode asks for them."""
    begin = ScheduledSends.begin

    def promised(self: Any, request: Any, ask: Any) -> None:
        begin(self, request, ask)
        if (send := self.sends.get(request.request_id)) is not None:
            send.unpromised = 0

    patch(ScheduledSends, "begin", promised)
    patch(ScheduledSends, "may_start", lambda self, rid: None)


def _promises_are_lost(patch: Patch) -> None:
    patch(ScheduledSends, "promised", lambda self, rid: None)


def _sent_blocks_stay(patch: Patch) -> None:
    def forget(self: Any, rid: str) -> None:
        del self.sends[rid]

    patch(ScheduledSends, "_forget", forget)


def _offers_stay(patch: Patch) -> None:
    patch(ScheduledSends, "make_room", lambda self, num_blocks, grace_s=0.0: None)


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
    patch(ScheduledLoads, "_order_refusal", lambda self, ask, reason: None)


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


def _preempted_prompts_wait_their_turn(patch: Patch) -> None:
    """Whatever vLLM preempted later goes before a preempted prompt, which holds blocks."""
    patch(ScheduledSends, "must_yield", lambda self, rid: False)


def _promised_prompts_wait_for_loads(patch: Patch) -> None:
    """They wait behind a request that needs blocks of loads."""
    patch(Turns, "must_yield", lambda self, need: False)


def _rests_too_early(patch: Patch) -> None:
    patch(wakeup_module, "QUIET_STEPS", 0)


def _bells_ring_once(patch: Patch) -> None:
    arm = Bell.arm

    def armed(self: Any) -> None:
        if not hasattr(self, "was_armed"):
            self.was_armed = True
            arm(self)

    patch(Bell, "arm", armed)


def _nothing_is_held(patch: Patch) -> None:
    patch(Holds, "take", lambda self, rid, pages: None)


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


def _host_pages_go_before_they_are_loaded(patch: Patch) -> None:
    """Host memory may evict what a load reads. Wrong KV is seen in one of 500 cases, T2 soon."""
    order = HostTier._order

    def ordered(self: Any, is_load: bool, *args: Any) -> None:
        order(self, is_load, *args)
        if is_load:
            copy = self._copies[self._count]
            self.cache.unlock(copy.host_lock)
            copy.host_lock = self.cache.pin(self.cache.match_prefix([]))

    patch(HostTier, "_order", ordered)


def _writes_count_at_once(patch: Patch) -> None:
    """What a write has still to bring is in host memory's tree already."""
    _no_tier_laws(patch)
    order = HostTier._order

    def ordered(self: Any, is_load: bool, *args: Any) -> None:
        order(self, is_load, *args)
        if not is_load:
            copy = self._copies[self._count]
            self.cache.insert(copy.key, copy.dst, lock=copy.host_lock)
            self.allocator.cache(copy.dst)

    def written(self: Any, copy: Any, is_good: bool, now_s: float) -> None:
        self.pages.unpin(copy.device_lock)
        self._free(self.cache.unlock(copy.host_lock))

    patch(HostTier, "_order", ordered)
    patch(HostTier, "_wrote", written)


def _failed_copies_count(patch: Patch) -> None:
    """What a copy that was broken off has left behind is taken for what it should have brought."""
    take = WorkerHost.take_ends

    def taken(self: Any) -> Any:
        ends, loaded = take(self)
        return [msgspec.structs.replace(end, error=None) for end in ends], dict.fromkeys(loaded, "")

    patch(WorkerHost, "take_ends", taken)


def _rooms_do_not_wait_for_copies(patch: Patch) -> None:
    """A request runs when its room has ended, whatever host memory has still to bring."""
    end = WorkerSide._end_load

    def ended(self: Any, rid: str, failed: bool) -> None:
        if rid in self._parts:
            self._parts[rid].pending = 1
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


def _loads_are_not_joined(patch: Patch) -> None:
    """Two requests load one path from host memory at once: T4."""
    patch(Flights, "begin", lambda self, rid, hashes: None)


def _failed_requests_load_again(patch: Patch) -> None:
    patch(HostBlocks, "bar", lambda self, rid: None)


def _copies_are_not_waited_for(patch: Patch) -> None:
    """The engine rests, or stops, while copies are under way."""
    patch(HostBlocks, "num_copies", 0)


def _stale_host_memory(patch: Patch) -> None:
    """A write that was under way at a flush is entered behind it: T3."""
    flush = DeviceBlocks.flush

    def flushed(self: Any) -> None:
        flush(self)
        self.epoch -= 1

    patch(DeviceBlocks, "flush", flushed)


# --- of layers that keep a window -----------------------------------------------------------------


def _the_last_token_is_sent(patch: Patch) -> None:
    """What vLLM computes first on decode sees one token more than it has kept."""
    patch(BlockGroups, "num_sent", lambda self, num_prompt_tokens: num_prompt_tokens)


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


def _failed_loads_wait_for_blocks(patch: Patch) -> None:
    """vLLM comes to nothing behind a request whose load has failed and for which blocks lack."""
    patch(Turns, "steps_back", lambda self, rid, need: False)


WINDOW_MUTANTS: dict[str, Callable[[Patch], None]] = {
    one.__name__.removeprefix("_"): one
    for one in (
        _the_last_token_is_sent,
        _windows_are_not_held,
        _cached_windows_are_written_over,
        _failed_loads_wait_for_blocks,
    )
}
"""Faults with layers that keep a window, for `cases.with_windows`."""


# --- of layers that keep a state ------------------------------------------------------------------


def _prefill_computes_the_last_token(patch: Patch) -> None:
    """The state that is sent is then behind a token that vLLM computes on decode once more."""
    patch(SchedulerSide, "_end_before_last", lambda self, request: None)


def _prefill_goes_on(patch: Patch) -> None:
    """What it generates is written into the state while that is sent."""
    leave_out = scheduler_module.leave_out_last_token

    def cut(request: Any, hash_size: int) -> None:
        leave_out(request, hash_size)
        request.max_tokens = 20

    patch(scheduler_module, "leave_out_last_token", cut)


def _states_are_not_held(patch: Patch) -> None:
    """vLLM gives the block to another request, whoever still sends it."""
    _windows_are_not_held(patch)


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


STATE_MUTANTS: dict[str, Callable[[Patch], None]] = {
    one.__name__.removeprefix("_"): one
    for one in (
        _prefill_computes_the_last_token,
        _prefill_goes_on,
        _states_are_not_held,
        _the_state_before_is_sent,
    )
}
"""Faults with layers that keep a state, for `cases.with_states`."""

HOST_MUTANTS: dict[str, Callable[[Patch], None]] = {
    one.__name__.removeprefix("_"): one
    for one in (
        _blocks_go_before_they_are_written,
        _host_pages_go_before_they_are_loaded,
        _writes_count_at_once,
        _failed_copies_count,
        _rooms_do_not_wait_for_copies,
        _aborted_loads_are_forgotten,
        _loads_are_not_joined,
        _failed_requests_load_again,
        _copies_are_not_waited_for,
        _stale_host_memory,
    )
}
"""Faults of host memory, for `cases.with_host`."""

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
        _preempted_prompts_wait_their_turn,
        _promised_prompts_wait_for_loads,
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
            (MUTANTS | HOST_MUTANTS | WINDOW_MUTANTS | STATE_MUTANTS)[name](patch)
        yield
    finally:
        for owner, attribute, value in reversed(former):
            setattr(owner, attribute, value)
