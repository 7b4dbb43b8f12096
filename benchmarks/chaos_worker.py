"""One prefill or decode worker of the storm: a node, a stand-in engine that checks every byte, and
aborts to plan.

The orchestrator speaks over a pipe. To a worker go (name, *arguments), one of the `on_*` methods;
from it come

    ("up", peer_id, endpoint)                      it is ready
    ("ended", rid, kind, error, took_s, output)    a request's one outcome: finished, sent, failed,
    aborted, refused ("ask", rid, room, generation, tokens, prefill)    decode wants prefill asked
    again ("report", dict)                               the answer to `report`
    ("crash", traceback)                           a bug
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import stand_in
from benchmarks.chaos_pages import SOURCE_CANARY, TARGET_CANARY, WatchedAllocator
from benchmarks.pair import die_with
from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.conformance.pattern import Hashes, KVPattern, PrefixHasher
from prefixkv.errors import RequestError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.paging import pages_for
from prefixkv.request import Request
from prefixkv.transport.nixl.loop import NixlLoop
from prefixkv.transport.shm.loop import ShmLoop

Tokens = npt.NDArray[np.int32]
SALT = 7
SWITCH_INTERVAL_S = 0.0005
_SCAN_S = 0.25  # between two looks at all free pages
_GAP_S = 0.1  # a longer time between two turns was taken from us: stopped, or made to sleep
_MOST_FINDINGS = 20
_SLOW_POSTS = 1 / 50
# Of each request, on either side, where it may be alone. Longer than any wait of chaos.CONTROL.
_REQUEST_S = 12.0


@dataclass(frozen=True)
class Spec:
    """What a worker process is made of."""

    side: str
    pool: dict[str, Any]
    config: DecodeConfig | PrefillConfig
    seed: int
    chunk_tokens: int = 64
    step_s: float = 0.002
    env: dict[str, str] = field(default_factory=dict)
    post_s: float = 0.0  # that the transport's thread waits before one in 50 posts


class Delay:
    """A device event that is done some time from now."""

    def __init__(self, delay_s: float) -> None:
        self._due_s = time.monotonic() + delay_s

    def query(self) -> bool:
        return time.monotonic() >= self._due_s


class Trap:
    """A device event that sends its own process a signal the first time it is asked.

    The transport's thread asks, between two writes: what was posted before is under way, and what
    is posted next is posted after whatever the signal did.
    """

    def __init__(self, number: int) -> None:
        self.number = number  # 0: none any more

    def query(self) -> bool:
        if self.number:
            # To this thread, which cannot go on meanwhile.
            signal.pthread_kill(threading.get_ident(), self.number)
        return True


class _Engine:
    """What both sides share. `plans`: by request, the state at which it is aborted."""

    canary: ClassVar[int]
    hasher: PrefixHasher

    def __init__(self, spec: Spec, node: Any, pipe: Connection) -> None:
        self.spec = spec
        self.node = node
        self.pipe = pipe
        self.chance = random.Random(spec.seed)
        self.allocator = WatchedAllocator(node.pool, self.canary)
        node.pages.allocator = self.allocator
        self.pattern = KVPattern(node.pool.layout, SALT, node.pool)
        self.plans: dict[str, str] = {}
        self.aborts: Counter[str] = Counter()
        self.aborts_due: list[tuple[float, str]] = []
        # When each request began, and what had been taken from us by then.
        self.started: dict[str, tuple[float, float]] = {}
        self.taken_s = 0.0
        self.turn_s = time.monotonic()
        self.scan_s = self.turn_s
        self.wrong_pages = 0
        self.findings: list[str] = []
        self.pages_verified = 0
        self.history: list[Tokens] = []
        self.trap = 0
        self.set: Trap | None = None  # the last that went out with a chunk

    def say(self, *message: Any) -> None:
        self.pipe.send(message)

    def finding(self, text: str) -> None:
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(text)

    def turn(self) -> None:
        """Account for the time since the last turn; look at the free pages now and then."""
        now_s = time.monotonic()
        if now_s - self.turn_s > _GAP_S:
            self.taken_s += now_s - self.turn_s
        self.turn_s = now_s
        if now_s >= self.scan_s:
            self.scan_s = now_s + _SCAN_S
            self.allocator.scan()
        while self.aborts_due and self.aborts_due[0][0] <= now_s:
            self.abort(self.aborts_due.pop(0)[1], "later")

    @property
    def wait_s(self) -> float:
        """Until there is something to do, if nothing comes."""
        raise NotImplementedError

    def begin(self, rid: str, plan: str) -> None:
        self.started[rid] = (time.monotonic(), self.taken_s)
        state, _, delay = plan.partition(":")
        if state == "later":
            self.aborts_due.append((time.monotonic() + float(delay), rid))
            self.aborts_due.sort()
        elif plan:
            self.plans[rid] = state

    def end(self, rid: str, kind: str, error: Any = None, output: list[int] | None = None) -> None:
        began_s, taken_s = self.started.pop(rid)
        took_s = time.monotonic() - began_s - (self.taken_s - taken_s)
        self.plans.pop(rid, None)
        self.say("ended", rid, kind, repr(error) if error is not None else "", took_s, output or [])

    def reached(self, rid: str, state: str) -> None:
        """Abort the request if that is the plan for this state. Twice: the second must change
        nothing."""
        if self.plans.get(rid) == state:
            del self.plans[rid]
            self.abort(rid, state)

    def abort(self, rid: str, state: str) -> None:
        known = self.node.abort(rid)
        self.aborts[state if known else "of unknown"] += 1
        if known and self.node.abort(rid) and self.spec.side == "decode":
            self.finding(f"{rid} was aborted twice")

    def verify(self, pages: Tokens, hashes: Hashes, what: str) -> None:
        self.pages_verified += pages_for(len(hashes), self.pattern.page_size)
        wrong = self.pattern.mismatches(pages, hashes)
        if wrong:
            self.wrong_pages += wrong
            size = self.pattern.page_size
            bad = [
                i for i in range(pages_for(len(hashes), size))
                if self.pattern.mismatches(pages[: i + 1], hashes[: (i + 1) * size])
                > self.pattern.mismatches(pages[:i], hashes[: i * size])
            ]  # fmt: skip
            canary = [i for i in bad if self.allocator.holds_canary(int(pages[i]))]
            self.finding(
                f"{what}: {wrong} of {len(pages)} pages wrong: {bad}, with a canary: {canary}"
            )

    # --- what the orchestrator asks for -----------------------------------------------------------

    def on_sleep(self, seconds: float, spin: bool) -> None:
        """The scheduler's thread is slow; with `spin` it keeps the interpreter busy meanwhile."""
        if spin:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                pass
        else:
            time.sleep(seconds)

    def on_trap(self, number: int) -> None:
        """On prefill: the next second chunk of a request meets this signal between two writes; 0:
        none does."""
        self.trap = number
        if not number and self.set is not None:
            self.set.number = 0  # it may not have been asked yet

    def on_flush(self) -> None:
        self.node.flush()

    def on_cut_data(self, control_ports: list[int], share: float) -> None:
        """Shut TCP connections that are not the control plane's: the data plane's, where it has
        any."""
        self.aborts["data sockets cut"] += cut_sockets(set(control_ports), share, self.chance)

    def on_report(self, final: bool) -> None:
        node = self.node
        self.allocator.scan()
        if final:
            node.audit()
            self.verify_tree()
        self.say(
            "report",
            {
                "stats": node.stats(),
                "mismatches": self.wrong_pages,
                "findings": self.findings + self.allocator.findings,
                "late_writes": self.allocator.num_findings,
                "pages_verified": self.pages_verified,
                "free_pages_checked": self.allocator.pages_checked,
                "peers": repr(node.peers()),
                "rooms": self._rooms(),
            },
        )

    def _rooms(self) -> list[str]:
        """What the control plane still has; read from this thread, which is for people only."""
        with contextlib.suppress(RuntimeError):  # it changed meanwhile
            return [describe(machine) for machine in self.node.transfers.control.rooms()]
        return ["changing"]

    def verify_tree(self) -> None:
        """Every page in the tree, found again by what was ever put there."""
        page_manager = self.node.pages
        size = page_manager.page_size
        seen: set[int] = set()
        for tokens in self.history:
            match = page_manager.cache.match_prefix(tokens)
            pages = match.pages
            if len(pages) and not seen.issuperset(pages.tolist()):
                seen.update(pages.tolist())
                self.verify(pages, self.hasher.prefixes(tokens)[: len(pages) * size], "in the tree")
        if len(seen) != page_manager.allocator.cached_pages:
            self.finding(
                f"{page_manager.allocator.cached_pages} pages are cached, {len(seen)} were found "
                "and verified"
            )


