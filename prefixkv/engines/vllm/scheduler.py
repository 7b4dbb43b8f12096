"""The connector in vLLM's scheduler: decides what is loaded and sent, and holds the blocks.

It runs in the engine's process and has no memory of KV; `worker` has. It knows vLLM's requests and
blocks by their attributes and imports nothing of vLLM.

Who frees a block. Decode: the blocks of a load are the request's. Where the load fails, vLLM takes
them from the request at once (to compute elsewhere, or to end it); from then on they are held here
until every worker says that no peer writes them any more. Prefill: from the step that computes a
block on it is held here too, until every worker says that no write reads it. So neither a client
that leaves nor a preemption makes a block free that is on its way.

    wanted --allocated--> loading --finished_recving--> over --settled by all ranks--> forgotten
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from prefixkv.engines.vllm.asks import (
    Abandoned,
    LoadAsk,
    SendAsk,
    ask_of,
    digest_of,
    namespace_of,
)
from prefixkv.engines.vllm.flights import Flights
from prefixkv.engines.vllm.holds import BlockPool, Holds
from prefixkv.engines.vllm.options import Options
from prefixkv.engines.vllm.orders import Add, Chunk, News, Open, Orders, Refuse
from prefixkv.engines.vllm.shadow import Shadow
from prefixkv.engines.vllm.stats import Counters
from prefixkv.errors import CallerError, RequestError, check_laws
from prefixkv.paging import pages_for
from prefixkv.runtime.transfers import secret_number

_log = logging.getLogger("vllm.prefixkv")

RECENT_ROOMS: Final = 4096
"""Where a client leaves, vLLM adds a request of its parameters and ends it at once, whether or not
its own has reached the engine. Rooms that were seen are known for so many others."""


@dataclass(slots=True)
class _Load:
    room: int
    pages: tuple[int, ...]
    unsettled: int  # ranks whose pages a peer may still write
    error: str = ""
    left: bool = False  # its request has ended
    over: bool = False  # vLLM has been told its outcome
    overdue: bool = False


@dataclass(slots=True)
class _Send:
    room: tuple[str, int]  # of which decode server
    num_tokens: int
    unfreed: int  # ranks whose pages a write may still read
    end: int = 0  # tokens whose computing was ordered
    num_pages: int = 0  # that were handed over


class SchedulerSide:
    """One engine's. Not thread safe: vLLM's engine loop calls everything.

    Args:
        block_size, hash_size: tokens of a block, and of each entry of `Request.block_hashes`.
        num_ranks: workers that each hold a share of every block.
        draw: draws tickets, at random.
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
        draw: Callable[[], int] = secret_number,
    ) -> None:
        self._options, self._draw = options, draw
        self._block_size, self._hash_size = block_size, hash_size or block_size
        self._roles = is_producer, is_consumer
        self._num_ranks = num_ranks
        self._holds: Holds | None = None
        self._shadow: Shadow | None = None
        self._orders = Orders()
        self._wanted: dict[str, tuple[LoadAsk, bytes]] = {}  # not admitted yet
        self._loads: dict[str, _Load] = {}
        self._sends: dict[str, _Send] = {}
        self._errors: dict[str, str] = {}  # of requests that live, for their answer
        self._joined: set[str] = set()  # have waited for another's load
        self._followers: set[str] = set()  # other choices of a prompt that another request loads
        self._rooms: dict[int, bytes] = {}  # wanted or loading: the digest of the prompt
        self._send_rooms: dict[tuple[str, int], bytes] = {}
        self._recent: dict[int | tuple[str, int], None] = {}  # rooms, the oldest first
        self.flights = Flights()
        self.counters = Counters()

    def bind(self, pool: BlockPool, shadow: Shadow | None = None) -> None:
        """vLLM has made its block pool. `shadow` names its victims, where a policy does."""
        self._holds, self._shadow = Holds(pool), shadow

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
            if isinstance(ask, Abandoned):
                self._abandon(ask)
                return
            room = ask.room if isinstance(ask, LoadAsk) else (ask.decode, ask.room)
            if request.abort_immediately and room in self._recent:
                return  # what became of the room was seen to when the request itself ended
            self._seen(room)
            if rid in self._loads or rid in self._sends:
                raise RequestError(f"a request of the id {rid!r} is still being transferred")
            digest = digest_of(request)
            if isinstance(ask, LoadAsk):
                self._begin_load(rid, ask, digest)
            else:
                self._begin_send(request, ask, digest)
        except CallerError as error:
            self._say(rid, str(error))

    def _seen(self, room: int | tuple[str, int]) -> None:
        self._recent[room] = None
        if len(self._recent) > RECENT_ROOMS:
            del self._recent[next(iter(self._recent))]

    def _abandon(self, ask: Abandoned) -> None:
        """Prefill has these rooms and would wait for a request that is lost: it is told so. A room
        that was seen here is seen to by its own request."""
        for load in ask.loads:
            if load.room not in self._recent and load.room not in self._rooms:
                self._seen(load.room)
                self._order_refusal(load, "decode never had the request")

    def _begin_load(self, rid: str, ask: LoadAsk, digest: bytes) -> None:
        if self._rooms.get(ask.room) == digest:
            self._followers.add(rid)  # `n` choices are so many requests, with the same parameters
            return
        if ask.room in self._rooms:
            raise RequestError(f"room {ask.room} is in use by another request")
        self._rooms[ask.room] = digest
        self._wanted[rid] = ask, digest

    def _begin_send(self, request: Any, ask: SendAsk, digest: bytes) -> None:
        room = ask.decode, ask.room
        if self._send_rooms.get(room) == digest:
            return
        if room in self._send_rooms:
            raise RequestError(f"room {ask.room} of {ask.decode} is in use by another request")
        self._send_rooms[room] = digest
        rid, num_tokens = request.request_id, request.num_prompt_tokens
        self._sends[rid] = _Send(room, num_tokens, self._num_ranks)
        self._orders.adds.append(Add(rid, ask.room, ask.decode, num_tokens, digest))

    def _say(self, rid: str, error: str) -> None:
        _log.warning("request %s: %s", rid, error)
        self.counters.add("requests_in_error")
        self._errors[rid] = error

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first `num_computed` can be loaded; None: ask again. May be
        called any number of times."""
        rid = request.request_id
        if rid not in self._wanted and rid not in self._followers:
            return 0, False
        missing = request.num_prompt_tokens - num_computed
        if missing <= self._options.recompute_below:
            return 0, False
        if self._options.join_flights or rid in self._followers:
            hashes = self._hashes(request, num_computed, num_computed + self._block_size)
            if hashes and self.flights.carrier(hashes[0]) not in (None, rid):
                self._joined.add(rid)
                return None, False  # it will be in the prefix cache
        return (0, False) if rid in self._followers else (missing, True)

    def _hashes(self, request: Any, start: int, end: int) -> list[Any]:
        """Of whole blocks of the prompt from token `start` to `end`, the hash of each."""
        size, per_block = self._block_size, self._block_size // self._hash_size
        end = min(end, request.num_prompt_tokens)
        blocks = range(start // size, end // size)
        return [request.block_hashes[(block + 1) * per_block - 1] for block in blocks]

    def allocated(self, request: Any, pages: Sequence[int], num_external: int) -> None:
        """vLLM has admitted a request. `pages` are all its blocks; the KV of its last
        `num_external` prompt tokens is to be loaded."""
        rid = request.request_id
        if self._shadow is not None and request.prompt_token_ids is not None:
            tokens = request.prompt_token_ids
            whole = pages[: len(tokens) // self._block_size]
            self._shadow.admitted(rid, tokens, whole, namespace_of(request))
        wanted = self._wanted.pop(rid, None)
        self._followers.discard(rid)
        if rid in self._joined:
            self._joined.discard(rid)
            self.counters.add("flights_joined")
        if wanted is None:
            return  # asks for nothing, or has been loaded already
        ask, digest = wanted
        if num_external <= 0:
            self._refuse(ask, "decode computes it itself")
            return
        num_tokens = request.num_prompt_tokens
        prefix_len = num_tokens - num_external
        first, end = prefix_len // self._block_size, pages_for(num_tokens, self._block_size)
        mine = tuple(pages[first:end])
        self._loads[rid] = _Load(ask.room, mine, self._num_ranks)
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
        if (wanted := self._wanted.pop(rid, None)) is not None:
            self._refuse(wanted[0], "decode's request ended before it was admitted")
        load = self._loads.get(rid)
        if load is not None and not load.over:
            load.left = True
            self._orders.abort_loads[rid] = "decode's request ended"
            self.flights.land(rid)
        send = self._sends.get(rid)
        if send is not None and send.end < send.num_tokens:
            self._orders.abort_sends[rid] = "prefill's request ended"
        error = self._errors.pop(rid, None)
        return None if error is None else {"prefixkv": {"error": error}}

    def _cached(self, request: Any, pages: Sequence[int]) -> list[int]:
        """Of a request's blocks, those that are in the prefix cache."""
        whole = min(request.num_computed_tokens, len(request.all_token_ids)) // self._block_size
        cached = self.holds.is_cached
        return list(takewhile(cached, pages[:whole]))

    # --- steps ------------------------------------------------------------------------------------

    def orders(self, step: Any) -> Orders:
        """What the workers are to do in this step of the engine, a vLLM `SchedulerOutput`."""
        if self._sends:
            for new in step.scheduled_new_reqs:
                self._compute(new.req_id, new.num_computed_tokens, step)
            again = step.scheduled_cached_reqs
            for rid, computed in zip(again.req_ids, again.num_computed_tokens, strict=True):
                self._compute(rid, computed, step)
        orders, self._orders = self._orders, Orders()
        return orders

    def _compute(self, rid: str, computed: int, step: Any) -> None:
        """A request that is preempted comes here from its beginning again: its blocks up to
        `send.end` were held and handed over, whatever its new ones are."""
        send = self._sends.get(rid)
        if send is None:
            return
        end = min(computed + step.num_scheduled_tokens[rid], send.num_tokens)
        if end <= send.end:
            return
        send.end = end
        last = end == send.num_tokens
        stop = pages_for(end, self._block_size) if last else end // self._block_size
        if stop == send.num_pages and not last:
            return  # a block that is computed in part waits
        (table,) = step.kv_connector_block_state.get_block_ids(rid)
        first, pages = send.num_pages, tuple(table[send.num_pages : stop])
        send.num_pages = stop
        self.holds.take(rid, pages)
        end = min(end, stop * self._block_size)
        self._orders.chunks.append(Chunk(rid, first, pages, end, last))

    def heard(self, news: News | None, received: Iterable[str]) -> None:
        """What the workers said, and which loads vLLM takes for over. Before vLLM frees their
        blocks."""
        news = news or News()
        for rid, error in news.failed.items():
            if rid in self._loads:
                self._loads[rid].error = error
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
        for rid, error in news.unsent.items():
            self._unsent(rid, error)
        for rid in news.freed:
            self._freed(rid)

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
            self._say(rid, load.error)
        if load.unsettled > 0:
            self.holds.take(rid, load.pages)

    def _settle(self, rid: str) -> None:
        load = self._loads.get(rid)
        if load is not None and load.over and load.unsettled <= 0:
            self.holds.release(rid)
            del self._rooms[load.room]
            del self._loads[rid]

    def _unsent(self, rid: str, error: str) -> None:
        if rid in self._sends:
            self.counters.add("sends_failed")
            _log.warning("request %s was not sent: %s", rid, error)

    def _freed(self, rid: str) -> None:
        send = self._sends.get(rid)
        if send is None:
            return
        send.unfreed -= 1
        if send.unfreed <= 0:
            self.holds.release(rid)
            del self._send_rooms[send.room]
            del self._sends[rid]
            self.counters.add("sends_over")

    # --- the whole --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether proofs are expected, so that the engine has to go on stepping. Not for those that
        are overdue: they are heard with the next request."""
        return bool(self._sends) or any(
            load.over and not load.overdue for load in self._loads.values()
        )

    def flush(self) -> None:
        """The weights change: KV that was computed with the former ones must not arrive any more.
        Loads under way fail, and sends end."""
        for rid, load in self._loads.items():
            if not load.over:
                self._orders.abort_loads[rid] = "the cache is being reset"
        for rid in self._sends:
            self._orders.abort_sends[rid] = "the cache is being reset"
        if self._shadow is not None:
            self._shadow.flush()

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        return self.counters.take()

    def gauges(self) -> dict[str, int]:
        """How many there are now."""
        return {
            "loading": sum(not load.over for load in self._loads.values()),
            "unsettled": sum(load.over for load in self._loads.values()),
            "sending": len(self._sends),
            "held_blocks": self.holds.num_blocks,
        }

    def check_invariants(self) -> None:
        """For tests."""
        loads, wanted = self._loads.values(), self._wanted.values()
        rooms = [load.room for load in loads] + [ask.room for ask, _ in wanted]
        check_laws(
            {
                "a room is one request's": sorted(rooms) == sorted(self._rooms),
                "as on prefill": {send.room for send in self._sends.values()}
                == self._send_rooms.keys(),
                "a load that is over is unsettled": all(
                    load.unsettled > 0 for load in loads if load.over
                ),
                "what waits is wanted": self._joined <= self._wanted.keys() | self._followers,
            },
            self._rooms,
            self._send_rooms,
            self._loads,
        )
        self.flights.check_invariants()
        self.holds.check_invariants()
