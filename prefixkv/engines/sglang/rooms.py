"""Rooms in the form that SGLang needs. Prefill's (`RoomSends`) are polled, and given page ids chunk
by chunk; decode's (`Receives`) are polled, and held until nothing writes their pages.

SGLang makes a sender without knowing its decode worker. The room is added once that worker has
announced itself (`announce`) and the request is there. Chunks are counted in pages. A request that
ends here without a room (`decline`) has its other half refused on decode, which else would wait for
its timeout. Decode reports requests that it ended before a promise (`withdraw`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from prefixkv import PrefixKVError
from prefixkv.engines.rank_group import taken
from prefixkv.spi import DeviceEvent, PageIds, pages_for
from prefixkv.transfer import (
    Bootstrapped,
    DecodeTransfers,
    KVPoll,
    PrefillTransfers,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    SourceFree,
)

_log = logging.getLogger("prefixkv.sglang")

MAX_ANNOUNCED: Final = 65_536
"""Limit of entries of each kind about rooms that have no request here; the oldest are forgotten."""
MAX_DUPLICATES: Final = 64
"""Limit, per room, of later requests with its number that are remembered, and of announcements."""
GRACE_S: Final = 2.0
"""Seconds for which an announcement waits for its request where a request of that number has ended,
and a withdrawal for an announcement: the number may be in use again, with decode's word about
either use the first to arrive."""
WITHDRAWN_S: Final = 60.0
"""Seconds for which a withdrawal waits for its request, to fail it on arrival."""

NumberState = Literal[b"alone", b"silent", b"announced"]
ALONE: Final = b"alone"
SILENT: Final = b"silent"
ANNOUNCED: Final = b"announced"
"""State of a number on decode when a request of it ends: no other request has it (ALONE), or one
that has not announced itself yet (SILENT), or one that has (ANNOUNCED)."""


class Half(NamedTuple):
    """A request of a number on one server: on the decode worker of this name, or here where that is
    "". With a `reason` it has ended before both halves were paired. The digest is empty where the
    prompt is not known; `since_s` is when the half came, or ended, where that matters."""

    decode: str
    digest: bytes
    reason: str = ""
    since_s: float = -math.inf

    def matches(self, digest: bytes) -> bool:
        """An unknown digest fits any."""
        return b"" in (self.digest, digest) or self.digest == digest


@dataclass(slots=True, eq=False)
class RoomSend:
    """A request's room; `progress` is its state while it runs."""

    room: int
    digest: bytes
    num_tokens: int
    num_pages: int
    decode: str = ""
    prefix_pages: int = 0
    pages: list[int] = field(default_factory=list)
    progress: KVPoll = KVPoll.BOOTSTRAPPING
    outcome: KVPoll | None = None
    error: str = ""
    free: bool = True
    """True where nothing reads its pages: not added yet, or SourceFree has come."""
    duplicates: list[Half] = field(default_factory=list)
    """Further requests with its number that came before it was over, and failed."""
    former_until_s: float = -math.inf
    """Time until which a withdrawal may be of the number's former use, which ended here with no
    word from decode."""
    later_announcements: list[Half] = field(default_factory=list)
    """Announcements after its own one: the other halves of `duplicates`, or of the next use."""

    @property
    def poll(self) -> KVPoll:
        """An outcome shows only when no write reads the pages any more: SGLang then frees them."""
        if self.outcome is not None and self.free:
            return self.outcome
        return self.progress

    def fail(self, reason: str) -> None:
        """No-op after an outcome."""
        if self.outcome is None:
            self.outcome, self.error = KVPoll.FAILED, reason


