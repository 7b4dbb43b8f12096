"""The transport over shared memory, as other threads see it: for two sides on one host, with pools
on the CPU. One thread, which runs `shm/loop.py`, makes every copy.

The memory that is written to has to be shared (`KVPool.create(shared=True)`,
`memory.shared.shared_bytes`); that which is read from does not.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Final

from prefixkv.config import TransportConfig
from prefixkv.errors import CallerError, ClosedError, ConfigError, InternalError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Sink, TransportEvent
from prefixkv.transport.queued import Queued
from prefixkv.transport.shm.loop import Command, Met, ShmLoop
from prefixkv.wakeups import Inbox

_DEFAULTS: Final = TransportConfig()
_CLOSE_TIMEOUT_S: Final = 120.0


class ShmTransport(Queued[ShmLoop]):
    """Keeps the contract of `base.Transport`. Of the config `post_bytes` (of a part, between two of
    which a job can be cancelled) and the pauses count; `renew` is never needed."""

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
        staging: StagingArea | None = None, state: StateLayout | None = None,
        met: Met | None = None,
    ) -> None:  # fmt: skip
        """Start the thread; the memory is offered to peers where all of it is shared.

        `met` is called by the thread with each peer that was added or connected anew: its memory is
        mapped, or why not. Where it returns True of one that is not, another has it now.

        Raises: ConfigError for a layout or an area that breaks its laws, or a system without such
        sockets.
        """
        layout.validate()
        for more in (staging, state):
            if more is not None:
                more.validate()
        self._me = me
        try:
            self._inbox: Inbox[Command | None] = Inbox()
            try:
                self._loop = ShmLoop(me, layout, sink, config, staging, state, met)
            except BaseException:
                self._inbox.close()
                raise
        except OSError as error:
            raise ConfigError(f"the shm transport cannot start: {error}") from error
        self.metadata = self._loop.offer
        self._lock = threading.Lock()  # no command is queued behind the one that closes
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"prefixkv-shm-{me.name}", daemon=True
        )
        self._thread.start()

    def expect(self, num_rooms: int) -> None:
        """Tags wake the thread by themselves: nothing to do."""
        self._call(lambda loop: None)

    def settle(self, token: Hashable, for_s: float) -> None:
        """Answered as soon as all tags that were sent are read: no kernel holds a copy back."""
        self._call(lambda loop: loop.settle(token))

    def say(self, event: TransportEvent) -> None:
        """Tell the sink, from the transport's thread. Closed: no-op."""
        self._call(lambda loop: loop.emit(event), or_raise=False)

    def renew(self) -> None:
        """No job ends undrained here: no-op."""

    def close(self) -> None:
        """See `base.Transport.close`. May be called again. Raises InternalError if the thread is
        still in a copy."""
        if threading.current_thread() is self._thread:
            raise CallerError("close() was called from the transport's own sink")
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(
                f"the shm transport's thread has not ended after {_CLOSE_TIMEOUT_S} s"
            )
        self._inbox.close()

    def _call(self, command: Command, or_raise: bool = True) -> None:
        with self._lock:
            if not self._closed:
                self._inbox.put(command)
            elif or_raise:
                raise ClosedError(f"the transport of {self._me.name} is closed")

    def _run(self) -> None:
        self._loop.serve(self._inbox)
        self._loop.destroy()
