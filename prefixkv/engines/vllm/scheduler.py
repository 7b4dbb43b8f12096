"""The connector in vLLM's scheduler: it decides which prompts are loaded and sent, and holds the
blocks that peers may still use, so that no block is freed into which a peer writes (`loads`,
`sends`). It runs in the engine's process, without access to KV memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from prefixkv.engines.vllm.asks import (
    DrawAsk,
    LoadAsk,
    ask_of,
    computes_all,
    hints_of_request,
    leave_out_last_token,
    namespace_of,
)
from prefixkv.engines.vllm.blocks import BlockPool, Flights, Ledger
from prefixkv.engines.vllm.compute import OwnCompute
from prefixkv.engines.vllm.groups import BlockGroups, Tables
from prefixkv.engines.vllm.host import HostBlocks
from prefixkv.engines.vllm.loads import ScheduledLoads, Turns
from prefixkv.engines.vllm.options import ConnectorOptions, ServerSetup
from prefixkv.engines.vllm.orders import StepOrders, WorkerReport
from prefixkv.engines.vllm.sends import ScheduledSends
from prefixkv.engines.vllm.shadow import Shadow
from prefixkv.engines.vllm.stats import GAUGES
from prefixkv.engines.vllm.wakeup import Rest
from prefixkv.errors import CallerError, RequestError
from prefixkv.settings import Continues
from prefixkv.spi import check_version, pages_for

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


@dataclass(slots=True)
class _Asked:
    """What is known of a request that vLLM has asked about and not admitted."""

    hit: int = 0  # tokens that were cached when it was matched last
    hosted: int = 0  # tokens behind these, loaded from host memory if it loads any
    has_joined: bool = False  # it has waited for another request's load


class SchedulerSide:
    """The scheduler's side of one engine. Not thread safe: the engine's loop makes every call."""

    def __init__(self, options: ConnectorOptions, setup: ServerSetup, groups: BlockGroups) -> None:
        self._options, self._setup, self._block_size = options, setup, groups.block_size
        self.ledger = Ledger(groups, setup.num_ranks)
        self.holds, self.counters = self.ledger.holds, self.ledger.counters
        self.flights = Flights()
        self.sends = ScheduledSends(self.ledger, options.offer_grace_s, options.reached_at)
        self.loads = ScheduledLoads(self.ledger)
        self.compute = OwnCompute(
            options.compute_below, setup.step_tokens, loads=bool(options.host_memory)
        )
        self.host = HostBlocks(self.holds, setup.num_ranks, lambda: self.compute.now_s())
        self.rest = Rest(setup.num_ranks)
        self._turns = Turns(self.loads, self.sends)
        self._shadow: Shadow | None = None
        self._asked: dict[str, _Asked] = {}
        self._answers: dict[str, dict[str, Any]] = {}  # of live requests; `finished` takes them out
        self._recent: dict[int | tuple[str, int], None] = {}  # rooms, the oldest first
        self._reported_gauges = dict.fromkeys(GAUGES, 0.0)
        self._spoilt: set[int] = set()  # blocks that may hold NaN
        self._next_nan_log_s = 0.0
        # Of requests that have ended with tokens in steps under way: how many, and the hashes.
        self._in_flight: dict[str, tuple[int, list[Any]]] = {}

    def bind(self, pool: BlockPool, shadow: Shadow | None = None) -> None:
        """Take the block pool, before any request comes. `shadow` names victims where a policy is
        set."""
        self.holds.pool, self._shadow = pool, shadow
        setup, groups = self._setup, self.ledger.groups
        if (host := self._options.host) is not None:
            # What a step may need, but no large part of a small pool: writes would never begin.
            spare = min(pages_for(setup.step_tokens, self._block_size), len(pool.blocks) // 8)
            self.host.policy, self.host.spare_blocks = str(host.policy), spare
            self.host.publishes = setup.publishes
        # A server of both roles keeps blocks back for computing. If loads could fill it, it would
        # wait for another server, and that server's loads might wait for this one: a deadlock.
        if setup.is_producer and setup.is_consumer:
            usable = len(pool.blocks) - 1  # vLLM keeps a null block
            longest = groups.blocks_of(setup.max_len) if setup.max_len else usable
            computing = min(longest, usable // 2)
            self.sends.most_blocks, self.loads.most_blocks = computing, usable - computing

    # --- requests ---------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Register a request, and begin its transfer. If that is refused, vLLM computes the prompt,
        and the answer has the reason. A request that vLLM adds only to end it at once stands for a
        client that has left: the peer is informed if the original request never came here."""
        try:
            ask = ask_of(
                request.kv_transfer_params, self._setup.is_producer, self._setup.is_consumer
            )
            if ask is None:
                return
            if not isinstance(ask, DrawAsk):
                room = ask.room if isinstance(ask, LoadAsk) else (ask.decode, ask.room)
                if request.abort_immediately and room in self._recent:
                    return  # what became of the room was seen to when the request itself ended
                # Before the parameters are checked further: a refused room has been dealt with too.
                self._recent[room] = None
                if len(self._recent) > RECENT_ROOMS:
                    del self._recent[next(iter(self._recent))]
            if isinstance(ask, LoadAsk):
                self.loads.begin(request, ask)
                return
            if isinstance(ask, DrawAsk):
                self.sends.draw(request)
            else:
                self.sends.begin(request, ask)
            # A prompt's last token is left out, where layers keep a state: it has no way back.
            groups = self.ledger.groups
            if groups.has_states:
                leave_out_last_token(request, groups.hash_size or groups.block_size)
        except CallerError as error:
            self._record_error(request.request_id, str(error))

    def _record_error(self, rid: str, error: str, level: int = logging.WARNING) -> None:
        _log.log(level, "request %s: %s", rid, error)
        self.counters.add("requests_in_error")
        self._answers[rid] = {"error": error}

    def ignores_windows(self, request: Any) -> bool:
        """Return whether vLLM has to look for a prefix in the group that keeps every token alone:
        its windows are loaded with it. Not where another connector may load the request."""
        groups = self.ledger.groups
        is_wanted = request.request_id in self.loads.wanted and self.sends.can_end
        return (
            bool(groups.windows)
            and is_wanted
            and self.loads.could_fit(groups.blocks_of(request.num_prompt_tokens))
        )

    def count_loadable(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `num_computed` can be loaded: (tokens,
        asynchronous). (None, False): vLLM has to ask again later; (0, False): it computes the
        prompt. It may ask any number of times before it admits the request."""
        rid, groups = request.request_id, self.ledger.groups
        # Before all else: a preempted send holds blocks that any other request may lack.
        if self.sends.must_yield(rid):
            return None, False
        # 1. A promised send on prefill: the order law decides whether it may start.
        may_start = self.sends.may_start(rid)
        if may_start is not None:
            return (0, False) if may_start else (None, False)
        missing = groups.num_sent(request.num_prompt_tokens) - num_computed
        # 2. Any other request may need blocks that offers hold. All of its blocks count: those in
        # the prefix cache may be among the free ones. After a preemption it has more tokens than
        # its prompt.
        need = groups.blocks_of(len(request.all_token_ids)) - self.holds.num_free
        # vLLM's queue is in order, so a promised send or a load behind this request waits for it,
        # and another server waits for that one: offers then get no grace.
        is_waited_for = bool(self.loads.wanted) or self.sends.has_promised_uncomputed
        self.sends.make_room(need, 0.0 if is_waited_for else self._options.offer_grace_s)
        if self._turns.must_yield(need) or self._turns.steps_back(rid, need):
            return None, False
        # 3. Not a load, or one that has been opened already; and host memory has nothing of it.
        loads = self.loads
        asks = rid in loads.wanted or rid in loads.followers
        hosted = self._in_host_memory(request, num_computed)
        asked = self._asked.setdefault(rid, _Asked())
        asked.hit, asked.hosted = num_computed, hosted
        if not asks and not hosted:
            return 0, False
        # 4. Too little is missing for a transfer to pay.
        if asks and missing <= self._options.recompute_below:
            return 0, False
        # 5. Another request loads the first block that is missing here: wait for it instead.
        # Looked up on each call, so the wait ends with the other load, however that ends.
        if self._options.join_flights or rid in loads.followers:
            end = min(num_computed + self._block_size, request.num_prompt_tokens)
            hashes = groups.hashes(request, num_computed, end)
            # One that does not ask prefill does not wait for it either: only for the same copy.
            if hashes and self._carrier(hashes[0], asks) not in (None, rid):
                asked.has_joined = True
                return None, False  # it will be in the prefix cache
        # 6. A follower, and no load of its prompt is under way; or prefill is not asked: vLLM
        # computes what is missing, and host memory has not.
        if rid not in loads.wanted:
            return hosted, hosted > 0
        # Or vLLM has looked for its prefix in all groups: what it has of the window there is
        # cached, and is not to be written over.
        if groups.windows and num_computed and not self.ignores_windows(request):
            return 0, False
        # 7. Prefill sends it sooner than host memory has it here.
        ask, _ = loads.wanted[rid]
        if hosted and not ask.nonce:
            load_s = self.host.load_s(hosted // self._block_size)
            if not self.compute.is_worth_loading(missing, hosted, load_s, ask.prefill):
                hosted = asked.hosted = 0
        # 8. It is quicker to compute the rest here, or that is too little for a transfer. Asked
        # behind 5., since what is on its way is not missing.
        rest = missing - hosted
        is_small = rest <= self._options.recompute_below
        # Not where prefill has drawn the room: it has computed the prompt already.
        may_compute = self.compute.is_on and not ask.nonce
        if is_small or (may_compute and self.compute.is_here(rid, rest, ask.prefill)):
            return hosted, hosted > 0
        # 9. A server of both roles: loads together leave blocks to compute with (see `bind`).
        if loads.most_blocks is not None:
            num_blocks = groups.blocks_of(request.num_prompt_tokens)
            if not loads.could_fit(num_blocks):
                return hosted, hosted > 0  # it is computed here
            if not loads.fits(num_blocks):
                return None, False
        return missing, True

    def _in_host_memory(self, request: Any, num_computed: int) -> int:
        """Return how many tokens behind the first `num_computed` host memory has: whole blocks, and
        never the prompt's last token, which vLLM computes in any case."""
        if self.host.tier is None:
            return 0
        rid, size = request.request_id, self._block_size
        start, end = num_computed // size, (request.num_prompt_tokens - 1) // size
        if end <= start or computes_all(request) or rid in self.loads.pending:
            return 0
        depth = self.host.depth(
            rid, lambda: self.ledger.groups.hashes(request, 0, end * size), start
        )
        return int(max(0, min(depth, end) - start) * size)

    def _carrier(self, block_hash: Any, asks: bool) -> str | None:
        """Return the request that brings this block. `asks`: also where prefill sends it."""
        copying = self.host.carrier(block_hash)
        return self.flights.carrier(block_hash) if copying is None and asks else copying

    def allocated(self, request: Any, tables: Tables, num_external: int) -> int:
        """Order the load of a request that was admitted, with all its blocks; the KV of
        `num_external` prompt tokens behind vLLM's hit is to be loaded. Returns how many of these
        come from host memory."""
        pages = tables[self.ledger.groups.full]
        rid, num_tokens = request.request_id, int(request.num_prompt_tokens)
        self.sends.allocated(rid)
        # The shadow enters whole blocks only, as vLLM hashes whole blocks only.
        if self._shadow is not None and request.prompt_token_ids is not None:
            tokens = request.prompt_token_ids
            whole = pages[: len(tokens) // self._block_size]
            self._shadow.admitted(rid, tokens, whole, namespace_of(request))
        # vLLM calls this again after a preemption. The ask is taken out here, so a room opens once.
        wanted, asked = self.loads.wanted.pop(rid, None), self._asked.pop(rid, None) or _Asked()
        self.loads.followers.discard(rid)
        self._turns.failed.discard(rid)
        self.counters.add("flights_joined", asked.has_joined)
        hosted = asked.hosted if num_external else 0
        if hosted:
            start, end = asked.hit // self._block_size, (asked.hit + hosted) // self._block_size
            hashes = self.ledger.groups.hashes(request, asked.hit, asked.hit + hosted)
            self.host.load(rid, start, end, pages[start:end], hashes)
            self.flights.begin(rid, hashes)
        num_sent = num_external - hosted
        is_computed = wanted is not None and not num_sent
        computed = num_tokens - asked.hit - hosted if is_computed else 0
        self.compute.admitted(rid, num_tokens, computed)
        if wanted is None:
            return hosted  # asks for nothing, or has been loaded already
        ask, _ = wanted
        cached = asked.hit + hosted
        if is_computed:
            # What is missing is computed here: prefill must stop waiting.
            self.counters.add("computed_requests")
            self.counters.add("computed_tokens", computed)
            self.loads.refuse(ask, "decode computes it itself")
        else:
            total = self.ledger.groups.num_sent(num_tokens)
            cached = total - num_sent
            self.loads.open(request, wanted, num_sent, tables)
            if not ask.nonce:
                self.compute.promised(ask.prefill, ask.room, num_sent)
                if self.compute.is_on and num_sent <= self._options.compute_below:
                    self.counters.add("compute_declined")
            self.flights.begin(rid, self.ledger.groups.hashes(request, cached, total))
        self._answers[rid] = {"room": ask.room, "loaded_tokens": num_sent, "cached_tokens": cached}
        if self._options.host_memory:
            self._answers[rid]["host_tokens"] = hosted
        return hosted

    def finished(self, request: Any, pages: Sequence[int]) -> dict[str, Any] | None:
        """End a request, which still has the blocks `pages`. Returns its `kv_transfer_params`.
        Called for every end: finished, aborted, or failed."""
        rid = request.request_id
        continues = None if str(request.status) in GIVEN_UP else self._continues(request)
        if self.sends.proves and (in_flight := int(request.num_in_flight_tokens)):
            self._in_flight[rid] = in_flight, [*request.block_hashes]
        # The shadow first: it needs the blocks' hashes, which are there until vLLM frees them.
        if self._shadow is not None and request.prompt_token_ids is not None:
            blocks = self._cached(request, pages)
            self._shadow.ended(rid, request.all_token_ids, blocks, namespace_of(request), continues)
        self._asked.pop(rid, None)
        self._turns.ended(rid)
        self.compute.ended(rid)
        # Its flights land at once, so that requests that joined them stop waiting.
        has_flights = rid in self.host.loading
        if self._options.host_memory:
            size = self._block_size
            blocks = self._cached(request, pages)[: self._proved_len(request) // size]
            hashes = self.ledger.groups.hashes(request, 0, len(blocks) * size)
            blocks, num_tokens = blocks[: len(hashes)], len(hashes) * size
            self.host.finished(request, hashes, blocks, num_tokens, continues)
        if self.loads.finished(rid) or has_flights:
            self.flights.land(rid)
        # An offer's room; and an error, or a load's figures.
        params, answer = self.sends.finished(rid), self._answers.pop(rid, None)
        return params if answer is None else {**(params or {}), "prefixkv": answer}

    def _continues(self, request: Any) -> Continues:
        try:
            return hints_of_request(request).continues
        except RequestError as error:
            self._record_error(request.request_id, str(error))
            return None

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
        if errors and (now_s := self.ledger.now_s()) >= self._next_nan_log_s:
            self._next_nan_log_s = now_s + NAN_LOG_EVERY_S
            first = next(iter(errors.values()))
            _log.error("%s; such requests end, and nothing of them is kept", first)
        self.counters.add("requests_in_error", len(errors))
        self.sends.take_logits(step, errors)
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
                    self.ledger.orders.cleared.append(page)

    def _proved_len(self, request: Any) -> int:
        """Return how many tokens of a request that ends have KV that may be copied: of one that was
        aborted, or has failed, the prompt, and only where a token came of it."""
        num_tokens = len(request.all_token_ids)
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        if str(request.status) not in GIVEN_UP:
            return int(min(num_tokens, num_computed))
        num_prompt = int(request.num_prompt_tokens)
        is_computed = num_tokens > num_prompt and num_computed >= num_prompt
        return num_prompt if is_computed else 0

    def _cached(self, request: Any, pages: Sequence[int]) -> list[int]:
        whole = min(request.num_computed_tokens, len(request.all_token_ids)) // self._block_size
        return list(takewhile(self.holds.is_cached, pages[:whole]))

    # --- steps ------------------------------------------------------------------------------------

    def orders(self, step: Any) -> StepOrders:
        """Return the orders of one step; `step` is a `SchedulerOutput`."""
        scheduled, again = step.num_scheduled_tokens, step.scheduled_cached_reqs
        for new in step.scheduled_new_reqs:
            self._compute(new.req_id, new.num_computed_tokens, step)
        for rid, computed in zip(again.req_ids, again.num_computed_tokens, strict=True):
            self._compute(rid, computed, step)
        self.compute.step_scheduled()
        if self._turns.is_changed:
            self._turns.next_step()
        self.ledger.orders.copies += self.host.take_orders()
        self.sends.hold_back(step)
        # Everything ordered since the last step goes out together; the next step starts empty.
        orders, self.ledger.orders = self.ledger.orders, StepOrders()
        self.rest.stepped(not (scheduled or orders))
        orders.bell = self.rest.bell
        return orders

    def _compute(self, rid: str, computed: int, step: Any) -> None:
        # Looked up only where a send or an offer needs it: most requests of a step do not.
        def tables() -> Tables:
            found: Tables = step.kv_connector_block_state.get_block_ids(rid)
            return found

        count = step.num_scheduled_tokens[rid]
        self._turns.landed.discard(rid)
        self.compute.scheduled(rid, computed, count)
        self.sends.compute(rid, computed, count, tables)

    def take_reports(self, report: WorkerReport | None, received: Iterable[str]) -> None:
        """Take in the workers' reports, and the loads that vLLM considers over. Called before vLLM
        frees the blocks of failed loads, so they can still be held."""
        # The order matters: `_received` reads a load's error, and takes a hold only if some rank is
        # unsettled; `settle` frees only a load that is over. Any other order would hold blocks
        # that are settled, or free them before the hold exists.
        report, received = report or WorkerReport(), list(received)
        if report or received:
            self.rest.stepped(is_quiet=False)
        self.sends.address = self.sends.address or report.address
        self.loads.take(report)
        for rid, error in report.failed.items():
            if (load := self.loads.pending.get(rid)) is not None:
                if NOT_FINITE in error:  # prefill has sent what it computed before
                    self.spoilt(load.pages)
            elif rid in self.host.loading:
                self._record_error(rid, error)
        # Behind the failures, since it forgets loads that are over; before `_received`, which lets
        # others look for their blocks.
        self.host.resize(report.host_pages)
        self.host.ended(report.copied)
        for rid in received:
            self._received(rid)
        for rid in {*report.settled, *received}:
            self.loads.settle(rid)
        for rid in report.promised:
            self.sends.promised(rid)
        for rid, error in report.unsent.items():
            self.sends.unsent(rid, error)
        for rid in report.freed:
            self.sends.freed(rid)

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
        if not load.left:
            if self._options.host_memory:
                self.host.bar(rid)
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
        orders, sends = self.ledger.orders, self.sends.sends.values()
        return (
            orders.weights_version is not None  # the workers learn it in a step
            or any(self.rest.has_wakeups or not send.is_offer for send in sends)
            or bool(orders.late or orders.cleared)
            or self.loads.any_expected
            or self.host.num_copies > 0
        )

    def flush(self) -> None:
        """Fail the loads and end all sends: KV of the former weights must not arrive any more."""
        self.loads.flush(self.host.loading)
        self.sends.flush()
        self.host.flush()
        if self._shadow is not None:
            self._shadow.flush()

    def move_weights(self, weights_version: str) -> None:
        """Flush, and refuse servers of another version from then on. Raises ConfigError, with
        nothing changed, for a string that is no version."""
        check_version(weights_version)  # first, since it raises: nothing is flushed then
        self.flush()
        self.ledger.orders.weights_version = weights_version

    def rest_s(self) -> float:
        """Return the seconds that the engine may rest unless something comes; 0: it has to step."""
        # The end of an offer's grace is the one event that no worker rings for: wake up for it.
        next_s = self.sends.next_grace_s
        left_s = None if next_s is None else next_s - self.ledger.now_s()
        return 0.0 if self.ledger.orders else self.rest.seconds(left_s)

    # --- counts -----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        for name, number in self.host.take_counts().items():
            self.counters.add(name, number)
        return self.counters.take()

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
            "host_blocks": self.host.num_blocks,
            "host_copies": self.host.num_copies,
            "held_blocks": self.holds.num_blocks,
        }

    def check_invariants(self) -> None:
        for part in (
            self.sends, self.loads, self.flights, self.compute, self.holds, self.host
        ):  # fmt: skip
            part.check_invariants()
