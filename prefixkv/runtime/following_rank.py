"""A rank above 0: its own pool, agent and rooms. The engine carries rank 0's log here, and what
became of the rooms back."""

from __future__ import annotations

from typing import Any, ClassVar

from prefixkv.control.lives import LostPeers
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import MAX_RANKS
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.events import CopyEnded
from prefixkv.protocol.host_copy import HostCopyDone
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.joined import pack_rank_events
from prefixkv.ranks.row_log import RowFollower
from prefixkv.runtime.one_thread import OneThread
from prefixkv.runtime.transfers import Transfers
from prefixkv.settings import check_whole


class FollowingRank(OneThread):
    """The base of DecodeRank and PrefillRank. Used from one thread."""

    any_thread = frozenset({"fileno", "lost_peers", "stats"})

    leader: ClassVar[str]  # class of rank 0
    transfers: Transfers[Any, Any, Any]
    follower: RowFollower

    def __init__(self, pool: KVPool, state: StatePool | None, rank: int) -> None:
        """Remember the memory; the subclass builds what follows rank 0, and transfers."""
        check_whole("rank", rank, 0, MAX_RANKS - 1)
        if rank == 0:
            raise ConfigError(f"rank is {rank}: rank 0 is a {self.leader}")
        self.pool, self.state, self.rank = pool, state, rank
        self._num_messages = 0  # counts batches of events, so that rank 0 notices a missing one

    @property
    def peer_id(self) -> PeerId:
        return self.transfers.peer_id

    def take_rank_events(self) -> bytes:
        """Return what became of this rank's rooms (and of decode's copies) since the last call, for
        rank 0's `apply_rank_events`; empty if nothing.

        Each result has to be applied, in order. Raises InternalError for an exception in the
        control thread; the events come next time.
        """
        events = self.transfers.take_events()
        if not events:
            return b""
        self._num_messages += 1
        # The threads that copy put their ends among the events of rooms.
        told = [CopyEnded(*one) if isinstance(one, HostCopyDone) else one for one in events]
        return pack_rank_events(self.rank, self._num_messages - 1, told)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there may be events for rank 0, at most `timeout_s`; return whether."""
        return self.transfers.wait(timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events. Any thread may ask."""
        return self.transfers.fileno()

    def lost_peers(self) -> LostPeers:
        """See the node's `lost_peers`. Any thread may ask."""
        return self.transfers.lost_peers()

    @property
    def num_rooms(self) -> int:
        """Number of rooms that are open, or not drained yet. Any thread may ask."""
        return self.transfers.num_rooms

    def stats(self) -> dict[str, int]:
        """Return the counters of the control thread. Any thread may ask."""
        return self.transfers.stats()

    def close(self) -> None:
        """Close the transfer side, with its threads. See `Node.close`."""
        self.transfers.close()
