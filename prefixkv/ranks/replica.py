"""Tensor-parallel decode ranks: rank 0's operation log, as one message per scheduler pass, and the
ranks that follow it.

    rank 0       node = DecodeNode(pool, config, ranks=RankLog(), mesh=mesh)
                 broadcast(node.take_log())
    rank 1 ...   rank = DecodeRank(pool, config, mesh, 1, worker)
                 rank.apply(receive()); send(rank.take_rank_events())
    rank 0       for raw in received: node.apply_rank_events(raw)

A `DecodeRank` (runtime/decode_rank.py) is a `DecodeReplica` that also receives its part of the KV:
the log names the rooms that it has to open, and its events go back to rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec

from prefixkv.cache.eviction.policy import Policy
from prefixkv.config import DecodeConfig
from prefixkv.errors import (
    CallerError,
    ConfigError,
    InternalError,
    RequestError,
    shown_namespace,
    travels,
)
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.pages.windows import WindowPages, WindowSpec
from prefixkv.paging import MAX_INDEX, Pages
from prefixkv.protocol.commands import DecodeCommand
from prefixkv.protocol.host_copy import HostCopy
from prefixkv.ranks.messages import check_next, decoded, packed_ids, unpacked_ids
from prefixkv.ranks.oplog import AnyOp, Replica
from prefixkv.request import Request, check_request
from prefixkv.settings import check_whole


class _LoggedCopy(msgspec.Struct, frozen=True, array_like=True):
    """A `HostCopy` that every rank has to make of its own part: page numbers packed."""

    number: int
    is_load: bool
    host_pages: bytes
    device_pages: bytes


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message of rank 0's log. `sizes` and `digests` are rank 0's after it; `settings` come
    with the first."""

    number: int
    ops: list[AnyOp]
    sizes: dict[str, int]
    digests: dict[str, bytes]
    settings: dict[str, int | str | bool]
    rooms: list[DecodeCommand] = []
    copies: list[_LoggedCopy] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Batch).decode


def sizes(page_manager: PageManager) -> dict[str, int]:
    """Return counts of the pages' state on one rank, each O(1). Replicas that diverge soon differ
    in one."""
    cache, pages = page_manager.cache, page_manager.allocator
    return {
        "free": pages.free_pages, "owned": pages.owned_pages, "cached": pages.cached_pages,
        "held": pages.held_pages, "quarantined": pages.quarantined_pages,
        "free_runs": pages.num_free_runs, "free_rows": page_manager.table.free_rows,
        "evictable": cache.evictable_pages, "protected": cache.protected_pages,
        "nodes": cache.num_nodes, "uses": cache.tick, "epoch": page_manager.epoch,
        "wants": cache.num_wants,
        "slots": page_manager.slots.free_pages if page_manager.slots is not None else 0,
        **{f"window {one.name}": one.allocator.free_pages for one in page_manager.windows},
    }  # fmt: skip


def digests(page_manager: PageManager) -> dict[str, bytes]:
    """Return 16 bytes each of tree (with recency and locks), page table and allocator, by which
    replicas are compared. O(pool)."""
    tree = hashlib.blake2b(digest_size=16)
    # By first page, which identifies a node: a page is in the tree once.
    for node in sorted(page_manager.cache.nodes(), key=lambda node: bytes(node.pages[:4])):
        assert node.parent is not None
        above = bytes(node.parent.pages[-4:])
        # The last page of the parent names it: page ids alone tell where a node hangs.
        state = above, bytes(node.key), bytes(node.pages), node.lock_ref, node.mark, node.steps
        tree.update(repr(state).encode())
    pages = hashlib.blake2b(digest_size=16)
    for held_as in PageState:
        pages.update(held_as.name.encode() + page_manager.allocator.pages_in(held_as).tobytes())
    windows = [group.allocator for group in page_manager.windows]
    for allocator in (page_manager.allocator, page_manager.slots, *windows):
        if allocator is not None:
            held = [(owner, allocator.held_by(owner).tolist()) for owner in allocator.owners()]
            pages.update(repr((allocator.free_runs(), held)).encode())
    table = hashlib.blake2b(page_manager.table.array.tobytes(), digest_size=16)
    for group in page_manager.windows:
        table.update(group.array.tobytes() + group.first_pages.tobytes())
    return {"tree": tree.digest(), "page table": table.digest(), "allocator": pages.digest()}


