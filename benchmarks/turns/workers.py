"""The stand-in's two worker processes, seen from both ends.

The parent starts one prefill and one decode process and has them run passes; each pass has new
nodes over the same pools. Between the two workers lies one pipe, the router's: decode's client
tells prefill of each prompt. No worker outlives its parent: Linux kills it when the parent is gone,
however that came about.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Final

from benchmarks.pair import WorkerError, die_with
from benchmarks.turns.options import RESERVE_TOKENS, PassPlan, StandInOptions
from benchmarks.turns.report import PAGE_STATES, PAGES_LEFT, Measured
from benchmarks.turns.workload import Clients, arrival_times
from prefixkv.cli.demo.workload import Workload
from prefixkv.cli.policies import policy_of

if TYPE_CHECKING:
    from prefixkv import KVPool, Mesh
    from prefixkv.spi import DecodeGroup, PrefillGroup

SWITCH_INTERVAL_S: Final = 0.0005
_SETTLE_S: Final = 10.0  # for acknowledgements under way when the last answer is complete
_JOIN_S: Final = 5.0
_PROGRESS_S: Final = 0.1


class Workers:
    """The parent's end of both workers. Use as a context; leaving it ends them, by force where
    needed.

    Made, used and left on the parent's main thread: the workers' lives hang on it.
    """

    def __init__(self, options: StandInOptions, workload: Workload) -> None:
        context = get_context("spawn")
        asks_in, asks_out = context.Pipe(duplex=False)
        self._ends: dict[str, Connection] = {}
        self._processes: dict[str, SpawnProcess] = {}
        self._early: dict[tuple[str, str], Any] = {}  # came before they were waited for
        # A worker inherits the mask, so that Ctrl-C reaches the parent alone, also while the worker
        # starts. The tracker has to run before: starting it would take SIGINT out of the mask
        # again.
        resource_tracker.ensure_running()
        with _ctrl_c_waits(), contextlib.closing(asks_in), contextlib.closing(asks_out):
            for name, target, args in (
                ("prefill", _prefill_worker, (options, asks_in)),
                ("decode", _decode_worker, (options, asks_out, workload)),
            ):
                ours, theirs = context.Pipe()
                everything = (os.getpid(), theirs, target, args)
                process = context.Process(target=_worker, args=everything, name=name, daemon=True)
                process.start()
                theirs.close()  # the worker's end is the only one, so its death is seen as EOF
                self._ends[name] = ours
                self._processes[name] = process

    def __enter__(self) -> Workers:
        return self

    def wait_ready(self) -> None:
        """Until both have their pools. Raises WorkerError."""
        for name in self._ends:
            self._receive(name, "ready")

    def run(self, plan: PassPlan, progress: Callable[[int], None]) -> Measured:
        """One pass; `progress` hears how many requests have ended. Raises WorkerError."""
        self._ends["prefill"].send(plan)
        endpoint = self._receive("prefill", "endpoint")
        self._ends["decode"].send((plan, endpoint))
        measured: Measured = self._receive("decode", "measured", progress)
        for name, value in self._receive("prefill", "measured").items():
            setattr(measured, name, value)
        return measured

    def _receive(self, name: str, kind: str, progress: Callable[[int], None] | None = None) -> Any:
        """The next message of that kind from that worker, as long as both are well."""
        names = {end: n for n, end in self._ends.items()}
        while (name, kind) not in self._early:
            for end in wait(list(names)):
                assert isinstance(end, Connection)
                sender = names[end]
                try:
                    what, value = end.recv()
                except (EOFError, OSError):
                    self._processes[sender].join(_JOIN_S)
                    code = self._processes[sender].exitcode
                    raise WorkerError(f"the {sender} worker ended with exit code {code}") from None
                if what == "error":
                    raise WorkerError(f"the {sender} worker failed\n{value}")
                if what == "progress":
                    if progress is not None:
                        progress(value)
                else:
                    self._early[sender, what] = value
        return self._early.pop((name, kind))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with _ctrl_c_waits():  # a second one
            for name, process in self._processes.items():
                if kind is None:
                    with contextlib.suppress(OSError):
                        self._ends[name].send(None)
                else:
                    # At once, with no exception in it: one that came while a node is being made or
                    # closed would leave NIXL's thread running into the interpreter's end. Its death
                    # ends its writes.
                    process.terminate()
            for process in self._processes.values():
                process.join(_JOIN_S)
                if process.is_alive():
                    process.kill()
                    process.join()
            for end in self._ends.values():
                end.close()


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C interrupts what follows the block, not the block. On the main thread.

    The mask alone would not do: the signal then goes to any other thread of the process (numpy has
    some), and Python interrupts the main thread all the same.
    """
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


