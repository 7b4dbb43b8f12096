"""Copies between the pools and the host memory of all ranks of a decode worker, joined to one end
each. Pure.

Every rank copies its own part of the KV, from and to the same page numbers. What reads or fills a
page is over when it is on every rank, and good when it was good on every rank.
"""

from __future__ import annotations

from prefixkv.protocol.host_copy import HostCopyDone


class RankCopies:
    """Copies of host memory that have ended on some ranks and not on all. Owned by rank 0's
    scheduler thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ended: dict[int, dict[int, HostCopyDone]] = {}  # by copy, then by rank

    def __len__(self) -> int:
        """Return the number of copies of host memory that some rank has ended, and not all."""
        return len(self._ended)

    def on(self, rank: int, done: HostCopyDone) -> HostCopyDone | None:
        """Join the end of a copy of host memory on one rank with those on the others. Return its
        end on all of them, None while one is missing."""
        ranks = self._ended.setdefault(done.number, {})
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