class PrefillEngine(_Engine, stand_in.Prefill):
    """Computes one chunk a step of each request in turn."""

    canary = SOURCE_CANARY

    def __init__(self, spec: Spec, node: PrefillNode, pipe: Connection) -> None:
        _Engine.__init__(self, spec, node, pipe)
        stand_in.Prefill.__init__(self, node, [self.pattern], spec.chunk_tokens)

    @property
    def wait_s(self) -> float:
        return 0.0 if self.computing else 0.1

    def on_ask(
        self, rid: str, room: int, generation: int, decode: str, tokens: Tokens, plan: str
    ) -> None:
        self.begin(rid, plan)
        try:
            what: dict[str, Any] = {"room": room, "generation": generation, "decode": decode}
            self.add(Request(rid, tokens, deadline_s=_REQUEST_S, **what))
        except RequestError as error:
            self.end(rid, "refused", error)
            return
        self.history.append(tokens)
        self.reached(rid, "bootstrapping")

    def began(self, req: Any) -> None:
        hashes = self.open[req.rid][: req.prefix_len]
        self.verify(req.pages, hashes, f"prefill's own prefix of {req.rid}")
        self.reached(req.rid, "computing")

    def ready(self, req: Any) -> Any:
        if self.trap and self.computed[req.rid] > req.prefix_len:
            self.set = Trap(self.trap)
            self.trap = 0
            return self.set
        late = self.chance.random() < 0.1
        return Delay(self.chance.uniform(0.001, 0.1)) if late else None

    def sent_chunk(self, req: Any, start: int, end: int) -> None:
        self.reached(req.rid, "chunk")
        if req.rid not in self.computing:
            self.reached(req.rid, "sending")

    def ended(self, req: Any) -> None:
        self.end(req.rid, "sent" if req.error is None else "failed", req.error)


