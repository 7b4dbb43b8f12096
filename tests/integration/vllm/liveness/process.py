"""What a vLLM server's processes have of prefixkv besides memory: sockets, control threads, bells,
and the copies to and from host memory. Here none has a thread, and frames lie in queues of the
world's until it hands them over."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prefixkv import HostConfig, KVPool
from prefixkv.control.effects import FrameReceived, Tick
from prefixkv.engines.vllm import connector as connector_module
from prefixkv.engines.vllm import worker as worker_module
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.page_copy import page_copy
from prefixkv.protocol.events import HostCopy, HostCopyDone
from prefixkv.runtime import decode_transfers, prefill_transfers, transfers
from prefixkv.runtime.channel import DealerChannel, RouterChannel
from prefixkv.runtime.control_thread import ControlThread
from prefixkv.threads import Inbox
from prefixkv.transport.transports import MAKERS

if TYPE_CHECKING:
    from tests.integration.vllm.liveness.world import World


class Dealer(DealerChannel):
    """Decode's sockets."""

    def __init__(self, world: World, route: bytes) -> None:
        self._world, self.route = world, route
        self.counters = Counter()

    def connect(self, address: str) -> None:
        pass

    def disconnect(self, address: str) -> None:
        pass

    def send(self, to: str, raw: bytes) -> None:
        self._world.wire(self.route, to).append(raw)

    def close(self, linger_s: float = 0.0) -> None:
        pass


class Router(RouterChannel):
    """Prefill's socket."""

    def __init__(self, world: World, bind: str) -> None:
        self._world, self.endpoint = world, bind
        self.counters = Counter()

    def send(self, to: bytes, raw: bytes) -> None:
        self._world.wire(self.endpoint, to).append(raw)

    def close(self, linger_s: float = 0.0) -> None:
        pass


class _Prover:
    life = None

    def __init__(self, *args: Any, **more: Any) -> None:
        pass


class Thread(ControlThread[Any]):
    """A transfer side's control thread, without a thread: `work` and `frame` are its steps."""

    world: ClassVar[World]  # that is being made, or played

    def __init__(self, name: str, side: Any) -> None:
        self.name = name
        self.inbox, self.events = Inbox(), Inbox()
        self.num_errors = self.num_log_errors = 0
        self._closed, self._proofs = False, None
        self._parts, self._does = [], {}
        self.transports = side._make_transports(self.inbox.put)
        self.control = side._make_control(self.transports.offers, None)
        self.channel = side._make_channel(self.inbox.fd)
        self.world.threads.append(self)

    def work(self) -> None:
        """Take what the engine and the transport have said since the last time."""
        for item in self.inbox.drain():
            self._take(item, self.world.now_s)
        self.tick()

    def frame(self, source: Any, raw: bytes) -> None:
        """Take a frame, behind what was said before it came."""
        self.work()
        self._take(FrameReceived(source, raw), self.world.now_s)
        self.tick()

    def tick(self) -> None:
        self._take(Tick(), self.world.now_s)

    def _failed(self, error: Exception) -> None:
        raise error

    def _log_error(self, error: Exception, text: str, *args: object) -> None:
        raise error  # a frame's

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.inbox.close()
            self.events.close()


class Inputs(deque[Callable[[], object]]):
    """What an engine is to do, and until when it rests."""

    resting_until_s = -1.0

    def rest(self, timeout_s: float) -> None:
        if not self:
            self.resting_until_s = Thread.world.now_s + timeout_s

    @property
    def is_resting(self) -> bool:
        if self or Thread.world.now_s >= self.resting_until_s:
            self.resting_until_s = -1.0
        return self.resting_until_s >= 0.0


class Tower:
    """What hears the bells, by address."""

    def __init__(self, wakeup: Any) -> None:
        self.inputs: Any = None
        self.num_senders = 0
        self.address = f"tower {len(Thread.world.towers)}"
        Thread.world.towers[self.address] = self

    def rest(self, inputs: Inputs, timeout_s: float) -> None:
        self.inputs = inputs
        for bell in Thread.world.bells:
            if bell.tower is self:
                bell.arm()
        inputs.rest(timeout_s)

    def close(self) -> None:
        pass


