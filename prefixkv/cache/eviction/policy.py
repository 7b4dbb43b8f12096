"""What goes first when room is needed: a policy says what a use leaves behind and how to rank
histories.

Eviction always takes the last page of some leaf, so a prompt outlives the output it led to under
every policy. A policy sees uses and histories, never the tree: it cannot break it. What it raises
is caught, and raised once by a later call; the use then leaves no mark, and leaves that it did not
rank go first. To write one, derive from `Policy` or from a policy that is near it
(`plain.LeastRecentlyUsed`); hand an object to a cache, or name the class to `register_policy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Self, cast

from prefixkv.cache.eviction.queues import EvictionQueue, LeafHeap, Rank
from prefixkv.cache.node import Mark, Node
from prefixkv.errors import ConfigError
from prefixkv.registry import Registry

DEFAULT_POLICY = "adaptive"
"""What held up best in replays of unlike workloads (`adaptive.py`). It needs the time."""


@dataclass(slots=True, eq=False)
class Use:
    """One use of a path, as a policy sees it. One object, filled in anew for every use: a policy
    copies what it keeps.

    Attributes:
        tick: 1, 2, 3, ...: the order of uses. Two leaves never have the same last tick.
        now_s: the caller's clock; it never goes back.
        num_pages: pages that the use covers, from the root.
        old_pages: how many of them were in the tree before it; all of them for a lock.
        visit: whether it is the first use of its request. A request that locks, inserts and locks
            is seen once.
        priority: of an insertion; None for a lock.
        data: the packed tokens of the whole request, which may be more than the use covers.
        before: the mark on the last of the old pages, None if no use ended there; of an insertion
            that goes on from a lock of its request, the mark as that lock found or left it.
        tree_pages: pages in the tree.
    """

    tick: int = 0
    now_s: float = 0.0
    num_pages: int = 0
    old_pages: int = 0
    visit: bool = True
    priority: int | None = None
    data: bytes = b""
    before: Mark = None
    tree_pages: int = 0


class Policy(ABC):
    """The base of all policies; an object of it serves one cache.

    A use leaves one mark, on the last page it covers; the history of a page is the fold of all
    marks at it or below it, also of those below that are gone. `fold` therefore has to be
    associative. Keep it cheap: it runs in the scheduler's loop.

    A policy defines `mark`, `fold` and `last_tick`, and of the other methods those it needs.
    """

    name: str
    """What `register_policy` makes it known by."""

    supersedes = False
    """Whether a later mark makes those above it in the same node worthless (true if only the last
    use counts)."""

    ghost_pages = 0
    """Call `evicted` when pages go that end at a multiple of this depth; 0: never."""

    promise_s: float = 600.0
    """How long a session that was said to go on is kept for (`hints.py`)."""

    tells_returns = False
    """Whether it calls `came_back` with the tick of a use that another goes on from, also if its
    pages were evicted. Then hints count only while they come true (`hints.py`)."""

    came_back: Callable[[int], None] | None = None
    """The cache sets it at the first hint, if the policy `tells_returns`."""

    token_scale = 1
    """How many tokens one token of the cache stands for: several in a replay of block traces."""

    _serves_a_cache = False

    def serve(self, page_size: int, pool_pages: int | None) -> None:
        """Begin to serve a cache, which calls this when it is built.

        Raises:
            ConfigError: it serves another cache already, whose uses it has counted.
        """
        if self._serves_a_cache:
            raise ConfigError(
                f"policy {self.name!r} serves a cache already, each needs an object of its own"
            )
        self.bind(page_size, pool_pages)  # first: it may raise, and then serves none
        self._serves_a_cache = True

    def release(self) -> None:
        """The cache that it served was never used: what was built around it has failed."""
        self._serves_a_cache = False

    def another(self) -> Self:
        """An object with the same settings that has served no cache: for another rank of a worker.

        Raises:
            ConfigError: this one serves a cache, and it is no dataclass, whose fields are its
                settings.
        """
        if is_dataclass(self):
            return cast("Self", replace(cast("Any", self)))
        if self._serves_a_cache:
            raise ConfigError(f"policy {self.name!r} serves a cache already, and is no dataclass")
        return deepcopy(self)

    def bind(self, page_size: int, pool_pages: int | None) -> None:  # noqa: B027
        """Called once, when the cache that the policy is for is built."""

    @abstractmethod
    def mark(self, use: Use) -> Mark:
        """What this use leaves on the last page it covers."""

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        """(depth, mark) that an insertion of new pages leaves: `old_pages` <= depth, rising, the
        last at `num_pages`.

        Histories add up downwards, so what is counted of the new pages only is taken off again at
        `old_pages`.
        """
        return ((use.num_pages, self.mark(use)),)

    @abstractmethod
    def fold(self, upper: Mark, lower: Mark) -> Mark:
        """The history that two marks make together."""

    def rank(self, history: Mark) -> Rank:
        """Where a page with this history stands: the least goes first. No two leaves may rank
        equal. By default the history itself."""
        return history

    @abstractmethod
    def last_tick(self, history: Mark) -> int:
        """The tick of the last use in a history."""

    def describe(self, history: Mark) -> str:
        """What a dump says of a history besides its age; begins with a comma if it says
        anything."""
        return ""

    def make_queue(self) -> EvictionQueue:
        """An empty queue; one order, by rank, is enough for most policies."""
        return LeafHeap(self.rank)

    def floor(self, steps: Sequence[tuple[int, Mark]], mark: Mark, low: int) -> int | None:
        """How far up the pages of a leaf go one after the other, since they have the same rank.

        Args:
            steps: (depth, mark) inside the leaf, rising, at least one: the page at `depth` and
                those above it have this mark folded with all below.
            mark: the history of the leaf's last page.
            low: no more than down to this depth goes now.
        Returns:
            The depth of the first step, from below, that changes the rank, or any from the last
            step to there; None: no step does.
        """
        return steps[-1][0]

    def evicted(self, node: Node, num_pages: int) -> None:  # noqa: B027
        """The last `num_pages` of a node, down to its `floor` at most, are about to go. The history
        of the last is `node.mark`."""

    def reset(self) -> None:  # noqa: B027
        """Forget everything."""

    def broken_laws(self) -> list[str]:
        """Laws of its own books that do not hold; for tests (`RadixCache.check_invariants`)."""
        return []


_POLICIES: Registry[Policy] = Registry("policy", Policy)  # type: ignore[type-abstract]
register_policy, policy_names, make_policy = _POLICIES.add, _POLICIES.names, _POLICIES.make
