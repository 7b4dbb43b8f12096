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
) -> None:
    """Check that each of these runs, and give each a page for one more token if it needs one.

    `running` gives all that run, the oldest first. Raises as `DecodeScheduler.append_many` does.
    """
    page_size, transferred = books.page_size, DecodeState.TRANSFERRED
    grows: list[RequestPages] = []
    growing: list[str] = []
    for req in reqs:
        if req.state not in CAN_RUN:
            raise RequestError(f"request {req.rid!r} is {req.state.value}, it does not run")
        if len(req.output) >= req.max_new_tokens:
            raise RequestError(f"request {req.rid!r} has its {req.max_new_tokens} tokens")
        pages = req.pages_held
        assert pages is not None
        if req.prompt_len + len(req.output) >= pages.num_pages * page_size:
            grows.append(pages)
            growing.append(req.rid)
    if len(grows) > books.available_pages:
        free, evictable = books.allocator.free_pages, books.cache.evictable_pages
        raise OutOfPagesError(len(grows), free, evictable, retract=_best_to_retract(running()))
    if grows:
        books.grow_many(grows, now_s)
        budget.grow_many(growing)
    for req in reqs:
        if req.state is transferred:
            req.become(DecodeState.RUNNING)
            journal.runs(req, now_s)
        req.output_limit = req.most_output


def _best_to_retract(running: Iterable[DecodeRequest]) -> tuple[str, ...]:
    """Running requests by the pages that retraction frees, most first; the oldest never."""
    younger = list(running)[1:]
    younger.sort(key=lambda req: req.pages_held.num_own if req.pages_held else 0, reverse=True)
    return tuple(req.rid for req in younger)
