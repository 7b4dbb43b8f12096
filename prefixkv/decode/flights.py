"""Pages on their way to decode, each brought once, and what brings them.

A *flight* is a segment of a plan on its way: pages of a row, and the `Source` that brings them. It
brings what is neither in the tree nor on its way, and *joins* the flight that brings the rest; it
is committed after that one. So flights form trees:

    a: [0, 9)    b joined a at 6: [6, 8)    c joined b at 8: [8, 12)

A plan's last flight has the owner. A flight that loses its request goes on while another waits for
it. One that will not arrive ends all that wait: their requests ask again.

A flight is complete when its pages are here and the flight that it joined is committed. To commit
it is to give its pages to the tree, where the flights that joined it find them.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from prefixkv.cache.events import EventFeed
from prefixkv.cache.radix_key import TOKEN_BYTES, RadixKey, Starts, common_pages
from prefixkv.cache.results import MatchResult, PrefixLock, Releases
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import RequestError, check_laws
from prefixkv.pages.manager import RequestPages
from prefixkv.paging import Pages
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.request import DeviceEvent, Request
from prefixkv.settings import Continues


class Release(enum.Enum):
    """What becomes of a flight's pages when it ends too early."""

    DROP = "drop"  # nothing can land any more: they are free
    HOLD = "hold"  # a peer or a copy may still write: the room key holds them until a proof
    AFTER_DEVICE = "after device"  # the engine may still write: they stay the request's


class Need(NamedTuple):
    """What a request lacks: tokens [start, end), behind what is shared, loads included. `key` has
    those that may be shared, `match` what is cached. `can_ask`: a prefill worker can be asked."""

    req: DecodeRequest
    key: RadixKey
    match: MatchResult | None
    start: int
    end: int
    can_ask: bool
    now_s: float


class Segment(NamedTuple):
    """Tokens [start, end) of a request, and the source that brings them. `found`: what the source
    begins from."""

    source: Source
    start: int
    end: int
    found: Any = None


