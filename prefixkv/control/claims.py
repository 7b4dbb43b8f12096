"""Which decode ranks have named a room, and what is kept of rooms before their request has come."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from prefixkv.config import ControlConfig
from prefixkv.control.peers import Peer
from prefixkv.errors import ProtocolError
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.sender_machine import SenderMachine

_NONE: Final[Mapping[PeerId, Peer]] = MappingProxyType({})


class Claims:
    """Owned by a `PrefillControl`. A room is claimed by ranks of one worker."""

    def __init__(self, timing: ControlConfig) -> None:
        self._timing = timing
        self._by_room: dict[RoomKey, dict[PeerId, Peer]] = {}
        self._aborted: dict[RoomKey, tuple[float, str]] = {}  # until when, and why

    def of(self, key: RoomKey) -> Mapping[PeerId, Peer]:
        return self._by_room.get(key, _NONE)

    def workers(self, key: RoomKey) -> set[PeerId]:
        return {peer.worker for peer in self.of(key).values()}

    def all_gone(self, key: RoomKey) -> bool:
        """Whether it was claimed, and every rank that did has left."""
        claims = self.of(key)
        return bool(claims) and all(peer.gone for peer in claims.values())

    def check(self, key: RoomKey, machine: SenderMachine | None, peer: Peer) -> None:
        """Raises ProtocolError unless the room is of no worker yet or of the peer's, and it speaks
        for itself there."""
        is_another = machine is not None and machine.is_strange(peer.id, peer.hello.rank)
        for claimant in self.of(key).values():
            if claimant.worker != peer.worker or is_another:
                raise ProtocolError(f"room {key.room} belongs to {claimant.worker}")

    def add(self, key: RoomKey, peer: Peer) -> None:
        self._by_room.setdefault(key, {})[peer.id] = peer
        peer.rooms.add(key)

    def drop(self, key: RoomKey) -> None:
        for peer in self._by_room.pop(key, _NONE).values():
            peer.rooms.discard(key)

    def unpark(self, key: RoomKey) -> None:
        """The room has ended, or its request has come: its promises are parked no more."""
        for peer in self.of(key).values():
            peer.num_parked -= 1

    # --- aborts that came before the engine's request ---------------------------------------------

    def abort_early(self, key: RoomKey, reason: str, now_s: float) -> None:
        """Remember the abort for a while, so that a request added later fails at once. Bounded."""
        if len(self._aborted) < self._timing.max_parked_per_peer:
            self._aborted[key] = (now_s + self._timing.parked_timeout_s, reason)

    def take_abort(self, key: RoomKey) -> str | None:
        """Why the room was aborted before its request came, once; None if it was not."""
        _, reason = self._aborted.pop(key, (0.0, None))
        return reason

    def expire(self, now_s: float) -> None:
        """Forget the aborts that were kept long enough."""
        while self._aborted and next(iter(self._aborted.values()))[0] <= now_s:
            del self._aborted[next(iter(self._aborted))]

    def leftovers(self) -> tuple[Mapping[RoomKey, object], Mapping[RoomKey, object]]:
        """Claims and early aborts, for audits: nothing is left where no room is."""
        return self._by_room, self._aborted
