"""The order in which waiting requests are tried. A group is tried when the one before is empty:

    returned    admitted before (retracted, or to be asked for again): the last to return first
    overdue     the request that has waited longest, once that is `patience_s`
    the rest    in the order of an `AdmissionPolicy`

Only requests in an open lane (`lanes.py`) have a turn. Those of a limited lane (`aside.py`) wait
for their worker's share and hold up no others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from itertools import islice
from typing import Final

from prefixkv.admission import Admission, rank_as_tuple
from prefixkv.decode.lanes import Lane, Lanes, Waiter
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.shares import PrefillShares
from prefixkv.errors import UserErrors

MAX_WALK: Final = 128
"""Places of the order that a search looks at."""


class AdmissionOrder:
    """The order of waiting requests. Owned by the scheduler's thread.

    `patience_s`: a request that has waited this long is overtaken by nothing. `limited` lanes have
    no turn; none of a prefill worker's requests fits beyond its share. What `policy` raises is in
    `errors`.
    """

    def __init__(
        self,
        policy: Admission,
        patience_s: float,
        lanes: Lanes,
        limited: Collection[Lane],
        shares: PrefillShares,
        errors: UserErrors,
    ) -> None:
        self._policy = policy
        self._patience_s = patience_s
        self._lanes = lanes
        self._limited = limited
        self._shares = shares
        self._errors = errors

    # --- ranks ------------------------------------------------------------------------------------

    def rank(self, req: DecodeRequest, new_pages: int) -> tuple[float, ...]:
        """Return the policy's rank for a request of `new_pages`. Raises as it does."""
        return rank_as_tuple(self._policy.rank(req, new_pages))

    def renew(self, waiter: Waiter) -> bool:
        """Rank a waiter by its new estimate, and move it in its lane's order. Return True if its
        place is behind the old one. Where the policy raises it keeps its rank."""
        lane, before = waiter.lane, waiter.rank
        # Before the policy is called: one that raises each time would else stay the oldest, and get
        # all looks.
        lane.estimated.move_to_end(waiter)
        try:
            rank = self.rank(waiter.req, waiter.new_pages)
        except Exception as error:
            self._errors.caught(error)
            return False
        if rank != before:
            lane.order.remove(waiter.place)
            waiter.rank = rank
            lane.order.add(waiter.place)
        return before < rank

    # --- whose turn it is -------------------------------------------------------------------------

    def lanes(self) -> list[Lane]:
        """Return the lanes that have a turn."""
        return [lane for lane in self._lanes.busy if lane.waiting and lane not in self._limited]

    def first_of_all(self, now_s: float) -> Waiter | None:
        """Return the waiter that nothing may overtake now, or None. O(lanes)."""
        # The cases, in order:
        # 1. The last to come back.
        lanes = [lane for lane in self._lanes.busy if lane not in self._limited]
        returned = [lane.returned.peekitem(-1)[1] for lane in lanes if lane.returned]
        if returned:
            last: Waiter = max(returned, key=arrival_of)
            return last
        # 2. The oldest, if its patience is over.
        oldest = [lane.waiting.peekitem(0)[1] for lane in lanes if lane.waiting]
        if not oldest:
            return None
        first: Waiter = min(oldest, key=arrival_of)
        if first.req.arrived_s + self._patience_s <= now_s:  # as `overdue_s` has it
            return first
        # 3. The first in the policy's order, if the policy lets none overtake it.
        if not self._policy.overtakes:
            place = min(lane.order[0] for lane in lanes if lane.waiting)
            waiter: Waiter = place[-1]
            return waiter
        return None

    def overdue_s(self, after_s: float) -> float:
        """Return the first time after `after_s` at which a request may be overdue, and fit, though
        nothing else has changed. Infinity if there is none. O(lanes)."""
        if not self._policy.overtakes:
            return math.inf
        oldest = [lane.waiting.peekitem(0)[1] for lane in self.lanes()]
        times = [waiter.req.arrived_s + self._patience_s for waiter in oldest]
        return min((due_s for due_s in times if due_s > after_s), default=math.inf)

    def first_that_may_fit(
        self, version: int, limits: tuple[int, int], num_waiting: int
    ) -> Waiter | None:
        """Return the first waiter that fits by its estimate and got no look at this version. Walks
        at most `MAX_WALK` places.

        `limits`: the largest `Waiter.needed_pages` and `Waiter.most_pages` that can be admitted.
        """
        waiter: Waiter
        (space, most), shares = limits, self._shares
        lanes = [lane for lane in self._lanes.busy if lane.waiting and lane not in self._limited]
        if len(lanes) == num_waiting == 1:  # there is no choice to make
            waiter = lanes[0].order[0][-1]
            return waiter if waiter.seen_at != version else None
        # Lanes are merged lazily: the ranks of the first places of each were compared when they
        # entered.
        orders = [islice(lane.order, MAX_WALK) for lane in lanes]
        places = orders[0] if len(orders) == 1 else islice(heapq.merge(*orders), MAX_WALK)
        for _, _, waiter in places:
            if (
                waiter.most_pages <= most
                and waiter.needed_pages <= space
                and waiter.seen_at != version
                and not shares.refuses(waiter.lane.address, waiter.new_pages)
            ):
                return waiter
        return None


def arrival_of(waiter: Waiter) -> int:
    return waiter.arrival
