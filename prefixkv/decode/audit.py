"""The laws of decode's scheduler: pages, budget, queues and requests agree."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.inflight import InFlight
from prefixkv.decode.request import ACTIVE, CAN_RUN, DecodeRequest, DecodeState
from prefixkv.decode.room_numbers import RoomNumbers
from prefixkv.errors import check_laws
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager

_WAITS = frozenset({DecodeState.QUEUED, DecodeState.RETRACTED})


def check_decode(
    books: PageManager,
    budget: PreallocBudget,
    flights: InFlight,
    rooms: RoomNumbers,
    waiting: Iterable[DecodeRequest],
    requests: Collection[DecodeRequest],
    deferred: Collection[DecodeRequest],
) -> None:
    """Check these against each other; each checks itself elsewhere. Raises InternalError.

    `requests` live, `waiting` of them are queued; the pages of `deferred` are released later.
    """
    live = [*requests, *deferred]
    holding = list({id(req): req for req in live if req.pages_held is not None}.values())
    orphans = [flight for flight in flights if flight.owner is None]
    held = [req.pages_held for req in holding if req.pages_held is not None]
    held += [flight.pages for flight in orphans]
    own = sum(pages.num_own for pages in held)
    allocator, undrained = books.allocator, rooms.undrained()
    laws = {
        "every owned page is a request's, or a flight's without an owner": own
        == allocator.owned_pages,
        "every owned slot is a request's, or a flight's without an owner": books.slots is None
        or sorted(pages.slot for pages in held) == books.slots.pages_in(PageState.OWNED).tolist(),
        "every lock is a request's, or a flight's without an owner": books.cache.locks
        == {pages.lock for pages in held if pages.lock is not None},
        "every row is a request's, or a flight's without an owner": books.table.free_rows
        == len(books.table.array) - len(held),
        "only undrained rooms hold pages": set(allocator.owners()) <= undrained,
        "a request's row is as long as its pages": all(
            books.table.length(pages.row) == pages.num_pages for pages in held
        ),
        "a queued request holds nothing, and is queued or retracted": all(
            req.pages_held is None and req.state in _WAITS for req in waiting
        ),
        "a preallocated request has a flight, and no other has": all(
            (req.state is DecodeState.PREALLOCATED) == (flights.of(req) is not None) for req in live
        )
        and sum(flights.of(req) is not None for req in live) == len(flights) - len(orphans),
        "the room of a flight without an owner is in use": all(
            flight.room_key in undrained for flight in orphans if flight.is_open
        ),
        "active counts the admitted requests": budget.active
        == sum(req.state in ACTIVE for req in requests),
        "a running request has the page that the next step writes to": all(
            req.pages_held.num_pages * books.page_size >= req.prompt_len + len(req.output)
            for req in requests
            if req.state in CAN_RUN and req.pages_held and req not in deferred
        ),
        "a request with a limit above 0 runs, and has the pages for that much output": all(
            req.state is DecodeState.RUNNING and req.output_limit <= req.most_output
            for req in live
            if req.output_limit
        ),
    }
    check_laws(laws, f"{own} own", allocator, list(requests))
