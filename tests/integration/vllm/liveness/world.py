"""Two vLLM servers in one process, without a model, a thread, a socket or a clock: each step lets
one of them, a transfer thread, or the network do one thing, in an order that the caller chooses.

Real: vLLM's `Scheduler` or `AsyncScheduler` with its block pool and prefix cache, both sides of the
connector (the scheduler's made by vLLM's own factory), the control objects, their frames, and KV
bytes that are written into the other server's blocks. Played: the engine's loop (`EngineCore`),
the model, whose KV of a token follows from all tokens before it, sockets, and the transport
(`FakeFabric`). Time stands still unless the caller lets it go on.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from prefixkv.protocol.ids import PeerId, RoomKey
from tests.integration.vllm.liveness.case import Case
from tests.integration.vllm.liveness.process import (
    Bell,
    Copies,
    Router,
    Thread,
    Tower,
    put_in_place,
)
from tests.integration.vllm.liveness.server import OFFER_GRACE_S, OFFER_TIMEOUT_S, Server
from tests.laws.liveness.arrivals import BLOCK, LivenessError
from tests.support.fabric import FakeFabric

QUIET_ROUNDS = 12  # an engine that works ahead hears of an order some steps later
RETRANSMIT_S = 2.0  # what a repeated frame may take; less than any other timer here


@cache
def _hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


@dataclass
class World:
    """See the module's text."""

    case: Case
    tell: Callable[[str], None] | None = None
    promises_first: bool = True  # whether a prompt in a router's room waits for decode's promise
    now_s: float = 1000.0
    threads: list[Thread] = field(default_factory=list)
    towers: dict[str, Tower] = field(default_factory=dict)
    bells: list[Bell] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)

    def __post_init__(self) -> None:
        Thread.world = self
        put_in_place()
        self.random = random.Random(self.case.seed)
        self.fabric = FakeFabric(
            self.case.seed,
            guard=self._guard,
            window_guard=lambda target, _, room, pages: self._guard(target, room, pages),
        )
        self._wires: dict[tuple[Any, Any], deque[bytes]] = {}
        self._tickets = 0
        self.steps: list[str] = []
        self.counts: Counter[str] = Counter()
        self.servers: dict[str, Server] = {}
        roles = ("kv_both", "kv_both") if self.case.both else ("kv_producer", "kv_consumer")
        self.servers = {
            name: Server(self, name, role, 1 + num_blocks)
            for name, role, num_blocks in zip("ab", roles, self.case.blocks, strict=True)
        }
        self.params: dict[int, Any] = {}  # of a drawn room, by request, when prefill has answered
        self.arrived: set[str] = set()
        self.ended: dict[str, Any] = {}  # how, by request at a server
        self.num_out: Counter[str] = Counter()
        self.opened: set[int] = set()  # rooms that decode has promised
        self.declined: set[int] = set()  # rooms that prefill does not send
        self.left: set[str] = set()
        self.to_come = list(self.case.order)

    def close(self) -> None:
        for thread in self.threads:
            thread.close()

    # --- what the parts call ----------------------------------------------------------------------

    def wire(self, source: Any, to: Any) -> deque[bytes]:
        return self._wires.setdefault((source, to), deque())

    def transport(self, me: PeerId, memory: Any, sink: Any, config: Any) -> Any:
        return self.fabric.transport(me, memory, sink, config)

    def draw(self) -> int:
        self._tickets += 1
        return self._tickets

    def _guard(self, target: PeerId, room: RoomKey, pages: np.ndarray) -> None:
        self.servers[target.name].may_land(room, pages)

    def ordered(self, server: Server, orders: Any) -> None:
        self.opened |= {opening.room for opening in orders.opens}
        self.declined |= {one.room for one in orders.declines}
        for copy, rid in orders.copies:
            self.counts["host loads" if copy.is_load else "host writes"] += 1
            self.counts["host loads beside a room"] += rid in {one.rid for one in orders.opens}
        if below := self.case.compute_below:
            lacks = [one.num_tokens - one.prefix_len for one in orders.opens]
            self.counts["loaded, and might be computed"] += sum(one <= below for one in lacks)
            self.counts["computed, and might be loaded"] += sum(
                one.reason == "decode computes it itself" for one in orders.refusals
            )
        if self.tell is not None and orders:
            self.tell(f"    {server.name}: {orders}")

    def computed(self, server: Server, rid: str) -> None:
        """A request's prompt is computed. Raises LivenessError for one that waits for a promise."""
        number = int(rid[1:])
        ask = self.case.asks[number]
        if rid[0] == "D" or ask.kind != "room" or not self.promises_first:
            return
        if number + 1 in self.declined:
            self.counts["computed though declined"] += 1
        elif number + 1 not in self.opened:
            raise LivenessError(f"{rid} is computed on {server.name}, decode has not promised")

    def answered(self, server: Server, output: Any) -> None:
        rid = output.request_id
        self.num_out[rid] += len(output.new_token_ids)
        if output.finish_reason is None:
            return
        self.ended[rid] = output.finish_reason
        if self.tell is not None:
            self.tell(f"    {rid} ends: {output.finish_reason} {output.kv_transfer_params}")
        if rid[0] == "P":
            self.params[int(rid[1:])] = output.kv_transfer_params

    # --- arrivals ---------------------------------------------------------------------------------

    def _may_come(self, event: str) -> bool:
        name = event.lstrip("-!")
        number = int(name[1:])
        if event[0] == "-":
            return name in self.arrived
        waits = self.case.asks[number].kind == "drawn" and name[0] == "D"
        return not waits or number in self.params

    def _is_moot(self, event: str) -> bool:
        """Whether a router has no reason left to ask decode: its client has left before prefill's
        answer."""
        name = event.lstrip("-!")
        number = int(name[1:])
        prefill = self.servers[self.case.asks[number].way[0]]
        return (
            self.case.asks[number].kind == "drawn"
            and name[0] == "D"
            and name not in self.arrived
            and f"P{number}" in self.left
            and f"P{number}" not in prefill.scheduler.requests
            and number not in self.params
        )

    def _bring(self, event: str) -> None:
        name = event.lstrip("-!")
        number = int(name[1:])
        ask = self.case.asks[number]
        prefill, decode = (self.servers[one] for one in ask.way)
        at = prefill if name[0] == "P" else decode
        if event[0] == "-":
            self.left.add(name)
            at.abort(name)
            return
        params: dict[str, Any] | None = None
        room = number + 1
        if ask.kind == "room" and name[0] == "P":
            params = {"do_remote_decode": True, "room": room, "decode": decode.name}
        elif ask.kind == "room":
            params = {"do_remote_prefill": True, "room": room, "prefill": prefill.address}
        elif ask.kind == "drawn" and name[0] == "P":
            params = {"do_remote_decode": True, "room": None, "prefill": None}
        elif ask.kind == "drawn":
            params = self.params[number]
        sampling = SamplingParams(
            max_tokens=1 if name[0] == "P" else ask.num_out,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        )
        leaves = event[0] == "!"
        request = Request(
            name, ask.tokens, sampling, None, block_hasher=_hasher(), abort_immediately=leaves
        )
        self.arrived.add(name)
        if leaves:
            self.left.add(name)
        at.add(request, leaves=leaves)

    def come(self) -> bool:
        """Let the next event come that may. False: there is none."""
        for event in list(self.to_come):
            if self._is_moot(event):
                self.to_come.remove(event)
        for event in self.to_come:
            if self._may_come(event):
                self.to_come.remove(event)
                self._log(f"+{event}")
                self._bring(event)
                return True
        return False

    # --- steps ------------------------------------------------------------------------------------

    def _log(self, what: str) -> None:
        self.steps.append(what)
        if self.tell is not None:
            self.tell(what)

    def actors(self, only: str = "") -> Iterator[tuple[str, Callable[[], bool]]]:
        """What could happen now: its name, and what does it. `only` a server's own."""
        for name, server in self.servers.items():
            if only and name != only:
                continue
            if server.may_step:
                yield f"engine {name}", server.step
            if server.may_execute:
                yield f"worker {name}", server.execute
        if only:
            return
        for copies in self.copies:
            if copies.under_way:
                yield f"copy {copies.name}", copies.step
        for thread in self.threads:
            if len(thread.inbox):
                yield f"thread {thread.name}", lambda thread=thread: self._work(thread)  # type: ignore[misc]
        for (source, to), frames in self._wires.items():
            if frames:
                yield f"frame {source!r}>{to!r}", lambda wire=(source, to): self._deliver(*wire)  # type: ignore[misc]
        if self.fabric.pending():
            yield "fabric", self.fabric.step

    def _work(self, thread: Thread) -> bool:
        thread.work()
        return True

    def _deliver(self, source: Any, to: Any) -> bool:
        raw = self._wires[source, to].popleft()
        for thread in self.threads:
            channel: Any = thread.channel
            here = channel.endpoint if isinstance(channel, Router) else channel.route
            if here == to:
                thread.frame(source, raw)
        return True

    def do(self, name: str, act: Callable[[], bool]) -> bool:
        self._log(name)
        moved = act()
        for server in self.servers.values():
            server.check()
        return moved

    def random_step(self) -> bool:
        choices = list(self.actors())
        if self.to_come and any(map(self._may_come, self.to_come)):
            choices.append(("come", self.come))
        if not choices:
            return False
        if self.case.leaves and self.random.random() < self.case.leaves:
            self._leave_in_a_load()
        if self.case.flushes and self.random.random() < self.case.flushes:
            choices = [(f"flush {one.name}", one.flush) for one in self.servers.values()]
        self.do(*self.random.choice(choices))
        return True

    def _leave_in_a_load(self) -> None:
        """The client of a request leaves whose blocks are loaded from host memory."""
        servers = self.servers.values()
        loading = [(server, rid) for server in servers for rid in server.side.host.loading]
        if loading:
            server, rid = self.random.choice(loading)
            self._log(f"-{rid}, which loads")
            self.counts["left in a host load"] += 1
            self.left.add(rid)
            server.abort(rid)

    def settle(self, only: str = "", *, arrivals: bool = False, most_rounds: int = 3000) -> None:
        """All take turns until nothing moves any more. Raises LivenessError where that goes on."""
        quiet = 0
        for _ in range(most_rounds):
            moved = arrivals and self.come()
            idle = True
            for name, act in list(self.actors(only)):
                # What was there when the round began may be done.
                if name in {one for one, _ in self.actors(only)}:
                    idle = False
                    moved |= self.do(name, act)
            quiet = 0 if moved else quiet + 1
            if (idle and not moved) or quiet >= QUIET_ROUNDS:
                return
        raise LivenessError(f"no rest after {most_rounds} rounds\n{self.picture()}")

    def pass_time(self, seconds: float, until: Callable[[], bool]) -> None:
        """Let the clock go on, at most so far."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            self.now_s += 0.25
            for thread in self.threads:
                thread.tick()
            self.settle(arrivals=True)

    # --- a run ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises LivenessError for what does not end, or leaves something behind."""
        case = self.case
        while self.to_come:
            if case.pace == "random":
                for _ in range(self.random.randrange(12)):
                    self.random_step()
            elif case.pace == "rest":
                self.settle()
            elif case.pace != "none":
                self.settle(case.pace)
            if not self.come():
                break
        for _ in range(case.storm):
            if not self.random_step():
                break
        self.settle(arrivals=True)
        if self.is_alive:
            self.counts["waited for a repeated frame"] += 1
            self.pass_time(RETRANSMIT_S, lambda: not self.is_alive)
        if self.abandoned and not self.is_promised_alive:
            # By their client: before the others of their kind wait for their grace, nothing else
            # ends them.
            self.counts["waited for an offer's end"] += 1
            self.pass_time(OFFER_GRACE_S, lambda: not self.is_alive)
        if self.is_alive:
            raise LivenessError(f"a deadlock: nothing moves\n{self.picture()}")
        if self.abandoned:
            self.pass_time(OFFER_TIMEOUT_S, lambda: not self.leftovers())
        if left := self.leftovers():
            raise LivenessError(f"left behind: {left}\n{self.picture()}")
        self._check_answers()

    @property
    def is_alive(self) -> bool:
        return bool(self.to_come) or any(
            server.scheduler.requests for server in self.servers.values()
        )

    @property
    def is_promised_alive(self) -> bool:
        """Whether a request lives that another server waits for."""
        return any(
            any(self.case.asks[int(rid[1:])].kind == "room" for rid in server.side.sends.sends)
            or server.side.loads.wanted
            or server.side.loads.pending
            for server in self.servers.values()
        )

    @property
    def abandoned(self) -> bool:
        """Whether a room was drawn that no decode server will open."""
        return any(
            ask.kind == "drawn" and f"D{number}" not in self.arrived
            for number, ask in enumerate(self.case.asks)
        )

    def leftovers(self) -> dict[str, Any]:
        left = {name: server.leftovers() for name, server in self.servers.items()}
        return {name: what for name, what in left.items() if what}

    def _check_answers(self) -> None:
        for number, ask in enumerate(self.case.asks):
            name = f"D{number}"
            if name in self.arrived and name not in self.left and self.num_out[name] < ask.num_out:
                raise LivenessError(f"{name} has {self.num_out[name]} tokens of {ask.num_out}")

    def picture(self) -> str:
        coming = f"to come: {self.to_come}\n" if self.to_come else ""
        return coming + "\n".join(server.picture() for server in self.servers.values())


def run(
    case: Case, tell: Callable[[str], None] | None = None, *, promises_first: bool = True
) -> World:
    """Play a case. Raises what went wrong."""
    world = World(case, tell, promises_first)
    try:
        world.run()
    finally:
        world.close()
    return world
