"""Waiting requests whose cached prefixes the tree evicts last (`RadixCache.want`).

They are entered before an admission evicts, and after a pass that leaves requests waiting. A
request that is admitted from free pages in the first pass after it came is never entered.
"""

from __future__ import annotations

from prefixkv.decode.lanes import LEFT, NOT_ENTERED, Waiter
from prefixkv.pages.manager import PageManager

MAX_WANTS = 128  # prefixes that one `enter` enters at most


class Wants:
    """The wanted prefixes of waiting requests. Owned by a `DecodePreallocQueue`.

    `protects`: False where nothing is entered at all.
    """

    def __init__(self, pages: PageManager, protects: bool) -> None:
        self._pages = pages
        self.protects = protects and pages.caching
        self.not_entered: list[Waiter] = []  # not entered in the tree yet; some may have left

    def enter_soon(self, waiter: Waiter) -> None:
        """Note a request whose prefix the tree should learn is wanted at the next `enter`."""
        if self.protects and waiter.req.request.cacheable:
            self.not_entered.append(waiter)

    def enter(self) -> None:
        """Tell the tree which prefixes are wanted. O(1) or a match for each."""
        pages = self._pages
        # At most `MAX_WANTS` per call, which bounds the cost of a pass; the rest follow with later
        # passes.
        for waiter in self.not_entered[:MAX_WANTS]:
            if waiter.want == NOT_ENTERED:
                match = waiter.match
                if match is None:
                    match = waiter.match = pages.match(waiter.req.key)
                    assert match is not None
                waiter.want = pages.want(match)
        del self.not_entered[:MAX_WANTS]

    def admitting(self, waiter: Waiter) -> None:
        """Tell the tree what the others want, before an eviction that is due for this one."""
        if self.not_entered:
            # Its own match is about to be locked, so it needs no protection.
            if waiter.want == NOT_ENTERED:
                waiter.want = LEFT
            self.enter()

    def forget(self, waiter: Waiter) -> None:
        """Withdraw the want of a request that waits no longer."""
        if waiter.want > 0:
            self._pages.unwant(waiter.want)
        # It may still be in `not_entered`, where this mark makes `enter` pass over it.
        waiter.want = LEFT
