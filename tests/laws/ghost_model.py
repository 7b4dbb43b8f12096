"""What the models of policies that remember evicted pages share: the ghosts, page by page."""

from typing import Any

from tests.laws.radix_model import Place, Prefix, RadixModel

BLOCK_PAGES, STRIDE_PAGES = 1, 3
GHOST_PAGES = 40


class GhostModel(RadixModel):
    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size, policy)
        self.ghosts: dict[
            tuple[int, Prefix], tuple[int, Any]
        ] = {}  # depth, what the policy wants to know again
        self.segments: dict[tuple[int, Prefix], tuple[int, Prefix]] = {}  # of ghosts of path ends

    def name(self, tokens: Prefix, depth: int) -> tuple[int, Prefix]:
        return depth, self.cut(tokens, depth)[-max(16, self.page_size) :]

    def segment(self, tokens: Prefix, depth: int) -> tuple[int, Prefix]:
        begin = max(BLOCK_PAGES, depth - depth % STRIDE_PAGES)
        return begin, self.cut(tokens, begin)[-8:]

    def find(self, tokens: Prefix, old: int) -> list[tuple[int, Any]]:
        """(depth, what is known) of the ghosts after the first `old` pages, rising."""
        total = self.whole(tokens)
        found = []
        depth = (old // STRIDE_PAGES + 1) * STRIDE_PAGES
        while depth <= total and self.name(tokens, depth) in self.ghosts:
            found.append(depth)
            depth += STRIDE_PAGES
        last = [at for at in range(max(old, depth - STRIDE_PAGES) + 1, min(depth - 1, total) + 1)
                if self.name(tokens, at) in self.ghosts
                and self.segment(tokens, at) in self.segments.values()]  # fmt: skip
        return [self.ghosts[self.name(tokens, at)] for at in found + last[-1:]]

    def remove_found(self, tokens: Prefix, found: list[tuple[int, Any]]) -> None:
        for depth, _ in found:
            self.drop(self.name(tokens, depth))

    def drop(self, name: tuple[int, Prefix]) -> tuple[int, Any]:
        self.segments.pop(name, None)
        return self.ghosts.pop(name)

    def add_ghosts(self, place: Place, path: int, known: Any) -> list[tuple[int, Any]]:
        """A page whose last path had `path` pages was evicted; returns the ghosts that are
        forgotten for it."""
        depth = self.whole(place[1])
        if depth % STRIDE_PAGES and depth != path:
            return []
        name = self.name(place[1], depth)
        if name in self.ghosts:
            self.drop(name)
        self.ghosts[name] = (depth, known)
        if depth % STRIDE_PAGES:
            self.segments[name] = self.segment(place[1], depth)
        forgotten = []
        while (
            sum((depth - 1) % STRIDE_PAGES + 1 for depth, _ in self.ghosts.values()) > GHOST_PAGES
        ):
            forgotten.append(self.drop(next(iter(self.ghosts))))
        return forgotten

    def forget_all(self) -> None:
        self.ghosts.clear()
        self.segments.clear()
