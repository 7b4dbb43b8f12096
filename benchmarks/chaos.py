"""Whatever dies, stops, restarts or is cut off, no request reads a wrong byte, none hangs, nothing
is lost.

    python -m benchmarks chaos --seed 1 --seeds 7 --duration 75 --transport shm

Two prefill and two decode processes over real NIXL (UCX over TCP for odd seeds, its default for
even ones), and conversations with shared prefixes through all of them, while a storm that follows
from the seed kills, stops, restarts and replaces workers, cuts and stalls their sockets, aborts
requests from both sides in every state, and holds up scheduler threads, in pools small enough for
retraction. Every KV byte a request reads is checked, and freed pages are filled with a canary on
both sides (`chaos_pages.py`). One prefill worker posts slowly, so that a room that is called
drained too early is seen. The last line is the verdict; exit status 1 if any figure in it is off.
Timing decides what meets what, so a seed gives the same storm, not the same run.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Annotated, Any

import typer

from benchmarks.chaos_clients import Clients, Conversation, Ledger, Sizes, system_prompts
from benchmarks.chaos_cluster import Cluster, Worker
from benchmarks.chaos_proxy import Proxy
from benchmarks.chaos_worker import Spec
from benchmarks.report import JsonFile, Row, check_outputs, write
from benchmarks.transfer import Way
from prefixkv.config import Backend, ControlConfig, DecodeConfig, PrefillConfig, TransportConfig

CONTROL = ControlConfig(
    heartbeat_s=0.1, suspect_after_s=1.0, forget_after_s=10.0, resend_s=0.1,
    bootstrap_timeout_s=4.0, waiting_timeout_s=3.0, transfer_timeout_s=2.5, ack_timeout_s=2.0,
    drain_timeout_s=0.7, parked_timeout_s=2.0, fence_settle_s=0.5,
)  # fmt: skip
POOL = {"page_size": 8, "num_layers": 4, "num_kv_heads": 2, "head_dim": 64}  # 16 KiB a page
# One of the prefill workers posts little at a time, and now and then slowly.
SMALL_POSTS = TransportConfig(post_bytes=16 << 10, window=2)
POST_S = 0.08
STOP_S = (0.3, 5.0)  # the longest is longer than any deadline
# of a request, without what was taken from its own worker: every wait and retry at its worst
DEADLINE_S = 20.0
STORM_OPEN = 40  # conversations at a time
SHM = "shm"  # what KV travels by instead of NIXL's ways
CALM_OPEN = 12
CALM_CONVERSATIONS = 60
_UP_S = 60.0
_REST_S = 30.0


def specs_of(seed: int, tls: str) -> dict[str, Spec]:
    chance = random.Random(seed)
    order = chance.choice(("layer_major", "page_major"))
    env = {"UCX_TLS": tls} if tls == "tcp" else {}
    shm = tls == SHM
    specs = {}
    for number in range(2):
        for side in ("prefill", "decode"):
            name = f"{side}-{number}"
            pool = {**POOL, "num_pages": chance.choice((160, 240, 400)), "order": order}
            pool["shared"] = shm and side == "decode"
            backend: Backend = "shm" if shm else "nixl"
            config: PrefillConfig | DecodeConfig
            if side == "prefill":
                transport = replace(SMALL_POSTS if number else TransportConfig(), backend=backend)
                config = PrefillConfig(
                    name=name, max_running=64, control=CONTROL, transport=transport
                )
            else:
                config = DecodeConfig(
                    name=name, max_running=64, reserve_tokens=chance.choice((0, 8)),
                    failure_policy="retry" if number else "fail", control=CONTROL,
                    transport=TransportConfig(backend=backend),
                )  # fmt: skip
            specs[name] = Spec(
                side, pool, config, chance.getrandbits(32), chunk_tokens=chance.choice((24, 64)),
                env=env, post_s=POST_S if side == "prefill" and number else 0.0,
            )  # fmt: skip
    return specs


class Run:
    """One seed, from the first process to the verdict."""

    def __init__(self, seed: int, duration_s: float, tls: str) -> None:
        self.seed = seed
        self.duration_s = duration_s
        self.chance = random.Random(seed * 7919 + 1)
        self.cluster = Cluster(specs_of(seed, tls))
        self.ledger = Ledger(DEADLINE_S)
        self.clients: Clients | None = None
        self.faults: Counter[str] = Counter()
        self.reports: dict[Worker, dict[str, Any]] = {}
        self.crashes: list[str] = []
        self.totals: Counter[str] = Counter()
        self.storming = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    # --- events -----------------------------------------------------------------------------------

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time.monotonic() + delay_s, next(self._order), action))

    def run_events(self, all_of_them: bool = False) -> None:
        while self._events and (all_of_them or self._events[0][0] <= time.monotonic()):
            heapq.heappop(self._events)[2]()

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Handle messages and events until it is so. False if it is not within that time."""
        deadline_s = time.monotonic() + timeout_s
        while not done():
            self.run_events()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                self.take(*self.cluster.messages.get(timeout=min(left_s, 0.01)))
        return True

    def take(self, worker: Worker, message: Any) -> None:
        if message is None:
            self._reaped(worker)
            return
        kind, *args = message
        if kind == "up":
            self.cluster.is_up(worker, *args)
            if self.clients is not None:
                self.clients.fill()
        elif kind == "ended":
            rid, how, error, took_s, output = args
            call = self.ledger.ended(worker, rid, how, error, took_s)
            if call is not None and self.clients is not None:
                self.clients.ended(call, how, output)
        elif kind == "ask":
            rid, _room, generation, tokens, address = args
            if self.clients is not None:
                prefill = next(
                    p for (d, p), proxy in self.cluster.proxies.items() if proxy.endpoint == address
                )
                self.clients.again(rid, prefill, generation, tokens)
        elif kind == "report":
            self.reports[worker] = args[0]
        elif kind == "crash":
            self.crashes.append(f"{worker}: {args[0]}")

    def _reaped(self, worker: Worker) -> None:
        self.cluster.lives.remove(worker)
        if not worker.killed:
            self.crashes.append(f"{worker} ended by itself, exit code {worker.process.exitcode}")
            self._restart(worker)
        for call in self.ledger.lost(worker):
            if self.clients is not None:
                self.clients.ended(call, "lost", [])
        if worker.side == "prefill" and worker.peer_id is not None:
            delay_s = self.chance.uniform(0.0, 1.0) if self.storming else 0.0
            self.later(delay_s, lambda: self.cluster.fence(worker))

    # --- faults -----------------------------------------------------------------------------------

    def storm(self) -> None:
        """Clients and faults until the time is up; then everything stands, and whoever was replaced
        is dead."""
        systems = system_prompts(self.chance, Sizes())
        sizes = Sizes(output=(2, 96))  # long answers: more than the pools have room for
        endless = iter(lambda: Conversation(self.chance, systems, sizes), None)
        self.clients = Clients(
            cluster=self.cluster, ledger=self.ledger, chance=self.chance, conversations=endless,
            num_open=STORM_OPEN, sizes=sizes, trouble=0.15, prefix="s",
        )  # fmt: skip
        self.storming = True
        self.clients.fill()
        end_s = time.monotonic() + self.duration_s
        self.later(0.2, self._next_fault)
        self.wait(lambda: time.monotonic() >= end_s, self.duration_s + 1)
        self.storming = False
        self.run_events(all_of_them=True)
        for proxy in self.cluster.proxies.values():
            proxy.heal()
        for worker in list(self.cluster.lives):
            worker.tell("trap", 0)
            worker.resume()
            if self.cluster.current[worker.name] is not worker:
                worker.kill()
        for name in self.cluster.specs:
            if self.cluster.current[name].killed:
                self.cluster.start(name)
        if not self.wait(self._all_up, _UP_S):
            self.crashes.append("not all workers came up after the storm")
        self.clients.paused = True

    def _all_up(self) -> bool:
        current = set(self.cluster.current.values())
        return set(self.cluster.lives) == current and all(worker.up for worker in current)

    def _next_fault(self) -> None:
        if not self.storming:
            return
        name = self.chance.choices(list(_FAULTS), [one[0] for one in _FAULTS.values()])[0]
        _, side, fault = _FAULTS[name]
        proxies = list(self.cluster.proxies.values())
        target = self.chance.choice(proxies) if side == "proxy" else self._victim(side)
        if target is not None and fault(self, target) is not False:
            self.faults[name] += 1
        self.later(self.chance.uniform(0.05, 0.6), self._next_fault)

    def _victim(self, side: str) -> Worker | None:
        """A current life that is up and not stopped."""
        side = side or self.chance.choice(("prefill", "decode"))
        able = [w for w in self.cluster.ready(side) if not w.stopped]
        return self.chance.choice(able) if able else None

    def kill(self, worker: Worker) -> None:
        worker.kill()
        self.later(self.chance.uniform(0.0, 0.5), lambda: self._restart(worker))

    def _restart(self, worker: Worker) -> None:
        if self.cluster.current[worker.name] is worker:
            self.cluster.start(worker.name)

    def stop(self, worker: Worker) -> None:
        stop_s = self.chance.uniform(*STOP_S)
        worker.stop()
        self.later(stop_s, worker.resume)

    def stop_inside(self, worker: Worker) -> None:
        """A prefill worker stands still between two writes of a request, and goes on writing when
        it wakes."""
        worker.stopped = True
        worker.tell("trap", int(signal.SIGSTOP))
        awake_s = self.chance.uniform(1.0, 1.5 * STOP_S[1])
        self.later(awake_s, lambda: worker.tell("trap", 0))
        for later_s in (0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0):  # the trap may close before it hears
            self.later(awake_s + later_s, worker.resume)

    def kill_inside(self, worker: Worker) -> None:
        """A prefill worker dies between two writes of a request."""
        worker.killed = True
        worker.tell("trap", int(signal.SIGKILL))
        self.later(1.0, worker.kill)
        self.later(self.chance.uniform(0.5, 1.5), lambda: self._restart(worker))

    def replace(self, worker: Worker) -> bool:
        """Restarted under its name while it is stopped; then it goes on for a while, or not; then
        it is killed."""
        if len(self.cluster.lives) > len(self.cluster.specs) + 1:
            return False
        worker.stop()
        chance = self.chance
        restart_s = chance.uniform(0.05, 0.8)
        self.later(restart_s, lambda: self._restart(worker))
        if chance.random() < 0.5:
            self.later(restart_s, lambda: self._cut_all(worker.name))
        end_s = restart_s + chance.uniform(0.5, 3.0)
        if chance.random() < 0.6:
            self.later(end_s, worker.resume)
            end_s += chance.uniform(0.2, 3.0)
        self.later(end_s, worker.kill)
        return True

    def _cut_all(self, name: str) -> None:
        for names, proxy in self.cluster.proxies.items():
            if name in names:
                proxy.cut()

    def stall(self, proxy: Proxy) -> None:
        proxy.stall(*self.chance.choice(((True, True), (True, False), (False, True))))
        self.later(self.chance.uniform(0.05, 3.5), proxy.resume)

    def refuse(self, proxy: Proxy) -> None:
        """Cut off for a while: no connection stands and none can be made."""
        proxy.refuse(True)
        proxy.cut()
        self.later(self.chance.uniform(0.05, 3.5), lambda: proxy.refuse(False))

    def sleep(self, worker: Worker) -> None:
        worker.tell("sleep", self.chance.uniform(0.02, 0.6), self.chance.random() < 0.3)

    def cut_data(self, worker: Worker) -> None:
        worker.tell("cut_data", self.cluster.control_ports(), self.chance.choice((0.3, 1.0)))

    # --- calm -------------------------------------------------------------------------------------

    def calm(self, label: str) -> int:
        """One pass without faults; returns how many of its requests did not finish."""
        for worker in self.cluster.current.values():
            worker.tell("flush")
        chance = random.Random(self.seed)
        systems = system_prompts(chance, Sizes())
        conversations = [Conversation(chance, systems, Sizes()) for _ in range(CALM_CONVERSATIONS)]
        before = self.ledger.num_calls - self.ledger.outcomes["finished"]
        self.clients = Clients(
            cluster=self.cluster, ledger=self.ledger, chance=chance, num_open=CALM_OPEN,
            conversations=iter(conversations), sizes=Sizes(), prefix=f"{label}.",
        )  # fmt: skip
        self.clients.fill()
        if not self.wait(lambda: self.clients is not None and self.clients.done, DEADLINE_S + 60):
            self.ledger.violations.append(f"the calm pass {label} did not end")
        return self.ledger.num_calls - self.ledger.outcomes["finished"] - before

    # --- the end ----------------------------------------------------------------------------------

    def report(self, final: bool = False) -> list[tuple[Worker, dict[str, Any]]]:
        self.reports.clear()
        workers = list(self.cluster.current.values())
        for worker in workers:
            worker.tell("report", final)
        if not self.wait(lambda: len(self.reports) == len(workers), _REST_S):
            silent = [w for w in workers if w not in self.reports]
            self.crashes.append(f"no report from {silent}")
        return list(self.reports.items())

    def settle(self) -> list[str]:
        """What is still open, locked, owned or held when it should not be; [] at rest."""
        if not self.wait(lambda: self.ledger.idle, DEADLINE_S + 5):
            for call in self.ledger.calls.values():
                open_s = time.monotonic() - call.began_s
                self.ledger.violations.append(
                    f"{call.rid} room {call.room} is open after {open_s:.1f} s at {call.decode}"
                )
            for rid, (worker, _) in self.ledger.asks.items():
                self.ledger.violations.append(f"{rid} is open at {worker}")
        give_up_s = time.monotonic() + _REST_S
        while True:
            left = [text for worker, report in self.report() if (text := _left(worker, report))]
            if not left or time.monotonic() > give_up_s or self.crashes:
                return left
            self.wait(lambda: False, 0.2)

    def collect(self) -> None:
        """The final word of the lives that are left, in `totals`."""
        for worker, report in self.report(final=True):
            for name in ("mismatches", "late_writes", "pages_verified", "free_pages_checked"):
                self.totals[name] += report[name]
            self.totals["retracted"] += report["stats"].get("retracted", 0)
            self.totals["retries"] += report["stats"].get("retries", 0)
            self.crashes += [f"{worker}: {text}" for text in report["findings"]]


