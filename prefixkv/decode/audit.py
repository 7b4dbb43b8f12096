"""Laws between the parts of a scheduler: pages, budget, flights, rooms and requests agree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from prefixkv.cache.results import PrefixLock
from prefixkv.decode.ending import Ending
from prefixkv.decode.flights import Source
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import ACTIVE, CAN_RUN, DecodeRequest, DecodeState
from prefixkv.decode.rooms import Rooms
from prefixkv.errors import check_laws
from prefixkv.protocol.ids import RoomKey

_WAITS = frozenset({DecodeState.QUEUED, DecodeState.RETRACTED})


def check_decode(
    ledger: Ledger,
    rooms: Rooms,
    sources: Sequence[Source],
    waiting: Iterable[DecodeRequest],
    requests: Collection[DecodeRequest],
    ending: Ending,
) -> None:
    """Check the sources, and pages, budget, flights, rooms and requests against each other. Raises
    InternalError.

    `waiting` of the `requests` are queued.
    """
    page_manager, budget, flights = ledger.pages, ledger.budget, ledger.flights
    # A request that was retracted, and waits for the device, is in both.
    deferred = ending.requests()
    live = list(dict.fromkeys([*requests, *deferred]))
    holding = [req for req in live if req.pages_held is not None]
    locks: set[PrefixLock] = set()
    held_by: set[RoomKey] = set()
    for source in sources:
        source.check_invariants(live)
        locks |= source.locks
        held_by |= source.held_by
    undrained = rooms.undrained()
    # Pages have three kinds of owners: requests, flights that lost their request, and undrained
    # rooms. The last are the allocator's to count, as held.
    orphans = [flight for flight in flights if flight.owner is None]
    held = [req.pages_held for req in holding if req.pages_held is not None]
    held += [flight.pages for flight in orphans]
    own = sum(pages.num_own for pages in held)
    allocator = page_manager.allocator
    table = page_manager.table
    # A page that no law finds an owner for has leaked; one that two find would be freed twice.
    laws = {
        "every owned page is a request's, or a flight's without an owner": own
        == allocator.owned_pages,
        "every lock is a request's, a flight's without an owner, or a copy's": (
            page_manager.cache.locks
            == {pages.lock for pages in held if pages.lock is not None} | locks
        ),
        "every row is a request's, or a flight's without an owner": table.free_rows
        + table.free_spare_rows
        == len(table.array) - len(held),
        "only undrained rooms hold pages, and loads that nothing waits for": held_by
        <= set(allocator.owners())
        <= undrained | held_by,
        "a request's row is as long as its pages": all(
            page_manager.table.length(pages.row) == pages.num_pages for pages in held
        ),
        "a queued request holds nothing, and is queued or retracted": all(
            req.pages_held is None and req.state in _WAITS for req in waiting
        ),
        "a preallocated request has a flight, and no other has": all(
            (req.state is DecodeState.PREALLOCATED) == (flights.of(req) is not None) for req in live
        )
        and sum(flights.of(req) is not None for req in live) == len(flights) - len(orphans),
        "what failed while it was computed has ended, and holds its pages": all(
            req.state.ended and req.pages_held is not None for req in ending.left
        ),
        "active counts the admitted requests": budget.active
        == sum(req.state in ACTIVE for req in requests),
        "no request has more pages than it may ever need": all(
            req.pages_held.num_pages <= req.max_pages for req in holding if req.pages_held
        ),
        "a running request has the page that the next step writes to": all(
            req.pages_held.num_pages * page_manager.page_size
            >= min(req.prompt_len + len(req.output), req.most_kv_len)
            for req in requests
            if req.state in CAN_RUN and req.pages_held and req not in deferred
        ),
        "a request with a limit above 0 runs, and has the pages for that much output": all(
            req.state is DecodeState.RUNNING and req.output_limit <= req.most_output
            for req in live
            if req.output_limit
        ),
        "a request's digest is its prompt's": all(req.is_named_right for req in requests),
    }
    check_laws(laws, f"{own} own", allocator, list(requests))
