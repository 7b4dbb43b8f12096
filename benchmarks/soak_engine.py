"""The soak's parts: an engine around a decode and a prefill node, a second process with such a one,
the counting."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.pair import die_with
from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import ConfigError, OutOfPagesError, PrefixKVError, RequestError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.request import Request

POOL: dict[str, Any] = {
    "num_pages": 2048, "page_size": 4, "num_layers": 2, "num_kv_heads": 1, "head_dim": 16,
}  # fmt: skip
CONTROL = ControlConfig(
    heartbeat_s=0.2, suspect_after_s=2.0, forget_after_s=5.0, resend_s=0.1, bootstrap_timeout_s=1.5,
    waiting_timeout_s=1.0, transfer_timeout_s=1.0, ack_timeout_s=1.0, drain_timeout_s=0.7,
    parked_timeout_s=1.0, fence_settle_s=0.05,
)  # fmt: skip
DEADLINE_S = 3.0  # of each request, on either side, where it may be alone
_ANY_PORT = "tcp://127.0.0.1:*"
_CHUNK_TOKENS = 32
_NEW_PORT_EVERY = 4  # starts of the second process; the others come back at the same address

Tokens = Any


class Engine:
    """A decode and a prefill node of one process, and what is done with their requests. `step`
    never blocks."""

    def __init__(self, name: str, seed: int, bind: str = _ANY_PORT) -> None:
        self.chance = random.Random(seed)
        self.decode = DecodeNode(
            KVPool.create(**POOL),
            DecodeConfig(name=f"decode-{name}", reserve_tokens=0, control=CONTROL),
        )
        pool, name = KVPool.create(**POOL), f"prefill-{name}"
        try:
            self.prefill = PrefillNode(pool, PrefillConfig(name=name, bind=bind, control=CONTROL))
        except ConfigError:  # another process has the port by now
            self.prefill = PrefillNode(pool, PrefillConfig(name=name, control=CONTROL))
        self.outcomes: Counter[str] = Counter()
        self.asks: list[
            tuple[str, tuple[Any, ...]]
        ] = []  # for a prefill worker elsewhere: its address, what to add
        self._plans: dict[str, str] = {}  # of requests that live on prefill
        self._aborts: list[tuple[float, Any, str]] = []  # when, which node, which request
        self._poller = select.poll()
        for node in (self.decode, self.prefill):
            self._poller.register(node.fileno(), select.POLLIN)

    @property
    def num_open(self) -> int:
        return max(len(node.requests) for node in (self.decode, self.prefill))

    def add_decode(self, room: int, tokens: Tokens, prefill: str, plan: str) -> None:
        what: dict[str, Any] = {"room": room, "prefill": prefill, "deadline_s": DEADLINE_S}
        request = Request(f"r{room}", tokens, max_new_tokens=2, **what)
        try:
            if plan == "refused":
                self.decode.refuse(request, "the soak wants it so")
            else:
                self.decode.add(request)
                self._plan_abort(plan, "decode aborts", self.decode, request.rid)
        except RequestError:
            self.outcomes["decode: not taken"] += 1

    def add_prefill(
        self, room: int, tokens: Tokens, plan: str, decode: str, generation: int = 0
    ) -> None:
        rid = f"r{room}.{generation}"
        what: dict[str, Any] = {"room": room, "generation": generation, "decode": decode}
        request = Request(rid, tokens, deadline_s=DEADLINE_S, **what)
        try:
            self.prefill.add(request)
        except RequestError:
            self.outcomes["prefill: not taken"] += 1
            return
        self._plans[request.rid] = plan
        self._plan_abort(plan, "prefill aborts", self.prefill, request.rid)

    def _plan_abort(self, plan: str, name: str, node: Any, rid: str) -> None:
        if plan == "aborted at once":
            node.abort(rid)
        elif plan == name:
            self._aborts.append(
                (time.monotonic() + self.chance.choice((0.0, 0.002, 0.02, 0.2)), node, rid)
            )

    def step(self) -> None:
        now_s = time.monotonic()
        due = [abort for abort in self._aborts if abort[0] <= now_s]
        self._aborts = [abort for abort in self._aborts if abort[0] > now_s]
        for _, node, rid in due:
            node.abort(rid)
        self._step_decode()
        self._step_prefill()

    def _step_decode(self) -> None:
        node = self.decode
        node.pop_preallocated()
        for ask in node.pop_needs_prefill():
            what = (ask.room, np.array(ask.tokens, np.int32), "well", ask.decode, ask.generation)
            if ask.prefill == self.prefill.endpoint:
                self.add_prefill(*what)
            else:
                self.asks.append((ask.prefill, what))
            self.outcomes["decode: asked again"] += 1
        for req in node.pop_failed():
            self._ended("decode", req)
        for req in node.pop_transferred():
            try:
                node.append_many([req], [7])
            except OutOfPagesError:
                node.abort(req.rid)
                continue
            node.finish(req)
            self._ended("decode", req)

    def _step_prefill(self) -> None:
        node = self.prefill
        for req in node.pop_bootstrapped():
            if self._plans.get(req.rid) == "left unsent":
                continue
            for end in range(_CHUNK_TOKENS, req.num_tokens, _CHUNK_TOKENS):
                node.send_chunk(req, end)
            node.send_chunk(req, req.num_tokens, last=True, aux=b"aux" * self.chance.randrange(3))
        for req in node.pop_failed():
            self._ended("prefill", req)
        for req in node.pop_sent():
            self._ended("prefill", req)

    def _ended(self, side: str, req: Any) -> None:
        if side == "prefill":
            self._plans.pop(req.rid, None)
        self.outcomes[f"{side}: {'well' if req.error is None else type(req.error).__name__}"] += 1

    def wait(self) -> None:
        self._poller.poll(2)

    def left(self) -> dict[str, dict[str, int]]:
        names = ("requests", "rooms", "locks", "pages_owned", "pages_held", "pages_quarantined")
        return {
            side: {name: stats[name] for name in names if stats[name]}
            for side, stats in (("decode", self.decode.stats()), ("prefill", self.prefill.stats()))
        }

    def at_rest(self) -> bool:
        return not self._aborts and not any(self.left().values())

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


# --- the second process ---------------------------------------------------------------------------


class Second:
    """Another process with an engine, started again each time it ends. Used from the first one's
    loop."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.endpoint = ""
        self._bind = _ANY_PORT
        self._seed = seed
        self._peers: tuple[Any, ...] = ()
        self._pipe: Connection | None = None
        self._process: Any = None
        self._queue: deque[Any] = deque()

    @property
    def up(self) -> bool:
        return bool(self.endpoint)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._seed += 1
        if self.counts["started"] % _NEW_PORT_EVERY == 0:
            self._bind = _ANY_PORT
        args = (os.getpid(), theirs, self._seed, self._bind)
        self._process = context.Process(target=_second, args=args, daemon=True)
        self._process.start()
        theirs.close()
        self.counts["started"] += 1

    def step(self, engine: Engine) -> None:
        """Take note that it is ready or has died by itself, and pass on what one side's decode asks
        the other for."""
        assert self._pipe is not None
        for address, what in engine.asks:
            if address == self.endpoint:
                self.send("prefill", what)
        engine.asks.clear()
        try:
            while self._pipe.poll():
                kind, value = self._pipe.recv()
                if kind == "up":
                    self.endpoint, self._peers = value
                    self._bind = self.endpoint
                else:
                    engine.add_prefill(*value)
        except (EOFError, OSError):
            self.counts["died by itself"] += 1
            self._lost(engine)
            self.start()

    def send(self, side: str, ask: tuple[Any, ...]) -> None:
        self.counts[f"rooms of its {side} node"] += 1
        assert self._pipe is not None
        try:
            self._pipe.send((side, ask))
        except OSError:
            self.counts["asks lost"] += 1

    def restart(self, engine: Engine, killed: bool) -> None:
        """End it, if it is up, with rooms under way, and start another."""
        if self.up:
            self._end(engine, killed)
            self.start()

    def stop(self, engine: Engine) -> None:
        self._end(engine, killed=False)

    def _end(self, engine: Engine, killed: bool) -> None:
        assert self._pipe is not None
        self.counts["killed" if killed else "closed"] += 1
        if killed:
            self._process.kill()
        else:
            try:
                self._pipe.send(("close", ()))
            except OSError:
                self._process.kill()
        self._lost(engine)

    def _lost(self, engine: Engine) -> None:
        """It is dead, and the orchestrator knows."""
        assert self._pipe is not None
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._pipe.close()
        for peer in self._peers:
            engine.decode.fence(*peer)
        self.endpoint, self._peers = "", ()


