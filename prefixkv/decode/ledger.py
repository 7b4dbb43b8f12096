"""What the parts of decode's scheduler share."""

from __future__ import annotations

from dataclasses import dataclass

from prefixkv.cache.results import PrefixLock
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.computing import Computing
from prefixkv.decode.host_tier import HostTier
from prefixkv.decode.inflight import DecodeTransferQueue, InFlight
from prefixkv.decode.journal import DecodeJournal
from prefixkv.decode.sources import Sources
from prefixkv.decode.state_checkpoints import DecodeCheckpoints
from prefixkv.decode.workers import Workers
from prefixkv.pages.manager import PageManager


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The books of one decode rank: its pages and what is promised of them, what is on its way, and
    by whom it is sent or computed.

    `host` and `points` (checkpoints of extra state) are None where decode has none.
    """

    pages: PageManager
    budget: PreallocBudget
    flights: InFlight
    arriving: DecodeTransferQueue
    workers: Workers
    sources: Sources
    computing: Computing
    host: HostTier[PrefixLock] | None
    points: DecodeCheckpoints | None
    journal: DecodeJournal
