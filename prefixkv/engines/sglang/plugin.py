"""The plug-in that SGLang loads in each of its processes (entry point group `sglang.srt.plugins`).

Settings are environment variables, since SGLang's command line takes no options of a plug-in:

    PREFIXKV_POLICY     eviction policy, by name; else `--radix-eviction-policy` where that is not
                        `lru`, SGLang's default; else prefixkv's default
    PREFIXKV_ADMISSION  fifo: SGLang's order of the decode queue; hit_aware (default)
    PREFIXKV_PATIENCE_S seconds during which hit_aware lets other requests overtake one
    PREFIXKV_JOIN       0: each request of decode's queue has all missing pages sent, even where
                        another request brings them
    PREFIXKV_CPU_NIXL   1: KV is in host memory, for SGLang's NIXL backend on a CPU
    PREFIXKV_TRANSFER   JSON, of the transfer backend: `transfer_options.py`

A server that uses one of prefixkv's backends refuses variables of other names
(`prefixkv/config.py`).
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from prefixkv.engines.sglang import NAME, ROOMS, TESTED
from prefixkv.errors import ConfigError
from prefixkv.spi import DEFAULT_POLICY, TOKEN_BYTES, check_environ, explain_policy

_log = logging.getLogger("prefixkv.sglang")


def load() -> None:
    """Register both backends with SGLang, and hook the methods that they need. Only warns, and does
    nothing, under another version of SGLang than `TESTED`."""
    from importlib.metadata import version

    found = version("sglang")
    if found != TESTED:
        _log.warning(
            "prefixkv supports SGLang %s and is inactive under %s: --radix-cache-backend %s and "
            "--disaggregation-transfer-backend %s are not available", TESTED, found, NAME, NAME,
        )  # fmt: skip
        return
    # Imported only now: with another version these imports might fail. The check of the factory
    # makes a second `load` in one process a no-op, since a hook registered twice would run twice.
    from prefixkv.engines.sglang import internals as sgl

    if sgl.get_radix_cache_factory(NAME) is None:
        sgl.register_radix_cache_backend(NAME, build)
        sgl.HookRegistry.register(sgl.RECEIVER_BROADCAST, _with_time, sgl.HookType.AROUND)
        # A hook is registered only where a setting needs it, so a switched-off feature costs
        # nothing.
        joins = _number("PREFIXKV_JOIN", 1)
        if joins or _admission() == "hit_aware":
            sgl.HookRegistry.register(sgl.POP_PREALLOCATED, _around_pop, sgl.HookType.AROUND)
        if joins:
            sgl.HookRegistry.register(sgl.UPDATE_HANDSHAKES, _after_handshakes, sgl.HookType.AFTER)
        if _number("PREFIXKV_CPU_NIXL", 0):
            sgl.HookRegistry.register(sgl.NIXL_MEMORY_KINDS, _in_host_memory, sgl.HookType.AROUND)
        _add_transfer_backend(sgl)


def build(context: Any) -> Any:
    """Build the tree cache by the settings. Raises ConfigError, which names the option or the kind
    of model that is not supported, or a variable PREFIXKV_... that nothing reads."""
    check_environ(os.environ)
    _number("PREFIXKV_PATIENCE_S", 5.0)  # refused now, not at the first request
    from prefixkv.engines.sglang.cache import PrefixKVCache

    for reason in _refusals(context):
        raise ConfigError(f"--radix-cache-backend {NAME}: {reason}")
    policy = policy_name(os.environ.get("PREFIXKV_POLICY"), context.params.eviction_policy)
    cache = PrefixKVCache(context.params, policy)
    _log.info("prefixkv's tree: policy %s, %s pages", policy, cache.tree.pool_pages)
    return cache


def policy_name(chosen: str | None, sglang_policy: str) -> str:
    """Return the eviction policy: the chosen one, else SGLang's unless that is its default, `lru`.
    Raises ConfigError for a name that no policy has.

    >>> policy_name(None, "fifo"), policy_name(None, "lru")
    ('fifo', 'adaptive')
    """
    default = DEFAULT_POLICY if sglang_policy.lower() == "lru" else sglang_policy.lower()
    name = chosen or default
    if why := explain_policy(name):
        option = "PREFIXKV_POLICY" if chosen else "--radix-eviction-policy"
        raise ConfigError(f"{option}: {why}")
    return name


def _refusals(context: Any) -> list[str]:
    from prefixkv.engines.sglang import internals as sgl

    # Each is a part of SGLang that keeps KV outside of this tree, or expects another tree.
    memory, disagg, params = sgl.get_memory(), sgl.get_disagg(), context.params
    allocator = params.token_to_kv_pool_allocator
    found = {
        "models with sliding windows keep KV that it does not know; --disable-hybrid-swa-memory "
        "gives them one pool": context.is_hybrid_swa,
        "models with Mamba state are not served": context.is_hybrid_ssm,
        "it has no host tier: leave out --enable-hierarchical-cache":
            context.enable_hierarchical_cache,
        "leave out --enable-lmcache": memory.enable_lmcache,
        "leave out --enable-flexkv": memory.enable_flexkv,
        "leave out --enable-unified-cache-external-linker":
            memory.enable_unified_cache_external_linker,
        "leave out --enable-hisparse": memory.enable_hisparse,
        "leave out --enable-session-radix-cache": params.enable_session_radix_cache,
        "leave out --disaggregation-decode-enable-offload-kvcache":
            disagg.disaggregation_decode_enable_offload_kvcache,
        "retraction to its host pool is SGLang's tree's: "
        "--disaggregation-decode-retraction-backup cpu_tensor":
            disagg.disaggregation_mode == "decode"
            and disagg.disaggregation_decode_retraction_backup == "host_pool",
        f"the allocator's page size is {allocator.page_size}, the tree's {params.page_size}: leave "
        "out --dcp-size": allocator.page_size != params.page_size,
    }  # fmt: skip
    return [reason for reason, refused in found.items() if refused]


def _add_transfer_backend(sgl: Any) -> None:
    """SGLang's list of names can be extended, but its enumeration of backends is closed. So a
    member is put into it by hand."""
    # `object.__new__`, since the constructor of an Enum only looks members up. Both maps: SGLang
    # finds a backend by value, and lists them by name.
    kinds = import_module(sgl.TRANSFER_UTILS).TransferBackend
    backend = object.__new__(kinds)
    backend._name_, backend._value_ = NAME.upper(), NAME
    kinds._value2member_map_[NAME] = kinds._member_map_[NAME.upper()] = backend
    sgl.add_disagg_transfer_backend_choices([NAME])

    def kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend is not backend:
            return original(transfer_backend, class_type)
        from prefixkv.engines.sglang.transfer import CLASSES

        return CLASSES[class_type]

    sgl.HookRegistry.register(sgl.GET_KV_CLASS, kv_class, sgl.HookType.AROUND)
    for make in (sgl.MAKE_PREFILL, sgl.MAKE_DECODE):
        sgl.HookRegistry.register(make, _around_manager, sgl.HookType.AROUND)
    sgl.HookRegistry.register(sgl.CREATE_SENDER, _after_sender, sgl.HookType.AFTER)
    sgl.HookRegistry.register(sgl.CREATE_RECEIVER, _after_receiver, sgl.HookType.AFTER)
    sgl.HookRegistry.register(sgl.DECODE_ADD, _after_add, sgl.HookType.AFTER)
    sgl.HookRegistry.register(sgl.DECODE_CAPACITY, _around_capacity, sgl.HookType.AROUND)
    sgl.HookRegistry.register(sgl.PREFILL_ADD, _after_prefill_add, sgl.HookType.AFTER)
    sgl.HookRegistry.register(sgl.POP_BOOTSTRAPPED, _before_bootstrapped, sgl.HookType.BEFORE)
    sgl.HookRegistry.register(sgl.HANDLE_REQUEST, _after_request, sgl.HookType.AFTER)
    sgl.HookRegistry.register(sgl.WAITING_ABORT, _after_waiting_abort, sgl.HookType.AFTER)
    sgl.HookRegistry.register(sgl.NORMALIZE, _around_normalize, sgl.HookType.AROUND)


# --- hooks ----------------------------------------------------------------------------------------


def _with_time(
    original: Any, receiver: Any, recv_reqs: list[Any] | None, *rest: Any, **named: Any
) -> list[Any]:
    """Add the time to the broadcast of requests, and remove it on each rank (`RankClock`). Only the
    rank that receives requests has a list here; the others have None."""
    from prefixkv.engines.sglang.waiting import CLOCK

    if recv_reqs is not None:
        recv_reqs = CLOCK.mark(recv_reqs, time.monotonic())
    return CLOCK.take(original(receiver, recv_reqs, *rest, **named))


def _around_pop(original: Any, queue: Any, *args: Any, **named: Any) -> Any:
    from prefixkv.engines.sglang.waiting import CLOCK

    cache = _enabled_cache(queue.tree_cache)
    if cache is None:
        return original(queue, *args, **named)
    state = _queue_state(queue, cache)
    # With priorities SGLang sorts the queue itself.
    if _admission() == "hit_aware" and not queue.scheduler.enable_priority_scheduling:
        state.order.order(queue.queue, CLOCK.now_s)
    popped = original(queue, *args, **named)
    # Admitted requests bring pages for others. A rebootstrap fetches its own output as well.
    if _number("PREFIXKV_JOIN", 1):
        state.joins.begin(item.req for item in popped[0] if not item.is_rebootstrap)
    return popped


def _after_handshakes(_result: Any, queue: Any, *_args: Any, **_named: Any) -> None:
    """Keep back requests that join another one. SGLang has just marked the requests that could be
    admitted, and marks them again at each step."""
    cache = _enabled_cache(queue.tree_cache)
    if cache is None:
        return
    state = _queue_state(queue, cache)
    ready = [item for item in queue.queue if item.waiting_for_input and not item.req.finished()]
    coming = [item.req for item in queue.transfer_queue.queue] + queue.scheduler.waiting_queue
    joining = [item.req for item in ready if not item.is_rebootstrap]
    held = state.joins.requests_to_hold(joining, coming)
    cache.counters["joined_requests"] = state.joins.num_joined
    for item in ready:
        if id(item.req) in held:
            item.waiting_for_input = False


def _queue_state(queue: Any, cache: Any) -> Any:
    state = queue.__dict__.get("prefixkv_queue_state")
    if state is None:
        from prefixkv.engines.sglang.waiting import Depths, Joins, NewPagesFirst

        depths = Depths(cache.tree, cache.key_of_waiting)
        state = queue.prefixkv_queue_state = SimpleNamespace(
            order=NewPagesFirst(depths, _number("PREFIXKV_PATIENCE_S", 5.0)),
            joins=Joins(depths, cache.tree.page_size * TOKEN_BYTES),
        )
    return state


def _around_manager(original: Any, queue: Any, *args: Any, **named: Any) -> Any:
    # SGLang's constructor has no argument for the layout of pages.
    from prefixkv.engines.sglang.memory import share_of, use_share

    total_heads = int(queue.scheduler.model_config.get_total_num_kv_heads())
    share = share_of(queue.token_to_kv_pool, total_heads)
    window = getattr(queue.scheduler, "sliding_window_size", None) or 0
    with use_share(share._replace(window=window)):
        return original(queue, *args, **named)


def _after_sender(is_made: bool, _queue: Any, req: Any, *_args: Any, **_named: Any) -> None:
    # SGLang's constructor does not pass the request on.
    begin = getattr(req.disagg_kv_sender, "prefixkv_begin", None) if is_made else None
    if begin is not None:
        begin(req)


def _after_receiver(item: Any, queue: Any, req: Any, *_args: Any, **_named: Any) -> None:
    begin = getattr(item.kv_receiver, "prefixkv_begin", None)
    if begin is not None:
        begin(req)
        # Proof frees pages, never a timer: prefill may still write into the pages of a request that
        # failed. SGLang asks `is_abort_release_safe` until there is proof.
        queue.transfer_queue.enable_deferred_kv_release = True
        queue.transfer_queue.deferred_kv_release_timeout = float("inf")


def _after_add(
    _result: Any, queue: Any, req: Any, is_retracted: bool = False, is_rebootstrap: bool = False
) -> None:
    """Inform prefill of a request that decode refused without a receiver, as for its length."""
    taken = bool(queue.queue) and queue.queue[-1].req is req
    if not (taken or is_retracted or is_rebootstrap):
        _decline(queue, req)


def _after_prefill_add(_result: Any, queue: Any, req: Any, *_args: Any, **_named: Any) -> None:
    # Refused without a sender.
    if not (queue.queue and queue.queue[-1] is req):
        _decline(queue, req)


def _before_bootstrapped(queue: Any, *_args: Any, **_named: Any) -> None:
    """Take in decode's announcements at each step, also where no sender is polled: an announcement
    may belong to a request that has ended here."""
    getattr(queue.kv_manager, "prefixkv_pump", lambda: None)()


def _after_request(_result: Any, scheduler: Any, asked: Any, *_args: Any, **_named: Any) -> None:
    """Inform the other server of a request refused on its way into the queue. One that is in a
    queue, or waits for its grammar to compile, is not refused."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    queue = queue or getattr(scheduler, "disagg_decode_prealloc_queue", None)
    manager: Any = getattr(queue, "kv_manager", None)
    if not hasattr(manager, "decline"):
        return
    # `last_handled_rid` was set by `prefixkv_begin` or `decline` within the hooked call, if this
    # request got so far. If neither ran, no other part of the plug-in knows of it.
    last_handled_rid, manager.last_handled_rid = manager.last_handled_rid, ""
    compiles = any(req.rid == asked.rid for req in scheduler.grammar_manager.grammar_queue)
    if last_handled_rid != asked.rid and not compiles:
        _decline(queue, asked)
        manager.last_handled_rid = ""


