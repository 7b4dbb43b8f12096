"""Checksums of pages, where `TransportConfig.checksums` is on: prefill sends them, of the pages as
the source has them, with the notifications of its writes; decode compares them with the bytes that
have come, in threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from prefixkv.config import TransportConfig
from prefixkv.control.decode import looks
from prefixkv.control.decode.looks import LookAt, PagesLookedAt
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.page_sums import ALGORITHMS, PageSums, SumPlan
from prefixkv.paging import Pages
from prefixkv.protocol.ids import MAX_SUMS, ChunkTag
from prefixkv.runtime.copies import CopyOrder, CopyThreads
from prefixkv.transport.base import CHECKS, Checks, PeerMemory, RankMemory, Stamp, WriteJob


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


class SumStamp(Stamp):
    """The parts of a write share its pages among them, whichever bytes they move."""

    ahead = 1

    def __init__(self, ours: RankMemory, peer: PeerMemory) -> None:
        part = Shard.whole(ours.layout) if peer.parts is None else peer.parts[0]
        unit_tokens = min(ours.layout.page_size, peer.layout.page_size)
        blocks = () if peer.state is None else peer.state.blocks
        state = tuple((block.src_entry, block.src_offset, block.num_bytes) for block in blocks)
        plan = SumPlan(peer.checksum, part, unit_tokens, state)
        self._sums = PageSums(ours.layout, ours.state, plan)

    def least_parts(self, job: WriteJob) -> int:
        return -(-len(self._sums.checked(job.tag.group, _summed(job))) // MAX_SUMS)

    def put(self, job: WriteJob, tag: ChunkTag) -> ChunkTag:
        # Just before the part goes: its pages are in the caches then.
        pages = _summed(job)
        start, end = (len(pages) * nth // tag.num_parts for nth in (tag.part, tag.part + 1))
        share = self._sums.of(tag.group, pages[start:end])
        return tag._replace(first=tag.first + start, sums=share.tobytes())


def _summed(job: WriteJob) -> Pages:
    return job.src_pages if job.units is None else job.units
