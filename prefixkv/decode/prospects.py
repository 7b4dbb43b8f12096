"""Pages that a waiting request can come to have, if the running ones give back theirs.

That is the whole pool, but for pages that only a proof, or a peer that does not answer, brings
back. A request that may need more waits aside: it holds up none, until such pages have come back or
its time is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefixkv.cache.releases import Releases
from prefixkv.cache.results import PrefixLock
from prefixkv.decode.host_tier import HostTier
from prefixkv.decode.inflight import InFlight
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.shares import PrefillShares
from prefixkv.pages.manager import PageManager


class Unproved(NamedTuple):
    """Pages that no request gives back, by reason."""

    held: int  # by rooms that have failed, until they are drained
    away: int  # promised to prefill workers that do not answer, and the prefixes locked for them
    stuck: int  # by requests with a broken device event, and the prefixes that they lock

    @property
    def total(self) -> int:
        return self.held + self.away + self.stuck


class Prospects:
    """Pages that can come back to a waiting request. Owned by the scheduler's thread.

    `stuck` returns the pages of requests with a device event that has raised, and enters their
    locks into the `Releases` that it is given. `host` holds pages for copies, which end by
    themselves.
    """

    def __init__(
        self,
        pages: PageManager,
        shares: PrefillShares,
        lanes: Lanes,
        flights: InFlight,
        stuck: Callable[[Releases], int],
        host: HostTier[PrefixLock] | None = None,
    ) -> None:
        self._host = host
        self._pages, self._shares, self._lanes = pages, shares, lanes
        self._flights, self._stuck = flights, stuck

    def unproved(self) -> Unproved:
        """Count the pages that no running request gives back. O(closed lanes, and requests that the
        device is busy with); where a lane is closed, also O(flights)."""
        pages, away, releases = self._pages.allocator, 0, Releases()
        # A prefill worker that does not answer may keep its flights open, and their pages, without
        # limit. Both counts share `releases`, since a prefix with two locks comes back only with
        # both.
        if closed := self._lanes.closed:
            for flight in self._flights:
                if flight.is_open and flight.has_room and flight.prefill in closed:
                    away += flight.pages.num_own + releases.end(flight.pages.lock)
        stuck = self._stuck(releases)
        held = pages.held_pages + pages.quarantined_pages
        if held and self._host is not None:
            held -= self._host.held_pages
        return Unproved(held, away, stuck)

    @property
    def most_pages(self) -> int:
        """Pages that a single waiting request can come to have at most."""
        return self._pages.num_pages - self.unproved().total

    def why(self) -> str:
        """Describe in words which pages cannot come back, and where they are; "" if there are
        none."""
        held, away, stuck = self.unproved()
        of = ", ".join(self._shares.owners())
        parts = [
            f"{held} are held for failed rooms until it is proved that nothing writes them"
            if held else "",
            f"{away} are promised to prefill workers that do not answer" if away else "",
            f"{stuck} wait for a device event that has raised" if stuck else "",
        ]  # fmt: skip
        missing = "; ".join(part for part in parts if part)
        if missing and of and (held or away):
            missing += f"; prefill workers that have pages in their power: {of}"
        return missing
