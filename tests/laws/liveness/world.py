"""A prefill and a decode worker with small pools, and requests that arrive in a given order: each
has to end, and no timer may be what ends it.

Real: both control objects, schedulers, the radix trees, every KV byte (`EngineSim`). Simulated:
the network, the transport, the engines, and the clock, which stands still. It is let go on only
when nothing moves any more and a request still lives, by as much as a frame takes to be said again,
and by less than the shortest deadline. What lives then has waited for a timer, or for ever.

Decode may compute prompts itself: those that lack little, and those that name no prefill worker
("plain") until an engine sends them to one.

A room that prefill draws ("drawn") is of an engine that offers: it computes a prompt before decode
has promised, keeps the chunks, and lets go of what it offers while a promised prompt lacks pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from prefixkv.config import ComputeConfig, PageOptions
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.decode.sources import Sources
from prefixkv.errors import OutOfPagesError, RequestError
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.request import PrefillRequest, PrefillState
from prefixkv.protocol.commands import AbortRoom, OfferRoom, SendChunk
from prefixkv.protocol.events import Bootstrapped, SourceFree
from prefixkv.protocol.ids import RoomKey
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest, audit_decode, audit_prefill
from tests.laws.liveness.arrivals import LivenessError
from tests.laws.liveness.play import Act, Play, Played
from tests.support.schedulers import AGES_S, decode_scheduler, timed_by
from tests.support.sim import SINGLE, Storm
from tests.support.sim_engines import ROWS, DecodeEngine, EngineSim, PrefillEngine
from tests.support.sim_rank import TIMING, SimRank

RESENDS_S = 3 * TIMING.resend_s  # below every deadline
NEVER_S = 1e9
AUDIT_STEPS = 64  # between two audits
ACTORS = (
    "prefill's engine", "decode's engine", "prefill's control", "decode's control", "to prefill",
    "to decode", "fabric",
)  # fmt: skip
GROUPS = {
    "none": (),
    "prefill": ("prefill's engine", "prefill's control"),
    "decode": ("decode's engine", "decode's control"),
    "network": ("to prefill", "to decode", "prefill's control", "decode's control", "fabric"),
}
"""What goes on between two arrivals; "rest" is all."""


class Case(Played, frozen=True):
    """One run. `paces` may be of `GROUPS`. `lose` is which frame is lost; -1: none. `reserve` are
    tokens, `compute` those that decode computes of a prompt that prefill could send; -1: none, of
    any prompt. `rows` is how many requests decode runs."""

    pages: tuple[int, int] = (8, 8)
    policy: str = "lru"
    admission: str = "hit_aware"
    patience_s: float = AGES_S
    reserve: int = 0
    lose: int = -1
    compute: int = -1
    rows: int = ROWS


def clipped(command: Any) -> Any:
    """A chunk that may come before its promise."""
    is_chunk = isinstance(command, SendChunk)
    return msgspec.structs.replace(command, clip=True) if is_chunk else command


class Prefill(PrefillEngine):
    """It may also offer: `offers` are requests in rooms that it has drawn, by their keys."""

    sim: World

    def __init__(self, sim: World) -> None:
        super().__init__(sim)
        self.scheduler.shared_prefixes._stall_s = NEVER_S
        self.offers: dict[RoomKey, PrefillRequest] = {}
        self.kept: dict[RoomKey, list[SendChunk]] = {}  # until decode opens the room
        self.offered: set[RoomKey] = set()
        self.open: dict[RoomKey, None] = {}  # of these, neither opened nor withdrawn
        self.aborted: dict[RoomKey, AbortRoom] = {}  # once they were offered

    def add(self, request: Request) -> PrefillRequest:
        return self.scheduler.add(request)

    def offer(self, request: Request) -> None:
        """Compute it as soon as there are pages; the room is offered then."""
        req = self.add(request)
        self.scheduler._commands.pop()  # the room is nobody's yet
        self.offers[req.room_key] = req
        self.kept[req.room_key] = []
        self.scheduler.bootstrapped.add(req, 0)

    def tell(self) -> None:
        for command in self.scheduler.take_commands():
            key = getattr(command, "key", None)
            if isinstance(command, SendChunk) and key in self.kept:
                self.kept[key].append(clipped(command))
                if command.last:
                    self._offer_now(key)
            elif isinstance(command, AbortRoom) and key in self.kept:
                self._unwanted(command)
            else:
                self.ranks[0].inbox.append(command)

    def _offer_now(self, key: RoomKey) -> None:
        req = self.offers[key]
        numbers = RoomKey(*key.numbers)
        self.open[key] = None
        self.offered.add(key)
        what = req.num_tokens, req.request.digest, NEVER_S
        self.ranks[0].inbox.append(OfferRoom(numbers, *what))
        self.sim.offered.add(req.rid)

    def _withdraw(self, key: RoomKey, why: str) -> None:
        """No-op where decode has opened it meanwhile: then that is heard, and it is sent."""
        if self.open.pop(key, self) is None:
            self.ranks[0].inbox.append(AbortRoom(RoomKey(*key.numbers), why))

    def _unwanted(self, abort: AbortRoom) -> None:
        """The engine aborts what it offers, or computes in order to."""
        key = abort.key
        if key in self.offered:
            self.aborted[key] = abort
            self._withdraw(key, abort.reason)
        else:
            del self.kept[key]
            self.scheduler.hear(SourceFree(key), self.sim.now_s)

    def hear(self) -> bool:
        """One thing that became of a room. False: there is none."""
        events = self.ranks[0].events
        if not events:
            return False
        event = events[0]
        key = RoomKey(*event.key.numbers, self.sim.readers[0].me.name)
        if key in self.offers and event.key.decode == "":  # nobody has opened it
            self.kept.pop(key, None)
            self.open.pop(key, None)
            events[0] = msgspec.structs.replace(event, key=key)
        elif isinstance(event, Bootstrapped) and key in self.kept:
            self.open.pop(key, None)
            self.ranks[0].inbox.extend(self.kept.pop(key))
            if key in self.aborted:
                self.ranks[0].inbox.append(self.aborted.pop(key))
        self.scheduler.hear(events.popleft(), self.sim.now_s)
        return True

    def schedule(self) -> None:
        if self.hear():
            return
        super().schedule()
        if self.owes:
            self._withdraw(next(iter(self.open)), "its pages were needed")

    @property
    def owes(self) -> bool:
        """A prompt lacks pages that nothing brings back but the end of an offer: the oldest is to
        end."""
        comes_back = any(
            req.state is PrefillState.SENDING and req.room_key not in self.open
            for req in self.scheduler.requests.values()
        )
        waits = len(self.scheduler.bootstrapped) and not self.computing and not comes_back
        return bool(waits and self.open)

    @property
    def busy(self) -> bool:
        news = self.ranks[0].events or self.scheduler.has_results
        return bool(news or self.computing or self.owes)


class Decode(DecodeEngine):
    """As the engine of Hugging Face's models does, it keeps a token for which pages are missing
    that come back by themselves."""

    sim: World

    def __init__(self, sim: World) -> None:
        super().__init__(sim)
        self.blocked: dict[str, tuple[DecodeRequest, int]] = {}

    def schedule(self) -> None:
        for req, token in list(self.blocked.values()):
            del self.blocked[req.rid]
            if not req.state.ended:
                self._append(req, token)
        super().schedule()

    def _append(self, req: DecodeRequest, token: int) -> None:
        while True:
            try:
                self.scheduler.append_many([req], [token])
                if req.state is DecodeState.RUNNING:
                    self.running[req.rid] = req
                return
            except OutOfPagesError as error:
                if not error.retract:
                    self.running.pop(req.rid, None)
                    self.blocked[req.rid] = req, token
                    return
                self._retract(error.retract[0])
                if error.retract[0] == req.rid:
                    return

    @property
    def busy(self) -> bool:
        news = self.ranks[0].events or self.scheduler.has_results
        return bool(news or self.running or self.local)


class World(Play, EngineSim):
    """See the module's text."""

    prefill: Prefill
    decode: Decode
    audits = True
    tick_s = TIMING.resend_s / 3

    def __init__(self, case: Case, tell: Callable[[str], None] | None = None) -> None:
        self.begin(case, tell)
        self.offered: set[str] = set()  # rids that prefill has answered
        self.refused: dict[str, str] = {}
        self.num_frames = 0
        pages = case.pages
        super().__init__(case.seed, Storm(), SINGLE, decode_pages=pages[1], prefill_pages=pages[0])
        self.finish_early = 0.0

    def start_prefill(self) -> None:
        self.policy = self.case.policy
        self.prefill = Prefill(self)
        self.writers = self.prefill.ranks

    def new_decode(self) -> Decode:
        return Decode(self)

    def decode_scheduler(self) -> DecodeScheduler:
        case, side = self.case, self.sides[1]
        drawn = any(ask.kind == "drawn" for ask in case.asks)
        pages = PageManager(
            side.num_pages, side.page_size, case.rows, options=PageOptions(policy=self.policy)
        )
        pages.hash_every_pages = 1
        compute = ComputeConfig(below=case.compute, ask="both") if case.compute >= 0 else None
        return decode_scheduler(
            pages, timed_by(self, DecodeScheduler), reserve_tokens=case.reserve,
            admission=case.admission, patience_s=case.patience_s,
            name=self.readers[0].me.name, ticket=self.next_ticket,
            max_retries=2 if drawn else 0, sources=Sources(compute, fails_over=True),
        )  # fmt: skip

    def continue_conversation(self, req: DecodeRequest) -> None:
        self.finished += 1

    def submit(self, request: Request) -> None:
        """Decode asks again: in a room as a router draws it. What can never fit is refused."""
        with suppress(RequestError):
            self.prefill.add(request)

    def is_answered(self, number: int) -> bool:
        return f"P{number}" in self.offered

    def never_answers(self, number: int) -> bool:
        name = f"P{number}"
        return name in self.arrived and name not in self.prefill.scheduler.requests

    def bring(self, event: str, name: str, number: int) -> None:
        ask = self.case.asks[number]
        if event[0] == "-":
            (self.prefill if name[0] == "P" else self.decode.scheduler).abort(name)
            return
        if event[0] == "~":
            with suppress(RequestError):  # it is on its way, or has ended
                self.decode.scheduler.retarget(name, self.addresses[0])
            return
        where = {"prefill": "" if ask.kind == "plain" else self.addresses[0]}
        if name[0] == "P":
            where = {"decode": self.readers[0].me.name}
        request = Request(name, ask.tokens, ask.num_out, room=number, **where)
        if event[0] == "!":
            self.decode.scheduler.refuse(request, "its client has left")
            return
        try:
            if name[0] == "D":
                self.decode.scheduler.add(request)
            elif ask.kind == "drawn":
                self.prefill.offer(request)
            else:
                self.prefill.add(request)
        except RequestError as error:  # it can never fit
            self.refused[name] = str(error)
            if name[0] == "D" and request.prefill:
                self.decode.scheduler.refuse(request, str(error))

    def send(self, source: SimRank, to: str | bytes, raw: bytes) -> None:
        self.num_frames += 1
        if self.num_frames - 1 != self.case.lose:
            super().send(source, to, raw)

    def names(self, only: str) -> Iterable[str]:
        return GROUPS[only] if only else ACTORS

    def act(self, name: str) -> Act | None:
        (writer,), (reader,) = self.writers, self.readers
        match name:
            case "prefill's engine":
                return self.prefill.schedule if self.prefill.busy else None
            case "decode's engine":
                return self.decode.schedule if self.decode.busy else None
            case "prefill's control":
                return writer.work if writer.inbox else None
            case "decode's control":
                return reader.work if reader.inbox else None
            case "fabric":
                return self.fabric.step if self.fabric.pending() else None
        source = reader if name == "to prefill" else writer
        at = next((i for i, frame in enumerate(self.wire) if frame[0] is source), None)
        return None if at is None else partial(self.hand_over, at)

    def after(self) -> None:
        self.decode.tell()
        self.prefill.tell()
        if self.audits and len(self.steps) % AUDIT_STEPS == 0:
            audit_decode(self.decode.scheduler, self.readers[0].control)
            audit_prefill(self.prefill.scheduler)

    def see_time(self) -> None:
        for rank in self.ranks:
            rank.work()

    # --- the end ----------------------------------------------------------------------------------

    @property
    def alive(self) -> list[Any]:
        """What has not ended, or still holds pages."""
        held = [s.pages.allocator for s in self.schedulers]
        pages = sum(one.owned_pages + one.held_pages + one.quarantined_pages for one in held)
        return [*self.to_come, *(req for s in self.schedulers for req in s.requests.values()),
                *["pages"] * bool(pages)]  # fmt: skip

    def check_ends(self) -> None:
        """Raises LivenessError for what has not ended, or not well."""
        self.check_alive()
        for number in range(len(self.case.asks)):
            names = {name := f"D{number}", f"P{number}"}
            state, never = self.decode.outcomes.get(name), names & self.refused.keys()
            ends_well = name in self.arrived and not names & self.left and not never
            if ends_well and state is not DecodeState.FINISHED:
                raise LivenessError(f"{name} ends: {state}")
            self.counters["finished"] += state is DecodeState.FINISHED
            self.counters["refused by name"] += bool(never) and not names & self.left
        for scheduler in self.schedulers:
            assert_at_rest(scheduler)

    def picture(self) -> str:
        lines = [f"to come: {self.to_come}"]
        for name, scheduler in zip(("decode", "prefill"), self.schedulers, strict=True):
            pages, evictable = scheduler.pages.allocator, scheduler.pages.cache.evictable_pages
            lines.append(
                f"{name}: {pages.free_pages} free, {evictable} evictable, {pages.owned_pages} "
                f"owned, {pages.held_pages} held; {list(scheduler.requests.values())}"
            )
        lines.append(f"offers {list(self.prefill.open)}, blocked {list(self.decode.blocked)}")
        return "\n".join(lines)


def run(case: Case, tell: Callable[[str], None] | None = None, *, audits: bool = True) -> World:
    """Play a case. Raises what went wrong."""
    world = World(case, tell)
    world.audits = audits
    world.play(RESENDS_S)
    world.check_ends()
    return world