class Source:
    """One way to get pages. A source that a configuration does not ask for is not in the list.

    The way of a request: `reach` (up to where), `is_best` (asked only where there are two ways),
    `begin`, `Flights.arrived` or `give_up`. What else it may hear of follows, and does nothing.
    """

    name: str
    setting = ""  # that asks for it
    sends = False  # over a link that others share, in pages that a peer writes
    # It brings no token to go on with, so another source has to follow. It takes a spare row of the
    # page table (`PageOptions.spare_rows`).
    brings_pages_only = False
    outlives_request = True  # goes on for those that joined, when the request ends
    is_own = False  # the engine computes it: it has the calls that are for that
    fails_over = False  # takes requests from a prefill worker that fails, or that name none
    most_alone = -1  # most tokens that it brings of a request without prefill; -1: none
    asks_late = False  # the engine submits a request to prefill once `pop_needs_prefill` returns it

    def reach(self, need: Need) -> Segment | None:
        """Return what the source can bring of a need; None: nothing. It may begin before it, at a
        page, if it is not `brings_pages_only`."""
        raise NotImplementedError

    def is_best(self, need: Need, segment: Segment) -> bool:
        """Tell whether this way, which another could take the place of, is to be taken."""
        return True

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        """Bring a flight, whose pages are taken; `Flights.arrived` ends it, now or later. What this
        raises fails the request. A source of whole prompts sets `flight.owner.aux`."""
        raise NotImplementedError

    def give_up(self, flight: Flight, error: Exception | None) -> Release:
        """End a flight. `error`: None if the source itself has failed it. A source that returns
        `HOLD` for a flight without a room gives it a `room_key` of its own, which `keeps` names,
        and releases the pages itself."""
        return Release.DROP

    def may_commit(self, flight: Flight) -> bool:
        """False while the device may still write what the commit would free."""
        return True

    def shared_key(self, req: DecodeRequest, key: RadixKey) -> RadixKey:
        """Return the part of a request's key that may be shared."""
        return key

    def takes_over(self, need: Need) -> int:
        """Return from which token on the source computes what another one has sent."""
        return need.end

    def asked(self, flight: Flight, end: int, now_s: float) -> None:
        """Prefill was promised the pages of a flight, up to token `end`."""

    def answered(self, flight: Flight, end: int, now_s: float) -> None:
        """Prefill has sent what it was asked for."""

    def unanswered(self, flight: Flight) -> None:
        """A promise has failed, or was withdrawn."""

    def new_pass(self, now_s: float) -> Iterable[tuple[DecodeRequest, Exception]]:
        """Return requests that would wait for ever: they fail. The beginning of a pass, in which a
        source also says what has come since the last one."""
        return ()

    def left(
        self, request: Request, key: RadixKey, now_s: float, continues: Continues, keep_tokens: int
    ) -> None:
        """A request has left this path to the tree, and the device is done with it. If its session
        has ended, the first `keep_tokens` are still of use."""

    def announced(self, session: str, namespace: Hashable, now_s: float) -> None:
        """The next turn of a session comes soon."""

    def flushed(self) -> None:
        """The tree was emptied."""

    def written(self, pages: Pages, after: DeviceEvent) -> None:
        """The device may write these pages until `after` is done."""

    def take_orders(self) -> list[Any]:
        """Return the copies to be made, and forget them."""
        return []

    def hear(self, event: Any, now_s: float) -> Flight | None:
        """Take what became of an order. Return the flight that it fails, with its owner."""
        return None

    def feeds(self, worker: PeerId) -> list[EventFeed]:
        return []

    def coming_pages(self, releases: Releases) -> int:
        """Count the pages that the source keeps, and gives back by itself."""
        return 0

    def wake_s(self) -> float:
        """When `new_pass` has something to do, at the latest."""
        return math.inf

    def keeps(self) -> tuple[Set[PrefixLock], Set[RoomKey]]:
        """Return the source's own locks in the tree, and the keys of flights that have ended, and
        hold pages, which the source gives back."""
        return set(), set()

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        """Check the source's own laws, and those of the requests that hold pages. Raises
        InternalError."""

    def opening(self, req: DecodeRequest, segment: Segment) -> None:
        """The pages of a request are taken next."""

    def stepped(self, reqs: Sequence[DecodeRequest], now_s: float) -> None:
        """The engine has appended tokens."""

    def committed(self, req: DecodeRequest, flight: Flight, now_s: float) -> None:
        """A request's KV is whole in the tree, under its lock; the engine runs it next."""

    def leaving(self, req: DecodeRequest, key: RadixKey, now_s: float) -> None:
        """A request leaves the whole pages of this key to the tree next, and its lock ends."""

    # Of the source that the engine computes for (`is_own`): what it hears of, and the calls, for
    # which see `DecodeScheduler`.

    def dropped(self, req: DecodeRequest) -> None:
        """A request's pages, or those of its flight, go elsewhere than to the tree."""

    def still_writes(self, req: DecodeRequest, after: DeviceEvent | None) -> DeviceEvent | None:
        """Return the event of all that the device may still write of a request that is cut short:
        `after`, and what it has computed of it."""
        return after

    def pop_local(self, now_s: float) -> Sequence[DecodeRequest]:
        return ()

    def chunk_tokens(self) -> int:
        return 0

    def computed(
        self, req: DecodeRequest, end: int, aux: bytes, after: DeviceEvent | None, now_s: float
    ) -> None:
        if not req.state.ended:
            raise self._not_mine(req)

    def _not_mine(self, req: DecodeRequest) -> RequestError:
        return RequestError(f"request {req.rid!r} is not computed here")

    def save_state(self, req: DecodeRequest, end: int) -> int:
        raise self._not_mine(req)

    def save_states(self, reqs: Iterable[DecodeRequest]) -> Sequence[tuple[int, int]]:
        return ()

    def has_new(self) -> bool:
        """True if `pop_local` returns something."""
        return False


