"""Limit on the part of the pool that each prefill worker may have in its power at once.

Pages are in a prefill worker's power from the promise until the transfer has succeeded, or until it
is proved that no write of it can land there any more. A worker that takes promises and never gives
that proof would come to have them all. So while other prefill workers are ready too, each has at
most its share: its requests wait for pages to come back, those of others do not.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Set
from typing import Final

from prefixkv.errors import InternalError
from prefixkv.protocol.ids import RoomKey

_MAX_KNOWN: Final = 1024  # addresses; the one named longest ago goes first


class PrefillShares:
    """Pages promised to each prefill worker, by its address. Owned by the scheduler's thread.

    `most`: pages that one may have in its power while another is ready; infinity: no bound. One
    that has none may always be promised what a request needs. `ready`: the addresses of the ranks
    of prefill workers that answer now.
    """

    def __init__(
        self, most: float = math.inf, ready: Callable[[], Collection[str]] = tuple
    ) -> None:
        self.most = most
        self.version = 0  # grows whenever a worker that was refused may be promised more
        self._ready = ready
        self._answering: Collection[str] | None = None  # what `ready` returned in this pass
        self._rooms: dict[RoomKey, tuple[str, int]] = {}
        self._held_rooms: set[RoomKey] = set()  # rooms of `_rooms` that have failed
        self._pages: dict[str, int] = {}  # sums of `_rooms`, by address; none is 0
        self._refused: set[str] = set()  # addresses refused since pages of theirs came back
        self._named: OrderedDict[str, None] = OrderedDict()  # named by requests, latest last

    def name(self, address: str) -> None:
        """A request names this worker: while it answers, others are held to their shares."""
        self._named[address] = None
        # Addresses come from requests, so what is remembered of them is bounded.
        self._named.move_to_end(address)
        if len(self._named) > _MAX_KNOWN:
            self._named.popitem(last=False)

    def pages(self, address: str) -> int:
        """Return the number of pages that count against a worker's share."""
        return self._pages.get(address, 0)

    def new_pass(self) -> None:
        """Begin a pass of the queue: `ready` is called once in it at most."""
        self._answering = None

    def refuses(self, address: str, num_pages: int) -> bool:
        """Return True if `num_pages` more would exceed the share. O(1) if they would not."""
        held = self._pages.get(address)
        if held is None or held + num_pages <= self.most:
            return False
        # The share binds only while another worker that requests go to could use the pages.
        answering = self._answering = self._ready() if self._answering is None else self._answering
        if not any(other != address and other in self._named for other in answering):
            return False
        # Noted so that `version` grows only for pages of a worker that something waits for.
        self._refused.add(address)
        return True

    def promise(self, key: RoomKey, address: str, num_pages: int) -> None:
        if num_pages:
            self._rooms[key] = address, num_pages
            self._pages[address] = self._pages.get(address, 0) + num_pages

    def hold(self, key: RoomKey) -> None:
        """A transfer has failed: its held pages stay in the share. Unknown: no-op."""
        if key in self._rooms:
            self._held_rooms.add(key)

    def is_hopeless(self, address: str, num_pages: int) -> bool:
        """Return True if `num_pages` more exceed the share even after its transfers' end: pages
        held for failed rooms take it up. O(rooms that have failed)."""
        held = sum(
            self._rooms[key][1] for key in self._held_rooms if self._rooms[key][0] == address
        )
        return bool(held) and held + num_pages > self.most

    def owners(self) -> list[str]:
        """Return the addresses of workers with pages in their share, at most 8."""
        return sorted(self._pages)[:8]

    def release(self, key: RoomKey) -> None:
        """Take a room that succeeded or is drained out of the share. Unknown: no-op."""
        room = self._rooms.pop(key, None)
        self._held_rooms.discard(key)
        if room is not None:
            # A room comes back twice where a success is followed by its proof; the second call
            # finds nothing.
            address, num_pages = room
            self.version += address in self._refused
            self._refused.discard(address)
            self._pages[address] -= num_pages
            if not self._pages[address]:
                del self._pages[address]

    def check_invariants(self, rooms: Set[RoomKey]) -> None:
        """Check the sums against `rooms`, those that are open or undrained: no other may have pages
        in a worker's power. Raises InternalError."""
        sums: dict[str, int] = {}
        for address, num_pages in self._rooms.values():
            sums[address] = sums.get(address, 0) + num_pages
        is_known = self._held_rooms <= self._rooms.keys() <= rooms
        if sums != self._pages or not is_known:
            raise InternalError(f"{self._pages} pages by prefill worker, by room {self._rooms}")
