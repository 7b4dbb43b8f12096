"""The transport over NIXL, as other threads see it. One thread, which runs `nixl/loop.py`, makes
every NIXL call.

The thread waits at its inbox, so a call from outside wakes it at once, whatever it waits for. (An
eventfd would do for the idle wait, but a poll on it cannot time out in microseconds; a lock can.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from typing import Final

from prefixkv.config import TransportConfig
from prefixkv.errors import (
    CallerError,
    ClosedError,
    InternalError,
    TransferTimeoutError,
)
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Sink
from prefixkv.transport.nixl.agent import bare
from prefixkv.transport.nixl.loop import Command, NixlLoop
from prefixkv.transport.queued import Queued
from prefixkv.transport.wait import Inbox

_DEFAULTS: Final = TransportConfig()
_START_TIMEOUT_S: Final = 120.0
_CLOSE_TIMEOUT_S: Final = 120.0


class NixlTransport(Queued[NixlLoop]):
    """The contract of `base.Transport`, kept over a NIXL agent of its own.

    The owner creates and closes it; the other methods may be called from any thread, queue and
    return. The memory of `layout`, `staging` and `state`, all of it on the layout's device, is
    registered here and has to stay until `close()` has returned.
    """

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
        staging: StagingArea | None = None, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Start the thread, create the agent in it and register the memory; takes 0.05 to 0.5 s.

        Raises:
            ConfigError: a layout or an area breaks its laws.
            Exception: whatever NIXL raises when it cannot start.
        """
        layout.validate()
        if staging is not None:
            staging.validate()
        if state is not None:
            state.validate()
        self._me = me
        self._inbox: Inbox[Command] = Inbox()
        # Over `_closed` and the inbox: nothing is queued behind the closing command.
        self._lock = threading.Lock()
        self._closed = False
        # Set by the thread before it ends, read after the join.
        self._close_error: Exception | None = None
        started: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run,
            args=(layout, sink, config, staging, state, started),
            name=f"prefixkv-transport-{me.name}",
            daemon=True,
        )
        # NIXL's objects are created, used and destroyed by this thread alone. A failure to start
        # comes back through `started`, so that the caller gets it as its own exception.
        self._thread.start()
        try:
            outcome = started.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            raise TransferTimeoutError(f"NIXL did not start within {_START_TIMEOUT_S} s") from None
        if isinstance(outcome, Exception):
            self._closed = True
            self._thread.join(_CLOSE_TIMEOUT_S)
            raise outcome
        self._metadata = outcome

    @property
    def metadata(self) -> bytes:
        """Metadata of the agent as it was at the start. A later `renew` does not change it: only a
        side that peers do not write to is renewed."""
        return self._metadata

    def expect(self, num_rooms: int) -> None:
        """See `base.Transport.expect`."""
        self._call(lambda loop: loop.expect(num_rooms))

    def settle(self, token: Hashable, for_s: float) -> None:
        """See `base.Transport.settle`."""
        self._call(lambda loop: loop.settle(token, for_s))

    def renew(self) -> None:
        """See `base.Transport.renew`."""
        self._call(lambda loop: loop.renew(), or_raise=False)

    def close(self) -> None:
        """See `base.Transport.close`. May be called again.

        Raises:
            CallerError: called from the sink, by the very thread that is to be joined.
            InternalError: the agent was not destroyed: then our writes are not fenced.
        """
        if threading.current_thread() is self._thread:
            raise CallerError("close() was called from the transport's own sink")
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        # Outside the lock: the thread's sink may call methods of ours, which take it.
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(
                f"the transport thread is still in a NIXL call after {_CLOSE_TIMEOUT_S} s"
            )
        if self._close_error is not None:
            raise self._close_error

    def _call(self, command: Command, or_raise: bool = True) -> None:
        """Queue a command for the thread. Closed: ClosedError, or nothing with `or_raise` False."""
        with self._lock:
            if not self._closed:
                self._inbox.put(command)
            elif or_raise:
                raise ClosedError(f"the transport of {self._me.name} is closed")

    def _run(
        self, layout: KVLayout, sink: Sink, config: TransportConfig, staging: StagingArea | None,
        state: StateLayout | None, started: queue.SimpleQueue[bytes | Exception],
    ) -> None:  # fmt: skip
        """Run the thread. All NIXL objects hang on `loop`, so they die when this frame ends."""
        try:
            loop = NixlLoop(self._me, layout, sink, config, staging, state)
            started.put(loop.metadata)
        # `bare`: a traceback would keep this frame, and with it the agent.
        except BaseException as error:
            started.put(bare(error))
            return
        loop.serve(self._inbox)
        self._close_error = loop.destroy()
