"""Frames of peers that mean harm, or nothing, to a prefill node and a decode node.

Both nodes are processes of their own, with CURVE keys. Prefill is sent frames by a worker with an
allowed key, and by one that speaks as a former life of the decode node with that one's key. Decode
is told to use a prefill worker for some requests that answers with anything. Frames are valid
bodies with wrong values, mutated valid frames, junk, several parts, floods.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
import zmq

from prefixkv import DecodeNode
from prefixkv.config import ControlConfig, CurveConfig, DecodeConfig, PrefillConfig
from prefixkv.protocol import messages
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Hello, HelloReply, HelloWanted, Outcome, Promise
from prefixkv.request import Request
from tests.support.node_pair import make_pool, tokens_of
from tests.support.node_process import NodeProcess, node_processes
from tests.support.patience import NEVER_S, PATIENCE_S, until

_POOL = {"num_pages": 1024}
_BURST = 100  # frames from one attacker at a time
_HONEST = 6  # requests at a time
_HOSTILE = 4
_WARM_UP = 20  # honest requests before and after the attack
_NUMBERS = (*range(5), 7, 64, 255, 4096, 2**20, 2**30, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1)
# What is hostile is kept for a while; an honest request waits longer on no busy machine.
_KEPT_S = 20.0
_TIMING = ControlConfig(
    heartbeat_s=0.5, suspect_after_s=60.0, forget_after_s=120.0, resend_s=0.1,
    parked_timeout_s=_KEPT_S, ack_timeout_s=_KEPT_S, drain_timeout_s=_KEPT_S,
    bootstrap_timeout_s=60.0,
)  # fmt: skip


class Bodies:
    """What a peer says, with values that mean harm, or nothing, in some fields. `rooms` are numbers
    and tickets that somebody uses."""

    def __init__(self, rng: random.Random, hello: Hello) -> None:
        self.rng, self.hello = rng, hello
        self.reply = HelloReply(hello.digest, hello.topology, ("",))
        self.rooms: deque[tuple[int, int, int]] = deque([(1, 0, 0)], maxlen=64)

    def number(self) -> int:
        return self.rng.choice(_NUMBERS)

    def wrong(self, value: Any) -> Any:
        """Another value of a field."""
        rng = self.rng
        match value:
            case bool():
                return not value
            case int():
                return self.number()
            case str():
                return "x" * rng.choice((0, 1, 10, 10, 10, 1000, 4096, 4097))
            case bytes():
                return rng.randbytes(rng.choice((0, 10, 1000, 100_000)))
            case PeerId() | None:
                return PeerId(rng.choice(("honest", "evil", "x")), self.number())
            case tuple():
                return (value or (self.number(),)) * rng.choice((0, 2, 256, 4096))
            case messages.Topology():
                return self.changed(value)
        return self.changed(value, ("num_pages", "regions", "slabs"))  # of a layout

    def changed(self, body: Any, names: Sequence[str] = ()) -> Any:
        """One of these fields, or of all, is wrong."""
        name = self.rng.choice(names or body.__struct_fields__)
        return msgspec.structs.replace(body, **{name: self.wrong(getattr(body, name))})

    def room(self) -> tuple[int, int, int]:
        """Number, generation and ticket."""
        if self.rng.random() < 0.7:
            return self.rng.choice(self.rooms)
        return self.rng.randrange(10_000), self.rng.choice((0, 0, 1, 2**31 - 1)), self.number()

    def promise(self) -> Promise:
        rng = self.rng
        room, generation, ticket = self.room()
        num_pages = rng.choice((0, 1, 2, 3, 8, 100, 2000))
        if rng.random() < 0.0005:
            num_pages = messages.MAX_PAGES
        first = rng.choice((0, 0, 1, 500, 1023, -1, 2**30, 2**31 - 1 - num_pages))
        pages = np.arange(first, first + num_pages, dtype=np.int64).astype("<i4").tobytes()
        if rng.random() < 0.05:
            pages = pages[:-1]
        slot = b"" if rng.random() < 0.9 else self.number().to_bytes(8, "little")
        fill_len, digest = num_pages * self.hello.topology.page_size, rng.randbytes(32)
        promise = Promise(room, generation, fill_len, 0, pages, ticket, digest, groups=(slot,))
        is_wrong = rng.random() < 0.4
        return self.changed(promise, ("fill_len", "prefix_len", "digest")) if is_wrong else promise

    def greeting(self) -> Any:
        if self.rng.random() < 0.5:
            names = ("endpoints", "topology", "refused", "rank", "relayed", "known", "max_tokens")
            return self.changed(self.reply, names)
        names = ("topology", "rank", "worker", "layout", "agent_metadata", "nonce", "known")
        return self.changed(self.hello, names)

    def of_a_room(self) -> Any:
        """A body that names a room, and whatever else."""
        *key, ticket = self.room()
        kind, numbers = self.rng.choice(_OF_A_ROOM)
        body = kind(*key, *numbers, ticket)
        for _ in range(self.rng.randrange(4)):
            body = self.changed(body, body.__struct_fields__[2:])
        return body

    def body(self) -> Any:
        """Of any kind, for either side."""
        makers = (
            *(self.promise,) * 3, *(self.of_a_room,) * 8, self.greeting, messages.Heartbeat,
            lambda: HelloWanted(self.number()),
        )  # fmt: skip
        return self.rng.choice(makers)()


# Each with its fields between room and ticket.
_OF_A_ROOM: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    *((Outcome, (0, True, 1, pages, b"aux!", "", True)) for pages in (0, 3)),
    (messages.Abort, ("why",)), (messages.OutcomeAck, (0,)), (messages.PromiseAck, (0,)),
    (messages.LeaseGrant, (0, 0, 0)), (messages.LeaseAsk, (0, 0, 0, 1)), (messages.Drained, (0,)),
)  # fmt: skip


class Attacker:
    """Says bursts of frames by a socket, under a name, in lives that follow each other. `farewell`
    is how often it says that it leaves."""

    farewell: float

    def __init__(
        self, rng: random.Random, me: PeerId, hello: Hello, sock: Any, own: CurveConfig
    ) -> None:
        self.rng, self.me, self.bodies = rng, me, Bodies(rng, hello)
        self.seq = count(1)
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.route: list[bytes] | None = []  # before each message; None: there is nobody
        self.sock = sock
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 1000)
        sock.curve_publickey = own.public_key.encode()
        sock.curve_secretkey = own.secret_key.encode()

    # --- what it says -----------------------------------------------------------------------------

    def sender(self) -> PeerId:
        rng = self.rng
        if rng.random() < 0.9:
            return self.me
        names = self.me.name, "honest", "evil", "stranger", f"{self.me.name}/1", "x" * 256
        return PeerId(rng.choice(names), rng.choice((self.me.incarnation, self.bodies.number())))

    def mutated(self, raw: bytes) -> bytes:
        rng, changed = self.rng, bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(changed))
            how = rng.random()
            if how < 0.6:
                changed[at] = rng.randrange(256)
            elif how < 0.8 and len(changed) > 1:
                del changed[at:]
            else:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
            if not changed:
                changed += b"\xc1"
        return bytes(changed)

    def frame(self) -> list[bytes]:
        """The parts of the next message."""
        rng = self.rng
        chance = rng.random()
        if chance < 0.05:
            self.counts["junk"] += 1
            size = rng.choice((0, 1, 10, 100, 1000))
            return [rng.randbytes(size if rng.random() > 0.001 else 1 << 20)]
        is_old = chance < 0.08
        seq, sender = (rng.randrange(100), self.me) if is_old else (next(self.seq), self.sender())
        try:
            raw = messages.encode(sender, seq, self.bodies.body())
        except OverflowError:
            return [b""]
        if chance > 0.97:
            self.counts["several parts"] += 1
            return [raw, *([b"x"] * rng.choice((1, 2, 100)))]
        if chance > 0.80:
            self.counts["mutated"] += 1
            return [self.mutated(raw)]
        self.counts["repeated number" if is_old else "grammar"] += 1
        return [raw]

    # --- by the socket ----------------------------------------------------------------------------

    def received(self) -> Iterator[Any]:
        """The bodies that have come."""
        for _ in range(500):
            try:
                *self.route, raw = self.sock.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield messages.decode(raw).body

    def read(self) -> None:
        raise NotImplementedError

    def live_again(self) -> None:
        self.me = PeerId(self.me.name, self.me.incarnation + 1)
        self.seq = count(1)

    def put(self, parts: list[bytes]) -> bool:
        try:
            self.sock.send_multipart([*(self.route or ()), *parts], zmq.DONTWAIT)
        except zmq.ZMQError:  # it is full, or decode has gone
            return False
        return True

    def say(self, body: Any) -> bool:
        return self.put([messages.encode(self.me, next(self.seq), body)])

    def burst(self) -> int:
        self.read()
        if self.route is None:
            return 0
        sent = 0
        while sent < _BURST and self.put(self.frame()):
            sent += 1
        if self.rng.random() < self.farewell:
            self.say(messages.Fenced())
        return sent


class AsDecode(Attacker):
    """An attacker of prefill. It introduces itself as long as it `introduces`."""

    farewell = 0.02
    introduces = True
    next_life = 0.0

    def connect(self, address: str, server: str) -> None:
        self.sock.curve_serverkey = server.encode()
        self.sock.connect(address)
        self.first = self.me

    def greet(self, nonce: int = 0) -> None:
        hello = self.bodies.hello
        lives = (f"#{life.incarnation}".encode() for life in (self.first, self.me))
        metadata = hello.agent_metadata.replace(*lives)
        self.say(msgspec.structs.replace(hello, agent_metadata=metadata, nonce=nonce))

    def read(self) -> None:
        for body in self.received():
            if isinstance(body, HelloWanted) and self.introduces and self.rng.random() < 0.2:
                self.greet(body.nonce)
            elif isinstance(body, HelloReply):
                self.refused[body.refused[:40]] += 1
                now_s = time.monotonic()
                if "life" in body.refused and self.introduces and now_s > self.next_life:
                    self.next_life = now_s + 1.0
                    self.live_again()
                    self.greet()


class AsPrefill(Attacker):
    """The attacker of decode: a prefill worker that decode was told to use."""

    farewell = 0.005

    def bind(self) -> str:
        """Return its address."""
        self.sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.sock.curve_server = True
        self.route = None
        return f"tcp://127.0.0.1:{self.sock.bind_to_random_port('tcp://127.0.0.1')}"

    def read(self) -> None:
        bodies, rng = self.bodies, self.rng
        for body in self.received():
            if isinstance(body, Hello):
                if rng.random() < 0.1:
                    self.live_again()
                self.say(msgspec.structs.replace(bodies.reply, known=body.known))
            elif isinstance(body, Promise):
                bodies.rooms.append((body.room, body.generation, body.ticket))
                if rng.random() < 0.3:
                    said = True, 1, len(body.pages) // 4, b"aux!", "", True, body.ticket
                    self.say(Outcome(body.room, body.generation, 0, *said))
            elif isinstance(body, messages.Abort) and rng.random() < 0.5:
                self.say(messages.Drained(body.room, body.generation, 0, body.ticket))


def captured(name: str, context: zmq.Context[Any], stack: ExitStack) -> tuple[PeerId, Hello]:
    """A real decode node's Hello; the node lives on, since UCX looks for the memory it names."""
    node = stack.enter_context(DecodeNode(make_pool(**_POOL), DecodeConfig(name)))
    with context.socket(zmq.ROUTER) as listener:
        address = f"tcp://127.0.0.1:{listener.bind_to_random_port('tcp://127.0.0.1')}"
        node.add(Request("r", [1, 2, 3], max_new_tokens=1, room=1, prefill=address))
        node.pop_preallocated()
        assert listener.poll(PATIENCE_S * 1000)
        frame = messages.decode(listener.recv_multipart()[1])
        node.abort("r")
    assert isinstance(frame.body, Hello)
    return frame.sender, frame.body


