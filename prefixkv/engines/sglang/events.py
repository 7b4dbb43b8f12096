"""The tree's changes as SGLang's cache events.

A page's hash is SHA-256 of the hash before it and the page's tokens, or pairs, of four bytes each.
The first page of a salted request follows a hash of the salt. Source: SGLang 0.5.23
`mem_cache/utils.py`, `mem_cache/cpp_utils/hash_binding.cpp`, `mem_cache/events.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import sha256
from typing import Any

import numpy as np

from prefixkv.engines.sglang.internals import (
    BlockRemoved,
    BlockStored,
    KVCacheEventRecorder,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from prefixkv.engines.sglang.keys import TOKEN_WORDS
from prefixkv.spi import NO_PARENT, Change, Cleared, PagePaths, PageRef, Removed, Stored

_HASH_BYTES = 8


def hash_page(before: bytes, page_tokens: bytes) -> bytes:
    """Return the hash of a page of tokens."""
    return sha256(before + np.frombuffer(page_tokens, np.int64).astype("<i4").tobytes()).digest()


def hash_pairs(before: bytes, page_pairs: bytes) -> bytes:
    """Return the hash of a page of a tree that is keyed by pairs."""
    return sha256(before + page_pairs).digest()


def before_first(namespace: Hashable) -> bytes:
    _, salt = _parts(namespace)
    if salt is None:
        return NO_PARENT
    return sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()


def _parts(namespace: Hashable) -> tuple[str | None, str | None]:
    return namespace if isinstance(namespace, tuple) else (None, None)


class EventTranslator:
    """Gives SGLang's recorder the events; it joins neighbouring ones."""

    def __init__(self, recorder: KVCacheEventRecorder, page_size: int, bigram: bool) -> None:
        self._recorder = recorder
        self._page_size = page_size
        self._bigram = bigram
        self._paths = PagePaths(
            TOKEN_WORDS * page_size, keep_tokens=True,
            hash_page=hash_pairs if bigram else hash_page, before_first=before_first,
        )  # fmt: skip

    def record(self, changes: Iterable[Change]) -> None:
        # The order matters: a removal is looked up among the pages that were inserted before.
        for change in changes:
            for kind, run in self._paths.told(change):
                if kind is Stored:
                    self._stored(run)
                elif kind is Removed:
                    self._removed(run)
                elif kind is Cleared:
                    self._recorder.record_all_cleared()
                # SGLang's events have no words for checkpoints, and its tree here has none.

    def _stored(self, run: list[PageRef]) -> None:
        extra_key, salt = _parts(run[0].namespace)
        names = self._recorder.lora_names
        dynamo = self._recorder.dynamo_format
        lora = names.resolve(extra_key) if dynamo else names.get(extra_key)
        # The first page of a path has no parent block, even if its hash follows that of a salt.
        seed = self._seed(run[0].namespace)
        parent = None if run[0].parent == NO_PARENT else self._block(run[0].parent, seed)
        for place in run:
            block = self._block(place.key, seed)
            self._recorder.enqueue(
                BlockStored(
                    block_hashes=[block],
                    parent_block_hash=parent,
                    token_ids=self._tokens(place.tokens),
                    block_size=self._page_size,
                    lora_id=None,
                    medium=StorageMedium.GPU,
                    cache_salt=salt,
                    session_id=None,
                    lora_name=lora,
                )
            )
            parent = block

    def _removed(self, run: list[PageRef]) -> None:
        seed = self._seed(run[0].namespace)
        blocks = [self._block(place.key, seed) for place in run]
        self._recorder.enqueue(BlockRemoved(block_hashes=blocks, medium=StorageMedium.GPU))

    def _seed(self, namespace: Hashable) -> bytes | None:
        # Outside Dynamo's format SGLang seeds by the adapter only: the salt is in the hash already.
        extra_key, salt = _parts(namespace)
        seed: bytes | None
        if self._recorder.dynamo_format:
            seed = kv_event_namespace_seed(extra_key=extra_key, cache_salt=salt)
        else:
            named = extra_key if self._recorder.lora_names.get(extra_key) is not None else None
            seed = kv_event_namespace_seed(extra_key=named, cache_salt=None)
        return seed

    def _block(self, key: bytes, seed: bytes | None) -> int:
        cut = int.from_bytes(key[:_HASH_BYTES], "big", signed=True)
        block: int = namespaced_block_hash(cut, namespace_seed=seed)
        return block

    def _tokens(self, packed: bytes) -> list[Any]:
        if not self._bigram:
            return np.frombuffer(packed, np.int64).tolist()  # type: ignore[no-any-return]
        return [tuple(pair) for pair in np.frombuffer(packed, "<i4").reshape(-1, 2).tolist()]
