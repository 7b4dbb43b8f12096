"""Which pages of the pool a waiting request can come to have, if the running ones give back theirs.

All but those that only a proof, or a peer that does not answer, brings back. A request that may
need more waits aside: it holds up none, until such pages have come back or its time is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefixkv.cache.releases import Releases
from prefixkv.decode.inflight import InFlight
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.shares import PrefillShares
from prefixkv.pages.manager import PageManager


class Unproved(NamedTuple):
    """Pages that no request gives back, by why."""

    held: int  # of rooms that have failed, until they are drained
    away: int  # promised to prefill workers that do not answer, and the prefixes locked for them
    stuck: int  # of requests whose device event has raised, and the prefixes that they lock

    @property
    def total(self) -> int:
        return self.held + self.away + self.stuck


class Prospects:
    """Owned by the scheduler's thread.

    Args:
        stuck: pages of requests whose device event has raised; the locks that it takes down are
            theirs.
    """

    def __init__(
        self,
        books: PageManager,
        shares: PrefillShares,
        lanes: Lanes,
        flights: InFlight,
        stuck: Callable[[Releases], int],
    ) -> None:
        self._books, self._shares, self._lanes = books, shares, lanes
        self._flights, self._stuck = flights, stuck

    def unproved(self) -> Unproved:
        """O(closed lanes, and requests that the device is busy with); where a lane is closed, also
        O(flights)."""
        pages, away, releases = self._books.allocator, 0, Releases()
        if closed := self._lanes.closed:
            for flight in self._flights:
                if flight.is_open and flight.prefill in closed:
                    away += flight.pages.num_own + releases.end(flight.pages.lock)
        stuck = self._stuck(releases)
        return Unproved(pages.held_pages + pages.quarantined_pages, away, stuck)

    @property
    def most_pages(self) -> int:
        """The most that one request can come to have."""
        return self._books.num_pages - self.unproved().total

    def why(self) -> str:
        """In words, which pages are missing and at whom; "" where none is."""
        held, away, stuck = self.unproved()
        of = ", ".join(self._shares.owners())
        parts = [
            f"{held} are held for failed rooms until it is proved that nothing writes them"
            if held else "",
            f"{away} are promised to prefill workers that do not answer" if away else "",
            f"{stuck} wait for a device event that has raised" if stuck else "",
        ]  # fmt: skip
        said = "; ".join(part for part in parts if part)
        if said and of and (held or away):
            said += f"; prefill workers that have pages in their power: {of}"
        return said