class Traffic:
    """Requests between the two nodes, all the time; and some of decode's for the hostile worker."""

    def __init__(self, prefill: NodeProcess, decode: NodeProcess, seed: int) -> None:
        self.prefill, self.decode = prefill, decode
        self.numbers = count(1)
        self.seed = seed
        self.open: dict[str, float] = {}
        self.hostile: dict[str, float] = {}
        self.served = self.hostile_ended = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []
        self.address = ""

    def step(self) -> None:
        now_s = time.monotonic()
        ended = self.decode.call("take_ended")
        for rid, error in ended.items():
            if self.hostile.pop(rid, None) is not None:
                self.hostile_ended += 1
                continue
            self.slowest_s = max(self.slowest_s, now_s - self.open.pop(rid))
            if error is None:
                self.served += 1
            else:
                self.failures.append(f"{rid}: {error}")
        for rid, since_s in self.open.items():
            if now_s - since_s > PATIENCE_S:
                raise AssertionError(f"{rid} has not ended, {self.decode.call('stats')}")
        while len(self.open) < _HONEST:
            number = next(self.numbers)
            rid, room = f"r{number}", number
            tokens = tokens_of(self.seed + number, 20 + number % 60)
            self.decode.call("submit", rid, tokens, self.prefill.endpoint, room=room)
            self.prefill.call("add", rid, tokens, room, 0, "honest")
            self.open[rid] = now_s
        for rid, since_s in list(self.hostile.items()):
            if now_s - since_s > 1.0:
                self.decode.call("abort", rid)
        while self.address and len(self.hostile) < _HOSTILE:
            number = next(self.numbers)
            rid = f"hostile{number}"
            tokens = tokens_of(10**6 + number, 12)
            try:
                self.decode.call("submit", rid, tokens, self.address, room=10**6 + number)
            except AssertionError as refused:
                if f"{self.address} holds" not in str(refused):
                    raise
                break  # it has said that it takes fewer tokens
            self.hostile[rid] = now_s

    def until_served(self, more: int) -> None:
        wanted = self.served + more
        until(lambda: self.served >= wanted, NEVER_S, step=self.step, pause_s=0.01)