def _settings(pages: PageManager, host_pages: int) -> dict[str, int | str | bool]:
    max_pages = pages.table.array.shape[1]
    return {
        "num_pages": pages.num_pages, "page_size": pages.page_size,
        "max_running": pages.table.max_requests, "host_pages": host_pages,
        "max_pages_per_request": max_pages, "cache": pages.caching,
        "policy": _described(pages.cache.policy), "evict_reserve_pages": pages.evict_reserve_pages,
        "num_slots": pages.slots.num_pages if pages.slots is not None else 0,
        "reserved_pages": pages.allocator.num_pages - pages.num_pages,
        "windows": str([tuple(group.spec) for group in pages.windows]),
    }  # fmt: skip


def _described(policy: Policy) -> str:
    asked: Policy = getattr(policy, "asked", policy)  # a user's is behind a guard
    return f"{asked.name} {asdict(asked)}" if is_dataclass(asked) else asked.name


class RankLog:
    """Rank 0's side: gathers operations until the next `take`.

    `append` is the `publish` of a `ReplicatedPageManager`. The engine carries the bytes: by its own
    broadcast, once per pass, after the pops and `append_many` and before the step whose attention
    reads the rows. Ranks may apply late and at different times: they decide nothing. Rank 0's
    `after=` events stand for all ranks: a step that has ended there has passed its last all-reduce,
    so every rank has read all of its pages.

    Args:
        digest_every: each `digest_every`-th message carries digests, which cost O(pool) on all
            ranks; 0: none does.

    Raises:
        ConfigError: `digest_every` is no whole number, or below 0.
    """

    def __init__(self, digest_every: int = 0) -> None:
        check_whole("digest_every", digest_every, 0, MAX_INDEX)
        self.num_batches = 0
        self._digest_every = digest_every
        self._ops: list[AnyOp] = []
        # Bound once: `_ops` is cleared by `take`, never replaced.
        self.append = self._ops.append
        self.rooms: list[DecodeCommand] = []  # commands for every rank's control object
        self.host_pages = 0  # of each rank; set by rank 0's node
        self._copies: list[_LoggedCopy] = []

    def __bool__(self) -> bool:
        """Return True if the next message to the replicas has an operation, a room or a copy in
        it."""
        return bool(self._ops or self.rooms or self._copies)

    def copy(self, order: HostCopy) -> None:
        """Add a copy between pool and host memory, for every rank to make of its own part."""
        host, device = packed_ids(order.host_pages), packed_ids(order.device_pages)
        self._copies.append(_LoggedCopy(order.number, order.is_load, host, device))

    def check(self, request: Request) -> None:
        """Raise RequestError if the request's namespace cannot travel to the replicas: None, str,
        int of 64 bits, bytes and tuples of them can. One that did not would be in each later
        message, and none could be encoded."""
        check_request(request)
        if not _can_travel(request.key.namespace):
            raise RequestError(
                f"request {request.rid!r}: no message carries its namespace, "
                f"{shown_namespace(request.key.namespace)}"
            )

    def take(self, pages: PageManager) -> bytes:
        """Take the operations gathered for the replicas, as one message that a replica's `apply`
        reads.

        Every rank has to apply every message, in order, also one without operations.
        """
        with_digests = self._digest_every and self.num_batches % self._digest_every == 0
        settings = {} if self.num_batches else _settings(pages, self.host_pages)
        # Taken with the operations, in one call on one thread: sums of another moment would differ.
        batch = _Batch(
            self.num_batches,
            self._ops,
            sizes=sizes(pages),
            digests=digests(pages) if with_digests else {},
            settings=settings,
            rooms=self.rooms,
            copies=self._copies,
        )
        raw = _encode(batch)
        self.num_batches += 1
        # Only after encoding: if that raises, no operation is lost.
        self._ops.clear()
        self.rooms.clear()
        self._copies.clear()
        return raw


