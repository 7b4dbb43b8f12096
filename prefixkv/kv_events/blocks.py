"""Cache events in vLLM's format, which Dynamo and llm-d read, and TensorRT-LLM publishes.

A batch is `[time, [events], data-parallel rank]` as msgpack; a block is a page. Every field that
decoders demand is sent, null or not: one router drops a batch for one bad event. A block in two
kinds of memory is reported for each, by `medium`; AllBlocksCleared ends all that a worker holds. A
block's hash mixes its page key and namespace. It is never 0, which one consumer reads as "no
parent".

Source: vLLM 0.32 `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np

from prefixkv.cache.events import NO_PARENT, PageRef
from prefixkv.cache.namespace import Namespace
from prefixkv.digest import prompt_digest
from prefixkv.errors import RequestError, shown_namespace

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
        self._group = PAGES_GROUP if checkpoints else None

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

    def stored(self, run: list[PageRef]) -> BlockStored:
        group = (PAGES_GROUP, PAGES_KIND) if self.checkpoints else (None, None)
        return self._blocks(run, *group)

    def removed(self, run: list[PageRef]) -> BlockRemoved:
        """Return the event for a run of blocks, the last of them first."""
        # Children before parents, so that a consumer's tree never has a block without a parent.
        hashes = [self.hash(place.key, place.namespace) for place in reversed(run)]
        return BlockRemoved(hashes, self._medium, self._group)

    def checkpoint_stored(self, place: PageRef) -> BlockStored:
        """The event for a checkpoint at this page: a block with its hash and tokens."""
        return self._blocks([place], CHECKPOINTS_GROUP, CHECKPOINTS_KIND)

    def checkpoint_removed(self, place: PageRef) -> BlockRemoved:
        hashes = [self.hash(place.key, place.namespace)]
        return BlockRemoved(hashes, self._medium, CHECKPOINTS_GROUP)

    def cleared(self) -> AllBlocksCleared:
        return AllBlocksCleared()

    def _blocks(self, run: list[PageRef], group: int | None, kind: str | None) -> BlockStored:
        first = run[0]
        named = first.namespace
        hashes = [self.hash(place.key, named) for place in run]
        # A run has one namespace, so its parent's hash is mixed with the same.
        parent = None if first.parent == NO_PARENT else self.hash(first.parent, named)
        tokens = np.frombuffer(b"".join([place.tokens for place in run]), _LE_INT32).tolist()
        fixed = hashes, parent, tokens, self._page_size, None, self._medium
        if not isinstance(named, Namespace):
            return BlockStored(*fixed, None, None, None, group, kind)
        keys = [self._extra_keys(named, place.number) for place in run]
        return BlockStored(*fixed, named.lora, keys, named.salt, group, kind)

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
