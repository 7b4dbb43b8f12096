"""Chunks that are looked at before they count as landed: the checksums of their notifications are
compared with the bytes of the pages that were promised. Pure.

A chunk is looked at by other threads (`LookAt`), once all of its parts have been notified. The
room's machine hears that it has landed when its pages have passed, so no room succeeds with a page
that was not looked at: each writer's notifications bring one checksum for each page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np

from prefixkv.control.decode.rooms import ReceiverRooms, Room
from prefixkv.control.effects import LookAt, PagesLookedAt, PageSpan
from prefixkv.errors import ChecksumError, PageStateError
from prefixkv.paging import unit_pages
from prefixkv.protocol.ids import SUM_BYTES, ChunkTag
from prefixkv.protocol.machine import Fail
from prefixkv.protocol.receiver_machine import ChunkLanded


class PageLooks:
    """The looks under way. Owned by a `DecodeControl`."""

    def __init__(self, rooms: ReceiverRooms, page_size: int, say: Callable[[Any], None]) -> None:
        self._rooms = rooms
        self._page_size = page_size
        self._say = say
        self._look_ids = count(1)
        self._under_way: dict[int, tuple[Room, list[ChunkTag]]] = {}

    def on_landed(self, room: Room, tag: ChunkTag, now_s: float) -> None:
        """Take the notification of a part. Repeated, or of a room that has ended: no-op."""
        parts = room.parts.setdefault((tag.rank, tag.chunk), {})
        if tag.part in parts or room.poll.ended:
            return
        parts[tag.part] = tag
        if len(parts) != tag.num_parts:
            return
        tags = list(parts.values())
        try:
            spans = self._spans(room, tags)
        except (ChecksumError, PageStateError, IndexError) as error:
            self._rooms.on(room, Fail(ChecksumError(f"{tag.what}: {error}")), now_s)
            return
        look_id = next(self._look_ids)
        self._under_way[look_id] = room, tags
        self._say(LookAt(look_id, room.sums[tag.rank], spans, tag.what))

    def _spans(self, room: Room, tags: Iterable[ChunkTag]) -> list[PageSpan]:
        """Raise ChecksumError, PageStateError or IndexError for a chunk with pages without a
        checksum, with two, or that were not promised."""
        spans: list[PageSpan] = []
        num_sums = 0
        for tag in tags:
            pages, fold = room.promise.page_ids(), 1
            if tag.group < 0:
                fold = self._page_size // room.sums[tag.rank].unit_tokens
            else:
                pages = room.promise.group_ids()[tag.group]
            end = tag.first + len(tag.sums) // SUM_BYTES
            spans.append(PageSpan(tag.group, unit_pages(pages, fold, tag.first, end), tag.sums))
            fresh = np.zeros(len(pages) * fold, np.bool_)
            summed = room.summed.setdefault((tag.rank, tag.group), fresh)[tag.first : end]
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
            self._rooms.on(room, ChunkLanded.of(tag), now_s)