def attack(num_frames: int, seconds: float, seed: int) -> None:
    """Raises AssertionError for whatever is found."""
    rng = random.Random(seed)
    server, honest, evil = (
        CurveConfig(*(key.decode() for key in zmq.curve_keypair())) for _ in range(3)
    )
    known = {honest.public_key: "honest", evil.public_key: "evil"}
    of_prefill = replace(_TIMING, curve=replace(server, allowed_clients=known))
    of_decode = replace(_TIMING, curve=replace(honest, server_key=server.public_key))
    with node_processes() as start, ExitStack() as stack:
        prefill = start("prefill", PrefillConfig(control=of_prefill), _POOL)
        context = stack.enter_context(zmq.Context())
        stack.callback(context.destroy, 0)

        def as_decode(name: str, own: CurveConfig) -> AsDecode:
            heard, sock = captured(name, context, stack), context.socket(zmq.DEALER)
            attacker = AsDecode(random.Random(rng.random()), *heard, sock, own)
            attacker.connect(prefill.endpoint, server.public_key)
            return attacker

        former = as_decode("honest", honest)
        until(
            lambda: former.refused[""], pause_s=0.05, step=lambda: (former.greet(), former.read())
        )
        former.introduces, former.farewell = False, 0.0
        decode = start("decode", DecodeConfig("honest", control=of_decode), _POOL)
        decode.call("set", untrusted="hostile")
        traffic = Traffic(prefill, decode, seed)
        traffic.until_served(1)
        allowed = as_decode("evil", evil)
        hostile = AsPrefill(rng, *captured("p", context, stack), context.socket(zmq.ROUTER), server)
        traffic.address = hostile.bind()
        attackers: dict[str, Attacker] = {
            "a former life": former, "an allowed worker": allowed, "a prefill worker": hostile,
        }  # fmt: skip
        traffic.until_served(_WARM_UP)
        sent: Counter[str] = Counter()
        started_s = looked_s = time.monotonic()
        while sum(sent.values()) < num_frames and time.monotonic() - started_s < seconds:
            name = rng.choice([*attackers, "a prefill worker"])  # decode hears as much as prefill
            sent[name] += attackers[name].burst()
            if (now_s := time.monotonic()) - looked_s > 0.05:
                looked_s = now_s
                traffic.step()
                for number, rid in enumerate(traffic.open):
                    allowed.bodies.rooms.append((10**6 + number, 0, 0))
                    for attacker in (former, allowed):
                        attacker.bodies.rooms.append((int(rid[1:]), 0, rng.choice((0, 1))))
        took_s = time.monotonic() - started_s
        traffic.address = ""
        traffic.until_served(_WARM_UP)
        wrong = sum(node.call("get", "mismatches") for node in (prefill, decode))
        wrong += decode.call("get", "wrong_aux")
    print(f"frames: {sum(sent.values())} in {took_s:.0f} s, seed {seed}; {dict(sent)}")
    for name, attacker in attackers.items():
        print(f"  {name}: {dict(attacker.counts)}", dict(attacker.refused))
    print(
        f"  honest requests: {traffic.served} served, {len(traffic.failures)} failed, the slowest "
        f"{traffic.slowest_s:.2f} s; others ended: {traffic.hostile_ended}; wrong pages: {wrong}"
    )
    found = [f"an honest request failed: {failure}" for failure in traffic.failures[:5]]
    found += [f"{wrong} wrong pages"] * (wrong > 0)
    assert not found, found
