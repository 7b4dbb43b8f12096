"""The clients: conversations with shared system prompts, and the ledger that holds every request to
one outcome."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.chaos_cluster import Cluster, Worker
from prefixkv.conformance.pattern import VOCABULARY

Tokens = npt.NDArray[np.int32]

_DECODE_PLANS = (
    "queued", "preallocated", "transferred", "running", "retracted", "finished", "later",
)  # fmt: skip
_PREFILL_PLANS = ("bootstrapping", "computing", "chunk", "sending", "later")


@dataclass(frozen=True)
class Sizes:
    """Of prompts and answers, in tokens."""

    num_systems: int = 4
    system: tuple[int, int] = (48, 160)
    user: tuple[int, int] = (8, 96)
    output: tuple[int, int] = (2, 24)
    turns: tuple[int, int] = (1, 5)


class Conversation:
    """Several turns over one system prompt; each prompt begins with all that was said before."""

    def __init__(self, chance: random.Random, systems: list[Tokens], sizes: Sizes) -> None:
        self._chance = chance
        self._sizes = sizes
        self.left = chance.randint(*sizes.turns)
        self.tokens = np.concatenate([chance.choice(systems), self._user()])
        self.decode: str | None = None  # where its KV is

    def _user(self) -> Tokens:
        rng = np.random.default_rng(self._chance.getrandbits(64))
        return rng.integers(0, VOCABULARY, self._chance.randint(*self._sizes.user), dtype=np.int32)

    def answered(self, output: list[int]) -> bool:
        """The next prompt is known; False if that was the last turn."""
        self.left -= 1
        self.tokens = np.concatenate([self.tokens, np.array(output, dtype=np.int32), self._user()])
        return self.left > 0


def system_prompts(chance: random.Random, sizes: Sizes) -> list[Tokens]:
    return [
        np.random.default_rng(chance.getrandbits(64)).integers(
            0, VOCABULARY, chance.randint(*sizes.system), dtype=np.int32
        )
        for _ in range(sizes.num_systems)
    ]


@dataclass(slots=True, eq=False)
class Call:
    """One request as a client sees it."""

    rid: str
    room: int
    decode: Worker
    conversation: Conversation
    began_s: float
    is_over: bool = False
    asks: set[str] = field(default_factory=set)  # open on prefill workers


class Ledger:
    """Every call, every ask, and what became of each. `violations` are texts."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.calls: dict[str, Call] = {}  # without an outcome
        self.asks: dict[str, tuple[Worker, Call]] = {}  # without an outcome
        self.outcomes: Counter[str] = Counter()
        self.ask_outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.violations: list[str] = []
        self.num_calls = 0
        self.free_rooms: list[int] = []
        self._rooms = 0
        self._ended: dict[str, str] = {}

    def new_room(self, chance: random.Random | None) -> int:
        """A room of its own, or, with `chance`, now and then one that has ended on both sides."""
        if chance is not None and self.free_rooms and chance.random() < 0.3:
            return self.free_rooms.pop(chance.randrange(len(self.free_rooms)))
        self._rooms += 1
        return self._rooms

    def opened(self, call: Call) -> None:
        self.calls[call.rid] = call
        self.num_calls += 1

    def asked(self, rid: str, worker: Worker, call: Call) -> None:
        if rid in self.asks or rid in self._ended:
            self.violations.append(f"{rid} was asked for twice")
        self.asks[rid] = (worker, call)
        call.asks.add(rid)

    def ended(self, worker: Worker, rid: str, kind: str, error: str, took_s: float) -> Call | None:
        """A worker's word. The call, if it was a decode worker's."""
        if error:
            self.errors[f"{worker.side}: {error.partition('(')[0]}"] += 1
        if rid in self._ended:
            self.violations.append(
                f"{rid} ended twice: {self._ended[rid]}, then {kind} by {worker}"
            )
            return None
        if took_s > self.deadline_s:
            self.violations.append(f"{rid} took {took_s:.1f} s to be {kind} by {worker}: {error}")
        if worker.side == "prefill":
            self._ask_over(rid, kind)
            return None
        call = self._call_over(rid, kind)
        if call.decode is not worker:
            self.violations.append(f"{rid} ended at {worker}, it was given to {call.decode}")
        return call

    def lost(self, worker: Worker) -> list[Call]:
        """The worker is dead: what it had is lost with it. Its calls."""
        for rid in [rid for rid, (there, _) in self.asks.items() if there is worker]:
            self._ask_over(rid, "lost with its worker")
        rids = [rid for rid, call in self.calls.items() if call.decode is worker]
        return [self._call_over(rid, "lost with its worker") for rid in rids]

    def _ask_over(self, rid: str, kind: str) -> None:
        _, call = self.asks.pop(rid)
        self._ended[rid] = kind
        self.ask_outcomes[kind] += 1
        call.asks.discard(rid)
        self._maybe_free(call)

    def _call_over(self, rid: str, kind: str) -> Call:
        call = self.calls.pop(rid)
        self._ended[rid] = kind
        self.outcomes[kind] += 1
        call.is_over = True
        self._maybe_free(call)
        return call

    def _maybe_free(self, call: Call) -> None:
        if call.is_over and not call.asks:
            self.free_rooms.append(call.room)

    @property
    def idle(self) -> bool:
        return not self.calls and not self.asks


