"""Which decode ranks have named a room (claims), and early aborts: those before the engine's
request.

Both are what a peer makes prefill remember, so both are counted in its worker's `Budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from prefixkv.config import ControlConfig
from prefixkv.control.death_watch import LostPeers
from prefixkv.control.prefill.budgets import ABORT_BYTES, Budget, hello_bytes
from prefixkv.control.prefill.peers import Peer
from prefixkv.digest import proves
from prefixkv.errors import ProtocolError, TransferError
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Abort
from prefixkv.protocol.sender_events import abort_error
from prefixkv.protocol.sender_machine import SenderMachine

_NONE: Final[Mapping[PeerId, Peer]] = MappingProxyType({})
_MAX_REASON: Final = 1000  # characters


class _Early(NamedTuple):
    """An abort that came before its request. `num_bytes` are counted in the worker's `budget`."""

    until_s: float
    error: TransferError
    proof: bytes  # of the aborted prompt; b"": of any prompt
    secrets: tuple[bytes, bytes]
    num_bytes: int
    budget: Budget

    def is_of(self, digest: bytes) -> bool:
        """Return whether the abort may be about this prompt: yes where either side names none."""
        return not (self.proof and digest) or proves(self.proof, digest, *self.secrets)


class Claims:
    """Owned by a `PrefillControl`. A room is claimed only by ranks of the worker that its key
    names."""

    def __init__(self, timing: ControlConfig, secret: bytes) -> None:
        """Start empty; `secret` is this process's, as for `PrefillControl`."""
        self._timing = timing
        self._secret = secret
        # The other direction of `Peer.claimed`: both are changed together (`add`, `drop`).
        self._by_room: dict[RoomKey, dict[PeerId, Peer]] = {}
        # By the decode worker's name, so that no other worker can fill its limit. Within one, in
        # the order of arrival, which is that of the deadlines: `expire` looks only at the first.
        self._aborted: dict[str, dict[RoomKey, _Early]] = {}

    def of(self, key: RoomKey) -> Mapping[PeerId, Peer]:
        """Return the decode ranks that have named the room, by identity."""
        return self._by_room.get(key, _NONE)

    def all_gone(self, key: RoomKey) -> bool:
        """Return whether the room was claimed and every rank that claimed it has left."""
        claims = self.of(key)
        return bool(claims) and all(peer.gone for peer in claims.values())

    def allow(self, key: RoomKey, ticket: int, machine: SenderMachine | None, peer: Peer) -> bool:
        """Return whether this rank may speak about this use of the room.

        It may not if the use is over here, if another process has already spoken as this rank, or
        if a claimant belongs to another life of the worker: pages of two lives must not meet in one
        room.
        """
        if (key, ticket) in peer.past:
            return False
        if machine is not None and machine.is_strange(peer.id, peer.hello.rank):
            return False
        return all(claimant.worker == peer.worker for claimant in self.of(key).values())

    def add(self, key: RoomKey, peer: Peer, num_pages: int = 0) -> None:
        """Record that the peer has named the room, with a promise of `num_pages` or with an
        abort."""
        self._by_room.setdefault(key, {})[peer.id] = peer
        peer.claimed.add(key, num_pages)

    def drained(self, key: RoomKey) -> None:
        """Uncount the room's pages at every claimant, since no write of it can land any more."""
        for peer in self.of(key).values():
            peer.claimed.drained(key)

    def drop(self, machine: SenderMachine) -> None:
        """Drop the claims on a room that is over, or that makes way for the next use of its number.

        The use is remembered in `Peer.past`, so that a late repeat is not taken for the next use.
        """
        key = machine.key
        for peer in self._by_room.pop(key, _NONE).values():
            peer.claimed.drop(key)
            answered = machine.readers[peer.hello.rank].answered
            if not (answered and machine.poll is KVPoll.SUCCESS):  # then nothing follows
                peer.past.add((key, machine.ticket), answered=answered)

    def check_parked(self, peer: Peer) -> None:
        """Raise ProtocolError if the peer has `max_parked_per_peer` promises without a request
        already."""
        if peer.num_parked >= self._timing.max_parked_per_peer:
            raise ProtocolError(
                f"{peer.num_parked} promises wait for their requests, the limit is reached"
            )

    def unpark(self, key: RoomKey) -> None:
        """Uncount the room as parked at each claimant: it has ended, or its request has come."""
        for peer in self.of(key).values():
            peer.num_parked -= 1

    def lost_peers(self, wrong: Callable[[Peer], str]) -> LostPeers:
        """Return, for each claimant with which something is `wrong`, the reason and how many rooms
        it has. Any thread may ask."""
        found: LostPeers = {}
        # Copies: this also runs on the scheduler's thread, while the control thread changes both.
        for claims in list(self._by_room.values()):
            for peer in list(claims.values()):
                if what := wrong(peer):
                    found[peer.id] = what, found.get(peer.id, (what, 0))[1] + 1
        return found

    # --- aborts that came before the engine's request ---------------------------------------------

    def abort_early(self, key: RoomKey, abort: Abort, peer: Peer, now_s: float) -> None:
        """Remember an abort until `parked_timeout_s`, so that one request added later fails at
        once.

        Bounded per worker.
        """
        error = abort_error(abort.reason[:_MAX_REASON], abort.versions)
        self.end_early(key, error, (abort.ticket, abort.proof), peer, now_s)

    def end_early(
        self, key: RoomKey, error: TransferError, use: tuple[int, bytes], peer: Peer, now_s: float
    ) -> None:
        """Remember that a use of the room has ended with `error`; `use` is its ticket and the proof
        of its prompt. See `abort_early`."""
        ticket, proof = use
        # Even if the abort finds no space below, the use is over: a late promise for it is refused.
        peer.past.add((key, ticket), answered=True)
        # Before the budget is looked at: it gives back the bytes of an earlier abort of this room.
        self.take_abort(key)
        kept = self._aborted.setdefault(key.decode, {})
        num_bytes = ABORT_BYTES + len(str(error).encode())
        # Beyond a limit the abort is lost: the request then waits for its timeout, which costs the
        # peer only time. Nothing of another worker is ever evicted for it.
        fits = peer.budget.num_bytes + num_bytes <= peer.budget.limit
        if fits and len(kept) < self._timing.max_parked_per_peer:
            until_s = now_s + self._timing.parked_timeout_s
            secrets = peer.secrets(self._secret)
            kept[key] = _Early(until_s, error, proof, secrets, num_bytes, peer.budget)
            peer.budget.num_bytes += num_bytes

    def take_abort(self, key: RoomKey, digest: bytes = b"") -> TransferError | None:
        """Remove and return the error of an early abort of the room; None if there is none.

        Also None if the abort was for another prompt than `digest` names (b"": any). It is removed
        even then: the number is in use again, so the abort is of no use to anyone.
        """
        early = self._aborted.get(key.decode, {}).pop(key, None)
        if early is None:
            return None
        early.budget.num_bytes -= early.num_bytes
        return early.error if early.is_of(digest) else None

    def take_aborts(self, numbers: tuple[int, int]) -> TransferError | None:
        """Remove all early aborts of the room's number, by any decode worker, and return one's
        error.

        For a room that belongs to no decode worker yet (an offer). None if there is no abort.
        """
        keys = [RoomKey(*numbers, name) for name in self._aborted]
        errors = [error for key in keys if (error := self.take_abort(key)) is not None]
        return errors[0] if errors else None

    def expire(self, now_s: float) -> None:
        """Forget the early aborts that are due. O(expired + decode workers with an abort)."""
        for name, kept in list(self._aborted.items()):
            while kept and kept[key := next(iter(kept))].until_s <= now_s:
                self.take_abort(key)
            if not kept:
                del self._aborted[name]

    def check_invariants(self, rooms: Mapping[RoomKey, SenderMachine], peers: list[Peer]) -> None:
        """Raise AssertionError unless claims, parts of peers and budgets agree.

        Args:
            rooms: all room machines of the control object.
            peers: the peers known now. Peers that are gone are found by their claims.
        """
        is_drained = {key: machine.drained for key, machine in rooms.items()}
        claims = {(key, name) for key, by in self._by_room.items() for name in by}
        claimants = [peer for by in self._by_room.values() for peer in by.values()]
        every = {id(peer): peer for peer in [*claimants, *peers]}.values()
        assert claims == {(key, peer.id) for peer in every for key in peer.rooms}, "both ways"
        # Recount every budget from what is actually held, and compare with the running count.
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
        """Return claims and early aborts, for audits: both are empty once no room is left."""
        return self._by_room, {key: name for name, kept in self._aborted.items() for key in kept}
