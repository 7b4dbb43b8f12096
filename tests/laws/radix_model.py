"""A radix cache without a tree: a dictionary of prefixes, every page for itself, every use
remembered.

Slow and obvious. A page knows all uses that covered it; its rank is computed from them from
scratch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixkv.settings import CONTINUES_S

Prefix = tuple[int, ...]
Place = tuple[Hashable, Prefix]


@dataclass(eq=False)
class ModelUse:
    tick: int
    now_s: float
    visit: bool
    priority: int | None  # None: a lock
    brings: bool  # new pages
    covers: int  # pages
    marks: dict[int, Any] = field(
        default_factory=dict
    )  # depths at which it left something; what is for the policy
    known: Any = None  # to the policy
    goes_on_from: ModelUse | None = None  # a lock of the same request


@dataclass(eq=False)
class ModelPage:
    page_id: int
    born: int  # tick of the insertion
    base: Any = 0  # visits of an earlier life that were remembered
    uses: list[ModelUse] = field(default_factory=list)

    @property
    def last(self) -> ModelUse:
        return max(self.uses, key=lambda use: use.tick)


@dataclass(eq=False)
class ModelLock:
    place: Place
    orphan: dict[Place, ModelPage] | None = (
        None  # after a reset: the pages it shares with other orphans
    )
    use: ModelUse | None = None  # None: of nothing


def visits(page: ModelPage) -> int:
    """Requests that used the page: the one that brought it, and every first use of another."""
    return page.base + 1 + sum(use.visit for use in page.uses if use.tick != page.born)


def priority(page: ModelPage) -> int:
    return max(use.priority for use in page.uses if use.priority is not None)


RANKS: dict[str, Callable[[ModelPage, float], object]] = {
    "lru": lambda page, now_s: page.last.tick,
    "mru": lambda page, now_s: -page.last.tick,
    "fifo": lambda page, now_s: page.born,
    "filo": lambda page, now_s: -page.born,
    "lfu": lambda page, now_s: (visits(page), page.last.tick),
    "slru": lambda page, now_s: (visits(page) > 1, page.last.tick),
    "priority": lambda page, now_s: (priority(page), page.last.tick),
}


class RadixModel:
    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.policy = policy
        self.pages: dict[Place, ModelPage] = {}
        self.locks: list[ModelLock] = []
        self.wants: list[Place] = []
        self.tick = 0
        self.now_s = 0.0  # the latest
        # By the tick of a use that something was said of: when its session is due, whether it goes
        # first, and how many pages are not meant.
        self.said: dict[int, tuple[float, bool, int]] = {}

    # --- prefixes --------------------------------------------------------------------------------

    def cut(self, tokens: Prefix, num_pages: int) -> Prefix:
        return tokens[: num_pages * self.page_size]

    def whole(self, tokens: Prefix) -> int:
        return len(tokens) // self.page_size

    def match(self, tokens: Prefix, namespace: Hashable) -> int:
        """Pages of cached prefix."""
        depth = 0
        while depth < self.whole(tokens) and (namespace, self.cut(tokens, depth + 1)) in self.pages:
            depth += 1
        return depth

    def page_ids(self, tokens: Prefix, namespace: Hashable, depth: int) -> list[int]:
        return [self.pages[namespace, self.cut(tokens, at + 1)].page_id for at in range(depth)]

    def held(self, place: Place) -> bool:
        namespace, prefix = place
        return any(
            lock.orphan is None
            and lock.place[0] == namespace
            and lock.place[1][: len(prefix)] == prefix
            for lock in self.locks
        )

    def wanted(self, place: Place) -> bool:
        namespace, prefix = place
        return any(want[0] == namespace and want[1][: len(prefix)] == prefix for want in self.wants)

    def is_leaf(self, place: Place) -> bool:
        namespace, prefix = place
        longer = len(prefix) + self.page_size
        return not any(
            ns == namespace and len(p) == longer and p[: len(prefix)] == prefix
            for ns, p in self.pages
        )

    @property
    def protected_pages(self) -> int:
        return sum(self.held(place) for place in self.pages)

    # --- what changes it --------------------------------------------------------------------------

    def use(self, tokens: Prefix, namespace: Hashable, use: ModelUse) -> None:
        for at in range(use.covers):
            self.pages[namespace, self.cut(tokens, at + 1)].uses.append(use)

    def insert(
        self,
        tokens: Prefix,
        ids: list[int],
        namespace: Hashable,
        now_s: float = 0.0,
        priority: int = 0,
        lock: ModelLock | None = None,
        extend_lock: bool = False,
    ) -> int:
        """`lock`: the request's own, of the first of these tokens; of all of them from then on, if
        it is extended."""
        old = self.match(tokens, namespace)
        depth = self.whole(tokens)
        if not depth:
            return 0
        visit = not (old and self.held((namespace, self.cut(tokens, old))))
        self.tick += 1
        self.now_s = max(self.now_s, now_s)
        use = ModelUse(self.tick, now_s, visit, priority, depth > old, depth)
        if lock is not None and not visit:
            use.goes_on_from = lock.use
        bases = self.look_up(use, tokens, namespace, old)
        for at in range(old, depth):
            self.pages[namespace, self.cut(tokens, at + 1)] = ModelPage(
                ids[at], self.tick, bases[at]
            )
        self.use(tokens, namespace, use)
        if lock is not None and extend_lock:
            lock.place, lock.use = (namespace, self.cut(tokens, depth)), use
        return old

    def lock(self, tokens: Prefix, namespace: Hashable, now_s: float, visit: bool) -> ModelLock:
        depth = self.match(tokens, namespace)
        if depth:
            self.tick += 1
            self.now_s = max(self.now_s, now_s)
            use = ModelUse(self.tick, now_s, visit, None, False, depth)
            self.look_up(use, tokens, namespace, depth)
            self.use(tokens, namespace, use)
        lock = ModelLock((namespace, self.cut(tokens, depth)))
        if depth:
            lock.use = use
        self.locks.append(lock)
        return lock

    def look_up(self, use: ModelUse, tokens: Prefix, namespace: Hashable, old: int) -> list[Any]:
        """For policies that remember: complete the use; returns the visits remembered of each
        page."""
        use.marks = {use.covers: None}
        by_insertion = self.policy in ("fifo", "filo")
        if use.brings and (by_insertion or (self.policy in ("lfu", "slru") and not use.visit)):
            use.marks[old] = None  # what it says of old pages is other than of new ones
        return [0] * use.covers

    def before(self, tokens: Prefix, namespace: Hashable, depth: int) -> ModelUse | None:
        page = self.pages.get((namespace, self.cut(tokens, depth)))
        left_here = [use for use in page.uses if depth in use.marks] if page else []
        return max(left_here, key=lambda use: use.tick, default=None)

    def gone(self, place: Place, page: ModelPage) -> None:
        """For policies that remember: this page was evicted."""

    def unlock(self, lock: ModelLock) -> set[int]:
        self.locks.remove(lock)
        if lock.orphan is None:
            return set()
        freed = set()
        namespace, prefix = lock.place
        others = [other.place for other in self.locks if other.orphan is lock.orphan]
        for at in range(self.whole(prefix)):
            place = (namespace, self.cut(prefix, at + 1))
            if not any(ns == namespace and p[: len(place[1])] == place[1] for ns, p in others):
                freed.add(lock.orphan[place].page_id)
        return freed

    def victim(self, now_s: float, order: Sequence[int]) -> Place | None:
        """The page that goes next. Where rounding may decide (sums of worths), what is first in
        `order`, the pages that the cache chose."""
        leaves = [place for place in self.pages if self.is_leaf(place) and not self.held(place)]
        unwanted = [place for place in leaves if not self.wanted(place)]
        if not unwanted:
            return min(leaves, key=lambda place: self.pages[place].last.tick, default=None)
        # Hints say which page of a namespace goes, and the policy which namespace's turn it is.
        # That is tested by itself: here it is the one that the cache chose.
        if self.said:
            of_each = {
                place[0]: [one for one in unwanted if one[0] == place[0]] for place in unwanted
            }
            firsts = [self.first(pages, now_s, order) for pages in of_each.values()]
            chosen = [place for place in firsts if self.pages[place].page_id in order]
            return (chosen or firsts)[0]
        return self.choose(unwanted, now_s, order)

    def first(self, pages: list[Place], now_s: float, order: Sequence[int]) -> Place:
        """Of the pages of a namespace: of a session that has ended; else of one of which nothing
        was said, by the policy; else of the one that is due last."""
        ticks = {place: self.pages[place].last.tick for place in pages}
        nothing = -math.inf, False, 0
        said = {place: self.said.get(tick, nothing) for place, tick in ticks.items()}
        due_s = {place: due for place, (due, _, _) in said.items()}
        unsaid = [at for at in pages if due_s[at] < self.now_s or self.whole(at[1]) <= said[at][2]]
        going = [at for at in pages if said[at][1] and at not in unsaid]
        if going:
            return min(going, key=lambda place: (-due_s[place], ticks[place]))
        if unsaid:
            return self.choose(unsaid, now_s, order)
        return min(pages, key=lambda place: (-due_s[place], ticks[place]))

    def choose(self, unwanted: list[Place], now_s: float, order: Sequence[int]) -> Place:
        return min(unwanted, key=lambda place: RANKS[self.policy](self.pages[place], now_s))  # type: ignore[arg-type]

    def evict(self, num_pages: int, now_s: float, order: Sequence[int]) -> set[int]:
        taken: set[int] = set()
        self.now_s = max(self.now_s, now_s)
        while len(taken) < num_pages and (place := self.victim(now_s, order)) is not None:
            page = self.pages.pop(place)
            self.gone(place, page)
            depth = self.whole(place[1])
            for use in page.uses:
                for at in sorted(at for at in use.marks if at >= depth):
                    use.marks[depth - 1] = use.marks.pop(at)  # of two of one use, the deeper stays
            taken.add(page.page_id)
        return taken

    def reset(self) -> set[int]:
        freed = {page.page_id for place, page in self.pages.items() if not self.held(place)}
        for lock in self.locks:
            if lock.orphan is None:
                lock.orphan = self.pages
        self.pages = {}
        self.said.clear()
        self.forget_all()
        return freed

    def forget_all(self) -> None:
        """For policies that remember."""

    def hint(
        self, tokens: Prefix, namespace: Hashable, depth: int, continues: bool | float,
        is_parked: bool = False, keep_pages: int = 0,
    ) -> None:  # fmt: skip
        use = self.before(tokens, namespace, depth)
        if use is not None:
            in_s = CONTINUES_S if continues is True else float(continues)
            due_s = self.now_s + in_s if in_s else math.inf
            self.said[use.tick] = due_s, is_parked or not in_s, keep_pages
