"""One worker's cache events as numbered batches, the latest of them kept, and what they add up to.

Numbers are dense and begin at `first_seq`, which is above that of every former life of the worker:
so a router that was away sees a gap, asks for what it missed, and is given what there is instead.
Whatever is asked for that is kept no more is answered by a *snapshot*: one batch that begins with
AllBlocksCleared and holds all blocks. It has the number of the last batch that it contains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, assert_never

import msgspec

from prefixkv.cache.events import Change, Cleared, Inserted, PagePaths, TakenOut
from prefixkv.errors import check_laws
from prefixkv.kv_events.dialects import Dialect

BATCH_PAGES = 4096
"""A batch ends with the change that makes it this long."""


class Batch(NamedTuple):
    """A number, and msgpack."""

    seq: int
    payload: bytes


class EventStream:
    """See the module's text. One owner; no clock, no sockets.

    Args:
        page_size: tokens a page.
        dialect: how events are worded.
        rank: the data-parallel rank that batches name.
        first_seq: the number of the first batch.
        keep_batches, keep_bytes: how much is kept, at most; a batch that is longer is not kept.
    """

    def __init__(
        self,
        page_size: int,
        dialect: Dialect,
        rank: int,
        first_seq: int,
        keep_batches: int,
        keep_bytes: int,
    ) -> None:
        self.dialect = dialect
        self.next_seq = first_seq
        self.kept_bytes = 0
        self._rank = rank
        self._keep_batches = keep_batches
        self._keep_bytes = keep_bytes
        self._kept: dict[int, bytes] = {}  # by number, without a gap up to the newest
        self._paths = PagePaths(page_size, keep_tokens=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._snapshot: Batch | None = None

    @property
    def num_pages(self) -> int:
        """Held by the cache, as far as was told."""
        return len(self._paths)

    def publish(self, changes: Iterable[Change], ts: float) -> Iterator[Batch]:
        """Batches that tell of these changes, as they are made; none if there are none."""
        events, num_pages = [], 0
        for change in changes:
            match change:
                case Inserted():
                    run = self._paths.inserted(change)
                    events.append(self.dialect.stored(run))
                    num_pages += len(run)
                case TakenOut():
                    for run in self._paths.taken_out(change):
                        events.append(self.dialect.removed(run))
                        num_pages += len(run)
                case Cleared():
                    self._paths.clear()
                    events.append(self.dialect.cleared())
                case _:
                    assert_never(change)
            if num_pages >= BATCH_PAGES:
                yield self._batch(events, ts)
                events, num_pages = [], 0
        if events:
            yield self._batch(events, ts)

    def heartbeat(self, ts: float) -> Batch:
        """A batch without events: who missed the last one sees it by this one's number."""
        return self._batch([], ts)

    def since(self, seq: int, ts: float) -> Batch | None:
        """The batch with this number, or what takes its place: a snapshot, where it is not kept.
        None: that is the next one, and nothing is missing."""
        if seq == self.next_seq:
            return None
        if (payload := self._kept.get(seq)) is not None:
            return Batch(seq, payload)
        return self.snapshot(ts)

    def snapshot(self, ts: float) -> Batch:
        """All there is, in one batch. It goes on with the number after its own. O(pages), and O(1)
        again until something is published."""
        if self._snapshot is None or self._snapshot.seq != self.next_seq - 1:
            events = [self.dialect.cleared(), *map(self.dialect.stored, self._paths.runs())]
            payload = self._encode([ts, events, self._rank])
            self._snapshot = Batch(self.next_seq - 1, payload)
        return self._snapshot

    def _batch(self, events: list[object], ts: float) -> Batch:
        payload = self._encode([ts, events, self._rank])
        batch = Batch(self.next_seq, payload)
        self.next_seq += 1
        self._kept[batch.seq] = payload
        self.kept_bytes += len(payload)
        while len(self._kept) > self._keep_batches or self.kept_bytes > self._keep_bytes:
            oldest = next(iter(self._kept))
            self.kept_bytes -= len(self._kept.pop(oldest))
        return batch

    def check_invariants(self) -> None:
        """Raises InternalError for a law that does not hold."""
        kept = list(self._kept)
        laws = {
            "what is kept has no gap": kept
            == list(range(self.next_seq - len(kept), self.next_seq)),
            "no more batches are kept than may be": len(kept) <= self._keep_batches,
            "no more bytes are kept than may be": self.kept_bytes <= self._keep_bytes,
            "kept bytes are counted": self.kept_bytes == sum(map(len, self._kept.values())),
        }
        check_laws(laws, f"{len(kept)} batches before {self.next_seq}, {self.kept_bytes} bytes")
