"""The thread that asks the kernel whether a peer's process is dead (`death.py`).

    control thread --submit--> prover's thread: a few files of /proc --tell--> control thread

A look reads a few files; if the process is dead and may have written here over TCP, also the
kernel's tables of connections. It reports nothing if nothing is proved: the control object asks
again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from prefixkv.config import ControlConfig
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import ProcessLife
from prefixkv.runtime.death import HeldLife, has_read_the_dead, is_dead

_log = logging.getLogger("prefixkv.control")

_JOIN_LIMIT_S: Final = 30.0

Prove = Callable[[PeerId], None]


class Prover:
    """The thread that proves deaths. `submit` and `close` are the control thread's.

    `tell` is called from the prover's own thread, for each peer that is dead and has nothing on its
    way here. `is_written_to`: peers write into memory of this process.
    """

    def __init__(self, name: str, timing: ControlConfig, is_written_to: bool, tell: Prove) -> None:
        self._name = name
        self._is_written_to = is_written_to
        self._tell = tell
        self._own_life: HeldLife | None = None
        if timing.prove_death:
            try:
                self._own_life = HeldLife()
            except OSError as error:
                _log.info("%s: no peer will be told which process this is: %r", name, error)
        # Queued or being looked at; added by the control thread, discarded by the other.
        self._asked: set[PeerId] = set()
        self._queue: queue.SimpleQueue[tuple[PeerId, ProcessLife] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # from the first `submit` on

    @property
    def life(self) -> ProcessLife | None:
        """Identity of this process for Hello, None if it is not said."""
        return None if self._own_life is None else self._own_life.life

    def submit(self, peer: PeerId, life: ProcessLife) -> None:
        """Have a peer's process looked at soon. No-op while it is queued or being looked at."""
        if peer in self._asked:
            return
        # Started on the first use: most nodes never doubt a peer.
        if self._thread is None:
            name = f"prefixkv-prover-{self._name}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # it is asked again
                _log.error("whether %s is dead cannot be looked at: %s", peer, error)
                return
            self._thread = thread
        # Before it is queued: the thread discards it at its end, and must find it here.
        self._asked.add(peer)
        self._queue.put((peer, life))

    def close(self, *, ended: bool = True) -> None:
        """Join the thread, and let the identity go. Idempotent. `ended`: as for
        `HeldLife.close`."""
        # Behind all that is queued: looks that have begun are finished.
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_LIMIT_S)
        if self._own_life is not None:
            self._own_life.close(ended=ended)
            self._own_life = None

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            peer, life = asked
            try:
                # Dead, and nothing on its way: only both together prove that nothing of it lands
                # any more.
                if is_dead(life) and (not self._is_written_to or has_read_the_dead()):
                    self._tell(peer)
            except Exception as error:  # what /proc holds is not as it is known to be
                _log.error("whether %s is dead cannot be told: %r", peer, error)
            self._asked.discard(peer)