def _left(worker: Worker, report: dict[str, Any]) -> str:
    stats = report["stats"]
    names = (
        "requests", "rooms", "locks", "protected_pages", "pages_owned", "pages_held",
        "pages_quarantined",
    )  # fmt: skip
    left = {name: stats[name] for name in names if stats.get(name)}
    return f"{worker} has {left}: {report['rooms'][:3]}, {report['peers']}" if left else ""


# How often, to whom, and what; a fault that returns False did not happen.
_FAULTS: dict[str, tuple[float, str, Callable[[Run, Any], object]]] = {
    "kill": (2, "", Run.kill), "stop": (2, "", Run.stop),
    "stop between writes": (2, "prefill", Run.stop_inside),
    "kill between writes": (1, "prefill", Run.kill_inside), "replace": (1, "", Run.replace),
    "cut": (3, "proxy", lambda _, proxy: proxy.cut()), "stall": (3, "proxy", Run.stall),
    "refuse": (2, "proxy", Run.refuse), "sleep": (4, "", Run.sleep),
    "cut data": (2, "", Run.cut_data), "flush": (1, "", lambda _, worker: worker.tell("flush")),
}  # fmt: skip


def run(seed: int, duration_s: float, tls: str) -> Row:
    """A storm between two calm passes; what was found."""
    storm = Run(seed, duration_s, tls)
    try:
        for name in storm.cluster.specs:
            storm.cluster.start(name)
        if not storm.wait(storm._all_up, _UP_S):
            raise RuntimeError(f"the workers do not come up: {storm.crashes}")
        storm.calm("before")
        storm.storm()
        left = storm.settle()
        # On a busy machine some request of a pass may miss its deadline; what a storm has broken
        # is broken in all passes.
        failed = min(storm.calm(f"after-{number}") for number in range(2))
        left += storm.settle()
        storm.collect()
    finally:
        storm.cluster.close()
    ledger = storm.ledger
    checks = {
        "no page is wrong": storm.totals["mismatches"] == 0,
        "no free page was written": storm.totals["late_writes"] == 0,
        "each request has one outcome, in time": not ledger.violations,
        "nothing is left": not left,
        "nothing crashed or was found": not storm.crashes,
        "all is served after the storm": not failed,
    }
    return {
        "seed": seed, "tls": tls, "duration_s": duration_s, "checks": checks,
        "requests": ledger.num_calls, "outcomes": dict(ledger.outcomes),
        "prefill_outcomes": dict(ledger.ask_outcomes), "faults": dict(storm.faults),
        "lives": storm.cluster.num_started, **dict(storm.totals),
        "violations": ledger.violations[:20], "left": left, "findings": storm.crashes[:40],
        "errors": dict(ledger.errors.most_common(20)),
    }  # fmt: skip


