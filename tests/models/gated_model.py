"""The gated policy, page by page: what it remembers, and which page it would give up."""

from __future__ import annotations

from collections.abc import Hashable

from tests.models.radix_model import ModelPage, ModelUse, Place, Prefix, RadixModel, visits

FRESH_S, KNOWN_S = 10.0, 25.0
SHORT_PAGES = 2
BLOCK_PAGES, STRIDE_PAGES = 1, 3
GHOST_PAGES = 40


class GatedModel(RadixModel):
    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size, policy)
        self.ghosts: dict[tuple[int, Prefix], tuple[int, int, int]] = {}  # visits, length of path, pages it stands for

    def name(self, tokens: Prefix, depth: int) -> tuple[int, Prefix]:
        return depth, self.cut(tokens, depth)[-max(16, self.page_size) :]

    def look_up(self, use: ModelUse, tokens: Prefix, namespace: Hashable, old: int) -> list[int]:
        total = self.whole(tokens)
        found = []
        depth = (old // STRIDE_PAGES + 1) * STRIDE_PAGES
        while depth <= total and self.name(tokens, depth) in self.ghosts:
            found.append(depth)
            depth += STRIDE_PAGES
        last = [at for at in range(max(old, depth - STRIDE_PAGES) + 1, min(depth - 1, total) + 1)
                if self.name(tokens, at) in self.ghosts]  # fmt: skip
        found += last[-1:]
        ghosts = {at: self.ghosts[self.name(tokens, at)] for at in found}
        before = self.before(tokens, namespace, old)
        if not use.visit and before is not None and before.marks[old] not in ("closed", "continues"):
            kind = before.marks[old]
        else:
            known, path = old, before.covers if before is not None else -1
            if found:
                known, path = found[-1], ghosts[found[-1]][1]
            if total - known > SHORT_PAGES:
                kind = "long"
            else:
                kind = "next turn" if path == known else "ordinary"
        use.marks = {use.covers: kind}
        bases = [0] * use.covers
        if not use.brings:
            return bases
        if old:
            use.marks[old] = kind
        deepest_first = sorted(found, reverse=True)
        least = 1 if not found or found[-1] < use.covers else 0
        for depth in deepest_first:
            total_visits = max(least, ghosts[depth][0] + 1)
            if total_visits > least:
                use.marks[depth] = kind
                least = total_visits
            for at in range(old, depth):
                bases[at] = max(bases[at], ghosts[depth][0])
        for depth in found:
            del self.ghosts[self.name(tokens, depth)]
        return bases

    def before(self, tokens: Prefix, namespace: Hashable, depth: int) -> ModelUse | None:
        page = self.pages.get((namespace, self.cut(tokens, depth)))
        left_here = [use for use in page.uses if depth in use.marks] if page else []
        return max(left_here, key=lambda use: use.tick, default=None)

    def hint(self, tokens: Prefix, namespace: Hashable, depth: int, continues: bool) -> None:
        use = self.before(tokens, namespace, depth)
        if use is not None and use.covers == depth:
            use.marks[depth] = "continues" if continues else "closed"

    def gone(self, place: Place, page: ModelPage) -> None:
        depth, path = self.whole(place[1]), page.last.covers
        if depth % STRIDE_PAGES and depth != path:
            return
        self.ghosts.pop(self.name(place[1], depth), None)
        self.ghosts[self.name(place[1], depth)] = (visits(page), path, (depth - 1) % STRIDE_PAGES + 1)
        while sum(ghost[2] for ghost in self.ghosts.values()) > GHOST_PAGES:
            del self.ghosts[next(iter(self.ghosts))]

    def forget_all(self) -> None:
        self.ghosts.clear()

    def choose(self, unwanted: list[Place], now_s: float, likely: set[int]) -> Place:
        levels: dict[str, list[Place]] = {"closed": [], "fresh": [], "known": []}
        for place in unwanted:
            page = self.pages[place]
            kind = page.last.marks[max(page.last.marks)]
            if kind == "closed":
                level = "closed"
            elif kind == "continues" or visits(page) > 2:
                level = "known"
            elif visits(page) == 2:
                level = "fresh" if kind == "long" else "known"
            else:
                level = "known" if kind == "next turn" else "fresh"
            levels[level].append(place)
        for places in levels.values():
            places.sort(key=lambda place: self.pages[place].last.tick)
        if levels["closed"]:
            return levels["closed"][0]
        overdue = []
        for places, limit in ((levels["fresh"], FRESH_S), (levels["known"], KNOWN_S)):
            if places:
                late = now_s - self.pages[places[0]].last.now_s - limit
                overdue.append((-late, len(overdue), places[0]))
        if overdue and min(overdue)[0] < 0:
            return min(overdue)[2]
        if levels["fresh"]:
            return levels["fresh"][-1 if now_s > 0 else 0]
        return levels["known"][0]
