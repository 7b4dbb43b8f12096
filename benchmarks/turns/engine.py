"""The stand-in engine of a pass: prefill asked through a pipe, and decode that sends the clients'
calls and measures."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks import stand_in
from benchmarks.turns.report import Measured
from benchmarks.turns.workload import Call, Clients
from prefixkv.cli.demo.workload import Tokens
from prefixkv.conformance.pattern import Hashes, KVPattern
from prefixkv.decode.request import DecodeRequest
from prefixkv.paging import pages_for
from prefixkv.request import Request

if TYPE_CHECKING:
    from prefixkv.spi import DecodeGroup, PrefillGroup

_IDLE_S: Final = 1.0  # the longest wait for something to happen
_WARM_UP: Final = "warm-up"
_WARM_UP_ROOM: Final = 2**64 - 1
# Of a request, until its KV is there. A trace that asks for more than is served queues for long.
_DEADLINE_S: Final = 900.0
_STALLED_S: Final = 100.0  # without any event while calls are open: an error, instead of for ever


END_OF_PASS: Final = None  # to prefill, in the place of a request


class PrefillEngine(stand_in.Prefill):
    """Computes the prompts that come through a pipe, one after the other, until the end of the pass
    is announced."""

    node: PrefillGroup

    def __init__(
        self, node: PrefillGroup, patterns: Sequence[KVPattern], chunk_tokens: int, asks: Connection
    ) -> None:
        super().__init__(node, patterns, chunk_tokens)
        self._asks = asks
        self.prompt_tokens = 0  # counts first attempts at cacheable prompts only
        self.hit_tokens = 0
        self._warm_up_bytes = 0

    @property
    def bytes_sent(self) -> int:
        """KV bytes of writes that ended, without the warm-up's."""
        return self.node.stats()["bytes_sent"] - self._warm_up_bytes

    def run(self) -> None:
        """Until the end of the pass is announced and nothing is left to send."""
        going = True
        while going or self.open:
            while self._asks.poll():
                request = self._asks.recv()
                if request is END_OF_PASS:
                    going = False
                else:
                    self.add(request)
            if not self.step() and (going or self.open):
                wait([self._asks, self.node.fileno()], _IDLE_S)

    def due(self) -> list[Any]:
        return super().due()[:1]

    def began(self, req: Any) -> None:
        if req.request.generation == 0 and req.request.cacheable:
            self.prompt_tokens += len(self.open[req.rid])
            self.hit_tokens += req.prefix_len

    def ended(self, req: Any) -> None:
        if req.rid == _WARM_UP:
            self._warm_up_bytes = self.node.stats()["bytes_sent"]


class DecodeEngine(stand_in.Decode):
    """Sends the clients' calls to both sides, and measures. `asks` leads to prefill, which is at
    `prefill`."""

    node: DecodeGroup

    def __init__(
        self, node: DecodeGroup, patterns: Sequence[KVPattern], step_s: float, clients: Clients,
        asks: Connection, prefill: str, verify: bool,
    ) -> None:  # fmt: skip
        super().__init__(node, patterns, step_s)
        self._clients, self._asks, self._prefill, self._verify = clients, asks, prefill, verify
        self._calls: dict[str, Call] = {}
        self._last_s: dict[str, float] = {}  # when the newest token came, or the KV for the first
        self._start_s = time.monotonic()
        self.measured = Measured()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def warm_up(self) -> None:
        """One request that is neither cached nor counted, so that the pass does not time the two
        nodes' wire-up.

        Raises RuntimeError if it fails.
        """
        node = self.node
        tokens = np.zeros(1, dtype=np.int32)
        req = self._add(_WARM_UP, _WARM_UP_ROOM, tokens, 1, cacheable=False)
        while node.pop_preallocated() or not node.pop_transferred():
            if node.pop_failed():
                raise RuntimeError("the warm-up failed") from req.error
            node.wait(_IDLE_S)
        node.append_many([req], [0])
        node.finish(req)

    def _add(
        self, rid: str, room: int, tokens: Tokens, output_len: int, cacheable: bool = True
    ) -> DecodeRequest:
        """A request to both sides."""
        request = Request(
            rid, tokens, output_len, room=room, prefill=self._prefill,
            decode=self.node.peer_id.name, cacheable=cacheable, deadline_s=_DEADLINE_S,
        )  # fmt: skip
        self._asks.send(request)
        return self.node.add(request)

    def run(self) -> Measured:
        """The whole pass. Raises RuntimeError if nothing happens for long while calls are open."""
        clients, node = self._clients, self.node
        self._start_s = time.monotonic()
        event_s = 0.0
        while not clients.done:
            now_s = self._now_s()
            calls = clients.take(now_s)
            for call in calls:
                self._calls[str(call.room)] = call
                self._add(str(call.room), call.room, call.tokens, call.output_len)
            if self.step() or calls:
                event_s = now_s
                continue
            if self._calls and now_s - event_s > _STALLED_S:
                open_ = f"{len(self._calls)} calls are open"
                raise RuntimeError(f"nothing has happened for {_STALLED_S:.0f} s: {open_}")
            until_s = now_s + _IDLE_S
            if self.running:
                until_s = min(until_s, self.step_due_s - self._start_s)
            arrival_s = clients.next_arrival_s()
            if arrival_s is not None:
                until_s = min(until_s, arrival_s)
            # Not `node.wait`, which counts in milliseconds: that would be half of a full hit's
            # TTFT.
            select.select([node], [], [], max(0.0, until_s - now_s))
        self.measured.duration_s = self._now_s()
        self.measured.requests = clients.ended
        self.measured.failed = clients.failed
        return self.measured

    # --- what the engine hears of -----------------------------------------------------------------

    def ask(self, ask: Any) -> None:
        rid, tokens = f"{ask.rid}.{ask.generation}", np.asarray(ask.tokens, dtype=np.int32)
        where = {"room": ask.room, "generation": ask.generation, "decode": ask.decode}
        self._asks.send(Request(rid, tokens, deadline_s=_DEADLINE_S, **where))

    def failed(self, req: Any) -> None:
        self._clients.fail(self._calls.pop(req.rid))

    def pages_of(self, req: Any) -> Sequence[Any]:
        return self.node.pages_of(req)

    def arrived(self, req: Any, hashes: Hashes) -> None:
        now_s, call, measured = self._now_s(), self._calls[req.rid], self.measured
        if req.rid not in self._last_s:
            measured.ttft_s.append(now_s - call.arrival_s)
            measured.admitted(call.turn, len(call.tokens), req.prefix_len)
            self._last_s[req.rid] = now_s
        measured.pages_mismatched += self.has_wrong_aux(req, hashes)
        if self._verify:
            num_pages = pages_for(len(hashes), self.page_size)
            measured.pages_verified += num_pages * len(self.patterns)
            measured.pages_mismatched += self.mismatches(req, hashes)

    def appended(self, req: Any) -> None:
        now_s = self._now_s()
        if len(req.output) > 1:
            self.measured.itl_s.append(now_s - self._last_s[req.rid])
        self._last_s[req.rid] = now_s

    def retract(self, req: Any) -> None:
        super().retract(req)
        self.measured.retractions += 1

    def finish(self, req: Any) -> None:
        call = self._calls.pop(req.rid)
        self.node.finish(req, continues=self._clients.answer(call, req.output, self._now_s()))