def verdict(result: Row) -> str:
    off = [name for name, ok in result["checks"].items() if not ok]
    return (
        f"chaos seed {result['seed']} {result['tls']} {result['duration_s']:.0f} s: "
        f"{sum(result['faults'].values())} faults, {result['lives']} lives, {result['requests']} "
        f"requests, {result['mismatches']} mismatches in {result['pages_verified']} pages, "
        f"{result['late_writes']} late writes, {len(result['violations'])} without one outcome in "
        f"time, {len(result['left'])} not at rest: " + ("; ".join(off) if off else "OK")
    )


def chaos(
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Storms, of this seed and the next ones.")] = 1,
    duration: Annotated[float, typer.Option(help="Of a storm, in seconds.")] = 60.0,
    transport: Annotated[
        Way, typer.Option(help="TransportConfig.backend of all workers.")
    ] = Way.nixl,
    json_file: JsonFile = None,
) -> int:
    """Whether any request reads a wrong byte, hangs or leaks while workers die and are cut off."""
    check_outputs(json_file)
    rows = []
    for number in range(seed, seed + seeds):
        way = SHM if transport is Way.shm else "tcp" if number % 2 else "default"
        rows.append(run(number, duration, way))
        for name in ("violations", "left", "findings"):
            for text in rows[-1][name]:
                print(f"{name}: {text}", file=sys.stderr)
        print(verdict(rows[-1]), flush=True)
        command = f"chaos --seed {seed} --seeds {seeds} --duration {duration:g}"
        write(json_file, f"{command} --transport {transport.value}", rows)
    return 0 if all(all(row["checks"].values()) for row in rows) else 1
