"""Prefill's rooms: events go to a room's machine, and what it wants comes out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count
from types import MappingProxyType
from typing import Final

from prefixkv.config import ControlConfig
from prefixkv.control.effects import EffectList, RoomAction
from prefixkv.control.handshake import named_end
from prefixkv.control.prefill.claims import Claims
from prefixkv.control.prefill.peers import Peers
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.events import RoomEnded, SourceFree
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.machine import RoomTick
from prefixkv.protocol.sender_events import PostWrite, SendToReader
from prefixkv.protocol.sender_machine import SenderMachine
from prefixkv.protocol.timers import Timers

_NO_ROOM: Final = RoomKey(0, -1)


class SenderRooms:
    """The rooms of one prefill rank, with the writes under way for them. Owned by a
    `PrefillControl`.

    What is to be done goes to `actions`, in order.

    Args:
        rank, page_size: ours.
        timers: they wake rooms by key; peers share them.
        peers, claims: which decode ranks there are, and which have named a room.
        option_names: as of `ModelConfig`.
    """

    def __init__(
        self,
        rank: int,
        page_size: int,
        timing: ControlConfig,
        timers: Timers[str | RoomKey],
        peers: Peers,
        claims: Claims,
        actions: EffectList[RoomAction],
        option_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.machines: dict[RoomKey, SenderMachine] = {}
        # Rooms that are over for our engine and that no peer has named: they are kept for a while,
        # to answer a promise that is on its way.
        self.unclaimed: set[RoomKey] = set()
        # The room of each write that is not proved over. A write that failed undrained stays, so
        # that its proof (`write_drained`) finds the room.
        self.jobs: dict[int, RoomKey] = {}
        # An agent was replaced: a Drained that was lost may have asked decode to let it settle
        self.renewed = False
        self._rank = rank
        self._page_size = page_size
        self._timing = timing
        self._timers = timers
        self._peers = peers
        self._claims = claims
        self._actions = actions
        self._option_names = option_names
        self._job_ids = count(1)

    @property
    def num_claimed(self) -> int:
        """Number of rooms that an engine or a peer still has something to do with. Any thread may
        ask."""
        return sum(key not in self.unclaimed for key in list(self.machines))

    def all(self) -> Collection[SenderMachine]:
        """Return all room machines: a live view."""
        return self.machines.values()

    def get(self, key: RoomKey) -> SenderMachine | None:
        """Return the machine of this room, if there is one."""
        return self.machines.get(key)

    def new(self, key: RoomKey, now_s: float) -> SenderMachine:
        """Add a room that begins now, for a request, a promise or an offer."""
        what = self._rank, self._page_size, self.next_job_id, self._timing
        machine = SenderMachine(key, *what, now_s)
        # Peers met later may know nothing of the room: see `Peers.heard_s`.
        machine.met_before = self._peers.num_met
        self.machines[key] = machine
        return machine

    def on(self, machine: SenderMachine, event: sender.SenderEvent, now_s: float) -> None:
        """Give an event to the room's machine and carry out its actions; drop the room once it is
        over."""
        key = machine.key
        open_before = not machine.poll.ended
        for action in machine.on(event, now_s):
            if isinstance(action, SendToReader):
                self._peers.send(self._claims.of(key)[action.peer], action.body, now_s)
            elif isinstance(action, RoomEnded | SourceFree) and not machine.added:
                continue  # the engine has never heard of it
            else:
                if isinstance(action, PostWrite):
                    self.jobs[action.job_id] = key
                elif isinstance(action, RoomEnded):
                    action = named_end(action, self._option_names)
                self._actions.add(action)
        # A promise counts as parked until its request comes or its room ends.
        if open_before and machine.poll.ended and not machine.added:
            self._claims.unpark(key)
        # From now on decode may promise these pages in another room: see `prefill/budgets.py`.
        if machine.drained:
            self._claims.drained(key)
        # Peers that are gone drain their own pages, or never. So only the ends of our writes are
        # waited for, which read our own pages.
        all_gone = self._claims.all_gone(key)
        if machine.over or (all_gone and machine.poll.ended and not machine.in_flight):
            self.drop(machine)
        else:
            self._timers.wake(key, machine.wake_s)
            if machine.poll.ended and not machine.readers:
                self.unclaimed.add(key)
            else:
                self.unclaimed.discard(key)

    def tick(self, machine: SenderMachine, now_s: float) -> None:
        """Let the room look at its deadlines and repeats."""
        key = machine.key
        heard_s = self._peers.heard_s(key.decode, machine.expected, machine.met_before)
        self.on(machine, RoomTick(heard_s), now_s)

    def drop(self, machine: SenderMachine) -> None:
        """Forget a room. Its claims go with it, and the peers remember the use as past."""
        self.machines.pop(machine.key, None)
        self.unclaimed.discard(machine.key)
        self._timers.forget(machine.key)
        self._claims.drop(machine)

    # --- writes -----------------------------------------------------------------------------------

    def next_job_id(self) -> int:
        """Return a number for a write or a copy, never given before."""
        return next(self._job_ids)

    def write_ended(
        self, job_id: int, error: Exception | None, drained: bool, now_s: float
    ) -> None:
        """Tell the room of a write that it has ended."""
        machine = self.machines.get(self.jobs.get(job_id, _NO_ROOM))
        # A write that failed and is not drained stays known, for `write_drained`.
        if error is None or drained:
            self.jobs.pop(job_id, None)
        if machine is not None:
            self.on(machine, sender.JobEnded(job_id, error, drained), now_s)

    def write_drained(self, job_id: int, now_s: float) -> None:
        """Tell the room that nothing can land any more of a write that had ended undrained."""
        # From now on any Drained may follow the end of an agent, so decode is asked to let settle
        # what kernels may hold of it.
        self.renewed = True
        machine = self.machines.get(self.jobs.pop(job_id, _NO_ROOM))
        if machine is not None:
            self.on(machine, sender.JobDrained(job_id), now_s)
