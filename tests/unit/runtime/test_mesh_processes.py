"""A prefill worker of two processes and a decode worker of two, staged over real NIXL; one prefill
rank is killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from prefixkv import DecodeNode
from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.conformance.hashing import PrefixHasher
from prefixkv.errors import TransferError
from prefixkv.memory.mesh import Mesh
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import Request
from tests.support.gpu import GPU
from tests.support.mesh_process import RankProcess, rank_processes
from tests.support.mesh_workers import SALT
from tests.support.node_pair import tokens_of
from tests.support.patience import SkippableClock, lasting_address, until
from tests.support.patterns import make_pools, pattern_in
from tests.unit.runtime.conftest import QUICK

PREFILL, DECODE = (
    Mesh(4, 4, tp_size=2),
    Mesh(4, 4, pp_size=2),
)  # each writes half of each reader's heads
LEASE = 16 << 10
TRANSPORT = TransportConfig(staging_bytes=LEASE * 3 // 2, lease_bytes=LEASE)
NUM_TOKENS, CHUNK = 60, 20


class Workers:
    """Decode's rank 0 is here, and so are the engines: they carry what ranks say to each other."""

    def __init__(self, start: Callable[..., RankProcess], device: str, proves: bool) -> None:
        self._start = start
        self._control = replace(QUICK, prove_death=proves)
        self._device = device
        self._addresses = [lasting_address() for _ in range(2)]
        self.prefill = [self.start_prefill(1)]
        self.prefill.insert(0, self.start_prefill(0))
        config = DecodeConfig(control=self._control, transport=TRANSPORT, reserve_tokens=8)
        pool = make_pools(DECODE, 64, 4, 16, order="page_major", device=device)[0]
        self.node = DecodeNode(pool, config, RankLog(), DECODE)
        self.other = start("decode", DECODE, 1, config, self.node.peer_id, device)
        self._check = pattern_in(pool, SALT, (DECODE, 0))
        self._hashes = PrefixHasher().prefixes
        self._ready: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.events: dict[
            tuple[str, int], str
        ] = {}  # what a chunk waits for on rank 1, by its start
        self.live: set[str] = set()  # on prefill
        self.arrived: dict[str, Any] = {}
        self.failed: dict[str, Exception | None] = {}

    def start_prefill(self, rank: int) -> RankProcess:
        config = PrefillConfig(
            control=self._control, transport=TRANSPORT, bind=self._addresses[rank]
        )
        others = () if rank else (self._addresses[1],)
        return self._start("prefill", PREFILL, rank, config, others, self._device)

    def submit(self, rid: str, seed: int, event: str = "", at: int = -1) -> None:
        tokens = tokens_of(seed, NUM_TOKENS)
        self.events[rid, at] = event
        self.node.add(
            Request(rid, tokens, max_new_tokens=2, room=seed, prefill=self.prefill[0].endpoint)
        )
        for rank in self.prefill:
            rank.call("add", rid, tokens, seed)
        self.live.add(rid)

    def step(self) -> None:
        self.node.pop_preallocated()
        self.other.call("apply", self.node.take_log())
        self.node.apply_rank_events(self.other.call("news"))
        for rank in self.prefill:
            for what, rid in rank.call("poll") or ():
                self._prefill_said(what, rid)
        for rid in [rid for rid, count in self._ready.items() if count == len(self.prefill)]:
            self._compute(rid)
        for req in self.node.pop_transferred():
            self.arrived[req.rid] = req
            tokens = req.request.key.tokens()
            assert self._check.mismatches(req.pages, self._hashes(tokens)) == 0
            self.other.call("apply", self.node.take_log())
            assert self.other.call("mismatches", req.row, tokens) == 0
        for req in self.node.pop_failed():
            self.failed[req.rid] = req.error

    def _prefill_said(self, what: str, rid: str) -> None:
        if what == "ready":
            self._ready[rid] = self._ready.get(rid, 0) + 1
        else:
            self.live.discard(rid)
            self._ready.pop(rid, None)

    def _compute(self, rid: str) -> None:
        start = self.computed.get(rid, 0)
        end = self.computed[rid] = min(start + CHUNK, NUM_TOKENS)
        event = self.events.get((rid, start), "")
        for number, rank in enumerate(self.prefill):
            rank.call("chunk", rid, end, event if number else "")
        if end == NUM_TOKENS or event:
            del self._ready[rid]

    def until(self, done: Callable[[], object]) -> None:
        until(done, step=self.step)

    def finish(self, rid: str) -> None:
        req = self.arrived.pop(rid)
        self.node.append_many([req], [1])
        self.node.finish(req)

    def held(self) -> int:
        stats = self.node.stats()
        return stats["pages_held"] + stats["pages_quarantined"]

    def rooms(self) -> int:
        return self.node.num_rooms + self.other.call("rooms")


@pytest.mark.slow
@pytest.mark.parametrize("proves", [False, True], ids=["fenced", "proved dead"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_prefill_rank_is_killed_and_comes_back(
    clock: SkippableClock, device: str, proves: bool
) -> None:
    """Each decode rank finds it dead for itself, or each is told."""
    with rank_processes() as start:
        there = Workers(start, device, proves)
        with there.node:
            there.submit("warm-up", 1)
            there.until(lambda: "warm-up" in there.arrived and "warm-up" not in there.live)
            there.finish("warm-up")
            lost = there.prefill[1]
            there.submit("behind it", 2, "never", CHUNK)
            there.until(lambda: there.computed.get("behind it") == 2 * CHUNK)
            there.submit("in the middle", 3, "kill", CHUNK)
            there.until(lambda: not lost.process.is_alive())
            rids = {"behind it", "in the middle"}
            assert proves or there.rooms() == 4, "a room of each request on each rank"
            # One that fails lets leases go, the other may use them for a while.
            there.until(lambda: rids <= there.failed.keys() or clock.skip(5.0, [there.node]))
            assert all(isinstance(there.failed[rid], TransferError) for rid in rids), there.failed
            there.until(lambda: not there.live)  # decode has told the rank that lives
            assert proves or there.held() == 2 * NUM_TOKENS // 4
            there.prefill[1] = there.start_prefill(1)
            there.until(lambda: all(peer not in (None, lost.peer_id) and how == "ready"
                                    for peer, how in there.node.peers().values()))  # fmt: skip
            if not proves:
                assert there.held() == 2 * NUM_TOKENS // 4, (
                    "the new one proves nothing of the old one's writes"
                )
                there.node.fence(lost.peer_id.name, lost.peer_id.incarnation)
            there.until(lambda: not there.held())
            there.submit("again", 4)
            there.until(lambda: "again" in there.arrived and "again" not in there.live)
            there.finish("again")
            there.until(
                lambda: not there.rooms() and not any(rank.call("rooms") for rank in there.prefill)
            )
            there.node.audit()
            assert there.node.stats()["locks"] == 0
