"""Host memory behind vLLM's blocks: what vLLM evicts stays there, and comes back at admission.

The tier is `HostTier`; it sees vLLM's blocks through `DeviceBlocks`. In the host's tree a block has
vLLM's own hash, which covers all tokens to its end, LoRA adapter, cache salt and images.

    write   at a request's end: its cached blocks are due, and referenced until the copy has ended
            (`Holds`), so that vLLM gives none of them away
    load    at admission: the blocks behind vLLM's hit are filled, and vLLM waits for the load

`HostEvents` says which blocks came there, and which have gone.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from prefixkv.engines.vllm.blocks import Flights, Holds
from prefixkv.engines.vllm.orders import CopyOrder
from prefixkv.errors import UserErrors
from prefixkv.settings import Continues
from prefixkv.spi import HostCopyDone, HostTier, Inserted, Pages, RadixCache, RadixKey, TakenOut
from prefixkv.transfer import RoomKey

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
    """The events of one server. Owned by its engine loop. `name_bytes`: of a block's name.

    The tree knows a block by its name. vLLM's hashes and the tokens, which an event says besides,
    are kept from when a request leaves the block until host memory has lost it.
    """

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


_log = logging.getLogger("vllm.prefixkv")

NAME_BYTES: Final = 16
"""Bytes of a block's name in the host's tree."""
_NAME_TOKENS: Final = NAME_BYTES // 4
"""Tokens of four bytes each, of which the tree is one, in whose place a name stands."""
_TOKEN_MASK: Final = 0x7FFF_FFFF


def key_of(hashes: Iterable[bytes]) -> RadixKey:
    # Of a hash 124 bits count: a token has 31.
    cut = b"".join([one[:NAME_BYTES].ljust(NAME_BYTES, b"\0") for one in hashes])
    return RadixKey.of_packed((np.frombuffer(cut, "<u4") & _TOKEN_MASK).tobytes())


def _names(key: RadixKey) -> Iterator[bytes]:
    data = key.data
    return (data[at : at + NAME_BYTES] for at in range(0, len(data), NAME_BYTES))


@dataclass(slots=True)
class _BlockPath:
    blocks: list[int]
    unprotected_pages: int

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def pages(self) -> Pages:
        return np.array(self.blocks, np.int32)


@dataclass(slots=True, eq=False)
class BlockLock:
    pages: Pages
    name: str  # of the references
    held: bool = True


class DeviceBlocks:
    """The block pool as the device of a `HostTier`. It knows where requests that have ended left
    their blocks, and asks vLLM whether each is still what it was. `epoch` counts the flushes, and
    `errors` has what a policy has raised."""

    page_size = _NAME_TOKENS

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self.errors = UserErrors(_log.error)
        self.epoch = 0
        # By name, and the inverse: the block, and vLLM's hash of it when it was left.
        self._left: dict[bytes, tuple[int, Hashable]] = {}
        self._name_of: dict[int, bytes] = {}
        self._ending: frozenset[int] = frozenset()
        self._num_locks = 0

    @property
    def available_pages(self) -> int:
        """Blocks that a request will let go of as it ends are among them."""
        return self._holds.num_free + len(self._ending)

    @property
    def may_load(self) -> bool:
        """vLLM bounds the loads by itself, since each takes its request's blocks."""
        return True

    def leave(self, key: RadixKey, blocks: Sequence[int]) -> None:
        """vLLM has cached these blocks of a path: as many as the key has names."""
        for name, block in zip(_names(key), blocks, strict=True):
            self._forget(block)
            if (before := self._left.get(name)) is not None:
                self._forget(before[0])
            self._left[name] = block, self._holds.hash_of(block)
            self._name_of[block] = name

    @contextmanager
    def ending(self, blocks: Sequence[int]) -> Iterator[None]:
        """While in it, blocks that only the request that ends references count as available."""
        last = (block for block in blocks if self._holds.num_references(block) == 1)
        self._ending = frozenset(last)
        try:
            yield
        finally:
            self._ending = frozenset()

    def find(self, key: RadixKey) -> _BlockPath:
        found: list[int] = []
        unprotected = 0
        for name in _names(key):
            block, block_hash = self._left.get(name, (-1, None))
            if block < 0:
                break
            # Equal hashes are equal KV, also where vLLM has evicted and computed it again. What a
            # step has still to compute has a hash as well: a write begins behind that step.
            if self._holds.hash_of(block) != block_hash:
                self._forget(block)
                break
            found.append(block)
            unprotected += block in self._ending or not self._holds.num_references(block)
        return _BlockPath(found, unprotected)

    def pin_key(self, key: RadixKey, now_s: float) -> BlockLock:
        self._num_locks += 1
        # No request of vLLM's has such an id.
        blocks, name = self.find(key).blocks, f"host memory\0{self._num_locks}"
        self._holds.take(name, blocks)
        return BlockLock(np.array(blocks, np.int32), name)

    def unpin(self, lock: BlockLock) -> None:
        lock.held = False
        self._holds.release(lock.name)

    def release(self, owner: Hashable) -> int:
        """Return 0: vLLM itself keeps the blocks of a load until it hears the end of it."""
        return 0

    def holds_all(self, owner: Hashable, pages: Pages) -> bool:
        return all(self._holds.num_references(page) > 0 for page in pages.tolist())

    def flush(self) -> None:
        self.epoch += 1
        self._left.clear()
        self._name_of.clear()

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._left[name]


