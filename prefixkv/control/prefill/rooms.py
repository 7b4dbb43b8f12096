"""Prefill's rooms: events go to a room's machine, and what it wants comes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import count
from types import MappingProxyType
from typing import Final

from prefixkv.config import ControlConfig
from prefixkv.control.death_watch import LostPeers
from prefixkv.control.handshake import named_end
from prefixkv.control.inbox import Say
from prefixkv.control.prefill.peers import Peer, Peers
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.events import RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import RoomTick
from prefixkv.protocol.sender_events import PostWrite, SendToReader
from prefixkv.protocol.sender_machine import SenderMachine
from prefixkv.protocol.timers import Timers

_NO_ROOM: Final = RoomKey(0, -1)


class SenderRoom(SenderMachine):
    """One use of a room: what is said and written of it (`SenderMachine`), and its claimants, the
    decode ranks that have named it, all of the worker that the key names."""

    def __init__(
        self,
        key: RoomKey,
        rank: int,
        page_size: int,
        next_job_id: Callable[[], int],
        timing: ControlConfig,
        now_s: float,
    ) -> None:
        super().__init__(key, rank, page_size, next_job_id, timing, now_s)
        # The other direction of `Peer.claimed`: both are changed together (`claim`, `drop_claims`).
        self.claimants: dict[PeerId, Peer] = {}

    @property
    def all_gone(self) -> bool:
        return bool(self.claimants) and all(peer.gone for peer in self.claimants.values())

    def admits(self, peer: Peer) -> bool:
        """Return whether this rank may speak about this use of the room. Not if another process has
        spoken as this rank, or a claimant belongs to another life of the worker: pages of two lives
        must not meet."""
        if self.is_strange(peer.id, peer.hello.rank):
            return False
        return all(claimant.worker == peer.worker for claimant in self.claimants.values())

    def claim(self, peer: Peer, num_pages: int = 0) -> None:
        """Record that a rank has named the room, with a promise of `num_pages` or with an abort."""
        self.claimants[peer.id] = peer
        peer.claimed.add(self.key, num_pages)

    def unpark(self) -> None:
        """Uncount the room as parked: it has ended, or its request has come."""
        for peer in self.claimants.values():
            peer.num_parked -= 1

    def uncount_pages(self) -> None:
        """Uncount the room's pages, since no write of it can land any more."""
        for peer in self.claimants.values():
            peer.claimed.drained(self.key)

    def drop_claims(self) -> None:
        """Drop the claims on a room that is over, or makes way for the next use of its number. The
        use is remembered in `Peer.past`, so that a late repeat is not taken for the next."""
        claimants, self.claimants = self.claimants, {}
        for peer in claimants.values():
            peer.claimed.drop(self.key)
            answered = self.readers[peer.hello.rank].answered
            if not (answered and self.poll is KVPoll.SUCCESS):  # then nothing follows
                peer.past.add((self.key, self.ticket), answered=answered)