def _decline(queue: Any, req: Any) -> None:
    # SGLang's own health checks are left alone.
    from prefixkv.engines.sglang import internals as sgl

    decline: Any = getattr(queue.kv_manager, "decline", None)
    if None not in (decline, req.bootstrap_room) and req.bootstrap_host != sgl.fake_host():
        decline(req)


def _after_waiting_abort(_result: Any, _scheduler: Any, req: Any) -> None:
    """SGLang never clears such a sender, so its room's number could not be used again."""
    if hasattr(req.disagg_kv_sender, "prefixkv_begin"):
        req.disagg_kv_sender.clear()


def _around_capacity(original: Any, queue: Any, req: Any) -> bool:
    """Return whether decode can never admit a request; refuse it then. SGLang compares only the
    prompt with the pool here, but admits a request only where the tokens reserved for its output
    fit too. One in between would wait at the head of the queue for ever."""
    from prefixkv.engines.sglang import internals as sgl

    if original(queue, req):
        return True
    # A request that has run, and was retracted, fitted before.
    has_run = bool(req.output_ids) and not getattr(req, "pd_rebootstrap_in_progress", False)
    if has_run or not hasattr(queue.kv_manager, "decline"):
        return False
    length = queue._pre_alloc_fill_len(req)
    needed = queue._required_alloc_tokens(fill_len=length, prefix_len=0)
    needed += queue.num_reserved_decode_tokens
    size = queue.token_to_kv_pool_allocator.size
    if needed <= size:
        return False
    sgl.refuse_request(
        queue, req,
        f"request {req.rid} can never be admitted: its prompt of {length} tokens and "
        f"{queue.num_reserved_decode_tokens} reserved for output (--num-reserved-decode-tokens) "
        f"take {needed} tokens, decode's pool has {size}",
    )  # fmt: skip
    return True


