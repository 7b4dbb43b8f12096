"""A prefill worker of two processes with one cache, and a decode worker of one with all heads: rank
1 computes by rank 0's log, goes on from its checkpoints, and every byte of each group arrives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.conformance.hashing import PrefixHasher
from prefixkv.errors import CallerError, DrainingError, PeerLostError
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Mesh
from prefixkv.pages.groups import GroupPages
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import Request
from prefixkv.spi import PrefillRank
from tests.support.node_pair import tokens_of
from tests.support.patience import until
from tests.support.patterns import make_pools, pattern_in
from tests.support.processes import Child, children, obey
from tests.unit.runtime.conftest import QUICK

MESHES = Mesh(2, 4, tp_size=2), Mesh(2, 4)
WINDOW, CHUNK, PAGE = 10, 12, 4
SALT = 5


class Side:
    """The pools of one rank, and their pattern."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.full, last = (make_pools(mesh, pages, PAGE, 16)[rank] for pages in (32, 24))
        self.pool: KVPool = self.full.with_groups(PoolGroup("sliding", last, WINDOW, CHUNK))
        self._full, self._last = (
            pattern_in(pool, salt, (mesh, rank))
            for pool, salt in ((self.full, SALT), (last, SALT + 1))
        )
        self._hashes = PrefixHasher().prefixes

    def fill(self, pages: Any, row: GroupPages, tokens: Any, start: int, end: int) -> None:
        hashes, behind = self._hashes(np.asarray(tokens, np.int32))[:end], row.first_page * PAGE
        self._full.fill(np.asarray(pages), start, hashes)
        self._last.fill(np.asarray(row.ids), start - behind, hashes[behind:])

    def wrong(self, pages: Any, row: GroupPages, tokens: Any) -> int:
        hashes, behind = self._hashes(np.asarray(tokens, np.int32)), row.first_page * PAGE
        wrong = self._full.mismatches(np.asarray(pages), hashes)
        return wrong + self._last.mismatches(np.asarray(row.ids), hashes[behind:])


class Follower:
    """In the child: rank 1."""

    def __init__(self, config: PrefillConfig) -> None:
        self.side = Side(MESHES[0], 1)
        self.node = PrefillRank(self.side.pool, config, MESHES[0], 1)
        self.hello = (self.node.peer_id, self.node.endpoint)

    def apply(self, raw: bytes) -> bytes:
        self.node.apply(raw)
        return self.node.take_rank_events()

    def compute(self, rid: str, tokens: Any, start: int, end: int) -> list[int]:
        """Returns the stops, and where it goes on from, as this rank was told."""
        req = self.node.request(rid)
        row = req.window_pages("sliding")
        # What it goes on from is there: an earlier request's, or its own.
        if start == req.prefix_len:
            assert self.side.wrong(req.pages, row, tokens[:start]) == 0
        self.side.fill(req.pages, row, tokens, start, end)
        return [req.prefix_len, *req.stops]

    def rooms(self) -> int:
        return self.node.num_rooms


def _serve(pipe: Any, config: PrefillConfig) -> None:
    calls = Follower(config)
    pipe.send(calls.hello)
    obey(pipe, calls)


class RankChild(Child):
    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(_serve, config)


class Workers:
    def __init__(self, other: RankChild, prefill: PrefillNode, side: Side) -> None:
        self.other, self.prefill, self.side = other, prefill, side
        self.target = Side(MESHES[1], 0)
        # Else decode may find out by itself that rank 1 is dead, before it is said.
        config = DecodeConfig(control=replace(QUICK, prove_death=False), reserve_tokens=0)
        self.decode = DecodeNode(self.target.pool, config)
        self.computing: dict[Any, int] = {}
        self.arrived: dict[str, Any] = {}
        self.computed: dict[str, int] = {}
        self.failed: list[str] = []
        self.hold = False

    def exchange(self) -> None:
        """The engine's broadcast, and what comes back."""
        self.prefill.apply_rank_events(self.other.call("apply", self.prefill.take_log()))

    def step(self) -> None:
        self.decode.pop_preallocated()
        for req in self.prefill.pop_bootstrapped():
            self.computing[req] = req.prefix_len
            self.computed[req.rid] = req.num_tokens - req.prefix_len
        for req in [*self.prefill.pop_failed(), *self.prefill.pop_sent()]:
            self.computing.pop(req, None)
        self.exchange()
        for req in [] if self.hold else list(self.computing):
            self._compute(req)
        self.exchange()
        for req in self.decode.pop_transferred():
            row = req.window_pages("sliding")
            assert self.target.wrong(req.pages, row, req.tokens) == 0
            self.arrived[req.rid] = req
        self.failed += [req.rid for req in self.decode.pop_failed()]

    def _compute(self, req: Any) -> None:
        start, tokens = self.computing[req], req.tokens
        end = min([start + CHUNK, len(tokens), *(at for at in req.stops if at > start)])
        self.side.fill(req.pages, req.window_pages("sliding"), tokens, start, end)
        told = self.other.call("compute", req.rid, tokens, start, end)
        assert told == [req.prefix_len, *req.stops]
        self.computing[req] = end
        if end == len(tokens):
            del self.computing[req]
        self.prefill.send_chunk(req, end, end == len(tokens), b"x" if end == len(tokens) else b"")

    def submit(self, rid: str, tokens: Any, room: int) -> None:
        request = Request(
            rid, tokens, 2, room=room, prefill=self.prefill.endpoint, decode="decode-0"
        )
        self.prefill.add(request)
        self.decode.add(request)

    def serve(self, rid: str, tokens: Any, room: int) -> None:
        self.submit(rid, tokens, room)
        until(lambda: rid in self.arrived or rid in self.failed, step=self.step)
        assert rid in self.arrived
        req = self.arrived.pop(rid)
        self.decode.append_many([req], [1])
        self.decode.finish(req)

    def rooms(self) -> int:
        return self.prefill.num_rooms + self.decode.num_rooms + self.other.call("rooms")