class SenderRooms:
    """The rooms of one prefill rank, with the writes under way for them. Owned by a
    `PrefillControl`. What is to be done is said, in order.

    `timers` wake rooms by key; peers share them.
    """

    def __init__(
        self,
        rank: int,
        page_size: int,
        timing: ControlConfig,
        timers: Timers[str | RoomKey],
        peers: Peers,
        say: Say,
        option_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._rooms: dict[RoomKey, SenderRoom] = {}
        # The same by number: one entry for each decode worker that has a room of it.
        self._by_numbers: dict[tuple[int, int], dict[RoomKey, SenderRoom]] = {}
        # Rooms that are over for our engine and that no peer has named: they are kept for a while,
        # to answer a promise that is on its way.
        self.unclaimed: set[RoomKey] = set()
        # Rooms that an engine or a peer still has something to do with. Any thread may read it.
        self.num_claimed = 0
        # The room of each write that is not proved over. A write that failed undrained stays, so
        # that its proof (`job_drained`) finds the room.
        self.jobs: dict[int, RoomKey] = {}
        # An agent was replaced: a Drained that was lost may have asked decode to let it settle
        self.may_need_settle = False
        self._rank = rank
        self._page_size = page_size
        self._timing = timing
        self._timers = timers
        self._peers = peers
        self._say = say
        self._option_names = option_names
        self._job_ids = count(1)

    def all(self) -> Collection[SenderRoom]:
        """Return a live view of the machines."""
        return self._rooms.values()

    def __getitem__(self, key: RoomKey) -> SenderRoom:
        return self._rooms[key]

    def get(self, key: RoomKey) -> SenderRoom | None:
        return self._rooms.get(key)

    def new(self, key: RoomKey, now_s: float) -> SenderRoom:
        """Add a room that begins now, for a request, a promise or an offer. `on` follows, which
        counts it."""
        room = SenderRoom(key, self._rank, self._page_size, self.next_job_id, self._timing, now_s)
        # Peers met later may know nothing of the room: see `Peers.heard_s`.
        room.met_before = self._peers.num_met
        self._rooms[key] = room
        self._by_numbers.setdefault(key.numbers, {})[key] = room
        return room

    def on(self, room: SenderRoom, event: sender.SenderEvent, now_s: float) -> None:
        """Give an event to a room's machine and carry out its actions; drop it once it is over."""
        key = room.key
        open_before = not room.poll.ended
        for action in room.on(event, now_s):
            if isinstance(action, SendToReader):
                self._peers.send(room.claimants[action.peer], action.body, now_s)
            elif isinstance(action, RoomEnded | SourceFree) and not room.added:
                continue  # the engine has never heard of it
            else:
                if isinstance(action, PostWrite):
                    self.jobs[action.job_id] = key
                elif isinstance(action, RoomEnded):
                    action = named_end(action, self._option_names)
                self._say(action)
        # A promise counts as parked until its request comes or its room ends.
        if open_before and room.poll.ended and not room.added:
            room.unpark()
        # From now on decode may promise these pages in another room: see `prefill/claims.py`.
        if room.drained:
            room.uncount_pages()
        # Peers that are gone drain their own pages, or never. So only the ends of our writes are
        # waited for, which read our own pages.
        if room.over or (room.all_gone and room.poll.ended and not room.in_flight):
            self.drop(room)
        else:
            self._timers.wake(key, room.wake_s)
            if room.poll.ended and not room.readers:
                self.unclaimed.add(key)
            else:
                self.unclaimed.discard(key)
            self._count()

    def of_numbers(self, numbers: tuple[int, int]) -> list[SenderRoom]:
        return list(self._by_numbers.get(numbers, {}).values())

    def tick(self, room: SenderRoom, now_s: float) -> None:
        key = room.key
        heard_s = self._peers.heard_s(key.decode, room.expected, room.met_before)
        self.on(room, RoomTick(heard_s), now_s)

    def drop(self, room: SenderRoom) -> None:
        """Forget a room. Its claims go with it, and the peers remember the use as past."""
        self._rooms.pop(room.key, None)
        same = self._by_numbers.get(room.key.numbers, {})
        same.pop(room.key, None)
        if not same:
            self._by_numbers.pop(room.key.numbers, None)
        self.unclaimed.discard(room.key)
        self._count()
        self._timers.forget(room.key)
        room.drop_claims()

    def _count(self) -> None:
        # One number, since another thread that counted would see half of a change.
        self.num_claimed = len(self._rooms) - len(self.unclaimed)

    # --- writes -----------------------------------------------------------------------------------

    def next_job_id(self) -> int:
        """Return a number for a write or copy, never given before."""
        return next(self._job_ids)

    def job_ended(self, end: sender.JobEnded, now_s: float) -> None:
        room = self._rooms.get(self.jobs.get(end.job_id, _NO_ROOM))
        # A write that failed and is not drained stays known, for `job_drained`.
        if end.error is None or end.drained:
            self.jobs.pop(end.job_id, None)
        if room is not None:
            self.on(room, end, now_s)

    def job_drained(self, proof: sender.JobDrained, now_s: float) -> None:
        """Tell a write's room that nothing of it can land any more, though it had ended
        undrained."""
        # From now on any Drained may follow the end of an agent, so decode is asked to let settle
        # what kernels may hold of it.
        self.may_need_settle = True
        room = self._rooms.get(self.jobs.pop(proof.job_id, _NO_ROOM))
        if room is not None:
            self.on(room, proof, now_s)

    # --- audits -----------------------------------------------------------------------------------

    def lost_peers(self, trouble: Callable[[Peer], str]) -> LostPeers:
        """Return, for each claimant with `trouble`, the reason and how many rooms it has. Any
        thread may ask."""
        found: LostPeers = {}
        # Copies: this also runs on the scheduler's thread, while the control thread changes both.
        for room in list(self._rooms.values()):
            for peer in list(room.claimants.values()):
                if what := trouble(peer):
                    found[peer.id] = what, found.get(peer.id, (what, 0))[1] + 1
        return found

    def check_invariants(self, peers: list[Peer]) -> None:
        """Raise AssertionError unless the rooms and the claims of `peers`, those known now, agree.
        Peers that are gone are found by their claims."""
        is_drained = {key: room.drained for key, room in self._rooms.items()}
        claims = {(room.key, name) for room in self._rooms.values() for name in room.claimants}
        claimants = [peer for room in self._rooms.values() for peer in room.claimants.values()]
        every = {id(peer): peer for peer in [*claimants, *peers]}.values()
        claimed = self._rooms.keys() - self.unclaimed
        assert self.num_claimed == len(claimed), "rooms that are not unclaimed are counted"
        assert claims == {(key, peer.id) for peer in every for key in peer.rooms}, "both ways"
        for peer in every:
            peer.claimed.check_invariants(is_drained)
