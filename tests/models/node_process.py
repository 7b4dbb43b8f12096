"""A PrefillNode or DecodeNode and its stand-in engine in a process of their own, obeying calls over
a pipe.

The processes are forked from a server that has everything imported but no agent. None outlives its
test: the kernel kills them when the server is gone, and the server goes with us.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from prefixkv.protocol.ids import PeerId
from tests.models.patience import PATIENCE_S, SkippableClock

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["prefixkv.runtime.nodes", "tests.models.node_pair", "tests.models.transport_pools"]
)
_PR_SET_PDEATHSIG = 1


class SignalSelf:
    """A device event that sends its own process a signal the first time it is asked, and then is
    done.

    The transport's thread asks, between two writes: what was posted before is under way, and what
    is posted next is posted after whatever the signal did.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        # To this thread: one for the process would be taken by another, and we might go on for a
        # moment.
        signal.pthread_kill(threading.get_ident(), self.number)
        return True


class Never:
    """A device event that is never done."""

    def query(self) -> bool:
        return False


EVENTS = {"stop": SignalSelf(signal.SIGSTOP), "kill": SignalSelf(signal.SIGKILL), "never": Never()}


class _Served:
    """What a call on the pipe may call, in the child."""

    def __init__(self, side: str, pool: dict[str, Any], config: Any) -> None:
        from prefixkv.runtime.nodes import DecodeNode, PrefillNode
        from tests.models.node_pair import DecodeDriver, PrefillDriver, make_pool

        self.node: Any
        self.driver: Any
        self.clock = SkippableClock()
        self.clock.install()
        if side == "prefill":
            self.node = PrefillNode(make_pool(**pool), config)
            self.driver = PrefillDriver(self.node)
        else:
            self.node = DecodeNode(make_pool(**pool), config)
            self.driver = DecodeDriver(self.node, lambda *ask: None)  # the test tells prefill

    def set(self, **attributes: Any) -> None:
        """Attributes of the driver."""
        for name, value in attributes.items():
            setattr(self.driver, name, value)

    def get(self, name: str) -> Any:
        """An attribute of the driver; errors as text."""
        value = getattr(self.driver, name)
        if isinstance(value, dict):
            return {key: repr(v) if isinstance(v, Exception) else v for key, v in value.items()}
        return value

    def names(self, name: str) -> list[str]:
        """The keys of an attribute of the driver."""
        return list(getattr(self.driver, name))

    def ready(self, rid: str, chunk: int, event: str) -> None:
        """Chunk number `chunk` of this request waits for that event."""
        self.driver.ready[rid, chunk] = EVENTS[event]

    def add(self, *args: Any) -> None:
        self.driver.add(*args)

    def submit(self, *args: Any, **options: Any) -> None:
        self.driver.submit(*args, **options)

    def abort(self, rid: str) -> bool:
        known: bool = self.node.abort(rid)
        return known

    def skip(self, seconds: float) -> None:
        self.clock.skip(seconds, [self.node])

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.node.stats()
        return stats

    def check_at_rest(self) -> None:
        from tests.models.node_pair import node_at_rest

        assert self.driver.mismatches == 0
        node_at_rest(self.node)


def _serve(
    pipe: Any, parent: int, side: str, pool: dict[str, Any], config: Any, env: dict[str, str]
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while we are stopped
    if os.getppid() != parent:
        os._exit(1)
    os.environ.update(env)
    served = _Served(side, pool, config)
    pipe.send((served.node.peer_id, getattr(served.node, "endpoint", "")))
    while True:
        served.driver.step()
        busy = bool(getattr(served.driver, "running", None)) or (
            side == "prefill" and bool(served.driver.computing) and not served.driver.hold
        )
        wait([pipe, served.node.fileno()], 0 if busy else 1.0)
        while pipe.poll():
            name, args, options = pipe.recv()
            if name == "close":
                from prefixkv.runtime import control_thread as kv_manager

                kv_manager._FAREWELL_S = PATIENCE_S  # it is to arrive, however slow the machine
                served.node.close()
                pipe.send(("ok", None))
                return
            try:
                answer = ("ok", getattr(served, name)(*args, **options))
            except Exception as error:
                answer = ("error", repr(error))
            pipe.send(answer)


class NodeProcess:
    """The test's end. `call` any method of `_Served`; signals by `kill`, `stop` and `resume`."""

    def __init__(self, side: str, config: Any, pool: dict[str, Any] | None = None) -> None:
        self._pipe, theirs = _context.Pipe()
        env = {name: os.environ[name] for name in ("UCX_TLS",) if name in os.environ}
        from multiprocessing.forkserver import _forkserver

        _forkserver.ensure_running()
        self.process = _context.Process(
            target=_serve,
            args=(theirs, _forkserver._forkserver_pid, side, pool or {}, config, env),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.peer_id: PeerId
        self.endpoint: str
        self.peer_id, self.endpoint = self._receive()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        self._pipe.send((name, args, options))
        kind, value = self._receive()
        assert kind == "ok", value
        return value

    def close(self) -> None:
        """Close its node cleanly, and see it end."""
        self.call("close")
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == 0

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == -signal.SIGKILL

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def stopped(self) -> bool:
        with open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"

    def end(self) -> None:
        """Whatever its state is: gone."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive()
        self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the child does not answer"
        return self._pipe.recv()


@contextmanager
def node_processes() -> Iterator[Any]:
    """Yields a starter of processes, `start(side, config, pool)`; all have ended when the block is
    left."""
    started: list[NodeProcess] = []

    def start(side: str, config: Any, pool: dict[str, Any] | None = None) -> NodeProcess:
        started.append(NodeProcess(side, config, pool))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.end()
