"""What the parts of the scheduler's side share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prefixkv.engines.vllm.blocks import Holds
from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.orders import StepOrders
from prefixkv.engines.vllm.stats import Counters
from prefixkv.spi import secret_number


@dataclass(slots=True)
class Ledger:
    """Blocks that are held, counts, and the orders of the next step. Used in the engine's loop.

    Args:
        num_ranks: number of workers, each of which has a share of every block.
        draw: returns a new random ticket.
    """

    groups: BlockGroups
    num_ranks: int = 1
    draw: Callable[[], int] = secret_number
    now_s: Callable[[], float] = time.time
    holds: Holds = field(default_factory=Holds)
    counters: Counters = field(default_factory=Counters)
    orders: StepOrders = field(default_factory=StepOrders)
