"""Prefill's rooms as SGLang asks for them: polled, and given page ids chunk by chunk.

SGLang makes a sender when a request comes, and knows a room's number and its tokens, but not which
decode worker it is for. That worker announces itself (`announce`), in either order; then the room
is added. Rooms are counted in pages: the last page of a prompt is sent whole.

A request that ends here without a room (`decline`) has another half on decode, which may have
announced itself, or will. It is refused, so that it does not wait for its timeout. The other way
round, decode says which requests it has ended before it promised anything (`withdraw`).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeVar

from prefixkv import PrefixKVError
from prefixkv.spi import DeviceEvent, InternalError
from prefixkv.transfer import Bootstrapped, KVPoll, PrefillTransfers, RoomEnded, SourceFree

_log = logging.getLogger("prefixkv.sglang")

_What = TypeVar("_What")

MAX_ANNOUNCED: Final = 65_536
"""Of rooms whose request has not come, or was aborted before; the oldest are forgotten."""
MAX_SECONDS: Final = 64
"""Requests that came with the number of a room that is not over, of which it is remembered that
they failed; the same of announcements."""
GRACE_S: Final = 2.0
"""How long an announcement waits for its request where one of that number has ended: the number may
be in use again, and decode be the first to say so."""
WITHDRAWN_S: Final = 60.0
"""How long a request is waited for that decode has ended, to fail it as it comes."""

First = Literal[b"alone", b"silent", b"announced"]
ALONE: Final = b"alone"
SILENT: Final = b"silent"
ANNOUNCED: Final = b"announced"
"""What else has a number on decode as a request of it ends: nothing, or another request, which has
announced itself or has not."""


class _Gone(NamedTuple):
    """A request that has ended here before its decode worker announced itself. The digest is empty
    where the prompt is not known."""

    digest: bytes
    reason: str

    def is_half_of(self, announced: _Announced) -> bool:
        return b"" in (self.digest, announced.digest) or self.digest == announced.digest


class _Announced(NamedTuple):
    """A decode worker's word that it has a request of this prompt; the request has not come here.
    With a reason: that it has ended it, and had promised nothing."""

    decode: str
    digest: bytes
    reason: str = ""
    since_s: float = 0.0


@dataclass(slots=True, eq=False)
class Send:
    """A request's room. `progress` is how far it was while it lived; `poll` is what SGLang may be
    told: a room is over only when no write reads its pages any more."""

    room: int
    digest: bytes
    num_pages: int
    decode: str = ""
    prefix_pages: int = 0
    pages: list[int] = field(default_factory=list)
    progress: KVPoll = KVPoll.BOOTSTRAPPING
    outcome: KVPoll | None = None
    error: str = ""
    free: bool = True
    """Nothing reads its pages: not added yet, or SourceFree has come."""
    seconds: list[_Gone] = field(default_factory=list)
    """Requests with its number that came while it was not over, and failed."""
    later: list[_Announced] = field(default_factory=list)
    """What decode announced behind its own announcement: the other halves of `seconds`, or of what
    comes when it is over."""

    @property
    def poll(self) -> KVPoll:
        if self.outcome is not None and self.free:
            return self.outcome
        return self.progress

    def fail(self, reason: str) -> None:
        if self.outcome is None:
            self.outcome, self.error = KVPoll.FAILED, reason


class Sends:
    """All rooms of a prefill rank. One thread's: SGLang's scheduler.

    Args:
        transfers: the caller's, to close.
        page_size: tokens a page.
        clock: seconds.
    """

    def __init__(
        self,
        transfers: PrefillTransfers,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transfers = transfers
        self._page_size = page_size
        self._clock = clock
        self._rooms: dict[int, Send] = {}  # that are not over
        self._announced: OrderedDict[int, _Announced] = OrderedDict()
        self._gone: OrderedDict[int, _Gone] = OrderedDict()
        # Announcements of what has ended here, and when they are refused.
        self._doubtful: OrderedDict[int, tuple[float, _Announced, str]] = OrderedDict()
        self._withdrawn: OrderedDict[int, _Announced] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def begin(self, room: int, digest: bytes, num_pages: int) -> Send:
        """The request of a room has come. A room of that number that is not over: it fails."""
        send = Send(room, digest, num_pages)
        if room in self._rooms:
            reason = f"room {room} is another request's"
            send.fail(reason)
            self.decline(room, digest, reason)
            return send
        withdrawn = self._take_withdrawn(room, digest)
        if withdrawn is not None:
            send.fail(withdrawn.reason)
            _remember(self._gone, room, _Gone(digest, withdrawn.reason))  # if it was another's
            return send
        self._rooms[room] = send
        self._gone.pop(room, None)
        announced = self._announced.pop(room, None)
        if announced is None and room in self._doubtful:
            announced = self._doubtful.pop(room)[1]
        if announced is not None:
            self._pair(send, announced)
        return send

    def decline(self, room: int, digest: bytes, reason: str) -> None:
        """A request with this number ends here without a room: decode hears why. A room of that
        number that is not over goes on, and decode hears when it is over. An empty digest stands
        for any prompt."""
        send = self._rooms.get(room)
        if send is not None:
            send.seconds.append(_Gone(digest, reason))
            del send.seconds[:-MAX_SECONDS]
        elif (announced := self._announced.pop(room, None)) is not None:
            self._refuse(room, announced.decode, reason)
        elif room in self._doubtful:
            self._refuse(room, self._doubtful.pop(room)[1].decode, reason)
        elif self._take_withdrawn(room, digest) is None:
            _remember(self._gone, room, _Gone(digest, reason))

    def announce(self, room: int, decode: str, digest: bytes) -> None:
        """The decode worker of that name has the room's other end, for the prompt of the digest."""
        announced, send = _Announced(decode, digest), self._rooms.get(room)
        if send is not None and not send.decode:
            self._pair(send, announced)
        elif send is not None and send.decode != decode:
            self._refuse(room, decode, f"room {room} is for another decode worker")
        elif send is not None:  # decode has done with that use of the number
            send.later.append(announced)
            del send.later[:-MAX_SECONDS]
        elif (gone := self._gone.get(room)) is not None and gone.is_half_of(announced):
            due_s = self._clock() + GRACE_S
            _remember(self._doubtful, room, (due_s, announced, self._gone.pop(room).reason))
        else:
            _remember(self._announced, room, announced)

    def withdraw(
        self, room: int, decode: str, digest: bytes, reason: str, first: First = ALONE
    ) -> None:
        """That decode worker has ended its request of this number, before it promised anything. Its
        other half fails, now or as it comes. An empty digest stands for any prompt. `first`: what
        else has the number there. Where that has not announced itself, the room may be its own."""
        withdrawn = _Announced(decode, digest, f"decode: {reason}", self._clock())
        send, gone = self._rooms.get(room), self._gone.get(room)
        if first == ALONE:
            self._announced.pop(room, None)  # of a former use
        if send is not None and not send.decode and first != SILENT:
            send.fail(withdrawn.reason)
            self._over(send)
        elif send is not None and send.decode in ("", decode):  # of another use
            send.later.append(withdrawn)
            del send.later[:-MAX_SECONDS]
        elif send is None and gone is not None and gone.is_half_of(withdrawn):
            del self._gone[room]
        elif send is None:
            _remember(self._withdrawn, room, withdrawn)

    def _take_withdrawn(self, room: int, digest: bytes) -> _Announced | None:
        found = self._withdrawn.get(room)
        if found is not None and self._clock() - found.since_s >= WITHDRAWN_S:
            del self._withdrawn[room]
        elif found is not None and _Gone(digest, "").is_half_of(found):
            return self._withdrawn.pop(room)
        return None

    def _pair(self, send: Send, announced: _Announced) -> None:
        """The room is that decode worker's, if both mean one prompt. Else neither is served, nor
        what the other halves of the two may be, where one number was given to two requests."""
        if _Gone(send.digest, "").is_half_of(announced):
            self._add(send, announced.decode)
            return
        reason = f"PromptMismatchError: room {send.room} has another prompt on the other server"
        send.fail(reason)
        self._over(send)
        self._refuse(send.room, announced.decode, reason)
        self.withdraw(send.room, announced.decode, announced.digest, reason)
        _remember(self._gone, send.room, _Gone(send.digest, reason))

    def _add(self, send: Send, decode: str) -> None:
        send.decode = decode
        num_tokens = send.num_pages * self._page_size
        try:
            self.transfers.add(send.room, 0, num_tokens, decode, send.digest)
            send.free = False
        except PrefixKVError as error:
            send.fail(str(error))
            self._over(send)

    def _over(self, send: Send) -> None:
        """Its number may be used again: what came for it meanwhile is answered, or waits."""
        room = send.room
        del self._rooms[room]
        for announced in send.later:
            other = next((one for one in send.seconds if one.is_half_of(announced)), None)
            if other is not None:
                send.seconds.remove(other)
                if not announced.reason:
                    self._refuse(room, announced.decode, other.reason)
            elif announced.reason:
                _remember(self._withdrawn, room, announced)
            else:
                _remember(self._announced, room, announced)
        for other in send.seconds:
            _remember(self._gone, room, other)

    def _refuse(self, room: int, decode: str, reason: str) -> None:
        try:
            self.transfers.refuse(room, 0, reason, decode=decode)
        except PrefixKVError as error:
            _log.warning("room %d was not refused: %s", room, error)

    def send(
        self,
        send: Send,
        pages: Sequence[int],
        *,
        last: bool = False,
        aux: bytes = b"",
        ready: DeviceEvent | None = None,
    ) -> None:
        """The next pages of a request behind decode's prefix hold their KV, once `ready` is.

        A room that has ended takes none.
        """
        send.pages += [int(page) for page in pages]
        if send.outcome is not None:
            return
        send.progress = KVPoll.TRANSFERRING
        given = send.prefix_pages + len(send.pages)
        if last and given != send.num_pages:
            reason = f"{given} pages were given for a prompt of {send.num_pages}"
            self.abort(send, reason)
            return
        # What decode has is not sent: these ids stand for nothing.
        ids = [0] * send.prefix_pages + send.pages
        try:
            self.transfers.send_chunk(
                send.room, given * self._page_size, ids, decode=send.decode, last=last,
                aux=aux, ready=ready, generation=0,
            )  # fmt: skip
        except PrefixKVError as error:  # nothing was handed over, so the room must not go on
            self.abort(send, str(error))

    def abort(self, send: Send, reason: str) -> None:
        """End a room; it polls FAILED once no write reads its pages. Over: no-op."""
        send.fail(reason)
        if not send.free:
            self.transfers.abort(send.room, 0, reason, decode=send.decode)
        elif self._rooms.get(send.room) is send:
            self._over(send)
            _remember(self._gone, send.room, _Gone(send.digest, reason))

    def pump(self) -> None:
        """Take what became of rooms. Cheap where nothing did."""
        while self._doubtful and next(iter(self._doubtful.values()))[0] <= self._clock():
            room, (_, announced, reason) = self._doubtful.popitem(last=False)
            self._refuse(room, announced.decode, reason)
        try:
            events = self.transfers.take_events()
        except InternalError as error:  # the control thread lives on, and so do other rooms
            _log.error("prefixkv: %s", error)
            return
        for event in events:
            send = self._rooms.get(event.key.room)
            if send is None or send.decode != event.key.decode:
                continue  # of a room that was refused
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


def _remember(rooms: OrderedDict[int, _What], room: int, what: _What) -> None:
    rooms[room] = what
    rooms.move_to_end(room)
    while len(rooms) > MAX_ANNOUNCED:
        rooms.popitem(last=False)
