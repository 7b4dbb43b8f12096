"""The gated policy, page by page: what it remembers, and which page it would give up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tests.laws.ghost_model import GhostModel
from tests.laws.radix_model import ModelPage, ModelUse, Place, Prefix, visits

FRESH_S, KNOWN_S = 10.0, 25.0
SHORT_PAGES = 2


class GatedModel(GhostModel):
    def look_up(self, use: ModelUse, tokens: Prefix, namespace: Hashable, old: int) -> list[int]:
        total = self.whole(tokens)
        ghosts = self.find(tokens, old)
        found = [depth for depth, _ in ghosts]
        before = self.before(tokens, namespace, old)
        if use.goes_on_from is not None:
            kind = use.goes_on_from.marks[use.goes_on_from.covers]
        elif not use.visit and before is not None:
            kind = before.marks[old]
        else:
            known, last = old, before
            if found:
                known, (_, last) = ghosts[-1]
            path = last.covers if last is not None else -1
            if last is not None and path == known:
                self.goes_on_after(last.tick)
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
        least = 1 if not found or found[-1] < use.covers else 0
        for depth, (before_it_went, _) in reversed(ghosts):
            total_visits = max(least, before_it_went + 1)
            if total_visits > least:
                use.marks[depth] = kind
                least = total_visits
            for at in range(old, depth):
                bases[at] = max(bases[at], before_it_went)
        self.remove_found(tokens, ghosts)
        return bases

    def gone(self, place: Place, page: ModelPage) -> None:
        self.add_ghosts(place, page.last.covers, (visits(page), page.last))

    def choose(self, unwanted: list[Place], now_s: float, order: Sequence[int]) -> Place:
        levels: dict[str, list[Place]] = {"fresh": [], "known": []}
        for place in unwanted:
            page = self.pages[place]
            kind = self.deepest_mark(page)
            if visits(page) > 2:
                level = "known"
            elif visits(page) == 2:
                level = "fresh" if kind == "long" else "known"
            else:
                level = "known" if kind == "next turn" else "fresh"
            levels[level].append(place)
        for places in levels.values():
            places.sort(key=lambda place: self.pages[place].last.tick)
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