class HostBlocks:
    """The host memory of one server. Owned by the engine's loop. It is empty, and every call a
    no-op, until all workers have reported their memory: for ever where they have none.

    Args:
        num_ranks: workers, each of which copies its share of a block.
    """

    policy = ""  # of eviction
    spare_blocks = 0  # that a write leaves available
    publishes = False  # `take_events` is asked

    def __init__(self, holds: Holds, num_ranks: int, now_s: Callable[[], float]) -> None:
        self.device = DeviceBlocks(holds)
        self.tier: HostTier[BlockLock] | None = None
        self._num_ranks, self._now_s = num_ranks, now_s
        self._events: HostEvents | None = None
        self._counts: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, int]] = {}  # by rank: pages that are ready, and all
        self._keys: dict[str, RadixKey] = {}  # of prompts that were looked up
        self._loads: dict[int, str] = {}  # under way: the request of each
        # Of these, the keys of their flights by request, while that lives.
        self._load_of: dict[str, RoomKey] = {}
        self._flights = Flights()  # of live requests: the blocks that their loads copy
        self._barred: set[str] = set()  # live requests whose load has failed
        self._ends: dict[int, list[HostCopyDone]] = {}  # of copies that not all ranks have ended

    def resize(self, sizes: dict[int, tuple[int, int]]) -> None:
        """`sizes`: by rank, pages that are ready, and all."""
        self._sizes |= sizes
        if not sizes or len(self._sizes) < self._num_ranks:
            return
        ready, totals = zip(*self._sizes.values(), strict=True)
        if self.tier is None:
            self.tier = HostTier(
                self.device, min(totals), self.policy, self._counts, lambda: self.spare_blocks,
                are_ready=False,
            )  # fmt: skip
            if self.publishes:
                self._events = HostEvents(self.tier.cache, NAME_BYTES)
        self.tier.ready(min(*totals, *ready))

    def take_orders(self) -> list[CopyOrder]:
        if self.tier is None:
            return []
        return [
            CopyOrder(copy, self._loads.get(copy.number, "")) for copy in self.tier.take_orders()
        ]

    def ended(self, ends: Iterable[HostCopyDone]) -> None:
        """Take in the ends of copies, one of each rank, and begin writes that are due."""
        if self.tier is None:
            return
        for end in ends:
            ranks = self._ends.setdefault(end.number, [])
            ranks.append(end)
            # Until the last rank's: the others still read the source, or write the destination.
            if len(ranks) == self._num_ranks:
                self._copy_ended(self.tier, self._ends.pop(end.number))
        self.tier.write_due()
        try:
            self.device.errors.raise_due()
        except Exception as error:
            _log.exception("an event of host memory: %s", error)

    def _copy_ended(self, tier: HostTier[BlockLock], ranks: list[HostCopyDone]) -> None:
        number = ranks[0].number
        error = next((end.error for end in ranks if end.error is not None), None)
        rid = self._loads.pop(number, "")
        if self._load_of.pop(rid, None) is not None:
            self._flights.land(rid)
            if error is not None:
                self.bar(rid)
        num_bytes, seconds = sum(end.num_bytes for end in ranks), max(end.seconds for end in ranks)
        tier.ended(HostCopyDone(number, error, num_bytes, seconds), self._now_s())

    def depth(self, rid: str, hashes: Callable[[], list[Any]], start: int) -> int:
        """Return how many of a request's first blocks are here; 0 where that is not more than
        `start`. `hashes` returns those of its whole blocks; they are the same each time."""
        if self.tier is None or not self.tier.cache.num_pages:
            return 0
        # One load of a request's id at a time: that of an aborted one may still go on.
        if rid in self._barred or rid in self._loads.values():
            return 0
        if rid not in self._keys:
            self._keys[rid] = key_of(hashes())
        found = self.tier.find(self._keys[rid])
        return 0 if found is None or found.depth <= start else found.depth

    def load_s(self, num_blocks: int) -> float:
        """Return the seconds that the load of `num_blocks` takes; 0: not known."""
        return 0.0 if self.tier is None else self.tier.load_s(num_blocks, self._now_s())

    def load(
        self, rid: str, start: int, end: int, blocks: Sequence[int], hashes: Sequence[Any]
    ) -> None:
        """Order the load of `blocks`, a request's from number `start` up to `end`. `depth` has
        found them in this very step."""
        assert self.tier is not None
        key = self._keys[rid].prefix(end * _NAME_TOKENS)
        found = self.tier.find(key)
        assert found is not None, "host memory gives up nothing within a step"
        assert found.depth >= end, "host memory gives up nothing within a step"
        flight = self.tier.load(found, key, np.array(blocks, np.int32), self._now_s())
        self._loads[flight.room] = rid
        self._load_of[rid] = flight
        self._flights.begin(rid, hashes)

    def bar(self, rid: str) -> None:
        """Load nothing more for a live request: a load of its has failed. vLLM 0.32 keeps the
        blocks that such a request needs reserved, also from itself, and would wait for them for
        ever before it admits another load. And the error of a copy may be of just these blocks."""
        self._barred.add(rid)

    def carrier(self, block_hash: Any) -> str | None:
        """Return the live request whose load copies this block just now."""
        return self._flights.carrier(block_hash)

    @property
    def loading(self) -> KeysView[str]:
        """Live requests."""
        return self._load_of.keys()

    def finished(
        self, request: Any, hashes: list[Any], blocks: Sequence[int], num_tokens: int,
        continues: Continues = None,
    ) -> None:  # fmt: skip
        """Write what is lacking here of a request that ends, with these first blocks cached."""
        rid = request.request_id
        self._keys.pop(rid, None)
        self._barred.discard(rid)
        if self.tier is None:
            return
        # vLLM keeps the blocks of an aborted load. Others may load the same from now on.
        if (key := self._load_of.pop(rid, None)) is not None:
            self.tier.give_up(key)
            self._flights.land(rid)
        if blocks:
            path = key_of(hashes)
            self.device.leave(path, blocks)
            if self._events is not None:
                self._events.left(path, hashes, request.all_token_ids[:num_tokens], request)
            with self.device.ending(blocks):
                self.tier.leave(path, self._now_s(), continues)

    def flush(self) -> None:
        self.device.flush()
        if self.tier is not None:
            self.tier.flush()

    @property
    def num_copies(self) -> int:
        return 0 if self.tier is None else len(self.tier)

    @property
    def is_writing(self) -> bool:
        return self.tier is not None and self.tier.num_writes > 0

    @property
    def num_blocks(self) -> int:
        return 0 if self.tier is None else self.tier.cache.num_pages

    def take_events(self) -> list[HostEvent]:
        return [] if self._events is None else self._events.take()

    def take_counts(self) -> dict[str, int]:
        counts = {name.replace("pages", "blocks"): n for name, n in self._counts.items()}
        self._counts.clear()
        return counts

    def check_invariants(self) -> None:
        self._flights.check_invariants()
        if self.tier is not None:
            self.tier.check_invariants()
