"""Real shm transports in a simulation: what their threads do, done turn by turn in the simulation's
order and by its clock. Sockets, memory and copies are the kernel's.

It takes the place of `FakeFabric`. Of its faults, a write that "fails at post" was not copied, and
one that "fails at check" was; and a connection may be cut.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any
from unittest import mock

from prefixkv.config import TransportConfig
from prefixkv.errors import ClosedError, TransferError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import RankMemory, Sink
from prefixkv.transport.jobs import ActiveJob
from prefixkv.transport.loop import ThreadedTransport
from prefixkv.transport.shm import loop as shm_loop
from prefixkv.transport.shm import peer as shm_peer
from prefixkv.transport.shm import wire as shm_wire
from prefixkv.transport.shm.loop import ShmLoop
from prefixkv.transport.shm.peer import ShmPeer
from tests.support.sim import Sim
from tests.support.transport_pools import shared_zeros

_CUT = 0.02  # of the failures at check, a turn


class _Plan:
    """A plan whose copy fails, before it or after it."""

    def __init__(self, plan: Any, late: bool) -> None:
        self._plan, self._late = plan, late

    def copy(self, *what: Any) -> None:
        if self._late:
            self._plan.copy(*what)
        raise TransferError("failed by chance")


class _Loop(ShmLoop):
    """Asks the guards before it copies, and hides no exception."""

    def __init__(self, fabric: ShmFabric, *what: Any) -> None:
        super().__init__(*what)
        self._fabric = fabric

    def _guarded(self, step: Callable[[], bool | None]) -> bool | None:
        return step()

    def _transfer(self, peer: ShmPeer, job: ActiveJob) -> None:
        fabric, route = self._fabric, job.job.route
        fabric.show(peer.peer, job)
        plan, link = peer.plans[route], peer.link
        assert link is not None
        fails = fabric.happens(fabric.fail_at_post), fabric.happens(fabric.fail_at_check)
        if any(fails):
            peer.plans[route] = _Plan(plan, late=fails[1])  # type: ignore[assignment]
        try:
            if fabric.happens(fabric.lose_notification):
                with mock.patch.object(link, "tell"):
                    super()._transfer(peer, job)
            else:
                super()._transfer(peer, job)
        finally:
            if route in peer.plans:  # else the peer was lost over it
                peer.plans[route] = plan


class SteppedShm(ThreadedTransport[ShmLoop]):
    """As `ShmTransport`, but what its thread would do is done by `turn`."""

    def __init__(self, fabric: ShmFabric, me: PeerId, sink: Sink, *what: Any) -> None:
        self.me, self.closed = me, False
        self._sink = sink
        memory, config, self._owner = what
        self.loop = _Loop(fabric, me, memory, self._tell, config)
        self._metadata = self.loop.metadata
        self.commands: deque[Callable[[ShmLoop], None]] = deque()
        self._unproven: set[int] = set()  # no write ends undrained

    def _tell(self, event: Any) -> None:
        self._sink(event)

    def close(self) -> None:
        if not self.closed:
            self.loop.turn([], [*self.commands])
            self._end()

    def die(self) -> None:
        """Its process is killed: the kernel closes what it had open, and nothing is said."""
        if not self.closed:
            self._sink = lambda event: None
            self._end()

    def _end(self) -> None:
        self.closed = True
        self.commands.clear()
        self.loop.destroy()

    def _call(self, command: Callable[[ShmLoop], None], or_raise: bool = True) -> None:
        if not self.closed:
            self.commands.append(command)
        elif or_raise:
            raise ClosedError(f"the transport of {self.me.name} is closed")

    # --- what the fabric does ---------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """A turn would do something now."""
        loop = self.loop
        if self.closed:
            return False
        now = shm_loop.time.monotonic()
        return bool(
            self.commands
            or loop._settling
            or loop._epoll.poll(0)
            or any(
                (peer.outbox and (peer.routes is not None or now >= peer.retry_at))
                if peer.link is None or peer.routes is not None
                else peer.link.answered
                for peer in loop._peers.values()
            )
        )

    def turn(self, chance: random.Random) -> None:
        """With some of what came and was asked."""
        ready = self.loop._epoll.poll(0)
        chance.shuffle(ready)
        ready = ready[: chance.randint(0, len(ready))]
        some = [self.commands.popleft() for _ in range(chance.randint(0, len(self.commands)))]
        self.loop.turn(ready, some)

    def cut(self, chance: random.Random) -> None:
        """One of the connections that peers have to it."""
        door = self.loop._door
        if not self.closed and door is not None and door._links:
            door._drop(chance.choice(sorted(door._links)))


@dataclass(eq=False)
class ShmFabric:
    """Arguments as for `FakeFabric`."""

    seed: int
    _: KW_ONLY
    fail_at_post: float = 0.0
    fail_at_check: float = 0.0
    lose_notification: float = 0.0
    guard: Any = None
    staging_guard: Any = None
    state_guard: Any = None
    window_guard: Any = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.steps = 0
        self.transports: dict[PeerId, SteppedShm] = {}

    def transport(
        self, me: PeerId, memory: RankMemory, sink: Sink, config: TransportConfig,
        owner: object = None,
    ) -> SteppedShm:  # fmt: skip
        self.transports[me] = SteppedShm(self, me, sink, memory, config, owner)
        return self.transports[me]

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability

    def show(self, target: PeerId, job: ActiveJob) -> None:
        """To the guard of the memory that a part of the job is about to land in."""
        pages = job.job.dst_pages
        if job.job.route == "staging":
            if self.staging_guard is not None:
                self.staging_guard(target, job.job.tag, pages)
            return
        if job.job.route == "pages":
            pages = pages // job.runs.dst_positions.fold
        if job.job.route not in ("pages", "state"):
            if self.window_guard is not None:
                self.window_guard(target, job.job.route, job.room, pages)
            return
        guard = self.guard if job.job.route == "pages" else self.state_guard
        if guard is not None:
            guard(target, job.room, pages)

    def step(self) -> bool:
        busy = [one for one in self.transports.values() if one.is_busy]
        if not busy:
            return False
        self.steps += 1
        if self.happens(self.fail_at_check * _CUT):
            self.random.choice(list(self.transports.values())).cut(self.random)
        self.random.choice(busy).turn(self.random)
        return True

    def pending(self) -> list[SteppedShm]:
        return [one for one in self.transports.values() if one.is_busy]

    def kill(self, peer: PeerId) -> None:
        self.transports[peer].die()

    def in_flight(self, writer: PeerId) -> int:
        return len(self.transports[writer].loop._jobs._jobs)

    def close(self) -> None:
        for transport in self.transports.values():
            transport.die()


class _Clock:
    """The `time` of the transports: the simulation's."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim

    def monotonic(self) -> float:
        now_s: float = self._sim.now_s
        return now_s

    def sleep(self, seconds: float) -> None:
        pass


class OverShm(Sim):
    """To be mixed into a simulation, before it."""

    make_fabric = ShmFabric
    zeros = staticmethod(shared_zeros)
    backend = "shm"

    def run(self, max_steps: int = 60_000) -> None:
        with simulated(self):
            super().run(max_steps)


@contextmanager
def simulated(sim: Any) -> Iterator[None]:
    """Run it inside. All that its transports hold is given back at the end."""
    with ExitStack() as undo:
        for module in (shm_loop, shm_peer, shm_wire):
            undo.enter_context(mock.patch.object(module, "time", _Clock(sim)))
        undo.callback(sim.fabric.close)
        yield
