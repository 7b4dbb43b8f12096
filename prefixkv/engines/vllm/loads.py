"""Decode's half in vLLM's scheduler: the rooms whose prompts are loaded, from the request's arrival
until every rank has settled.

The blocks of a load belong to its request. Where the load fails, vLLM takes them from the request
at once; from then on they are held here until every worker reports that no peer writes them any
more. So neither a client that leaves nor a preemption frees a block into which a peer writes.

    wanted --allocated--> loading --finished_recving--> over --settled by all ranks--> forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixkv.engines.vllm.asks import LoadAsk, computes_all, digest_of
from prefixkv.engines.vllm.blocks import Holds
from prefixkv.engines.vllm.groups import BlockGroups
from prefixkv.engines.vllm.orders import Open, Refuse, StepOrders
from prefixkv.engines.vllm.stats import Counters
from prefixkv.errors import CallerError, RequestError, check_laws
from prefixkv.spi import pages_for


@dataclass(slots=True)
class _PendingLoad:
    room: int
    prefill: str  # the server's address
    num_tokens: int  # to be loaded
    num_blocks: int  # of the whole prompt
    pages: tuple[int, ...]  # to be loaded, those in window groups included
    unsettled: int  # ranks into which a peer may still write
    since_s: float
    error: str = ""
    refused: bool = False  # the two servers do not work with each other
    left: bool = False  # its request has ended
    over: bool = False  # its outcome was reported to vLLM
    overdue: bool = False


@dataclass(slots=True)
class ScheduledLoads:
    """The loads of one engine. Used by its `SchedulerSide` alone.

    Args:
        num_ranks: number of workers, each of which holds a share of every block.
        block_size: tokens of a block.
        counters: counts under `loads_refused`.
        draw: returns a new random ticket.
        most_blocks: limit of blocks of all loads together; None: no limit.
    """

    groups: BlockGroups
    num_ranks: int
    block_size: int
    counters: Counters
    draw: Callable[[], int]
    now_s: Callable[[], float]
    most_blocks: int | None = None
    # A load is in `wanted` until vLLM admits its request, with the digest of its prompt; then in
    # `pending` until every rank has settled it, which may be after the request has ended.
    wanted: dict[str, tuple[LoadAsk, bytes]] = field(default_factory=dict)
    pending: dict[str, _PendingLoad] = field(default_factory=dict)
    followers: set[str] = field(default_factory=set)  # other choices of a prompt that is loaded
    rooms: dict[int, bytes] = field(default_factory=dict)  # of both: the digest of the prompt

    # --- requests ---------------------------------------------------------------------------------

    def begin(self, request: Any, ask: LoadAsk, orders: StepOrders) -> None:
        """Register a load, or a follower of one. Raises CallerError for a prompt that cannot be
        loaded; prefill is then refused, unless the room belongs to another request."""
        rid, known = request.request_id, self.rooms.get(ask.room)
        try:
            if rid in self.pending:
                raise RequestError(f"a request of the id {rid!r} is still being transferred")
            digest = digest_of(request, ask.nonce)
        except CallerError as error:
            # A room that another request has opened here must not be refused on behalf of this one.
            if known is None:
                self._order_refusal(ask, str(error), orders)
            raise
        # Cases of a well-formed ask:
        # 1. The room is known, with this prompt: `n` choices of one request arrive as `n` requests
        #    with the same parameters. One of them loads, the others use its blocks.
        # 2. The room is known, with another prompt: one of the two requests is wrong.
        # 3. vLLM computes this prompt in any case, so nothing is loaded.
        # 4. The load waits for its admission.
        if known == digest:
            self.followers.add(rid)
            return
        if known is not None:
            raise RequestError(f"room {ask.room} is in use by another request")
        if computes_all(request) or not self.groups.num_sent(request.num_prompt_tokens):
            self._order_refusal(ask, "decode computes it itself", orders)
            return
        self.rooms[ask.room] = digest
        self.wanted[rid] = ask, digest

    def open(
        self,
        request: Any,
        wanted: tuple[LoadAsk, bytes],
        num_sent: int,
        pages: Sequence[int],
        windows: Sequence[Sequence[int]],
        orders: StepOrders,
    ) -> None:
        """Order the load of a request that was wanted, and is admitted. `pages` are all its blocks,
        `windows` its block tables in window groups; prefill sends the last `num_sent` tokens."""
        (ask, digest), rid = wanted, request.request_id
        total = self.groups.num_sent(request.num_prompt_tokens)
        prefix_len = total - num_sent
        first, end = prefix_len // self.block_size, pages_for(total, self.block_size)
        load_pages = tuple(pages[first:end])
        # The window behind the prompt, whatever prefix is here: vLLM has new blocks for all of it.
        load_windows = self.groups.window_blocks(windows, total, 0, end)
        written = *load_pages, *(block for one in load_windows for block in one.blocks)
        num_blocks = self.groups.blocks_of(request.num_prompt_tokens)
        self.pending[rid] = _PendingLoad(
            ask.room, ask.prefill, num_sent, num_blocks, written, self.num_ranks, self.now_s()
        )
        orders.opens.append(
            Open(
                rid, ask.room, ask.prefill, total, prefix_len, load_pages, digest, self.draw(),
                load_windows,
            )
        )  # fmt: skip

    def refuse(self, ask: LoadAsk, reason: str, orders: StepOrders) -> None:
        """Refuse prefill a room that was wanted."""
        del self.rooms[ask.room]
        self._order_refusal(ask, reason, orders)

    def _order_refusal(self, ask: LoadAsk, reason: str, orders: StepOrders) -> None:
        orders.refusals.append(Refuse(ask.room, ask.prefill, reason, self.draw()))
        self.counters.add("loads_refused")

    def finished(self, rid: str, orders: StepOrders) -> bool:
        """A request ends. Returns True if it was loading: load and room stay known until proof."""
        self.followers.discard(rid)
        # Never admitted: no block was promised, and a refusal is all that prefill needs.
        if (wanted := self.wanted.pop(rid, None)) is not None:
            self.refuse(wanted[0], "decode's request ended before it was admitted", orders)
        load = self.pending.get(rid)
        if load is None or load.over:
            return False
        load.left = True
        orders.abort_loads[rid] = "decode's request ended"
        return True

    def flush(self, orders: StepOrders) -> None:
        """Fail the loads that are under way: the weights change."""
        for rid, load in self.pending.items():
            if not load.over:
                orders.abort_loads[rid] = "the cache is being reset"

    # --- blocks of all loads together -------------------------------------------------------------

    def could_fit(self, num_blocks: int) -> bool:
        """Return whether a prompt of `num_blocks` may be loaded at all."""
        return self.most_blocks is None or num_blocks <= self.most_blocks

    def fits(self, num_blocks: int) -> bool:
        """Return whether it may be loaded now, beside what is loading and what is not settled."""
        if self.most_blocks is None:
            return True
        loading = sum(load.num_blocks for load in self.pending.values())
        return loading + num_blocks <= self.most_blocks

    @property
    def any_under_way(self) -> bool:
        """True while blocks wait for another server."""
        return any(not load.over for load in self.pending.values())

    @property
    def any_expected(self) -> bool:
        """True while a proof is expected: an overdue one may not come for a long time."""
        return any(load.over and not load.overdue for load in self.pending.values())

    # --- reports ----------------------------------------------------------------------------------

    def failed(self, rid: str, error: str, refused: bool) -> bool:
        """Note why; `refused`: the two servers do not fit. Returns False for an unknown load."""
        if (load := self.pending.get(rid)) is None:
            return False
        load.error, load.refused = error, refused
        return True

    def settled(self, rids: Iterable[str]) -> None:
        """A rank reports, once, that no peer writes into the blocks of these loads any more."""
        for rid in rids:
            if rid in self.pending:
                self.pending[rid].unsettled -= 1

    def overdue(self, rids: Iterable[str]) -> None:
        """A rank has waited for the proof of these loads beyond its time."""
        for rid in rids:
            if rid in self.pending:
                self.pending[rid].overdue = True

    def received(self, rid: str) -> _PendingLoad | None:
        """Note that a load is over; return it."""
        load = self.pending.get(rid)
        if load is not None:
            load.over = True
        return load

    def settle(self, rid: str, holds: Holds) -> None:
        """Forget a load that is over and settled by all, and free what was held for it."""
        load = self.pending.get(rid)
        # Both are needed. Only over: a peer may still write. Only settled: vLLM has not heard the
        # outcome yet, and `received` would not find the load.
        if load is not None and load.over and load.unsettled <= 0:
            holds.release(rid)
            del self.rooms[load.room]
            del self.pending[rid]

    # --- the whole --------------------------------------------------------------------------------

    def waiting_since(self) -> list[float]:
        return [load.since_s for load in self.pending.values() if not load.over]

    def check_invariants(self) -> None:
        """Raise InternalError, with the state, if a law is broken. For tests."""
        loads = self.pending.values()
        rooms = [load.room for load in loads] + [ask.room for ask, _ in self.wanted.values()]
        loading = sum(load.num_blocks for load in loads)
        laws = {
            "a room is one request's": sorted(rooms) == sorted(self.rooms),
            "a load that is over is unsettled": all(
                load.unsettled > 0 for load in loads if load.over
            ),
            "loads leave blocks to compute with": self.most_blocks is None
            or loading <= self.most_blocks,
        }
        check_laws(laws, self.rooms, self.pending)
