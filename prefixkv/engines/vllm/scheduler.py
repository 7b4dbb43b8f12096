"""The connector in vLLM's scheduler: it decides which prompts are loaded and sent, and holds the
blocks that peers may still use, so that no block is freed into which a peer writes (`loads`,
`sends`). It runs in the engine's process, without access to KV memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from prefixkv import Hints
from prefixkv.engines.vllm.asks import (
    DrawAsk,
    LoadAsk,
    ask_of,
    computes_all,
    hints_of_request,
    leave_out_last_token,
    namespace_of,
)
from prefixkv.engines.vllm.blocks import BlockPool, Flights, Holds
from prefixkv.engines.vllm.compute import OwnCompute
from prefixkv.engines.vllm.groups import BlockGroups, Tables
from prefixkv.engines.vllm.host import HostBlocks
from prefixkv.engines.vllm.host_events import HostEvent
from prefixkv.engines.vllm.loads import ScheduledLoads
from prefixkv.engines.vllm.options import ConnectorOptions
from prefixkv.engines.vllm.orders import StepOrders, WorkerReport
from prefixkv.engines.vllm.rest import Rest
from prefixkv.engines.vllm.sends import ScheduledSends
from prefixkv.engines.vllm.shadow import Shadow
from prefixkv.engines.vllm.stats import GAUGES, Counters
from prefixkv.engines.vllm.turns import Turns
from prefixkv.errors import CallerError, RequestError, check_laws
from prefixkv.spi import check_version, pages_for, secret_number

_log = logging.getLogger("vllm.prefixkv")

RECENT_ROOMS: Final = 4096
"""Number of rooms that are remembered. Where a client leaves, vLLM adds a request with the same
parameters and ends it at once, whether or not the original has reached the engine; a remembered
room tells the two cases apart."""


GIVEN_UP: Final = frozenset(["FINISHED_ABORTED", "FINISHED_ERROR"])
"""States of a vLLM request of which nothing is kept beyond what had been proved before."""


NOT_FINITE: Final = "NotFiniteError"
"""In the reason of a request whose logits had NaN, as its peer hears it too."""
NAN_LOG_EVERY_S: Final = 60.0
"""Seconds between two lines of the log about such requests."""


class _HostPart(NamedTuple):
    """Blocks `start` up to `end`, loaded from host memory if this step admits the request."""

    start: int
    end: int


class SchedulerSide:
    """The scheduler's side of one engine. Not thread safe: the engine's loop makes every call.

    Each of `num_ranks` workers holds a share of every block. `hash_size` is the tokens of an entry
    of `Request.block_hashes`. `max_len` is 0 if unknown. `draw` returns a new random ticket.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        block_size: int,
        *,
        is_producer: bool,
        is_consumer: bool,
        hash_size: int | None = None,
        groups: BlockGroups | None = None,
        num_ranks: int = 1,
        max_len: int = 0,
        step_tokens: int = 2048,
        draw: Callable[[], int] = secret_number,
        now_s: Callable[[], float] = time.time,
        tells_host: bool = False,
    ) -> None:
        self._tells_host = tells_host
        self._options, self._now_s = options, now_s
        self._block_size, self._hash_size = block_size, hash_size or block_size
        self._groups = groups or BlockGroups(block_size)
        self._roles = is_producer, is_consumer
        self._num_ranks, self._max_len = num_ranks, max_len
        self._holds: Holds | None = None
        self._shadow: Shadow | None = None
        self._orders = StepOrders()
        self._host: HostBlocks | None = None
        self._host_parts: dict[str, _HostPart] = {}  # of requests that vLLM has asked about
        # Parts of the answers of live requests; `finished` takes them out.
        self._errors: dict[str, str] = {}
        self._hints: dict[str, Hints] = {}
        # Room, tokens loaded, cached, and of these the ones that came from host memory.
        self._loaded_of: dict[str, tuple[int, int, int, int]] = {}
        self._hits: dict[str, int] = {}  # tokens that were cached when it was matched last
        self._spoilt: set[int] = set()  # blocks that may hold NaN
        self._next_nan_log_s = 0.0
        # Of requests that have ended with tokens in steps under way: how many, and the hashes.
        self._in_flight: dict[str, tuple[int, list[Any]]] = {}
        self._joined: set[str] = set()  # requests that waited for another request's load
        self._recent: dict[int | tuple[str, int], None] = {}  # rooms, the oldest first
        self._reported_gauges = dict.fromkeys(GAUGES, 0.0)
        self.flights = Flights()
        self.counters = Counters()
        self._step_tokens = step_tokens
        self.compute = OwnCompute(
            options.compute_below, step_tokens, loads=options.host is not None
        )
        self.sends = ScheduledSends(
            self._groups,
            num_ranks,
            self.counters,
            offer_timeout_s=options.offer_timeout_s,
            offer_grace_s=options.offer_grace_s,
            now_s=now_s,
            address=options.reached_at,
        )
        self.loads = ScheduledLoads(
            self._groups, num_ranks, block_size, self.counters, draw=draw, now_s=now_s
        )
        self._turns = Turns(self.loads, self.sends, bool(self._groups.windows))
        self._rest = Rest(num_ranks)

    def bind(self, pool: BlockPool, shadow: Shadow | None = None) -> None:
        """Take the block pool, once it exists. `shadow` names victims where a policy is set."""
        self._holds, self._shadow = Holds(pool), shadow
        if (host := self._options.host) is not None:
            # What a step may need, but no large part of a small pool: writes would never begin.
            spare = min(pages_for(self._step_tokens, self._block_size), len(pool.blocks) // 8)
            policy = str(host.policy)
            self._host = HostBlocks(
                self._holds, policy, spare, self._num_ranks,
                lambda: self.compute.now_s(), self._tells_host,
            )  # fmt: skip
        # A server of both roles keeps blocks back for computing. If loads could fill it, it would
        # wait for another server, and that server's loads might wait for this one: a deadlock.
        if all(self._roles):
            usable = len(pool.blocks) - 1  # vLLM keeps a null block
            longest = self._groups.blocks_of(self._max_len) if self._max_len else usable
            computing = min(longest, usable // 2)
            self.sends.most_blocks, self.loads.most_blocks = computing, usable - computing

    @property
    def holds(self) -> Holds:
        """It exists from `bind` on."""
        assert self._holds is not None, "bind comes before any request"
        return self._holds

    # --- requests ---------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Register a request, and begin its transfer. If that is refused, vLLM computes the prompt,
        and the answer has the reason. A request that vLLM adds only to end it at once stands for a
        client that has left: the peer is informed if the original request never came here."""
        rid = request.request_id
        try:
            if (hints := hints_of_request(request)) != Hints():
                self._hints[rid] = hints
        except RequestError as error:
            self._record_error(rid, str(error))
        try:
            ask = ask_of(request.kv_transfer_params, *self._roles)
            if ask is None:
                return
            if isinstance(ask, DrawAsk):
                self.sends.draw(request, ask)
                self._end_before_last(request)
                return
            room = ask.room if isinstance(ask, LoadAsk) else (ask.decode, ask.room)
            if request.abort_immediately and room in self._recent:
                return  # what became of the room was seen to when the request itself ended
            # Before the parameters are checked further: a refused room has been dealt with too.
            self._remember_room(room)
            if isinstance(ask, LoadAsk):
                self.loads.begin(request, ask, self._orders)
            else:
                self.sends.begin(request, ask, self._orders)
                self._end_before_last(request)
        except CallerError as error:
            self._record_error(rid, str(error))

    def _end_before_last(self, request: Any) -> None:
        """Leave a prompt's last token out, where layers keep a state: it has no way back."""
        if self._groups.has_states:
            leave_out_last_token(request, self._hash_size)

    def _remember_room(self, room: int | tuple[str, int]) -> None:
        self._recent[room] = None
        if len(self._recent) > RECENT_ROOMS:
            del self._recent[next(iter(self._recent))]

    def _record_error(self, rid: str, error: str, level: int = logging.WARNING) -> None:
        _log.log(level, "request %s: %s", rid, error)
        self.counters.add("requests_in_error")
        self._errors[rid] = error

    def ignores_windows(self, request: Any) -> bool:
        """Return whether vLLM has to look for a prefix in the group that keeps every token alone:
        its windows are loaded with it. Not where another connector may load the request."""
        is_wanted = request.request_id in self.loads.wanted and self.sends.can_end
        if not self._groups.windows or not is_wanted:
            return False
        return self.loads.could_fit(self._groups.blocks_of(request.num_prompt_tokens))

    def count_loadable(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `num_computed` can be loaded: (tokens,
        asynchronous). (None, False): vLLM has to ask again later; (0, False): it computes the
        prompt. It may ask any number of times before it admits the request."""
        rid = request.request_id
        num_free = self.holds.num_free
        # Before all else: a preempted send holds blocks that any other request may lack.
        if self.sends.must_yield(rid):
            return None, False
        # 1. A promised send on prefill: the order law decides whether it may start.
        may_start = self.sends.may_start(rid, num_free, self._orders)
        if may_start is not None:
            return (0, False) if may_start else (None, False)
        missing = self._groups.num_sent(request.num_prompt_tokens) - num_computed
        # 2. Any other request may need blocks that offers hold. All of its blocks count: those in
        # the prefix cache may be among the free ones. After a preemption it has more tokens than
        # its prompt.
        need = self._groups.blocks_of(len(request.all_token_ids)) - num_free
        # vLLM's queue is in order, so a promised send or a load behind this request waits for it,
        # and another server waits for that one: offers then get no grace.
        is_waited_for = bool(self.loads.wanted) or self.sends.has_promised_uncomputed
        grace_s = 0.0 if is_waited_for else self._options.offer_grace_s
        self.sends.make_room(need, grace_s, self._orders)
        if self._turns.must_yield(need) or self._turns.steps_back(rid, need):
            return None, False
        # 3. Not a load, or one that has been opened already; and host memory has nothing of it.
        loads = self.loads
        asks = rid in loads.wanted or rid in loads.followers
        hosted = self._in_host_memory(request, num_computed)
        if not asks and not hosted:
            return 0, False
        self._hits[rid] = num_computed
        # 4. Too little is missing for a transfer to pay.
        if asks and missing <= self._options.recompute_below:
            return 0, False
        # 5. Another request loads the first block that is missing here: wait for it instead.
        # Looked up on each call, so the wait ends with the other load, however that ends.
        if self._options.join_flights or rid in loads.followers:
            end = min(num_computed + self._block_size, request.num_prompt_tokens)
            hashes = self._hashes(request, num_computed, end)
            # One that does not ask prefill does not wait for it either: only for the same copy.
            if hashes and self._carrier(hashes[0], asks) not in (None, rid):
                self._joined.add(rid)
                return None, False  # it will be in the prefix cache
        # 6. A follower, and no load of its prompt is under way; or prefill is not asked: vLLM
        # computes what is missing, and host memory has not.
        if rid not in loads.wanted:
            return self._load_from_host(rid, num_computed, hosted)
        # Or vLLM has looked for its prefix in all groups: what it has of the window there is
        # cached, and is not to be written over.
        if self._groups.windows and num_computed and not self.ignores_windows(request):
            return 0, False
        # 7. Prefill sends it sooner than host memory has it here.
        ask, _ = loads.wanted[rid]
        if hosted and not ask.nonce:
            load_s = 0.0 if self._host is None else self._host.load_s(hosted // self._block_size)
            if not self.compute.is_worth_loading(missing, hosted, load_s, ask.prefill):
                hosted = 0
        # 8. It is quicker to compute the rest here, or that is too little for a transfer. Asked
        # behind 5., since what is on its way is not missing.
        rest = missing - hosted
        is_small = rest <= self._options.recompute_below
        # Not where prefill has drawn the room: it has computed the prompt already.
        may_compute = self.compute.is_on and not ask.nonce
        if is_small or (may_compute and self.compute.is_here(rid, rest, ask.prefill)):
            return self._load_from_host(rid, num_computed, hosted)
        # 9. A server of both roles: loads together leave blocks to compute with (see `bind`).
        if loads.most_blocks is not None:
            num_blocks = self._groups.blocks_of(request.num_prompt_tokens)
            if not loads.could_fit(num_blocks):
                # It is computed here.
                return self._load_from_host(rid, num_computed, hosted)
            if not loads.fits(num_blocks):
                return None, False
        if hosted:
            self._load_from_host(rid, num_computed, hosted)
        return missing, True

    def _in_host_memory(self, request: Any, num_computed: int) -> int:
        """Return how many tokens behind the first `num_computed` host memory has: whole blocks, and
        never the prompt's last token, which vLLM computes in any case."""
        rid = request.request_id
        self._host_parts.pop(rid, None)
        start, end = (
            num // self._block_size for num in (num_computed, request.num_prompt_tokens - 1)
        )
        if self._host is None or end <= start or computes_all(request) or rid in self.loads.pending:
            return 0
        depth = self._host.depth(
            rid, lambda: self._hashes(request, 0, end * self._block_size), start
        )
        return max(0, min(depth, end) - start) * self._block_size

    def _load_from_host(self, rid: str, num_computed: int, hosted: int) -> tuple[int, bool]:
        """Load `hosted` tokens from host memory if the request is admitted now. Returns (tokens,
        asynchronous) where prefill sends nothing."""
        if hosted:
            start, end = (num // self._block_size for num in (num_computed, num_computed + hosted))
            self._host_parts[rid] = _HostPart(start, end)
        return hosted, hosted > 0

    def _carrier(self, block_hash: Any, asks: bool) -> str | None:
        """Return the request that brings this block. `asks`: also where prefill sends it."""
        copying = self._host.carrier(block_hash) if self._host is not None else None
        return self.flights.carrier(block_hash) if copying is None and asks else copying

    def _hashes(self, request: Any, start: int, end: int) -> list[Any]:
        """Return the hash of each whole block of tokens `start` to `end`. The last ones may be
        missing: where a hash depends on tokens after its block, and where vLLM has not made it."""
        size, per_block = self._block_size, self._block_size // self._hash_size
        end = min(end, len(request.block_hashes) * self._hash_size)
        blocks = range(start // size, end // size)
        return [request.block_hashes[(block + 1) * per_block - 1] for block in blocks]

    def allocated(
        self,
        request: Any,
        pages: Sequence[int],
        num_external: int,
        windows: Sequence[Sequence[int]] = (),
    ) -> int:
        """Order the load of a request that was admitted. `pages` are all its blocks, `windows` its
        block tables in window groups; the KV of `num_external` prompt tokens behind vLLM's hit is
        to be loaded. Returns how many of these come from host memory."""
        rid = request.request_id
        self.sends.allocated(rid)
        # The shadow enters whole blocks only, as vLLM hashes whole blocks only.
        if self._shadow is not None and request.prompt_token_ids is not None:
            tokens = request.prompt_token_ids
            whole = pages[: len(tokens) // self._block_size]
            self._shadow.admitted(rid, tokens, whole, namespace_of(request))
        # vLLM calls this again after a preemption. The ask is taken out here, so a room opens once.
        wanted, hit = self.loads.wanted.pop(rid, None), self._hits.pop(rid, 0)
        self.loads.followers.discard(rid)
        self._turns.failed.discard(rid)
        if rid in self._joined:
            self._joined.discard(rid)
            self.counters.add("flights_joined")
        part = self._host_parts.pop(rid, None)
        hosted = 0
        if part is not None and num_external > 0:
            hosted = self._order_host_load(request, pages, part)
        is_sent = num_external > hosted
        num_tokens = request.num_prompt_tokens
        computed = 0 if wanted is None or is_sent else num_tokens - hit - hosted
        self.compute.admitted(rid, num_tokens, computed)
        if wanted is None:
            return hosted  # asks for nothing, or has been loaded already
        ask, _ = wanted
        # What is missing is computed here: prefill must stop waiting.
        if not is_sent:
            self._loaded_of[rid] = ask.room, 0, hit + hosted, hosted
            self.counters.add("computed_requests")
            self.counters.add("computed_tokens", computed)
            self.loads.refuse(ask, "decode computes it itself", self._orders)
            return hosted
        num_sent = num_external - hosted
        total = self._groups.num_sent(num_tokens)
        prefix_len = total - num_sent
        self.loads.open(request, wanted, num_sent, pages, windows, self._orders)
        if not ask.nonce:
            self.compute.promised(ask.prefill, ask.room, num_sent)
            if self.compute.is_on and num_sent <= self._options.compute_below:
                self.counters.add("compute_declined")
        self._loaded_of[rid] = ask.room, num_sent, prefix_len, hosted
        self.flights.begin(rid, self._hashes(request, prefix_len, total))
        return hosted

    def _order_host_load(self, request: Any, pages: Sequence[int], part: _HostPart) -> int:
        assert self._host is not None
        rid, (start, end) = request.request_id, part
        first, last = start * self._block_size, end * self._block_size
        hashes = self._hashes(request, first, last)
        self._host.load(rid, start, end, pages[start:end], hashes)
        self.flights.begin(rid, hashes)
        return (end - start) * self._block_size

    def finished(self, request: Any, pages: Sequence[int]) -> dict[str, Any] | None:
        """End a request, which still has the blocks `pages`. Returns its `kv_transfer_params`.
        Called for every end: finished, aborted, or failed."""
        rid = request.request_id
        continues = self._hints.pop(rid, Hints()).continues
        if self.sends.proves and (in_flight := _num_in_flight(request)):
            self._in_flight[rid] = in_flight, [*request.block_hashes]
        # The shadow first: it needs the blocks' hashes, which are there until vLLM frees them.
        if self._shadow is not None and request.prompt_token_ids is not None:
            blocks = self._cached(request, pages)
            namespace = namespace_of(request)
            self._shadow.ended(rid, request.all_token_ids, blocks, namespace, continues)
        self._joined.discard(rid)
        self._turns.ended(rid)
        self._hits.pop(rid, None)
        self._host_parts.pop(rid, None)
        self.compute.ended(rid)
        if self._host is not None:
            blocks = self._cached(request, pages)[: self._proved_len(request) // self._block_size]
            hashes = self._hashes(request, 0, len(blocks) * self._block_size)
            num_tokens = len(hashes) * self._block_size
            is_loading = self._host.is_loading(rid)
            self._host.finished(request, hashes, blocks[: len(hashes)], num_tokens, continues)
            # Those that joined its load stop waiting.
            if is_loading:
                self.flights.land(rid)
        # Its flight lands at once, so that requests that joined it stop waiting.
        if self.loads.finished(rid, self._orders):
            self.flights.land(rid)
        # The answer: an error first, then a load's figures, then an offer's room.
        params = self.sends.finished(rid, self._orders)
        error, loaded = self._errors.pop(rid, None), self._loaded_of.pop(rid, None)
        if error is not None:
            return {**(params or {}), "prefixkv": {"error": error}}
        if loaded is not None:
            names = ["room", "loaded_tokens", "cached_tokens"]
            names += ["host_tokens"] if self._host is not None else []
            return {"prefixkv": dict(zip(names, loaded, strict=False))}
        return params

    def take_ended(self) -> dict[str, dict[str, Any]]:
        """Return the requests that decode does not want, with the `kv_transfer_params` of their
        answers. Nothing is forgotten here: vLLM calls `finished` for each as it ends."""
        ended = {rid: {"prefixkv": {"error": error}} for rid, error in self.sends.ending.items()}
        self.counters.add("requests_ended", len(ended))
        return ended

    def take_logits(
        self, step: Any, num_nans: Mapping[str, int]
    ) -> tuple[dict[str, str], set[Any]]:
        """Take in how many NaN each request's logits had, before the scheduler does. `step` is the
        `SchedulerOutput` that `orders` had. Returns the requests that vLLM has to end with an
        error, and why; and the hashes of those that have ended meanwhile. None is sent."""
        hashes: set[Any] = set()
        for rid in self._in_flight.keys() & step.num_scheduled_tokens.keys():
            left, of_request = self._in_flight.pop(rid)
            left -= step.num_scheduled_tokens[rid]
            if num_nans.get(rid):
                hashes.update(of_request)
            elif left > 0:
                self._in_flight[rid] = left, of_request
        errors = {
            rid: f"{NOT_FINITE}: {count} of the logits of request {rid} are NaN"
            for rid, count in num_nans.items()
            if count
        }
        # A broken model has NaN in every request.
        if errors and self._now_s() >= self._next_nan_log_s:
            self._next_nan_log_s = self._now_s() + NAN_LOG_EVERY_S
            first = next(iter(errors.values()))
            _log.error("%s; such requests end, and nothing of them is kept", first)
        self.counters.add("requests_in_error", len(errors))
        self.sends.take_logits(step, errors, self.holds, self._orders)
        return errors, hashes

    def spoilt(self, pages: Iterable[int]) -> None:
        """Blocks may hold NaN: `clear_spoilt` has them overwritten before vLLM uses them again."""
        self._spoilt.update(pages)

    def clear_spoilt(self) -> None:
        """Order that spoilt blocks which vLLM may hand out from now on are overwritten. To be
        called after each step's result, in which vLLM takes blocks back."""
        for page in [*self._spoilt]:
            if self.holds.num_references(page) == 0:
                self._spoilt.discard(page)
                # One that is cached holds KV that was written since.
                if not self.holds.is_cached(page):
                    self._orders.cleared.append(page)

    def _proved_len(self, request: Any) -> int:
        """Return how many tokens of a request that ends have KV that may be copied: of one that was
        aborted, or has failed, the prompt, and only where a token came of it."""
        num_tokens = len(request.all_token_ids)
        num_computed = request.num_computed_tokens - _num_in_flight(request)
        if str(getattr(request, "status", "")) not in GIVEN_UP:
            return int(min(num_tokens, num_computed))
        num_prompt = int(request.num_prompt_tokens)
        is_computed = num_tokens > num_prompt and num_computed >= num_prompt
        return num_prompt if is_computed else 0

    def _cached(self, request: Any, pages: Sequence[int]) -> list[int]:
        whole = min(request.num_computed_tokens, len(request.all_token_ids)) // self._block_size
        cached = self.holds.is_cached
        return list(takewhile(cached, pages[:whole]))

    # --- steps ------------------------------------------------------------------------------------

    def orders(self, step: Any) -> StepOrders:
        """Return the orders of one step; `step` is a `SchedulerOutput`."""
        scheduled = step.num_scheduled_tokens
        for new in step.scheduled_new_reqs:
            self._compute(new.req_id, new.num_computed_tokens, step)
        again = step.scheduled_cached_reqs
        for rid, computed in zip(again.req_ids, again.num_computed_tokens, strict=True):
            self._compute(rid, computed, step)
        self.compute.step_scheduled()
        if self._turns.is_changed:
            self._turns.next_step()
        if self._host is not None:
            self._orders.copies += self._host.take_orders()
        self.sends.hold_back(step, self._orders)
        # Everything ordered since the last step goes out together; the next step starts empty.
        orders, self._orders = self._orders, StepOrders()
        self._rest.stepped(not (scheduled or orders))
        orders.bell = self._rest.bell
        return orders

    def _compute(self, rid: str, computed: int, step: Any) -> None:
        # Looked up only where a send or an offer needs it: most requests of a step do not.
        def tables() -> Tables:
            return self._groups.tables(step.kv_connector_block_state.get_block_ids(rid))

        count = step.num_scheduled_tokens[rid]
        self._turns.landed.discard(rid)
        self.compute.scheduled(rid, computed, count)
        self.sends.compute(rid, computed, count, tables, self.holds, self._orders)

    def take_reports(self, report: WorkerReport | None, received: Iterable[str]) -> None:
        """Take in the workers' reports, and the loads that vLLM considers over. Called before vLLM
        frees the blocks of failed loads, so they can still be held."""
        # The order matters: `_received` reads a load's error, and takes a hold only if some rank is
        # unsettled; `settle` frees only a load that is over. Any other order would hold blocks
        # that are settled, or free them before the hold exists.
        report = report or WorkerReport()
        received = list(received)
        if report.has_outcomes or received:
            self._rest.stepped(is_quiet=False)
        if report.bells:
            self._rest.sent_by(report.bells)
        self.sends.address = self.sends.address or report.address
        for rid, error in report.failed.items():
            is_load = self.loads.failed(rid, error, refused=rid in report.refused)
            if is_load and NOT_FINITE in error:  # prefill has sent what it computed before
                self.spoilt(self.loads.pending[rid].pages)
            if not is_load and self._host is not None and self._host.is_loading(rid):
                self._record_error(rid, error)
        # Behind the failures, since it forgets loads that are over; before `_received`, which lets
        # others look for their blocks.
        if self._host is not None:
            self._host.resize(report.host_pages)
            self._host.ended(report.copied)
        if report.settled:
            self.loads.settled(report.settled)
        if report.overdue:
            self.loads.overdue(report.overdue)
        for rid in received:
            self._received(rid)
        for rid in {*report.settled, *received}:
            self.loads.settle(rid, self.holds)
        for rid in report.promised:
            self.sends.promised(rid)
        for rid, error in report.unsent.items():
            self.sends.unsent(rid, error)
        for rid in report.freed:
            self.sends.freed(rid, self.holds)

    def _received(self, rid: str) -> None:
        self.flights.land(rid)
        load = self.loads.received(rid)
        if load is None:
            return
        if not load.left:
            self._turns.received(rid, is_failed=bool(load.error))
        if not load.error:
            self.counters.add("loads_done")
            self.compute.arrived(load.room)
            return
        self.compute.gave_up(load.room)
        self.counters.add("loads_failed")
        if not load.left and self._host is not None:
            self._host.bar(rid)
        if not load.left:
            self._record_error(rid, load.error, logging.DEBUG if load.refused else logging.WARNING)
        # vLLM frees the request's blocks next, and a peer may still write into them.
        if load.unsettled > 0:
            self.holds.take(rid, load.pages)

    # --- the whole --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while proofs are expected, so that the engine has to step on. Overdue proofs do not
        count, nor do offers where no worker wakes the engine: these may not come for a long time,
        and are taken in with the next request."""
        sends = self.sends.sends.values()
        moves = self._orders.weights_version is not None  # the workers learn it in a step
        return (
            moves
            or any(self.has_wakeups or not send.is_offer for send in sends)
            or bool(self._orders.before or self._orders.cleared)
            or self.loads.any_expected
            or (self._host is not None and self._host.num_copies > 0)
        )

    @property
    def keeps_blocks_shortly(self) -> bool:
        """True while writes to host memory keep blocks: they come back by themselves, so that no
        running request has to give up its own."""
        return self._host is not None and self._host.is_writing

    def flush(self) -> None:
        """Fail the loads and end all sends: KV of the former weights must not arrive any more."""
        self.loads.flush(self._orders)
        self.sends.flush(self._orders)
        if self._host is not None:
            for rid in self._host.loading:
                self._orders.abort_loads[rid] = "the cache is being reset"
            self._host.flush()
        if self._shadow is not None:
            self._shadow.flush()

    def move_weights(self, weights_version: str) -> None:
        """Flush, and refuse servers of another version from then on. Raises ConfigError, with
        nothing changed, for a string that is no version."""
        check_version(weights_version)  # first, since it raises: nothing is flushed then
        self.flush()
        # Rooms that were ordered before belong to the former version, later ones to the new. The
        # flush's aborts go into `before` with the rooms that they end.
        self._orders = StepOrders(weights_version=weights_version, before=self._orders)

    # --- a server that only waits -----------------------------------------------------------------

    def set_wakeup_address(self, address: str) -> None:
        self._rest.set_address(address)

    @property
    def has_wakeups(self) -> bool:
        return self._rest.has_wakeups

    def rest_s(self) -> float:
        """Return the seconds that the engine may rest unless something comes; 0: it has to step."""
        if self._orders or not self._rest.may_rest:
            return 0.0
        # The end of an offer's grace is the one event that no worker rings for: wake up for it.
        next_s = self.sends.next_grace_s
        return self._rest.limited(None if next_s is None else next_s - self._now_s())

    # --- counts -----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        """See `Counters.take`."""
        if self._host is not None:
            for name, number in self._host.take_counts().items():
                self.counters.add(name, number)
        return self.counters.take()

    def take_host_events(self) -> list[HostEvent]:
        return [] if self._host is None else self._host.take_events()

    def take_gauges(self) -> dict[str, float]:
        """Return the gauges if one has changed since the last call, else none."""
        gauges = self.gauges()
        if gauges == self._reported_gauges:
            return {}
        self._reported_gauges = gauges
        return gauges

    def gauges(self) -> dict[str, float]:
        """Return `stats.GAUGES`: counts of what there is now; times of the oldest one, in seconds
        since the epoch (0: there is none)."""
        loads = self.loads.waiting_since()
        unpromised = self.sends.waiting_since(offers=False)
        offers = self.sends.waiting_since(offers=True)
        return {
            "loads_waiting": len(loads),
            "oldest_load_timestamp_seconds": min(loads, default=0.0),
            "loads_unsettled": len(self.loads.pending) - len(loads),
            "sends_open": len(self.sends.sends),
            "sends_unpromised": len(unpromised),
            "oldest_unpromised_timestamp_seconds": min(unpromised, default=0.0),
            "offers_open": len(offers),
            "oldest_offer_timestamp_seconds": min(offers, default=0.0),
            "host_blocks": self._host.num_blocks if self._host is not None else 0,
            "host_copies": self._host.num_copies if self._host is not None else 0,
            "held_blocks": self.holds.num_blocks,
        }

    def check_invariants(self) -> None:
        """Raise InternalError, with the state, if a law is broken. For tests."""
        sends = self.sends
        check_laws(
            {
                "as on prefill": {send.room for send in sends.sends.values()} == sends.rooms.keys(),
                "what waits was asked about": self._joined <= self._hits.keys(),
                "what is not promised holds nothing": not any(
                    send.unpromised > 0 and (send.started or send.num_pages)
                    for send in sends.sends.values()
                ),
            },
            self.sends,
            self.loads,
        )
        self.loads.check_invariants()
        self.flights.check_invariants()
        self.compute.check_invariants()
        self.holds.check_invariants()
        if self._host is not None:
            self._host.check_invariants()


def _num_in_flight(request: Any) -> int:
    return int(getattr(request, "num_in_flight_tokens", 0))
