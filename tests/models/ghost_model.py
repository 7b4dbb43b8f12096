"""What the models of policies that remember evicted pages share: the ghosts, page by page."""

from __future__ import annotations

from typing import Any

from tests.models.radix_model import ModelPage, Place, Prefix, RadixModel

BLOCK_PAGES, STRIDE_PAGES = 1, 3
GHOST_PAGES = 40


class GhostModel(RadixModel):
    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size, policy)
        self.ghosts: dict[
            tuple[int, Prefix], tuple[int, Any]
        ] = {}  # depth, what the policy wants to know again

    def name(self, tokens: Prefix, depth: int) -> tuple[int, Prefix]:
        return depth, self.cut(tokens, depth)[-max(16, self.page_size) :]

    def find(self, tokens: Prefix, old: int) -> list[tuple[int, Any]]:
        """(depth, what is known) of the ghosts after the first `old` pages, rising."""
        total = self.whole(tokens)
        found = []
        depth = (old // STRIDE_PAGES + 1) * STRIDE_PAGES
        while depth <= total and self.name(tokens, depth) in self.ghosts:
            found.append(depth)
            depth += STRIDE_PAGES
        last = [at for at in range(max(old, depth - STRIDE_PAGES) + 1, min(depth - 1, total) + 1)
                if self.name(tokens, at) in self.ghosts]  # fmt: skip
        return [self.ghosts[self.name(tokens, at)] for at in found + last[-1:]]

    def come_back(self, tokens: Prefix, found: list[tuple[int, Any]]) -> None:
        for depth, _ in found:
            del self.ghosts[self.name(tokens, depth)]

    def remember(self, place: Place, path: int, known: Any) -> list[tuple[int, Any]]:
        """A page whose last path had `path` pages was evicted; returns the ghosts that are
        forgotten for it."""
        depth = self.whole(place[1])
        if depth % STRIDE_PAGES and depth != path:
            return []
        self.ghosts.pop(self.name(place[1], depth), None)
        self.ghosts[self.name(place[1], depth)] = (depth, known)
        forgotten = []
        while (
            sum((depth - 1) % STRIDE_PAGES + 1 for depth, _ in self.ghosts.values()) > GHOST_PAGES
        ):
            forgotten.append(self.ghosts.pop(next(iter(self.ghosts))))
        return forgotten

    def forget_all(self) -> None:
        self.ghosts.clear()

    @staticmethod
    def deepest_mark(page: ModelPage) -> Any:
        """What the last use of a page left, where it ended."""
        return page.last.marks[max(page.last.marks)]
