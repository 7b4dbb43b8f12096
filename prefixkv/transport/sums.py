"""Checksums that go with the notifications of writes: of the pages that are written, as the source
has them."""

from __future__ import annotations

from prefixkv.memory.mesh import Shard
from prefixkv.memory.page_sums import PageSums, SumPlan
from prefixkv.paging import Pages
from prefixkv.protocol.ids import MAX_SUMS, ChunkTag
from prefixkv.transport.base import PeerMemory, RankMemory, Stamp, WriteJob


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
