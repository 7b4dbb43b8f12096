"""One worker's cache events as numbered batches: the latest, and the state they add up to.

Numbers are dense and begin at `first_seq`, above those of every former life of the worker. A
request for a batch that is no longer kept gets a *snapshot*: one batch with AllBlocksCleared and
all blocks, under the number of the last batch in it. The pool and host memory are *tiers*: they
share the numbers, and differ by their medium.

Events are in vLLM's format, which Dynamo and llm-d read, and TensorRT-LLM publishes. A batch is
`[time, [events], data-parallel rank]` as msgpack; a block is a page. Every field that decoders
demand is sent, null or not: one router drops a batch for one bad event. A block in two kinds of
memory is reported for each, by `medium`; AllBlocksCleared ends all that a worker holds. A block's
hash mixes its page key and namespace. It is never 0, which one consumer reads as "no parent".

Source: vLLM 0.32 `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from prefixkv.cache.events import (
    NO_PARENT,
    CacheEvent,
    Change,
    CheckpointRemoved,
    CheckpointStored,
    Cleared,
    PagePaths,
    PageRef,
    Removed,
    Stored,
)
from prefixkv.cache.radix_key import Namespace
from prefixkv.digest import prompt_digest
from prefixkv.errors import RequestError, check_laws, shown_namespace

HASH_BYTES = 8

# Groups of vLLM's events, where checkpoints are told of. Computing can go on behind a block of the
# second group and nowhere else. So it is with a block of Mamba's in vLLM, and with a checkpoint
# here, whether it has a state or the pages of a window. A window's own pages are not told of: two
# checkpoints may have those of a third place between them, at which computing cannot go on.
PAGES_GROUP: Final = 0
PAGES_KIND: Final = "full_attention"
CHECKPOINTS_GROUP: Final = 1
CHECKPOINTS_KIND: Final = "mamba"
_LE_INT32 = np.dtype("<i4")


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Event: the cache is empty."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Event: blocks were stored."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    cache_salt: str | None = None
    """A field that vLLM does not have: Dynamo mixes it into the hashes of all blocks, and looks
    there first. vLLM's own consumers ignore it."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Event: blocks were removed."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class BlockEvents:
    """Cache events in vLLM's format. Hashes are unsigned: the last 8 bytes of page keys.

    `medium`: where the KV is, in the format's own terms. `checkpoints`: tell of checkpoints as
    well, as blocks of a group of their own.
    """

    host_medium = "CPU"
    """The format's word for a worker's host memory."""

    def __init__(self, page_size: int, medium: str, checkpoints: bool = False) -> None:
        self._page_size = page_size
        self._medium = medium
        self.checkpoints = checkpoints
        self._pages = (PAGES_GROUP, PAGES_KIND) if checkpoints else (None, None)

    def check(self, namespace: Hashable) -> None:
        """Raise RequestError for a namespace that is neither None nor a `Namespace`."""
        if namespace is not None and type(namespace) is not Namespace:
            raise RequestError(
                f"namespace is {shown_namespace(namespace)}, which cache events have no words for: "
                'None, or a Namespace(lora="..."), Namespace(salt="...") is needed'
            )

    def hash(self, key: bytes, namespace: Hashable) -> int:
        cut = int.from_bytes(key[-HASH_BYTES:])
        return (cut ^ _namespace_mask(namespace) if namespace is not None else cut) or 1

    def event(self, kind: type[CacheEvent], run: list[PageRef]) -> object:
        """Return the event of this kind about a run of blocks. A checkpoint is a block with the
        hash and tokens of the page that it ends on."""
        if kind is Cleared:
            return AllBlocksCleared()
        is_checkpoint = kind in (CheckpointStored, CheckpointRemoved)
        group, spec_kind = (CHECKPOINTS_GROUP, CHECKPOINTS_KIND) if is_checkpoint else self._pages
        # A run has one namespace, so its parent's hash is mixed with the same.
        first, named = run[0], run[0].namespace
        hashes = [self.hash(place.key, named) for place in run]
        if kind in (Removed, CheckpointRemoved):
            # Children before parents, so that a consumer's tree never has a block without a parent.
            return BlockRemoved(hashes[::-1], self._medium, group)
        parent = None if first.parent == NO_PARENT else self.hash(first.parent, named)
        tokens = np.frombuffer(b"".join([place.tokens for place in run]), _LE_INT32).tolist()
        fixed = hashes, parent, tokens, self._page_size, None, self._medium
        if not isinstance(named, Namespace):
            return BlockStored(*fixed, None, None, None, group, spec_kind)
        keys = [self._extra_keys(named, place.number) for place in run]
        return BlockStored(*fixed, named.lora, keys, named.salt, group, spec_kind)

    def _extra_keys(self, named: Namespace, number: int) -> tuple[Any, ...] | None:
        """What tells a block apart beside its tokens: the adapter, images in it with their start
        relative to its first token, and, for the first block, the salt."""
        keys: list[Any] = [] if named.lora is None else [named.lora]
        start = number * self._page_size
        end = start + self._page_size
        for image in named.images:
            # Every block that an image overlaps; the start is negative where it began in an earlier
            # one.
            if image.start < end and start < image.start + image.length:
                keys.append((image.identifier, image.start - start))
        # Only the first block has it: all others follow from that one by their parents.
        if named.salt is not None and not number:
            keys.append(named.salt)
        return tuple(keys) or None