class Bell:
    """The descriptors of a worker, at which the world looks, in place of a thread that waits."""

    def __init__(self, address: str, fds: list[int]) -> None:
        self.tower = Thread.world.towers[address]
        self.tower.num_senders += 1
        threads = {thread.events.fd: thread.events for thread in Thread.world.threads}
        inboxes = threads | {copies.ends.fd: copies.ends for copies in Thread.world.copies}
        self._events = [inboxes[fd] for fd in fds]
        self._armed = True
        Thread.world.bells.append(self)

    def arm(self) -> None:
        self._armed = True

    def look(self) -> None:
        if self._armed and any(events.pending for events in self._events):
            self._armed = False
            if self.tower.inputs is not None:
                self.tower.inputs.append(int)  # of which nothing is done


@dataclass(eq=False)
class _PlayedCopy:
    order: HostCopy
    left: list[int]  # places in the order whose pages are still to be copied


class Copies:
    """A worker's host memory, whose copies are made page by page, in any order, when the world says
    so. One that fails leaves something else in the page at which it does."""

    def __init__(self, pool: KVPool, config: HostConfig, name: str) -> None:
        world = Thread.world
        self.name = name
        self.num_pages = config.pages_of(pool.layout.num_pages, pool.layout.page_bytes)
        self._pool, self._memory = pool, HostPool(pool.layout, self.num_pages)
        self._copy = page_copy(pool.layout, self._memory)
        # Its own, so that cases without host memory stay what they are.
        self._chance = random.Random(world.case.seed)
        self._fails = world.case.copies_fail
        self.under_way: list[_PlayedCopy] = []
        world.copies.append(self)

    def start(self, sink: Callable[[HostCopyDone], None]) -> None:
        self._sink = sink
        self.ends: Any = sink.__self__  # type: ignore[attr-defined]  # the inbox

    @property
    def ready_pages(self) -> int:
        return self.num_pages

    def submit(self, order: HostCopy, after: Any = None) -> None:
        left = list(range(len(order.host_pages)))
        self._chance.shuffle(left)
        self.under_way.append(_PlayedCopy(order, left))
        # A thread may begin at once.
        for _ in range(self._chance.choice((0, 0, 1, 2))):
            self.step()

    def step(self) -> bool:
        """Copy one page of some order."""
        if not self.under_way:
            return False
        copy = self._chance.choice(self.under_way)
        order, at = copy.order, copy.left.pop()
        host, device = order.host_pages[at : at + 1], order.device_pages[at : at + 1]
        act = self._copy.load if order.is_load else self._copy.write
        act(host, device)
        error = None
        if self._chance.random() < self._fails / len(order.host_pages):
            error = OSError("broken off")
            self._spoil(order, host, device)
        if error is not None or not copy.left:
            self.under_way.remove(copy)
            Thread.world.counters["host copies failed"] += error is not None
            self._sink(HostCopyDone(order.number, error, 1, 0.001))
        return True

    def _spoil(self, order: HostCopy, host: Any, device: Any) -> None:
        if order.is_load:
            self._pool_memory()[device] = -1.0
            return
        for _, memory in self._memory.stretches(host):
            memory.fill_(255)

    def _pool_memory(self) -> Any:
        (memory,) = (one.memory for one in Thread.world.servers.values() if one.name == self.name)
        return memory

    def close(self) -> None:
        pass


def put_in_place() -> None:
    """From now on transfer sides and connectors are made of these parts, in this process."""
    transfers.Transfers.proofs = _Prover  # type: ignore[assignment]
    vars(transfers).update(check_interface=lambda *_: None)
    MAKERS["nixl"] = lambda *what: Thread.world.transport(*what)
    vars(decode_transfers).update(ControlThread=Thread, DealerChannel=_dealer)
    vars(prefill_transfers).update(ControlThread=Thread, RouterChannel=_router)
    vars(connector_module)["WakeupListener"] = Tower
    vars(worker_module)["wake_by"] = Bell
    vars(worker_module)["HostMemory"] = Copies


def _dealer(config: Any, fd: int, check: Any) -> Dealer:
    return Dealer(Thread.world, f"route {len(Thread.world.threads)}".encode())


def _router(bind: str, config: Any, fd: int) -> Router:
    return Router(Thread.world, bind)
