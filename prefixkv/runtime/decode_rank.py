"""A decode rank above 0: its own pool, agent and rooms; rank 0 decides what to do with them."""

from __future__ import annotations

from contextlib import ExitStack

from prefixkv.config import DecodeConfig
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.windows import WindowPages
from prefixkv.paging import Pages
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.row_log import RowFollower
from prefixkv.runtime.decode_transfers import DecodeTransfers
from prefixkv.runtime.following_rank import FollowingRank
from prefixkv.runtime.host_copies import HostMemory
from prefixkv.runtime.rank_spec import RankSpec, rank_sizes
from prefixkv.settings import check_kind


class DecodeRank(FollowingRank):
    """A decode rank above 0. Used from one thread.

    Args:
        pool, state: this rank's shares, with as many pages and slots as rank 0's. They must outlive
            this.
        config: rank 0's.
        rank: from 1.
        worker: `DecodeNode.peer_id` of rank 0; this rank receives in its name.

    Raises ConfigError: a pool that is not this rank's share or cannot be registered.
    """

    leader = "DecodeNode"
    transfers: DecodeTransfers

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig,
        mesh: Mesh,
        rank: int,
        worker: PeerId,
        state: StatePool | None = None,
    ) -> None:
        check_kind("config", config, DecodeConfig)
        check_kind("worker", worker, PeerId)
        super().__init__(pool, state, rank)
        spec = RankSpec.of(pool, config.model, mesh, rank, state)
        self._host: HostMemory | None = None
        # If a part fails, those before it are undone.
        with ExitStack() as undo:
            host_pages = 0
            if config.host_memory is not None:
                self._host = HostMemory(pool, config.host_memory, f"{config.name}/{rank}")
                undo.callback(self._host.close)
                host_pages = self._host.num_pages
            sizes = rank_sizes("decode", pool, config.max_running, spec.num_slots, host_pages)
            self.follower = RowFollower(sizes)
            if self._host is not None:
                # Rank 0 knows of its own memory only, and orders copies once that can be used.
                self._host.wait_until_ready()
            self.transfers = DecodeTransfers(pool, config, mesh, rank, worker, state)
            undo.callback(self.transfers.close)
            if self._host is not None:
                self._host.start(self.transfers.thread.events.put)
            undo.pop_all()

    def apply(self, raw: bytes) -> None:
        """Apply to this rank's rows and rooms what rank 0 did in one pass (`DecodeNode.take_log`).

        Raises, with nothing changed, CallerError: a message that is none, names pages or rows that
        there are not, was left out, or comes twice; ConfigError: this rank was built with other
        sizes than rank 0's.
        """
        self.transfers.check_open()
        commands, copies = self.follower.apply(raw)
        for command in commands:
            self.transfers.submit(command)
        for order in copies:
            assert self._host is not None  # else there are no pages of it
            self._host.submit(order)

    @property
    def page_table(self) -> Pages:
        """Page ids, int32 [max_running, num_pages], by `DecodeRequest.row`, -1 where unused. Its
        memory never moves."""
        return self.follower.page_table

    def pages(self, row: int) -> Pages:
        """Return the page ids of the request in this row: a read-only view, valid until the next
        `apply`. Raises CallerError for a row without one."""
        return self.follower.pages(row)

    def window_pages(self, row: int, name: str) -> WindowPages:
        """Return the pages of the request in this row in a window group; see
        `DecodeRequest.window_pages`."""
        return self.follower.window_pages(row, name)

    def state_slot(self, row: int) -> int:
        """Return the slot of the request in this row; see `DecodeRequest.state_slot`."""
        return self.follower.state_slot(row)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._host is not None:
                self._host.close()
