"""Chunks that are looked at before they count as landed: the checksums of their notifications are
compared with the bytes of the pages that were promised. Pure.

A chunk is looked at by other threads (`LookAt`), once all of its parts have been notified. The
room's machine hears that it has landed when its pages have passed, so no room succeeds with a page
that was not looked at: each writer's notifications bring one checksum for each page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.decode.rooms import Landings, Room
from prefixkv.errors import ChecksumError, PageStateError
from prefixkv.memory.mesh import sent_share
from prefixkv.memory.page_sums import SumPlan
from prefixkv.memory.state_layout import state_blocks
from prefixkv.paging import Pages, unit_pages
from prefixkv.protocol.ids import SUM_BYTES, ChunkTag
from prefixkv.protocol.machine import Fail
from prefixkv.protocol.messages import Hello, HelloReply


class PageSpan(NamedTuple):
    """Pages of a group of a promise, -1 for the first layers' unit pages, and their checksums."""

    group: int
    pages: Pages
    sums: bytes


class LookAt(msgspec.Struct, frozen=True, eq=False):
    """Compare the checksums of these pages with their bytes, and answer PagesLookedAt. `what` names
    room, chunk and writer."""

    look_id: int
    plan: SumPlan
    spans: list[PageSpan]
    what: str


class PagesLookedAt(msgspec.Struct, frozen=True):
    """The answer to a LookAt; `error` is a ChecksumError, or what kept it from being done."""

    look_id: int
    error: Exception | None = None


def sum_plan(hello: Hello, reply: HelloReply) -> SumPlan | None:
    """Return what is summed of the pages that this rank writes to us; None: nothing."""
    writer = reply.rank
    writers, readers = reply.topology.mesh(reply.digest), hello.topology.mesh(hello.digest)
    share = sent_share(writers, writer, readers, hello.rank)
    if share is None:
        return None
    blocks = state_blocks(hello.digest.state, writers, writer, readers, hello.rank)
    return SumPlan(
        reply.checksum,
        share.inside(readers.shard(hello.rank)),
        min(hello.topology.page_size, reply.topology.page_size),
        tuple((block.dst_entry, block.dst_offset, block.num_bytes) for block in blocks),
    )


class _Checked:
    """A room with checksums: by rank, what is summed; notifications, by rank, chunk and part; and
    which pages have had a checksum, by rank and group."""

    def __init__(self, plans: dict[int, SumPlan]) -> None:
        self.plans = plans
        self.parts: defaultdict[tuple[int, int], dict[int, ChunkTag]] = defaultdict(dict)
        self.summed: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}


class PageLooks(Landings):
    """The looks under way."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._look_ids = count(1)
        self._under_way: dict[int, tuple[Room, list[ChunkTag]]] = {}

    def promised(self, room: Room) -> None:
        plans = {rank: link.checks for rank, link in room.links.items() if link.checks is not None}
        if plans:
            room.landing = _Checked(plans)

    def on_landed(self, room: Room, tag: ChunkTag, now_s: float) -> None:
        """Repeated, or of a room that has ended: no-op."""
        checked: _Checked | None = room.landing
        if checked is None or tag.rank not in checked.plans:
            super().on_landed(room, tag, now_s)
            return
        parts = checked.parts[tag.rank, tag.chunk]
        if tag.part in parts or room.poll.ended:
            return
        parts[tag.part] = tag
        if len(parts) != tag.num_parts:
            return
        tags = list(parts.values())
        try:
            spans = self._spans(room, checked, tags)
        except (ChecksumError, PageStateError, IndexError) as error:
            self._rooms.on(room, Fail(ChecksumError(f"{tag.what}: {error}")), now_s)
            return
        look_id = next(self._look_ids)
        self._under_way[look_id] = room, tags
        self._say(LookAt(look_id, checked.plans[tag.rank], spans, tag.what))

    def _spans(self, room: Room, checked: _Checked, tags: Iterable[ChunkTag]) -> list[PageSpan]:
        """Raise ChecksumError, PageStateError or IndexError for a chunk with pages without a
        checksum, with two, or that were not promised."""
        spans: list[PageSpan] = []
        num_sums = 0
        for tag in tags:
            pages, fold = room.promise.page_ids(), 1
            if tag.group < 0:
                fold = self._page_size // checked.plans[tag.rank].unit_tokens
            else:
                pages = room.promise.group_ids()[tag.group]
            end = tag.first + len(tag.sums) // SUM_BYTES
            spans.append(PageSpan(tag.group, unit_pages(pages, fold, tag.first, end), tag.sums))
            fresh = np.zeros(len(pages) * fold, np.bool_)
            summed = checked.summed.setdefault((tag.rank, tag.group), fresh)[tag.first : end]
            if summed.any():
                raise ChecksumError(f"pages {tag.first} to {end} of group {tag.group} come twice")
            summed[:] = True
            num_sums += len(summed)
        if num_sums != tag.num_pages:
            raise ChecksumError(f"{num_sums} checksums for {tag.num_pages} pages")
        return spans

    def on_looked_at(self, looked: PagesLookedAt, now_s: float) -> None:
        """Take the end of a look: the chunk has landed, or its room fails. Unknown: no-op."""
        room, tags = self._under_way.pop(looked.look_id, (None, []))
        if room is None or room.poll.ended or self._rooms.get(room.key) is not room:
            return
        if looked.error is not None:
            self._rooms.on(room, Fail(looked.error), now_s)
            return
        for tag in tags:
            super().on_landed(room, tag, now_s)


def _looked_at(control: DecodeControl, looked: PagesLookedAt, now_s: float) -> None:
    if isinstance(looks := control._landings, PageLooks):
        looks.on_looked_at(looked, now_s)


def install() -> None:
    DecodeControl.landings = PageLooks
    DecodeControl.INPUTS |= {PagesLookedAt: _looked_at}
