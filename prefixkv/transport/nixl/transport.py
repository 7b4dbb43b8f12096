"""The transport over NIXL, as other threads see it. One thread, which runs `nixl/loop.py`, makes
every NIXL call. It waits at its inbox, so a call from outside wakes it at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from typing import Final

from prefixkv.config import TransportConfig
from prefixkv.errors import TransferTimeoutError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Sink
from prefixkv.transport.loop import bare
from prefixkv.transport.nixl.loop import NixlLoop
from prefixkv.transport.threaded import CLOSE_TIMEOUT_S, ThreadedTransport

_DEFAULTS: Final = TransportConfig()
_START_TIMEOUT_S: Final = 120.0


class NixlTransport(ThreadedTransport[NixlLoop]):
    """The contract of `base.Transport`, over an agent of its own.

    The memory of `layout`, `staging` and `state`, all of it on the layout's device, is registered
    here and has to stay until `close()` has returned.
    """

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
        staging: StagingArea | None = None, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Start the thread, create the agent in it and register the memory; may take .5 s. Raises
        ConfigError if a layout or an area breaks its laws, and what NIXL raises when it cannot
        start."""
        super().__init__(me, layout, staging, state)
        started: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run,
            args=(layout, sink, config, staging, state, started),
            name=f"prefixkv-transport-{me.name}",
            daemon=True,
        )
        # NIXL's objects are created, used and destroyed by this thread alone. A failure to start
        # comes back through `started`, so that the caller gets it as its own exception.
        self._start_thread()
        try:
            outcome = started.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            # It ends as soon as it has started; until then it may wait on the inbox's descriptor.
            self._closed = True
            self._inbox.put(None)
            raise TransferTimeoutError(f"NIXL did not start within {_START_TIMEOUT_S} s") from None
        if isinstance(outcome, Exception):
            self._closed = True
            self._thread.join(CLOSE_TIMEOUT_S)
            self._inbox.close()
            raise outcome
        self._metadata = outcome

    @property
    def metadata(self) -> bytes:
        """Metadata of the agent at the start. A later `renew` does not change it: only a side that
        peers do not write to is renewed."""
        return self._metadata

    def expect(self, num_rooms: int) -> None:
        self._call(lambda loop: loop.expect(num_rooms))

    def settle(self, token: Hashable, for_s: float) -> None:
        """Have the thread poll for `for_s` seconds, then emit Settled."""
        self._call(lambda loop: loop.settle(token, for_s))

    def renew(self) -> None:
        self._call(lambda loop: loop.renew(), or_raise=False)

    def _run(
        self, layout: KVLayout, sink: Sink, config: TransportConfig, staging: StagingArea | None,
        state: StateLayout | None, started: queue.SimpleQueue[bytes | Exception],
    ) -> None:  # fmt: skip
        """All NIXL objects hang on `loop`, so they die when this frame ends."""
        try:
            loop = NixlLoop(self._me, layout, sink, config, staging, state)
            started.put(loop.metadata)
        # `bare`: a traceback would keep this frame, and with it the agent.
        except BaseException as error:
            started.put(bare(error))
            return
        loop.serve(self._inbox)
        self._close_error = loop.destroy()
