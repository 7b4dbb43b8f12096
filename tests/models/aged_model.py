"""The aged policy, page by page: every page knows when it was visited, in earlier lives too."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tests.models.ghost_model import GhostModel
from tests.models.radix_model import ModelPage, ModelUse, Place, Prefix

HALF_LIFE_S = 430.0


class AgedModel(GhostModel):
    def visited_s(self, page: ModelPage) -> list[float]:
        """When: before it came back, when it was brought, and whenever a request began with it."""
        return page.base + [use.now_s for use in page.uses if use.visit or use.tick == page.born]

    @staticmethod
    def worth(visited_s: list[float], now_s: float) -> float:
        return sum(0.5 ** ((now_s - visit_s) / HALF_LIFE_S) for visit_s in visited_s)

    def look_up(self, use: ModelUse, tokens: Prefix, namespace: Hashable, old: int) -> list[Any]:
        use.marks = {use.covers: None}
        bases: list[list[float]] = [[] for _ in range(use.covers)]
        if use.brings:
            found = self.find(tokens, old)
            for depth, visited_s in found:
                for at in range(old, depth):
                    bases[at] = max(
                        bases[at], visited_s, key=lambda visits_s: self.worth(visits_s, use.now_s)
                    )
            self.come_back(tokens, found)
        return bases

    def gone(self, place: Place, page: ModelPage) -> None:
        self.remember(place, page.last.covers, self.visited_s(page))

    def choose(self, unwanted: list[Place], now_s: float, likely: set[int]) -> Place:
        """Where rounding may decide, one of those that are likely."""
        ranks = {
            place: (
                self.worth(self.visited_s(self.pages[place]), now_s),
                self.pages[place].last.tick,
            )
            for place in unwanted
        }
        least = min(unwanted, key=lambda place: ranks[place])
        near = [place for place in unwanted if ranks[place][0] <= ranks[least][0] * (1 + 1e-9)]
        return next((place for place in near if self.pages[place].page_id in likely), least)
