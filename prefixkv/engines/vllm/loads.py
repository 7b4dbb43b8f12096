"""Decode's half in vLLM's scheduler: the rooms whose prompts are loaded, from the request's arrival
until every rank has settled.

The blocks of a load belong to its request. Where the load fails, vLLM takes them from the request
at once; from then on they are held here until every worker reports that no peer writes them any
more. So neither a client that leaves nor a preemption frees a block into which a peer writes.

    wanted --allocated--> loading --finished_recving--> over --settled by all ranks--> forgotten

`Turns` says which requests let others go first in a step, for blocks that loads have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prefixkv.engines.vllm.asks import LoadAsk, computes_all, digest_of
from prefixkv.engines.vllm.blocks import Ledger
from prefixkv.engines.vllm.groups import Tables
from prefixkv.engines.vllm.orders import Open, Refuse, WorkerReport
from prefixkv.engines.vllm.sends import ScheduledSends
from prefixkv.errors import CallerError, RequestError, check_laws
from prefixkv.spi import pages_for


@dataclass(slots=True)
class _PendingLoad:
    opening: Open
    num_blocks: int  # of the whole prompt
    unsettled: int  # ranks into which a peer may still write
    since_s: float
    error: str = ""
    refused: bool = False  # the two servers do not work with each other
    left: bool = False  # its request has ended
    over: bool = False  # its outcome was reported to vLLM
    overdue: bool = False  # the proof of some rank

    @property
    def room(self) -> int:
        return self.opening.room

    @property
    def pages(self) -> tuple[int, ...]:
        return self.opening.pages + self.opening.window_pages


@dataclass(slots=True)
class ScheduledLoads:
    """`most_blocks`: limit of blocks of all loads together; None: no limit."""

    ledger: Ledger
    most_blocks: int | None = None
    # A load is in `wanted` until vLLM admits its request, with the digest of its prompt; then in
    # `pending` until every rank has settled it, which may be after the request has ended.
    wanted: dict[str, tuple[LoadAsk, bytes]] = field(default_factory=dict)
    pending: dict[str, _PendingLoad] = field(default_factory=dict)
    followers: set[str] = field(default_factory=set)  # other choices of a prompt that is loaded
    _num_blocks: int = 0  # of all that is pending

    def begin(self, request: Any, ask: LoadAsk) -> None:
        """Register a load, or a follower of one. Raises CallerError for a prompt that cannot be
        loaded; prefill is then refused, unless the room belongs to another request."""
        rid, known = request.request_id, self._rooms.get(ask.room)
        try:
            if rid in self.pending:
                raise RequestError(f"a request of the id {rid!r} is still being transferred")
            digest = digest_of(request, ask.nonce)
        except CallerError as error:
            # A room that another request has opened here must not be refused on behalf of this one.
            if known is None:
                self.refuse(ask, str(error))
            raise
        # Cases of a well-formed ask:
        # 1. The room is known, with this prompt: `n` choices of one request arrive as `n` requests
        #    with the same parameters. One of them loads, the others use its blocks.
        # 2. The room is known, with another prompt: one of the two requests is wrong.
        # 3. vLLM computes this prompt in any case, so nothing is loaded.
        # 4. The load waits for its admission.
        if known == digest:
            self.followers.add(rid)
        elif known is not None:
            raise RequestError(f"room {ask.room} is in use by another request")
        elif computes_all(request) or not self.ledger.groups.num_sent(request.num_prompt_tokens):
            self.refuse(ask, "decode computes it itself")
        else:
            self.wanted[rid] = ask, digest

    def open(
        self, request: Any, wanted: tuple[LoadAsk, bytes], num_sent: int, tables: Tables
    ) -> None:
        """Order the load of a request that was wanted, and is admitted; prefill sends the last
        `num_sent` tokens."""
        (ask, digest), rid, ledger = wanted, request.request_id, self.ledger
        groups = ledger.groups
        total = groups.num_sent(request.num_prompt_tokens)
        first, end = (total - num_sent) // groups.block_size, pages_for(total, groups.block_size)
        # The window behind the prompt, whatever prefix is here: vLLM has new blocks for all of it.
        opening = Open(
            rid, ask.room, ask.prefill, total, total - num_sent,
            tuple(tables[groups.full][first:end]), digest, ledger.draw(),
            groups.window_blocks(tables, total, 0, end),
        )  # fmt: skip
        num_blocks = groups.blocks_of(request.num_prompt_tokens)
        self.pending[rid] = _PendingLoad(opening, num_blocks, ledger.num_ranks, ledger.now_s())
        self._num_blocks += num_blocks
        ledger.orders.opens.append(opening)

    @property
    def _rooms(self) -> dict[int, bytes]:
        """The digest of the prompt of each room that is known."""
        wanted = {ask.room: digest for ask, digest in self.wanted.values()}
        return wanted | {load.room: load.opening.digest for load in self.pending.values()}

    def refuse(self, ask: LoadAsk, reason: str) -> None:
        ledger = self.ledger
        ledger.orders.refusals.append(Refuse(ask.room, ask.prefill, reason, ledger.draw()))
        ledger.counters.add("loads_refused")

    def finished(self, rid: str) -> bool:
        """A request ends. Returns True if it was loading: load and room stay known until proof."""
        self.followers.discard(rid)
        # Never admitted: no block was promised, and a refusal is all that prefill needs.
        if (wanted := self.wanted.pop(rid, None)) is not None:
            self.refuse(wanted[0], "decode's request ended before it was admitted")
        if (load := self.pending.get(rid)) is None or load.over:
            return False
        load.left = True
        self.ledger.orders.abort_loads[rid] = "decode's request ended"
        return True

    def flush(self, others: Iterable[str] = ()) -> None:
        """`others` are loaded from host memory alone."""
        under_way = *others, *(rid for rid, load in self.pending.items() if not load.over)
        self.ledger.orders.abort_loads |= dict.fromkeys(under_way, "the cache is being reset")

    def could_fit(self, num_blocks: int) -> bool:
        return self.most_blocks is None or num_blocks <= self.most_blocks

    def fits(self, num_blocks: int) -> bool:
        """Return whether it may be loaded now, beside what is loading and what is not settled."""
        return self.could_fit(num_blocks + self._num_blocks)

    @property
    def any_under_way(self) -> bool:
        """True while blocks wait for another server."""
        return any(not load.over for load in self.pending.values())

    @property
    def any_expected(self) -> bool:
        """True while a proof is expected: an overdue one may not come for a long time."""
        return any(load.over and not load.overdue for load in self.pending.values())

    def take(self, report: WorkerReport) -> None:
        """A rank reports, once, why a load has failed, that no peer writes into its blocks any
        more, or that it has waited for the proof of that beyond its time."""
        settled, overdue = Counter(report.settled), {*report.overdue}
        for rid, load in self.pending.items() if report else ():
            if rid in report.failed:
                load.error, load.refused = report.failed[rid], rid in report.refused
            load.unsettled -= settled[rid]
            load.overdue |= rid in overdue

    def received(self, rid: str) -> _PendingLoad | None:
        if (load := self.pending.get(rid)) is not None:
            load.over = True
        return load

    def settle(self, rid: str) -> None:
        """Forget a load that is over and settled by all, and free what was held for it."""
        load = self.pending.get(rid)
        # Both are needed. Only over: a peer may still write. Only settled: vLLM has not heard the
        # outcome yet, and `received` would not find the load.
        if load is not None and load.over and load.unsettled <= 0:
            self.ledger.holds.release(rid)
            self._num_blocks -= self.pending.pop(rid).num_blocks

    def waiting_since(self) -> list[float]:
        return [load.since_s for load in self.pending.values() if not load.over]

    def check_invariants(self) -> None:
        loads = self.pending.values()
        laws = {
            "a room is one request's": len(self._rooms) == len(self.wanted) + len(loads),
            "a load that is over is unsettled": all(
                load.unsettled > 0 for load in loads if load.over
            ),
            "loads leave blocks to compute with": self.could_fit(self._num_blocks)
            and self._num_blocks == sum(load.num_blocks for load in loads),
        }
        check_laws(laws, self.wanted, self.pending)


class Turns:
    """Which requests let others go first in a step.

    vLLM asks of no request behind one for which blocks are lacking. Where a load, or what a load
    has left, has those blocks, the request that lacks them waits for another server, which may wait
    for a request behind it here. So it lets them go first, and the law of the order holds: a side
    that waits holds nothing that the other's progress may need.
    """

    def __init__(self, loads: ScheduledLoads, sends: ScheduledSends) -> None:
        self._loads, self._sends = loads, sends
        self.is_changed = False  # a request has let others go first in this step
        self._has_yielded = False  # a request in this step, to the promised sends behind it
        self._has_stepped_back = False  # one of `failed` in this step, to those of `landed`
        # With windows, where a request whose load has failed needs more blocks to be computed than
        # to be loaded: such requests, until vLLM admits them again; and those that have the blocks
        # of a load that is over, until vLLM computes them or asks about them again.
        # `SchedulerSide` takes them out then: the second at each step, where a call would count.
        self.failed: set[str] = set()
        self.landed: set[str] = set()

    def must_yield(self, need: int) -> bool:
        """Return whether a request that lacks `need` blocks lets promised sends go first. Others
        keep their order, so that the loads under way end, and no new one takes the blocks."""
        if need > 0 and self._sends.has_promised_uncomputed:
            self._has_yielded |= self._loads.any_under_way
            self.is_changed |= self._has_yielded
        return self._has_yielded

    def steps_back(self, rid: str, need: int) -> bool:
        """Return whether a request that lacks `need` blocks lets those go first that have blocks of
        loads. vLLM comes to none of these behind a request whose load has failed. No other request
        may take the blocks meanwhile."""
        self.landed.discard(rid)
        if rid in self.failed and need > 0:
            self._has_stepped_back |= self._loads.any_under_way or bool(self.landed)
            self.is_changed |= self._has_stepped_back
        return self._has_stepped_back

    def next_step(self) -> None:
        """All have their turns again. To be left out unless `is_changed`."""
        self._has_yielded = self._has_stepped_back = self.is_changed = False

    def received(self, rid: str, is_failed: bool) -> None:
        if self._loads.ledger.groups.windows:
            self.landed.add(rid)
            if is_failed:
                self.failed.add(rid)

    def ended(self, rid: str) -> None:
        self.failed.discard(rid)
        self.landed.discard(rid)