# --- in the worker ------------------------------------------------------------------------------


def _worker(
    parent: int, end: Connection, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    die_with(parent)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        target(end, *args)
    except Exception:
        with contextlib.suppress(OSError):  # the parent may be gone
            end.send(("error", traceback.format_exc()))
        sys.exit(1)


def _make_pools(options: StandInOptions, mesh: Mesh, num_pages: int, order: str) -> list[KVPool]:
    import torch

    from tests.support.patterns import make_pools

    torch.set_num_threads(1)
    return make_pools(
        mesh, num_pages, options.page_size, options.dim, dtype=options.dtype,
        attention=options.attention, order=order,
    )  # fmt: skip


def _prefill_worker(end: Connection, options: StandInOptions, asks: Connection) -> None:
    mesh = options.mesh(options.prefill_tp)
    pools = _make_pools(options, mesh, options.prefill_pages, options.prefill_layout)
    from benchmarks.turns.engine import PrefillEngine
    from prefixkv.config import PrefillConfig
    from prefixkv.spi import PrefillGroup
    from tests.support.patterns import make_patterns

    end.send(("ready", None))
    plan: PassPlan
    while (plan := end.recv()) is not None:
        config = PrefillConfig(
            name="prefill-0", max_running=options.concurrency, transport=options.transport(),
            policy=policy_of(options.policy),
        )  # fmt: skip
        with PrefillGroup(pools, config, mesh) as node:
            end.send(("endpoint", node.endpoint))
            engine = PrefillEngine(
                node, make_patterns(pools, mesh, plan.salt), asks, chunk_tokens=options.chunk_tokens
            )
            engine.run()
            stats = _settled(node)
            measured = {
                "prefill_prompt_tokens": engine.prompt_tokens,
                "prefill_hit_tokens": engine.hit_tokens,
                "bytes_sent": engine.bytes_sent,
                "prefill_locks_at_end": stats["locks"],
                "prefill_pages_at_end": _pages_by_state(stats),
            }
        end.send(("measured", measured))


def _decode_worker(
    end: Connection, options: StandInOptions, asks: Connection, workload: Workload
) -> None:
    mesh = options.mesh(options.decode_tp)
    pools = _make_pools(options, mesh, options.decode_pages, options.decode_layout)
    from benchmarks.turns.engine import END_OF_PASS, DecodeEngine
    from prefixkv.config import DecodeConfig
    from prefixkv.spi import DecodeGroup
    from tests.support.patterns import make_patterns

    told_s = 0.0

    def progress(ended: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _PROGRESS_S or ended == workload.num_requests:
            told_s = time.monotonic()
            end.send(("progress", ended))

    end.send(("ready", None))
    while (message := end.recv()) is not None:
        plan: PassPlan
        plan, endpoint = message
        config = DecodeConfig(
            name="decode-0", max_running=options.concurrency, reserve_tokens=RESERVE_TOKENS,
            cache=plan.cache, transport=options.transport(), policy=policy_of(options.policy),
        )  # fmt: skip
        due = arrival_times(workload, options.seed, plan.rate)
        with DecodeGroup(pools, config, mesh) as node:
            engine = DecodeEngine(
                node=node, patterns=make_patterns(pools, mesh, plan.salt),
                clients=Clients(workload, due, options.concurrency), asks=asks, prefill=endpoint,
                step_s=options.step_ms * 1e-3, verify=plan.verify, progress=progress,
            )  # fmt: skip
            engine.warm_up()
            measured = engine.run()
            asks.send(END_OF_PASS)
            stats = _settled(node)
            node.audit()
        measured.bytes_skipped = measured.hit_tokens * sum(
            pool.layout.kv_bytes_per_token for pool in pools
        )
        measured.evicted_pages = stats["evicted_pages"]
        measured.locks_at_end = stats["locks"]
        measured.pages_at_end = _pages_by_state(stats)
        end.send(("measured", measured))


def _settled(node: DecodeGroup | PrefillGroup) -> dict[str, int]:
    """The node's counts once nothing is locked or held any more, or as they are after
    `_SETTLE_S`."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        stats = node.stats()
        left = stats["locks"] + sum(stats[f"pages_{state}"] for state in PAGES_LEFT)
        if not left or time.monotonic() > deadline_s:
            return stats
        node.wait(0.02)


def _pages_by_state(stats: dict[str, int]) -> dict[str, int]:
    return {state: stats[f"pages_{state}"] for state in PAGE_STATES}
