"""What an admitted request lacks is asked for: of a prefill worker by a promise, or of the engine.

the engine computes it    no room and no share of prefill; a worker that may have it is refused
nothing is missing        of a request that ran before; no room is opened
no worker can be asked    and it is more than the engine computes: the request has to fail
prefill sends it          a promise opens the room. Where prefill has not got the request, the
                          engine is asked to submit it there again
"""

from __future__ import annotations

from collections.abc import Callable

from prefixkv.decode.compute_choice import ComputeChoice
from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.journal import DecodeJournal
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.refusals import Refusals
from prefixkv.decode.request import DecodeRequest, PrefillAsk
from prefixkv.decode.shares import PrefillShares
from prefixkv.decode.sources import Sources
from prefixkv.decode.state_checkpoints import DecodeCheckpoints
from prefixkv.decode.targets import PrefillTargets
from prefixkv.decode.transfer_queue import DecodeTransferQueue
from prefixkv.errors import AbortedError
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for
from prefixkv.protocol.commands import DecodeCommand, OpenRoom
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Promise


class Asking:
    """What gets admitted requests all that they lack. Owned by the scheduler's thread.

    `commands` and `asks` take, in order, the commands and the prompts that the engine submits
    again. `ticket` draws a number for each use of a room, never the same one twice.
    """

    def __init__(
        self,
        pages: PageManager,
        flights: InFlight,
        arriving: DecodeTransferQueue,
        shares: PrefillShares,
        lanes: Lanes,
        choice: ComputeChoice,
        sources: Sources,
        targets: PrefillTargets,
        refusals: Refusals,
        points: DecodeCheckpoints | None,
        journal: DecodeJournal,
        name: str,
        commands: list[DecodeCommand],
        asks: list[PrefillAsk],
        ticket: Callable[[], int],
    ) -> None:
        self._pages = pages
        self._flights, self._arriving = flights, arriving
        self._shares, self._lanes = shares, lanes
        self._choice, self._sources = choice, sources
        self._targets, self._refusals = targets, refusals
        self._points = points
        self._journal = journal
        self._name = name
        self._commands, self._asks = commands, asks
        self._ticket = ticket

    def ask(self, req: DecodeRequest, weights_version: str, now_s: float) -> bool:
        """Choose the source of what an admitted request lacks, and open the room by which prefill
        sends it, or have the engine compute it. Returns False if there is no source: then it is to
        be failed."""
        flight = self._flights.of(req)
        assert flight is not None
        pages, page_size = flight.pages, self._pages.page_size
        start, end = pages.num_shared, pages_for(req.sent_len, page_size)
        # Of this admission: the next one is decided by what is known then.
        was_alone, req.is_alone = req.is_alone, not req.prefill
        is_local = self._choice.takes(req, flight, was_alone, now_s)
        num_asked = 0 if is_local else end - start
        num_loaded = 0
        if (joined := flight.joined) is not None and joined.is_load:
            # Its own load is a hit; one that it shares is on its way with another's flight.
            num_loaded = joined.num_pages if joined.request is req.request else 0
        shared_tokens = (pages.num_joined - num_loaded) * page_size
        num_computed = req.fill_len - (req.prefix_len if is_local else req.sent_len)
        self._journal.admitted(
            req, num_asked, shared_tokens, now_s, num_loaded * page_size, num_computed
        )
        if is_local:
            # Before the refusal: it has to find a flight without a room.
            self._arriving.add_local(flight)
            self._shares.release(flight.room_key)
            if not was_alone and self._targets.may_have(req):
                mine = AbortedError(f"request {req.rid!r} is computed by decode")
                self._refusals.send(req.room_key, req.prefill, mine, req.request.digest)
            return True
        if (
            req.resumed
            and req.prefix_len == req.fill_len
            and pages.slot < 0
            and not self._pages.windows
        ):
            # 1. A resumed request with all its KV in the tree, and no extra state and no window,
            # which are never cached: nothing is to be sent, so no room is opened, whether or not
            # prefill is there.
            self._arriving.arrived(flight)
            self._shares.release(flight.room_key)
            return True
        if was_alone:
            # It lacks more than when it began to wait, and prefill can still not be asked.
            lane = self._lanes.get(req.prefill)
            if not req.prefill or lane is None or not lane.is_open:
                self._arriving.add_local(flight)  # so that it ends as one without a room
                return False
            self._shares.promise(flight.room_key, req.prefill, end - start)
        # 2. A later attempt: prefill has ended, or never had, the request of this generation. The
        # engine has to submit it there again.
        if self._sources.asks_late or req.generation > req.request.generation:
            self._asks.append(PrefillAsk(req, self._name))
        # 3. Registered before the command leaves, so that an answer always finds its flight.
        self._arriving.add(flight)
        num_sent = req.sent_len - req.prefix_len
        again = (
            self._choice.again_tokens(flight, req.prefix_len) if self._choice.unsent.has_any else 0
        )
        self._sources.promised(
            req.prefill, flight.room_key, now_s, num_sent, num_loaded * page_size, again
        )
        self._commands.append(self._promise(req, flight, start, end, weights_version))
        return True

    def _promise(
        self, req: DecodeRequest, flight: Flight, start: int, end: int, weights_version: str
    ) -> OpenRoom:
        """Return the promise of the pages [start, end) of the flight's row. Costs a match and a
        digest, where that is not its whole prompt."""
        pages, page_manager = flight.pages, self._pages
        windows = page_manager.windows
        promise = Promise(
            *flight.room_key.numbers,
            fill_len=req.sent_len,
            prefix_len=req.prefix_len,
            pages=page_manager.table.packed(pages.row, start, end),
            ticket=self._ticket(),
            state_slot=pages.slot,
            weights_version=weights_version,
            windows=windows.promised(pages.row, end) if windows else (),
        )
        # After some output the tokens to compute are more than the prompt, and without its end they
        # are fewer, so their digest is another.
        digest = req.request.digest
        if req.sent_len != req.prompt_len:
            key = req.key if req.sent_len == len(req.key) else req.key.prefix(req.sent_len)
            digest, _ = page_manager.digest(key, page_manager.match(key, req.request.cacheable))
        return OpenRoom(promise, req.prefill, digest)

    def answered(self, key: RoomKey, aux: bytes, now_s: float) -> Flight | None:
        """Note that prefill has sent all that a room was promised for. Return its flight; None if
        nothing waits for it any more."""
        # It proves that every write has landed, so the pages leave prefill's share at once.
        self._shares.release(key)
        flight = self._arriving.succeed(key, aux)
        if flight is not None:
            self._journal.transferred(flight, now_s)
            num_tokens = len(flight.key) - flight.pages.num_shared * self._pages.page_size
            if flight.is_local:
                assert flight.owner is not None
                assert self._points is not None
                num_tokens = flight.owner.sent_len - flight.owner.prefix_len
                self._points.go_on_from_sent(flight.owner)
            self._sources.arrived(flight.prefill, key, num_tokens, now_s)
            if self._choice.unsent.has_any:
                self._choice.sent(flight)
        return flight
