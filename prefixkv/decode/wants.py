"""Which waiting requests the tree has been told of: what it has of them is evicted last
(`RadixCache.want`).

The tree is told before an admission evicts, and after a pass that leaves requests waiting; it is
not told of one that is admitted from free pages in the first pass after it came.
"""

from __future__ import annotations

from prefixkv.decode.lanes import GONE, UNSAID, Waiter
from prefixkv.pages.manager import PageManager

MAX_WANTS = 128  # prefixes that are said to be wanted at once


class Wants:
    """Owned by a `DecodePreallocQueue`. `protects`: whether anything is said at all."""

    def __init__(self, books: PageManager, protects: bool) -> None:
        self._books = books
        self.protects = protects and books.caching
        self.unsaid: list[Waiter] = []  # the tree does not know yet that they wait, if they do

    def say_soon(self, waiter: Waiter) -> None:
        if self.protects and waiter.req.request.cacheable:
            self.unsaid.append(waiter)

    def say(self) -> None:
        """Tell the tree what waits, the first to come first. O(1) a request, or a match."""
        books = self._books
        for waiter in self.unsaid[:MAX_WANTS]:
            if waiter.want == UNSAID:
                match = waiter.match
                if match is None:
                    match = waiter.match = books.match(waiter.req.key)
                    assert match is not None
                waiter.want = books.want(match)
        del self.unsaid[:MAX_WANTS]

    def admitting(self, waiter: Waiter) -> None:
        """An eviction is due for it: the others are said first, and this one is as good as gone."""
        if self.unsaid:
            if waiter.want == UNSAID:
                waiter.want = GONE
            self.say()

    def forget(self, waiter: Waiter) -> None:
        """It waits no longer."""
        if waiter.want > 0:
            self._books.unwant(waiter.want)
        waiter.want = GONE
