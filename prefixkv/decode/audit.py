"""Laws between the parts of a scheduler: pages, budget, flights, rooms and requests agree."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import ACTIVE, CAN_RUN, DecodeRequest, DecodeState
from prefixkv.decode.rooms import Rooms
from prefixkv.errors import check_laws

_WAITS = frozenset({DecodeState.QUEUED, DecodeState.RETRACTED})


def check_decode(
    ledger: Ledger,
    rooms: Rooms,
    waiting: Iterable[DecodeRequest],
    requests: Collection[DecodeRequest],
    deferred: Collection[DecodeRequest],
) -> None:
    """Check pages, budget, flights, rooms, shares and requests against each other. Raises
    InternalError.

    `waiting` of the `requests` are queued; the pages of `deferred` are released later.
    """
    page_manager, budget, flights = ledger.pages, ledger.budget, ledger.flights
    host, points = ledger.host, ledger.points
    # A request that was retracted, and waits for the device, is in both `requests` and `deferred`:
    # it is counted once, by identity.
    live = [*requests, *deferred]
    holding = list({id(req): req for req in live if req.pages_held is not None}.values())
    # Pages may be in a prefill worker's power only while a room is open, or failed and not drained.
    undrained = rooms.undrained()
    flying = {flight.room_key for flight in flights if flight.is_open and flight.has_room}
    ledger.workers.check_invariants(flying | undrained)
    if points is not None:
        points.check_invariants(list({id(req): req for req in live}.values()))
    # Pages have three kinds of owners: requests, flights that lost their request, and undrained
    # rooms. The last are the allocator's to count, as held.
    orphans = [flight for flight in flights if flight.owner is None]
    held = [req.pages_held for req in holding if req.pages_held is not None]
    held += [flight.pages for flight in orphans]
    own = sum(pages.num_own for pages in held)
    allocator = page_manager.allocator
    pins = set() if host is None else host.pins
    loads = set() if host is None else host.loads
    held_by = set() if host is None else host.held_by
    table = page_manager.table
    # A page that no law finds an owner for has leaked; one that two find would be freed twice.
    laws = {
        "every owned page is a request's, or a flight's without an owner": own
        == allocator.owned_pages,
        "every lock is a request's, a flight's without an owner, or a copy's": (
            page_manager.cache.locks
            == {pages.lock for pages in held if pages.lock is not None} | pins
        ),
        "every row is a request's, or a flight's without an owner": table.free_rows
        + table.free_spare_rows
        == len(table.array) - len(held),
        "only undrained rooms hold pages, and loads that nothing waits for": held_by
        <= set(allocator.owners())
        <= undrained | held_by,
        "T5 what waits for a load has one under way": {
            flight.room_key for flight in flights if flight.is_load and flight.is_open
        }
        == loads - held_by,
        "T2 a load fills the pages of its flight": host is None
        or all(
            host.fills(flight.room_key, page_manager.pages(flight.pages)[flight.start_pages :])
            for flight in flights
            if flight.is_load and flight.is_open
        ),
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
        "the room of a flight without an owner is in use": all(
            flight.room_key in undrained for flight in orphans if flight.is_open and flight.has_room
        ),
        "what prefill may write, it does not compute here": not any(
            flight.is_local and allocator.held_by(flight.room_key).size for flight in flights
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