class DecodeReplica:
    """A decode rank above 0, with pages that follow rank 0's. Owned by one thread.

    A rank that comes to other pages raises at once (oplog.py). Every message also carries rank 0's
    page counts, which cost nothing, and some carry digests of the whole state.

    Args:
        num_pages, page_size: of this rank's pool, which has the shape of rank 0's.
        config: rank 0's. Settings that both need alike are compared when the first message comes.
        num_slots: of this rank's StatePool, as many as of rank 0's; 0 without.
        host_pages: of this rank's host memory, as many as of rank 0's; 0 without.
        windows: the window groups of this rank's pool, alike with rank 0's.
    Raises:
        ConfigError: an unknown policy.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        config: DecodeConfig,
        num_slots: int = 0,
        host_pages: int = 0,
        windows: Sequence[WindowSpec] = (),
    ) -> None:
        settings = config.for_page_manager(num_pages, num_slots)
        if isinstance(config.policy, Policy):  # an object serves one cache: another like it
            settings["policy"] = config.policy.another()
        self.page_manager = PageManager(
            num_pages, page_size, config.max_running, **settings, windows=windows
        )
        self.num_batches = 0
        self._replica = Replica(self.page_manager)
        self._broken: InternalError | None = None
        self._host_pages = host_pages
        self._copies: list[HostCopy] = []

    @property
    def page_table(self) -> Pages:
        """Page ids of this replica, int32 [max_running or more, num_pages], by `DecodeRequest.row`,
        -1 where unused. Its memory never moves."""
        return self.page_manager.table.array

    def pages(self, row: int) -> Pages:
        """Return the page ids, on this replica rank, of the request in this row, in order. They are
        a view that is valid until the next `apply`."""
        return self._replica.pages(row)

    def window_pages(self, row: int, name: str) -> WindowPages:
        """Return what the request in this row has, on this replica rank, in a window group; see
        `DecodeRequest.window_pages`."""
        return self._replica.window_pages(row, name)

    def state_slot(self, row: int) -> int:
        """Return the slot of extra state, on this replica rank, of the request in this row. See
        `DecodeRequest.state_slot`."""
        return self._replica.slot(row)

    def apply(self, raw: bytes) -> list[DecodeCommand]:
        """Apply rank 0's message of one pass to this replica. Return the commands for this rank's
        control object.

        Raises:
            CallerError: a message that is none, names copies of pages that there are not, was left
                out, or comes twice. Nothing was changed.
            ConfigError: this rank was built with other settings than rank 0's. Nothing was changed.
            InternalError: this rank came to another state than rank 0, and is of no use any more.
        """
        if self._broken is not None:
            raise self._broken
        batch = decoded(raw, _decode, "rank 0")
        # Checked before the first operation: one that is left out or repeated would break this rank
        # for good.
        check_next(batch.number, self.num_batches)
        if batch.number == 0:
            self._check_settings(batch.settings)
        copies = [self._copy(one) for one in batch.copies]
        try:
            for op in batch.ops:
                self._replica.apply(op)
            _compare(batch.sizes, sizes(self.page_manager))
            if batch.digests:
                _compare(batch.digests, digests(self.page_manager))
        # Half of the message is applied, and nothing undoes that. So every later call raises the
        # same.
        except Exception as error:
            self._broken = InternalError(
                f"this rank differs from rank 0 in message {batch.number}: {error!r}"
            )
            raise self._broken from error
        self.num_batches += 1
        self._copies += copies
        return batch.rooms

    def _copy(self, logged: _LoggedCopy) -> HostCopy:
        host = unpacked_ids(logged.host_pages, self._host_pages)
        device = unpacked_ids(logged.device_pages, self.page_manager.allocator.num_pages)
        if not 0 < len(host) == len(device):
            raise CallerError(f"rank 0 sent a copy of {len(host)} to {len(device)} pages")
        return HostCopy(logged.number, logged.is_load, host, device)

    def take_copies(self) -> list[HostCopy]:
        """Return the copies between this replica's pool and its host memory that are to be made,
        and forget them."""
        copies, self._copies = self._copies, []
        return copies

    def audit(self) -> None:
        """Check every law of this replica's tree, allocator and page table. Slow. Raises
        InternalError."""
        self.page_manager.check_invariants()

    def _check_settings(self, theirs: dict[str, int | str | bool]) -> None:
        """Raise ConfigError for the first setting of this replica that differs from rank 0's."""
        for name, value in _settings(self.page_manager, self._host_pages).items():
            if value != theirs.get(name):
                raise ConfigError(f"{name} is {value} on this rank, {theirs.get(name)} on rank 0")


def _can_travel(namespace: object) -> bool:
    if isinstance(namespace, tuple):
        return all(map(_can_travel, namespace))
    if type(namespace) is str:
        return travels(namespace)
    if type(namespace) is int:
        return -(2**63) <= namespace < 2**64
    return namespace is None or type(namespace) is bytes


def _compare(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    if different := {
        name: (value, ours.get(name)) for name, value in theirs.items() if value != ours.get(name)
    }:
        raise InternalError(f"rank 0's and ours: {different}")
