"""A page for the next token of each running request, or the names of those to retract for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.journal import DecodeJournal
from prefixkv.decode.request import CAN_RUN, DecodeRequest, DecodeState
from prefixkv.errors import OutOfPagesError, RequestError
from prefixkv.pages.manager import PageManager, RequestPages


def raise_output_limits(
    books: PageManager,
    budget: PreallocBudget,
    journal: DecodeJournal,
    reqs: Sequence[DecodeRequest],
    running: Callable[[], Iterable[DecodeRequest]],
    now_s: float,
) -> bool:
    """Check that each of these runs, and give each a page for one more token if it needs one; those
    that were aborted are left out, and whether there are some is returned.

    `running` gives all that run, the oldest first. Raises as `DecodeScheduler.append_many` does.
    """
    page_size, started, aborted = books.page_size, DecodeState.RUNNING, DecodeState.ABORTED
    grows: list[RequestPages] = []
    growing: list[str] = []
    new: list[DecodeRequest] = []  # their first token
    any_aborted = False
    for req in reqs:
        if req.state is not started:
            if req.state is aborted:
                any_aborted = True
                continue
            if req.state not in CAN_RUN:
                raise RequestError(f"request {req.rid!r} is {req.state.value}, it does not run")
            new.append(req)
        num_tokens = len(req.output)
        if num_tokens >= req.max_new_tokens:
            raise RequestError(f"request {req.rid!r} has its {req.max_new_tokens} tokens")
        pages = req.pages_held
        assert pages is not None
        if req.prompt_len + num_tokens >= pages.num_pages * page_size:
            grows.append(pages)
            growing.append(req.rid)
    if len(grows) > books.available_pages:
        free, evictable = books.allocator.free_pages, books.cache.evictable_pages
        raise OutOfPagesError(len(grows), free, evictable, retract=_best_to_retract(running()))
    if grows:
        books.grow_many(grows, now_s)
        budget.grow_many(growing)
    for req in new:
        req.become(started)
        journal.runs(req, now_s)
    for req in reqs:
        if req.state is started:
            assert req.pages_held is not None
            space = req.pages_held.num_pages * page_size - req.prompt_len
            req.output_limit = space if space < req.max_new_tokens else req.max_new_tokens
    return any_aborted


def _best_to_retract(running: Iterable[DecodeRequest]) -> tuple[str, ...]:
    """Running requests by the pages that retraction frees, most first; the oldest never."""
    younger = list(running)[1:]
    younger.sort(key=lambda req: req.pages_held.num_own if req.pages_held else 0, reverse=True)
    return tuple(req.rid for req in younger)
