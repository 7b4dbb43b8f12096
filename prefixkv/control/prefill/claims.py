"""Which decode ranks have named a room, and what is kept of rooms before their request has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from prefixkv.config import ControlConfig
from prefixkv.control.prefill.budgets import ABORT_BYTES, Budget, hello_bytes
from prefixkv.control.prefill.peers import Peer
from prefixkv.control.rooms import LostPeers
from prefixkv.digest import proves
from prefixkv.errors import ProtocolError, TransferError
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Abort
from prefixkv.protocol.sender_events import abort_error
from prefixkv.protocol.sender_machine import SenderMachine

_NONE: Final[Mapping[PeerId, Peer]] = MappingProxyType({})
_MAX_REASON: Final = 1000  # characters


class _Early(NamedTuple):
    """An abort of a room that is not known yet. Its `num_bytes` are the worker's."""

    until_s: float
    error: TransferError
    proof: bytes  # of its prompt; empty: of any
    secrets: tuple[bytes, bytes]
    num_bytes: int
    budget: Budget

    def is_of(self, digest: bytes) -> bool:
        return not (self.proof and digest) or proves(self.proof, digest, *self.secrets)


class Claims:
    """Owned by a `PrefillControl`. A room is claimed by ranks of the worker in its key."""

    def __init__(self, timing: ControlConfig, secret: bytes) -> None:
        """`secret`: as of `PrefillControl`."""
        self._timing = timing
        self._secret = secret
        self._by_room: dict[RoomKey, dict[PeerId, Peer]] = {}
        # By the decode worker's name, so that no other can fill it.
        self._aborted: dict[str, dict[RoomKey, _Early]] = {}

    def of(self, key: RoomKey) -> Mapping[PeerId, Peer]:
        return self._by_room.get(key, _NONE)

    def all_gone(self, key: RoomKey) -> bool:
        """Whether it was claimed, and every rank that did has left."""
        claims = self.of(key)
        return bool(claims) and all(peer.gone for peer in claims.values())

    def allow(self, key: RoomKey, ticket: int, machine: SenderMachine | None, peer: Peer) -> bool:
        """Whether this rank may speak of this use of the room: it is not over here, and the ranks
        that have spoken are of the same life of its worker, and none as the rank that it is."""
        if (key, ticket) in peer.past:
            return False
        if machine is not None and machine.is_strange(peer.id, peer.hello.rank):
            return False
        return all(claimant.worker == peer.worker for claimant in self.of(key).values())

    def add(self, key: RoomKey, peer: Peer, num_pages: int = 0) -> None:
        """The peer has named the room: with a promise of that many pages, or an abort."""
        self._by_room.setdefault(key, {})[peer.id] = peer
        peer.claimed.add(key, num_pages)

    def drained(self, key: RoomKey) -> None:
        """No write of the room can land any more."""
        for peer in self.of(key).values():
            peer.claimed.drained(key)

    def drop(self, machine: SenderMachine) -> None:
        """The room is over here, or its number is in use again."""
        key = machine.key
        for peer in self._by_room.pop(key, _NONE).values():
            peer.claimed.drop(key)
            answered = machine.readers[peer.hello.rank].answered
            if not (answered and machine.poll is KVPoll.SUCCESS):  # then nothing follows
                peer.past.add((key, machine.ticket), answered=answered)

    def check_parked(self, peer: Peer) -> None:
        """Raises ProtocolError where no other promise of the peer may wait for its request."""
        if peer.num_parked >= self._timing.max_parked_per_peer:
            raise ProtocolError(
                f"{peer.num_parked} promises wait for their requests, the limit is reached"
            )

    def unpark(self, key: RoomKey) -> None:
        """The room has ended, or its request has come: its promises are parked no more."""
        for peer in self.of(key).values():
            peer.num_parked -= 1

    def lost_peers(self, wrong: Callable[[Peer], str]) -> LostPeers:
        """Of those with which something is `wrong`, how many rooms each is in. Any thread may
        ask."""
        found: LostPeers = {}
        for claims in list(self._by_room.values()):
            for peer in list(claims.values()):
                if what := wrong(peer):
                    found[peer.id] = what, found.get(peer.id, (what, 0))[1] + 1
        return found

    # --- aborts that came before the engine's request ---------------------------------------------

    def abort_early(self, key: RoomKey, abort: Abort, peer: Peer, now_s: float) -> None:
        """Remember the abort for a while, so that a request added later fails at once, and only
        one. Bounded a worker."""
        error = abort_error(abort.reason[:_MAX_REASON], abort.versions)
        self.end_early(key, error, (abort.ticket, abort.proof), peer, now_s)

    def end_early(
        self, key: RoomKey, error: TransferError, use: tuple[int, bytes], peer: Peer, now_s: float
    ) -> None:
        """As `abort_early`: a use of the room, by its ticket and the proof of its prompt."""
        ticket, proof = use
        peer.past.add((key, ticket), answered=True)
        self.take_abort(key)
        kept = self._aborted.setdefault(key.decode, {})
        num_bytes = ABORT_BYTES + len(str(error).encode())
        fits = peer.budget.num_bytes + num_bytes <= peer.budget.limit
        if fits and len(kept) < self._timing.max_parked_per_peer:
            until_s = now_s + self._timing.parked_timeout_s
            secrets = peer.secrets(self._secret)
            kept[key] = _Early(until_s, error, proof, secrets, num_bytes, peer.budget)
            peer.budget.num_bytes += num_bytes

    def take_abort(self, key: RoomKey, digest: bytes = b"") -> TransferError | None:
        """What the room was aborted with before its request came, once; None if it was not, or if
        that was a use of its number for another prompt than this. b"": for any."""
        early = self._aborted.get(key.decode, {}).pop(key, None)
        if early is None:
            return None
        early.budget.num_bytes -= early.num_bytes
        return early.error if early.is_of(digest) else None

    def take_aborts(self, numbers: tuple[int, int]) -> TransferError | None:
        """As `take_abort`, of a room that is no decode worker's yet: any that has aborted it."""
        keys = [RoomKey(*numbers, name) for name in self._aborted]
        errors = [error for key in keys if (error := self.take_abort(key)) is not None]
        return errors[0] if errors else None

    def expire(self, now_s: float) -> None:
        """Forget the aborts that were kept long enough."""
        for name, kept in list(self._aborted.items()):
            while kept and kept[key := next(iter(kept))].until_s <= now_s:
                self.take_abort(key)
            if not kept:
                del self._aborted[name]

    def check_invariants(self, rooms: Mapping[RoomKey, SenderMachine], peers: list[Peer]) -> None:
        """The laws of what is held for peers, given all rooms and the peers that are known."""
        is_drained = {key: machine.drained for key, machine in rooms.items()}
        claims = {(key, name) for key, by in self._by_room.items() for name in by}
        claimants = [peer for by in self._by_room.values() for peer in by.values()]
        every = {id(peer): peer for peer in [*claimants, *peers]}.values()
        assert claims == {(key, peer.id) for peer in every for key in peer.rooms}, "both ways"
        held: dict[Budget, int] = {}
        for peer in every:
            peer.claimed.check_invariants(is_drained)
            own = 0 if peer.gone else hello_bytes(peer.hello)
            held[peer.budget] = held.get(peer.budget, 0) + own + peer.claimed.num_bytes
        for early in (early for kept in self._aborted.values() for early in kept.values()):
            held[early.budget] = held.get(early.budget, 0) + early.num_bytes
        for budget, num_bytes in held.items():
            assert budget.num_bytes == num_bytes, "a worker's bytes are those of what is held"

    def leftovers(self) -> tuple[Mapping[RoomKey, object], Mapping[RoomKey, object]]:
        """Claims and early aborts, for audits: nothing is left where no room is."""
        return self._by_room, {key: name for name, kept in self._aborted.items() for key in kept}