@lru_cache(4096)
def _namespace_mask(namespace: Hashable) -> int:
    # Cached, as it is needed for every block. Derived from the digest that peers compare, so all
    # workers mix a namespace alike.
    digest = blake2b(prompt_digest((), namespace), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest)


BATCH_PAGES = 4096
"""Pages after which a batch ends; the event that reaches it is still part of it."""


class Keep(NamedTuple):
    batches: int
    num_bytes: int


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
        keep: the most that is kept for repeats; a longer batch is not kept.
        host: the format of events for the cache in host memory, tier 1; None: there is none.
    """

    def __init__(
        self,
        page_size: int,
        blocks: BlockEvents,
        rank: int,
        first_seq: int,
        keep: Keep,
        host: BlockEvents | None = None,
    ) -> None:
        self.blocks = blocks
        self.next_seq = first_seq
        self.kept_bytes = 0
        self._rank = rank
        self._keep = keep
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
        events: list[object] = []
        num_pages = 0
        for event, pages in self._events(changes, *self._tiers[tier]):
            events.append(event)
            num_pages += pages
            # Cut here, so that many changes at once do not make one very long message.
            if num_pages >= BATCH_PAGES:
                yield self._batch(events, ts)
                events, num_pages = [], 0
        if events:
            yield self._batch(events, ts)

    def _events(
        self, changes: Iterable[Change], blocks: BlockEvents, paths: PagePaths
    ) -> Iterator[tuple[object, int]]:
        """Yield each event, and of how many pages it tells."""
        for change in changes:
            if isinstance(change, Cleared) and self.num_pages > len(paths):
                # The one event for it would end what the other tier holds as well. From the end, so
                # that what follows a page goes before it.
                runs, checkpoints = list(paths.runs()), paths.saves
                paths.clear()
                for place in checkpoints if blocks.checkpoints else ():
                    yield blocks.event(CheckpointRemoved, [place]), 1
                for run in reversed(runs):
                    yield blocks.event(Removed, run), len(run)
                continue
            for kind, run in paths.told(change):
                if blocks.checkpoints or kind not in (CheckpointStored, CheckpointRemoved):
                    yield blocks.event(kind, run), len(run)

    def clear(self, ts: float) -> Batch:
        """Make a batch that says that no tier holds anything."""
        for _, paths in self._tiers:
            paths.clear()
        return self._batch([AllBlocksCleared()], ts)

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
            events: list[object] = [AllBlocksCleared()]
            for blocks, paths in self._tiers:
                events += [blocks.event(Stored, run) for run in paths.runs()]
                if blocks.checkpoints:
                    events += [blocks.event(CheckpointStored, [place]) for place in paths.saves]
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
        while len(self._kept) > self._keep.batches or self.kept_bytes > self._keep.num_bytes:
            oldest = next(iter(self._kept))
            self.kept_bytes -= len(self._kept.pop(oldest))
        return batch

    def check_invariants(self) -> None:
        """Raise InternalError unless the kept batches are the latest, gapless, within bounds."""
        kept = list(self._kept)
        laws = {
            "what is kept has no gap": kept
            == list(range(self.next_seq - len(kept), self.next_seq)),
            "no more batches are kept than may be": len(kept) <= self._keep.batches,
            "no more bytes are kept than may be": self.kept_bytes <= self._keep.num_bytes,
            "kept bytes are counted": self.kept_bytes == sum(map(len, self._kept.values())),
        }
        check_laws(laws, f"{len(kept)} batches before {self.next_seq}, {self.kept_bytes} bytes")
