"""A check whether the head of decode's queue can be admitted, without locking its prefix.

SGLang tries the head of the queue at each step: it matches, locks, finds that the request does not
fit, and unlocks. A lock makes pages unevictable, so a request that does not fit before the lock
does not fit after it either.
"""

from __future__ import annotations

from typing import Any

from prefixkv.engines.sglang import internals as sgl
from prefixkv.engines.sglang.waiting import Depths
from prefixkv.spi import pages_for


def head_is_blocked(queue: Any, ready: list[Any], depths: Depths) -> bool:
    """Return whether the head of SGLang's decode queue, `ready[0]`, is next and does not fit.

    SGLang then tries no other request in this step.

    Args:
        ready: items of the queue that are not kept back, in order.
    """
    if not ready or not _head_decides(queue):
        return False
    # SGLang's own arithmetic, with the depth of the match in place of a lock. As in SGLang, every
    # running request counts as retractable.
    req, running = ready[0].req, queue.scheduler.running_batch.reqs
    page_size = queue.token_to_kv_pool_allocator.page_size
    pages = depths.of(req)[1]
    missing = pages_for(queue._pre_alloc_fill_len(req), page_size) - pages
    retractable = sum(len(one.origin_input_ids) + len(one.output_ids) for one in running)
    needed = queue._required_admission_tokens(
        req, missing * page_size, pages * page_size, retractable
    )
    room = queue._allocatable_token_budgets(retractable_tokens=retractable, count_retracted=True)
    return not queue._prealloc_reservation_fits(
        needed, 0, full_allocatable_tokens=room, swa_allocatable_tokens=None
    )


def _head_decides(queue: Any) -> bool:
    """Return whether a head that does not fit ends SGLang's pass over decode's queue.

    False where SGLang skips some requests, sorts the queue itself, or counts other kinds of memory.
    """
    scheduler, disagg = queue.scheduler, sgl.get_disagg()
    return (
        disagg.disaggregation_decode_enable_radix_cache
        and disagg.disaggregation_decode_host_receive_threshold >= 1
        and not scheduler.enable_lora
        and not scheduler.enable_priority_scheduling
        and not scheduler.enable_hisparse
        and not scheduler.enable_decode_hicache
        and not queue._uses_swa_reservation()
    )
