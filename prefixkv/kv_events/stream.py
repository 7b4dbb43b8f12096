"""One worker's cache events as numbered batches: the latest, and the state they add up to.

Numbers are dense and begin at `first_seq`, above those of every former life of the worker. A
request for a batch that is no longer kept gets a *snapshot*: one batch with AllBlocksCleared and
all blocks, under the number of the last batch in it. The pool and host memory are *tiers*: they
share the numbers, and differ by their medium.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, assert_never

import msgspec

from prefixkv.cache.events import (
    Change,
    CheckpointEvicted,
    CheckpointSaved,
    Cleared,
    Inserted,
    PagePaths,
    TakenOut,
)
from prefixkv.errors import check_laws
from prefixkv.kv_events.blocks import BlockEvents

BATCH_PAGES = 4096
"""Pages after which a batch ends; the change that reaches it is still part of it."""


class Batch(NamedTuple):
    """A batch's number, and its msgpack."""

    seq: int
    payload: bytes


class _Tier(NamedTuple):
    """One cache of the worker's, as published: the words for it, and what it holds."""

    blocks: BlockEvents
    paths: PagePaths


class EventStream:
    """Batches of one worker's events. One owner; no clock, no sockets.

    Args:
        rank: data-parallel rank that batches name.
        first_seq: number of the first batch.
        keep_batches, keep_bytes: most that is kept for repeats; a longer batch is not kept.
        host: the format of events for the cache in host memory, tier 1; None: there is none.
    """

    def __init__(
        self,
        page_size: int,
        blocks: BlockEvents,
        rank: int,
        first_seq: int,
        keep_batches: int,
        keep_bytes: int,
        host: BlockEvents | None = None,
    ) -> None:
        self.blocks = blocks
        self.next_seq = first_seq
        self.kept_bytes = 0
        self._rank = rank
        self._keep_batches = keep_batches
        self._keep_bytes = keep_bytes
        self._kept: dict[int, bytes] = {}  # by number, without a gap up to the newest batch
        tiers = [blocks] if host is None else [blocks, host]
        self._tiers = [_Tier(one, PagePaths(page_size, keep_tokens=True)) for one in tiers]
        self._encode = msgspec.msgpack.Encoder().encode
        # The latest snapshot; good as long as its number is the newest batch's.
        self._snapshot: Batch | None = None

    @property
    def num_pages(self) -> int:
        """Number of pages that the caches hold, by the events so far."""
        return sum(len(paths) for _, paths in self._tiers)

    def publish(self, changes: Iterable[Change], ts: float, tier: int = 0) -> Iterator[Batch]:
        """Yield numbered batches for this tier's changes as they are made, if there are any."""
        blocks, paths = self._tiers[tier]
        events: list[object] = []
        num_pages = 0
        for change in changes:
            # `paths` follows each change in the same step, so it always equals what was published.
            match change:
                case Inserted():
                    run = paths.inserted(change)
                    events.append(blocks.stored(run))
                    num_pages += len(run)
                case CheckpointSaved() | CheckpointEvicted() if not blocks.checkpoints:
                    pass
                case CheckpointSaved():
                    events.append(blocks.checkpoint_stored(paths.saved(change)))
                    num_pages += 1
                case CheckpointEvicted():
                    events += map(blocks.checkpoint_removed, paths.evicted(change))
                    num_pages += 1
                case TakenOut():
                    # A checkpoint goes before the page that it ends on.
                    events += map(blocks.checkpoint_removed, paths.evicted(change))
                    for run in paths.taken_out(change):
                        events.append(blocks.removed(run))
                        num_pages += len(run)
                case Cleared() if self.num_pages == len(paths):
                    paths.clear()
                    events.append(blocks.cleared())
                case Cleared():
                    # The one event for it would end what the other tier holds as well. From the
                    # end, so that what follows a page goes before it.
                    runs = list(paths.runs())
                    events += map(blocks.checkpoint_removed, paths.checkpoints)
                    paths.clear()
                    for run in reversed(runs):
                        events.append(blocks.removed(run))
                        num_pages += len(run)
                        if num_pages >= BATCH_PAGES:
                            yield self._batch(events, ts)
                            events, num_pages = [], 0
                case _:
                    assert_never(change)
            # Cut here, so that many changes at once do not make one very long message.
            if num_pages >= BATCH_PAGES:
                yield self._batch(events, ts)
                events, num_pages = [], 0
        if events:
            yield self._batch(events, ts)

    def clear(self, ts: float) -> Batch:
        """Make a batch that says that no tier holds anything."""
        for _, paths in self._tiers:
            paths.clear()
        return self._batch([self.blocks.cleared()], ts)

    def heartbeat(self, ts: float) -> Batch:
        """Make a batch without events. Its number shows what a router has missed."""
        return self._batch([], ts)

    def since(self, seq: int, ts: float) -> Batch | None:
        """Return the batch with this number, or a snapshot if it is no longer kept. None if it is
        the next number: nothing is missing."""
        if seq == self.next_seq:
            return None
        if (payload := self._kept.get(seq)) is not None:
            return Batch(seq, payload)
        # Also for a number that is not reached yet: only a snapshot puts that router right.
        return self.snapshot(ts)

    def snapshot(self, ts: float) -> Batch:
        """Return one batch that adds up to all that the caches hold; the batch after it has the
        next number. O(pages), then O(1) until something is published."""
        if self._snapshot is None or self._snapshot.seq != self.next_seq - 1:
            events: list[object] = [self.blocks.cleared()]
            for blocks, paths in self._tiers:
                events += map(blocks.stored, paths.runs())
                events += map(blocks.checkpoint_stored, paths.checkpoints)
            payload = self._encode([ts, events, self._rank])
            self._snapshot = Batch(self.next_seq - 1, payload)
        return self._snapshot

    def _batch(self, events: list[object], ts: float) -> Batch:
        payload = self._encode([ts, events, self._rank])
        batch = Batch(self.next_seq, payload)
        self.next_seq += 1
        self._kept[batch.seq] = payload
        self.kept_bytes += len(payload)
        # The oldest go first, so what is kept has no gap. The new one goes too if it alone is too
        # long.
        while len(self._kept) > self._keep_batches or self.kept_bytes > self._keep_bytes:
            oldest = next(iter(self._kept))
            self.kept_bytes -= len(self._kept.pop(oldest))
        return batch

    def check_invariants(self) -> None:
        """Raise InternalError unless the kept batches are the latest, gapless, within bounds."""
        kept = list(self._kept)
        laws = {
            "what is kept has no gap": kept
            == list(range(self.next_seq - len(kept), self.next_seq)),
            "no more batches are kept than may be": len(kept) <= self._keep_batches,
            "no more bytes are kept than may be": self.kept_bytes <= self._keep_bytes,
            "kept bytes are counted": self.kept_bytes == sum(map(len, self._kept.values())),
        }
        check_laws(laws, f"{len(kept)} batches before {self.next_seq}, {self.kept_bytes} bytes")
