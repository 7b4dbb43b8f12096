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
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Sink
from prefixkv.transport.shm.loop import ShmLoop
from prefixkv.transport.threaded import ThreadedTransport

_DEFAULTS: Final = TransportConfig()


class ShmTransport(ThreadedTransport[ShmLoop]):
    """The contract of `base.Transport`, by copies into mapped memory of peers. A job can be
    cancelled between two parts, of `post_bytes`. `renew` is never needed."""

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
        staging: StagingArea | None = None, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Start the thread; the memory is offered to peers if all of it is shared. Raises
        ConfigError: a layout or an area breaks its laws, or the system has no such sockets."""
        try:
            super().__init__(me, layout, staging, state)
            try:
                self._loop = ShmLoop(me, layout, sink, config, staging, state)
            # The descriptor of the inbox: no thread will ever close it.
            except BaseException:
                self._inbox.close()
                raise
        except OSError as error:
            raise ConfigError(f"the shm transport cannot start: {error}") from error
        self.metadata = self._loop.offer
        self._thread = threading.Thread(
            target=self._run, name=f"prefixkv-shm-{me.name}", daemon=True
        )
        try:
            self._start_thread()
        except BaseException:
            self._loop.destroy()
            raise

    def expect(self, num_rooms: int) -> None:
        """Only check that the transport is open: tags wake its thread by themselves."""
        self._call(lambda loop: None)

    def settle(self, token: Hashable, for_s: float) -> None:
        """Emit Settled as soon as all tags that were sent are read. No kernel holds a copy back, so
        `for_s` is not needed."""
        self._call(lambda loop: loop.settle(token))

    def renew(self) -> None:
        """Do nothing: no job ends undrained."""

    def _run(self) -> None:
        self._loop.serve(self._inbox)
        self._loop.destroy()
