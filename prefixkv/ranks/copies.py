"""Copies between the pools and the host memory of all ranks, joined to one end each. Pure.

Every rank copies its own part of the KV, from and to the same page numbers. What reads or fills a
page is over when it is on every rank, and good when it was good on every rank.
"""

from __future__ import annotations

from prefixkv.protocol.host_copy import HostCopyDone


class RankCopies:
    """Copies that have ended on some ranks and not on all. Owned by rank 0's scheduler thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ended: dict[int, dict[int, HostCopyDone]] = {}  # by copy, then by rank
        self._fenced: dict[int, Exception] = {}  # ranks whose process is dead

    def __len__(self) -> int:
        return len(self._ended)

    def on(self, rank: int, done: HostCopyDone) -> HostCopyDone | None:
        """Take the end of a copy on one rank. Return its end on all, None while one is missing."""
        if (ranks := self._ended.get(done.number)) is None:
            gone = self._fenced.items()
            ranks = {at: HostCopyDone(done.number, error, 0, 0.0) for at, error in gone}
            self._ended[done.number] = ranks
        ranks[rank] = done
        if len(ranks) < self._num_ranks:
            return None
        del self._ended[done.number]
        errors = (one.error for one in ranks.values() if one.error is not None)
        return HostCopyDone(
            done.number,
            next(errors, None),
            sum(one.num_bytes for one in ranks.values()),
            max(one.seconds for one in ranks.values()),
        )

    def fence(self, rank: int, error: Exception) -> list[HostCopyDone]:
        """Count every copy as ended with `error` on a dead rank. Return those that have ended on
        all with that."""
        self._fenced[rank] = error
        waiting = [number for number, ranks in self._ended.items() if rank not in ranks]
        ended = [self.on(rank, HostCopyDone(number, error, 0, 0.0)) for number in waiting]
        return [done for done in ended if done is not None]
