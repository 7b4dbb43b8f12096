"""Waiting requests that those that run cannot make room for: they hold up no other.

pages       one that may need more pages than can come back (`prospects.py`) leaves its lane
            until enough have been proved free
share       its prefill worker has its share of the pool (`shares.py`): its lane is limited, and
            waits; if the share is held without proof, the request waits aside alone
prefill     its prefill worker does not answer: its lane is closed (`lanes.py`)
"""

from __future__ import annotations

from typing import Final

from sortedcontainers import SortedList

from prefixkv.decode.lanes import Lane, Lanes, Waiter
from prefixkv.decode.prospects import Prospects
from prefixkv.decode.shares import PrefillShares

MAX_BACK: Final = 128
"""Requests that a pass brings back from aside."""

ASIDE_REASONS = ("pages", "share", "prefill")


class Aside:
    """Places of waiting requests: in a lane, or aside. Owned by the scheduler's thread."""

    def __init__(
        self, num_pages: int, lanes: Lanes, shares: PrefillShares, prospects: Prospects
    ) -> None:
        self._lanes = lanes
        self._shares = shares
        self._prospects = prospects
        # A waiter is in exactly one of: its lane, and these two.
        self._for_pages: SortedList = SortedList()  # (pages it may need, arrival, waiter)
        self._over_share: dict[Waiter, None] = {}
        self._shares_at = -1  # version of shares and lanes at which `_over_share` was tried
        self._most_pages = num_pages  # most that one request may get; set by each pass
        self.limited: dict[Lane, None] = {}  # their workers have their share; set by each pass
        self.stepped = dict.fromkeys(ASIDE_REASONS, 0)  # counts, by reason

    def enter(self, waiter: Waiter) -> None:
        """Put a waiter into its lane, or set it aside if it may need too many pages."""
        if waiter.req.max_pages > self._prospects.most_pages:
            self._set_aside(waiter)
            return
        self._lanes.enter(waiter)
        if not waiter.lane.is_open:
            self.stepped["prefill"] += 1

    def leave(self, waiter: Waiter) -> None:
        """Take a waiter out of the one place where it stands."""
        if not waiter.is_aside:
            self._lanes.leave(waiter)
            return
        waiter.is_aside = False
        if waiter in self._over_share:
            del self._over_share[waiter]
        else:
            self._for_pages.remove((waiter.req.max_pages, waiter.arrival, waiter))

    def new_pass(self) -> bool:
        """Begin a pass: forget which lanes are limited, and put waiters back into their lanes where
        enough pages may come back. Moves `MAX_BACK` at most; returns False if more of them may."""
        self._shares.new_pass()
        self.limited.clear()
        self._most_pages = self._prospects.most_pages
        # 1. Those over their share, all at once, and only when a share or a lane has changed:
        # before that they would step aside again.
        shares_at = self._shares.version + self._lanes.version
        if self._shares_at != shares_at:
            self._shares_at = shares_at
            for waiter in self._over_share:
                waiter.is_aside = False
                self._lanes.enter(waiter)
            self._over_share.clear()
        # 2. Those that need too many pages, by what they need: behind the first that cannot return
        # none can.
        for _ in range(MAX_BACK):
            if not self._for_pages or self._for_pages[0][0] > self._most_pages:
                return True
            _, _, waiter = self._for_pages.pop(0)
            waiter.is_aside = False
            self._lanes.enter(waiter)
        return False

    def step_aside(self, waiter: Waiter) -> bool:
        """Set a waiter that did not fit aside, if waiting for the running ones cannot help it.
        Return whether."""
        # 1. More pages than can come back without a proof.
        if waiter.req.max_pages > self._most_pages:
            self._lanes.leave(waiter)
            self._set_aside(waiter)
            return True
        # 2. It does not fit for another reason than its worker's share: pages will come back, so it
        # waits where it is.
        lane = waiter.lane
        if not self._shares.refuses(lane.address, waiter.new_pages):
            return False
        # 3. The share. If even the end of all its worker's transfers would not help, it waits
        # alone. Otherwise the whole lane does: what comes behind it there, and needs less, would
        # overtake it each time.
        self.stepped["share"] += 1
        if self._shares.is_hopeless(lane.address, waiter.new_pages):
            self._lanes.leave(waiter)
            waiter.is_aside = True
            self._over_share[waiter] = None
        else:
            self.limited[lane] = None
        return True

    def _set_aside(self, waiter: Waiter) -> None:
        waiter.is_aside = True
        self._for_pages.add((waiter.req.max_pages, waiter.arrival, waiter))
        self.stepped["pages"] += 1

    # --- what is aside ----------------------------------------------------------------------------

    def waits_for_pages(self, waiter: Waiter) -> bool:
        """Return True if a waiter is aside since it may need more pages than can come back."""
        return waiter.is_aside and waiter not in self._over_share

    def waits_for_share(self, waiter: Waiter) -> bool:
        return waiter.lane in self.limited or waiter in self._over_share

    def counts(self) -> dict[str, int]:
        """Count the waiters that hold up no others, by reason. Any thread may call it."""
        # Copies, since the scheduler's thread may change these while another thread counts.
        return {
            "pages": len(self._for_pages),
            "share": len(self._over_share)
            + sum(len(lane) for lane in list(self.limited) if lane.is_open),
            "prefill": sum(len(lane) for lane in self._lanes.all() if not lane.is_open),
        }

    def waiters(self) -> list[Waiter]:
        return [*(waiter for _, _, waiter in self._for_pages), *self._over_share]
