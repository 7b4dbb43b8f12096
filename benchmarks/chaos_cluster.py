"""The processes of the storm and the wires between them: two prefill and two decode workers that
may be killed, stopped and replaced at any time, one proxy for each pair's control plane, and the
orchestrator's memory of which of them died.

`Cluster.messages` brings (worker, message) from all of them, and (worker, None) once one is dead
*and reaped*, after its last message: only then may any process be told that it is fenced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.chaos_proxy import Proxy
from benchmarks.chaos_worker import Spec, serve
from prefixkv.protocol.ids import PeerId

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.chaos_worker"])


class Worker:
    """One life of one worker. Its pipe has a thread each way, so that a worker that stands still
    holds up no other."""

    def __init__(self, name: str, spec: Spec, messages: queue.SimpleQueue[Any]) -> None:
        forkserver: Any = vars(multiprocessing.forkserver)["_forkserver"]

        self.name = name
        self.side = spec.side
        self.peer_id: PeerId | None = None  # known once it is up
        self.endpoint = ""
        self.stopped = False
        self.killed = False
        self.dead = False  # and reaped
        self._messages = messages
        self._pipe, theirs = _context.Pipe()
        forkserver.ensure_running()
        self.process = _context.Process(
            target=serve, args=(theirs, forkserver._forkserver_pid, spec), daemon=True
        )
        self.process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._write, args=(self._pipe,), daemon=True).start()
        self.reader = threading.Thread(target=self._read, args=(self._pipe,), daemon=True)
        self.reader.start()

    def __repr__(self) -> str:
        return f"{self.name}#{self.peer_id.incarnation if self.peer_id else '?'}"

    @property
    def up(self) -> bool:
        return self.peer_id is not None and not self.killed and not self.dead

    def tell(self, *message: Any) -> None:
        """Queue a message; lost if the worker is dead or dies first."""
        self._outbox.put(message)

    def stop(self) -> None:
        self.stopped = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.stopped = False
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; its (worker, None) follows when it has been reaped."""
        self.killed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self.dead and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def _write(self, pipe: Connection) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                pipe.send(message)
            except OSError:
                return

    def _read(self, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._messages.put((self, pipe.recv()))
        self.process.join()
        self.dead = True
        self._outbox.put(None)
        self._messages.put((self, None))


class Cluster:
    """Names, and the worker that lives under each. Used by the orchestrator's thread."""

    def __init__(self, specs: dict[str, Spec]) -> None:
        self.specs = specs
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.current: dict[str, Worker] = {}
        self.lives: list[Worker] = []  # that have not been reaped
        self.num_started = 0
        self.proxies: dict[tuple[str, str], Proxy] = {
            (d, p): Proxy() for d in self.names("decode") for p in self.names("prefill")
        }

    def names(self, side: str) -> list[str]:
        return [name for name, spec in self.specs.items() if spec.side == side]

    def start(self, name: str) -> Worker:
        """A new life under this name; the one before need not be dead."""
        worker = Worker(name, self.specs[name], self.messages)
        self.current[name] = worker
        self.lives.append(worker)
        self.num_started += 1
        return worker

    def is_up(self, worker: Worker, peer_id: PeerId, endpoint: str) -> None:
        """It says so. Connections to a prefill worker of this name go to it from now on."""
        worker.peer_id, worker.endpoint = peer_id, endpoint
        if worker.side == "prefill" and self.current[worker.name] is worker:
            for decode in self.names("decode"):
                self.proxies[decode, worker.name].point_to(endpoint)

    def address(self, decode: str, prefill: str) -> str:
        return self.proxies[decode, prefill].endpoint

    def control_ports(self) -> list[int]:
        ports = [proxy.port for proxy in self.proxies.values()]
        return ports + [int(w.endpoint.rpartition(":")[2]) for w in self.lives if w.endpoint]

    def ready(self, side: str) -> list[Worker]:
        """The current lives of that side that are up."""
        return [
            w for name in self.names(side) if (w := self.current.get(name)) is not None and w.up
        ]

    def fence(self, dead: Worker) -> None:
        """Tell every decode worker, replaced ones too, that this prefill process has been
        reaped."""
        assert dead.dead
        assert dead.peer_id is not None
        for worker in self.lives:
            if worker.side == "decode":
                worker.tell("fence", *dead.peer_id)

    def close(self) -> None:
        """Kill and reap whoever is left, and end the proxies."""
        for worker in self.lives:
            worker.resume()
            worker.kill()
        for worker in self.lives:
            worker.reader.join()
        for proxy in self.proxies.values():
            proxy.close()
