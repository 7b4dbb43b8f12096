"""Processes of a test, each obeying calls over a pipe.

They are forked from a server that has everything imported but no agent, which saves two seconds
each. None outlives its test: the kernel kills them when the server is gone, and the server goes
with us.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.forkserver import _forkserver
from typing import Any

from tests.models import wires
from tests.models.patience import PATIENCE_S

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["prefixkv.runtime.nodes", "tests.models.node_pair", "tests.models.transport_pools"]
)
_PR_SET_PDEATHSIG = 1
INHERITED = ("UCX_TLS", wires.VARIABLE)
"""Set by a test after the server was forked."""


class Child:
    """The test's end. `serve(pipe, *args)` runs in the child; what it sends first is `hello`."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        _forkserver.ensure_running()
        self.process = _context.Process(
            target=_run, args=(_forkserver._forkserver_pid, env, serve, theirs, args), daemon=True
        )
        self.process.start()
        theirs.close()
        self.hello = self._receive()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """What the child answers. AssertionError for an error of its own."""
        self._pipe.send((name, args, options))
        kind, value = self._receive()
        assert kind == "ok", value
        return value

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

    def end(self) -> None:
        """Whatever its state is: gone."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive()
        self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the child does not answer"
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(PATIENCE_S)
            raise EOFError(f"the child ended, code {self.process.exitcode}") from None


def answer(pipe: Any, served: Any) -> None:
    """One call of the test, answered by a method of `served`."""
    name, args, options = pipe.recv()
    try:
        said = ("ok", getattr(served, name)(*args, **options))
    except Exception as error:
        said = ("error", repr(error))
    pipe.send(said)


@contextmanager
def children(make: Callable[..., Any]) -> Iterator[Any]:
    """Yields a starter of processes, which takes what `make` takes; all have ended when the block
    is left."""
    started: list[Child] = []

    def start(*args: Any, **options: Any) -> Any:
        started.append(make(*args, **options))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.end()


def state(pid: int, thread: str = "") -> str:
    """What the kernel says of a process or one thread of it: R, S, T, ..."""
    with open(f"/proc/{pid}/{f'task/{thread}/' if thread else ''}stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _run(
    parent: int, env: dict[str, str], serve: Callable[..., None], pipe: Any, args: tuple[Any, ...]
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while we are stopped
    if os.getppid() != parent:
        os._exit(1)
    os.environ.update(env)
    serve(pipe, *args)
