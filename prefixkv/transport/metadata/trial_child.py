"""The process that loads peers' metadata on trial; `trial.py` starts it. Run as a file, with
nothing of prefixkv imported, so that it is small and soon ready.

Each trial has an agent of its own, created before it is wanted. Messages go over the socket that is
descriptor 0, one per line: "ready" when a trial may come, then "ok" or "no" and why. A trial is a
length, 4 bytes little-endian, and metadata.

Arguments: the file of NIXL's bindings, the parent's process id, the seconds that one trial may
take. UCX's settings are in the environment.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve trials of metadata, as the child process, until the parent closes the socket or
    ends."""
    bindings_file, parent, limit_s = sys.argv[1:]
    # Whatever becomes of the parent, this process ends with it, also out of a native call. Checked
    # after that: a parent that ended before would have sent no signal.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dying is what this process is for
    words = socket.socket(fileno=0)
    spec = importlib.util.spec_from_file_location("_bindings", bindings_file)
    assert spec is not None
    assert spec.loader is not None
    bindings: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bindings)
    number = 0
    while True:
        # An agent per trial, so that nothing of one peer is left when the next one's is loaded.
        agent, backend = _agent(bindings, f"trial{number}")
        words.sendall(b"ready\n")
        metadata = _receive(words, int.from_bytes(_receive(words, 4), "little"))
        signal.setitimer(signal.ITIMER_REAL, float(limit_s))  # its signal ends the process
        # What the serving process does with metadata: load, connect, forget.
        try:
            name = agent.loadRemoteMD(metadata)
            agent.makeConnection(name.decode(), [backend])
            agent.invalidateRemoteMD(name.decode())
            answer = "ok"
        except Exception as error:
            answer = f"no {error}"
        # Answered before the agent is destroyed, under the alarm still: what destroying it does to
        # this process shows in the next trial's `is_ready`.
        words.sendall(answer.replace("\n", " ").encode() + b"\n")
        del agent
        signal.setitimer(signal.ITIMER_REAL, 0)
        number += 1


def _agent(bindings: Any, name: str) -> tuple[Any, Any]:
    config = bindings.nixlAgentConfig()
    config.useProgThread = config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_RW
    agent = bindings.nixlAgent(name, config)
    return agent, agent.createBackend("UCX", {})


def _receive(words: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly this many bytes in the child process of trials; end it if the parent has
    closed the socket."""
    received = bytearray()
    while len(received) < num_bytes:
        some = words.recv(num_bytes - len(received))
        if not some:
            os._exit(0)  # the parent closed it
        received += some
    return bytes(received)


if __name__ == "__main__":
    main()
