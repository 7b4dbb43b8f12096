"""Processes of a test: one harness for all of them.

- `Child`: a fork of a server that has everything imported but no agent, which saves two seconds. It
  obeys calls over a pipe: `serve(pipe, ...)` runs there and answers by the methods of an object.
- `Command`: a program with a command line. Its output is read as it comes. `run_python` runs one to
  its end.

Both are killed when their block is left, and by the kernel when the test run dies; no wait for them
is without a limit, and what they wrote to stderr stands in the error of a test that fails on them.
A new process that a test needs is a subclass, or a `serve` function, beside that test.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any, Self

from tests.support import wires
from tests.support.patience import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
INHERITED = ("UCX_TLS", wires.VARIABLE)
"""Variables that a test may set after the fork server has started; each child takes them over."""
SHOWN_CHARS = 4000  # of stderr, in the text of an error
_LAST_WORDS_S = 1.0

_PR_SET_PDEATHSIG = 1
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["prefixkv.assembly", "tests.support.node_pair", "tests.support.transport_pools"]
)


class Signalled:
    """A process that can be sent signals."""

    pid: int

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    @property
    def stopped(self) -> bool:
        return state(self.pid) == "T"


def state(pid: int, thread: str = "") -> str:
    """The kernel's letter for a process or one thread of it: R, S, T, ..."""
    with open(f"/proc/{pid}/{f'task/{thread}/' if thread else ''}stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, also while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Asked after prctl: a parent that died before it sends no signal, but is no parent any more.
    if os.getppid() != parent:
        os._exit(1)


# --- children that obey calls ---------------------------------------------------------------------


class Child(Signalled):
    """The test's end. `serve(pipe, *args)` runs in the child; what it sends first is `hello`."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self._stderr = tempfile.NamedTemporaryFile(prefix="stderr-")  # noqa: SIM115
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        _forkserver.ensure_running()
        # Children are the server's: they die with it, and it dies with us.
        head = (_forkserver._forkserver_pid, self._stderr.name, env)
        self.process = _context.Process(target=_run, args=(*head, serve, theirs, args), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.hello = self._receive()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the object that the child serves. AssertionError if it raises, EOFError
        if the child has died."""
        self._pipe.send((name, args, options))
        kind, value = self._receive()
        assert kind == "ok", value
        return value

    def kill(self) -> None:
        """Kill it as the kernel would."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == -signal.SIGKILL, self.stderr()

    def end(self) -> None:
        """See it gone, whatever its state is."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive()
        self._pipe.close()
        self._stderr.close()

    def stderr(self) -> str:
        """The end of what it has written there."""
        return Path(self._stderr.name).read_text(errors="replace")[-SHOWN_CHARS:]

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), f"the child does not answer\n{self.stderr()}"
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(PATIENCE_S)
            raise EOFError(
                f"the child ended, code {self.process.exitcode}\n{self.stderr()}"
            ) from None


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


def answer(pipe: Any, served: Any) -> None:
    """In the child: answer one call of the test by a method of `served`."""
    name, args, options = pipe.recv()
    try:
        said = ("ok", getattr(served, name)(*args, **options))
    except Exception:
        said = ("error", traceback.format_exc())
    pipe.send(said)


def obey(pipe: Any, served: Any) -> None:
    """In the child: answer calls until one of them has set `served.closed`."""
    while not getattr(served, "closed", False):
        answer(pipe, served)


def _run(
    parent: int, stderr: str, env: dict[str, str], serve: Callable[..., None], pipe: Any,
    args: tuple[Any, ...],
) -> None:  # fmt: skip
    die_with(parent)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(env)
    serve(pipe, *args)


# --- programs with a command line -----------------------------------------------------------------


# `die_with`, before the program takes this process over and keeps its id and its parent.
_PROLOGUE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Command(Signalled):
    """A program with its output as it comes, in `out` and `err`. Leaving the context kills it.

    It dies with the thread that starts it: start it in the main thread.
    """

    def __init__(self, *command: str, **environ: str) -> None:
        """`environ` is set on top of this process's variables, without those of prefixkv."""
        clean = {name: text for name, text in os.environ.items() if not name.startswith("PREFIXKV")}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROLOGUE, str(os.getpid()), *command],
            cwd=ROOT, env={**clean, "PYTHONPATH": str(ROOT), **environ}, text=True,
            errors="replace",  # it may be killed in the middle of a letter
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self.process.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=_read, args=(stream, lines))
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def line(self, beginning: str = "") -> str:
        """Wait for the first line of its output that begins so. AssertionError if it ends first."""
        found: list[str] = []

        def look() -> None:
            # Whether it has ended is asked before the lines: what it wrote last counts.
            ended = self.process.poll() is not None
            if ended:
                self._join(_LAST_WORDS_S)
            found.extend(line for line in tuple(self.out) if line.startswith(beginning))
            assert found or not ended, self.shown()

        until(lambda: found, step=look, state=self.shown)
        return found[0]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and see it gone."""
        self.process.kill()
        assert self.ended() == -signal.SIGKILL, self.shown()

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for its end. Returns its exit status."""
        try:
            status = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended\n{self.shown()}") from None
        self._join(_LAST_WORDS_S)
        return status

    def shown(self) -> str:
        """The end of what it has written."""
        return f"{self.process.args}\n{''.join(self.out + self.err)[-SHOWN_CHARS:]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._join(PATIENCE_S)

    def _join(self, patience_s: float) -> None:
        """Wait for the end of its output, which processes of its own may keep open."""
        for reader in self._readers:
            reader.join(patience_s)


def _read(stream: Any, lines: list[str]) -> None:
    with stream:
        for line in stream:
            lines.append(line)


def run_python(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, which ends by itself, and what it has written."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S,
        check=False, cwd=ROOT, env={**os.environ, **environ},
    )  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of lines of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]
