"""Prefill's rooms as SGLang asks for them: polled, and given page ids chunk by chunk.

SGLang makes a sender when a request comes, and knows a room's number and its tokens, but not which
decode worker it is for. That worker announces itself (`announce`), in either order; then the room
is added. Rooms are counted in pages: the last page of a prompt is sent whole.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from prefixkv.errors import InternalError, PrefixKVError
from prefixkv.request import DeviceEvent
from prefixkv.transfer import Bootstrapped, KVPoll, PrefillTransfers, RoomEnded, SourceFree

_log = logging.getLogger("prefixkv.sglang")

MAX_ANNOUNCED: Final = 65_536
"""Of rooms whose request has not come, or was aborted before; the oldest are forgotten."""


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
    """

    def __init__(self, transfers: PrefillTransfers, page_size: int) -> None:
        self.transfers = transfers
        self._page_size = page_size
        self._rooms: dict[int, Send] = {}  # that are not over
        self._announced: OrderedDict[int, str] = OrderedDict()  # by whom; no request yet
        self._gone: OrderedDict[int, str] = OrderedDict()  # why; aborted before it was announced

    def __len__(self) -> int:
        return len(self._rooms)

    def begin(self, room: int, digest: bytes, num_pages: int) -> Send:
        """The request of a room has come. A room of that number that is not over: it fails."""
        send = Send(room, digest, num_pages)
        if room in self._rooms:
            send.fail(f"room {room} is another request's")
            return send
        self._rooms[room] = send
        self._gone.pop(room, None)
        decode = self._announced.pop(room, None)
        if decode is not None:
            self._add(send, decode)
        return send

    def announce(self, room: int, decode: str) -> None:
        """The decode worker of that name has the room's other end."""
        send = self._rooms.get(room)
        if send is not None and not send.decode:
            self._add(send, decode)
        elif send is not None:
            if send.decode != decode:
                self._refuse(room, decode, f"room {room} is for another decode worker")
        elif room in self._gone:
            self._refuse(room, decode, self._gone.pop(room))
        else:
            _remember(self._announced, room, decode)

    def _add(self, send: Send, decode: str) -> None:
        send.decode = decode
        num_tokens = send.num_pages * self._page_size
        try:
            self.transfers.add(send.room, 0, num_tokens, decode, send.digest)
            send.free = False
        except PrefixKVError as error:
            send.fail(str(error))
            del self._rooms[send.room]

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
            del self._rooms[send.room]
            _remember(self._gone, send.room, reason)

    def pump(self) -> None:
        """Take what became of rooms. Cheap where nothing did."""
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
                    del self._rooms[event.key.room]


def _remember(rooms: OrderedDict[int, str], room: int, what: str) -> None:
    rooms[room] = what
    rooms.move_to_end(room)
    while len(rooms) > MAX_ANNOUNCED:
        rooms.popitem(last=False)