class DecodeEngine(_Engine, stand_in.Decode):
    """Runs what is ready in steps at least `step_s` apart."""

    canary = TARGET_CANARY

    def __init__(self, spec: Spec, node: DecodeNode, pipe: Connection) -> None:
        _Engine.__init__(self, spec, node, pipe)
        stand_in.Decode.__init__(self, node, [self.pattern], spec.step_s)

    @property
    def wait_s(self) -> float:
        return max(0.0, self.step_due_s - time.monotonic()) if self.running else 0.1

    def on_request(
        self, rid: str, room: int, tokens: Tokens, max_new_tokens: int, prefill: str, plan: str
    ) -> None:
        self.begin(rid, plan)
        try:
            what: dict[str, Any] = {"room": room, "prefill": prefill, "deadline_s": _REQUEST_S}
            self.node.add(Request(rid, tokens, max_new_tokens=max_new_tokens, **what))
        except RequestError as error:
            self.end(rid, "refused", error)
            return
        self.reached(rid, "queued")

    def on_fence(self, peer: str, incarnation: int) -> None:
        self.node.fence(peer, incarnation)

    def admitted(self, req: Any) -> None:
        self.reached(req.rid, "preallocated")

    def ask(self, ask: Any) -> None:
        tokens = np.asarray(ask.tokens, dtype=np.int32)
        self.say("ask", ask.rid, ask.room, ask.generation, tokens, ask.prefill)

    def failed(self, req: Any) -> None:
        self.end(req.rid, "aborted" if req.state.value == "aborted" else "failed", req.error)

    def arrived(self, req: Any, hashes: Hashes) -> None:
        """Its KV is there: every byte of it, and what came with it."""
        what = f"{req.rid} room {req.room_key} arrived with prefix {req.prefix_len}"
        self.verify(req.pages, hashes, what)
        if self.has_wrong_aux(req, hashes):
            self.wrong_pages += 1
            self.finding(f"{req.rid} came with another's aux: {req.aux!r}")
        self.history.append(req.key.tokens())
        self.reached(req.rid, "transferred")

    def appended(self, req: Any) -> None:
        if 1 < len(req.output) < req.max_new_tokens:
            self.reached(req.rid, "running")

    def retract(self, req: Any) -> None:
        self.history.append(req.key.tokens())
        super().retract(req)
        self.reached(req.rid, "retracted")

    def finish(self, req: Any) -> None:
        self.verify(req.pages, self.hasher.prefixes(req.key.tokens()), f"{req.rid} at its end")
        self.history.append(req.key.tokens())
        output = list(req.output)
        self.node.finish(req, continues=self.chance.choice((None, True, False)))
        self.reached(req.rid, "finished")
        self.end(req.rid, "finished", output=output)