def _rank_is_killed(there: Workers, name: PeerId) -> None:
    prefill, decode = there.prefill, there.decode
    there.hold = True
    for room, rid in enumerate(("given up", "cut"), 30):
        there.submit(rid, tokens_of(room, 24), room)
    until(lambda: len(there.computing) == 2, step=there.step)
    there.other.kill()
    # The engine carries nothing any more. What has ended on rank 0 waits for the other's word.
    prefill.abort("given up")
    assert [req.rid for req in prefill.pop_failed()] == ["given up"]
    until(lambda: prefill.awaited_ranks() == {1: 1}, step=prefill.pop_sent)
    assert prefill.stats()["pages_owned"] > 0
    for bad in (0, 2, None):
        with pytest.raises(CallerError, match="rank"):
            prefill.fence_rank(bad)  # type: ignore[arg-type]
    prefill.fence_rank(1)
    (cut,) = prefill.pop_failed()
    assert (cut.rid, type(cut.error)) == ("cut", PeerLostError)
    assert "prefill rank 1: its process is dead" in str(cut.error)
    with pytest.raises(DrainingError):
        prefill.add(Request("late", [1, 2], room=40, decode="decode-0"))
    # Decode has heard of the end from rank 0. What rank 1 may still write there, it has to be told.
    until(lambda: {"given up", "cut"} <= {*there.failed}, step=lambda: _pop_failed(there))
    decode.fence(*name)
    until(lambda: prefill.drain() and decode.drain())
    for node in (prefill, decode):
        node.audit()
        stats = node.stats()
        assert (stats["pages_owned"], stats["pages_held"], stats["rooms"]) == (0, 0, 0)


def _pop_failed(there: Workers) -> None:
    there.failed += [req.rid for req in there.decode.pop_failed()]


def test_two_processes_with_one_cache_go_on_from_the_same_checkpoints() -> None:
    """At the end the process of rank 1 is killed: rank 0 is told so, and holds nothing for it."""
    config = PrefillConfig(checkpoints=3, control=QUICK)
    with children(RankChild) as start:
        other = start(config)
        name, endpoint = other.hello
        side = Side(MESHES[0], 0)
        with PrefillNode(side.pool, config, MESHES[0], ranks=RankLog([endpoint])) as prefill:
            there = Workers(other, prefill, side)
            with there.decode:
                # Chats that come back and evict each other, in pools of 32 pages.
                for room in range(1, 10):
                    chat, turn = room % 2, room // 2
                    there.serve(f"r{room}", tokens_of(chat, 18 + 9 * turn), room)
                assert min(there.computed.values()) < 18, there.computed
                assert prefill.stats()["checkpoints_evicted"] > 0
                # An abort while both ranks write: their pages come back when both have said so.
                there.hold = True
                there.submit("gone", tokens_of(3, 40), 20)
                until(lambda: bool(there.computing), step=there.step)
                there.decode.abort("gone")
                until(lambda: not there.computing, step=there.step)
                there.hold = False
                there.serve("next", tokens_of(3, 44), 21)
                until(lambda: not there.rooms(), step=there.step)
                for node in (prefill, there.decode):
                    node.audit()
                    assert node.stats()["pages_owned"] == 0
                assert not prefill.requests
                _rank_is_killed(there, name)