class RoomSends:
    """All rooms of a prefill rank. Owner: the scheduler's thread. The caller closes `transfers`."""

    def __init__(
        self,
        transfers: PrefillTransfers,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transfers = transfers
        self._page_size = page_size
        self._clock = clock
        # The two halves of a request arrive in either order, over different ways, and either may
        # have ended. Of each number there may be: a live room; decode's half without ours
        # (`_announced`); our ended half without decode's (`_declined`); both, with ours ended
        # (`_unclaimed`: refused after `GRACE_S`, until when a new request may claim it); decode's
        # ended half without ours (`_withdrawn`), or of a live room or the number's former use
        # (`_doubted`: it counts for the room after `GRACE_S`). All but rooms are bounded.
        self._rooms: dict[int, RoomSend] = {}
        self._announced: OrderedDict[int, Half] = OrderedDict()
        self._declined: OrderedDict[int, Half] = OrderedDict()
        self._unclaimed: OrderedDict[int, Half] = OrderedDict()
        self._withdrawn: OrderedDict[int, Half] = OrderedDict()
        self._doubted: OrderedDict[int, Half] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def begin(self, room: int, digest: bytes, num_tokens: int) -> RoomSend:
        """Begin the room of a request that has arrived. It fails at once if a room of that number
        is not over, or if decode has ended its half."""
        send = RoomSend(room, digest, num_tokens, pages_for(num_tokens, self._page_size))
        # 1. The number is in use. This request fails alone; its other half is refused as well.
        if room in self._rooms:
            reason = f"room {room} is another request's"
            send.fail(reason)
            self.decline(room, digest, reason)
            return send
        # 2. Decode has ended its half already.
        withdrawn = self._take_withdrawn(room, digest)
        if withdrawn is not None:
            send.fail(withdrawn.reason)
            # Kept, in case the withdrawal was meant for another request of that number.
            _remember(self._declined, room, Half("", digest, withdrawn.reason))
            return send
        # 3. A new use of the number: a former one that ended here no longer counts. An announcement
        # that waits belongs to it, also one that came after the end of a former use (`_unclaimed`).
        self._rooms[room] = send
        self._doubted.pop(room, None)
        former = self._declined.pop(room, None)
        if former is not None and former.digest in (b"", digest):
            send.former_until_s = former.since_s + GRACE_S
        if (announced := self._take_announced(room)) is not None:
            self._pair(send, announced)
        return send

    def _take_announced(self, room: int) -> Half | None:
        return self._announced.pop(room, None) or self._unclaimed.pop(room, None)

    def decline(self, room: int, digest: bytes, reason: str) -> None:
        """Tell decode why a request with this number ends here without a room: after any room of
        that number, which is not disturbed, is over. An empty digest stands for any prompt."""
        # 1. Another request has the number: see `_over`. 2. Decode has announced its half: refuse
        # it. 3. Decode has ended its half too: both are gone. 4. Decode will announce it.
        send = self._rooms.get(room)
        if send is not None:
            send.duplicates.append(Half("", digest, reason))
            del send.duplicates[:-MAX_DUPLICATES]
        elif (announced := self._take_announced(room)) is not None:
            self._refuse(room, announced.decode, reason)
        elif self._take_withdrawn(room, digest) is None:
            _remember(self._declined, room, Half("", digest, reason, self._clock()))

    def announce(self, room: int, decode: str, digest: bytes) -> None:
        """Take in a decode worker's announcement. Any process that reaches the socket may send one;
        the digest ties it to a prompt."""
        # 1. The room waits for it. 2. The room has another decode worker: the later one is refused.
        # 3. The same worker again: it has finished with this use of the number. 4. Our half has
        # ended. The announcement may belong to the next use, so it waits for a short time. 5. Our
        # half has not arrived yet.
        announced, send = Half(decode, digest), self._rooms.get(room)
        if send is not None and not send.decode:
            self._pair(send, announced)
        elif send is not None and send.decode != decode:
            self._refuse(room, decode, f"room {room} is for another decode worker")
        elif send is not None:
            send.later_announcements.append(announced)
            del send.later_announcements[:-MAX_DUPLICATES]
        elif (gone := self._declined.get(room)) is not None and gone.matches(digest):
            del self._declined[room]
            _remember(self._unclaimed, room, Half(decode, digest, gone.reason, self._clock()))
        else:
            _remember(self._announced, room, announced)

    def withdraw(
        self, room: int, decode: str, digest: bytes, reason: str, number_state: NumberState = ALONE
    ) -> None:
        """Decode has ended this number's request, with no promise; the other half fails, now or
        when it arrives. An empty digest stands for any prompt. If decode's `number_state` is
        SILENT, the room here may belong to the other request, so it is not failed."""
        withdrawn = Half(decode, digest, f"decode: {reason}", self._clock())
        send, gone = self._rooms.get(room), self._declined.get(room)
        if number_state == ALONE:
            self._announced.pop(room, None)  # left over from a former use
        # 1. The room waits for an announcement, which will not come. 2. The room is paired with
        # this worker, or may be the other request's (SILENT): this is about another use of the
        # number. 3. Our half has ended too. 4. Our half has yet to come.
        if send is not None and not send.decode and number_state != SILENT:
            # A request was aborted on both servers, and its number is in use again: decode's word
            # about the first may be the last to arrive. An announcement would clear that up.
            if withdrawn.since_s < send.former_until_s:
                self._doubted[room] = withdrawn._replace(since_s=send.former_until_s - GRACE_S)
                send.former_until_s = -math.inf  # a second withdrawal is of this use
            else:
                send.fail(withdrawn.reason)
                self._over(send)
        elif send is not None and send.decode in ("", decode):
            send.later_announcements.append(withdrawn)
            del send.later_announcements[:-MAX_DUPLICATES]
        elif send is None and gone is not None and gone.matches(digest):
            del self._declined[room]
        elif send is None:
            _remember(self._withdrawn, room, withdrawn)

    def _take_withdrawn(self, room: int, digest: bytes) -> Half | None:
        found = self._withdrawn.get(room)
        if found is not None and self._clock() - found.since_s >= WITHDRAWN_S:
            del self._withdrawn[room]
        elif found is not None and found.matches(digest):
            return self._withdrawn.pop(room)
        return None

    def _pair(self, send: RoomSend, announced: Half) -> None:
        """Both must mean the same prompt. If not, one number was given to two requests; then
        neither is served, nor are their other halves."""
        if announced.matches(send.digest):
            self._add(send, announced.decode)
            return
        reason = f"PromptMismatchError: room {send.room} has another prompt on the other server"
        send.fail(reason)
        self._over(send)
        # Both halves that are here end now. Their other halves are on the way: the withdrawal fails
        # the one that comes here, and `_declined` refuses the one that decode will announce.
        self._refuse(send.room, announced.decode, reason)
        self.withdraw(send.room, announced.decode, announced.digest, reason)
        _remember(self._declined, send.room, Half("", send.digest, reason))

    def _add(self, send: RoomSend, decode: str) -> None:
        send.decode = decode
        try:
            self.transfers.add(send.room, 0, send.num_tokens, decode, send.digest)
            send.free = False
        except PrefixKVError as error:
            send.fail(str(error))
            self._over(send)

    def _over(self, send: RoomSend) -> None:
        """Forget a room and answer what came meanwhile. Its number may then be used again."""
        room = send.room
        del self._rooms[room]
        # An announcement is refused if its other half failed here. One without a half waits for it,
        # as if it came now. Then the requests without an announcement wait for theirs.
        for announced in send.later_announcements:
            fitting = (one for one in send.duplicates if one.matches(announced.digest))
            other = next(fitting, None)
            if other is not None:
                send.duplicates.remove(other)
                if not announced.reason:
                    self._refuse(room, announced.decode, other.reason)
            elif announced.reason:
                _remember(self._withdrawn, room, announced)
            else:
                _remember(self._announced, room, announced)
        for other in send.duplicates:
            _remember(self._declined, room, other)

    def _refuse(self, room: int, decode: str, reason: str) -> None:
        try:
            self.transfers.refuse(room, 0, reason, decode=decode)
        except PrefixKVError as error:
            _log.warning("room %d was not refused: %s", room, error)

    def send(
        self,
        send: RoomSend,
        pages: Sequence[int],
        *,
        last: bool = False,
        aux: bytes = b"",
        ready: DeviceEvent | None = None,
        windows: Sequence[PageIds] = (),
        state_slot: int = -1,
    ) -> None:
        """Send the pages behind decode's prefix, once `ready` is; nothing for a room that has
        ended. With `last` the pages must complete the prompt, and with it go `windows`, for each
        window group the pages of its last window, and the state in `state_slot`."""
        send.pages += [int(page) for page in pages]
        if send.outcome is not None:
            return
        send.progress = KVPoll.TRANSFERRING
        given = send.prefix_pages + len(send.pages)
        if last and given != send.num_pages:
            reason = f"{given} pages were given for a prompt of {send.num_pages}"
            self.abort(send, reason)
            return
        # Decode's prefix is never sent, so its ids are only there to keep the count.
        ids = [0] * send.prefix_pages + send.pages
        # SGLang names a window's pages by themselves, up to the prompt's last one.
        numbered = [(send.num_pages - len(pages), pages) for pages in windows]
        try:
            self.transfers.send_chunk(
                send.room, min(given * self._page_size, send.num_tokens), ids, decode=send.decode,
                last=last, aux=aux, ready=ready, generation=0, state_slot=state_slot,
                windows=numbered if last else None,
            )  # fmt: skip
        except PrefixKVError as error:  # decode would wait for pages that never come
            self.abort(send, str(error))

    def abort(self, send: RoomSend, reason: str) -> None:
        """It polls FAILED once no write reads its pages. No-op where it is over."""
        send.fail(reason)
        # 1. Added: writes may read the pages, so it is over with SourceFree. 2. Not added: nothing
        # reads them, so it is over now, and decode is refused as soon as it announces itself.
        if not send.free:
            self.transfers.abort(send.room, 0, reason, decode=send.decode)
        elif self._rooms.get(send.room) is send:
            self._over(send)
            _remember(self._declined, send.room, Half("", send.digest, reason, self._clock()))

    def pump(self) -> None:
        """Take in the events of all rooms. Cheap where there are none."""
        # Refuse announcements that no new request has claimed in time.
        for room, announced in self._take_due(self._unclaimed):
            self._refuse(room, announced.decode, announced.reason)
        # Withdrawals that no announcement has shown to be of a former use.
        for room, withdrawn in self._take_due(self._doubted):
            doubted = self._rooms.get(room)
            if doubted is not None and not doubted.decode:
                self.abort(doubted, withdrawn.reason)
        for event in taken(self.transfers.take_events, _log):
            send = self._rooms.get(event.key.room)
            if send is None or send.decode != event.key.decode:
                continue  # the event of a room that was refused
            # The outcome and the end of reads are two events: SGLang sees the first after both.
            match event:
                case Bootstrapped():
                    send.prefix_pages = event.prefix_len // self._page_size
                    send.progress = KVPoll.WAITING_FOR_INPUT
                case RoomEnded(poll=KVPoll.SUCCESS):
                    send.outcome = send.outcome or KVPoll.SUCCESS
                case RoomEnded():
                    send.fail(f"{type(event.error).__name__}: {event.error}")
                case SourceFree():
                    send.free = True
                    self._over(send)

    def _take_due(self, halves: OrderedDict[int, Half]) -> Iterator[tuple[int, Half]]:
        """The oldest are in front."""
        while halves and next(iter(halves.values())).since_s + GRACE_S <= self._clock():
            yield halves.popitem(last=False)


def _remember(halves: OrderedDict[int, Half], room: int, half: Half) -> None:
    # There is a limit since clients name rooms.
    halves[room] = half
    halves.move_to_end(room)
    while len(halves) > MAX_ANNOUNCED:
        halves.popitem(last=False)


@dataclass(slots=True, eq=False)
class Receive:
    """A request's room. `held`: a peer may still write its pages. The first outcome stays."""

    room: int
    num_pages: int = 0
    outcome: KVPoll | None = None
    error: str = ""
    aux: bytes = b""
    held: bool = False

    def fail(self, reason: str) -> None:
        """No-op after an outcome. Does not end `held`."""
        if self.outcome is None:
            self.outcome, self.error = KVPoll.FAILED, reason


class Receives:
    """All rooms of a decode rank. Owner: the scheduler's thread. The caller closes `transfers`."""

    def __init__(self, transfers: DecodeTransfers) -> None:
        self.transfers = transfers
        self._rooms: dict[int, Receive] = {}  # held rooms only; `_settle` takes them out

    def __len__(self) -> int:
        return len(self._rooms)

    def is_held(self, room: int) -> bool:
        return room in self._rooms

    def answers(self, prefill: str) -> bool:
        """Return whether the prefill worker at this address was greeted, and is not silent."""
        return self.transfers.peers().get(prefill, (None, ""))[1] == "ready"

    def open(
        self,
        room: int,
        prefill: str,
        num_tokens: int,
        prefix_len: int,
        pages: PageIds,
        digest: bytes,
        ticket: int,
        windows: Sequence[PageIds] = (),
        state_slot: int = -1,
    ) -> Receive:
        """Open a room, and promise pages for the prompt's tokens after its first `prefix_len`. If
        they cannot be promised, the returned room has failed and is not held, and prefill is
        refused. `ticket`, `windows` and `state_slot` are as for `DecodeTransfers.open`."""
        receive = Receive(room, len(pages))
        try:
            self.transfers.open(
                room, 0, num_tokens, prefix_len, pages, prefill, digest, state_slot, ticket,
                windows,
            )  # fmt: skip
        except PrefixKVError as error:
            receive.fail(str(error))
            try:
                self.transfers.refuse(room, 0, prefill, str(error), ticket)
            except PrefixKVError as other:
                _log.warning("room %d was not refused: %s", room, other)
            return receive
        receive.held = True
        self._rooms[room] = receive
        return receive

    def abort(self, receive: Receive, reason: str) -> None:
        """End a room, which stays held until it is drained. No-op for one that is over."""
        receive.fail(reason)
        if receive.held:
            self.transfers.abort(receive.room, 0, reason)

    def pump(self) -> None:
        """Take in the events of all rooms. Cheap where there are none."""
        for event in taken(self.transfers.take_events, _log):
            receive = self._rooms.get(event.key.room)
            if receive is None:
                continue  # the event of a room that was refused
            # 1. Success is also proof: everything was written, so nothing more will be. It does not
            #    replace an abort of ours. 2. A failure leaves the pages held. 3. Drained is proof.
            # 4. Overdue changes nothing: without proof the pages stay held.
            room_and_pages = receive.room, receive.num_pages
            match event:
                case RoomEnded(poll=KVPoll.SUCCESS):
                    if receive.outcome is None:
                        receive.outcome, receive.aux = KVPoll.SUCCESS, event.aux
                    self._settle(receive)
                case RoomEnded():
                    receive.fail(f"{type(event.error).__name__}: {event.error}")
                    _log.info(
                        "room %d failed; its %d pages are held until it is drained", *room_and_pages
                    )
                case RoomDrained():
                    _log.info("room %d is drained, its %d pages are free", *room_and_pages)
                    self._settle(receive)
                case RoomOverdue():
                    _log.warning(
                        "room %d failed and is not drained in time: its %d pages stay held until "
                        "prefill, or its death, proves that nothing writes them", *room_and_pages,
                    )  # fmt: skip

    def _settle(self, receive: Receive) -> None:
        receive.held = False
        del self._rooms[receive.room]