def describe(machine: Any) -> str:
    names = ("poll", "peer", "in_flight", "undrained", "added", "_undrained", "_answered", "error")
    told = {name: getattr(machine, name) for name in names if hasattr(machine, name)}
    return f"{machine.key}: {told}"


def cut_sockets(control_ports: set[int], share: float, chance: random.Random) -> int:
    """Shut `share` of this process's TCP connections, but none from or to these ports. Returns how
    many."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = {sock.getsockname()[1], sock.getpeername()[1]}
                if not ports & control_ports and chance.random() < share:
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _post_slowly(pause_s: float, chance: random.Random) -> None:
    """Now and then a write is posted long after what ended its room, so that one that is called
    drained too early has its pages written again."""

    def slow(post: Callable[..., None]) -> Any:
        def late(*args: Any) -> None:
            if chance.random() < _SLOW_POSTS:
                time.sleep(pause_s)
            post(*args)

        return late

    NixlLoop._transfer = slow(NixlLoop._transfer)  # type: ignore[method-assign]
    ShmLoop._transfer = slow(ShmLoop._transfer)  # type: ignore[method-assign]


def serve(pipe: Connection, parent: int, spec: Spec) -> None:
    """The process. It dies with its parent, also while it is stopped."""
    die_with(parent)
    os.environ.update(spec.env)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        _serve(pipe, spec)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("crash", traceback.format_exc()))
        os._exit(1)


def _serve(pipe: Connection, spec: Spec) -> None:
    torch.set_num_threads(1)
    pool = KVPool.create(**spec.pool)
    node: Any
    engine: Any
    if isinstance(spec.config, PrefillConfig):
        if spec.post_s:
            _post_slowly(spec.post_s, random.Random(spec.seed))
        node = PrefillNode(pool, spec.config)
        engine = PrefillEngine(spec, node, pipe)
    else:
        node = DecodeNode(pool, spec.config)
        engine = DecodeEngine(spec, node, pipe)
    pipe.send(("up", node.peer_id, getattr(node, "endpoint", "")))
    while True:
        engine.turn()
        engine.step()
        wait([pipe, node.fileno()], min(engine.wait_s, 0.005 if engine.aborts_due else 0.1))
        while pipe.poll():
            name, *args = pipe.recv()
            if name == "close":
                node.close()
                pipe.send(("closed",))
                return
            getattr(engine, f"on_{name}")(*args)
