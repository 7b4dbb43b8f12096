"""Pages with KV that decode has computed itself, and prefill has not.

Where a later prompt goes on behind such pages and is asked of prefill, prefill computes both, and
the pages are noted no more. It only tells how long a transfer is likely to take, so eviction leaves
it alone: what is evicted and used again stays noted until prefill is next asked for it.
"""

from __future__ import annotations

import numpy as np

from prefixkv.paging import Pages


class UnsentPages:
    """The pages that decode has computed and prefill has not. Owned by the scheduler's thread."""

    def __init__(self, num_pages: int) -> None:
        self._flags = np.zeros(num_pages, np.bool_)
        self.has_any = False  # where it is False, no call need look at them

    def computed(self, pages: Pages) -> None:
        self._flags[pages] = True
        self.has_any = True

    def sent(self, pages: Pages) -> None:
        """Note that prefill has computed the prompt of these pages to its end."""
        if self.has_any:
            self._flags[pages] = False
            self.has_any = bool(self._flags.any())

    def count(self, pages: Pages) -> int:
        """Count the pages of a prompt's path that prefill would compute again: those from the first
        on that it has not. O(pages), where there are any at all.

        >>> unsent, path = UnsentPages(8), np.array([3, 5, 1, 6])
        >>> unsent.computed(path[1:3])
        >>> unsent.count(path)
        3
        """
        if not self.has_any or not len(pages):
            return 0
        flags = self._flags[pages]
        first = int(flags.argmax())
        return len(pages) - first if flags[first] else 0
