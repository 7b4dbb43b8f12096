"""Decode's rooms, in the form that SGLang needs: polled, held until nothing writes their pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from prefixkv import PrefixKVError
from prefixkv.engines.rank_group import taken
from prefixkv.spi import PageIds
from prefixkv.transfer import DecodeTransfers, KVPoll, RoomDrained, RoomEnded, RoomOverdue

_log = logging.getLogger("prefixkv.sglang")


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
