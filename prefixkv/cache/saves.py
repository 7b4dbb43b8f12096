"""What a page manager keeps besides pages, for requests to go on from: nothing by itself."""

from __future__ import annotations

from collections.abc import Sequence

from prefixkv.paging import PageIds, Pages


class Saves:
    """Without a slot nothing is kept. A part that keeps something overrides this."""

    num_slots = 0
    evicted = 0  # given up for others
    cut_tokens = 0  # cached, and computed again: nothing that was kept lay behind them

    def __len__(self) -> int:
        return 0

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evict until each window group has as many free pages as it needs. Return whether."""
        return True

    def dropped(self, pages: PageIds) -> None:
        """These pages have left the tree."""

    def reset(self) -> None:
        """The tree was emptied."""

    def kept(self, number: int) -> list[tuple[Pages, bool]]:
        """Return what is kept of the pages of this window group, each with whether they are pinned;
        for audits."""
        return []

    def check_invariants(self) -> None:
        """Raise InternalError if a law is broken. O(tree)."""
