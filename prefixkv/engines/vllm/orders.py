"""Messages between the two sides, exchanged once per step: scheduler and workers are different
processes. `rid` is a request's id."""

from __future__ import annotations

from typing import NamedTuple, Self

from msgspec import Struct
from msgspec.structs import astuple

from prefixkv.engines.vllm.groups import WindowBlocks
from prefixkv.spi import HostCopy, HostCopyDone
from prefixkv.transfer import RoomKey


class Open(Struct, frozen=True):
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


class Refuse(Struct, frozen=True):
    """Tell `peer`, the other server, that this room will not be opened, or added, here. `ticket`:
    on decode, as in `Open`."""

    room: int
    peer: str
    reason: str
    ticket: int = 0


class Add(Struct, frozen=True):
    """On prefill: a request for this room's prompt has arrived."""

    rid: str
    key: RoomKey
    num_tokens: int
    digest: bytes


class Chunk(Struct, frozen=True):
    """On prefill: this step computes the prompt up to token `end`, a multiple of the page size
    except in the last chunk. `pages` are those from page number `first_page` on. `windows`: by
    window group, those behind the prompt that this step completes. With a `digest` it is all of an
    offer, which the decode server gets that proves the digest."""

    rid: str
    key: RoomKey
    first_page: int
    pages: tuple[int, ...]
    end: int
    last: bool
    windows: tuple[WindowBlocks, ...] = ()
    digest: bytes = b""


class CopyOrder(NamedTuple):
    """On decode: copy to or from host memory. `rid`: whose load it is; "" for a write."""

    copy: HostCopy
    rid: str = ""


class StepOrders(Struct):
    """Orders of one step, to every worker, in the order in which they are carried out.

    `late` are chunks and offers that steps before have computed, `computed` those of this step.
    Where `weights_version` is not None, the weights move to it. `cleared`: free blocks that hold
    NaN, to be overwritten with zeros: kernels read a block beyond its last token, and multiply that
    by zero. `bell` is the address at which a worker wakes the scheduler, "" for none; orders that
    have nothing else count as empty. `abort_loads`, by request id, `abort_sends` and `withdrawals`
    have the reason.
    """

    late: list[Chunk] = []
    weights_version: str | None = None
    cleared: list[int] = []
    bell: str = ""
    copies: list[CopyOrder] = []
    refusals: list[Refuse] = []
    opens: list[Open] = []
    adds: list[Add] = []
    declines: list[Refuse] = []
    abort_loads: dict[str, str] = {}
    abort_sends: dict[RoomKey, str] = {}
    withdrawals: dict[RoomKey, str] = {}
    computed: list[Chunk] = []

    def __bool__(self) -> bool:
        return self != StepOrders(bell=self.bell)


NO_ORDERS = StepOrders()
"""Shared and never written to."""


class WorkerReport(Struct):
    """Reports of one step, to the scheduler; each worker reports each thing once.

    By request id: `failed` loads, with the reason; `refused` are those of them whose servers do not
    fit. `settled` loads have no writer any more; `overdue` loads are not settled in time.
    `promised` sends have decode's pages; `unsent` sends failed; `freed` sends have no reader any
    more. `address` is that of rank 0. `host_pages`, by rank, are the ready pages of host memory and
    all of them, where that has changed.
    """

    failed: dict[str, str] = {}
    settled: list[str] = []
    overdue: list[str] = []
    promised: list[str] = []
    unsent: dict[str, str] = {}
    freed: list[str] = []
    address: str = ""
    refused: set[str] = set()
    copied: list[HostCopyDone] = []
    host_pages: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return self != WorkerReport()

    def aggregate(self, other: Self) -> Self:
        """vLLM folds the reports of all ranks into one this way."""
        # Lists keep an entry per rank: the scheduler counts down from `num_ranks`, and only the
        # last rank's report frees a block. Of errors one text per request is enough.
        both = zip(astuple(self), astuple(other), strict=True)
        return type(self)(
            *(its | own if isinstance(own, dict | set) else own + its for own, its in both)
        )
