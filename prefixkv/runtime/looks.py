"""Checksums of promised pages compared with their bytes, in threads of their own: on decode, where
`TransportConfig.checksums` is on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from prefixkv.config import TransportConfig
from prefixkv.control.decode import looks
from prefixkv.control.decode.looks import LookAt, PagesLookedAt
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.page_sums import ALGORITHMS, PageSums, SumPlan
from prefixkv.runtime.copies import CopyOrder, CopyThreads
from prefixkv.transport.base import CHECKS, Checks, RankMemory
from prefixkv.transport.sums import SumStamp


class LookThreads(CopyThreads):
    """Given looks and closed by the control thread. Each ends with one PagesLookedAt to the sink,
    with the first error."""

    def __init__(
        self, memory: RankMemory, config: TransportConfig, name: str,
        sink: Callable[[PagesLookedAt], None],
    ) -> None:  # fmt: skip
        super().__init__(config.copy_threads, "cpu", f"look-{name}")
        self._sink = sink
        self.effects = {LookAt: self.submit}
        # By plan: tables of the whole pool, built at most a few times.
        self._sums = cache(partial(PageSums, memory.layout, memory.state))

    def submit(self, look: LookAt) -> None:
        """Raises ClosedError after `close`."""

        def compare(start: int, stop: int) -> None:
            sums = self._sums(look.plan)
            for span in look.spans[start:stop]:
                sums.check(*span, look.what)

        def ended(order: CopyOrder) -> None:
            self._sink(PagesLookedAt(look.look_id, order.error))

        # A part of the chunk is a piece, so threads share a large one.
        self.put(CopyOrder(compare, ended, len(look.spans)))


def _reader(layout: KVLayout, algorithm: str, part: Shard, unit_tokens: int) -> PageSums:
    return PageSums(layout, None, SumPlan(algorithm, part, unit_tokens))


def install() -> None:
    parts = tuple(ALGORITHMS), SumStamp, looks.sum_plan, _reader, LookThreads
    CHECKS[:] = [Checks("checksums", *parts)]
    looks.install()