@dataclass(slots=True, eq=False, repr=False)
class Flight:
    """Pages [start_pages, end_pages) of `key` on their way to the row of `pages`.

    `owner` is the request that runs once they are here; None: only other flights wait for them, or
    with `is_ahead` nothing does yet. `request` is the owner's, or of a load the one that it was
    begun for. `room_key` names the flight to its source, and holds its pages if it ends too early.
    `joined` brings what lies before `start_pages` and is not in the tree. `rest`: what follows in
    the same row, and is computed once the flight is here.
    """

    source: Source
    owner: DecodeRequest | None
    request: Request
    prefill: str
    room_key: RoomKey
    key: RadixKey
    pages: RequestPages
    start_pages: int
    end_pages: int
    joined: Flight | None
    rest: Segment | None = None
    number: int = 0
    is_open: bool = True  # until its pages are here, or its source has given up
    is_ahead: bool = False  # nothing waits for it yet
    waiters: dict[Flight, None] = field(default_factory=dict)  # flights that joined, oldest first

    def __repr__(self) -> str:
        pages = f"[{self.start_pages}, {self.end_pages})"
        return f"Flight({self.number}, {self.owner!r}, {pages} {self.source.name})"


class Flights:
    """All flights, an index of those that may be joined, and those that are complete. Owned by the
    scheduler's thread.

    A look-up is O(1) if nothing is found; else O(flights on the path), and a memcmp each.
    """

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self.starts: Starts[Flight] = Starts(page_size)  # of those that may be joined
        self._flights: dict[Flight, None] = {}
        self.by_owner: dict[DecodeRequest, Flight] = {}
        self.complete: deque[Flight] = deque()  # those to be committed, in order
        self._count = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """By number, of this moment: any thread may call it, the copy is made in one step."""
        return iter(list(self._flights))

    # --- looking ----------------------------------------------------------------------------------

    def find(self, key: RadixKey, start_pages: int) -> tuple[Flight | None, int]:
        """Return the flight that brings most of `key` beyond `start_pages`, and their common end in
        pages. (None, `start_pages`) if there is none.

        One flight may begin where another ends or is left: they are followed as far as they go, and
        the last one, which waits for those before, is returned.
        """
        found, end = None, start_pages
        if not self.starts:
            return found, end
        # No two that begin alike have the same first page: the other would have joined the first.
        # Also where the key ends: no flight begins with a partial page.
        while (flight := next(self.starts.at(key, end), None)) is not None:
            high = min(flight.end_pages, len(key.data) // self._page_bytes)
            found = flight
            end = common_pages(key.data, flight.key.data, end + 1, high, self._page_bytes)
        return found, end

    # --- the life of a flight ---------------------------------------------------------------------

    def enter(self, flight: Flight, shareable: bool) -> None:
        """Enter a flight; others may join it if it is `shareable` and brings a whole page."""
        self._count = flight.number = self._count + 1
        self._flights[flight] = None
        if flight.owner is not None:
            self.by_owner[flight.owner] = flight
        if flight.joined is not None:
            flight.joined.waiters[flight] = None
        # It can be found only if it brings a whole page: a partial one is never shared.
        if shareable and flight.start_pages < flight.end_pages:
            self.starts.add(flight, flight.key, flight.start_pages)

    def arrived(self, flight: Flight) -> None:
        """Note that a flight's pages are here."""
        flight.is_open = False
        # Else `commit` appends it, with the flight that it joined.
        if flight.joined is None:
            self.complete.append(flight)

    def disown(self, flight: Flight) -> None:
        """Take a flight's owner from it: its request ends, it continues for its waiters."""
        if flight.owner is not None:
            del self.by_owner[flight.owner]
            flight.owner = flight.rest = None

    def commit(self, flight: Flight) -> list[Flight]:
        """Take out a flight that is in the tree now, and return the flights that waited for it."""
        # From here on a match finds its pages in the tree, so no flight may be found for them.
        self._take_out(flight)
        waiters = list(flight.waiters)
        flight.waiters.clear()
        for waiter in waiters:
            waiter.joined = None
            if not waiter.is_open:
                self.complete.append(waiter)
        return waiters

    def remove(self, flight: Flight) -> list[Flight]:
        """Take out a flight that is not to be committed. Return the others that end with it, by
        number: those that wait for it, and those it waited for that nothing else needs."""
        gone = [flight, *self.waiting_for(flight)]
        # Upwards: a flight without an owner lived only for those that waited. The first that has an
        # owner, or another waiter, stays.
        needless = flight
        while (above := needless.joined) is not None:
            del above.waiters[needless]
            if above.owner is not None or above.waiters or above.is_ahead:
                break
            gone.append(above)
            needless = above
        # Links are cut only now: the walks above follow them.
        return sorted(self._cut(gone, gone)[1:], key=attrgetter("number"))

    def waiting_for(self, flight: Flight) -> list[Flight]:
        """Return the flights that wait for this one, directly or not."""
        found = list(flight.waiters)
        for one in found:  # the list grows as waiters of waiters come to light
            found.extend(one.waiters)
        return found

    def flush(self) -> list[Flight]:
        """Take out and return the flights that a flush ends, by number: none of their pages may go
        to the tree any more. Those without an owner, and those that wait, end. The others continue
        for their own request alone."""
        # What arrives later is of the old weights: a request that came after the flush must not
        # join it.
        for flight in self._flights:
            self.starts.discard(flight)
        gone = [one for one in self._flights if one.joined is not None or one.owner is None]
        return self._cut(gone, [*self._flights])

    def remove_all(self) -> list[Flight]:
        """Take out every flight. Return them by number."""
        return self._cut([*self], [*self])

    def _cut(self, gone: list[Flight], links: list[Flight]) -> list[Flight]:
        """Take out flights that are not to be committed; these `links` know of no others."""
        for flight in gone:
            self._take_out(flight)
        for flight in links:
            flight.joined = None
            flight.waiters.clear()
        return gone

    def _take_out(self, flight: Flight) -> None:
        del self._flights[flight]
        if flight.owner is not None:
            del self.by_owner[flight.owner]
        if not flight.is_open and flight in self.complete:
            self.complete.remove(flight)
        self.starts.discard(flight)

    # --- checks -----------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InternalError if a law of the flights or of the index is broken."""
        flights, size = self._flights, self._page_bytes
        self.starts.check_invariants({one: one.key for one in flights})
        arrived = [one for one in flights if not one.is_open and one.joined is None]
        laws = {
            "numbers count up": all(a.number < b.number for a, b in pairwise(flights)),
            "a request has the flight that it owns": self.by_owner
            == {one.owner: one for one in flights if one.owner is not None},
            "no two begin alike": all(
                [*self.starts.at(one.key, one.start_pages)] == [one] for one in self.starts
            ),
            "what has arrived and waits for nothing is complete": arrived
            == sorted(self.complete, key=attrgetter("number")),
        }
        check_laws(laws, list(flights))
        for flight in flights:
            above, owner = flight.joined, flight.owner
            laws = {
                "what it waits for is older, and knows of it": above is None
                or (above in flights and flight in above.waiters and above.number < flight.number),
                "what waits for it knows that": all(
                    waiter in flights and waiter.joined is flight for waiter in flight.waiters
                ),
                "what has joined shares pages that are on their way, and no other does": (
                    (flight.pages.num_joined > 0) == (above is not None)
                ),
                "what is joined is brought": above is None
                or (
                    above.start_pages < flight.start_pages <= above.end_pages
                    and flight.key.data.startswith(above.key.data[: flight.start_pages * size])
                    and flight.key.namespace == above.key.namespace
                ),
                "without an owner, another flight waits": bool(
                    owner or flight.waiters or flight.is_ahead
                ),
                "an owner's pages are the flight's": not owner or owner.pages_held is flight.pages,
            }
            check_laws(laws, flight, list(flights))
