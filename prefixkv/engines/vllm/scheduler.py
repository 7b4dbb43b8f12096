"""The connector in vLLM's scheduler: decides what is loaded and sent, and holds the blocks.

It runs in the engine's process and has no memory of KV; `worker` has. It knows vLLM's requests and
blocks by their attributes and imports nothing of vLLM.

Who frees a block. Decode: the blocks of a load are the request's. Where the load fails, vLLM takes
them from the request at once (to compute elsewhere, or to end it); from then on they are held here
until every worker says that no peer writes them any more. Prefill: see `sends`. So neither a client
that leaves nor a preemption makes a block free that is on its way.

A server that both loads and computes for others keeps blocks for computing: loads that fill it
would wait for another server, whose loads wait for this one.

    wanted --allocated--> loading --finished_recving--> over --settled by all ranks--> forgotten
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from prefixkv.engines.vllm.asks import (
    LoadAsk,
    OfferAsk,
    ask_of,
    computes_all,
    digest_of,
    namespace_of,
)
from prefixkv.engines.vllm.flights import Flights
from prefixkv.engines.vllm.holds import BlockPool, Holds
from prefixkv.engines.vllm.options import Options
from prefixkv.engines.vllm.orders import News, Open, Orders, Refuse
from prefixkv.engines.vllm.sends import Sends
from prefixkv.engines.vllm.shadow import Shadow
from prefixkv.engines.vllm.stats import GAUGES, Counters
from prefixkv.spi import (
    CallerError,
    RequestError,
    check_laws,
    check_version,
    pages_for,
    secret_number,
)

_log = logging.getLogger("vllm.prefixkv")

RECENT_ROOMS: Final = 4096
"""Where a client leaves, vLLM adds a request of its parameters and ends it at once, whether or not
its own has reached the engine. Rooms that were seen are known for so many others."""

QUIET_STEPS: Final = 3
LONGEST_REST_S: Final = 60.0
"""No wait is without a limit."""


@dataclass(slots=True)
class _Load:
    room: int
    num_blocks: int  # of the whole prompt
    pages: tuple[int, ...]  # to be loaded
    unsettled: int  # ranks whose pages a peer may still write
    since_s: float
    error: str = ""
    refused: bool = False  # the two servers do not work with each other
    left: bool = False  # its request has ended
    over: bool = False  # vLLM has been told its outcome
    overdue: bool = False


class SchedulerSide:
    """One engine's. Not thread safe: vLLM's engine loop calls everything.

    Args:
        block_size, hash_size: tokens of a block, and of each entry of `Request.block_hashes`.
        num_ranks: workers that each hold a share of every block.
        max_len: tokens of the longest request that vLLM takes; 0: unknown.
        draw: draws tickets, at random.
        now_s: seconds since the epoch.
    """

    def __init__(
        self,
        options: Options,
        block_size: int,
        *,
        is_producer: bool,
        is_consumer: bool,
        hash_size: int | None = None,
        num_ranks: int = 1,
        max_len: int = 0,
        draw: Callable[[], int] = secret_number,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._options, self._draw, self._now_s = options, draw, now_s
        self._block_size, self._hash_size = block_size, hash_size or block_size
        self._roles = is_producer, is_consumer
        self._num_ranks, self._max_len = num_ranks, max_len
        self._most_loading: int | None = None  # blocks of all loads together
        self._holds: Holds | None = None
        self._shadow: Shadow | None = None
        self._orders = Orders()
        self._wanted: dict[str, tuple[LoadAsk, bytes]] = {}  # not admitted yet
        self._loads: dict[str, _Load] = {}
        # Of requests that live, for their answers.
        self._errors: dict[str, str] = {}
        self._loaded_of: dict[str, tuple[int, int, int]] = {}  # room, tokens loaded, and cached
        self._hits: dict[str, int] = {}  # tokens that were cached when it was matched last
        self._joined: set[str] = set()  # have waited for another's load
        self._followers: set[str] = set()  # other choices of a prompt that another request loads
        self._rooms: dict[int, bytes] = {}  # wanted or loading: the digest of the prompt
        self._recent: dict[int | tuple[str, int], None] = {}  # rooms, the oldest first
        self._quiet_steps = 0  # in a row, in which nothing was ordered, computed or heard
        self._bell, self._bells = "", 0
        self._told_gauges = dict.fromkeys(GAUGES, 0.0)
        self.flights = Flights()
        self.counters = Counters()
        self.sends = Sends(
            block_size,
            num_ranks,
            self.counters,
            offer_timeout_s=options.offer_timeout_s,
            offer_grace_s=options.offer_grace_s,
            now_s=now_s,
            address=options.reached_at,
        )

    def bind(self, pool: BlockPool, shadow: Shadow | None = None) -> None:
        """vLLM has made its block pool. `shadow` names its victims, where a policy does."""
        self._holds, self._shadow = Holds(pool), shadow
        if all(self._roles):
            usable = len(pool.blocks) - 1  # vLLM keeps a null block
            longest = pages_for(self._max_len, self._block_size) if self._max_len else usable
            computing = min(longest, usable // 2)
            self.sends.most_blocks, self._most_loading = computing, usable - computing

    @property
    def holds(self) -> Holds:
        assert self._holds is not None, "bind comes before any request"
        return self._holds

    # --- requests ---------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request has come. What its parameters ask for in vain it does without: vLLM computes
        its prompt, and the answer says why. One that is there to be ended at once says that a
        client has left: the peer is told if the room was never seen."""
        rid = request.request_id
        try:
            ask = ask_of(request.kv_transfer_params, *self._roles)
            if ask is None:
                return
            if isinstance(ask, OfferAsk):
                self.sends.draw(request, ask)
                return
            room = ask.room if isinstance(ask, LoadAsk) else (ask.decode, ask.room)
            if request.abort_immediately and room in self._recent:
                return  # what became of the room was seen to when the request itself ended
            self._seen(room)
            if isinstance(ask, LoadAsk):
                self._begin_load(request, ask)
            else:
                self.sends.begin(request, ask, self._orders)
        except CallerError as error:
            self._say(rid, str(error))

    def _seen(self, room: int | tuple[str, int]) -> None:
        self._recent[room] = None
        if len(self._recent) > RECENT_ROOMS:
            del self._recent[next(iter(self._recent))]

    def _begin_load(self, request: Any, ask: LoadAsk) -> None:
        """Raises CallerError for a prompt that is not loaded; prefill hears of it where the room is
        this request's."""
        rid, known = request.request_id, self._rooms.get(ask.room)
        try:
            if rid in self._loads:
                raise RequestError(f"a request of the id {rid!r} is still being transferred")
            digest = digest_of(request, ask.nonce)
        except CallerError as error:
            if known is None:
                self._order_refusal(ask, str(error))
            raise
        if known == digest:
            self._followers.add(rid)  # `n` choices are so many requests, with the same parameters
            return
        if known is not None:
            raise RequestError(f"room {ask.room} is in use by another request")
        if computes_all(request):
            self._order_refusal(ask, "decode computes it itself")
            return
        self._rooms[ask.room] = digest
        self._wanted[rid] = ask, digest

    def _say(self, rid: str, error: str, level: int = logging.WARNING) -> None:
        _log.log(level, "request %s: %s", rid, error)
        self.counters.add("requests_in_error")
        self._errors[rid] = error

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first `num_computed` can be loaded; None: ask again. May be
        called any number of times."""
        rid = request.request_id
        num_free = self.holds.num_free
        may_start = self.sends.may_start(rid, num_free, self._orders)
        if may_start is not None:
            return (0, False) if may_start else (None, False)
        missing = request.num_prompt_tokens - num_computed
        # All of its blocks: those that are in the prefix cache may be among the free ones. One that
        # was preempted has more tokens than its prompt.
        need = pages_for(len(request.all_token_ids), self._block_size) - num_free
        # Whatever a promised prompt or a load stands behind in vLLM's queue, another server waits.
        is_waited_for = bool(self._wanted) or self.sends.owes
        grace_s = 0.0 if is_waited_for else self._options.offer_grace_s
        self.sends.make_room(need, grace_s, self._orders)
        if rid not in self._wanted and rid not in self._followers:
            return 0, False
        self._hits[rid] = num_computed
        if missing <= self._options.recompute_below:
            return 0, False
        if self._options.join_flights or rid in self._followers:
            hashes = self._hashes(request, num_computed, num_computed + self._block_size)
            if hashes and self.flights.carrier(hashes[0]) not in (None, rid):
                self._joined.add(rid)
                return None, False  # it will be in the prefix cache
        if rid in self._followers:
            return 0, False
        if self._most_loading is not None:
            num_blocks = pages_for(request.num_prompt_tokens, self._block_size)
            if num_blocks > self._most_loading:
                return 0, False  # it could never be loaded, and is computed here
            loading = sum(load.num_blocks for load in self._loads.values())
            if loading + num_blocks > self._most_loading:
                return None, False
        return missing, True

    def _hashes(self, request: Any, start: int, end: int) -> list[Any]:
        """Of whole blocks of the prompt from token `start` to `end`, the hash of each. The last
        ones may have none yet, where a hash depends on tokens behind its block."""
        size, per_block = self._block_size, self._block_size // self._hash_size
        end = min(end, request.num_prompt_tokens, len(request.block_hashes) * self._hash_size)
        blocks = range(start // size, end // size)
        return [request.block_hashes[(block + 1) * per_block - 1] for block in blocks]

    def allocated(self, request: Any, pages: Sequence[int], num_external: int) -> None:
        """vLLM has admitted a request. `pages` are all its blocks; the KV of its last
        `num_external` prompt tokens is to be loaded."""
        rid = request.request_id
        self.sends.allocated(rid)
        if self._shadow is not None and request.prompt_token_ids is not None:
            tokens = request.prompt_token_ids
            whole = pages[: len(tokens) // self._block_size]
            self._shadow.admitted(rid, tokens, whole, namespace_of(request))
        wanted, hit = self._wanted.pop(rid, None), self._hits.pop(rid, 0)
        self._followers.discard(rid)
        if rid in self._joined:
            self._joined.discard(rid)
            self.counters.add("flights_joined")
        if wanted is None:
            return  # asks for nothing, or has been loaded already
        ask, digest = wanted
        if num_external <= 0:
            self._loaded_of[rid] = ask.room, 0, hit
            self._refuse(ask, "decode computes it itself")
            return
        num_tokens = request.num_prompt_tokens
        prefix_len = num_tokens - num_external
        first, end = prefix_len // self._block_size, pages_for(num_tokens, self._block_size)
        mine = tuple(pages[first:end])
        self._loads[rid] = _Load(ask.room, end, mine, self._num_ranks, self._now_s())
        self._loaded_of[rid] = ask.room, num_external, prefix_len
        self.flights.begin(rid, self._hashes(request, prefix_len, num_tokens))
        self._orders.opens.append(
            Open(rid, ask.room, ask.prefill, num_tokens, prefix_len, mine, digest, self._draw())
        )

    def _refuse(self, ask: LoadAsk, reason: str) -> None:
        del self._rooms[ask.room]
        self._order_refusal(ask, reason)

    def _order_refusal(self, ask: LoadAsk, reason: str) -> None:
        self._orders.refusals.append(Refuse(ask.room, ask.prefill, reason, self._draw()))
        self.counters.add("loads_refused")

    def finished(self, request: Any, pages: Sequence[int]) -> dict[str, Any] | None:
        """A request has ended, however it did, and has these blocks still. Returns what its answer
        says of its transfer."""
        rid = request.request_id
        if self._shadow is not None and request.prompt_token_ids is not None:
            blocks = self._cached(request, pages)
            self._shadow.ended(rid, request.all_token_ids, blocks, namespace_of(request))
        self._joined.discard(rid)
        self._followers.discard(rid)
        self._hits.pop(rid, None)
        if (wanted := self._wanted.pop(rid, None)) is not None:
            self._refuse(wanted[0], "decode's request ended before it was admitted")
        load = self._loads.get(rid)
        if load is not None and not load.over:
            load.left = True
            self._orders.abort_loads[rid] = "decode's request ended"
            self.flights.land(rid)
        said = self.sends.finished(rid, self._orders)
        error, loaded = self._errors.pop(rid, None), self._loaded_of.pop(rid, None)
        if error is not None:
            return {**(said or {}), "prefixkv": {"error": error}}
        if loaded is not None:
            names = "room", "loaded_tokens", "cached_tokens"
            return {"prefixkv": dict(zip(names, loaded, strict=True))}
        return said

    def take_ended(self) -> dict[str, dict[str, Any]]:
        """Requests that vLLM is to end now, since decode does not want them, and what their answers
        say. vLLM tells `finished` of each."""
        ended = {rid: {"prefixkv": {"error": error}} for rid, error in self.sends.ending.items()}
        self.counters.add("requests_ended", len(ended))
        return ended

    def _cached(self, request: Any, pages: Sequence[int]) -> list[int]:
        """Of a request's blocks, those that are in the prefix cache."""
        whole = min(request.num_computed_tokens, len(request.all_token_ids)) // self._block_size
        cached = self.holds.is_cached
        return list(takewhile(cached, pages[:whole]))

    # --- steps ------------------------------------------------------------------------------------

    def orders(self, step: Any) -> Orders:
        """What the workers are to do in this step of the engine, a vLLM `SchedulerOutput`."""
        scheduled = step.num_scheduled_tokens
        for new in step.scheduled_new_reqs:
            self._compute(new.req_id, new.num_computed_tokens, step)
        again = step.scheduled_cached_reqs
        for rid, computed in zip(again.req_ids, again.num_computed_tokens, strict=True):
            self._compute(rid, computed, step)
        orders, self._orders = self._orders, Orders()
        self._quiet_steps = 0 if orders or scheduled else self._quiet_steps + 1
        if self._bells < self._num_ranks:
            orders.bell = self._bell
        return orders

    def _compute(self, rid: str, computed: int, step: Any) -> None:
        def table() -> list[int]:
            (pages,) = step.kv_connector_block_state.get_block_ids(rid)
            return list(pages)

        count = step.num_scheduled_tokens[rid]
        self.sends.compute(rid, computed, count, table, self.holds, self._orders)

    def heard(self, news: News | None, received: Iterable[str]) -> None:
        """What the workers said, and which loads vLLM takes for over. Before vLLM frees their
        blocks."""
        news = news or News()
        received = list(received)
        if news.has_outcomes or received:
            self._quiet_steps = 0
        self._bells += news.bells
        self.sends.address = self.sends.address or news.address
        for rid, error in news.failed.items():
            if rid in self._loads:
                self._loads[rid].error, self._loads[rid].refused = error, rid in news.refused
        for rid in news.settled:
            if rid in self._loads:
                self._loads[rid].unsettled -= 1
        for rid in news.overdue:
            if rid in self._loads:
                self._loads[rid].overdue = True
        for rid in received:
            self._received(rid)
        for rid in {*news.settled, *received}:
            self._settle(rid)
        for rid in news.promised:
            self.sends.promised(rid)
        for rid, error in news.unsent.items():
            self.sends.unsent(rid, error)
        for rid in news.freed:
            self.sends.freed(rid, self.holds)

    def _received(self, rid: str) -> None:
        load = self._loads.get(rid)
        if load is None:
            return
        load.over = True
        self.flights.land(rid)
        if not load.error:
            self.counters.add("loads_done")
            return
        self.counters.add("loads_failed")
        if not load.left:
            self._say(rid, load.error, logging.DEBUG if load.refused else logging.WARNING)
        if load.unsettled > 0:
            self.holds.take(rid, load.pages)

    def _settle(self, rid: str) -> None:
        load = self._loads.get(rid)
        if load is not None and load.over and load.unsettled <= 0:
            self.holds.release(rid)
            del self._rooms[load.room]
            del self._loads[rid]

    # --- the whole --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether proofs are expected, so that the engine has to go on stepping. Not for those that
        are overdue, nor for offers where no bell wakes the engine: they are heard with the next
        request."""
        sends = self.sends.sends.values()
        moves = self._orders.weights_version is not None  # the workers are told with a step
        return (
            moves
            or any(self.has_bells or not send.is_offer for send in sends)
            or any(load.over and not load.overdue for load in self._loads.values())
        )

    def flush(self) -> None:
        """The weights change: KV that was computed with the former ones must not arrive any more.
        Loads under way fail, and sends end."""
        for rid, load in self._loads.items():
            if not load.over:
                self._orders.abort_loads[rid] = "the cache is being reset"
        self.sends.flush(self._orders)
        if self._shadow is not None:
            self._shadow.flush()

    def move_weights(self, weights_version: str) -> None:
        """The weights are of this version from now on: loads under way fail, sends end, and what
        another server has of another version is refused. Raises ConfigError, with nothing changed,
        for what is no version."""
        check_version(weights_version)
        self.flush()
        # Rooms that were ordered before are of the former version, those ordered later are not.
        self._orders = Orders(weights_version=weights_version, before=self._orders)

    # --- a server that only waits -----------------------------------------------------------------

    def hang_bell(self, address: str) -> None:
        """Workers that have news can ring at this address."""
        self._bell = address

    @property
    def has_bells(self) -> bool:
        """Whether every worker rings when it has news."""
        return bool(self._bell) and self._bells >= self._num_ranks

    def rest_s(self) -> float:
        """How long the engine may rest, seconds, where neither a new request nor a bell wakes it;
        0: it has to step.

        An order and its news may be two steps apart where the engine works ahead, so the last
        steps must all have been quiet.
        """
        if not self.has_bells or self._orders or self._quiet_steps < QUIET_STEPS:
            return 0.0
        next_s = self.sends.next_grace_s
        return (
            LONGEST_REST_S
            if next_s is None
            else min(max(next_s - self._now_s(), 0.0) or LONGEST_REST_S, LONGEST_REST_S)
        )

    # --- counts -----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        return self.counters.take()

    def take_gauges(self) -> dict[str, float]:
        """All gauges, where one has changed since the last call."""
        gauges = self.gauges()
        if gauges == self._told_gauges:
            return {}
        self._told_gauges = gauges
        return gauges

    def gauges(self) -> dict[str, float]:
        """How many there are now, and since when the oldest, in seconds since the epoch (0: there
        is none). By the names of `stats.GAUGES`."""
        loads = [load.since_s for load in self._loads.values() if not load.over]
        unpromised = self.sends.waiting_since(offers=False)
        offers = self.sends.waiting_since(offers=True)
        return {
            "loads_waiting": len(loads),
            "oldest_load_timestamp_seconds": min(loads, default=0.0),
            "loads_unsettled": len(self._loads) - len(loads),
            "sends_open": len(self.sends.sends),
            "sends_unpromised": len(unpromised),
            "oldest_unpromised_timestamp_seconds": min(unpromised, default=0.0),
            "offers_open": len(offers),
            "oldest_offer_timestamp_seconds": min(offers, default=0.0),
            "held_blocks": self.holds.num_blocks,
        }

    def check_invariants(self) -> None:
        """For tests."""
        loads, wanted, sends = self._loads.values(), self._wanted.values(), self.sends
        rooms = [load.room for load in loads] + [ask.room for ask, _ in wanted]
        loading = sum(load.num_blocks for load in loads)
        check_laws(
            {
                "a room is one request's": sorted(rooms) == sorted(self._rooms),
                "as on prefill": {send.room for send in sends.sends.values()} == sends.rooms.keys(),
                "a load that is over is unsettled": all(
                    load.unsettled > 0 for load in loads if load.over
                ),
                "what waits is wanted": self._joined <= self._wanted.keys() | self._followers,
                "what is not promised holds nothing": not any(
                    send.unpromised > 0 and (send.started or send.num_pages)
                    for send in sends.sends.values()
                ),
                "loads leave blocks to compute with": self._most_loading is None
                or loading <= self._most_loading,
            },
            self._rooms,
            self.sends,
            self._loads,
        )
        self.flights.check_invariants()
        self.holds.check_invariants()