def _second(parent: int, pipe: Connection, seed: int, bind: str) -> None:
    die_with(parent)
    engine = Engine("second", seed, bind)
    pipe.send(("up", (engine.prefill.endpoint, (tuple(engine.prefill.peer_id),))))
    while os.getppid() == parent:
        while pipe.poll():
            try:
                kind, ask = pipe.recv()
            except EOFError:
                return
            if kind == "close":
                engine.close()
                return
            engine.add_decode(*ask) if kind == "decode" else engine.add_prefill(*ask)
        engine.step()
        for _, what in engine.asks:  # there is but one other
            pipe.send(("ask", what))
        engine.asks.clear()
        engine.wait()


# --- what hangs on a node -------------------------------------------------------------------------


def lengths_below(roots: Mapping[str, Any]) -> dict[str, int]:
    """The length of every container that hangs on these objects, by the way there; those of equal
    ways added up.

    Objects of this project are walked, and what their containers hold of them. A transport's own
    are a thread's
    locals: they are found among all objects, and walked first.
    """
    lengths: Counter[str] = Counter()
    seen: set[int] = set()
    stack = [*roots.items()]
    stack += [
        (f"transport {type(thing).__name__}", thing)
        for thing in _all_objects()
        if _of_transport(thing)
    ]
    while stack:
        path, thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (dict, list, set, deque, frozenset, tuple)):
            if not isinstance(thing, tuple):
                lengths[path] += len(thing)
            values = list(thing.values()) if isinstance(thing, dict) else list(thing)
            stack += [(f"{path}[]", value) for value in values if _walked(value)]
        else:
            stack += [
                (f"{path}.{name}", value) for name, value in _attributes(thing) if _walked(value)
            ]
    return _small(lengths)


def instances() -> dict[str, int]:
    """How many objects there are of each class of the project."""
    counts = Counter(
        f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in _all_objects()
    )
    return _small(counts)


def _small(counts: Mapping[str, int]) -> dict[str, int]:
    """By name, those that are not 0. The names are shared: the samples are kept, and have to be
    small themselves."""
    return {sys.intern(name): count for name, count in sorted(counts.items()) if count}


def _all_objects() -> list[Any]:
    return [
        thing for thing in gc.get_objects() if str(type(thing).__module__).startswith("prefixkv")
    ]


def _of_transport(thing: Any) -> bool:
    return type(thing).__module__.startswith("prefixkv.transport") and hasattr(thing, "__dict__")


def _walked(value: Any) -> bool:
    if isinstance(value, (dict, list, set, deque, frozenset, tuple)):
        return True
    return str(type(value).__module__).startswith("prefixkv") and not isinstance(
        value, (type, PrefixKVError)
    )


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)
