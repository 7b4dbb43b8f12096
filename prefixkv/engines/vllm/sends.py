"""Prefill's half of the connector in vLLM's scheduler: which prompts may be computed, and which
blocks are held for decode.

The order law: whoever waits for the other side holds nothing that the other side's progress may
need. So there are two kinds of sends.

A *promised* send is of a room that a router has drawn. Its prompt is not started before decode has
promised its pages; until then it has no block. From the step that computes a block on the block is
held, until every worker says that no write reads it.

An *offer* is of a room that is drawn here. Its prompt is computed at once, and its blocks are held
from the step that completes it, until a decode server has opened the room and the KV is sent. Its
blocks are let go of when they are needed while a promised send or a load of this server waits, were
it behind what needs them, and else after `offer_grace_s`: decode is then refused, and computes the
prompt itself.

    promised:  waiting --all ranks promised--> allowed --computed--> sent --freed--> forgotten
    offer:     drawn --computed, held--> offered --opened and sent, or withdrawn--> forgotten
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from prefixkv.engines.vllm.asks import OfferAsk, SendAsk, computes_all, digest_of
from prefixkv.engines.vllm.holds import Holds
from prefixkv.engines.vllm.orders import Add, Chunk, Decline, Offer, Orders
from prefixkv.engines.vllm.stats import Counters
from prefixkv.spi import CallerError, RequestError, pages_for

_log = logging.getLogger("vllm.prefixkv")

ROOM_BITS: Final = 53
"""Of a room that is drawn here: routers carry it as a number of JSON, which many read as a
double."""

Room = tuple[str, int]
"""Decode server ("": any that opens it) and number."""


@dataclass(slots=True)
class _Send:
    room: Room
    num_tokens: int
    unpromised: int  # ranks that have not heard decode's promise
    unfreed: int  # ranks whose pages a write may still read
    since_s: float  # when the request came; of an offer, when its prompt was computed
    started: bool = False  # vLLM has given it blocks
    left: bool = False  # its request has ended
    end: int = 0  # tokens whose computing was ordered
    num_pages: int = 0  # that were handed over
    params: dict[str, Any] | None = None  # of an offer: what its answer tells a decode server
    parent: str = ""  # of an offer: the request that it is a choice of, or itself
    withdrawn: bool = False

    @property
    def is_offer(self) -> bool:
        return self.params is not None

    @property
    def computed(self) -> bool:
        return self.end == self.num_tokens


@dataclass(slots=True)
class _Drawn:
    """An offer whose prompt is not computed yet: it has no room here, and holds nothing."""

    num_tokens: int
    digest: bytes
    params: dict[str, Any]
    parent: str


@dataclass(slots=True)
class Sends:
    """One engine's. Used by its `SchedulerSide` alone.

    Args:
        block_size: tokens.
        num_ranks: workers that each hold a share of every block.
        most_blocks: of one prompt that is computed for a decode server; None: any number.
        offer_timeout_s: after which an offer that no decode server opened is withdrawn.
        offer_grace_s: before which an offer is kept from requests that no other server waits for.
        now_s: seconds since the epoch.
    """

    block_size: int
    num_ranks: int
    counters: Counters
    offer_timeout_s: float
    offer_grace_s: float
    now_s: Callable[[], float]
    most_blocks: int | None = None
    address: str = ""  # of our prefill side, as decode servers reach it
    can_end: bool = False  # vLLM ends the requests that `ending` names
    sends: dict[str, _Send] = field(default_factory=dict)
    rooms: dict[Room, bytes] = field(default_factory=dict)
    ending: dict[str, str] = field(default_factory=dict)  # requests that are not computed, and why
    _drawn: dict[str, _Drawn] = field(default_factory=dict)
    _choices: dict[str, str] = field(default_factory=dict)  # others of a prompt: whose room it is

    # --- requests ---------------------------------------------------------------------------------

    def begin(self, request: Any, ask: SendAsk, orders: Orders) -> None:
        """The prompt of a room has come. Raises CallerError for one that is not sent; decode hears
        of it where the room is this request's."""
        rid, num_tokens, room = (
            request.request_id,
            request.num_prompt_tokens,
            (ask.decode, ask.room),
        )
        if rid in self.sends:
            raise RequestError(f"a request of the id {rid!r} is still being transferred")
        known = self.rooms.get(room)
        try:
            digest = digest_of(request)
            if known is None:
                self._check_size(num_tokens)
                if computes_all(request):  # it would be computed before decode's promise
                    raise RequestError("a prompt with log-probabilities of its own is not sent")
        except CallerError as error:
            if known is None:
                orders.declines.append(Decline(ask.room, ask.decode, str(error)))
                self.ending[rid] = str(error)
            raise
        if known == digest:  # another choice of its prompt, for which nothing more is sent
            self._choices[rid] = next(one for one, send in self.sends.items() if send.room == room)
            return
        if known is not None:
            raise RequestError(f"room {ask.room} of {ask.decode} is in use by another request")
        self.rooms[room] = digest
        self.sends[rid] = _Send(room, num_tokens, self.num_ranks, self.num_ranks, self.now_s())
        orders.adds.append(Add(rid, ask.room, ask.decode, num_tokens, digest))

    def _check_size(self, num_tokens: int) -> None:
        num_blocks = pages_for(num_tokens, self.block_size)
        if self.most_blocks is not None and num_blocks > self.most_blocks:
            raise RequestError(
                f"the prompt has {num_blocks} blocks; this server, which loads prompts itself, "
                f"computes at most {self.most_blocks} for another one"
            )

    def draw(self, request: Any, ask: OfferAsk) -> None:
        """Whoever opens the room that is drawn here gets the prompt. Choices of one request (vLLM
        makes requests of them whose ids are its own behind a number) share one room."""
        rid = request.request_id
        if rid in self.sends:
            raise RequestError(f"a request of the id {rid!r} is still being transferred")
        if not self.address:
            raise RequestError(
                "this server does not know yet where decode servers reach it; give `advertise` in "
                "kv_connector_extra_config, or a `bind` with a port"
            )
        number, _, rest = rid.partition("_")
        parent = rest if number.isdigit() and rest else rid
        params = self._params_of(parent)
        if params is None:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "room": self._new_room(),
                "nonce": secrets.token_hex(16),
                "prefill": self.address,
            }
        digest = digest_of(request, params["nonce"])
        self._drawn[rid] = _Drawn(request.num_prompt_tokens, digest, params, parent)

    def _new_room(self) -> int:
        while True:
            room = secrets.randbits(ROOM_BITS) or 1
            if ("", room) not in self.rooms:
                return room

    def _params_of(self, parent: str) -> dict[str, Any] | None:
        """Of a room that another choice of the same request has drawn."""
        known: dict[str, dict[str, Any] | None] = {
            one.parent: one.params for one in self.sends.values() if not one.withdrawn
        }
        known |= {one.parent: one.params for one in self._drawn.values()}
        return known.get(parent)

    # --- the order law ----------------------------------------------------------------------------

    def may_start(self, rid: str, num_free: int, orders: Orders) -> bool | None:
        """Whether vLLM may give this request blocks; None: it is no send that waits for decode.

        A prompt is started beside others only where all of them fit to their ends. A prompt that
        is preempted keeps its blocks until they are sent, so two that are half computed could keep
        each other from going on.
        """
        if rid in self.ending:
            return not self.can_end  # where nothing ends it, it is computed for its answer
        send = self.sends.get(self._choices.get(rid, rid))
        if send is None or send.is_offer:
            return None
        if send.unpromised > 0:
            return False
        need = pages_for(send.num_tokens, self.block_size)
        if send.started:  # it was preempted, or is a choice, most of which is in the prefix cache
            self.make_room(need - num_free, 0.0, orders)
            return True
        if rid in self._choices:
            return False
        others = [one for one in self.sends.values() if one.started and not one.computed]
        need += sum(pages_for(one.num_tokens, self.block_size) - one.num_pages for one in others)
        self.make_room(need - num_free, 0.0, orders)
        return not others or need <= num_free

    @property
    def owes(self) -> bool:
        """Whether decode has promised its pages for a prompt that is not computed."""
        return any(one.unpromised <= 0 and not one.computed for one in self.sends.values())

    def make_room(self, num_blocks: int, grace_s: float, orders: Orders) -> None:
        """Withdraw offers that are older than `grace_s`, the oldest first, until at least so many
        blocks will come back. They are released when the workers say so."""
        if num_blocks <= 0:
            return
        before_s = self.now_s() - grace_s
        for rid, send in self.sends.items():  # in the order in which they were computed
            if send.is_offer and num_blocks > 0:
                if not send.withdrawn and send.since_s <= before_s:
                    send.withdrawn = True
                    orders.withdrawals[rid] = "prefill needs the blocks for another request"
                    self.counters.add("offers_withdrawn")
                if send.withdrawn:
                    num_blocks -= send.num_pages

    @property
    def next_grace_s(self) -> float | None:
        """When the oldest offer may be withdrawn for any request, since the epoch."""
        return next(
            (one.since_s + self.offer_grace_s for one in self.sends.values()
             if one.is_offer and not one.withdrawn),
            None,
        )  # fmt: skip

    # --- steps ------------------------------------------------------------------------------------

    def allocated(self, rid: str) -> None:
        """vLLM has given the request blocks."""
        if rid not in self.ending and (send := self.sends.get(rid)) is not None:
            send.started = True

    def compute(
        self, rid: str, start: int, count: int, table: Callable[[], list[int]], holds: Holds,
        orders: Orders,
    ) -> None:  # fmt: skip
        """This step computes `count` tokens of a request, from token `start` on."""
        if (drawn := self._drawn.get(rid)) is not None:
            if start + count >= drawn.num_tokens:
                self._offer(rid, self._drawn.pop(rid), table(), holds, orders)
        elif rid not in self.ending and (send := self.sends.get(rid)) is not None:
            self._chunk(rid, send, start + count, table, holds, orders)

    def _chunk(
        self, rid: str, send: _Send, end: int, table: Callable[[], list[int]], holds: Holds,
        orders: Orders,
    ) -> None:  # fmt: skip
        """A request that is preempted comes here from its beginning again: its blocks up to
        `send.end` were held and handed over, whatever its new ones are."""
        end = min(end, send.num_tokens)
        if end <= send.end:
            return
        send.end = end
        stop = pages_for(end, self.block_size) if send.computed else end // self.block_size
        if stop == send.num_pages and not send.computed:
            return  # a block that is computed in part waits
        first, pages = send.num_pages, tuple(table()[send.num_pages : stop])
        send.num_pages = stop
        holds.take(rid, pages)
        end = min(end, stop * self.block_size)
        orders.chunks.append(Chunk(rid, first, pages, end, send.computed))

    def _offer(
        self, rid: str, drawn: _Drawn, table: list[int], holds: Holds, orders: Orders
    ) -> None:
        """Held from here on, and not from the first chunk: a prompt that is preempted begins again,
        and keeps nothing from others meanwhile."""
        room = "", int(drawn.params["room"])
        pages = tuple(table[: pages_for(drawn.num_tokens, self.block_size)])
        if room in self.rooms:  # of another choice, which is computed too
            self._drawn[rid] = drawn
            return
        self.rooms[room] = drawn.digest
        holds.take(rid, pages)
        self.sends[rid] = _Send(
            room, drawn.num_tokens, 0, self.num_ranks, self.now_s(), started=True,
            end=drawn.num_tokens, num_pages=len(pages), params=drawn.params, parent=drawn.parent,
        )  # fmt: skip
        orders.offers.append(
            Offer(rid, room[1], drawn.num_tokens, drawn.digest, pages, self.offer_timeout_s)
        )
        self.counters.add("offers")

    def finished(self, rid: str, orders: Orders) -> dict[str, Any] | None:
        """A request has ended, however it did. Returns what its answer tells a decode server."""
        self.ending.pop(rid, None)
        self._choices.pop(rid, None)
        drawn = self._drawn.pop(rid, None)
        if drawn is not None:  # another choice offers its prompt, or nothing was computed
            offered = ("", drawn.params["room"]) in self.rooms
            return dict(drawn.params) if offered else None
        send = self.sends.get(rid)
        if send is None:
            return None
        send.left = True
        if not send.computed:
            orders.abort_sends[rid] = "prefill's request ended"
        return dict(send.params) if send.params is not None and not send.withdrawn else None

    # --- what workers say -------------------------------------------------------------------------

    def promised(self, rid: str) -> None:
        if (send := self.sends.get(rid)) is not None:
            send.unpromised -= 1

    def unsent(self, rid: str, error: str) -> None:
        send = self.sends.get(rid)
        if send is None or send.withdrawn:
            return
        self.counters.add("offers_failed" if send.is_offer else "sends_failed")
        # Where its request ended first, as a router ends those that decode does without, nobody
        # waits for it.
        level = logging.DEBUG if send.left and not send.computed else logging.WARNING
        _log.log(level, "request %s was not sent: %s", rid, error)
        if not send.computed:
            self.ending |= {one: error for one, whose in self._choices.items() if whose == rid}
            if not send.left:
                self.ending[rid] = error

    def freed(self, rid: str, holds: Holds) -> None:
        send = self.sends.get(rid)
        if send is None:
            return
        send.unfreed -= 1
        if send.unfreed <= 0:
            holds.release(rid)
            del self.rooms[send.room]
            del self.sends[rid]
            self.counters.add("sends_over")

    # --- the whole --------------------------------------------------------------------------------

    def flush(self, orders: Orders) -> None:
        """The weights change: nothing that was computed with the former ones is sent any more."""
        for rid, send in self.sends.items():
            if send.is_offer:
                if not send.withdrawn:
                    send.withdrawn = True
                    orders.withdrawals[rid] = "the cache is being reset"
            else:
                orders.abort_sends[rid] = "the cache is being reset"

    def waiting_since(self, offers: bool) -> list[float]:
        """When each came of those that wait for decode: for its promise, or for it to open them."""
        return [
            send.since_s
            for send in self.sends.values()
            if send.is_offer is offers and (offers or send.unpromised > 0)
        ]
