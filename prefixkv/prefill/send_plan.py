"""The pages that each chunk sends: behind what decode has, a cursor that only grows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prefixkv.errors import RequestError, shown
from prefixkv.paging import MAX_INDEX, pages_for, whole_pages
from prefixkv.request import DeviceEvent, check_event, whole_number


class Span(NamedTuple):
    """Pages [first_page, end_page) of a request, counted from its first token; may be empty."""

    first_page: int
    end_page: int


class SendPlan:
    """The cursor of one request over the pages that its chunks send.

    A chunk inside what decode has sends nothing. A page partly computed waits for its rest. The
    last send is always made, even without pages, since the outcome and aux travel with it. Where
    decode's pages are smaller, it may have the first part of one of ours: that page is in the span,
    and `SenderMachine` sends its rest.

    >>> plan = SendPlan(num_tokens=100, decode_prefix_len=32, page_size=16)
    >>> plan.send(20), plan.send(70), plan.send(100, last=True)
    (Span(first_page=2, end_page=2), Span(first_page=2, end_page=4), Span(first_page=4, end_page=7))
    """

    __slots__ = ("computed", "cursor_page", "ended", "num_tokens", "page_size")

    def __init__(self, num_tokens: int, decode_prefix_len: int, page_size: int) -> None:
        if not 0 <= decode_prefix_len <= num_tokens:
            raise RequestError(
                f"decode_prefix_len is {decode_prefix_len}, the request has {num_tokens} tokens"
            )
        self.num_tokens = num_tokens
        self.page_size = page_size
        self.cursor_page = whole_pages(decode_prefix_len, page_size)
        self.computed = 0
        self.ended = False

    def send(self, end: int, last: bool = False) -> Span:
        """Return the pages to send, now that KV is computed up to token `end`. Raises RequestError,
        with nothing changed: after the last send; an `end` below the one before or beyond the
        request; a last send before its end."""
        if self.ended:
            raise RequestError("a chunk after the last one")
        if not self.computed <= end <= self.num_tokens:
            raise RequestError(
                f"a chunk ends at token {end}, it has to lie in [{self.computed}, "
                f"{self.num_tokens}]"
            )
        if last and end != self.num_tokens:
            raise RequestError(
                f"the last chunk ends at token {end}, the request has {self.num_tokens}"
            )
        # A partly computed page waits for its rest, but for the last page of the request.
        end_page = pages_for(end, self.page_size) if last else whole_pages(end, self.page_size)
        span = Span(self.cursor_page, max(self.cursor_page, end_page))
        self.cursor_page = span.end_page
        self.computed = end
        self.ended = last
        return span


class WindowPlan:
    """The cursor of one request over its pages in a window group that are sent.

    These are those of the window behind the prompt, whatever prefix decode has. Each goes with the
    chunk that completes it.

    `step_tokens`: most tokens that a chunk computes.

    >>> plan = WindowPlan(num_tokens=100, first_page=5, page_size=16, step_tokens=64)
    >>> plan.send(70), plan.send(96), plan.send(100, last=True)
    (Span(first_page=5, end_page=5), Span(first_page=5, end_page=6), Span(first_page=6, end_page=7))
    """

    __slots__ = ("cursor_page", "first_page", "num_tokens", "page_size", "step_tokens")

    def __init__(self, num_tokens: int, first_page: int, page_size: int, step_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.first_page = self.cursor_page = first_page
        self.page_size = page_size
        self.step_tokens = step_tokens

    def send(self, end: int, last: bool = False) -> Span:
        """Return the pages to send, now that KV is computed up to token `end`."""
        span = self.next(end, last)
        self.cursor_page = span.end_page
        return span

    def next(self, end: int, last: bool) -> Span:
        """Return what `send` would return, without a move of the cursor."""
        end_page = pages_for(end, self.page_size) if last else whole_pages(end, self.page_size)
        return Span(self.cursor_page, max(self.cursor_page, end_page))


def checked_chunk(
    end: int, state_slot: int, aux: bytes, last: bool, ready: DeviceEvent | None
) -> tuple[int, int, bytes]:
    """Return `end`, `state_slot` and `aux` as the types that travel. Raises RequestError for
    another type, an `aux` without `last`, and a `ready` without `query()`."""
    end = whole_number("end", end, 0, MAX_INDEX + 1)
    state_slot = whole_number("state_slot", state_slot, -1, MAX_INDEX + 1)
    if not isinstance(aux, bytes | bytearray | memoryview):
        raise RequestError(f"aux is a {type(aux).__name__}, bytes are needed")
    if not isinstance(last, bool):
        raise RequestError(f"last is {shown(last)}, True or False is needed")
    check_event("ready", ready)
    try:
        aux = bytes(aux)
    except (ValueError, BufferError) as error:  # a memoryview that was released
        raise RequestError(f"aux cannot be read: {error}") from None
    if aux and not last:
        raise RequestError("aux travels with the last chunk")
    return end, state_slot, aux


def plan_sends(
    ends: Iterable[int], num_tokens: int, decode_prefix_len: int, page_size: int
) -> list[Span]:
    """Return the spans of pages that chunks which end at these tokens are to send; one at the
    request's end is the last.

    >>> plan_sends([40, 100], num_tokens=100, decode_prefix_len=16, page_size=16)
    [Span(first_page=1, end_page=2), Span(first_page=2, end_page=7)]

    With all of it on decode the outcome alone is sent:

    >>> plan_sends([64, 128], num_tokens=128, decode_prefix_len=128, page_size=16)
    [Span(first_page=8, end_page=8), Span(first_page=8, end_page=8)]
    """
    plan = SendPlan(num_tokens, decode_prefix_len, page_size)
    return [plan.send(end, last=end == num_tokens) for end in ends]
