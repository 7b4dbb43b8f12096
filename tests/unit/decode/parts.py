"""The parts of a decode scheduler, put together without it: for tests of one of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from prefixkv.config import ComputeConfig
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.compute_choice import ComputeChoice
from prefixkv.decode.computing import Computing
from prefixkv.decode.deferred import Deferred
from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.journal import DecodeJournal
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.prealloc_queue import DecodePreallocQueue
from prefixkv.decode.prospects import Prospects
from prefixkv.decode.refusals import Refusals
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.room_numbers import RoomNumbers
from prefixkv.decode.shares import PrefillShares
from prefixkv.decode.sources import Sources
from prefixkv.decode.transfer_queue import DecodeTransferQueue
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.commands import DecodeCommand
from prefixkv.request import Request

PAGE_SIZE = 4


class Parts:
    def __init__(
        self, config: ComputeConfig | None = None, num_slots: int = 0,
        lanes: Lanes | None = None, shares: PrefillShares | None = None,
    ) -> None:  # fmt: skip
        self.pages = PageManager(64, PAGE_SIZE, 8, num_slots=num_slots)
        self.sources, self.budget = Sources(config, fails_over=True), PreallocBudget(0)
        self.flights, self.counters = InFlight(PAGE_SIZE), Counter[str]()
        self.journal = DecodeJournal()
        self.arriving = DecodeTransferQueue(self.pages, self.flights)
        self.computing = Computing(self.sources)
        self.choice = ComputeChoice(
            self.pages, self.sources, self.computing, self.flights, self.arriving, self.budget,
            None, None, self.counters,
        )  # fmt: skip
        self.shares, self.lanes = shares or PrefillShares(), lanes or Lanes()
        self.rooms = RoomNumbers()
        self.commands: list[DecodeCommand] = []
        self.tickets = iter(range(1, 100))
        self.refusals = Refusals(
            self.rooms, self.commands, lambda: next(self.tickets), self.counters
        )
        deferred = Deferred(self.pages, lambda req: None)
        self.prospects = Prospects(
            self.pages, self.shares, self.lanes, self.flights, deferred.stuck_pages
        )
        self.waiting = DecodePreallocQueue(
            self.pages, self.budget, self.flights, 0, self.shares, self.lanes, self.prospects
        )

    def request(self, num_tokens: int, **fields: Any) -> DecodeRequest:
        """Its tokens are those of all others, as far as they go."""
        tokens = np.arange(num_tokens, dtype=np.int32)
        fields = {"room": 1, "max_new_tokens": 4, **fields}
        return DecodeRequest(Request("r", tokens, **fields), self.pages, 0.0)

    def flight(self, req: DecodeRequest, joined: Flight | None = None, end: int = 0) -> Flight:
        """As if it were admitted: with what the tree has of it, or a flight up to page `end`."""
        match = self.pages.match(req.key)
        assert match is not None
        num_shared = max(end, match.depth)
        missing = -(-len(req.key) // PAGE_SIZE) - num_shared
        pages = None if joined is None else joined.pages
        req.pages_held = self.pages.open(req.key, match, missing, 0.0, pages, num_shared)
        req.prefix_len = num_shared * PAGE_SIZE
        req.become(DecodeState.PREALLOCATED)
        return self.flights.start(req, joined, True)

    def cache(self, num_tokens: int) -> None:
        req = self.request(num_tokens)
        pages = self.pages.open(req.key, self.pages.match(req.key), num_tokens // PAGE_SIZE, 0.0)
        self.pages.cache_finished(pages, req.key, 0.0)