def _around_normalize(original: Any, asked: Any, *args: Any, **named: Any) -> Any:
    """Refuse requests that cannot work before a room is opened, by the same rules on both servers.
    SGLang makes `n` requests of `n` samples, all with one room. Several prompts have a room each:
    as listed, or consecutive numbers."""
    from prefixkv.engines.sglang import internals as sgl

    result = original(asked, *args, **named)
    disagg = sgl.get_disagg()
    is_ours = disagg.disaggregation_transfer_backend == NAME and disagg.disaggregation_mode in (
        "prefill", "decode",
    )  # fmt: skip
    if is_ours and asked.parallel_sample_num > 1:
        raise ValueError(
            f"n is {asked.parallel_sample_num}: --disaggregation-transfer-backend {NAME} serves "
            "one sample of a request, since SGLang gives all of them one bootstrap_room"
        )
    if is_ours and asked.bootstrap_host != sgl.fake_host():  # that of its own health check
        _check_rooms(asked)
    return result


def _check_rooms(asked: Any) -> None:
    """Raise ValueError if `bootstrap_room` cannot be opened. SGLang refuses one without any."""
    # 1. The shape: one number, or a list with one per prompt. 2. Each number: in range, and once.
    rooms = asked.bootstrap_room
    if not isinstance(rooms, list):
        rooms = [rooms]
    elif asked.is_single:
        raise ValueError("bootstrap_room is a list, and there is one prompt: a number is needed")
    for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port"):
        given = getattr(asked, name)
        if isinstance(given, list) and len(given) != asked.batch_size:
            raise ValueError(f"{name} has {len(given)} entries for {asked.batch_size} prompts")
    if all(room is None for room in rooms):
        return
    for room in rooms:
        if type(room) is not int or room not in ROOMS:
            raise ValueError(f"bootstrap_room is {room}, not a number from 1 to 2**63 - 1")
    if len({*rooms}) != len(rooms):
        raise ValueError(f"bootstrap_room has a number twice: {rooms}")


def _in_host_memory(_original: Any, _kinds: Any, expected_len: int) -> list[str]:
    # SGLang's NIXL backend says VRAM even on a CPU.
    return ["DRAM"] * expected_len


def _enabled_cache(cache: Any) -> Any:
    from prefixkv.engines.sglang.cache import PrefixKVCache

    return cache if isinstance(cache, PrefixKVCache) and not cache.disable else None


def _admission() -> str:
    name = os.environ.get("PREFIXKV_ADMISSION", "hit_aware")
    if name not in ("fifo", "hit_aware"):
        raise ConfigError(f"PREFIXKV_ADMISSION is {name!r}, not one of fifo, hit_aware")
    return name


def _number(name: str, default: float) -> float:
    """Raises ConfigError for a text that is no number, or one below 0."""
    text = os.environ.get(name) or default
    with suppress(ValueError):
        if (number := float(text)) >= 0:
            return number
    raise ConfigError(f"{name} is {text!r}, a number of at least 0 is needed")
