"""Messages between the two sides, exchanged once per step. Plain data: scheduler and workers are
different processes. `rid` is a request's id."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self

from prefixkv.engines.vllm.groups import WindowBlocks
from prefixkv.spi import HostCopy, HostCopyDone


@dataclass(frozen=True, slots=True)
class Open:
    """On decode: promise `pages` for tokens `prefix_len` to `num_tokens` of a prompt. `ticket` is
    unique, the same on all workers. `windows`: by window group, blocks behind the prompt."""

    rid: str
    room: int
    prefill: str
    num_tokens: int
    prefix_len: int
    pages: tuple[int, ...]
    digest: bytes
    ticket: int
    windows: tuple[WindowBlocks, ...] = ()

    @property
    def window_pages(self) -> tuple[int, ...]:
        return tuple(block for one in self.windows for block in one.blocks)


@dataclass(frozen=True, slots=True)
class Refuse:
    """On decode: tell prefill that this room will not be opened."""

    room: int
    prefill: str
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class Add:
    """On prefill: a request for this room's prompt has arrived."""

    rid: str
    room: int
    decode: str
    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Decline:
    room: int
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """On prefill: this step computes the prompt up to token `end`, a multiple of the page size
    except in the last chunk. `pages` are those from page number `first_page` on. `windows`: by
    window group, those behind the prompt that this step completes."""

    rid: str
    first_page: int
    pages: tuple[int, ...]
    end: int
    last: bool
    windows: tuple[WindowBlocks, ...] = ()


@dataclass(frozen=True, slots=True)
class OfferOrder:
    """On prefill: the prompt is complete with this step; `chunk` is all of it. The decode server
    that proves the digest gets it. After `timeout_s` the room can no longer be opened."""

    chunk: Chunk
    room: int
    digest: bytes
    timeout_s: float

    @property
    def rid(self) -> str:
        return self.chunk.rid


class CopyOrder(NamedTuple):
    """On decode: copy to or from host memory. `rid`: whose load it is; "" for a write."""

    copy: HostCopy
    rid: str = ""


@dataclass(slots=True)
class StepOrders:
    """Orders of one step, to every worker.

    `abort_loads`, `abort_sends` and `withdrawals` map request ids to the reason. `bell` is the
    address at which a worker wakes the scheduler; "" for none. The orders in `before` are carried
    out first, their chunks and offers too, whose KV steps before have written. Then, where
    `weights_version` is not None, the weights move to it; then the others follow. Orders that have
    only `bell` set count as empty. `cleared`: free blocks that hold NaN, to be overwritten with
    zeros: kernels read a block beyond its last token, and multiply that by zero.
    """

    opens: list[Open] = field(default_factory=list)
    refusals: list[Refuse] = field(default_factory=list)
    adds: list[Add] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    abort_loads: dict[str, str] = field(default_factory=dict)
    abort_sends: dict[str, str] = field(default_factory=dict)
    offers: list[OfferOrder] = field(default_factory=list)
    withdrawals: dict[str, str] = field(default_factory=dict)
    bell: str = ""
    weights_version: str | None = None
    before: StepOrders | None = None
    copies: list[CopyOrder] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self != StepOrders(bell=self.bell)


NO_ORDERS = StepOrders()
"""Shared and never written to."""


@dataclass(slots=True)
class WorkerReport:
    """Reports of one step, to the scheduler; each worker reports each thing once.

    By request id: `failed` loads, with the reason; `refused` are those of them whose servers do not
    fit. `settled` loads have no writer any more; `overdue` loads are not settled in time.
    `promised` sends have decode's pages; `unsent` sends failed; `freed` sends have no reader any
    more. `bells` is the number of workers that send wakeups from now on. `host_pages`, by rank, are
    the ready pages of host memory and all of them, where that has changed.
    """

    failed: dict[str, str] = field(default_factory=dict)
    settled: list[str] = field(default_factory=list)
    overdue: list[str] = field(default_factory=list)
    promised: list[str] = field(default_factory=list)
    unsent: dict[str, str] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)
    bells: int = 0
    address: str = ""
    refused: set[str] = field(default_factory=set)
    copied: list[HostCopyDone] = field(default_factory=list)
    host_pages: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self != WorkerReport()

    def aggregate(self, other: Self) -> Self:
        """vLLM folds the reports of all ranks into one this way."""
        # Lists keep an entry per rank: the scheduler counts down from `num_ranks`, and only the
        # last rank's report frees a block. Of errors one text per request is enough.
        return type(self)(
            failed={**other.failed, **self.failed},
            settled=self.settled + other.settled,
            overdue=self.overdue + other.overdue,
            promised=self.promised + other.promised,
            unsent={**other.unsent, **self.unsent},
            freed=self.freed + other.freed,
            bells=self.bells + other.bells,
            address=self.address or other.address,
            refused=self.refused | other.refused,
            copied=self.copied + other.copied,
            host_pages={**self.host_pages, **other.host_pages},
        )
