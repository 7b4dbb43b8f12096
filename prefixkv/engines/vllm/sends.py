"""Prefill's half in vLLM's scheduler: it decides which prompts may be computed, and holds blocks.

The order law: a side that waits holds nothing that the other side's progress may need. A *promised*
prompt (a router drew the room) starts after decode's promise and has no block before. An *offer*
(the room is drawn here) is computed at once; its blocks are held until sent or withdrawn.

    promised:  waiting --all ranks promised--> allowed --computed--> sent --freed--> forgotten
    offer:     drawn --computed, held--> offered --opened and sent, or withdrawn--> forgotten

Where vLLM counts NaN in logits, what completes a prompt waits for its step's result.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import structs

from prefixkv.engines.vllm.asks import RoomSendAsk, computes_all, digest_of, ends_in_media
from prefixkv.engines.vllm.blocks import Ledger
from prefixkv.engines.vllm.groups import Tables
from prefixkv.engines.vllm.orders import Add, Chunk, Refuse
from prefixkv.errors import CallerError, RequestError, check_laws
from prefixkv.spi import pages_for
from prefixkv.transfer import RoomKey

_log = logging.getLogger("vllm.prefixkv")

ROOM_BITS: Final = 53
"""Bits of a room's number that is drawn here: routers carry it as a number of JSON, which many
parsers read as a double."""


@dataclass(slots=True, eq=False)
class _ScheduledSend:
    """A promised send or an offer, from its beginning until every rank has freed its pages. An
    offer begins when its prompt is computed: what is drawn before has no room, and holds nothing.
    """

    key: RoomKey  # of an offer without a decode server's name
    num_tokens: int
    digest: bytes
    unfreed: int  # ranks in which a write may still read its pages
    unpromised: int = 0  # ranks that have not received decode's promise
    since_s: float = 0.0  # when the request came; of an offer, when its prompt was computed
    params: dict[str, Any] = field(default_factory=dict)  # of an offer: its `kv_transfer_params`
    parent: str = ""  # of an offer: the request that it is a choice of, or itself
    request: Any = None  # vLLM's, until it ends; only of a promised send
    started: bool = False  # vLLM has given it blocks
    left: bool = False  # its request has ended
    end: int = 0  # tokens that were ordered to be computed
    num_pages: int = 0  # that were handed over
    num_held: int = 0  # blocks, those in window groups included
    withdrawn: bool = False

    @property
    def is_offer(self) -> bool:
        return bool(self.params)

    @property
    def is_promised(self) -> bool:
        return self.unpromised <= 0

    @property
    def computed(self) -> bool:
        return self.end == self.num_tokens

    @property
    def is_preempted(self) -> bool:
        """True of a prompt that is computed in part. What was handed over stays held."""
        return (
            self.num_pages > 0
            and not self.computed
            and self.request is not None
            and self.request.num_computed_tokens == 0
        )


@dataclass(slots=True)
class ScheduledSends:
    """The sends of one engine.

    Args:
        offer_grace_s: age below which an offer keeps its blocks from requests for which no other
            server waits.
        most_blocks: limit of blocks per prompt that is computed for decode; None: no limit.
    """

    ledger: Ledger
    offer_grace_s: float
    address: str = ""  # address of our prefill side, as decode servers reach it
    most_blocks: int | None = None
    can_end: bool = False  # vLLM ends the requests that `ending` names
    proves: bool = False  # vLLM says of each step whether there was NaN in its logits
    # By request id. An entry outlives its request: only `freed` by all ranks removes it. Offers
    # are in the order in which they were computed, which `make_room` uses.
    sends: dict[str, _ScheduledSend] = field(default_factory=dict)
    # Of these the few that have been started, and are not computed: vLLM asks at each step of each
    # request that waits, so that none may look at all of them.
    _begun: dict[str, _ScheduledSend] = field(default_factory=dict)
    # Requests that are not to be computed, and why; until their requests end.
    ending: dict[str, str] = field(default_factory=dict)
    # These two end with their requests: they hold no blocks.
    _drawn: dict[str, _ScheduledSend] = field(default_factory=dict)
    _choices: dict[str, str] = field(default_factory=dict)  # other choices: the send's request
    # What completes a prompt, by the step that computes it, until that step's logits are known.
    _unproved: list[tuple[Any, Chunk]] = field(default_factory=list)

    # --- requests ---------------------------------------------------------------------------------

    def begin(self, request: Any, ask: RoomSendAsk) -> None:
        """Begin a promised send. Raises CallerError for a prompt that is not sent; decode is then
        declined, unless the room belongs to another request."""
        rid, key, ledger = request.request_id, RoomKey(ask.room, 0, ask.decode), self.ledger
        self._check_id(rid)
        known = self._of(key)
        try:
            digest = digest_of(request)
            if known is None:
                self._check_end(request)
                num_blocks = ledger.groups.blocks_of(request.num_prompt_tokens)
                if self.most_blocks is not None and num_blocks > self.most_blocks:
                    raise RequestError(
                        f"the prompt has {num_blocks} blocks; this server, which loads prompts "
                        f"itself, computes at most {self.most_blocks} for another one"
                    )
                if computes_all(request):  # it would be computed before decode's promise
                    raise RequestError("a prompt with log-probabilities of its own is not sent")
        except CallerError as error:
            # Decode may hold pages for this room already, so it has to hear of the refusal. A room
            # of another request is left alone: its own send answers for it.
            if known is None:
                ledger.orders.declines.append(Refuse(ask.room, ask.decode, str(error)))
                self.ending[rid] = str(error)
            raise
        if known is not None:
            if self.sends[known].digest != digest:
                raise RequestError(f"room {ask.room} of {ask.decode} is in use by another request")
            self._choices[rid] = known  # of the same prompt: nothing more is sent for it
            return
        num_tokens, ranks = ledger.groups.num_sent(request.num_prompt_tokens), ledger.num_ranks
        self.sends[rid] = _ScheduledSend(
            key, num_tokens, digest, ranks, ranks, ledger.now_s(), request=request
        )
        ledger.orders.adds.append(Add(rid, key, num_tokens, digest))

    def _of(self, key: RoomKey) -> str | None:
        """Return the request whose send has this room."""
        return next((rid for rid, send in self.sends.items() if send.key == key), None)

    def _check_id(self, rid: str) -> None:
        if rid in self.sends:
            raise RequestError(f"a request of the id {rid!r} is still being transferred")

    def _check_end(self, request: Any) -> None:
        if not self.ledger.groups.num_sent(request.num_prompt_tokens):
            raise RequestError("a prompt of one token is computed where it is wanted")
        if self.ledger.groups.has_states and ends_in_media(request):
            raise RequestError("a prompt that ends in an image is computed where it is wanted")

    def draw(self, request: Any) -> None:
        """Draw a room; a decode server that has its nonce may open it. Choices of one request,
        which vLLM makes requests with the id "NUMBER_PARENT", share one room. Raises RequestError
        where the own address is not known."""
        rid = request.request_id
        self._check_id(rid)
        if not self.address:
            raise RequestError(
                "this server does not know yet where decode servers reach it; give `advertise` in "
                "kv_connector_extra_config, or a `bind` with a port"
            )
        number, _, rest = rid.partition("_")
        parent = rest if number.isdigit() and rest else rid
        # Choices must return equal parameters: the client's router forwards those of any one of
        # them. Withdrawn offers do not count: decode would be refused there.
        offers = (*self._drawn.values(), *self.sends.values())
        shared = (one.params for one in offers if one.parent == parent and not one.withdrawn)
        params = next(shared, None)
        params = params or {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "room": self._new_room(),
            "nonce": secrets.token_hex(16),
            "prefill": self.address,
        }
        digest, ledger = digest_of(request, params["nonce"]), self.ledger
        self._check_end(request)
        self._drawn[rid] = _ScheduledSend(
            RoomKey(params["room"], 0), ledger.groups.num_sent(request.num_prompt_tokens), digest,
            ledger.num_ranks, params=params, parent=parent, started=True,
        )  # fmt: skip

    def _new_room(self) -> int:
        while True:
            room = secrets.randbits(ROOM_BITS) or 1
            if self._of(RoomKey(room, 0)) is None:
                return room

    # --- the order law ----------------------------------------------------------------------------

    def may_start(self, rid: str) -> bool | None:
        """Return whether vLLM may give a promised send blocks; None: it is none. A prompt is
        started beside others only where all of them fit to their ends: a preempted one keeps its
        blocks until they are sent, so two half-computed prompts could block each other."""
        # 1. It will not be sent: refused here or by decode. Where this vLLM cannot end a request
        #    uncomputed, it is computed for the sake of its answer.
        if rid in self.ending:
            return not self.can_end
        # 2. No send, or an offer, which waits for no promise.
        send = self.sends.get(self._choices.get(rid, rid))
        if send is None or send.is_offer:
            return None
        # 3. Not promised by decode on every rank: it must hold nothing (the order law).
        if not send.is_promised:
            return False
        # 4. It has been started: never stop it, but free what offers hold.
        needed, num_free = self.ledger.groups.blocks_to_compute, self.ledger.holds.num_free
        need = needed(send.num_tokens)
        if send.started:  # it was preempted, or is a choice, most of which is in the prefix cache
            self.make_room(need - num_free)
            return True
        # 5. Another choice waits until the first has started, and then shares its blocks.
        if rid in self._choices:
            return False
        # 6. A new prompt: it must fit beside all that other started prompts still need.
        others = [one for one in self._begun.values() if not one.computed]
        need += sum(needed(one.num_tokens) - one.num_held for one in others)
        self.make_room(need - num_free)
        return not others or need <= num_free

    def must_yield(self, rid: str) -> bool:
        """Return whether a waiting request is skipped for a preempted send. That keeps the blocks
        that were handed over until all of it is computed. A request before it in vLLM's queue may
        need these blocks, and vLLM asks of no request behind one for which blocks are lacking: so
        neither of them would ever go on."""
        preempted = {one for one, send in self._begun.items() if send.is_preempted}
        preempted -= self.ending.keys()
        return bool(preempted) and rid not in preempted

    @property
    def has_promised_uncomputed(self) -> bool:
        return any(one.is_promised and not one.computed for one in self.sends.values())

    def make_room(self, num_blocks: int, grace_s: float = 0.0) -> None:
        """Withdraw the oldest offers, beyond an age of `grace_s`, until `num_blocks` come back.

        They are released when the workers report it: a decode server may have opened the room
        meanwhile. One that comes later is refused, and computes the prompt itself. Callers pass a
        grace of 0 while a promised send or a load waits for this server, `offer_grace_s` otherwise.
        """
        if num_blocks <= 0:
            return
        before_s = self.ledger.now_s() - grace_s
        # Offers that are withdrawn already count as well, or each call until the workers report
        # would withdraw more of them.
        for send in self.sends.values():  # in the order in which they were computed
            if send.is_offer and num_blocks > 0:
                if not send.withdrawn and send.since_s <= before_s:
                    self._withdraw(send, "prefill needs the blocks for another request")
                    self.ledger.counters.add("offers_withdrawn")
                if send.withdrawn:
                    num_blocks -= send.num_held

    def _withdraw(self, send: _ScheduledSend, reason: str) -> None:
        send.withdrawn = True
        self.ledger.orders.withdrawals[send.key] = reason

    @property
    def next_grace_s(self) -> float | None:
        """End of the grace of the oldest offer, in seconds since the epoch."""
        return next(
            (one.since_s + self.offer_grace_s for one in self.sends.values()
             if one.is_offer and not one.withdrawn),
            None,
        )  # fmt: skip

    # --- steps ------------------------------------------------------------------------------------

    def allocated(self, rid: str) -> None:
        if rid not in self.ending and (send := self.sends.get(rid)) is not None:
            self._begun[rid], send.started = send, True

    def compute(self, rid: str, start: int, count: int, tables: Callable[[], Tables]) -> None:
        """Order what follows from a step that computes `count` tokens from token `start` on.
        `tables` returns the request's block ids; it is called only where they are needed."""
        end = start + count
        if (offer := self._drawn.get(rid)) is not None:
            # When all of it is computed, not before: a preempted prompt begins again, and meanwhile
            # keeps no block from others. Another choice may have opened the room.
            if end >= offer.num_tokens and self._of(offer.key) is None:
                self._open(rid, self._drawn.pop(rid), tables)
            return
        send = self.sends.get(rid)
        if send is None or rid in self.ending:
            return
        if (chunk := self._take(rid, send, end, tables)) is not None:
            self.ledger.orders.computed.append(chunk)

    def _open(self, rid: str, offer: _ScheduledSend, tables: Callable[[], Tables]) -> None:
        ledger = self.ledger
        offer.since_s = ledger.now_s()
        self.sends[rid] = offer
        chunk = self._take(rid, offer, offer.num_tokens, tables)
        assert chunk is not None, "all of it"
        ledger.orders.computed.append(structs.replace(chunk, digest=offer.digest))
        ledger.counters.add("offers")

    def _take(
        self, rid: str, send: _ScheduledSend, end: int, tables: Callable[[], Tables]
    ) -> Chunk | None:
        """Hold the blocks that a step completes. A preempted request is computed again from its
        beginning; its blocks up to `send.end` have been held and handed over, so its new blocks for
        these tokens are ignored."""
        end = min(end, send.num_tokens)
        if end <= send.end:
            return None
        send.end = end
        if send.computed:
            self._begun.pop(rid, None)
        block_size = self.ledger.groups.block_size
        stop = pages_for(end, block_size) if send.computed else end // block_size
        if stop == send.num_pages and not send.computed:
            return None  # a block that is computed in part waits for the rest of it
        groups, found, first = self.ledger.groups, tables(), send.num_pages
        pages = tuple(found[groups.full][first:stop])
        windows = groups.window_blocks(found, send.num_tokens, first, stop)
        send.num_pages = stop
        # Held before the order goes out: a preemption right after this step would free them, and
        # those in window groups are freed as soon as the window has moved on.
        held = [*pages, *(block for one in windows for block in one.blocks)]
        send.num_held += len(held)
        self.ledger.holds.take(rid, held)
        end = min(end, stop * block_size)
        return Chunk(rid, send.key, first, pages, end, send.computed, windows)

    def hold_back(self, step: Any) -> None:
        """Keep back what completes a prompt in a step, until `take_logits`."""
        if not (self.proves and self.can_end):
            return
        orders = self.ledger.orders
        self._unproved += [(step, one) for one in orders.computed if one.last]
        orders.computed = [one for one in orders.computed if not one.last]

    def take_logits(self, step: Any, failed: Mapping[str, str]) -> None:
        """Send the prompts that a step has completed, and end the sends of the requests that have
        `failed` in it, with the reason. A prompt that was completed before is sent."""
        orders = self.ledger.orders
        unproved, self._unproved = self._unproved, []
        dropped: set[str] = set()
        for of_step, order in unproved:
            rid = order.rid
            if order.digest and (rid in failed or self.sends[rid].withdrawn):
                self.ledger.counters.add("offers_failed", rid in failed)
                self._forget(rid)  # no worker knows of it
            elif rid in failed:
                dropped.add(rid)
            elif of_step is not step:
                self._unproved.append((of_step, order))
            else:
                orders.late.append(order)
        for rid, reason in failed.items():
            send = self.sends.get(rid)
            if send is not None and (rid in dropped or not send.computed):
                orders.abort_sends[send.key] = reason

    def finished(self, rid: str) -> dict[str, Any] | None:
        """End a request, finished or not. Returns its answer's parameters for a decode server."""
        self.ending.pop(rid, None)
        self._choices.pop(rid, None)
        if (drawn := self._drawn.pop(rid, None)) is not None:
            # Another choice offers its prompt, or nothing was computed.
            return None if self._of(drawn.key) is None else dict(drawn.params)
        if (send := self.sends.get(rid)) is None:
            return None
        # A computed send continues without its request: its blocks are held until `freed`.
        send.left, send.request = True, None
        if not send.computed:
            self.ledger.orders.abort_sends.setdefault(send.key, "prefill's request ended")
        return dict(send.params) if send.is_offer and not send.withdrawn else None

    # --- what workers say -------------------------------------------------------------------------

    def promised(self, rid: str) -> None:
        if (send := self.sends.get(rid)) is not None:
            send.unpromised -= 1

    def unsent(self, rid: str, error: str) -> None:
        """Log that a send failed. Its blocks stay held until `freed`."""
        # A withdrawn offer has failed on purpose, and was counted when it was withdrawn.
        send = self.sends.get(rid)
        if send is None or send.withdrawn:
            return
        self.ledger.counters.add("offers_failed" if send.is_offer else "sends_failed")
        # Where its request has ended first, nothing waits for it: a router ends the requests that
        # decode no longer needs.
        level = logging.DEBUG if send.left and not send.computed else logging.WARNING
        _log.log(level, "request %s was not sent: %s", rid, error)
        # Not computed yet: vLLM is to end the request and its choices without computing them.
        if not send.computed:
            self.ending |= {one: error for one, whose in self._choices.items() if whose == rid}
            if not send.left:
                self.ending[rid] = error

    def freed(self, rid: str) -> None:
        """In one rank no write reads a send's blocks any more. The last rank releases them."""
        if (send := self.sends.get(rid)) is not None:
            send.unfreed -= 1
            if send.unfreed <= 0:
                self._forget(rid)

    def _forget(self, rid: str) -> None:
        self.ledger.holds.release(rid)
        self._begun.pop(rid, None)
        # An abort that is not ordered yet would end the next send of this room's number.
        self.ledger.orders.abort_sends.pop(self.sends.pop(rid).key, None)
        self.ledger.counters.add("sends_over")

    # --- the whole --------------------------------------------------------------------------------

    def flush(self) -> None:
        """End all sends, since the weights change. `freed` follows for each."""
        # An offer that waits for its step's logits is withdrawn, and dropped with them.
        self._unproved = [one for one in self._unproved if one[1].digest]
        reason = "the cache is being reset"
        for send in self.sends.values():
            if not send.is_offer:
                self.ledger.orders.abort_sends[send.key] = reason
            elif not send.withdrawn:
                self._withdraw(send, reason)

    def waiting_since(self, offers: bool) -> list[float]:
        """Return when each send began to wait, in seconds since the epoch: promised ones for the
        promise, offers for a server that opens the room."""
        return [one.since_s for one in self.sends.values()
                if one.is_offer is offers and (offers or not one.is_promised)]  # fmt: skip

    def check_invariants(self) -> None:
        sends, begun = self.sends.values(), {*self._begun.values()}
        laws = {
            "a room is one send's": len({send.key for send in sends}) == len(sends),
            "no other has begun": all(one.computed or not one.started for one in {*sends} - begun),
            "what is not promised holds nothing": not any(
                not send.is_promised and (send.started or send.num_pages) for send in sends
            ),
        }
        check_laws(laws, self)
