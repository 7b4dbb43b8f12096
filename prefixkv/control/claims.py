"""Which decode ranks have named a room, and what is kept of rooms before their request has come."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from prefixkv.config import ControlConfig
from prefixkv.control.peers import Peer
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.sender_machine import SenderMachine

_NONE: Final[Mapping[PeerId, Peer]] = MappingProxyType({})


class Claims:
    """Owned by a `PrefillControl`. A room is claimed by ranks of the worker in its key."""

    def __init__(self, timing: ControlConfig) -> None:
        self._timing = timing
        self._by_room: dict[RoomKey, dict[PeerId, Peer]] = {}
        # Until when, and why; by the decode worker's name, so that no other can fill it.
        self._aborted: dict[str, dict[RoomKey, tuple[float, str]]] = {}

    def of(self, key: RoomKey) -> Mapping[PeerId, Peer]:
        return self._by_room.get(key, _NONE)

    def all_gone(self, key: RoomKey) -> bool:
        """Whether it was claimed, and every rank that did has left."""
        claims = self.of(key)
        return bool(claims) and all(peer.gone for peer in claims.values())

    def allow(self, key: RoomKey, machine: SenderMachine | None, peer: Peer) -> bool:
        """Whether this rank may speak of the room: those that have are of the same life of its
        worker, and none as the rank that it is."""
        if machine is not None and machine.is_strange(peer.id, peer.hello.rank):
            return False
        return all(claimant.worker == peer.worker for claimant in self.of(key).values())

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
        """Remember the abort for a while, so that a request added later fails at once. Bounded a
        worker."""
        kept = self._aborted.setdefault(key.decode, {})
        kept.pop(key, None)
        if len(kept) < self._timing.max_parked_per_peer:
            kept[key] = (now_s + self._timing.parked_timeout_s, reason)

    def take_abort(self, key: RoomKey) -> str | None:
        """Why the room was aborted before its request came, once; None if it was not."""
        _, reason = self._aborted.get(key.decode, {}).pop(key, (0.0, None))
        return reason

    def expire(self, now_s: float) -> None:
        """Forget the aborts that were kept long enough."""
        for name, kept in list(self._aborted.items()):
            while kept and next(iter(kept.values()))[0] <= now_s:
                del kept[next(iter(kept))]
            if not kept:
                del self._aborted[name]

    def leftovers(self) -> tuple[Mapping[RoomKey, object], Mapping[RoomKey, object]]:
        """Claims and early aborts, for audits: nothing is left where no room is."""
        return self._by_room, {key: name for name, kept in self._aborted.items() for key in kept}