@dataclass(kw_only=True)
class Clients:
    """Keeps `num_open` conversations going through the cluster. `trouble`: share of the calls that
    are aborted somewhere, or never reach prefill, or prefill only. `prefix`: of the calls' ids."""

    cluster: Cluster
    ledger: Ledger
    chance: random.Random
    conversations: Iterator[Conversation]
    num_open: int
    sizes: Sizes
    trouble: float = 0.0
    prefix: str = ""
    paused: bool = False
    exhausted: bool = False

    def __post_init__(self) -> None:
        self._sent = 0
        self._open: set[Conversation] = set()

    @property
    def done(self) -> bool:
        return self.exhausted and not self._open

    def fill(self) -> None:
        """Begin conversations until enough are open."""
        while len(self._open) < self.num_open and not self.exhausted and not self.paused:
            if not (self.cluster.ready("decode") and self.cluster.ready("prefill")):
                return
            conversation = next(self.conversations, None)
            if conversation is None:
                self.exhausted = True
                return
            self._open.add(conversation)
            self._send(conversation)

    def ended(self, call: Call, kind: str, output: list[int]) -> None:
        """Its next turn, or another conversation."""
        conversation = call.conversation
        if conversation not in self._open:
            return
        self._open.discard(conversation)
        able = self.cluster.ready("decode") and self.cluster.ready("prefill")
        if kind == "finished" and conversation.answered(output) and not self.paused and able:
            self._open.add(conversation)
            self._send(conversation)
        self.fill()

    def _send(self, conversation: Conversation) -> None:
        chance, cluster = self.chance, self.cluster
        decodes = cluster.ready("decode")
        decode = next((w for w in decodes if w.name == conversation.decode), None)
        if decode is None or chance.random() < 0.15:
            decode = chance.choice(decodes)
        conversation.decode = decode.name
        prefill = chance.choice(cluster.ready("prefill"))
        self._sent += 1
        room = self.ledger.new_room(chance if self.trouble else None)
        call = Call(f"{self.prefix}{self._sent}", room, decode, conversation, time.monotonic())
        self.ledger.opened(call)
        output_len = chance.randint(*self.sizes.output)
        address = cluster.address(decode.name, prefill.name)
        reaches = chance.random() > 0.1 * self.trouble
        plan = self._plan(_DECODE_PLANS)
        steps: list[Callable[[], None]] = [
            lambda: decode.tell(
                "request", call.rid, room, conversation.tokens, output_len, address, plan
            )
        ]
        if reaches:
            steps.append(lambda: self.ask(call, f"{call.rid}.0", prefill, 0, conversation.tokens))
        chance.shuffle(steps)  # either side may hear of it first
        for step in steps:
            step()

    def ask(self, call: Call, rid: str, prefill: Worker, generation: int, tokens: Tokens) -> None:
        self.ledger.asked(rid, prefill, call)
        where = call.room, generation, call.decode.name
        prefill.tell("ask", rid, *where, tokens, self._plan(_PREFILL_PLANS))

    def again(self, rid: str, prefill: str, generation: int, tokens: Tokens) -> None:
        """Decode wants the call asked for once more."""
        call = self.ledger.calls.get(rid)
        worker = self.cluster.current.get(prefill)
        if call is not None and worker is not None and worker.up:
            self.ask(call, f"{rid}.{generation}", worker, generation, tokens)

    def _plan(self, plans: tuple[str, ...]) -> str:
        if self.chance.random() >= self.trouble:
            return ""
        plan = self.chance.choice(plans)
        return f"later:{self.chance.uniform(0, 0.5):.3f}" if plan == "later" else plan
