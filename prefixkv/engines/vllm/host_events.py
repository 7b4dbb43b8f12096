"""Cache events of vLLM's host memory: which blocks came there, and which have gone.

The host's tree knows a block by its name. vLLM's hashes and the tokens, which an event says
besides, are kept from when a request leaves the block until host memory has lost it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from prefixkv.spi import Inserted, RadixCache, RadixKey, TakenOut

_MOST_LEFT: Final = 1 << 16
"""Blocks that were left and are not in host memory; most are there soon, some never come."""


class HostBlock(NamedTuple):
    block_hash: bytes
    parent: bytes | None
    tokens: bytes  # packed as int32
    adapter: Any  # of LoRA, as vLLM has it
    extra_keys: tuple[Any, ...] | None  # what tells the block apart beside its tokens


class HostEvent(NamedTuple):
    """Blocks that are in host memory from now on (`is_stored`), one behind the other on a path; or
    that are not there any more."""

    is_stored: bool
    blocks: list[HostBlock]

    @property
    def hashes(self) -> list[bytes]:
        return [block.block_hash for block in self.blocks]

    @property
    def tokens(self) -> list[int]:
        packed = b"".join(block.tokens for block in self.blocks)
        tokens: list[int] = np.frombuffer(packed, np.int32).tolist()
        return tokens


class HostEvents:
    """The events of one server. Owned by its engine loop. `name_bytes`: of a block's name."""

    def __init__(self, cache: RadixCache, name_bytes: int) -> None:
        self._cache, self._changes, self._name_bytes = cache, cache.record(), name_bytes
        self._left: OrderedDict[bytes, HostBlock] = OrderedDict()  # by name: not there yet
        self._there: dict[int, HostBlock] = {}  # by host page

    def left(
        self, key: RadixKey, hashes: Sequence[bytes], tokens: Sequence[int], request: Any
    ) -> None:
        """Note what is to be said of blocks, named by `key`, once they are in host memory. Their KV
        is that of the `tokens`."""
        size = self._name_bytes
        packed = np.asarray(tokens, np.int32).reshape(len(hashes), -1)
        adapter, num_tokens = request.lora_request, packed.shape[1]
        for i in range(self._cache.match_prefix(key).depth, len(hashes)):
            parent = hashes[i - 1] if i else None
            name = key.data[i * size : (i + 1) * size]
            keys = _extra_keys(request, i * num_tokens, (i + 1) * num_tokens)
            self._left[name] = HostBlock(hashes[i], parent, packed[i].tobytes(), adapter, keys)
            self._left.move_to_end(name)
        while len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)

    def take(self) -> list[HostEvent]:
        events: list[HostEvent] = []
        for change in self._changes.take():
            if isinstance(change, Inserted):
                events += self._stored(change)
            elif isinstance(change, TakenOut):
                events += self._removed(np.frombuffer(b"".join(change.runs), np.int32).tolist())
            else:
                events += self._removed(list(self._there))
        return events

    def _stored(self, change: Inserted) -> list[HostEvent]:
        """More than one event where what is said of some blocks has been forgotten."""
        size, runs = self._name_bytes, list[list[HostBlock]]()
        for i, page in enumerate(np.frombuffer(change.pages, np.int32).tolist()):
            block = self._left.pop(change.tokens[i * size : (i + 1) * size], None)
            if block is not None:
                self._there[page] = block
                if not runs or runs[-1][-1].block_hash != block.parent:
                    runs.append([])
                runs[-1].append(block)
        return [HostEvent(True, run) for run in runs]

    def _removed(self, pages: Sequence[int]) -> list[HostEvent]:
        gone = [block for page in pages if (block := self._there.pop(page, None)) is not None]
        return [HostEvent(False, gone)] if gone else []


def _extra_keys(request: Any, start: int, end: int) -> tuple[Any, ...] | None:
    """Return what vLLM keys the block of these tokens by besides, in the words of its events."""
    adapter, salt = request.lora_request, None if start else request.cache_salt
    keys = [] if adapter is None else [adapter.lora_name]
    for one in request.mm_features:
        at = one.mm_position
        if at.offset < end and start < at.offset + at.length:
            keys.append((one.identifier, at.offset - start))
    return (*keys, *([salt] if salt else [])) or None
