"""Two vLLM servers in one process, without a model, a thread, a socket or a clock: each step lets
one of them, a transfer thread, or the network do one thing, in an order that the caller chooses.

Real: vLLM's `Scheduler` or `AsyncScheduler` with its block pool and prefix cache, both sides of the
connector (the scheduler's made by vLLM's own factory), the control objects, their frames, and KV
bytes that are written into the other server's blocks. Played: the engine's loop (`EngineCore`),
the model, whose KV of a token follows from all tokens before it, sockets, and the transport
(`FakeFabric`). Time stands still unless the caller lets it go on.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from prefixkv.protocol.ids import ChunkTag, PeerId, RoomKey
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
from tests.laws.liveness.play import Act, Play
from tests.support.fabric import FakeFabric

RETRANSMIT_S = 2.0  # what a repeated frame may take; less than any other timer here


@cache
def _hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


@dataclass
class World(Play):
    """See the module's text."""

    case: Case
    tell: Callable[[str], None] | None = None
    promises_first: bool = True  # whether a prompt in a router's room waits for decode's promise
    now_s: float = 1000.0
    threads: list[Thread] = field(default_factory=list)
    towers: dict[str, Tower] = field(default_factory=dict)
    bells: list[Bell] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    quiet_rounds = 12  # an engine that works ahead hears of an order some steps later
    tick_s = 0.25

    def __post_init__(self) -> None:
        self.begin(self.case, self.tell)
        Thread.world = self
        put_in_place()
        self.random = random.Random(self.case.seed)
        self.fabric = FakeFabric(self.case.seed, guard=self._guard)
        self._wires: dict[tuple[Any, Any], deque[bytes]] = {}
        self._tickets = 0
        self.counters: Counter[str] = Counter()
        self.servers: dict[str, Server] = {}
        roles = ("kv_both", "kv_both") if self.case.both else ("kv_producer", "kv_consumer")
        self.servers = {
            name: Server(self, name, role, 1 + num_blocks)
            for name, role, num_blocks in zip("ab", roles, self.case.blocks, strict=True)
        }
        self.params: dict[int, Any] = {}  # of a drawn room, by request, when prefill has answered
        self.ended: dict[str, Any] = {}  # how, by request at a server
        self.num_out: Counter[str] = Counter()
        self.opened: set[int] = set()  # rooms that decode has promised
        self.declined: set[int] = set()  # rooms that prefill does not send

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

    def _guard(self, target: PeerId, _route: str, tag: ChunkTag, pages: np.ndarray) -> None:
        self.servers[target.name].may_land(RoomKey(tag.room, tag.generation), pages)

    def ordered(self, server: Server, orders: Any) -> None:
        self.opened |= {opening.room for opening in orders.opens}
        self.declined |= {one.room for one in orders.declines}
        for copy, rid in orders.copies:
            self.counters["host loads" if copy.is_load else "host writes"] += 1
            self.counters["host loads beside a room"] += rid in {one.rid for one in orders.opens}
        if below := self.case.compute_below:
            lacks = [one.num_tokens - one.prefix_len for one in orders.opens]
            self.counters["loaded, and might be computed"] += sum(one <= below for one in lacks)
            self.counters["computed, and might be loaded"] += sum(
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
            self.counters["computed though declined"] += 1
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

    def is_answered(self, number: int) -> bool:
        return number in self.params

    def never_answers(self, number: int) -> bool:
        name, prefill = f"P{number}", self.servers[self.case.asks[number].way[0]]
        return name in self.left and name not in prefill.scheduler.requests

    def bring(self, event: str, name: str, number: int) -> None:
        ask = self.case.asks[number]
        prefill, decode = (self.servers[one] for one in ask.way)
        at = prefill if name[0] == "P" else decode
        if event[0] == "-":
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
        at.add(request, leaves=leaves)

    # --- steps ------------------------------------------------------------------------------------

    def names(self, only: str) -> Iterable[str]:
        return [name for name, _ in self.actors(only)]

    def act(self, name: str) -> Act | None:
        return dict(self.actors()).get(name)

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

    def after(self) -> None:
        for server in self.servers.values():
            server.check()

    def random_step(self) -> bool:
        if self.case.leaves and self.random.random() < self.case.leaves:
            self._leave_in_a_load()
        if self.case.flushes and self.random.random() < self.case.flushes:
            server = self.random.choice([*self.servers.values()])
            return self.do(f"flush {server.name}", server.flush) or True
        return super().random_step()

    def _leave_in_a_load(self) -> None:
        """The client of a request leaves whose blocks are loaded from host memory."""
        servers = self.servers.values()
        loading = [(server, rid) for server in servers for rid in server.side.host.loading]
        if loading:
            server, rid = self.random.choice(loading)
            self.log(f"-{rid}, which loads")
            self.counters["left in a host load"] += 1
            self.left.add(rid)
            server.abort(rid)

    def see_time(self) -> None:
        for thread in self.threads:
            thread.tick()

    # --- a run ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises LivenessError for what does not end, or leaves something behind."""
        self.play(RETRANSMIT_S)
        if self.abandoned and not self.is_promised_alive:
            # By their client: before the others of their kind wait for their grace, nothing else
            # ends them.
            self.counters["waited for an offer's end"] += 1
            self.pass_time(OFFER_GRACE_S, lambda: not self.alive)
        self.check_alive()
        if self.abandoned:
            self.pass_time(OFFER_TIMEOUT_S, lambda: not self.leftovers())
        if left := self.leftovers():
            raise LivenessError(f"left behind: {left}\n{self.picture()}")
        self._check_answers()

    @property
    def alive(self) -> bool:
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
